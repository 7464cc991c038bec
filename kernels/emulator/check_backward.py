"""Gradients of attention over a selection (deltas, backward, sums), against fp64 and autograd."""

import torch
from cases import DOCUMENTS, Case, difference, of_variants, problem, run, small_windows
from msa_kernels import reference
from msa_kernels.cute import backward, gradients, windows, work

CASES = [
    Case(),
    Case(heads=16, kv_heads=2, selections=4),
    Case(heads=8, kv_heads=4, selections=2, dim=64),
    Case(heads=2, kv_heads=1, selections=2, documents=DOCUMENTS, batch=2, sequence=420, slots=3),
    Case(heads=4, kv_heads=1, selections=2, dtype="float16", dim=64),
    Case(heads=8, kv_heads=1, selections=1),
    Case(heads=16, kv_heads=1, selections=1, sequence=200),
    Case(heads=2, kv_heads=1, selections=2, dtype="float16", sequence=500, slots=3),
    Case(heads=2, kv_heads=2, selections=1, documents=DOCUMENTS, batch=2, sequence=420, slots=2),
    # Several tasks a block, and several windows.
    Case(heads=2, kv_heads=1, selections=1, dim=64, sequence=2500, slots=4),
    Case(
        heads=2, kv_heads=1, selections=2, dim=64, batch=2, sequence=1500, slots=4, documents=(0, 700, 1500, 1530, 3000)
    ),
    # Groups of 16 of every unit, fewer selections than KV heads, one slot.
    Case(heads=16, kv_heads=4, selections=2, sequence=260),
    Case(heads=4, kv_heads=4, selections=4, slots=1, sequence=260),
]


def check(case: Case, seed: int) -> dict:
    q, k, v, upstream, _, _, selection = problem(case, seed)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, lse = reference.sparse_attention(*exact, selection)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    out, lse = expected.detach().to(q.dtype), lse.detach().float()
    about = selection.blocks, selection.cu_seqlens, case.block_size
    with small_windows(case):
        parts = windows.attention_parts(q, max(case.selections, case.kv_heads), case.block_size)
        given = work.prepare(q, k, v, *about, windows.part_window(windows.sizes(*about), parts, q))
        ours = gradients.attention_gradients(*given, out, lse, upstream)
    return {f"d{name}": (difference(a, b), 6e-3) for name, a, b in zip("qkv", ours, wanted, strict=True)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(check, CASES, lambda: of_variants(backward.variants()))
