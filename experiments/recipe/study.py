"""What MSA's recipe fixes without having tried it: the paper's arm, and arms that each change one part."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msa_lab.config import RunConfig

PROXIES = runpy.run_path(str(Path(__file__).parents[1] / "proxies" / "study.py"))
"""The study whose stem and sizes these are."""
WARMUPS = {"warm_none": 0.0, "warm_half": 0.5}
"""Arm to the share of a fork's steps with dense attention; `p2` has a tenth."""
PARTS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "p2": {},
    "attached": {"detach_proxy_input": False},
    "attached_tenth": {"detach_proxy_input": False, "train": {"kl_weight": 0.1}},
    "own_free": {"num_local_blocks": 0},
    "sink_forced": {"num_sink_blocks": 1},
    "no_rope": {"proxy_rope": False},
    "key_each": {"num_proxy_kv_heads": 2},
}
"""Arm to what it changes; all but `dense` have two proxies."""
ARMS = (*PARTS, "dim_double", *WARMUPS)
SEEDS = range(3)
REFERENCE = {arm: "p2" for arm in ARMS if arm != "dense"}
CONTRASTS = (("p2", "dense"),)
MARGIN = 0.01
BPE, DATA = PROXIES["BPE"], PROXIES["DATA"]


def runs(seeds: Sequence[int] = SEEDS, cache: str = "data", *, tiny: bool = False) -> list[RunConfig]:
    """For each seed the stem and the arms."""
    stem = PROXIES["tiny_stem"]("recipe-tiny") if tiny else PROXIES["full_stem"]("recipe", cache)
    steps = stem.train.steps - stem.train.last_step
    parts = PARTS | {"dim_double": {"proxy_dim": 2 * stem.model.proxy_dim}}
    parts |= {arm: {"train": {"proxy_warmup_steps": round(share * steps)}} for arm, share in WARMUPS.items()}
    arms = {name: {"num_proxies": 2} | changes for name, changes in parts.items()}
    return PROXIES["forked"](stem, arms, seeds)
