"""Attention over a selection: against dense, causality, head mapping, lengths, empty rows, memory."""

import subprocess
import sys

import pytest
import torch
from kernel_oracle import tensors
from msa_kernels import Selection, reference, window_selection

SIZES = {"heads": 4, "kv_heads": 2, "proxies": 2, "proxy_kv_heads": 1, "dim": 16, "proxy_dim": 8}


def msa(leaves, **rule):
    selection = reference.select_blocks(*leaves[:2], **rule)
    out, lse = reference.sparse_attention(*leaves[2:], selection)
    return selection, out, lse, reference.proxy_kl(*leaves[:4], lse, selection)


def dense(leaves):
    out, lse = reference.dense_attention(*leaves[2:])
    return out, lse, reference.dense_proxy_kl(*leaves[:4], lse)


@pytest.mark.parametrize("sequence", [1, 127, 128, 129, 200, 300, 512])
def test_every_length_equals_dense_once_all_blocks_are_selected(sequence):
    leaves = tensors(0, 1, sequence, **SIZES, dtype=torch.float32)
    _, out, lse, kl = msa(leaves, top_k_blocks=16)
    wanted, wanted_lse, wanted_kl = dense(leaves)
    for got, want in ((out, wanted), (lse, wanted_lse), (kl, wanted_kl)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out.sin().sum() + kl.sum(), leaves)
    for got, want in zip(grads, torch.autograd.grad(wanted.sin().sum() + wanted_kl.sum(), leaves), strict=True):
        assert bool(got.isfinite().all())
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_one_block_more_than_the_budget_is_no_longer_dense():
    for sequence, same in ((512, True), (640, False)):
        leaves = tensors(1, 1, sequence, **SIZES, dtype=torch.float32)
        _, out, _, kl = msa(leaves, top_k_blocks=4)
        grads = torch.autograd.grad(out.sum() + kl.sum(), leaves)
        assert all(bool(grad.isfinite().all()) for grad in grads)
        assert torch.allclose(out, dense(leaves)[0], rtol=1e-5, atol=1e-5) == same


def test_the_tail_block_can_be_selected():
    blocks = msa(tensors(2, 1, 300, **SIZES), top_k_blocks=2)[0].blocks
    assert bool((blocks[:, :, 256:].amax(-1) == 2).all())
    assert int((blocks >= 0).sum()) == 472 * blocks.shape[1]


def test_dense_attention_without_lse_is_the_same():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        leaves = tensors(3, 2, 70, **SIZES, dtype=dtype)
        for cu in (None, torch.tensor([0, 30, 70, 140], dtype=torch.int32)):
            wanted, _ = reference.dense_attention(*leaves[2:], cu_seqlens=cu)
            out, lse = reference.dense_attention(*leaves[2:], cu_seqlens=cu, return_lse=False)
            assert lse is None
            assert out.dtype == dtype
            torch.testing.assert_close(out, wanted)


def test_future_tokens_inside_own_block_are_never_read():
    leaves = [leaf.detach() for leaf in tensors(4, 1, 512, **SIZES, dtype=torch.float32)]
    before = msa(leaves, top_k_blocks=2)
    full = dense(leaves)[0]
    changed = [leaf.clone() for leaf in leaves]
    for leaf in changed:
        leaf[:, 300:] += torch.randn(leaf[:, 300:].shape, generator=torch.Generator().manual_seed(0)) * 10
    after = msa(changed, top_k_blocks=2)
    assert torch.equal(after[0].blocks[:, :, :300], before[0].blocks[:, :, :300])
    assert torch.equal(after[1][:, :300], before[1][:, :300])
    assert torch.equal(after[2][:, :300], before[2][:, :300])
    assert torch.equal(dense(changed)[0][:, :300], full[:, :300])
    assert not torch.equal(after[1][:, 300:], before[1][:, 300:])


def test_a_token_gets_no_gradient_from_earlier_queries():
    leaves = tensors(5, 1, 40, **SIZES)
    selection = reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=8)
    out, _ = reference.sparse_attention(*leaves[2:], selection)
    for grad in torch.autograd.grad(out[:, :21].sum(), leaves[2:]):
        assert not bool(grad[:, 21:].any())


def test_a_selection_of_the_future_is_still_causal():
    leaves = tensors(6, 1, 16, **SIZES)
    everything = torch.arange(4, dtype=torch.int32).expand(1, 1, 16, 4).contiguous()
    out, _ = reference.sparse_attention(*leaves[2:], Selection(everything, 4))
    torch.testing.assert_close(out, dense(leaves)[0], rtol=1e-12, atol=1e-12)
    only_future = torch.full((1, 1, 16, 1), 3, dtype=torch.int32)
    out, _ = reference.sparse_attention(*leaves[2:], Selection(only_future, 4))
    assert not bool(out[:, :12].any())


def test_heads_read_their_own_kv_head():
    q_proxy, k_proxy, q, k, v = tensors(7, 2, 256, 12, 3, 6, 1, dim=64, dtype=torch.float32)
    constant = torch.arange(3.0)[:, None].expand(2, 256, 3, 64)
    selection = reference.select_blocks(q_proxy, k_proxy, top_k_blocks=2, block_size=32)
    out, _ = reference.sparse_attention(q, k, constant, selection)
    wanted = torch.tensor([0.0] * 4 + [1.0] * 4 + [2.0] * 4)[:, None].expand_as(out)
    torch.testing.assert_close(out, wanted)
    plain, _ = reference.sparse_attention(q, k, v, selection)
    for proxy in range(6):
        poisoned = selection._replace(blocks=selection.blocks.clone())
        poisoned.blocks[:, proxy] = window_selection(2, 256, top_k_blocks=2, block_size=32).blocks[:, 0]
        changed = (reference.sparse_attention(q, k, v, poisoned)[0] != plain).flatten(3).any(-1).any(1).any(0)
        assert changed.nonzero().flatten().tolist() == [2 * proxy, 2 * proxy + 1]


