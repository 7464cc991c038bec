"""The 30M model of `flex_30m` at three lengths, MSA and dense at equal parameters, for the kernels."""

import runpy
from dataclasses import replace
from pathlib import Path

from msa_lab.budget import match
from msa_lab.config import RunConfig, SelectionConfig

LENGTHS = (4096, 16384, 32768)
BASE = Path(__file__).parents[1] / "flex_30m" / "study.py"
TOKENS = 32768
"""Of a batch, whatever its length."""


def runs(steps: int = 300, cache: str = "data", lengths: tuple[int, ...] = LENGTHS) -> list[RunConfig]:
    """For each length MSA, and dense with its parameters; 16 blocks are read beyond 4,096 tokens, 4 there."""
    base = runpy.run_path(str(BASE))["runs"](cache=cache)[0]
    found = []
    for length in lengths:
        msa = replace(
            base,
            study="kernels_30m",
            arm=f"msa-{length}",
            model=replace(base.model, top_k_blocks=4 if length == 4096 else 16),
            data=replace(base.data, context_length=length),
            train=replace(base.train, steps=steps, batch_size=TOKENS // length, proxy_warmup_steps=20, warmup_steps=20),
            selections=SelectionConfig(records=0),
        )
        found += match([msa, replace(msa, arm=f"dense-{length}", model=replace(msa.model, attention="dense"))])
    return found
