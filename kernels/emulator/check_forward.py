"""Attention over a selection (index, attend, merge) and the selection itself (scores, topk), against fp64.

The selection is also made where it is hard: scores that tie, others that are NaN, and windows of 256 tokens.
"""

from unittest import mock

import torch
from cases import DOCUMENTS, Case, difference, of_variants, problem, run, small_windows
from msa_kernels import reference
from msa_kernels.cute import attend, ops, windows
from msa_kernels.cute.index import build
from msa_kernels.cute.layout import make_layout
from msa_kernels.documents import layout
from msa_kernels.selection import Selection
from torch import Tensor

CASES = [
    Case(),
    Case(heads=16, kv_heads=2, selections=4),
    Case(heads=8, kv_heads=4, selections=2, dim=64),
    Case(heads=2, kv_heads=1, selections=2, documents=DOCUMENTS, batch=2, sequence=420, slots=3),
    Case(heads=4, kv_heads=1, selections=2, dtype="float16", dim=64),
    Case(heads=8, kv_heads=1, selections=1),
    Case(heads=16, kv_heads=1, selections=1, sequence=200),
    Case(heads=4, kv_heads=2, selections=2, block_size=64, slots=4),
    Case(heads=4, kv_heads=2, selections=2, block_size=64, dim=64, documents=(0, 60, 61, 300)),
    # Many blocks to choose from.
    Case(block_size=64, dim=64, sequence=1000, slots=4, local=2, sinks=1),
    Case(block_size=64, dim=64, batch=2, sequence=700, slots=4, documents=(0, 600, 700, 701, 1400), local=0, sinks=1),
]


def check(case: Case, seed: int) -> dict:
    with small_windows(case):
        return compared(case, seed)


def compared(case: Case, seed: int) -> dict:
    given = problem(case, seed)
    q, k, v, selection = *given[:3], given.selection
    out, lse = ops.sparse_attention(q, k, v, selection.blocks, selection.cu_seqlens, case.block_size, None)
    expected, exact = reference.sparse_attention(q.double(), k.double(), v.double(), selection)
    found = {"out": (difference(out, expected), 6e-3), "lse": (difference(lse, exact), 1e-5)}
    alone = ops.selected_lse(q, k, selection.blocks, selection.cu_seqlens, case.block_size)
    found["lse alone"] = difference(alone, exact), 1e-5
    found["index"] = wrong_index(selection), 0.0
    proxies = given.q_proxy, given.k_proxy
    found["choice"] = wrong_choices(case, *proxies, selection.cu_seqlens), 1e-3
    with mock.patch.object(ops, "SCORE_BYTES", 1):
        found["hard choice"] = wrong_choices(case, *hard(*proxies), selection.cu_seqlens), 0.0
    return found


def wrong_index(selection: Selection) -> float:
    """How many queries have another row than by plain PyTorch; and tasks, in windows of TILE queries, another number.

    What the tasks hold is seen in the attention.
    """
    blocks, block_size, offsets = selection
    batch, proxies, sequence, _ = blocks.shape
    first, starts, _ = make_layout(offsets, batch, sequence, block_size, blocks.device)
    index, rows = build(blocks, first, starts, windows.TILE, block_size=block_size)
    own = layout(batch, sequence, block_size, offsets).block[:, None, :, None]
    remote, chosen = (blocks >= 0) & (blocks < own), (blocks == own).any(-1)
    earlier = remote.sum(-1)
    counts = earlier + chosen
    wrong = (rows.own_slot != torch.where(chosen, earlier, -1)) | (rows.counts != counts)
    token = torch.arange(batch * sequence).view(batch, 1, sequence, 1)
    row = (token // windows.TILE * proxies + torch.arange(proxies)[:, None, None]) * len(starts) + blocks
    lengths = torch.bincount((row + first.view(token.shape))[remote])
    tasks = (lengths / windows.task_length(blocks.numel())).ceil().sum()
    of_index = index.tasks[: index.task_ptr[-1], 3] - index.tasks[: index.task_ptr[-1], 2]
    same = (rows.queries == (counts > 0).sum((0, 2))).all() and of_index.sum() == lengths.sum()
    return float(wrong.sum() + (index.task_ptr[-1] - tasks).abs() + ~same)


def hard(q_proxy: Tensor, k_proxy: Tensor) -> tuple[Tensor, Tensor]:
    """Small whole numbers, whose scores tie and are exact, and some NaNs."""
    q_proxy, k_proxy = ((x / 2).round() for x in (q_proxy, k_proxy))
    q_proxy[:, 190::500, 0] = k_proxy[:, 70::500] = torch.nan
    return q_proxy, k_proxy


def wrong_choices(case: Case, q_proxy: Tensor, k_proxy: Tensor, offsets: Tensor | None) -> float:
    """The share of slots that hold another block than those of the reference."""
    rule = {"top_k_blocks": case.slots, "block_size": case.block_size}
    rule |= {"num_local_blocks": case.local, "num_sink_blocks": case.sinks}
    best = reference.select_blocks(q_proxy.double(), k_proxy.double(), cu_seqlens=offsets, **rule)
    chosen = ops.select_blocks(q_proxy, k_proxy, offsets, *rule.values())
    return float((chosen != best.blocks).double().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(check, CASES, lambda: of_variants(attend.variants()))
