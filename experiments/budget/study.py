"""How many keys a query may read, and in how large blocks, at two lengths of context."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msa_lab.config import RunConfig

PROXIES = runpy.run_path(str(Path(__file__).parents[1] / "proxies" / "study.py"))
"""The study whose stem and sizes these are."""
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "4k": {
        "dense": {"attention": "dense"},
        "b128_k4": {"top_k_blocks": 4},
        "b64_k8": {"block_size": 64, "top_k_blocks": 8},
        "b128_k2": {"top_k_blocks": 2},
        "b128_k8": {"top_k_blocks": 8},
        "window": {"attention": "window"},
        "random": {"attention": "random"},
    },
    "16k": {
        "dense": {"attention": "dense"},
        "b128_k16": {"top_k_blocks": 16},
        "b128_k4": {"top_k_blocks": 4},
        "window": {"attention": "window", "top_k_blocks": 16},
        "random": {"attention": "random", "top_k_blocks": 16},
    },
}
"""Context to arms; 512 keys a query at 4,096 tokens and 2,048 at 16,384, where the name does not say otherwise."""
LENGTHS = {"4k": 4096, "16k": 16384}
ARMS = tuple(f"{context}_{kind}" for context, kinds in KINDS.items() for kind in kinds)
SEEDS = range(3)
REFERENCE = {f"{context}_{kind}": f"{context}_dense" for context, kinds in KINDS.items() for kind in kinds}
CONTRASTS = (
    ("4k_b128_k4", "4k_window"),
    ("16k_b128_k16", "16k_window"),
    ("4k_b64_k8", "4k_b128_k4"),
    ("4k_b128_k2", "4k_b128_k4"),
    ("4k_b128_k8", "4k_b128_k4"),
    ("16k_b128_k4", "16k_b128_k16"),
)
MARGIN = 0.01
BPE, DATA = PROXIES["BPE"], PROXIES["DATA"]


def runs(seeds: Sequence[int] = SEEDS, cache: str = "data", *, tiny: bool = False) -> list[RunConfig]:
    """For each seed and context a stem, and its arms at one number of parameters."""
    base = PROXIES["tiny_stem"]("budget-tiny") if tiny else PROXIES["full_stem"]("budget", cache)
    made = []
    for seed in seeds:
        for context, kinds in KINDS.items():
            arms = {f"{context}_{kind}": {"num_proxies": 2} | changes for kind, changes in kinds.items()}
            if tiny:
                arms = {name: changes | _small(changes) for name, changes in arms.items()}
            made += PROXIES["forked"](_stem(base, context, tiny), arms, [seed])
    return made


def _stem(base: RunConfig, context: str, tiny: bool) -> RunConfig:
    """As many tokens a batch, and as many to score and to record, at every length."""
    times = LENGTHS[context] // LENGTHS["4k"]
    length = (128 if tiny else LENGTHS["4k"]) * times
    held = base.selections
    log = replace(held, documents=max(6, held.documents // times), query_stride=times * held.query_stride)
    train = replace(base.train, batch_size=base.train.batch_size // times)
    data = replace(base.data, context_length=length)
    return replace(base, arm=f"{context}_stem", data=data, train=train, selections=log)


def _small(changes: dict[str, Any]) -> dict[str, Any]:
    """Blocks of 8 and 4 in the place of 128 and 64, and as few of them as fit a short row."""
    return {"block_size": changes.get("block_size", 128) // 16, "top_k_blocks": min(changes.get("top_k_blocks", 4), 8)}
