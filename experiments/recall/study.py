"""Recall with near and far answers: can one shared selection serve both, can one a head, and is a division seen?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msa_lab.budget import match
from msa_lab.config import DataConfig, RecallConfig, RunConfig, SelectionConfig, TrainConfig
from msa_lab.config_model import ModelConfig
from msa_lab.runs import arm_folder
from msa_lab.tasks import FILLERS

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "p1": {"num_proxies": 1},
    "p4": {"num_proxies": 4, "num_proxy_kv_heads": 4},
    "window": {"attention": "window"},
    "random": {"attention": "random"},
}
TASKS = {"mixture": (1, 2, 3, 8, 9, 10), "near": (1, 2, 3)}
"""Task to the distances of its answers in blocks, each as likely; three learned slots hold half of `mixture`'s."""
CODED_FROM = 8
"""Answers from here on are given in code, so that a head reads near ones or far ones."""
ARMS = {f"{task}_{kind}": changes for task in TASKS for kind, changes in KINDS.items()}
SEEDS = range(6)
REFERENCE = {f"{task}_{kind}": f"{task}_dense" for task in TASKS for kind in KINDS}
CONTRASTS = tuple((f"{task}_p4", f"{task}_p1") for task in TASKS)
"""What four proxies are worth in training: much in the mixture, nothing where all answers are near."""
MARGIN = 0.05
"""Nats a question."""
BLOCKS = 20
"""Of a row, each with a pair and a question; as many keys and values."""


def runs(seeds: Sequence[int] = SEEDS, cache: str = "data", *, tiny: bool = False) -> list[RunConfig]:
    """For each seed and task a dense stem, and its arms at one number of parameters."""
    made = []
    for seed in seeds:
        for task in TASKS:
            stem = _stem(task, tiny)
            train = replace(stem.train, stop_at=0, fork_from=arm_folder(stem), fork_step=stem.train.last_step)
            arms = [
                replace(stem, arm=f"{task}_{kind}", model=model, train=train, selections=log)
                for kind, changes in KINDS.items()
                for model in [replace(stem.model, **({"attention": "msa"} | changes))]
                for log in [replace(stem.selections, records=stem.selections.records if model.proxy_layers else 0)]
            ]
            made += [replace(run, seed=seed) for run in match([stem, *arms])]
    return made


def _stem(task: str, tiny: bool) -> RunConfig:
    """One layer, so that heads know where values stand and how far back, and cannot compare keys."""
    stem, steps = (4, 12) if tiny else (300, 800)
    shape = RecallConfig(num_keys=BLOCKS, pairs=BLOCKS, distances=TASKS[task], coded_from=CODED_FROM, block_size=4)
    return RunConfig(
        study="recall",
        arm=f"{task}_stem",
        model=ModelConfig(
            vocab_size=2 * BLOCKS + 2 + FILLERS,
            num_layers=1,
            d_model=64,
            num_query_heads=4,
            num_kv_heads=4,
            head_dim=32,
            mlp_width=64,
            rope_theta=200.0,
            attention="dense",
            block_size=4,
            top_k_blocks=4,
            proxy_dim=32,
        ),
        data=DataConfig(source="recall", context_length=4 * BLOCKS, recall=shape),
        train=TrainConfig(
            steps=steps,
            stop_at=stem,
            batch_size=16,
            proxy_lr=2e-3,
            warmup_steps=min(30, stem),
            decay_fraction=0.5,
            proxy_warmup_steps=2 * stem // 3,
            log_every=max(1, steps // 48),
            validate_every=steps // 4,
            validation_batches=16,
            checkpoint_every=steps // 4,
        ),
        selections=SelectionConfig(records=3 if tiny else 13, documents=16 if tiny else 64),
    )
