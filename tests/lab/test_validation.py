"""Validation while training: what is scored with dense attention has another name than what is scored sparse."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_run, write_corpus

from msa_lab.train import train


@pytest.mark.parametrize(
    ("kind", "warmup", "own"),
    [("msa", [2], [4, 6]), ("dense", [], [2, 4, 6])],
    ids=["switches at step 4", "has one attention throughout"],
)
def test_warm_up_scores_stand_under_a_name_of_their_own(
    tmp_path: Path, kind: str, warmup: list[int], own: list[int]
) -> None:
    config = tiny_run(
        write_corpus(tmp_path / "corpus"),
        model={"attention": kind},
        train={"steps": 6, "validate_every": 2, "proxy_warmup_steps": 4},
    )
    run = train(config, root=tmp_path / "runs", cache=tmp_path / "cache", progress=False, wandb="disabled")
    steps = run.metrics.groupby("name")["step"].apply(list)
    for measure in ("loss", "bits_per_byte"):
        assert steps.get(f"validation/warmup/{measure}", []) == warmup
        assert steps[f"validation/{measure}"] == own
    held = run.metrics.query("name == 'validation/bits_per_byte' and step == 6")["value"].item()
    assert run.result["bits_per_byte"] == held


def test_a_run_that_ends_in_the_warm_up_is_scored_sparse_at_its_end(tmp_path: Path) -> None:
    config = tiny_run(
        write_corpus(tmp_path / "corpus"),
        train={"steps": 4, "validate_every": 2, "proxy_warmup_steps": 4},
    )
    run = train(config, root=tmp_path / "runs", cache=tmp_path / "cache", progress=False, wandb="disabled")
    steps = run.metrics.groupby("name")["step"].apply(list)
    assert (steps["validation/warmup/loss"], steps["validation/loss"]) == ([2], [4])
