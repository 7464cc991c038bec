"""The Hopper kernels on a GPU: the proxies' KL and its gradients against the reference in fp64, for one selection.

The measure is that of `test_cute_gpu.py`: relative L2, at most twice that of the reference in the same rounded inputs.
"""

import random

import pytest
import torch
from msa_kernels import flex, msa_attention, reference
from msa_kernels.selection import Selection, random_selection, window_selection
from test_cute_backward_gpu import CASES, chosen, error
from test_cute_gpu import FLOAT_ERROR, Case, inputs

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from msa_kernels import cute
from msa_kernels.cute import dense, gradients, ops


@pytest.fixture(autouse=True)
def small_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case, whatever the test, is cut into windows that are smaller than its rows."""
    if "several_windows" in request.node.name:
        monkeypatch.setattr(ops, "SCORE_BYTES", 2**16)
        monkeypatch.setattr(ops, "PARTIAL_BYTES", 2**16)
        monkeypatch.setattr(gradients, "PART_BYTES", 2**16)
        monkeypatch.setattr(gradients, "PART_SHARE", 0)
        monkeypatch.setattr(dense, "PART_BYTES", 2**22)


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are not in use yet."""
    monkeypatch.setattr(cute, "KL_BLOCK_SIZES", (128,))


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
    print(f"\n{name}: " + ", ".join(f"{part} {a:.1e} ({b:.1e})" for part, (a, b) in errors.items()))
    wrong = {part: pair for part, pair in errors.items() if not pair[0] <= 2 * pair[1] + FLOAT_ERROR}
    assert not wrong, f"error and the reference's: {wrong}"
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


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients(name: str):
    case = CASES[name]
    tensors, offsets = inputs(case)
    compare(name, tensors, chosen(case, tensors, offsets))


@pytest.mark.parametrize("name", CASES)
def test_dense_value_and_gradients(name: str):
    tensors, offsets = inputs(CASES[name])
    compare(name, tensors, offsets)


@pytest.mark.parametrize("seed", range(24))
def test_value_and_gradients_of_random_shapes(seed: int):
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 1, 2, 3, 4])
    proxies = rng.choice([kv_heads, kv_heads, 2 * kv_heads, 4 * kv_heads, 1])
    batch, sequence = rng.choice([1, 1, 2, 3]), rng.randint(1, 1400)
    documents = None
    if rng.random() < 0.6:
        cuts = [rng.randint(0, batch * sequence) for _ in range(rng.choice([1, 5, 40]))]
        documents = tuple(sorted([*cuts, *range(0, batch * sequence + 1, sequence)]))
    case = Case(
        dtype=rng.choice([torch.bfloat16, torch.float16]),
        batch=batch,
        sequence=sequence,
        heads=max(proxies, kv_heads) * rng.choice([1, 2, 4, 8, 16]),
        kv_heads=kv_heads,
        proxies=proxies,
        proxy_kv_heads=rng.choice([1, proxies]),
        dim=rng.choice([64, 128]),
        proxy_dim=rng.choice([64, 128]),
        top_k_blocks=rng.choice([1, 2, 3, 5, 8, 16, 31]),
        local=rng.choice([0, 1]),
        documents=documents,
    )
    tensors, offsets = inputs(case, seed)
    print(f"\n{case}")
    compare(str(seed), tensors, chosen(case, tensors, offsets))
    compare(f"{seed}, dense", tensors, offsets)


@pytest.mark.parametrize("kind", ["random", "window", "rows_without_blocks", "only_earlier_blocks", "nothing"])
def test_any_selection_has_a_kl(kind: str):
    case = CASES["the_published_shape"]
    tensors, _ = inputs(case)
    keys = torch.arange(case.batch, device="cuda")
    selection = random_selection(case.batch, case.sequence, case.proxies, top_k_blocks=4, keys=keys)
    if kind == "window":  # one selection that all proxies share
        selection = window_selection(case.batch, case.sequence, top_k_blocks=4, device="cuda")
    elif kind == "rows_without_blocks":
        selection.blocks[:, 1, 100:400] = -1
    elif kind == "only_earlier_blocks":
        own = torch.arange(case.sequence, device="cuda", dtype=torch.int32)[:, None] // 128
        blocks = selection.blocks.masked_fill(selection.blocks == own, 99).sort(-1).values
        selection = selection._replace(blocks=blocks.masked_fill(blocks < 0, 99).sort(-1).values)
        selection.blocks[selection.blocks == 99] = -1
    elif kind == "nothing":
        selection.blocks.fill_(-1)
        with torch.no_grad():
            _, lse = cute.sparse_attention(*tensors[2:], selection)
        assert not any(x.any() for x in results(cute, tensors, lse, selection))
        return
    compare(kind, tensors, selection)


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
@pytest.mark.parametrize(
    "name", ["the_published_shape", "documents", "several_windows", "k_beyond_the_blocks", "one_token", "fp16"]
)
def test_every_element_is_written_whatever_memory_held_before(name: str, support: str, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets) if support == "sparse" else offsets
    lse = lse_of(cute, tensors, selection)
    plain = results(cute, tensors, lse, selection)
    empty = torch.empty

    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)
    for ours, theirs in zip(results(cute, tensors, lse, selection), plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["sparse", "windows", "dense"])
