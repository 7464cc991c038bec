"""Packed documents: their grid, and that each gives exactly what it gives alone."""

import pytest
import torch
from kernel_oracle import document_starts, tensors
from msa_kernels import random_selection, reference, window_selection
from msa_kernels.documents import layout


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("cu", [offsets(0, 12, 24), offsets(0, 0, 5, 12, 12, 12, 13, 24, 24), offsets(*range(25))])
def test_layout_counts_from_the_documents_start(cu):
    grid = layout(2, 12, 4, cu)
    starts = torch.tensor(document_starts(2, 12, cu))
    position = torch.arange(12) - starts
    assert all(field.dtype == torch.int32 for field in grid)
    assert grid.start.tolist() == starts.tolist()
    assert grid.position.tolist() == position.tolist()
    assert grid.block.tolist() == (position // 4).tolist()
    for document in grid.document.unique().tolist():
        tokens = (grid.document.flatten() == document).nonzero().flatten().tolist()
        assert tokens == list(range(int(cu[document]), int(cu[document + 1])))


def test_without_offsets_each_row_is_a_document():
    plain, packed = layout(3, 10, 4), layout(3, 10, 4, offsets(0, 10, 20, 30))
    assert all(torch.equal(one, other) for one, other in zip(plain, packed, strict=True))


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        (torch.tensor([0, 12, 24]), "int64 .*must be int32"),
        (offsets(0, 12, 23), r"from 0 to batch x sequence = 24"),
        (offsets(1, 12, 24), r"from 0 to batch x sequence = 24"),
        (offsets(), r"from 0 to batch x sequence = 24"),
        (offsets(0, 12, 11, 24), "falls from 12 to 11"),
        (offsets(0, 11, 24), r"lacks 12; every row boundary"),
    ],
)
def test_offsets_that_describe_no_documents_are_refused(cu, message):
    with pytest.raises(ValueError, match=message):
        layout(2, 12, 4, cu)


LENGTHS = (7, 1, 20, 16, 4)


def run(leaves, selection, cu=None):
    q_proxy, k_proxy, q, k, v = leaves
    out, lse = reference.sparse_attention(q, k, v, selection)
    kl = reference.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)
    dense, dense_lse = reference.dense_attention(q, k, v, cu_seqlens=cu)
    dense_kl = reference.dense_proxy_kl(q_proxy, k_proxy, q, k, dense_lse, cu_seqlens=cu)
    rows = out.shape[0] * out.shape[1]
    loss = out.sin().sum() + dense.cos().sum() + rows * (kl.sum() + 2 * dense_kl.sum())
    return out, dense, lse, rows * kl, rows * dense_kl, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("rule", [{"num_local_blocks": 1}, {"num_local_blocks": 0}, {"num_sink_blocks": 1}])
def test_packed_documents_equal_the_same_documents_alone(rule):
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    packed = tensors(0, 1, 48, 4, 2, 2, 1)
    how = {"top_k_blocks": 2, "block_size": 4, **rule}
    selection = reference.select_blocks(*packed[:2], **how, cu_seqlens=cu)
    out, dense, lse, kl, dense_kl, grads = run(packed, selection, cu)
    total, dense_total = torch.zeros_like(kl), torch.zeros_like(kl)
    for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        alone = tuple(leaf.detach()[:, begin:end].clone().requires_grad_() for leaf in packed)
        chosen = reference.select_blocks(*alone[:2], **how)
        assert torch.equal(selection.blocks[:, :, begin:end], chosen.blocks)
        one = run(alone, chosen)
        torch.testing.assert_close(out[:, begin:end], one[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dense[:, begin:end], one[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[:, begin:end], one[2], rtol=1e-12, atol=1e-12)
        for got, wanted in zip(grads, one[5], strict=True):
            torch.testing.assert_close(got[:, begin:end], wanted, rtol=1e-12, atol=1e-12)
        total += one[3]
        dense_total += one[4]
    torch.testing.assert_close(kl, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dense_kl, dense_total, rtol=1e-12, atol=1e-12)


def test_a_boundary_inside_a_block_lets_nothing_through():
    cu = offsets(0, 192, 384)
    leaves = tensors(1, 1, 384, 2, 1, 1, 1, dim=8, dtype=torch.float32)
    selection = reference.select_blocks(*leaves[:2], top_k_blocks=3, cu_seqlens=cu)
    assert selection.blocks[0, 0, 192].tolist() == [0, -1, -1]
    out, _ = reference.sparse_attention(*leaves[2:], selection)
    torch.testing.assert_close(out[0, 192, 0], leaves[4][0, 192, 0])  # it sees one key: itself
    for part in (slice(0, 192), slice(192, 384)):
        dense, _ = reference.dense_attention(*(x[:, part] for x in leaves[2:]))
        torch.testing.assert_close(out[:, part], dense, rtol=1e-5, atol=1e-5)


def test_other_documents_change_nothing():
    cu = offsets(0, 15, 40)
    leaves = tensors(2, 1, 40, 4, 2, 2, 1)
    changed = tuple(leaf.detach().clone() for leaf in leaves)
    for leaf in changed:
        leaf[:, :15] = 100 * leaf[:, :15] + 1
    results = []
    for inputs in (leaves, tuple(leaf.requires_grad_() for leaf in changed)):
        selection = reference.select_blocks(*inputs[:2], top_k_blocks=2, block_size=4, cu_seqlens=cu)
        out, _ = reference.sparse_attention(*inputs[2:], selection)
        grads = torch.autograd.grad(out[:, 15:].sum(), inputs[2:])
        assert all(not bool(grad[:, :15].any()) for grad in grads)
        results.append((selection.blocks[:, :, 15:], out[:, 15:], *(grad[:, 15:] for grad in grads)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_empty_documents_as_padding_change_nothing():
    leaves = tensors(3, 2, 20, 2, 1, 2, 1)
    plain, padded = offsets(0, 6, 20, 40), offsets(0, 0, 6, 6, 20, 20, 40, 40, 40)
    one, other = (
        run(leaves, reference.select_blocks(*leaves[:2], top_k_blocks=2, block_size=4, cu_seqlens=cu), cu)
        for cu in (plain, padded)
    )
    for got, wanted in zip((*one[:5], *one[5]), (*other[:5], *other[5]), strict=True):
        assert torch.equal(got, wanted)
    keys = torch.arange(2)
    rules = {"top_k_blocks": 2, "block_size": 4}
    assert torch.equal(
        random_selection(2, 20, 2, **rules, keys=keys, cu_seqlens=plain).blocks,
        random_selection(2, 20, 2, **rules, keys=keys, cu_seqlens=padded).blocks,
    )
    assert torch.equal(
        window_selection(2, 20, **rules, cu_seqlens=plain).blocks,
        window_selection(2, 20, **rules, cu_seqlens=padded).blocks,
    )
