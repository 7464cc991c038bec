"""Gradients against finite differences in fp64, and the reference under torch.compile."""

import pytest
import torch
from kernel_oracle import tensors
from msa_kernels import msa_attention, random_selection, reference, row_keys

CU = torch.tensor([0, 4, 11, 11, 22], dtype=torch.int32)
SIZES = {"batch": 2, "sequence": 11, "heads": 4, "kv_heads": 2, "proxies": 2, "proxy_kv_heads": 1}


@pytest.fixture(params=["rows", pytest.param("documents_recomputed", marks=pytest.mark.slow)])
def grid(request, monkeypatch):
    """The block grid: of rows in one chunk, and of packed documents in chunks that are recomputed."""
    if request.param == "rows":
        return {"block_size": 3, "cu_seqlens": None}
    monkeypatch.setattr(reference, "CHUNK_QUERIES", 4)
    monkeypatch.setattr(reference, "KEPT_SCORES", 0)
    return {"block_size": 3, "cu_seqlens": CU}


def test_gradcheck_of_attention(grid):
    q_proxy, k_proxy, *main = tensors(0, **SIZES, dim=3, proxy_dim=2)
    selection = reference.select_blocks(q_proxy, k_proxy, top_k_blocks=2, **grid)
    selection.blocks[0, 0, 7] = -1  # a row without any block
    assert torch.autograd.gradcheck(lambda *x: reference.sparse_attention(*x, selection)[0], main)
    assert torch.autograd.gradcheck(lambda *x: reference.dense_attention(*x, cu_seqlens=grid["cu_seqlens"])[0], main)


def test_gradcheck_of_the_divergence(grid):
    q_proxy, k_proxy, q, k, v = tensors(1, **SIZES, dim=3, proxy_dim=2)
    selection = reference.select_blocks(q_proxy, k_proxy, top_k_blocks=2, **grid)
    selection.blocks[1, 1, 5] = -1
    _, lse = reference.sparse_attention(q, k, v, selection)
    main = q.detach(), k.detach()
    assert torch.autograd.gradcheck(lambda *x: reference.proxy_kl(*x, *main, lse, selection), (q_proxy, k_proxy))
    cu = grid["cu_seqlens"]
    _, lse = reference.dense_attention(q, k, v, cu_seqlens=cu)
    assert torch.autograd.gradcheck(
        lambda *x: reference.dense_proxy_kl(*x, *main, lse, cu_seqlens=cu), (q_proxy, k_proxy)
    )


def test_gradcheck_of_dense_attention_without_lse():
    main = tensors(2, **SIZES, dim=3, proxy_dim=2)[2:]
    assert torch.autograd.gradcheck(lambda *x: reference.dense_attention(*x, return_lse=False)[0], main)


def test_the_step_compiles_without_a_graph_break(grid):
    leaves = tensors(3, **SIZES)

    def step(*inputs):
        result = msa_attention(*inputs, top_k_blocks=2, **grid)
        full, lse = reference.dense_attention(*inputs[2:], cu_seqlens=grid["cu_seqlens"])
        kl = reference.dense_proxy_kl(*inputs[:4], lse, cu_seqlens=grid["cu_seqlens"])
        return result.out, result.kl, result.selection.blocks, full, kl

    results = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out, kl, blocks, full, full_kl = run(*leaves)
        loss = out.sin().sum() + kl.sum() + full.cos().sum() + 2 * full_kl.sum()
        results.append((out, kl, blocks, full, full_kl, *torch.autograd.grad(loss, leaves)))
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_random_blocks_are_the_same_when_compiled():
    def draw(documents):
        keys = row_keys(2**40 + 1, 3, 1, documents)
        return random_selection(2, 40, 2, top_k_blocks=3, block_size=4, keys=keys).blocks

    documents = torch.tensor([5, 2**33 + 5])
    compiled = torch.compile(draw, fullgraph=True)(documents)  # by the real compiler: its integers must not overflow
    assert torch.equal(compiled, draw(documents))