def test_200_repeats_are_bitwise_equal_with_other_work_before(kind: str, monkeypatch: pytest.MonkeyPatch):
    if kind == "windows":
        monkeypatch.setattr(gradients, "PART_BYTES", 2**24)
        monkeypatch.setattr(gradients, "PART_SHARE", 0)
    case = Case(sequence=4096, top_k_blocks=8)
    tensors, offsets = inputs(case)
    selection = offsets if kind == "dense" else chosen(case, tensors, offsets)
    lse = lse_of(cute, tensors, selection)
    noise = torch.randn(4096, 4096, device="cuda")
    first = None
    for i in range(200):
        if i % 3:
            noise = (noise @ noise).tanh()
        now = results(cute, tensors, lse, selection)
        first = first or now
        assert [i for i, (a, b) in enumerate(zip(now, first, strict=True)) if not torch.equal(a, b)] == []


def test_gradients_are_linear_in_each_proxys_upstream_scalar():
    case = CASES["two_proxies_over_four_key_heads"]
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


def test_absent_gradients_cost_nothing():
    case = CASES["small_model"]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    q_proxy, k_proxy, q, k, v = (x.requires_grad_() for x in tensors)

    def launches(run) -> int:
        run()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())

    def step():
        return msa_attention(q_proxy, k_proxy, q, k, v, selection=selection, backend="cute")

    def backward(with_out: bool, with_kl: bool):
        found = step()
        loss = (found.out.float().sum() if with_out else 0) + (found.kl.sum() if with_kl else 0)
        return torch.autograd.grad(loss, (q_proxy, k_proxy, q, k, v), allow_unused=True)

    assert [x is None for x in backward(True, False)] == [True, True, False, False, False]
    assert [x is None for x in backward(False, True)] == [False, False, True, True, True]
    both, one, other = (launches(lambda w=w: backward(*w)) for w in ((True, True), (True, False), (False, True)))
    assert one < both
    assert other < one
    lse = step().out.float().sum(-1)
    with_gradients = launches(lambda: cute.proxy_kl(q_proxy, k_proxy, q, k, lse, selection))
    plain = launches(lambda: cute.proxy_kl(*(x.detach() for x in tensors[:4]), lse, selection))
    assert plain < with_gradients


def test_a_step_never_waits_for_the_device_and_a_new_shape_never_compiles():
    from msa_kernels.cute import compile as compiling

    for i, (batch, sequence) in enumerate([(1, 1024), (2, 700), (3, 1301)]):
        tensors, _ = inputs(Case(batch=batch, sequence=sequence))
        leaves = [tensor.requires_grad_() for tensor in tensors]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if i else "default")
        try:
            step = msa_attention(*leaves, top_k_blocks=4, backend="cute")
            (step.out.float().square().sum() + step.kl.sum()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        known = known if i else len(compiling._loaded)
        assert len(compiling._loaded) == known


def test_a_step_compiles_into_one_graph_and_can_be_recomputed():
    case = CASES["small_model"]
    tensors, _ = inputs(case)

    def step(q_proxy, k_proxy, q, k, v):
        selection = cute.select_blocks(q_proxy, k_proxy, top_k_blocks=4)
        out, lse = cute.sparse_attention(q, k, v, selection)
        return out, cute.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)

    def recomputed(*given):
        return torch.utils.checkpoint.checkpoint(step, *given, use_reentrant=False)

    def run(function) -> list[torch.Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out, kl = function(*leaves)
        weights = torch.arange(1.0, len(kl) + 1, device="cuda")
        return [out, kl, *torch.autograd.grad((out, kl), leaves, (torch.ones_like(out), weights))]

    plain = run(step)
    for function in (torch.compile(step, fullgraph=True), recomputed):
        for ours, theirs in zip(run(function), plain, strict=True):
            assert torch.equal(ours, theirs)


def test_blocks_of_64_keep_the_kl_of_flex():
    case = Case(batch=2, sequence=777, block_size=64, top_k_blocks=6)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    with torch.no_grad():
        _, lse = cute.sparse_attention(*tensors[2:], selection)
    found = [results(path, tensors, lse, selection) for path in (cute, flex)]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_memory_and_launches_of_a_training_step_at_16k_tokens():
    tensors, _ = inputs(Case(sequence=16384))
    leaves = [x.requires_grad_() for x in tensors]
    upstream = torch.randn_like(leaves[2])

    def step() -> None:
        found = msa_attention(*leaves, top_k_blocks=16, backend="cute")
        torch.autograd.grad((found.out, found.kl), leaves, (upstream, torch.ones_like(found.kl)))

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"\n16384 tokens: {len(launches)} launches, {peak:.2f} GiB above the inputs")
    assert len(launches) <= 64
    assert peak <= 1.4
