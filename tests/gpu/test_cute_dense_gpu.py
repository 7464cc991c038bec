"""Dense attention and its log-sum-exp by each library on a GPU: against the reference in fp64, compiled, captured."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from cute_cases import Case, error, inputs, judge, repeat, upstream_of
from msa_kernels import cute, dense_attention, dense_proxy_kl, reference
from msa_kernels.cute import library

DOCUMENTS = (0, 37, 37, 300, 400, 401, 670, 800)


def many(number: int, batch: int, sequence: int) -> tuple[int, ...]:
    """Offsets of so many documents, all lengths from 0 on among them."""
    rng = random.Random(0)
    return tuple(
        sorted([*rng.choices(range(batch * sequence), k=number - batch), *range(0, batch * sequence + 1, sequence)])
    )


CASES = {
    "the_published_shape": Case(batch=2),
    "odd_length": Case(sequence=1003),
    "one_token": Case(sequence=1),
    "shorter_than_a_tile": Case(batch=3, sequence=100),
    "dim_64": Case(batch=2, sequence=700, heads=8, dim=64),
    "fp16": Case(dtype=torch.float16, sequence=900),
    "group_1": Case(heads=4, kv_heads=4, sequence=500),
    "group_3": Case(heads=12, kv_heads=4, sequence=640),
    "documents": Case(batch=2, sequence=400, documents=DOCUMENTS),
    "many_documents": Case(batch=2, sequence=12000, heads=4, kv_heads=1, documents=many(350, 2, 12000)),
}
SERVED = {
    library.FLASH: CASES,
    library.CUDNN: [name for name, case in CASES.items() if case.documents is None and case.sequence > 1],
    library.FLEX: ["the_published_shape", "one_token", "documents"],
}
PAIRS = [(name, case) for name, cases in SERVED.items() for case in cases]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a library the fastest that serves."""

    def choose(name: str) -> None:
        asked = {library.FLASH: library.flash_obstacle, library.CUDNN: library.cudnn_obstacle}
        if name in asked and (why := asked[name]()):
            pytest.skip(f"{name}: {why}")
        if name != library.FLASH:
            monkeypatch.setattr(library, "flash_obstacle", lambda: "left out by a test")
        if name == library.FLEX:
            monkeypatch.setattr(library, "cudnn_obstacle", lambda: "left out by a test")

    return choose


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attention(path, tensors: list[torch.Tensor], offsets: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Output, log-sum-exp and all gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = path.dense_attention(*leaves, cu_seqlens=offsets)
    assert not lse.requires_grad
    found = torch.autograd.grad(out, leaves, upstream_of(tensors[0]).to(out.dtype))
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse, *found), strict=True))


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_outputs_and_gradients(name: str, case: str, only: Callable[[str], None]):
    only(name)
    (q_proxy, k_proxy, *main), offsets = inputs(CASES[case])
    assert library.chosen(*main, offsets) == name
    assert library.chosen(q_proxy, k_proxy, k_proxy, offsets) == name
    truth = attention(reference, [x.double() for x in main], offsets)
    plain, ours = (attention(path, main, offsets) for path in (reference, cute))
    assert {part: (x.shape, x.dtype) for part, x in ours.items()} == {
        part: (x.shape, x.dtype) for part, x in plain.items()
    }
    errors = {part: (error(ours[part], truth[part]), error(plain[part], truth[part])) for part in truth}

    def student(dtype: torch.dtype) -> torch.Tensor:
        given = q_proxy.to(dtype), k_proxy.to(dtype), k_proxy.to(dtype)
        return reference.dense_attention(*given, cu_seqlens=offsets)[1]

    exact, near = student(torch.float64), student(q_proxy.dtype)
    found = library.log_sum_exp(q_proxy, k_proxy, offsets)
    assert (found.shape, found.dtype) == (near.shape, near.dtype)
    judge(f"{name}, {case}", errors | {"student_lse": (error(found, exact), error(near, exact))})


