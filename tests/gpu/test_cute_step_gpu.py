"""The Hopper kernels on a GPU: a whole training step, which shares one index among all of its parts."""

import pytest
import torch
from cute_cases import (
    TEACHING,
    WRITTEN,
    Case,
    chosen,
    cut,
    cut_if_named,
    error,
    inputs,
    launches,
    never_waits_or_compiles,
    peak,
    poison,
    repeat,
    selection_of,
    upstream_of,
)
from msa_kernels import cute, msa_attention, reference
from msa_kernels.selection import Selection

from msa_lab.config_model import ModelConfig
from msa_lab.model import Transformer


@pytest.fixture(autouse=True)
def small_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_if_named(request, monkeypatch)


PARTS = ("out", "kl", "dq_proxy", "dk_proxy", "dq", "dk", "dv")


def attend(*given) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and KL of tensors and a selection."""
    *leaves, selection = given
    found = msa_attention(*leaves, selection=selection, backend="cute")
    assert found.kl is not None
    return found.out, found.kl


def apart(*given, path=cute) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by an operation each, which shares nothing with the other."""
    *leaves, selection = given
    out, lse = path.sparse_attention(*leaves[2:], selection)
    return out, path.proxy_kl(*leaves[:4], lse, selection)


def results(step, tensors: list[torch.Tensor], selection: Selection | None) -> dict[str, torch.Tensor]:
    """Output, KLs and all gradients, where each proxy's KL counts differently."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, kl = step(*leaves, selection)
    weights = torch.arange(1, len(kl) + 1, device="cuda").to(kl)
    found = torch.autograd.grad((out, kl), leaves, (upstream_of(tensors[2]).to(out.dtype), weights))
    return dict(zip(PARTS, (out.detach(), kl.detach(), *found), strict=True))


def different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> set[str]:
    """The parts that are not equal to the last bit."""
    return {part for part in PARTS if not torch.equal(ours[part], theirs[part])}


@pytest.mark.parametrize("name", TEACHING)
def test_a_step_has_the_bits_of_an_operation_each(name: str):
    case = TEACHING[name]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    ours, theirs = (results(step, tensors, selection) for step in (attend, apart))
    # The KL alone goes by windows of its own, and so has other orders of sums.
    of_kl = {"kl", "dq_proxy", "dk_proxy"} if name == "several_windows" else set()
    assert different(ours, theirs) <= of_kl
    for part in of_kl:
        assert error(ours[part], theirs[part].double()) < 1e-3


def test_rows_without_blocks():
    case = TEACHING["the_published_shape"]
    tensors, _ = inputs(case)
    selection = selection_of("rows_without_blocks", case)
    ours = results(attend, tensors, selection)
    assert different(ours, results(apart, tensors, selection)) == set()
    exact = results(lambda *given: apart(*given, path=reference), [x.double() for x in tensors], selection)
    assert {part: error(ours[part], exact[part]) for part in PARTS if error(ours[part], exact[part]) > 1e-2} == {}
    assert not any(x.any() for x in results(attend, tensors, selection_of("nothing", case)).values())


@pytest.mark.parametrize("name", WRITTEN)
def test_every_element_is_written_whatever_memory_held_before(name: str, monkeypatch: pytest.MonkeyPatch):
    case = TEACHING[name]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    plain = results(attend, tensors, selection)
    poison(monkeypatch)
    assert different(results(attend, tensors, selection), plain) == set()


@pytest.mark.parametrize("windows", [False, True])
def test_500_repeats_are_bitwise_equal_with_other_work_before(windows: bool, monkeypatch: pytest.MonkeyPatch):
    if windows:
        cut(monkeypatch)
    case = Case(sequence=4096, top_k_blocks=8)
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)
    repeat(500, lambda: list(results(attend, tensors, selection).values()))


def test_absent_gradients_cost_nothing():
    case = TEACHING["small_model"]
    tensors, offsets = inputs(case)
    selection = chosen(case, tensors, offsets)

    def backward(with_out: bool, with_kl: bool, learning: slice = slice(5)) -> list[bool]:
        leaves = [x.detach().requires_grad_(i in range(5)[learning]) for i, x in enumerate(tensors)]
        out, kl = attend(*leaves, selection)
        loss = (out.float().sum() if with_out else 0) + (kl.sum() if with_kl else 0)
        learnt = [x for x in leaves if x.requires_grad]
        return [x is None for x in torch.autograd.grad(loss, learnt, allow_unused=True)] if learnt else []

    assert backward(True, False) == [True, True, False, False, False]
    assert backward(False, True) == [False, False, True, True, True]
    both, one, other = (launches(lambda w=w: backward(*w)) for w in ((True, True), (True, False), (False, True)))
    assert other < one < both
    proxies = launches(lambda: backward(False, True, slice(2)))
    main = launches(lambda: backward(True, False, slice(2, 5)))
    nothing = launches(lambda: backward(True, True, slice(0)))
    assert proxies <= other
    assert main < one  # the KL's gradients are not made
    assert nothing < min(proxies, main)
    out, kl = attend(*(x.detach().requires_grad_(i < 2) for i, x in enumerate(tensors)), selection)
    assert (out.requires_grad, kl.requires_grad) == (False, True)


def test_a_step_never_waits_for_the_device_and_a_new_shape_never_compiles():
    def run(tensors: list[torch.Tensor]) -> None:
        step = msa_attention(*(x.requires_grad_() for x in tensors), top_k_blocks=4, backend="cute")
        (step.out.float().square().sum() + step.kl.sum()).backward()

    never_waits_or_compiles(run)


def test_a_step_compiles_into_one_graph_and_can_be_recomputed():
    def step(q_proxy, k_proxy, q, k, v, *_):
        found = msa_attention(q_proxy, k_proxy, q, k, v, top_k_blocks=4, backend="cute")
        return found.out, found.kl

    def recomputed(*given):
        return torch.utils.checkpoint.checkpoint(step, *given, use_reentrant=False)

    compiled = torch.compile(step, fullgraph=True)
    for length in (700, 412, 555):
        tensors = [x[:, :length] for x in inputs(TEACHING["small_model"])[0]]
        plain = results(step, tensors, None)
        for function in (compiled, recomputed, torch.compile(recomputed)):
            assert different(results(function, tensors, None), plain) == set()


def test_gradients_accumulate_over_passes():
    tensors, offsets = inputs(TEACHING["small_model"])
    selection = chosen(TEACHING["small_model"], tensors, offsets)
    leaves = [x.requires_grad_() for x in tensors]
    out, kl = attend(*leaves, selection)
    once = torch.autograd.grad(out.float().sum() + kl.sum(), leaves, retain_graph=True)
    for _ in range(2):
        (out.float().sum() + kl.sum()).backward(retain_graph=True)
    assert all(torch.equal(leaf.grad, x + x) for leaf, x in zip(leaves, once, strict=True))


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


@pytest.mark.parametrize(("sequence", "most", "memory"), [(16384, 45, 1.4), (131072, None, 5.0)])
def test_memory_and_launches_of_a_step(sequence: int, most: int | None, memory: float):
    tensors, _ = inputs(Case(sequence=sequence))
    leaves = [x.requires_grad_() for x in tensors]
    upstream = torch.randn_like(leaves[2]), torch.ones(4, device="cuda")

    def step() -> None:
        found = msa_attention(*leaves, top_k_blocks=16, backend="cute")
        torch.autograd.grad((found.out, found.kl), leaves, upstream)

    number, size = launches(step), peak(step)
    print(f"\n{sequence} tokens: {number} launches, {size:.2f} GiB above the inputs")
    assert most is None or number <= most
    assert size <= memory
