"""What the host does with the gradients' kernels, which plain PyTorch stands in for: windows, items, sums, autograd."""

import contextlib

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_cute
from msa_kernels import cute, reference
from msa_kernels.cute import attend, backward, dense, gradients, hopper, index, kl, layout, merge, ops
from msa_kernels.selection import Selection, random_selection

# batch, sequence, query, KV, selecting, proxy and proxy KV heads, slots, documents
SHAPES = {
    "grouped": (1, 300, 4, 2, 4, 4, 1, 3, None),
    "kv_heads_share_a_selection": (1, 260, 4, 2, 1, 1, 1, 2, None),
    "proxies_share_a_selection": (1, 260, 4, 1, 1, 2, 2, 2, None),
    "documents": (2, 420, 2, 1, 2, 2, 1, 3, (0, 1, 1, 140, 420, 421, 500, 840)),
    "windows": (2, 1500, 2, 1, 2, 2, 1, 4, (0, 700, 1500, 1530, 3000)),
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attend, backward, dense, gradients, index, kl, layout, merge):
        monkeypatch.setattr(module, "load", emulated_cute.load)
    for module in (index, gradients):
        monkeypatch.setattr(module, "TASK", 64)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(hopper, "processors", lambda _: 1)
    monkeypatch.setattr(cute, "KL_BLOCK_SIZES", (128,))
    monkeypatch.setitem(kl.PART_SCALE, "float32", 1.0)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: _poisoned(empty(*a, **k)))


def _poisoned(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(float("nan") if x.is_floating_point() else -7)


def _problem(name: str) -> tuple[list[torch.Tensor], Selection]:
    batch, sequence, heads, kv_heads, selections, proxies, proxy_keys, slots, documents = SHAPES[name]
    generator = torch.Generator().manual_seed(1)
    numbers = proxies, proxy_keys, heads, kv_heads, kv_heads
    leaves = [torch.randn(batch, sequence, n, 64, generator=generator).requires_grad_() for n in numbers]
    offsets = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    rows = torch.arange(batch)
    selection = random_selection(batch, sequence, selections, top_k_blocks=slots, keys=rows, cu_seqlens=offsets)
    blocks = selection.blocks.clone()
    blocks[:, 0, 200:230] = -1  # nothing selected
    blocks[:, 0, 240:260, 1:] = -1  # not the own block, or it alone
    return leaves, selection._replace(blocks=blocks)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_attention(name: str, monkeypatch: pytest.MonkeyPatch):
    if name == "windows":
        monkeypatch.setattr(gradients, "PART_BYTES", 2**20)
        monkeypatch.setattr(gradients, "PART_SHARE", 0)
    (*_, q, k, v), selection = _problem(name)
    out, lse = reference.sparse_attention(q, k, v, selection)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(out, (q, k, v), upstream)
    given = q.detach(), k.detach(), v.detach(), selection.blocks, selection.cu_seqlens, 128, out.detach(), lse
    ours = ops.attention_gradients(*given, upstream)
    for a, b in zip(ours, expected, strict=True):
        _close(a, b)


def _step(q_proxy: torch.Tensor, k_proxy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given):
    """Output and KL of one layer."""
    selection = Selection(*given)
    out, lse = cute.sparse_attention(q, k, v, selection)
    return out, cute.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)


def test_a_layer_trains_plainly_recomputed_and_compiled():
    leaves, selection = _problem("grouped")
    out, lse = reference.sparse_attention(*leaves[2:], selection)
    value = reference.proxy_kl(*leaves[:4], lse, selection)
    expected = torch.autograd.grad(out.square().sum() + value.sum(), leaves)
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")

    def recomputed(*given):
        return torch.utils.checkpoint.checkpoint(_step, *given, use_reentrant=False)

    for step in (_step, recomputed, compiled):
        ours, kl_value = step(*leaves, tuple(selection))
        assert not ours.isnan().any()
        _close(kl_value, value)
        found = torch.autograd.grad(ours.square().sum() + kl_value.sum(), leaves)
        for a, b in zip(found, expected, strict=True):
            _close(a, b)


