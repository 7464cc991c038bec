"""The FlexAttention path against the reference, in fp64 on the CPU, where it runs unfused."""

from typing import NamedTuple

import pytest
import torch
from msa_kernels import flex, reference
from msa_kernels import selection as selections
from msa_kernels.selection import Selection
from torch.nn.attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

DOCUMENTS = (0, 30, 30, 130, 200, 200, 333, 400)


class Case(NamedTuple):
    batch: int
    sequence: int
    heads: int
    kv_heads: int
    proxies: int
    proxy_kv_heads: int
    block_size: int
    slots: int
    dim: int = 16
    documents: tuple[int, ...] | None = None


CASES = {
    "rows": Case(2, 300, 4, 2, 2, 1, block_size=4, slots=6),
    "proxy_over_kv_heads": Case(1, 257, 4, 4, 2, 2, block_size=64, slots=3),
    "documents": Case(2, 200, 4, 2, 4, 1, block_size=48, slots=2, documents=DOCUMENTS),
    "block_over_tile": Case(1, 300, 4, 1, 2, 1, block_size=256, slots=1),
    "one_token": Case(2, 1, 4, 2, 2, 1, block_size=16, slots=3),
    "many_words": Case(1, 300, 2, 1, 2, 1, block_size=1, slots=30),
    "long": Case(1, 2100, 2, 1, 2, 1, block_size=128, slots=3, dim=4),
}


