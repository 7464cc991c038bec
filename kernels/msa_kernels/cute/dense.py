"""The proxies' KL over every token of the document up to the query, for the warm-up: `kl.py` without a selection.

Its work is that of all blocks, and parts of the queries' gradients have a slot for each block of their row: windows of
queries bound their memory. What the keys have is one part a block and proxy, which one window after the other adds to.
"""

import torch
from jaxtyping import Float
from jaxtyping import Float32 as Scalars
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute import hopper
from msa_kernels.cute.attend import Problem, Window
from msa_kernels.cute.compile import load
from msa_kernels.cute.gradients import sum_keys, sum_queries, sum_values
from msa_kernels.cute.index import Index
from msa_kernels.cute.kl import BLOCK, PART_SCALE, ProxyKL
from msa_kernels.cute.layout import make_layout
from msa_kernels.cute.work import Rows
from msa_kernels.documents import num_blocks

PART_BYTES = 2**29
"""The most that the parts of a window take."""
QUERIES = 128
"""A window is a multiple of so many."""


def dense_divergence(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    lse: Float[Tensor, "batch sequence head"],
    student_lse: Float[Tensor, "batch sequence proxy"],
    cu_seqlens: Ids[Tensor, "offsets"] | None,
    *,
    with_gradients: bool,
) -> tuple[Scalars[Tensor, "proxy"], Scalars[Tensor, "..."], Scalars[Tensor, "..."]]:
    """As `gradients.divergence`, over the full causal support; both log-sum-exps are over it and natural."""
    batch, sequence, num_proxies, dim = q_proxy.shape
    total, slots = batch * sequence, num_blocks(sequence, BLOCK)
    with torch.cuda.device(q.device):
        problem, index = _everything(q, k, cu_seqlens)
        queries, keys = (x.contiguous().flatten(0, 1) for x in (q_proxy, k_proxy))
        scalars = [x.float().contiguous().flatten(0, 1) for x in (lse, student_lse)]
        value_parts = torch.zeros(len(problem.starts) * num_proxies, dtype=torch.float32, device=q.device)
        bytes_a_token = slots * num_proxies * dim * q_proxy.element_size()
        size = _window(total, bytes_a_token) if with_gradients else total
        dq_parts, dk_parts, dq, dk = None, None, value_parts.new_empty(0), value_parts.new_empty(0)
        if with_gradients:
            dq_parts = q_proxy.new_empty(min(size, total) * num_proxies * slots, dim)
            dk_parts = value_parts.new_zeros(len(value_parts), BLOCK, dim)
            dq, dk = (torch.empty(q_proxy.shape, dtype=torch.float32, device=q.device) for _ in "qk")
        rows, value = _rows(problem, batch), torch.empty(num_proxies, dtype=torch.float32, device=q.device)
        facts = *problem.facts[:2], *problem.facts[3:], dim, num_proxies, k_proxy.shape[2]
        kernel = load(ProxyKL(*facts, with_gradients=with_gradients, dense=True))
        for begin in range(0, total, size):
            window = Window(0, begin, min(begin + size, total))
            grid = problem.first, problem.starts, problem.ends
            given = problem.q, problem.k, queries, keys, *scalars, None, None, None, None, index.claims, *grid
            kernel(*given, dq_parts, dk_parts, value_parts, *window, slots, hopper.processors(q.device))
            if dq_parts is not None:
                scale, result = dim**-0.5 / PART_SCALE[problem.facts[0]], dq.flatten(0, 1)
                sum_queries(dq_parts, rows, slots, window, result, num_proxies, scale, mean=True, eights=True)
        whole = Window(0, 0, total)
        sum_values(problem, index, whole, value_parts, rows, value)
        if dk_parts is not None:
            result = (dk.flatten(0, 1),)
            sum_keys(problem, index, whole, num_proxies, (dk_parts,), result, result, dim**-0.5, rows.queries)
    return value, dq, dk


def _everything(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[Problem, Index]:
    """A problem without selection, and an index without remote tasks: all blocks are in the place of the own ones."""
    batch, sequence = q.shape[:2]
    numbers = [
        torch.zeros(shape, dtype=torch.int32, device=q.device)
        for shape in ((batch, 1, sequence, 1), (1,), (1, 4), (2,), (1,))
    ]
    first, starts, ends = make_layout(cu_seqlens, batch, sequence, BLOCK, q.device)
    q, k = q.contiguous().flatten(0, 1), k.contiguous().flatten(0, 1)
    return Problem(q, k, None, numbers[0], BLOCK, first, starts, ends), Index(*numbers[1:])


def _window(total: int, bytes_a_token: int) -> int:
    """Tokens of a window, in a few of equal size."""
    most = max(PART_BYTES // bytes_a_token // QUERIES, 1) * QUERIES
    number = -(-total // most)
    return -(-total // number // QUERIES) * QUERIES


def _rows(problem: Problem, batch: int) -> Rows:
    """Every query has parts of all its document's blocks up to its own."""
    token = torch.arange(len(problem.first), dtype=torch.int32, device=problem.first.device)
    own = (token - problem.starts[problem.first.long()]) // BLOCK
    own = own.view(batch, 1, -1)
    return Rows(own, own + 1, torch.full_like(own[0, 0, :1], len(token)))
