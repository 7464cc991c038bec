"""The gradients of sparse attention, and the proxies' KL with its own, window of queries after window.

Kernels write parts, sums add them (`sums.py`). What memory the parts take is bounded by windows: per query its slots,
and per item of work a block of keys' gradients in fp32. A window's number of items is not known to the host, which
does not wait for the device; it has room for as many as there can be. Each query's own block and earlier ones are all
that it reads, so that a remote block is a whole one: there are no more of them than blocks of tokens.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from jaxtyping import Float32 as Scalars
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute import sums
from msa_kernels.cute.attend import Problem, Window, attend, room
from msa_kernels.cute.backward import backward
from msa_kernels.cute.compile import load
from msa_kernels.cute.index import TASK, TILE, Index, build
from msa_kernels.cute.kl import PART_SCALE, proxy_kl
from msa_kernels.cute.layout import make_layout
from msa_kernels.cute.merge import merge

PART_BYTES = 2**30
"""The most that the parts of a window take, if they are not to be cut into too many windows."""
PART_SHARE = 6
"""How many times the memory of the queries the parts of a window may take nevertheless."""
MOST_LINES = 2**31 - 1
"""Of a window's parts: the kernels count them in 32 bits."""


class Rows(NamedTuple):
    """Which of a query's slots hold parts."""

    own_slot: Ids[Tensor, "batch selection query"]
    """The slot of the query's own block, or -1."""
    counts: Ids[Tensor, "batch selection query"]
    """How many slots, from the first on."""


class Plan(NamedTuple):
    """The windows of a problem."""

    size: int
    """Tokens of a window, the last one has fewer; a multiple of what `index.build` needs."""
    items: int
    """The most items of work that a window can have."""
    windows: list[Window]

    @property
    def tokens(self) -> int:
        """Of the largest window."""
        return self.windows[0].end


