"""What the host does with the gradients' kernels, which plain PyTorch stands in for: windows, items, sums, autograd."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_cute
from msa_kernels import cute, dispatch, msa_attention, reference
from msa_kernels.cute import dense, hopper, kl, windows
from msa_kernels.selection import Selection, random_selection

MODULES = ("attend", "backward", "dense", "gradients", "index", "kl", "layout", "merge", "scores", "topk")
# batch, sequence, query, KV, selecting, proxy and proxy KV heads, slots, documents
SHAPES = {
    "grouped": (1, 300, 4, 2, 4, 4, 1, 3, None),
    "kv_heads_share_a_selection": (1, 260, 4, 2, 1, 1, 1, 2, None),
    "proxies_share_a_selection": (1, 260, 4, 1, 1, 2, 2, 2, None),
    "lists_are_repeated": (1, 140, 32, 1, 1, 2, 1, 2, None),
    "documents": (2, 420, 2, 1, 2, 2, 1, 3, (0, 1, 1, 140, 420, 421, 500, 840)),
    "windows": (2, 1500, 2, 1, 2, 2, 1, 4, (0, 700, 1500, 1530, 3000)),
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in MODULES:
        monkeypatch.setattr(f"msa_kernels.cute.{module}.load", emulated_cute.load)
    for name, value in {"SHORTEST": 64, "LONGEST": 192, "TASKS": 20}.items():
        monkeypatch.setattr(windows, name, value)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(hopper, "processors", lambda _: 1)
    monkeypatch.setattr(dispatch, "_cute_obstacle", lambda *_: None)
    monkeypatch.setitem(kl.PART_SCALE, "float32", 1.0)
    # Fills memory that nothing was written to: NaNs, and the largest integers.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape is cut into three windows, two of which the forward pass takes at a time."""
    if "windows" in request.node.name:
        monkeypatch.setattr(windows, "PART_BYTES", 2**20)
        monkeypatch.setattr(windows, "PART_SHARE", 0)
        monkeypatch.setattr(windows, "PARTIAL_BYTES", 2048 * 2 * 4 * (64 * 4 + 4))


def _problem(name: str) -> tuple[list[torch.Tensor], Selection]:
    batch, sequence, heads, kv_heads, selections, proxies, proxy_keys, slots, documents = SHAPES[name]
    generator = torch.Generator().manual_seed(1)
    numbers = proxies, proxy_keys, heads, kv_heads, kv_heads
    leaves = [torch.randn(batch, sequence, n, 64, generator=generator).requires_grad_() for n in numbers]
    offsets = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    rows = torch.arange(batch)
    selection = random_selection(batch, sequence, selections, top_k_blocks=slots, keys=rows, cu_seqlens=offsets)
    blocks = selection.blocks.clone()
    blocks[:, 0, 100:130] = -1  # nothing selected
    blocks[:, 0, 240:260, 1:] = -1  # not the own block, or it alone
    return leaves, selection._replace(blocks=blocks)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_attention(name: str, small_windows: None):
    (*_, q, k, v), selection = _problem(name)
    out, lse = reference.sparse_attention(q, k, v, selection)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(out, (q, k, v), upstream)
    ours, our_lse = cute.sparse_attention(q, k, v, selection)
    _close(ours, out)
    _close(our_lse, lse)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), upstream), expected, strict=True):
        _close(a, b)


def _step(q_proxy: torch.Tensor, k_proxy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given):
    """Output and KL of one layer."""
    return msa_attention(q_proxy, k_proxy, q, k, v, selection=Selection(*given), backend="cute")[:2]


def _apart(*given):
    """The same by an op each."""
    *leaves, selection = given
    out, lse = cute.sparse_attention(*leaves[2:], Selection(*selection))
    return out, cute.proxy_kl(*leaves[:4], lse, Selection(*selection))


def _recomputed(*given):
    return torch.utils.checkpoint.checkpoint(_step, *given, use_reentrant=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "windows" else ()) for name in SHAPES]
)
def test_a_layer_trains_plainly_recomputed_and_compiled(name: str, small_windows: None):
    leaves, selection = _problem(name)
    out, lse = reference.sparse_attention(*leaves[2:], selection)
    value = reference.proxy_kl(*leaves[:4], lse, selection)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)), torch.arange(1.0, len(value) + 1)
    expected = out, value, *torch.autograd.grad((out, value), leaves, upstream)
    torch._dynamo.reset()
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")
    found = []
    for step in (_apart, _step, *((_recomputed, compiled) if name == "grouped" else ())):
        results = step(*leaves, tuple(selection))
        found.append([*results, *torch.autograd.grad(results, leaves, upstream)])
        for ours, theirs in zip(found[-1], expected, strict=True):
            _close(ours, theirs)
    for others in found[1:] if name != "windows" else ():  # which an op alone may have others of
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(others, found[0], strict=True))


def test_a_compiled_step_takes_any_length():
    leaves, selection = _problem("grouped")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")
    for length in (300, 170, 290):
        part = [x[:, :length].detach().requires_grad_() for x in leaves]
        given = selection.blocks[:, :, :length], 128, None
        found = [step(*part, given) for step in (_step, compiled)]
        found = [(*results, *torch.autograd.grad((results[0].sum(), results[1].sum()), part)) for results in found]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_step_makes_grid_index_and_rows_once(monkeypatch: pytest.MonkeyPatch):
    kernels = []

    def load(kernel):
        kernels.append(type(kernel).__name__)
        return emulated_cute.load(kernel)

    for module in MODULES:
        monkeypatch.setattr(f"msa_kernels.cute.{module}.load", load)
    leaves, selection = _problem("grouped")
    out, value = _step(*leaves, tuple(selection))
    shared = ["Layout", "ReverseIndex", "Attend", "Merge"]
    of_kl = ["Attend", "Merge", "ProxyKL"]
    assert kernels == [*shared, *of_kl, "SumProxies"]
    kernels.clear()
    torch.autograd.grad(out.sum(), leaves, allow_unused=True, retain_graph=True)
    assert kernels == ["Deltas", "Backward", "SumKeys", "SumQueries"]
    kernels.clear()
    torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    assert kernels == ["Scale"]
    kernels.clear()
    with torch.no_grad():
        _step(*leaves, tuple(selection))
    assert kernels == [*shared, *of_kl, "SumValues"]
    kernels.clear()
    cute.sparse_attention(*leaves[2:], selection)
    assert kernels == shared


