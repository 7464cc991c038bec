"""The same arm twice from one stem, and dense models from scratch at three learning rates: how large is the noise?"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msa_lab.budget import match
from msa_lab.config import RunConfig

PROXIES = runpy.run_path(str(Path(__file__).parents[1] / "proxies" / "study.py"))
"""The study whose stem and sizes these are."""
FORKS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "dense_again": {"attention": "dense"},
    "p2": {"num_proxies": 2},
    "p2_again": {"num_proxies": 2},
}
RATES = {"lr_same": 1.0, "lr_half": 0.5, "lr_double": 2.0}
"""Dense models from scratch, without a stem, at so many times its learning rate."""
ARMS = (*FORKS, *RATES)
SEEDS = range(3)
REFERENCE = {"p2": "dense", "lr_half": "lr_same", "lr_double": "lr_same"}
CONTRASTS = (("dense", "lr_same"),)
"""A fork against the same training in one piece: unlike the others, what the stem's narrower MLP costs."""
MARGIN = 0.01
TWICE = (("dense", "dense_again"), ("p2", "p2_again"))
"""Arms that are one arm, under two names."""
BPE, DATA = PROXIES["BPE"], PROXIES["DATA"]


def runs(seeds: Sequence[int] = SEEDS, cache: str = "data", *, tiny: bool = False) -> list[RunConfig]:
    """For each seed the stem, each fork twice, and dense models that do not come from the stem."""
    stem = PROXIES["tiny_stem"]("noise-tiny") if tiny else PROXIES["full_stem"]("noise", cache)
    made = []
    for seed in seeds:
        forks = PROXIES["forked"](stem, FORKS, [seed])
        whole = replace(stem.train, stop_at=0)
        rates = [
            replace(stem, arm=name, seed=seed, train=replace(whole, lr=times * stem.train.lr))
            for name, times in RATES.items()
        ]
        made += match([*forks, *rates])
    return made