def plan(problem: Problem, units: int, group: int, line_bytes: int, item_bytes: int) -> Plan:
    """Windows of nearly equal size, for parts of `line_bytes` a query, slot and head (`group` a unit), and of items."""
    batch, selections, sequence, slots = problem.blocks.shape
    total, block_size, ids = batch * sequence, problem.block_size, len(problem.starts)
    whole = total // block_size
    # A document adds one to the ids of blocks, whether it has tokens or not.
    spare = ids - whole + 2
    most = max(PART_BYTES, PART_SHARE * problem.q.numel() * problem.q.element_size())
    fixed = item_bytes * units * (whole + spare)
    lines = units * group * slots
    a_token = line_bytes * lines + item_bytes * units * (slots / TASK + 1 / block_size)
    fitting = min(max(most - fixed, most / 4) / a_token, MOST_LINES / lines)
    number = -(-total // max(int(fitting / TILE) * TILE, TILE))
    size = -(-total // (number * TILE)) * TILE
    windows = [Window(i, begin, min(begin + size, total)) for i, begin in enumerate(range(0, total, size))]
    tokens = windows[0].end
    edges = tokens * selections * slots
    remote = (edges // TASK + min(selections * whole, edges)) * (units // selections)
    return Plan(size, remote + units * min(ids, tokens // block_size + spare), windows)


def make_rows(problem: Problem) -> Rows:
    """Which slots of every query hold a block, for the sums, and where its own one stands."""
    own_slot, counts = (torch.empty(problem.blocks.shape[:3], dtype=torch.int32, device=problem.q.device) for _ in "ab")
    kernel = sums.Slots(problem.blocks.shape[3], problem.block_size)
    load(kernel)(problem.blocks, problem.first, problem.starts, own_slot, counts)
    return Rows(own_slot, counts)


def make_deltas(out: Float[Tensor, "token head dim"], dout: Float[Tensor, "token head dim"]) -> Scalars[Tensor, "t h"]:
    """The sum of out x dout over each row."""
    delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    load(sums.Deltas(_name(out), out.shape[2]))(out.flatten(0, 1), dout.flatten(0, 1), delta.flatten())
    return delta


def sum_queries(
    parts: Float[Tensor, "line dim"],
    rows: Rows,
    slots: int,
    window: Window,
    gradients: Float[Tensor, "token head dim"],
    units: int,
    scale: float,
    factors: Scalars[Tensor, "unit"] | None,
    *,
    eights: bool,
) -> None:
    """Write the gradients of a window's queries: the sums of their parts times `scale` and their unit's factor."""
    heads, dim = gradients.shape[1:]
    facts = _name(parts), _name(gradients), dim, heads // units, units, rows.counts.shape[1]
    kernel = sums.SumQueries(*facts, factors is not None, eights)
    load(kernel)(parts, rows.counts, factors, gradients, scale, window.begin, window.end, slots)


def sum_keys(
    problem: Problem,
    index: Index,
    window: Window,
    units: int,
    parts: tuple[Scalars[Tensor, "item block_size dim"], ...],
    kept: tuple[Scalars[Tensor, "token head dim"], ...],
    gradients: tuple[Float[Tensor, "token head dim"], ...],
    scale: float,
    factors: Scalars[Tensor, "head"] | None,
) -> None:
    """Add a window's parts to `kept`, or after the last window write gradients, the first tensor's times `scale`.

    The windows must come in their order; `kept` is not read if there is one only.
    """
    heads, dim = gradients[0].shape[1:]
    kernel = sums.SumKeys(
        _name(gradients[0]),
        dim,
        problem.block_size,
        units,
        problem.blocks.shape[1],
        heads,
        len(parts),
        factors is not None,
    )
    grid = problem.first, problem.starts, problem.ends
    both = [(*given, None)[:2] for given in (parts, kept, gradients)]
    load(kernel)(*both[0], index.tasks, index.task_ptr, *grid, factors, *both[1], *both[2], scale, *window)


def attention_gradients(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head dim"],
    blocks: Ids[Tensor, "batch selection sequence slot"],
    cu_seqlens: Ids[Tensor, "offsets"] | None,
    block_size: int,
    out: Float[Tensor, "batch sequence head dim"],
    lse: Scalars[Tensor, "batch sequence head"],
    dout: Float[Tensor, "batch sequence head dim"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from that of the output."""
    heads, dim, slots = q.shape[2], q.shape[3], blocks.shape[3]
    with torch.cuda.device(q.device):
        problem = _problem(q, k, v, blocks, cu_seqlens, block_size)
        units = max(blocks.shape[1], k.shape[2])
        windows = plan(problem, units, heads // units, dim * q.element_size(), 2 * block_size * dim * 4)
        index = build(problem.blocks, problem.first, problem.starts, windows.size, block_size=block_size)
        rows = make_rows(problem)
        out, dout, lse = (x.contiguous().flatten(0, 1) for x in (out, dout, lse))
        delta = make_deltas(out, dout)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        dq_parts = torch.empty(windows.tokens * heads * slots, dim, dtype=q.dtype, device=q.device)
        parts = _floats(2, windows.items, block_size, dim, like=q)
        kept = _floats(2, len(problem.q) if len(windows.windows) > 1 else 1, k.shape[2], dim, like=q)
        for window in windows.windows:
            backward(problem, index, window, dout, lse, delta, rows.own_slot, dq_parts, *parts)
            sum_queries(dq_parts, rows, slots, window, dq.flatten(0, 1), units, 1.0, None, eights=False)
            both = dk.flatten(0, 1), dv.flatten(0, 1)
            sum_keys(problem, index, window, units, parts, kept, both, 1.0, None)
    return dq, dk, dv


def divergence(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    lse: Float[Tensor, "batch sequence head"],
    blocks: Ids[Tensor, "batch selection sequence slot"],
    cu_seqlens: Ids[Tensor, "offsets"] | None,
    block_size: int,
    *,
    with_gradients: bool,
) -> tuple[Scalars[Tensor, "proxy"], Scalars[Tensor, "..."], Scalars[Tensor, "..."]]:
    """The KL of each proxy, and its gradients to each proxy's queries and keys (batch, sequence, proxy, proxy_dim).

    The latter in fp32, and before proxies that share keys are summed, as the upstream scalars are not known yet; empty
    without `with_gradients`.
    """
    _, _, num_proxies, dim = q_proxy.shape
    slots, width = blocks.shape[3], dim * q_proxy.element_size() if with_gradients else 0
    with torch.cuda.device(q.device):
        teacher = _problem(q, k, None, blocks, cu_seqlens, block_size)
        queries, keys, lse = (x.contiguous().flatten(0, 1) for x in (q_proxy, k_proxy, lse.float()))
        student = teacher._replace(q=queries, k=keys)
        windows = plan(teacher, num_proxies, 1, width + 4, block_size * dim * 4 if with_gradients else 4)
        index = build(teacher.blocks, teacher.first, teacher.starts, windows.size, block_size=block_size)
        rows = make_rows(teacher)
        inverse = (rows.counts > 0).sum((0, 2)).clamp(min=1).reciprocal().float()
        if num_proxies > len(inverse):
            inverse = inverse.repeat_interleave(num_proxies // len(inverse), output_size=num_proxies)
        (student_lse,) = _floats(1, *queries.shape[:2], like=q)
        (values,) = _floats(1, len(windows.windows), num_proxies, like=q)
        (value_parts,) = _floats(1, windows.items, like=q)
        dq, dk = _floats(2, *(q_proxy.shape if with_gradients else (0,)), like=q)
        dq_parts, dk_parts, kept = None, None, None
        if with_gradients:
            lines = windows.tokens * num_proxies * slots
            dq_parts = torch.empty(lines, dim, dtype=q_proxy.dtype, device=q.device)
            (dk_parts,) = _floats(1, windows.items, block_size, dim, like=q)
            (kept,) = _floats(1, len(queries) if len(windows.windows) > 1 else 1, num_proxies, dim, like=q)
        partial = room(student, windows.tokens)
        for window in windows.windows:
            attend(student, index, partial, window)
            merge(student, index, partial, window, None, student_lse)
            given = teacher, queries, keys, index, window, lse, student_lse, rows.own_slot
            proxy_kl(*given, dq_parts, dk_parts, value_parts)
            sum_values(teacher, index, window, value_parts, values)
            if dq_parts is not None and dk_parts is not None and kept is not None:
                scale, to_queries, to_keys = dim**-0.5, dq.flatten(0, 1), dk.flatten(0, 1)
                early = scale / PART_SCALE[_name(q_proxy)]
                sum_queries(dq_parts, rows, slots, window, to_queries, num_proxies, early, inverse, eights=True)
                sum_keys(teacher, index, window, num_proxies, (dk_parts,), (kept,), (to_keys,), scale, inverse)
        value = values.sum(0) * inverse
    return value, dq, dk


def sum_values(
    problem: Problem,
    index: Index,
    window: Window,
    parts: Scalars[Tensor, "item"],
    values: Scalars[Tensor, "window proxy"],
) -> None:
    """Write each proxy's sum over a window's items."""
    kernel = sums.SumValues(problem.block_size, values.shape[1], problem.blocks.shape[1])
    grid = problem.first, problem.starts, problem.ends
    load(kernel)(parts, index.tasks, index.task_ptr, *grid, values, *window)


def scale(
    gradients: Scalars[Tensor, "batch sequence proxy dim"],
    upstream: Float[Tensor, "proxy"],
    result: Float[Tensor, "batch sequence head dim"],
) -> None:
    """Write gradients times their proxy's upstream scalar, summed over the proxies of each head."""
    heads, dim = result.shape[2:]
    kernel = sums.Scale(_name(result), dim, gradients.shape[2], heads)
    with torch.cuda.device(result.device):
        load(kernel)(gradients.flatten(0, 1), upstream.float().contiguous(), result.flatten(0, 1))


def _problem(
    q: Tensor, k: Tensor, v: Tensor | None, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int
) -> Problem:
    grid = make_layout(cu_seqlens, q.shape[0], q.shape[1], block_size, q.device)
    tokens = [None if x is None else x.contiguous().flatten(0, 1) for x in (q, k, v)]
    assert tokens[0] is not None
    assert tokens[1] is not None
    return Problem(tokens[0], tokens[1], tokens[2], blocks.contiguous(), block_size, *grid)


def _floats(number: int, *shape: int, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=torch.float32, device=like.device) for _ in range(number))


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
