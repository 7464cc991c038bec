"""The Hopper kernels on a GPU: gradients of sparse attention against the reference in fp64, for the kernel's selection.

The measure is that of `test_cute_gpu.py`: relative L2, at most twice that of the reference in the same rounded inputs.
"""

import random

import pytest
import torch
from msa_kernels import flex, reference
from msa_kernels.selection import Selection, random_selection, window_selection
from test_cute_gpu import CASES, FLOAT_ERROR, Case, inputs, rule

from msa_lab.config import ModelConfig
from msa_lab.model import Transformer

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from msa_kernels import cute
from msa_kernels.cute import gradients, ops

CASES = {name: case._replace(block_size=128) for name, case in CASES.items()}
"""The kernels of gradients are for blocks of 128 tokens."""


@pytest.fixture(autouse=True)
def small_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case, whatever the test, is cut into windows that are smaller than its rows."""
    if "several_windows" in request.node.name:
        monkeypatch.setattr(ops, "SCORE_BYTES", 2**16)
        monkeypatch.setattr(ops, "PARTIAL_BYTES", 2**16)
        monkeypatch.setattr(gradients, "PART_BYTES", 2**16)
        monkeypatch.setattr(gradients, "PART_SHARE", 0)


def upstream_of(q: torch.Tensor) -> torch.Tensor:
    """Random, and exact in every type that is tested."""
    generator = torch.Generator("cuda").manual_seed(9)
    return torch.randn(q.shape, device="cuda", generator=generator).bfloat16().half().to(q.dtype)


def gradients_of(path, tensors: list[torch.Tensor], selection: Selection, upstream: torch.Tensor) -> list[torch.Tensor]:
    """Of q, k and v."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out, _ = path.sparse_attention(*leaves, selection)
    return list(torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2, infinite if anything is not finite; where nothing but zeros is expected, relative to ones."""
    if not actual.isfinite().all():
        return float("inf")
    size = expected.norm() if expected.any() else actual.new_tensor(actual.numel(), dtype=torch.float64).sqrt()
    return ((actual.double() - expected).norm() / size.clamp(min=1e-30)).item()


def error_of_rounding(tensors: list[torch.Tensor], selection: Selection, upstream: torch.Tensor) -> list[float]:
    """What the exact gradients of q and k lose where the method's row sums of `out x upstream` take the rounded output.

    That is the formula of every FlashAttention. The sums' errors e_i reach the gradients as sum_j e_i P_ij k_j and
    sum_i e_i P_ij q_i, so that they count where a row has nearly all weight on one key and its gradient is small.
    """
    q, k, v = (x.double().requires_grad_() for x in tensors)
    out, _ = reference.sparse_attention(q, k, v, selection)
    truth = torch.autograd.grad(out, (q, k), upstream.double(), retain_graph=True)
    sums = ((out - out.to(tensors[0].dtype).double()) * upstream.double()).sum(-1, keepdim=True)
    lost_q = sums * reference.sparse_attention(q, k, k, selection)[0]
    (lost_k,) = torch.autograd.grad(out, v, sums * q)
    lost = (x.norm() * q.shape[-1] ** -0.5 for x in (lost_q, lost_k))
    return [(x / exact.norm()).item() for x, exact in zip(lost, truth, strict=True)]


def compare(
    name: str,
    tensors: list[torch.Tensor],
    selection: Selection,
    upstream: torch.Tensor | None = None,
    *,
    rounded: bool = False,
) -> None:
    """`rounded`: of values on which the output's rounding decides, whose part of the error is allowed then."""
    upstream = upstream_of(tensors[0]) if upstream is None else upstream
    truth = gradients_of(reference, [x.double() for x in tensors], selection, upstream)
    plain = gradients_of(reference, tensors, selection, upstream)
    ours = gradients_of(cute, tensors, selection, upstream)
    assert [x.dtype for x in ours] == [x.dtype for x in tensors]
    assert [x.shape for x in ours] == [x.shape for x in tensors]
    errors = {
        part: (error(a, t), error(p, t)) for part, a, p, t in zip(("dq", "dk", "dv"), ours, plain, truth, strict=True)
    }
    if rounded:
        for part, lost in zip(("dq", "dk"), error_of_rounding(tensors, selection, upstream), strict=True):
            errors[part] = errors[part][0], max(errors[part][1], lost)
    print(f"\n{name}: " + ", ".join(f"{part} {a:.1e} ({b:.1e})" for part, (a, b) in errors.items()))
    wrong = {part: pair for part, pair in errors.items() if not pair[0] <= 2 * pair[1] + FLOAT_ERROR}
    assert not wrong, f"error and the reference's: {wrong}"


def chosen(case: Case, tensors: list[torch.Tensor], offsets: torch.Tensor | None) -> Selection:
    return cute.select_blocks(*tensors[:2], **rule(case, offsets))


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str):
    case = CASES[name]
    tensors, offsets = inputs(case)
    compare(name, tensors[2:], chosen(case, tensors, offsets))


