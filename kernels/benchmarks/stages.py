"""Time the stages of an operation of `msa_kernels.cute`: the functions between which its work divides."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

FUNCTIONS = (
    ("layout", "layout", "make_layout"),
    ("score", "scores", "score"),
    ("top-k", "topk", "choose"),
    ("index", "index", "build"),
    ("attend", "attend", "attend"),
    ("merge", "merge", "merge"),
    ("kl", "gradients", "divergence"),
    ("kl", "dense", "dense_divergence"),
    ("backward", "gradients", "attention_gradients"),
    ("delta", "gradients", "make_deltas"),
    ("products", "kl", "proxy_kl"),
    ("products", "backward", "backward"),
    ("sum for queries", "gradients", "sum_queries"),
    ("sum for keys", "gradients", "sum_keys"),
    ("sum of values", "gradients", "sum_values"),
    ("sums", "gradients", "sum_proxies"),
    ("scale", "gradients", "scale"),
)
"""A stage's name here, and the module of msa_kernels.cute that defines its function."""
CONTAINERS = ("kl", "backward")
"""Stages that others are parts of, which get the container's name before theirs."""
FORWARD = ("layout", "score", "top-k", "index", "attend", "merge")
OF_KL = ("kl", "kl, products", "kl, sums", "scale")
BACKWARD = ("backward", "backward, delta", "backward, products", "backward, sum for queries", "backward, sum for keys")
STAGES = {
    "forward": FORWARD,
    "step": (*FORWARD, "kl, attend", "kl, merge", *OF_KL, *BACKWARD),
    # Its products are called without a function of their own.
    "warm-up step": ("kl", "kl, layout", "kl, sum of values", "kl, sum for queries", "kl, sum for keys", "scale"),
}
"""Those that an operation runs through."""
HEAD_START = 20_000_000
"""Clock ticks for which the GPU waits while the host launches, about 10 ms."""

Marks = list[tuple[str, torch.cuda.Event, torch.cuda.Event]]


@contextlib.contextmanager
def marked() -> Iterator[Marks]:
    """Every call of a stage within, with an event before and one behind it."""
    seen: Marks = []
    inside: list[str] = []  # gradients run in a thread of their own, but one thing after the other

    def mark(stage: str, function: Callable) -> Callable:
        def run(*given: Any, **named: Any) -> object:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            name = ", ".join([*inside, stage])
            inside.extend([stage] if stage in CONTAINERS else [])
            start.record()
            try:
                result = function(*given, **named)
            finally:
                end.record()
                del inside[len(inside) - (stage in CONTAINERS) :]
            seen.append((name, start, end))
            return result

        return run

    modules = {name: importlib.import_module(f"msa_kernels.cute.{name}") for _, name, _ in FUNCTIONS}
    package = [module for name, module in sys.modules.items() if name.startswith("msa_kernels.cute.")]
    places = []
    for stage, defined, name in FUNCTIONS:
        original = getattr(modules[defined], name)
        # Also where other modules have it from there.
        places += [(stage, place, name, original) for place in package if vars(place).get(name) is original]
    try:
        for stage, place, name, original in places:
            setattr(place, name, mark(stage, original))
        yield seen
    finally:
        for _, place, name, original in places:
            setattr(place, name, original)


def stage_times(operation: str, call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each stage of an operation; RuntimeError if it misses one of those that it should have."""
    with marked() as seen:
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START)
        call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for stage, start, end in seen:
        times[stage] = times.get(stage, 0.0) + start.elapsed_time(end)
    missed = [stage for stage in STAGES[operation] if stage not in times]
    if missed:
        raise RuntimeError(f"{operation} never called the functions of its stages {', '.join(missed)}")
    return times
