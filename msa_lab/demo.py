"""The demo study: a dense stem, and three models forked from it that differ in attention alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msa_lab.budget import match
from msa_lab.config import DataConfig, RunConfig, SelectionConfig, TrainConfig
from msa_lab.config_model import AttentionKind, ModelConfig
from msa_lab.runs import arm_folder

ARMS: tuple[AttentionKind, ...] = ("msa", "dense", "window")


def runs(seeds: Sequence[int] = (0,)) -> list[RunConfig]:
    """The demo: minutes on two CPU cores, at 64 blocks a row so that choosing 4 of them is a choice."""
    stem = RunConfig(
        study="demo",
        arm="stem",
        model=ModelConfig(attention="dense", block_size=16, top_k_blocks=4),
        data=DataConfig(source="python", max_bytes=12_000_000, context_length=1024),
        train=TrainConfig(steps=420, stop_at=240, batch_size=4, proxy_warmup_steps=40),
        selections=SelectionConfig(records=12, documents=8),
    )
    return _forked(stem, seeds)


def tiny_runs(seeds: Sequence[int] = (0,)) -> list[RunConfig]:
    """The same study in seconds: enough to see every part work, far too short to learn anything."""
    model = ModelConfig(
        num_layers=2,
        d_model=32,
        num_query_heads=4,
        head_dim=8,
        proxy_dim=16,
        mlp_width=96,
        attention="dense",
        block_size=8,
        top_k_blocks=3,
    )
    train = TrainConfig(
        steps=12,
        stop_at=4,
        batch_size=4,
        warmup_steps=2,
        proxy_warmup_steps=2,
        log_every=1,
        validate_every=4,
        validation_batches=2,
        checkpoint_every=2,
    )
    data = DataConfig(source="python", max_bytes=2_000_000, context_length=128)
    log = SelectionConfig(records=4, documents=4)
    stem = RunConfig(study="tiny", arm="stem", model=model, data=data, train=train, selections=log)
    return _forked(stem, seeds)


def _forked(stem: RunConfig, seeds: Sequence[int]) -> list[RunConfig]:
    """For each seed the stem, and an arm of each kind of attention that goes on from its end at equal parameters."""
    train = replace(stem.train, stop_at=0, fork_from=arm_folder(stem), fork_step=stem.train.last_step)
    arms = [replace(stem, arm=kind, model=replace(stem.model, attention=kind), train=train) for kind in ARMS]
    return [replace(run, seed=seed) for seed in seeds for run in match([stem, *arms])]
