"""What forward passes and steps on the Hopper kernels allocate, launch and compile at full size; no kernel runs."""

import contextlib
import ctypes
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from msa_kernels import checks, cute, dispatch, msa_attention
from msa_kernels.cute import attend, backward, dense, gradients, hopper, index, kl, layout, merge, scores, topk
from msa_kernels.cute.compile import Kernel
from torch.profiler import ProfilerActivity, profile

MODULES = (attend, backward, dense, gradients, index, kl, layout, merge, scores, topk)
LAUNCHES = {"ReverseIndex": 4}
"""Of a kernel's host code, where it is not 1."""
GIB = 2**30
NO_KERNELS = {"empty", "empty_like", "empty_strided", "new_empty", "zeros", "view", "flatten", "detach", "to"}
"""Operations of PyTorch that launch nothing themselves: what `zeros` and `to` launch has names of its own."""


class Cost(NamedTuple):
    peak: int
    """Bytes above the inputs, before PyTorch rounds them up."""
    launches: int
    others: set[str]
    """Operations of PyTorch that launch something else than zeros, which are counted."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """Kernels that are called, in their order; none computes anything."""
    found: list[Kernel] = []

    def load(kernel):
        def run(*given) -> None:
            found.append(kernel)
            if isinstance(kernel, layout.Layout):  # which the dense KL reads on the host's side
                for x in given[1:4]:
                    ctypes.memset(x.data_ptr(), 0, x.nbytes)

        return run

    for module in MODULES:
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(hopper, "processors", lambda _: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(dispatch, "_cute_obstacle", lambda *_: None)
    # On a CPU it also reads the selection, which nothing has written.
    monkeypatch.setattr(checks, "selection", lambda *_: None)
    return found


def published(sequence: int, batch: int = 1) -> list[torch.Tensor]:
    """q_proxy, k_proxy, q, k and v of the published shape."""
    return [torch.empty(batch, sequence, n, 128, dtype=torch.bfloat16, requires_grad=True) for n in (4, 1, 16, 2, 2)]


def forward(leaves: list[torch.Tensor], _: tuple) -> None:
    """Selection and attention, with 16 blocks a query."""
    with torch.no_grad():
        out = msa_attention(*leaves, top_k_blocks=16, with_kl=False, backend="cute").out
    assert out.shape == leaves[2].shape


def step(leaves: list[torch.Tensor], upstream: tuple) -> None:
    """The same with the KL and all gradients."""
    results = msa_attention(*leaves, top_k_blocks=16, backend="cute")
    found = torch.autograd.grad((results.out, results.kl), leaves, upstream)
    assert [x.shape for x in found] == [x.shape for x in leaves]


def cost(operation: Callable[..., None], sequence: int, launched: list[Kernel]) -> Cost:
    """Of a forward pass or a step, whose backward pass begins with its upstream there."""
    leaves = published(sequence)
    upstream = torch.empty_like(leaves[2]), torch.ones(4)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        operation(leaves, upstream)
    events = profiler.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    names = [event.name().removeprefix("aten::") for event in events if event.name().startswith("aten::")]
    launches = sum(LAUNCHES.get(type(kernel).__name__, 1) for kernel in launched) + names.count("zero_")
    return Cost(peak, launches, set(names) - NO_KERNELS - {"zero_"})


@pytest.mark.parametrize(
    ("operation", "sequence", "peak", "launches"),
    [
        (forward, 16384, 1.2, 20),
        (forward, 131072, 4.0, 40),
        (step, 8192, 0.8, 45),
        (step, 16384, 1.4, 45),
        (step, 131072, 5.0, 45),
    ],
)
def test_operations_keep_to_their_memory_and_launches(
    operation: Callable[..., None], sequence: int, peak: float, launches: int, launched: list[Kernel]
):
    found = cost(operation, sequence, launched)
    about = f"{found.launches} launches, {found.peak / GIB:.2f} GiB above the inputs"
    print(f"\n{operation.__name__} of {sequence} tokens: {about}")
    assert found.others == set()
    assert found.peak <= peak * GIB
    assert found.launches <= launches


@pytest.mark.parametrize("operation", [forward, step])
def test_a_new_shape_compiles_nothing(operation: Callable[..., None], launched: list[Kernel]):
    compiled = []
    for batch, sequence in ((1, 2048), (2, 700), (3, 1301), (1, 65536)):
        leaves = published(sequence, batch)
        launched.clear()
        operation(leaves, (torch.empty_like(leaves[2]), torch.ones(4)))
        compiled.append(set(launched))
    assert compiled[0]
    for others in compiled[1:]:
        assert others == compiled[0]


@pytest.mark.parametrize("operation", ["forward", "step", "warm-up step"])
def test_the_benchmark_knows_all_stages(operation: str, launched: list[Kernel], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(cute.__file__).parents[2] / "benchmarks")
    stages = importlib.import_module("stages")

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = None

        def record(self) -> None:
            self.at = len(launched)

    q_proxy, k_proxy, *main = leaves = published(300)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with stages.marked() as seen, torch.set_grad_enabled(operation != "forward"):
        if operation == "warm-up step":
            out, lse = main[0].sum(), torch.zeros(main[0].shape[:3])
            kl = cute.dense_proxy_kl(q_proxy, k_proxy, *main[:2], lse)
        else:
            results = msa_attention(*leaves, top_k_blocks=16, with_kl=operation == "step", backend="cute")
            out, kl = results.out, results.kl
        if operation != "forward":
            torch.autograd.grad((out.sum(), kl.sum()), leaves, allow_unused=True)
    found = {name for name, _, _ in seen}
    assert found == set(stages.STAGES[operation])
    # Whatever is launched, is launched in a stage.
    inside = {i for _, start, end in seen for i in range(start.at, end.at)}
    missed = {kernel for i, kernel in enumerate(launched) if i not in inside}
    assert missed == set()
