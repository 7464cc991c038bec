"""The KL of the proxies: worked by hand, its teacher, its gradient, and what it reaches."""

import math

import pytest
import torch
from kernel_oracle import tensors
from msa_kernels import Selection, msa_attention, reference

ALL = {"top_k_blocks": 1, "block_size": 64}


def heads_with(probabilities):
    """(q, k) of one query over two keys, where head h of the last row has the given probabilities."""
    heads = len(probabilities)
    q = torch.zeros(1, 2, heads, 4, dtype=torch.float64)
    k = torch.zeros(1, 2, 1, 4, dtype=torch.float64)
    k[0, 0, 0, 0] = 1.0
    for head, (first, second) in enumerate(probabilities):
        q[0, 1, head, 0] = math.log(first / second) * 2  # scores are divided by sqrt(4)
    return q, k


def equal_proxy():
    q_proxy = torch.ones(1, 2, 1, 1, dtype=torch.float64, requires_grad=True)
    k_proxy = torch.full((1, 2, 1, 1), 0.5, dtype=torch.float64, requires_grad=True)
    return q_proxy, k_proxy


def kl_of(q_proxy, k_proxy, q, k):
    selection = reference.select_blocks(q_proxy, k_proxy, **ALL)
    _, lse = reference.sparse_attention(q, k, k, selection)
    return reference.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)


def test_value_and_gradient_worked_by_hand():
    q_proxy, k_proxy = equal_proxy()
    kl = kl_of(q_proxy, k_proxy, *heads_with([(0.75, 0.25)]))
    assert kl.shape == (1,)
    assert 2 * kl.item() == pytest.approx(0.130812, abs=5e-7)  # two rows; the first sees one token: exactly 0
    kl.sum().backward()
    # d KL / d logits = student - teacher = (-0.25, 0.25) over two rows; logits are q_proxy x k_proxy, q_proxy = 1.
    assert k_proxy.grad.flatten().tolist() == pytest.approx([-0.125, 0.125])


def test_teacher_is_the_mean_of_probabilities_not_of_logits():
    q_proxy, k_proxy = equal_proxy()
    kl = kl_of(q_proxy, k_proxy, *heads_with([(0.9, 0.1), (0.5, 0.5)]))
    wanted = 0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5)
    assert 2 * kl.item() == pytest.approx(wanted, rel=1e-12)
    kl.sum().backward()
    assert k_proxy.grad.flatten().tolist() == pytest.approx([-0.1, 0.1])


def test_the_teacher_lives_on_the_selected_tokens_only():
    leaves = tensors(0, 1, 32, 4, 2, 2, 1)
    selection = reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=4)
    _, lse = reference.sparse_attention(*leaves[2:], selection)
    kl = reference.proxy_kl(*leaves[:4], lse, selection)
    row, proxy = 31, 1
    unseen = next(block for block in range(8) if block not in selection.blocks[0, proxy, row].tolist())
    changed = leaves[3].detach().clone()
    changed[:, unseen * 4 : unseen * 4 + 4] += 3
    only = torch.full_like(selection.blocks, -1)
    only[:, proxy, row] = selection.blocks[:, proxy, row]
    only = selection._replace(blocks=only)
    values = []
    for k in (leaves[3], changed):
        _, lse = reference.sparse_attention(leaves[2], k, leaves[4], only)
        values.append(reference.proxy_kl(leaves[0], leaves[1], leaves[2], k, lse, only)[proxy])
    torch.testing.assert_close(values[0], values[1], rtol=1e-13, atol=0)
    assert kl.shape == (2,)


@pytest.mark.parametrize("dense", [False, True])
def test_a_proxy_that_copies_its_head_has_no_divergence_and_no_gradient(dense):
    _, _, q, k, v = tensors(1, 2, 300, 4, 4, 4, 4, dim=16, dtype=torch.float32)
    q_proxy, k_proxy = (x.detach().clone().requires_grad_() for x in (q, k))
    if dense:
        _, lse = reference.dense_attention(q, k, v)
        kl = reference.dense_proxy_kl(q_proxy, k_proxy, q, k, lse)
    else:
        selection = reference.select_blocks(q_proxy, k_proxy, top_k_blocks=16)
        _, lse = reference.sparse_attention(q, k, v, selection)
        kl = reference.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)
    assert float(kl.detach().abs().max()) < 1e-6
    assert all(float(grad.abs().max()) < 1e-6 for grad in torch.autograd.grad(kl.sum(), (q_proxy, k_proxy)))


def test_the_first_row_and_masked_tokens_make_no_nan():
    leaves = tensors(2, 1, 130, 4, 2, 2, 1, dtype=torch.float32)
    selection = reference.select_blocks(*leaves[:2], top_k_blocks=2)
    with torch.autograd.detect_anomaly(check_nan=True):
        out, lse = reference.sparse_attention(*leaves[2:], selection)
        kl = reference.proxy_kl(*leaves[:4], lse, selection)
        grads = torch.autograd.grad(out.sum() + kl.sum(), leaves)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert not bool(grads[0][:, 0].any())
    one = tuple(leaf[:, :1] for leaf in leaves)
    alone = msa_attention(*one, top_k_blocks=2)
    assert alone.kl.tolist() == [0.0, 0.0]
    assert not any(bool(grad.any()) for grad in torch.autograd.grad(alone.kl.sum(), leaves[:2]))