@pytest.mark.parametrize("documents", [None, (0, 0, 130, 1000, 1001, 1001, 4096)])
def test_flash_attention_repeats_bit_for_bit_where_only_that_is_allowed(documents, only, deterministic):
    only(library.FLASH)
    (_, _, *main), offsets = inputs(Case(sequence=4096, documents=documents))
    assert library.chosen(*main, offsets) == library.FLASH
    repeat(100, lambda: list(attention(cute, main, offsets).values()))
    exact = attention(reference, [x.double() for x in main], offsets)
    found = attention(cute, main, offsets)
    assert {part: x for part in exact if (x := error(found[part], exact[part])) > 1e-2} == {}


def test_cudnn_is_left_out_where_only_deterministic_algorithms_are_allowed(only, deterministic):
    tensors, _ = inputs(Case())
    assert library.chosen(*tensors[2:], None) != library.CUDNN


def warm_up(q_proxy, k_proxy, q, k, v, offsets=None) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's forward pass in the warm-up."""
    out, lse = dense_attention(q, k, v, cu_seqlens=offsets, backend="cute")
    assert lse is not None
    return out, dense_proxy_kl(q_proxy, k_proxy, q, k, lse, cu_seqlens=offsets, backend="cute")


def step(
    function: Callable,
    leaves: list[torch.Tensor],
    offsets: torch.Tensor | None,
    upstream: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """What a layer gives, and all gradients; `upstream` is the output's, drawn here if it is not given."""
    out, kl = function(*leaves, offsets)
    both = upstream_of(out) if upstream is None else upstream, torch.ones_like(kl)
    return [out.detach(), kl.detach(), *torch.autograd.grad((out, kl), leaves, both)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """But for the order of sums, which changes from run to run."""
    errors = [error(a, b.double()) for a, b in zip(ours, theirs, strict=True)]
    assert max(errors) < 5e-3, errors


@pytest.mark.parametrize("name", [library.FLASH, library.CUDNN])
def test_a_warm_up_step_compiles_into_one_graph(name: str, only: Callable[[str], None]):
    only(name)
    compiled = torch.compile(warm_up, fullgraph=True)
    for length in (700, 412, 555):
        leaves = [x[:, :length].requires_grad_() for x in inputs(Case(batch=2, sequence=700))[0]]
        same(step(compiled, leaves, None), step(warm_up, leaves, None))


@pytest.mark.parametrize(
    ("name", "documents"), [(library.FLASH, None), (library.FLASH, DOCUMENTS), (library.CUDNN, None)]
)
def test_a_warm_up_step_can_be_captured(name: str, documents, only: Callable[[str], None]):
    only(name)
    case = Case(batch=2, sequence=400, documents=documents)
    tensors, offsets = inputs(case)
    upstream = upstream_of(tensors[2])  # what draws random numbers cannot be captured
    leaves = [x.requires_grad_() for x in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(warm_up, leaves, offsets, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(warm_up, leaves, offsets, upstream)
    with torch.no_grad():
        for leaf, other in zip(leaves, inputs(case, seed=1)[0], strict=True):
            leaf.copy_(other)
    graph.replay()
    same(captured, step(warm_up, leaves, offsets, upstream))


@pytest.mark.parametrize("name", [library.FLASH, library.CUDNN])
def test_a_warm_up_step_never_waits_for_the_device(name: str, only: Callable[[str], None]):
    only(name)
    for i, sequence in enumerate((1024, 700)):
        leaves = [x.requires_grad_() for x in inputs(Case(sequence=sequence))[0]]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if i else "default")
        try:
            step(warm_up, leaves, None)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [library.FLASH, library.CUDNN])
def test_any_layout_of_inputs_and_gradients(name: str, only: Callable[[str], None]):
    # As of one projection for queries, keys and values; as of a sum, of a projection, of heads that come first.
    only(name)
    generator = torch.Generator("cuda").manual_seed(0)
    joint = torch.randn(2, 300, 20, 128, device="cuda", generator=generator).bfloat16()
    plain = torch.randn(2, 300, 16, 128, device="cuda", generator=generator).bfloat16()
    for upstream in (joint.new_ones(()).expand_as(plain), plain, plain.transpose(1, 2).contiguous().transpose(1, 2)):
        results = []
        for path, whole in ((cute, joint.clone()), (reference, joint.double())):
            out, _ = path.dense_attention(*whole.requires_grad_().split((16, 2, 2), 2))
            results.append(torch.autograd.grad(out, whole, upstream.to(out.dtype))[0])
        assert error(results[0], results[1]) < 1e-2
