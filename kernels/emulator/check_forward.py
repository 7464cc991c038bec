"""Attention over a selection (index, attend, merge) and the selection itself (scores, topk), against fp64."""

import torch
from cases import DOCUMENTS, Case, difference, of_variants, problem, run
from msa_kernels import reference
from msa_kernels.cute import attend, ops

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
]


def check(case: Case, seed: int) -> dict:
    given = problem(case, seed)
    q, k, v, selection = *given[:3], given.selection
    out, lse = ops.sparse_attention(q, k, v, selection.blocks, selection.cu_seqlens, case.block_size, None)
    expected, exact = reference.sparse_attention(q.double(), k.double(), v.double(), selection)
    found = {"out": (difference(out, expected), 6e-3), "lse": (difference(lse, exact), 1e-5)}
    alone = ops.selected_lse(q, k, selection.blocks, selection.cu_seqlens, case.block_size)
    found["lse alone"] = difference(alone, exact), 1e-5
    rule = case.slots, case.block_size, 1, 0
    chosen = ops.select_blocks(given.q_proxy, given.k_proxy, selection.cu_seqlens, *rule)
    best = reference.select_blocks(given.q_proxy.float(), given.k_proxy.float(), top_k_blocks=case.slots,
                                   block_size=case.block_size, cu_seqlens=selection.cu_seqlens)  # fmt: skip
    found["choice"] = float((chosen != best.blocks).double().mean()), 1e-3
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(check, CASES, lambda: of_variants(attend.variants()))
