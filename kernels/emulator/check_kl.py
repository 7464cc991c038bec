"""The proxies' KL and its gradients, on a selection and over everything (kl, dense, sums), against fp64."""

from unittest import mock

import torch
from cases import DOCUMENTS, Case, difference, of_variants, problem, run, small_windows
from msa_kernels import reference
from msa_kernels.cute import dense, kl, ops

CASES = [
    Case(),
    Case(heads=16, kv_heads=2, selections=4),
    Case(heads=8, kv_heads=4, selections=2, dim=64, proxy_dim=64),
    Case(heads=2, kv_heads=1, selections=2, documents=DOCUMENTS, batch=2, sequence=420, slots=3, proxy_heads=2),
    Case(heads=4, kv_heads=1, selections=2, dtype="float16", dim=64, proxy_dim=64),
    Case(heads=8, kv_heads=1, selections=1),
    Case(heads=16, kv_heads=1, selections=1, sequence=200),
    Case(heads=4, kv_heads=1, selections=1, proxies=2, proxy_heads=2, sequence=260),
    Case(heads=4, kv_heads=4, selections=4, proxy_heads=4, slots=1, sequence=260),
    Case(heads=2, kv_heads=2, selections=1, documents=DOCUMENTS, batch=2, sequence=420, slots=2),
    # Several tasks a block, and several windows.
    Case(heads=2, kv_heads=1, selections=1, dim=64, proxy_dim=64, sequence=1400, slots=4),
    Case(
        heads=2,
        kv_heads=1,
        selections=1,
        proxies=2,
        dim=64,
        proxy_dim=64,
        batch=2,
        sequence=1500,
        slots=4,
        documents=(0, 700, 1500, 1530, 3000),
    ),
    Case(
        heads=2,
        kv_heads=1,
        selections=2,
        dim=64,
        proxy_dim=64,
        batch=2,
        sequence=1500,
        slots=4,
        documents=(0, 700, 1500, 1530, 3000),
    ),
]


def check(case: Case, seed: int) -> dict:
    with small_windows(case), mock.patch.object(dense, "PART_BYTES", 2**23):
        return compared(case, seed)


def compared(case: Case, seed: int) -> dict:
    """Values and gradients on the selection, and over everything."""
    q, k, v, _, q_proxy, k_proxy, selection = problem(case, seed)
    exact = [x.double() for x in (q_proxy, k_proxy, q, k)]
    leaves = [x.requires_grad_() for x in exact[:2]]
    proxies, keys = q_proxy.shape[2], k_proxy.shape[2]
    _, lse = reference.sparse_attention(q.double(), k.double(), v.double(), selection)
    expected = reference.proxy_kl(*exact, lse, selection)
    found = {}

    def compare(name: str, value, dq, dk, expected) -> None:
        wanted = torch.autograd.grad(expected.sum(), leaves)
        found[f"{name}value"] = difference(value, expected), 1e-4
        if dq.numel():
            found[f"{name}dq"] = difference(dq, wanted[0]), 8e-3
            dk = dk.unflatten(2, (keys, proxies // keys)).sum(3)
            found[f"{name}dk"] = difference(dk, wanted[1]), 8e-3

    given = q_proxy, k_proxy, q, k, lse.float(), selection.blocks, selection.cu_seqlens, case.block_size
    compare("", *ops.proxy_kl(*given, True), expected)
    value = ops.proxy_kl(*given, False)[0]
    found["alone"] = difference(value, expected), 1e-4
    if case.selections == proxies:
        _, lse = reference.dense_attention(q.double(), k.double(), v.double(), cu_seqlens=selection.cu_seqlens)
        expected = reference.dense_proxy_kl(*exact, lse, cu_seqlens=selection.cu_seqlens)
        students = k_proxy.repeat_interleave(1, 2).double()
        _, student = reference.dense_attention(q_proxy.double(), students, students, cu_seqlens=selection.cu_seqlens)
        every = q_proxy, k_proxy, q, k, lse.float(), student.float(), selection.cu_seqlens
        compare("dense ", *dense.dense_divergence(*every, with_gradients=True), expected)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(check, CASES, lambda: of_variants(kl.variants()))
