"""Selection logs and run folders whose answer is known before anything is measured.

Importing this also makes the modules of experiments/planted importable: populations of uneven documents, and the value
of every metric in them in closed form.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr

Rule = Callable[[np.random.Generator, int, int, np.ndarray], np.ndarray]
"""(generator, own block, slots, shape) -> learned block ids of shape (*shape, slots), all earlier than own."""


def newest(rng: np.random.Generator, own: int, slots: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(own - slots, own), (*shape, slots))


def oldest(rng: np.random.Generator, own: int, slots: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(slots), (*shape, slots))


def uniform(rng: np.random.Generator, own: int, slots: int, shape: tuple[int, ...]) -> np.ndarray:
    return rng.random((*shape, own)).argsort(-1)[..., :slots]


def leaning(strength: float) -> Rule:
    """Without replacement, weighted by exp(strength x relative position): > 0 leans to the recent blocks."""

    def rule(rng: np.random.Generator, own: int, slots: int, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.gumbel(size=(*shape, own)) + strength * np.linspace(-0.5, 0.5, own)
        return (-noise).argsort(-1)[..., :slots]

    return rule


def choose(rule: Rule, *, documents: int, context: int, block_size: int, top_k: int, seed: int) -> np.ndarray:
    """(document, query, slot) int16: the own block forced, the rest by the rule, ascending with -1 last."""
    rng = np.random.default_rng(seed)
    result = np.full((documents, context, top_k), -1, dtype=np.int16)
    for own in range(-(-context // block_size)):
        rows = slice(own * block_size, min(context, (own + 1) * block_size))
        shape = (documents, rows.stop - rows.start)
        slots = min(top_k - 1, own)
        ids = np.full((*shape, slots + 1), own)
        if slots:
            ids[..., :slots] = rule(rng, own, slots, shape)
        result[:, rows, : slots + 1] = np.sort(ids, -1)
    return result


def log(
    rules: list[Rule],
    *,
    teacher: list[Rule] | None = None,
    first: list[Rule] | None = None,
    heads: list[Rule] | None = None,
    steps: tuple[int, ...] = (0, 100),
    layers: int = 1,
    documents: int = 8,
    context: int = 512,
    block_size: int = 16,
    top_k: int = 4,
    seed: int = 0,
) -> xr.Dataset:
    """A selection log in which proxy p follows rules[p] (the first record: first[p]), its teacher teacher[p]."""
    sizes = {"documents": documents, "context": context, "block_size": block_size, "top_k": top_k}
    count = iter(range(seed * 10_000, (seed + 1) * 10_000))

    def stack(chosen: list[Rule]) -> np.ndarray:
        return np.stack([choose(rule, **sizes, seed=next(count)) for rule in chosen], 1)

    per_step = [rules if first is None or i else first for i in range(len(steps))]
    selected = np.stack([np.stack([stack(chosen) for _ in range(layers)]) for chosen in per_step])
    wanted = np.stack([np.stack([stack(teacher or rules) for _ in range(layers)]) for _ in steps])
    dims = ("step", "layer", "document", "proxy", "query", "slot")
    data = xr.Dataset(
        {"selected": (dims, selected), "teacher": (dims, wanted)},
        coords={
            "step": list(steps),
            "phase": ("step", ["warmup", *["sparse"] * (len(steps) - 1)]),
            "layer": np.arange(layers),
            "document": [f"package/module_{d}.py" for d in range(documents)],
            "proxy": np.arange(len(rules)),
            "query": np.arange(context),
        },
        attrs={
            "block_size": block_size,
            "top_k_blocks": top_k,
            "num_local_blocks": 1,
            "num_sink_blocks": 0,
            "context_length": context,
            "num_query_heads": len(rules),
        },
    )
    if heads:
        dims = ("layer", "document", "head", "query", "slot")
        data["head_teacher"] = (dims, np.stack([stack(heads) for _ in range(layers)]))
    return data