def test_teacher_probabilities_that_underflow_make_no_nan():
    leaves = [leaf.detach() * 60 for leaf in tensors(3, 1, 40, 4, 2, 2, 1, dtype=torch.float32)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    kl = msa_attention(*leaves, top_k_blocks=2, block_size=8).kl
    assert bool(kl.isfinite().all())
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(kl.sum(), leaves[:2]))


def test_divergence_reaches_the_proxies_only_and_the_output_never_does():
    leaves = tensors(4, 1, 40, 4, 2, 2, 1)
    result = msa_attention(*leaves, top_k_blocks=2, block_size=8)
    by_kl = torch.autograd.grad(result.kl.sum(), leaves, allow_unused=True, retain_graph=True)
    by_out = torch.autograd.grad(result.out.sum(), leaves, allow_unused=True)
    assert [grad is None for grad in by_kl] == [False, False, True, True, True]
    assert [grad is None for grad in by_out] == [True, True, False, False, False]
    assert all(bool(grad.any()) for grad in by_kl[:2])
    _, lse = reference.dense_attention(*leaves[2:])
    assert not lse.requires_grad
    warm_up = torch.autograd.grad(reference.dense_proxy_kl(*leaves[:4], lse).sum(), leaves, allow_unused=True)
    assert [grad is None for grad in warm_up] == [False, False, True, True, True]


def test_the_mean_goes_over_rows_so_that_half_batches_average_to_the_whole():
    leaves = tensors(5, 8, 24, 4, 2, 2, 1)
    whole = msa_attention(*leaves, top_k_blocks=2, block_size=4).kl
    parts = [
        msa_attention(*(leaf[at : at + 2] for leaf in leaves), top_k_blocks=2, block_size=4).kl for at in (0, 2, 4, 6)
    ]
    torch.testing.assert_close(whole, torch.stack(parts).mean(0), rtol=1e-12, atol=0)
    for got, wanted in zip(
        torch.autograd.grad(torch.stack(parts).mean(0).sum(), leaves[:2]),
        torch.autograd.grad(whole.sum(), leaves[:2]),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lse_of_another_selection_is_refused(dtype):
    leaves = tensors(6, 1, 64, 4, 2, 2, 1, dim=16, dtype=dtype)
    selection = reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=8)
    _, lse = reference.sparse_attention(*leaves[2:], selection)
    _, dense_lse = reference.dense_attention(*leaves[2:])
    assert bool((reference.proxy_kl(*leaves[:4], lse, selection) > 0).all())
    for wrong in (dense_lse, lse / math.log(2), lse + 0.1):
        with pytest.raises(ValueError, match="lse belongs to another selection"):
            reference.proxy_kl(*leaves[:4], wrong, selection)
    with pytest.raises(ValueError, match="lse belongs to another selection"):
        reference.dense_proxy_kl(*leaves[:4], lse)
    with pytest.raises(ValueError, match=r"lse has shape \(1, 4, 64\)"):
        reference.proxy_kl(*leaves[:4], lse.transpose(1, 2), selection)


def test_a_selection_per_head_has_no_divergence_of_a_group():
    leaves = tensors(7, 1, 16, 4, 2, 2, 1)
    crossed = reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=4).for_heads([0, 1, 0, 1])
    _, lse = reference.sparse_attention(*leaves[2:], crossed)
    with pytest.raises(ValueError, match="selection has 4 proxies and q_proxy 2"):
        reference.proxy_kl(*leaves[:4], lse, crossed)


def test_following_the_gradient_teaches_the_proxy_where_its_heads_look():
    """Without any gradient through the choice, KL alone raises the recall of the heads' own top blocks."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 128, 16, generator=generator)
    q, k = (hidden @ torch.randn(16, 16, generator=generator) / 3 for _ in range(2))
    q, k = q[:, :, None], k[:, :, None]
    full = reference.block_scores(q, k, block_size=8)
    wanted = torch.zeros_like(full, dtype=torch.bool).scatter_(-1, full.topk(4).indices, True)[:, :, 64:]
    weights = [torch.randn(16, 8, generator=generator).mul_(0.1).requires_grad_() for _ in range(2)]
    start = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.Adam(weights, lr=0.03)

    def step():
        q_proxy, k_proxy = ((hidden @ weight)[:, :, None] for weight in weights)
        return msa_attention(q_proxy, k_proxy, q, k, k, top_k_blocks=4, block_size=8)

    def recall(selection: Selection):
        return float(wanted.gather(-1, selection.blocks[:, :, 64:].long().clamp(min=0)).float().mean())

    before = step()
    for _ in range(60):
        optimizer.zero_grad()
        step().kl.sum().backward()
        optimizer.step()
    after = step()
    assert after.kl.sum().item() < 0.7 * before.kl.sum().item()
    assert recall(after.selection) > recall(before.selection) + 0.1
    assert all(not torch.equal(weight, first) for weight, first in zip(weights, start, strict=True))