def test_what_has_no_upstream_has_no_gradient():
    leaves, selection = _problem("grouped")
    out, value = _step(*leaves, tuple(selection))
    found = torch.autograd.grad(out.sum(), leaves, allow_unused=True, retain_graph=True)
    assert [x is None for x in found] == [True, True, False, False, False]
    found = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    assert [x is None for x in found] == [False, False, True, True, True]


@pytest.mark.parametrize("learning", ["proxies", "main", "a key"])
def test_what_does_not_learn_is_neither_computed_nor_kept(learning: str):
    leaves, selection = _problem("grouped")
    out, value = _step(*leaves, tuple(selection))
    expected = torch.autograd.grad((out.sum(), value.sum()), leaves)
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    which = {"proxies": (0, 1), "main": (2, 3, 4), "a key": (3,)}[learning]
    given = [x.detach().requires_grad_(i in which) for i, x in enumerate(leaves)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = _step(*given, tuple(selection))
    assert [x.requires_grad for x in results] == [learning != "proxies", learning == "proxies"]
    # The KL's two gradients; or q, k, v, blocks, out, lse and eight tensors of grid, index and rows.
    assert sum(x.numel() > 0 for x in kept) == (2 if learning == "proxies" else 14)
    for both in zip(results, (out, value), strict=True):
        assert torch.equal(*both)
    learnt = [leaf for leaf in given if leaf.requires_grad]
    found = torch.autograd.grad(sum(x.sum() for x in results if x.requires_grad), learnt)
    assert all(torch.equal(ours, expected[i]) for ours, i in zip(found, which, strict=True))


def test_passes_over_one_graph_repeat_and_accumulate():
    leaves, selection = _problem("grouped")
    out, value = _step(*leaves, tuple(selection))
    first = torch.autograd.grad(out.sum() + value.sum(), leaves, retain_graph=True)
    (out.sum() + value.sum()).backward(retain_graph=True)
    (out.sum() + value.sum()).backward()
    for leaf, once in zip(leaves, first, strict=True):
        assert torch.equal(leaf.grad, once + once)


@pytest.mark.parametrize("name", ["grouped", "documents"])
def test_operations_are_what_pytorch_asks_of_them(name: str):
    leaves, selection = _problem(name)
    about = selection.blocks, selection.cu_seqlens, 128
    plain = [x.detach() for x in leaves]
    out, lse, _, dq, dk, kept = cute.ops.attention_and_kl(*plain, *about, 1024, True)
    # Without the dispatch under symbolic shapes, which `test_a_compiled_step_takes_any_length` goes through.
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    for operation, given in (
        (cute.ops.select_blocks, (*plain[:2], about[1], 3, 128, 1, 1)),
        (cute.ops.selected_lse, (*plain[2:4], *about)),
        (cute.ops.attention_and_kl, (*leaves, *about, 1024, True)),
        (cute.ops.attention_and_kl, (None, None, *leaves[2:], *about, 1024, False)),
        (cute.ops.attention_gradients, (*plain[2:], about[0], 128, 1024, out, lse, torch.ones_like(out), kept)),
        (cute.ops.proxy_kl, (*leaves[:2], *plain[2:4], lse, *about, True)),
        (cute.ops.scale_gradients, (dq, dk, torch.ones(dq.shape[2]), 1, torch.float32)),
        (cute.ops.sparse_attention, (*plain[2:], *about, None)),
    ):
        torch.library.opcheck(operation, given, test_utils=tests)


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
def test_the_kl_and_its_gradients(name: str, small_windows: None):
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
    monkeypatch.undo()
    for total, documents in ((1, 1), (1000, 3), (8192, 1), (16384, 1), (131072, 1), (131072, 500), (524288, 300)):
        blocks = torch.empty(1, 4, total, 16, dtype=torch.int32, device="meta")
        q = torch.empty(1, total, 16, 128, dtype=torch.bfloat16, device="meta")
        size = windows.sizes(blocks, torch.empty(documents + 1, device="meta"), 128)
        window = windows.part_window(size, windows.attention_parts(q, 4, 128), q)
        assert window % windows.TILE == 0
        assert window * size.windows(window) < total + windows.TILE * size.windows(window)
        tokens, items = min(window, total), size.items(4, window)
        parts = tokens * 4 * 16 * 4 * 128 * 2 + items * 2 * 128 * 128 * 4
        assert parts <= max(windows.PART_BYTES, windows.PART_SHARE * total * 16 * 128 * 2), (total, documents)
        most_blocks = min(total // 128 + documents, tokens // 128 + documents + 2)
        assert items >= tokens * 64 // size.task + 4 * most_blocks - 4
        assert size.tasks(window) >= total * 64 // size.task + 4 * size.windows(window) * size.ids
        for main_learns in (True, False):
            serving = windows.step_window(size, q, 2, q[:, :, :4], main_learns=main_learns, proxies_learn=True)
            assert serving <= windows.part_window(size, windows.kl_parts(q[:, :, :4], 128, True), q)
            assert serving <= (window if main_learns else windows.forward_window(size, 16, 260))
