"""The gradients of sparse attention, and the proxies' KL with its own, window of queries after window.

Kernels write parts, sums add them (`sums.py`); windows bound what memory the parts take (`windows.py`).
"""

import torch
from jaxtyping import Float
from jaxtyping import Float32 as Scalars
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute import sums
from msa_kernels.cute.attend import Problem, Window
from msa_kernels.cute.backward import backward
from msa_kernels.cute.compile import load
from msa_kernels.cute.index import Index
from msa_kernels.cute.kl import PART_SCALE, proxy_kl
from msa_kernels.cute.work import Rows, Work, attention, flat


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
    *,
    mean: bool,
    eights: bool,
) -> None:
    """Write the gradients of a window's queries: the sums of their parts times `scale`, for the `mean` over queries."""
    heads, dim = gradients.shape[1:]
    facts = _name(parts), _name(gradients), dim, heads // units, units, rows.counts.shape[1]
    queries = rows.queries if mean else None
    load(sums.SumQueries(*facts, mean, eights))(parts, rows.counts, queries, gradients, scale, *window[1:], slots)


def sum_keys(
    problem: Problem,
    index: Index,
    window: Window,
    units: int,
    parts: tuple[Scalars[Tensor, "item block_size dim"], ...],
    kept: tuple[Scalars[Tensor, "token head dim"], ...],
    gradients: tuple[Float[Tensor, "token head dim"], ...],
    scale: float,
    queries: Ids[Tensor, "selection"] | None,
) -> None:
    """Add a window's parts to `kept`, or after the last window write gradients, the first tensor's times `scale`.

    The windows must come in their order; `kept` is not read if there is one only. With `queries`, the numbers of those
    that have blocks, the gradients are divided by them.
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
        queries is not None,
    )
    grid = problem.first, problem.starts, problem.ends
    both = [(*given, None)[:2] for given in (parts, kept, gradients)]
    load(kernel)(*both[0], index.tasks, index.task_ptr, *grid, queries, *both[1], *both[2], scale, *window)


def attention_gradients(
    work: Work,
    rows: Rows,
    out: Float[Tensor, "batch sequence head dim"],
    lse: Scalars[Tensor, "batch sequence head"],
    dout: Float[Tensor, "batch sequence head dim"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from that of the output."""
    problem = work.problem
    q, k, v, blocks, block_size = problem[:5]
    assert v is not None
    (batch, _, sequence, slots), (heads, dim) = blocks.shape, q.shape[1:]
    units = max(blocks.shape[1], k.shape[1])
    dout, lse = flat(dout), flat(lse)
    delta = make_deltas(flat(out), dout)
    dk, dv = (torch.empty(batch, sequence, *x.shape[1:], dtype=x.dtype, device=x.device) for x in (k, v))
    dq = None
    dq_parts = torch.empty(work.tokens * heads * slots, dim, dtype=q.dtype, device=q.device)
    parts = _floats(2, work.sizes.items(units, work.window), block_size, dim, like=q)
    kept = _floats(2, len(q) if work.tokens < len(q) else 1, k.shape[1], dim, like=q)
    for window in work.passes():
        backward(problem, work.index, window, dout, lse, delta, rows.own_slot, dq_parts, *parts)
        both = dk.flatten(0, 1), dv.flatten(0, 1)
        sum_keys(problem, work.index, window, units, parts, kept, both, 1.0, None)
        if window.end >= len(q):
            parts = kept = ()  # dq takes their memory, if this was the only window
        if dq is None:
            dq = torch.empty(batch, sequence, heads, dim, dtype=q.dtype, device=q.device)
        sum_queries(dq_parts, rows, slots, window, dq.flatten(0, 1), units, 1.0, mean=False, eights=False)
    assert dq is not None
    return dq, dk, dv


