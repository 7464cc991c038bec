"""The last queries of a million tokens, where offsets do not fit into 32 bits (scores, attend, merge), against fp64."""

import numpy as np
import torch
from cases import Case, difference, run
from msa_kernels import reference
from msa_kernels.cute import attend, merge, scores
from msa_kernels.cute.index import EDGE_SLOTS, Index
from msa_kernels.selection import Selection
from torch import Tensor

CASES = [Case(heads=16, kv_heads=1, selections=1, sequence=2**20 + 128, proxies=16)]
LAST = 40
"""Queries that are computed."""
BLOCKS = 3
"""Of their document, the last one; they read the first and their own."""


def tensors(case: Case, seed: int) -> list[Tensor]:
    """q, k, v, q_proxy, k_proxy and room for the output; memory is taken only for the last document."""
    make = torch.Generator().manual_seed(seed)
    found = []
    for heads in (case.heads, case.kv_heads, case.kv_heads, case.proxies, case.proxy_heads, case.heads):
        # Not `torch.empty`, which is filled here.
        x = torch.from_numpy(np.empty((case.sequence, heads, case.dim), np.int16)).view(getattr(torch, case.dtype))
        x[-BLOCKS * case.block_size :] = torch.randn(BLOCKS * case.block_size, heads, case.dim, generator=make)
        found.append(x)
    return found


def check(case: Case, seed: int) -> dict:
    q, k, v, q_proxy, k_proxy, out = tensors(case, seed)
    begin, count = case.sequence - LAST, case.sequence // case.block_size
    oldest, length = count - BLOCKS, BLOCKS * case.block_size
    assert (begin + 1) * case.heads * case.dim > 2**31
    first = torch.full((case.sequence,), oldest, dtype=torch.int32)
    starts = torch.arange(count, dtype=torch.int32) * case.block_size
    blocks = torch.full((1, 1, case.sequence, 2), -1, dtype=torch.int32)
    blocks[..., begin:, :] = torch.tensor([0, BLOCKS - 1])
    edges = torch.arange(begin, case.sequence, dtype=torch.int32) * EDGE_SLOTS
    tasks, ends = torch.tensor([[oldest, 0, 0, LAST]]).int(), torch.tensor([0, 1]).int()
    problem = attend.Problem(q, k, v, blocks, case.block_size, first, starts, starts + case.block_size)
    index, window = Index(edges, tasks, ends, torch.zeros(1).int()), attend.Window(0, begin, case.sequence)
    partial, lse = attend.room(problem, LAST), torch.empty(case.sequence, case.heads)
    attend.attend(problem, index, partial, window)
    merge.merge(problem, index, partial, window, out, lse)
    about = {"block_size": case.block_size, "blocks": BLOCKS}
    best = scores.score(q_proxy[None], k_proxy[None], first, starts, begin, case.sequence, **about)
    near = [x[None, -length:].double() for x in (q, k, v, q_proxy, k_proxy)]
    expected, exact = reference.sparse_attention(*near[:3], Selection(blocks[:, :, -length:], case.block_size))
    maxima = reference.block_scores(*near[3:], block_size=case.block_size, queries=(length - LAST, length))
    return {
        "out": (difference(out[begin:], expected[0, -LAST:]), 6e-3),
        "lse": (difference(lse[begin:], exact[0, -LAST:]), 1e-5),
        "scores": (difference(best.view(BLOCKS, LAST, -1), maxima[0].permute(2, 1, 0)), 1e-5),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(check, CASES, lambda: CASES)