def test_what_has_no_upstream_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    leaves, selection = _problem("grouped")
    out, value = _step(*leaves, tuple(selection))
    monkeypatch.setattr(gradients, "scale", None)
    found = torch.autograd.grad(out.sum(), leaves, allow_unused=True, retain_graph=True)
    assert [x is None for x in found] == [True, True, False, False, False]
    monkeypatch.undo()
    monkeypatch.setattr(gradients, "attention_gradients", None)
    monkeypatch.setattr(gradients, "load", emulated_cute.load)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    found = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    assert [x is None for x in found] == [False, False, True, True, True]


@pytest.mark.parametrize("name", SHAPES)
def test_the_dense_kl_and_its_gradients(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense, "PART_BYTES", 2**20 if name == "windows" else 2**29)
    (q_proxy, k_proxy, q, k, v), selection = _problem(name)
    if q_proxy.shape[2] < k.shape[2]:
        pytest.skip("left to flex")
    offsets = selection.cu_seqlens
    _, lse = reference.dense_attention(q, k, v, cu_seqlens=offsets)
    values, found = [], []
    for path in (reference, cute):
        value = path.dense_proxy_kl(q_proxy, k_proxy, q, k, lse, cu_seqlens=offsets)
        values.append(value)
        found.append(torch.autograd.grad(value, (q_proxy, k_proxy), torch.arange(1.0, len(value) + 1)))
    _close(values[1], values[0])
    for theirs, ours in zip(*found, strict=True):
        _close(ours, theirs)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kl_and_its_gradients(name: str, monkeypatch: pytest.MonkeyPatch):
    if name == "windows":
        monkeypatch.setattr(gradients, "PART_BYTES", 2**20)
        monkeypatch.setattr(gradients, "PART_SHARE", 0)
    (q_proxy, k_proxy, q, k, v), selection = _problem(name)
    _, lse = reference.sparse_attention(q, k, v, selection)
    values, found = [], []
    for path in (reference, cute):
        value = path.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)
        upstream = torch.arange(1.0, len(value) + 1)
        values.append(value)
        found.append(torch.autograd.grad(value, (q_proxy, k_proxy, q, k), upstream, allow_unused=True))
    _close(values[1], values[0])
    for theirs, ours in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            _close(ours, theirs)
    with torch.no_grad():
        _close(cute.proxy_kl(q_proxy, k_proxy, q, k, lse, selection), values[0].detach())


def test_windows_are_of_one_size_and_have_room_for_their_items(monkeypatch: pytest.MonkeyPatch):
    for module in (index, gradients):
        monkeypatch.setattr(module, "TASK", 512)

    def made(total: int, documents: int) -> gradients.Plan:
        ids = total // 128 + documents
        blocks = torch.empty(1, 4, total, 16, dtype=torch.int32, device="meta")
        q = torch.empty(total, 16, 128, dtype=torch.bfloat16, device="meta")
        grid = (torch.empty(n, dtype=torch.int32, device="meta") for n in (total, ids, ids))
        problem = attend.Problem(q, q[:, :2], q[:, :2], blocks, 128, *grid)
        return gradients.plan(problem, 4, 4, 128 * 2, 2 * 128 * 128 * 4)

    for total, documents in ((1, 1), (1000, 3), (8192, 1), (16384, 1), (131072, 1), (131072, 500), (524288, 300)):
        plan = made(total, documents)
        assert plan.size % index.TILE == 0
        assert [window.begin for window in plan.windows] == list(range(0, total, plan.size))
        assert plan.windows[-1].end == total
        parts = plan.tokens * 4 * 16 * 4 * 128 * 2 + plan.items * 2 * 128 * 128 * 4
        assert parts <= max(gradients.PART_BYTES, gradients.PART_SHARE * total * 16 * 128 * 2), (total, documents)
        most_blocks = min(total // 128 + documents, plan.tokens // 128 + documents + 2)
        assert plan.items >= plan.tokens * 64 // 512 + 4 * most_blocks - 4