@pytest.mark.parametrize("seed", range(24))
def test_gradients_of_random_shapes(seed: int):
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
        dim=rng.choice([64, 128]),
        top_k_blocks=rng.choice([1, 2, 3, 5, 8, 16, 31]),
        local=rng.choice([0, 1]),
        documents=documents,
    )
    tensors, offsets = inputs(case, seed)
    print(f"\n{case}")
    compare(str(seed), tensors[2:], chosen(case, tensors, offsets))


@pytest.mark.parametrize("kind", ["random", "window", "rows_without_blocks", "only_earlier_blocks", "nothing"])
def test_any_selection_has_gradients(kind: str):
    case = CASES["the_published_shape"]
    tensors, _ = inputs(case)
    keys = torch.arange(case.batch, device="cuda")
    selection = random_selection(case.batch, case.sequence, case.proxies, top_k_blocks=4, keys=keys)
    if kind == "window":
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
        assert not any(x.any() for x in gradients_of(cute, tensors[2:], selection, upstream_of(tensors[2])))
        return
    compare(kind, tensors[2:], selection)


def test_a_sink_that_every_query_chooses_is_cut_into_tasks():
    case = Case(sequence=8192, heads=8, kv_heads=1, proxies=1, top_k_blocks=3, sinks=1)
    tensors, offsets = inputs(case)
    compare("sink", tensors[2:], chosen(case, tensors, offsets))


def test_one_block_chosen_by_every_query_of_every_selection_and_no_other():
    case = Case(sequence=4096, heads=16, kv_heads=2, proxies=4, top_k_blocks=1)
    tensors, _ = inputs(case)
    blocks = torch.zeros(1, 4, case.sequence, 1, dtype=torch.int32, device="cuda")
    compare("one block", tensors[2:], Selection(blocks, 128))