@pytest.fixture(autouse=True)
def differentiable(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention refuses gradients on a CPU, though its unfused form has them."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


def make(case):
    torch.manual_seed(0)

    def tensor(heads, width):
        return torch.randn(case.batch, case.sequence, heads, width, dtype=torch.float64, requires_grad=True)

    proxy_branch = tensor(case.proxies, 8), tensor(case.proxy_kv_heads, 8)
    main_branch = tensor(case.heads, case.dim), tensor(case.kv_heads, case.dim), tensor(case.kv_heads, 2 * case.dim)
    offsets = None if case.documents is None else torch.tensor(case.documents, dtype=torch.int32)
    return proxy_branch, main_branch, offsets


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def gradients(path, proxy_branch, main_branch, offsets, selection):
    """Values, then the gradients of all inputs, weighted differently for each proxy."""
    q, k, v = main_branch
    if selection is None:
        out, lse = path.dense_attention(q, k, v, cu_seqlens=offsets)
        kl = path.dense_proxy_kl(*proxy_branch, q, k, lse, cu_seqlens=offsets)
    else:
        out, lse = path.sparse_attention(q, k, v, selection)
        kl = path.proxy_kl(*proxy_branch, q, k, lse, selection)
    main = torch.autograd.grad(out.sin().sum(), main_branch)
    proxies = torch.autograd.grad((kl * torch.arange(1, len(kl) + 1)).sum(), proxy_branch)
    return out, lse, kl, *main, *proxies


@pytest.mark.parametrize("name", [name for name in CASES if name != "long"])
def test_everything_equals_the_reference(name):
    case = CASES[name]
    proxy_branch, main_branch, offsets = make(case)
    options = {"block_size": case.block_size, "cu_seqlens": offsets}
    assert_same(flex.block_scores(*proxy_branch, **options), reference.block_scores(*proxy_branch, **options))
    selection = reference.select_blocks(*proxy_branch, top_k_blocks=case.slots, **options)
    assert torch.equal(flex.select_blocks(*proxy_branch, top_k_blocks=case.slots, **options).blocks, selection.blocks)
    for chosen in (selection, None):
        ours = gradients(flex, proxy_branch, main_branch, offsets, chosen)
        theirs = gradients(reference, proxy_branch, main_branch, offsets, chosen)
        for actual, expected in zip(ours, theirs, strict=True):
            assert_same(actual, expected)


@pytest.mark.parametrize("name", ["rows", "proxy_over_kv_heads", "documents", "block_over_tile"])
def test_tiles_are_exactly_those_that_hold_a_selected_token(name, monkeypatch):
    monkeypatch.setattr(flex, "TILE", 32)
    case = CASES[name]
    proxy_branch, _, offsets = make(case)
    sequence, count = case.sequence, -(-case.sequence // 32)
    selection = reference.select_blocks(
        *proxy_branch, top_k_blocks=case.slots, block_size=case.block_size, cu_seqlens=offsets
    )
    start = flex._starts(case.batch, sequence, offsets, torch.device("cpu"))
    sees = torch.zeros(case.batch, case.proxies, count * 32, count * 32, dtype=torch.bool)
    for b, p, i, slot in torch.cartesian_prod(*(torch.arange(n) for n in selection.blocks.shape)).tolist():
        block = int(selection.blocks[b, p, i, slot])
        if block >= 0:
            first = block * case.block_size + (0 if start is None else int(start[b, i]))
            sees[b, p, i, first : min(first + case.block_size, i + 1)] = True
    expected = sees.unflatten(2, (count, 32)).unflatten(4, (count, 32)).any(5).any(3)
    tiles = flex._selected_tiles(selection.blocks, start, case.block_size)
    assert torch.equal(tiles, expected)
    for listed, dense in (
        (flex._order(tiles), tiles),
        (flex._order(tiles.transpose(-1, -2)), tiles.transpose(-1, -2)),
    ):
        number, order = listed
        rank = torch.arange(count)
        again = torch.zeros_like(dense).scatter(-1, order.long(), rank < number[..., None])
        assert torch.equal(again, dense)
        assert order.is_contiguous()


def test_chunks_of_different_key_lengths_add_up(monkeypatch):
    proxy_branch, main_branch, _ = make(CASES["long"])
    selection = reference.select_blocks(*proxy_branch, top_k_blocks=3)
    q, k, v = (tensor.detach() for tensor in main_branch)
    _, lse = reference.sparse_attention(q, k, v, selection)
    expected = reference.proxy_kl(*proxy_branch, q, k, lse, selection)
    monkeypatch.setattr(flex, "CHUNK_SCORES", 2 * 2100 * 300)
    lengths = {keys for _, _, keys in flex._chunks(0, 2100, 2100, 2, flex.CHUNK_SCORES)}
    assert flex.KEY_LENGTHS / 2 < len(lengths) <= flex.KEY_LENGTHS
    assert torch.equal(flex.select_blocks(*proxy_branch, top_k_blocks=3).blocks, selection.blocks)
    some = flex.block_scores(*proxy_branch, queries=(700, 1500))
    assert_same(some, reference.block_scores(*proxy_branch, queries=(700, 1500)))
    actual = flex.proxy_kl(*proxy_branch, q, k, lse, selection)
    assert_same(actual, expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual.sum(), proxy_branch), torch.autograd.grad(expected.sum(), proxy_branch), strict=True
    ):
        assert_same(ours, theirs)


@pytest.mark.parametrize(("sequence", "heads"), [(4096, 64), (32768, 8), (5000, 6)])
def test_chunks_cover_every_visible_score_once_and_little_else(sequence, heads):
    most = 2**28
    chunks = list(flex._chunks(0, sequence, sequence, heads, most))
    assert [begin for begin, _, _ in chunks] == [0] + [end for _, end, _ in chunks[:-1]]
    assert chunks[-1][1] == sequence
    assert all(end <= keys <= sequence and heads * (end - begin) * keys <= most for begin, end, keys in chunks)
    assert sum((end - begin) * keys for begin, end, keys in chunks) <= 0.63 * sequence**2
    assert len({keys for _, _, keys in chunks}) <= flex.KEY_LENGTHS


@pytest.mark.parametrize("rule", [(1, 1, 0), (4, 1, 0), (5, 2, 1), (3, 0, 0), (8, 1, 2)])
def test_blocks_chosen_by_rounds_and_by_sorting_are_the_same(rule, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    for sequence, block_size, documents in ((40, 4, None), (40, 16, None), (60, 4, (0, 7, 7, 40, 60, 120))):
        count = -(-sequence // block_size)
        # Few values, so that many tie.
        scores = torch.randint(-2, 3, (2, 3, sequence, count), generator=generator).float()
        odd = torch.rand(scores.shape, generator=generator)
        scores = scores.masked_fill(odd < 0.2, -torch.inf).masked_fill(odd > 0.9, torch.nan)
        scores = scores.masked_fill((odd > 0.8) & (odd < 0.85), torch.inf)
        options = dict(zip(("top_k_blocks", "num_local_blocks", "num_sink_blocks"), rule, strict=True))
        options |= {"block_size": block_size, "sequence": sequence}
        if documents is not None:
            options["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
        monkeypatch.setattr(selections, "MOST_ROUNDS", 8)
        rounds = selections.select_from_scores(scores, **options).blocks
        monkeypatch.setattr(selections, "MOST_ROUNDS", 0)
        assert torch.equal(rounds, selections.select_from_scores(scores, **options).blocks)


def test_a_row_without_any_block_gives_zero_and_counts_in_no_mean():
    proxy_branch, main_branch, _ = make(CASES["rows"])
    selection = reference.select_blocks(*proxy_branch, top_k_blocks=3, block_size=16)
    blocks = selection.blocks.clone()
    blocks[:, 1, 40:90] = -1
    selection = Selection(blocks, 16)
    ours = gradients(flex, proxy_branch, main_branch, None, selection)
    theirs = gradients(reference, proxy_branch, main_branch, None, selection)
    for actual, expected in zip(ours, theirs, strict=True):
        assert_same(actual, expected)
    assert not ours[0][:, 40:90, 2:].any()
    assert ours[0][:, 40:90, :2].all()


def test_one_selection_for_all_proxies():
    proxy_branch, main_branch, _ = make(CASES["rows"])
    selection = reference.select_blocks(*proxy_branch, top_k_blocks=3, block_size=16)
    shared = selection._replace(blocks=selection.blocks[:, :1].contiguous())
    for actual, expected in zip(
        gradients(flex, proxy_branch, main_branch, None, shared),
        gradients(reference, proxy_branch, main_branch, None, shared),
        strict=True,
    ):
        assert_same(actual, expected)


def test_kl_reaches_the_proxies_only_and_computes_no_gradient_that_nobody_needs(monkeypatch):
    proxy_branch, (q, k, v), _ = make(CASES["rows"])
    selection = reference.select_blocks(*proxy_branch, top_k_blocks=3, block_size=16)
    _, lse = flex.sparse_attention(q, k, v, selection)
    assert not lse.requires_grad
    flex.proxy_kl(*proxy_branch, q, k, lse, selection).sum().backward()
    assert q.grad is None
    assert k.grad is None
    assert all(tensor.grad.any() for tensor in proxy_branch)

    asked = []
    chunk = flex._kl_chunk
    monkeypatch.setattr(flex, "_kl_chunk", lambda *args: asked.append(args[-1] is not None) or chunk(*args))
    flex.proxy_kl(*(tensor.detach() for tensor in proxy_branch), q, k, lse, selection)
    with torch.no_grad():
        flex.proxy_kl(*proxy_branch, q, k, lse, selection)
    flex.proxy_kl(*proxy_branch, q, k, lse, selection)
    assert asked == [False, False, True]


def test_a_nan_is_not_hidden():
    proxy_branch, (q, k, v), _ = make(CASES["rows"])
    selection = reference.select_blocks(*proxy_branch, top_k_blocks=3, block_size=16)
    with torch.no_grad():
        q[0, 200, 1] = torch.nan
        _, lse = flex.sparse_attention(q, k, v, selection)
        kl = flex.proxy_kl(*proxy_branch, q, k, lse, selection)
    assert kl.isnan().tolist() == [True, False]


def test_flops_are_those_of_the_matrix_products():
    proxy_branch, (q, k, v), _ = make(CASES["rows"])
    with FlopCounterMode(display=False) as counter:
        selection = flex.select_blocks(*proxy_branch, top_k_blocks=3, block_size=16)
    scores = 2 * 300 * 300 // 2
    assert counter.get_total_flops() == 2 * scores * 2 * 8
    _, lse = reference.sparse_attention(q, k, v, selection)
    student_lse = flex._student_lse(*proxy_branch, selection.blocks, None, 16)
    inputs = *proxy_branch, q, k, lse, student_lse, selection.blocks, None, 16
    with FlopCounterMode(display=False) as counter:
        torch.ops.msa_kernels.flex_proxy_kl(*inputs, True)
    assert counter.get_total_flops() == 2 * scores * (4 * 16 + 3 * 2 * 8)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.main = torch.nn.Linear(16, 64 + 32 + 32)
        self.proxy = torch.nn.Linear(16, 16 + 8)

    def forward(self, x, offsets):
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in self.main(x).split([64, 32, 32], -1))
        q_proxy, k_proxy = (part.unflatten(-1, (-1, 8)) for part in self.proxy(x.detach()).split([16, 8], -1))
        selection = flex.select_blocks(q_proxy, k_proxy, top_k_blocks=3, block_size=16, cu_seqlens=offsets)
        out, lse = flex.sparse_attention(q, k, v, selection)
        warm_out, warm_lse = flex.dense_attention(q, k, v, cu_seqlens=offsets)
        kl = flex.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)
        warm_kl = flex.dense_proxy_kl(q_proxy, k_proxy, q, k, warm_lse, cu_seqlens=offsets)
        return (out + warm_out).square().mean() + (kl + warm_kl).sum()


def test_a_model_compiles_into_one_graph_forward_and_backward():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 200, 16)
    offsets = torch.tensor(DOCUMENTS, dtype=torch.int32)
    parameters = tuple(layer.parameters())
    expected = torch.autograd.grad(layer(x, offsets), parameters)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    actual = torch.autograd.grad(compiled(x, offsets), parameters)
    torch.testing.assert_close(actual, expected)


def test_many_shapes_compile_once_each_in_every_mode(monkeypatch):
    # Dynamo's limit of compilations is for one code object; a call from compiled code has other dispatch keys.
    compilations = []

    def backend(graph, inputs):
        compilations.append(inputs[0].shape)
        return graph

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options, **kept: compiler(function, backend=backend, **kept))
    flex._compile.cache_clear()
    modes = (torch.enable_grad, torch.no_grad, torch.inference_mode, torch._C._AutoDispatchBelowADInplaceOrView)
    for _ in range(2):
        for length in range(2, 14):
            x = torch.rand(length, 3)
            for mode in modes:
                with mode():
                    assert torch.equal(flex._compile(flex._order, (x.shape,))(x)[0], x.sum(-1, dtype=torch.int32))
    flex._compile.cache_clear()
    assert len(compilations) == 12 * len(modes)
