"""The Hopper kernels on a GPU: the proxies' KL and its gradients against the reference in fp64, for one selection."""

import pytest
import torch
from cute_cases import (
    KINDS,
    TEACHING,
    WRITTEN,
    Case,
    chosen,
    cut_if_named,
    error,
    inputs,
    judge,
    poison,
    random_case,
    repeat,
    selection_of,
)
from msa_kernels import cute, flex, reference
from msa_kernels.selection import Selection, random_selection


@pytest.fixture(autouse=True)
def small_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_if_named(request, monkeypatch)


Support = Selection | torch.Tensor | None
"""A selection, or the offsets of documents whose tokens are all seen."""


def kl_of(path, tensors: list[torch.Tensor], lse: torch.Tensor, support: Support) -> torch.Tensor:
    if isinstance(support, Selection):
        return path.proxy_kl(*tensors[:4], lse, support)
    return path.dense_proxy_kl(*tensors[:4], lse, cu_seqlens=support)


def lse_of(path, tensors: list[torch.Tensor], support: Support) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(support, Selection):
            return path.sparse_attention(*tensors[2:], support)[1]
        return path.dense_attention(*tensors[2:], cu_seqlens=support)[1]


def results(path, tensors: list[torch.Tensor], lse: torch.Tensor, support: Support) -> list[torch.Tensor]:
    """The KL of each proxy, and the gradients of q_proxy and k_proxy where each proxy's counts differently."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    q_proxy, k_proxy, q, k, _ = leaves
    kl = kl_of(path, leaves, lse, support)
    weights = torch.arange(1, len(kl) + 1, device="cuda").to(kl)
    *found, dq, dk = torch.autograd.grad(kl, (q_proxy, k_proxy, q, k), weights, allow_unused=True)
    assert dq is None
    assert dk is None
    return [kl.detach(), *found]


def compare(name: str, tensors: list[torch.Tensor], selection: Support) -> None:
    exact = [x.double() for x in tensors]
    lse = lse_of(cute, tensors, selection)
    truth = results(reference, exact, lse_of(reference, exact, selection), selection)
    plain = results(reference, tensors, lse_of(reference, tensors, selection), selection)
    ours = results(cute, tensors, lse, selection)
    assert [x.dtype for x in ours] == [x.dtype for x in plain]
    assert [x.shape for x in ours] == [x.shape for x in plain]
    parts = ("kl", "dq_proxy", "dk_proxy")
    errors = {
        part: (size(a, t, scale), size(p, t, scale))
        for part, a, p, t, scale in zip(parts, ours, plain, truth, floors(*exact[:2]), strict=True)
    }
    judge(name, errors)
    with torch.no_grad():
        assert size(kl_of(cute, tensors, lse, selection), ours[0].double(), 1.0) < 1e-6


def size(actual: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    """Relative L2, where `expected` is not smaller than `floor`; infinite if anything is not finite."""
    if not actual.isfinite().all():
        return float("inf")
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=floor)).item()


def floors(q_proxy: torch.Tensor, k_proxy: torch.Tensor) -> list[float]:
    """Norms of value and gradients below which they are differences of nearly equal numbers, whose rounding shows.

    A nat for each proxy, and a tenth of a probability that lies elsewhere for each query.
    """
    size = k_proxy.double().square().mean().item() ** 0.5 / (q_proxy.shape[0] * q_proxy.shape[1]) ** 0.5
    return [q_proxy.shape[2] ** 0.5, size, size]


@pytest.mark.parametrize("name", TEACHING)
def test_value_and_gradients(name: str):
    case = TEACHING[name]
    tensors, offsets = inputs(case)
    compare(name, tensors, chosen(case, tensors, offsets))


@pytest.mark.parametrize("name", TEACHING)
def test_dense_value_and_gradients(name: str):
    tensors, offsets = inputs(TEACHING[name])
    compare(name, tensors, offsets)


@pytest.mark.parametrize("seed", range(24))
def test_value_and_gradients_of_random_shapes(seed: int):
    case = random_case(seed)
    tensors, offsets = inputs(case, seed)
    print(f"\n{case}")
    compare(str(seed), tensors, chosen(case, tensors, offsets))
    compare(f"{seed}, dense", tensors, offsets)


@pytest.mark.parametrize("kind", KINDS)
def test_any_selection_has_a_kl(kind: str):
    case = TEACHING["the_published_shape"]
    tensors, _ = inputs(case)
    compare(kind, tensors, selection_of(kind, case))


def test_a_selection_of_nothing_has_a_kl_of_zero():
    case = TEACHING["the_published_shape"]
    tensors, _ = inputs(case)
    selection = selection_of("nothing", case)
    assert not any(x.any() for x in results(cute, tensors, lse_of(cute, tensors, selection), selection))


def test_selections_that_several_proxies_share():
    for proxies, keys, selections in ((4, 1, 2), (4, 4, 2), (4, 2, 1), (6, 3, 2), (3, 1, 1)):
        case = Case(sequence=700, heads=12, kv_heads=1, proxies=proxies, proxy_kv_heads=keys)
        case = case._replace(heads=proxies * 2)
        tensors, _ = inputs(case)
        rows = torch.zeros(1, dtype=torch.long, device="cuda")
        compare(
            str((proxies, keys, selections)), tensors, random_selection(1, 700, selections, top_k_blocks=3, keys=rows)
        )


def test_a_sink_that_every_query_chooses_is_cut_into_tasks():
    case = Case(sequence=8192, heads=8, kv_heads=1, proxies=1, top_k_blocks=3, sinks=1)
    tensors, offsets = inputs(case)
    compare("sink", tensors, chosen(case, tensors, offsets))


@pytest.mark.parametrize(
    "kind", ["duplicated_rows", "huge_teacher", "huge_student", "one_hot_teacher", "one_hot_student", "both", "equal"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_difficult_values(kind: str, dtype: torch.dtype):
    case = Case(dtype=dtype, sequence=1100)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    q_proxy, k_proxy, q, k, _ = tensors
    if kind == "duplicated_rows":
        for x in (q_proxy, k_proxy, q, k):
            x[:, 1::2] = x[:, :-1:2]
    elif kind == "huge_teacher":
        q[:, 700], k[:, 5] = 3 * k[:, 5].repeat_interleave(8, 1), 10 * k[:, 5]
    elif kind == "huge_student":
        q_proxy[:, 700], k_proxy[:, 5] = 3 * k_proxy[:, 5], 10 * k_proxy[:, 5]
    elif kind in ("one_hot_teacher", "both"):
        q *= 16
    if kind in ("one_hot_student", "both"):
        q_proxy *= 16
    if kind == "equal":
        q.zero_()
        q_proxy.zero_()
    compare(f"{kind}, {dtype}", tensors, selection)
    compare(f"{kind}, {dtype}, dense", tensors, None)


def test_documents_of_one_token():
    case = Case(batch=2, sequence=300, documents=(*range(200), 250, 300, *range(300, 601)))
    tensors, offsets = inputs(case)
    compare("one token", tensors, chosen(case, tensors, offsets))


def test_a_packed_document_gets_what_it_gets_alone_whatever_its_neighbours_hold():
    case = Case(sequence=900, documents=(0, 130, 517, 900))
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    alone = [x[:, 130:517].contiguous() for x in tensors]
    own = cute.select_blocks(*alone[:2], top_k_blocks=case.top_k_blocks)

    def run(given: list[torch.Tensor], selection: Selection) -> list[torch.Tensor]:
        with torch.no_grad():
            _, lse = cute.sparse_attention(*given[2:], selection)
        return results(cute, given, lse, selection)[1:]

    packed, expected = run(tensors, selection), run(alone, own)
    for x in tensors:
        x[:, 517:] = float("nan")
        x[:, :130] = float("nan")
    for a, b, c in zip(packed, expected, run(tensors, selection), strict=True):
        assert torch.equal(a[:, 130:517], c[:, 130:517])
        # The mean goes over more queries.
        assert error(a[:, 130:517].double() * 900 / 387, b.double()) < 5e-3


@pytest.mark.parametrize("support", ["sparse", "dense"])
@pytest.mark.parametrize("name", WRITTEN)
def test_every_element_is_written_whatever_memory_held_before(name: str, support: str, monkeypatch: pytest.MonkeyPatch):
    case = TEACHING[name]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets) if support == "sparse" else offsets
    lse = lse_of(cute, tensors, selection)
    plain = results(cute, tensors, lse, selection)
    poison(monkeypatch)
    for ours, theirs in zip(results(cute, tensors, lse, selection), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_200_repeats_of_the_dense_kl_are_bitwise_equal_with_other_work_before():
    tensors, offsets = inputs(Case(sequence=4096))
    lse = lse_of(cute, tensors, offsets)
    repeat(200, lambda: results(cute, tensors, lse, offsets))


def test_gradients_are_linear_in_each_proxys_upstream_scalar():
    case = TEACHING["two_proxies_over_four_key_heads"]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    q_proxy, k_proxy, q, k, v = (x.requires_grad_() for x in tensors)
    _, lse = cute.sparse_attention(q, k, v, selection)
    kl = cute.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)

    def found(*weights: float) -> tuple[torch.Tensor, ...]:
        upstream = torch.tensor(weights, device="cuda")
        return torch.autograd.grad(kl, (q_proxy, k_proxy), upstream, retain_graph=True)

    (a, b), (c, d), (e, f), (g, h) = found(1, 0), found(0, 1), found(2, -3), found(0, 0)
    assert not a[:, :, 1].any()
    assert not c[:, :, 0].any()
    assert torch.equal(e, 2 * a - 3 * c) or error(e, (2 * a - 3 * c).double()) < 1e-2
    assert error(f, (2 * b - 3 * d).double()) < 1e-2
    assert not g.any()
    assert not h.any()


def test_blocks_of_64_keep_the_kl_of_flex():
    case = Case(batch=2, sequence=777, block_size=64, top_k_blocks=6)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    with torch.no_grad():
        _, lse = cute.sparse_attention(*tensors[2:], selection)
    found = [results(path, tensors, lse, selection) for path in (cute, flex)]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