def test_repeating_kv_heads_changes_nothing():
    _, _, q, k, v = leaves = tensors(8, 1, 33, 12, 3, 6, 2)
    selection = reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=4)
    out, _ = reference.sparse_attention(q, k, v, selection)
    wide, _ = reference.sparse_attention(q, k.repeat_interleave(4, 2), v.repeat_interleave(4, 2), selection)
    torch.testing.assert_close(out, wide, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(out.cos().sum(), (q, k, v)), torch.autograd.grad(wide.cos().sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


def test_rows_without_any_block_give_zero_and_count_in_no_mean():
    leaves = tensors(9, 1, 24, **SIZES)
    selection = reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=4)
    blocks = selection.blocks.clone()
    blocks[:, 0, 5:9] = -1
    some = selection._replace(blocks=blocks)
    with torch.autograd.detect_anomaly(check_nan=True):
        out, lse = reference.sparse_attention(*leaves[2:], some)
        kl = reference.proxy_kl(*leaves[:4], lse, some)
        grads = torch.autograd.grad(out.sum() + kl.sum(), leaves)
    assert not bool(out[:, 5:9, :2].any())
    assert bool((lse[:, 5:9, :2] == -torch.inf).all())
    assert not bool(grads[0][:, 5:9, 0].any())
    assert not bool(grads[2][:, 5:9, :2].any())
    full_out, full_lse = reference.sparse_attention(*leaves[2:], selection)
    torch.testing.assert_close(out[:, :, 2:], full_out[:, :, 2:])
    torch.testing.assert_close(kl[1], reference.proxy_kl(*leaves[:4], full_lse, selection)[1])
    head, tail = torch.full_like(blocks, -1), torch.full_like(blocks, -1)
    head[:, 0, :5], tail[:, 0, 9:] = blocks[:, 0, :5], blocks[:, 0, 9:]
    parts = [reference.proxy_kl(*leaves[:4], lse, selection._replace(blocks=part)) for part in (head, tail)]
    torch.testing.assert_close(kl[0], (5 * parts[0][0] + 15 * parts[1][0]) / 20)


def test_nothing_selected_at_all_is_zero_everywhere():
    leaves = tensors(10, 1, 10, **SIZES)
    nothing = Selection(torch.full((1, 2, 10, 3), -1, dtype=torch.int32), 4)
    out, lse = reference.sparse_attention(*leaves[2:], nothing)
    kl = reference.proxy_kl(*leaves[:4], lse, nothing)
    assert not bool(out.any())
    assert not bool(kl.any())
    grads = torch.autograd.grad(out.sum() + kl.sum(), leaves)
    assert not any(bool(grad.any()) for grad in grads)


def test_chunks_and_recomputation_change_nothing(monkeypatch):
    leaves = tensors(11, 2, 50, **SIZES)
    cu = torch.tensor([0, 13, 50, 50, 71, 100], dtype=torch.int32)  # later chunks begin after the first documents

    def everything():
        rule = {"top_k_blocks": 2, "block_size": 4, "cu_seqlens": cu}
        selection, out, lse, kl = msa(leaves, **rule)
        full, full_lse = reference.dense_attention(*leaves[2:], cu_seqlens=cu)
        full_kl = reference.dense_proxy_kl(*leaves[:4], full_lse, cu_seqlens=cu)
        loss = out.sin().sum() + full.cos().sum() + kl.sum() + 2 * full_kl.sum()
        return selection.blocks, out, lse, kl, full, full_lse, full_kl, *torch.autograd.grad(loss, leaves)

    whole = everything()
    monkeypatch.setattr(reference, "CHUNK_QUERIES", 7)
    monkeypatch.setattr(reference, "KEPT_SCORES", 0)
    for got, wanted in zip(everything(), whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


PEAK_MEMORY = """
import pathlib, re, sys, torch
from msa_kernels import reference
dim, kept, *lengths = map(int, sys.argv[1:])
reference.KEPT_SCORES = kept or reference.KEPT_SCORES
for sequence in (256, *lengths):
    q, k, v, q_proxy, k_proxy = (torch.randn(1, sequence, n, dim, requires_grad=True) for n in (8, 8, 8, 8, 1))
    selection = reference.select_blocks(q_proxy, k_proxy, top_k_blocks=4)
    out, lse = reference.sparse_attention(q, k, v, selection)
    (out.sum() + reference.proxy_kl(q_proxy, k_proxy, q, k, lse, selection).sum()).backward()
    status = pathlib.Path('/proc/self/status').read_text()
    print(int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) / 2**20)
"""


def peaks(*lengths, dim, kept=0):
    """Peak resident GiB of a process after a short step and then after a step of each length."""
    arguments = [sys.executable, "-c", PEAK_MEMORY, *map(str, (dim, kept, *lengths))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=280)
    return [float(x) for x in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_at_most_linearly_with_the_sequence():
    base, small, large = peaks(1536, 3072, dim=16, kept=2**20)
    assert large - base <= 2.2 * (small - base)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_8192_tokens_stays_under_two_gib_and_16384_is_at_most_linear():
    assert peaks(8192, dim=64)[-1] < 2.0
    base, small, large = peaks(4096, 16384, dim=64)
    assert large - base <= 4.2 * (small - base)
