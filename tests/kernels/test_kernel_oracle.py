"""The reference against the naive row-by-row oracle, in fp64: selections, values and every gradient."""

import pytest
import torch
from kernel_oracle import as_lists, attention, kl, select, tensors
from msa_kernels import reference

# batch, sequence, query heads, KV heads, proxies, proxy KV heads, block size, k
SHAPES = [
    (2, 23, 4, 2, 2, 1, 4, 2),
    (1, 17, 12, 3, 6, 2, 3, 3),
    (1, 20, 6, 2, 1, 1, 5, 2),  # one proxy for all KV heads
    (2, 13, 8, 4, 2, 2, 2, 3),  # one proxy for two KV heads
    (1, 19, 5, 1, 5, 5, 7, 1),  # one head per proxy, only the own block
    (3, 1, 3, 3, 3, 1, 4, 2),
    (1, 9, 6, 6, 2, 1, 16, 4),  # shorter than a block
]
DOCUMENTS = {
    (2, 23): [0, 5, 5, 23, 24, 37, 46, 46],
    (1, 17): [0, 17, 17],
    (1, 20): [0, 1, 11, 20],
    (2, 13): [0, 13, 26],
}


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


CASES = [(shape, None) for shape in SHAPES] + [
    (shape, torch.tensor(DOCUMENTS[shape[:2]], dtype=torch.int32)) for shape in SHAPES if shape[:2] in DOCUMENTS
]


@pytest.mark.parametrize(("shape", "cu_seqlens"), CASES)
def test_selection_output_kl_and_gradients_equal_the_oracle(shape, cu_seqlens):
    *sizes, block_size, top_k = shape
    q_proxy, k_proxy, q, k, v = leaves = tensors(1, *sizes)
    how = {"block_size": block_size, "cu_seqlens": cu_seqlens}
    selection = reference.select_blocks(q_proxy, k_proxy, top_k_blocks=top_k, **how)
    chosen = select(q_proxy, k_proxy, top_k_blocks=top_k, **how)
    assert as_lists(selection) == chosen
    out, lse = reference.sparse_attention(q, k, v, selection)
    value = reference.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)
    naive_out, naive_lse = attention(q, k, v, chosen, **how)
    naive_value = kl(q_proxy, k_proxy, q, k, chosen, **how)
    close(out, naive_out)
    close(lse, naive_lse)
    close(value, naive_value)
    compare_gradients(leaves, out, value, naive_out, naive_value)


@pytest.mark.parametrize(("shape", "cu_seqlens"), CASES)
def test_dense_output_kl_and_gradients_equal_the_oracle(shape, cu_seqlens):
    *sizes, block_size, _ = shape
    q_proxy, k_proxy, q, k, v = leaves = tensors(2, *sizes)
    out, lse = reference.dense_attention(q, k, v, cu_seqlens=cu_seqlens)
    value = reference.dense_proxy_kl(q_proxy, k_proxy, q, k, lse, cu_seqlens=cu_seqlens)
    naive_out, naive_lse = attention(q, k, v, None, block_size, cu_seqlens)
    naive_value = kl(q_proxy, k_proxy, q, k, None, block_size, cu_seqlens)
    close(out, naive_out)
    close(lse, naive_lse)
    close(value, naive_value)
    compare_gradients(leaves, out, value, naive_out, naive_value)


@pytest.mark.parametrize(("local", "sink"), [(0, 0), (0, 1), (2, 0), (1, 1), (2, 1), (0, 3)])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 9, 30, 31, 60]])
def test_forced_blocks_equal_the_oracle(local, sink, cu_seqlens):
    q_proxy, k_proxy, q, k, v = leaves = tensors(3, 2, 30, 4, 2, 2, 1)
    how = {"block_size": 3, "cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)}
    rule = {"top_k_blocks": 3, "num_local_blocks": local, "num_sink_blocks": sink}
    selection = reference.select_blocks(q_proxy, k_proxy, **rule, **how)
    chosen = select(q_proxy, k_proxy, **rule, **how)
    assert as_lists(selection) == chosen
    out, lse = reference.sparse_attention(q, k, v, selection)
    value = reference.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)
    compare_gradients(leaves, out, value, attention(q, k, v, chosen, **how)[0], kl(*leaves[:4], chosen, **how))


def test_a_shared_and_a_per_head_selection_equal_the_oracle():
    q_proxy, k_proxy, q, k, v = leaves = tensors(4, 1, 22, 6, 3, 3, 1)
    own = reference.select_blocks(q_proxy, k_proxy, top_k_blocks=2, block_size=4)
    shared = own._replace(blocks=own.blocks[:, 1:2])
    out, lse = reference.sparse_attention(q, k, v, shared)
    value = reference.proxy_kl(q_proxy, k_proxy, q, k, lse, shared)
    chosen = as_lists(shared)
    naive = attention(q, k, v, chosen, 4)[0], kl(q_proxy, k_proxy, q, k, chosen, 4)
    close(value, naive[1])
    compare_gradients(leaves, out, value, *naive)
    crossed = own.for_heads([0, 2, 1, 1, 2, 0])
    close(reference.sparse_attention(q, k, v, crossed)[0], attention(q, k, v, as_lists(crossed), 4)[0])


def test_bf16_inputs_are_computed_in_fp32():
    leaves = tensors(5, 1, 40, 4, 2, 2, 1, dim=16, proxy_dim=8, dtype=torch.bfloat16)
    selection = reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=8)
    out, lse = reference.sparse_attention(*leaves[2:], selection)
    value = reference.proxy_kl(*leaves[:4], lse, selection)
    wide = tuple(leaf.detach().double() for leaf in leaves)
    naive_out, naive_lse = attention(*wide[2:], as_lists(selection), 8)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == value.dtype == torch.float32
    assert reference.block_scores(*leaves[:2]).dtype == torch.float32
    torch.testing.assert_close(out, naive_out.bfloat16(), rtol=2**-7, atol=0)  # one rounding at the end
    torch.testing.assert_close(lse.double(), naive_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value.double(), kl(*wide[:4], as_lists(selection), 8), rtol=1e-4, atol=1e-6)


def test_autocast_does_not_lower_the_precision():
    leaves = tensors(6, 1, 40, 4, 2, 2, 1, dtype=torch.float32)
    selection = reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=8)
    plain, lse = reference.sparse_attention(*leaves[2:], selection)
    value = reference.proxy_kl(*leaves[:4], lse, selection)
    with torch.autocast("cpu", torch.bfloat16):
        again = reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=8)
        out, lse_again = reference.sparse_attention(*leaves[2:], again)
        value_again = reference.proxy_kl(*leaves[:4], lse_again, again)
    assert torch.equal(again.blocks, selection.blocks)
    assert torch.equal(out, plain)
    assert torch.equal(value_again, value)


def compare_gradients(leaves, out, value, naive_out, naive_value):
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    shares = torch.linspace(0.5, 2, len(value), dtype=out.dtype)
    grads = torch.autograd.grad((out * weights).sum() + (value * shares).sum(), leaves)
    naive = torch.autograd.grad((naive_out * weights).sum() + (naive_value * shares).sum(), leaves)
    for got, wanted in zip(grads, naive, strict=True):
        close(got, wanted)