@pytest.mark.parametrize("kind", ["duplicated_rows", "one_huge_score", "one_hot", "equal_scores", "large_upstream"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_difficult_values(kind: str, dtype: torch.dtype):
    case = Case(dtype=dtype, sequence=1100)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    q, k, v = tensors[2:]
    upstream = upstream_of(q)
    if kind == "duplicated_rows":
        q[:, 1::2], k[:, 1::2] = q[:, :-1:2], k[:, :-1:2]
    elif kind == "one_huge_score":
        q[:, 700], k[:, 5] = 3 * k[:, 5].repeat_interleave(8, 1), 10 * k[:, 5]
    elif kind == "one_hot":
        q *= 16
    elif kind == "equal_scores":
        q.zero_()
    elif kind == "large_upstream":
        upstream *= 128
    compare(f"{kind}, {dtype}", [q, k, v], selection, upstream, rounded=kind in ("one_huge_score", "one_hot"))


def test_documents_of_one_token():
    case = Case(batch=2, sequence=300, documents=(*range(200), 250, 300, *range(300, 601)))
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    compare("one token", tensors[2:], selection)
    dq, dk, _ = gradients_of(cute, tensors[2:], selection, upstream_of(tensors[2]))
    # One key alone has weight 1 whatever its score: what is left is rounding.
    assert dq[0, :199].abs().max() <= 1e-2
    assert dk[0, :199].abs().max() <= 4e-2


def test_a_packed_document_gets_what_it_gets_alone_whatever_its_neighbours_hold():
    case = Case(sequence=900, documents=(0, 130, 517, 900))
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    packed = gradients_of(cute, tensors[2:], selection, upstream)
    alone = [x[:, 130:517].contiguous() for x in tensors]
    own = cute.select_blocks(*alone[:2], top_k_blocks=case.top_k_blocks)
    expected = gradients_of(cute, alone[2:], own, upstream[:, 130:517].contiguous())
    for x in (*tensors[2:], upstream):
        x[:, 517:] = float("nan")
        x[:, :130] = float("nan")
    poisoned = gradients_of(cute, tensors[2:], selection, upstream)
    for a, b, c in zip(packed, expected, poisoned, strict=True):
        assert torch.equal(a[:, 130:517], b)
        assert torch.equal(c[:, 130:517], b)


@pytest.mark.parametrize(
    "name", ["the_published_shape", "documents", "several_windows", "k_beyond_the_blocks", "one_token", "fp16"]
)
def test_every_element_is_written_whatever_memory_held_before(name: str, monkeypatch: pytest.MonkeyPatch):
    case = CASES[name]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    plain = gradients_of(cute, tensors[2:], selection, upstream)
    empty = torch.empty

    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)
    for ours, theirs in zip(gradients_of(cute, tensors[2:], selection, upstream), plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("windows", [False, True])
def test_200_repeats_are_bitwise_equal_with_other_work_before(windows: bool, monkeypatch: pytest.MonkeyPatch):
    if windows:
        monkeypatch.setattr(gradients, "PART_BYTES", 2**25)
        monkeypatch.setattr(gradients, "PART_SHARE", 0)
    case = Case(sequence=4096, top_k_blocks=8)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    noise = torch.randn(4096, 4096, device="cuda")
    first = None
    for i in range(200):
        if i % 3:
            noise = (noise @ noise).tanh()
        now = gradients_of(cute, tensors[2:], selection, upstream)
        first = first or now
        assert [i for i, (a, b) in enumerate(zip(now, first, strict=True)) if not torch.equal(a, b)] == []


def test_several_windows_change_nothing_but_roundings(monkeypatch: pytest.MonkeyPatch):
    case = Case(batch=2, sequence=2500, top_k_blocks=6, documents=(0, 900, 2500, 3000, 5000))
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    whole = gradients_of(cute, tensors[2:], selection, upstream)
    monkeypatch.setattr(gradients, "PART_BYTES", 2**16)
    monkeypatch.setattr(gradients, "PART_SHARE", 0)
    cut = gradients_of(cute, tensors[2:], selection, upstream)
    assert torch.equal(cut[0], whole[0])
    for a, b in zip(cut[1:], whole[1:], strict=True):
        assert error(a, b.double()) < 1e-3


def test_a_backward_never_waits_for_the_device_and_a_new_shape_never_compiles():
    from msa_kernels.cute import compile as compiling

    for i, (batch, sequence) in enumerate([(1, 1024), (2, 700), (3, 1301)]):
        case = Case(batch=batch, sequence=sequence)
        tensors, offsets = inputs(case)
        selection = chosen(case, tensors, offsets)
        leaves = [tensor.requires_grad_() for tensor in tensors[2:]]
        upstream = upstream_of(leaves[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if i else "default")
        try:
            out, _ = cute.sparse_attention(*leaves, selection)
            torch.autograd.backward(out, upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        known = known if i else len(compiling._loaded)
        assert len(compiling._loaded) == known


def test_strided_inputs_and_upstreams_give_what_contiguous_ones_give():
    case = CASES["small_model"]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    plain = gradients_of(cute, tensors[2:], selection, upstream)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*tensors[2:], upstream)]
    leaves = [x.requires_grad_() for x in strided[:3]]
    out, _ = cute.sparse_attention(*leaves, selection)
    for ours, theirs in zip(torch.autograd.grad(out, leaves, strided[3]), plain, strict=True):
        assert torch.equal(ours, theirs)
    out, _ = cute.sparse_attention(*leaves, selection)
    expanded = torch.ones((), dtype=out.dtype, device="cuda").expand(out.shape)
    for gradient in torch.autograd.grad(out, leaves, expanded):
        assert gradient.isfinite().all()


def test_only_what_is_asked_for_is_computed_and_the_lse_has_no_gradient():
    case = CASES["small_model"]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    q, k, v = tensors[2:]
    out, lse = cute.sparse_attention(q, k, v, selection)
    assert not out.requires_grad
    out, lse = cute.sparse_attention(q, k.requires_grad_(), v, selection)
    assert out.requires_grad
    assert not lse.requires_grad
    (dk,) = torch.autograd.grad(out, k, upstream_of(q))
    assert torch.equal(dk, gradients_of(cute, tensors[2:], selection, upstream_of(q))[1])


def test_a_layer_compiles_into_one_graph_and_can_be_recomputed():
    case = CASES["small_model"]
    tensors, _ = inputs(case)
    selection = chosen(case, tensors, None)
    upstream = upstream_of(tensors[2])

    def step(q, k, v):
        return cute.sparse_attention(q, k, v, selection)[0]

    def recomputed(q, k, v):
        return torch.utils.checkpoint.checkpoint(step, q, k, v, use_reentrant=False)

    plain = gradients_of(cute, tensors[2:], selection, upstream)
    for run in (torch.compile(step, fullgraph=True), recomputed, torch.compile(recomputed)):
        leaves = [x.detach().clone().requires_grad_() for x in tensors[2:]]
        for ours, theirs in zip(torch.autograd.grad(run(*leaves), leaves, upstream), plain, strict=True):
            assert torch.equal(ours, theirs)


def test_blocks_of_64_keep_the_gradients_of_flex():
    case = Case(batch=2, sequence=777, block_size=64, top_k_blocks=6)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    upstream = upstream_of(tensors[2])
    found = [gradients_of(path, tensors[2:], selection, upstream) for path in (cute, flex)]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_whole_model_has_the_gradients_of_flex(checkpointing: bool):
    # The second layer's selection looks at nothing, so that both paths attend to the same blocks.
    config = ModelConfig(
        num_layers=2, d_model=256, num_query_heads=8, num_kv_heads=2, num_proxies=4, head_dim=64, proxy_dim=64,
        top_k_blocks=3, attention=("msa", "random"),
    )  # fmt: skip
    tokens = torch.randint(257, (2, 1000), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    found = []
    for backend in ("cute", "flex"):
        model = Transformer(config, backend, activation_checkpointing=checkpointing).cuda().train()
        with torch.autocast("cuda", torch.bfloat16):
            logits, kl = model(tokens, with_kl=True)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        (loss + kl.sum()).backward()
        found.append(
            {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach(), "kl": kl.detach()}
        )
    errors = {name: error(found[0][name], found[1][name].double()) for name in found[1]}
    print("\n" + "\n".join(f"{name} {value:.1e}" for name, value in errors.items()))
    assert max(errors.values()) < 2e-2


def test_memory_and_launches_of_a_backward_at_16k_tokens():
    case = Case(sequence=16384, top_k_blocks=16)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    leaves = [x.requires_grad_() for x in tensors[2:]]
    upstream = upstream_of(leaves[0])

    def step() -> None:
        out, _ = cute.sparse_attention(*leaves, selection)
        torch.autograd.grad(out, leaves, upstream)

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
    assert len(launches) <= 32
    assert peak <= 1.4