def divergence(
    work: Work,
    rows: Rows,
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    lse: Float[Tensor, "batch sequence head"],
    *,
    with_gradients: bool,
) -> tuple[Scalars[Tensor, "proxy"], Scalars[Tensor, "..."], Scalars[Tensor, "..."]]:
    """The KL of each proxy, and its gradients to each proxy's queries and keys (batch, sequence, proxy, proxy_dim).

    The latter in fp32, and before proxies that share keys are summed, as the upstream scalars are not known yet; empty
    without `with_gradients`.
    """
    problem, index, slots = work.problem, work.index, work.sizes.slots
    num_proxies, dim = q_proxy.shape[2:]
    items = work.sizes.items(num_proxies, work.window)
    queries, keys, lse = flat(q_proxy), flat(k_proxy), flat(lse.float())
    (student_lse,) = _floats(1, *queries.shape[:2], like=queries)
    # Before there are parts, as it takes memory of its own.
    attention(work, problem._replace(q=queries, k=keys, v=None), None, student_lse)
    value, value_parts = *_floats(1, num_proxies, like=queries), *_floats(1, items, like=queries)
    dq, dk = _floats(2, *(q_proxy.shape if with_gradients else (0,)), like=queries)
    dq_parts, dk_parts, kept = None, None, None
    if with_gradients:
        dq_parts = torch.empty(work.tokens * num_proxies * slots, dim, dtype=queries.dtype, device=queries.device)
        (dk_parts,) = _floats(1, items, problem.block_size, dim, like=queries)
        (kept,) = _floats(1, len(queries) if work.tokens < len(queries) else 1, num_proxies, dim, like=queries)
    for window in work.passes():
        given = problem, queries, keys, index, window, lse, student_lse, rows.own_slot
        proxy_kl(*given, dq_parts, dk_parts, value_parts)
        if dq_parts is not None and dk_parts is not None and kept is not None:
            parts, results = (value_parts, dk_parts, dq_parts), (value, dk.flatten(0, 1), dq.flatten(0, 1))
            sum_proxies(problem, index, window, parts, rows, results, kept, slots)
        else:
            sum_values(problem, index, window, value_parts, rows, value)
    return value, dq, dk


def sum_proxies(
    problem: Problem,
    index: Index,
    window: Window,
    parts: tuple[Scalars[Tensor, "item"], Scalars[Tensor, "item block_size dim"], Float[Tensor, "line dim"]],
    rows: Rows,
    results: tuple[Scalars[Tensor, "proxy"], Scalars[Tensor, "token proxy dim"], Scalars[Tensor, "token proxy dim"]],
    kept: Scalars[Tensor, "token proxy dim"],
    slots: int,
) -> None:
    """`sum_values`, `sum_keys` and `sum_queries` of the KL in one launch; parts and results are in this order."""
    num_proxies, dim = kept.shape[1:]
    name, scale = _name(parts[2]), dim**-0.5
    kernel = sums.SumProxies(name, dim, problem.block_size, num_proxies, problem.blocks.shape[1])
    grid = problem.first, problem.starts, problem.ends
    given = *parts, index.tasks, index.task_ptr, *grid, rows.counts, rows.queries, *results, kept
    load(kernel)(*given, scale, scale / PART_SCALE[name], *window, slots)


def sum_values(
    problem: Problem,
    index: Index,
    window: Window,
    parts: Scalars[Tensor, "item"],
    rows: Rows,
    value: Scalars[Tensor, "proxy"],
) -> None:
    """Add what a window's items have of each proxy; after the last window the value is the mean over queries."""
    kernel = sums.SumValues(problem.block_size, len(value), problem.blocks.shape[1])
    grid = problem.first, problem.starts, problem.ends
    load(kernel)(parts, index.tasks, index.task_ptr, *grid, rows.queries, value, *window)


def scale(
    gradients: tuple[Scalars[Tensor, "batch sequence proxy dim"], Scalars[Tensor, "batch sequence proxy dim"]],
    upstream: Float[Tensor, "proxy"],
    results: tuple[Float[Tensor, "batch sequence proxy dim"], Float[Tensor, "batch sequence head dim"]],
) -> None:
    """Write gradients of queries and of keys times their proxy's upstream scalar, the latter summed for each head."""
    heads, dim = results[1].shape[2:]
    kernel = sums.Scale(_name(results[1]), dim, len(upstream), heads)
    with torch.cuda.device(upstream.device):
        dq, dk, *both = (x.flatten(0, 1) for x in (*gradients, *results))
        load(kernel)(dq, dk, upstream.float().contiguous(), *both)


def _floats(number: int, *shape: int, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=torch.float32, device=like.device) for _ in range(number))


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
