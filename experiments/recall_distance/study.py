"""Answers near, far, or near and far at distances that only the proxies can tell apart: is a division seen?"""

from __future__ import annotations

from collections.abc import Sequence

from msa_lab.config import DataConfig, RecallConfig, RunConfig, SelectionConfig, TrainConfig
from msa_lab.config_model import ModelConfig
from msa_lab.tasks import FILLERS

NEAR, FAR = (1, 2, 3), (8, 9, 10)
ARMS = {"mixture": NEAR + FAR, "near_only": NEAR, "far_only": FAR}
"""Arm to the distances of its answers, in blocks: all that the arms differ in."""
BLOCKS = 20
SEEDS = range(8)


def runs(seeds: Sequence[int] = SEEDS, steps: int = 500) -> list[RunConfig]:
    """Each seed in every arm: one layer, four heads with a proxy each, three learned slots."""
    return [_run(arm, seed, steps) for seed in seeds for arm in ARMS]


def _run(arm: str, seed: int, steps: int) -> RunConfig:
    task = RecallConfig(num_keys=BLOCKS, pairs=BLOCKS, distances=ARMS[arm], coded_from=FAR[0], block_size=4)
    return RunConfig(
        study="recall_distance",
        arm=arm,
        seed=seed,
        model=ModelConfig(
            vocab_size=2 * BLOCKS + 2 + FILLERS,
            num_layers=1,
            d_model=64,
            num_query_heads=4,
            num_kv_heads=4,
            head_dim=32,
            mlp_width=64,
            rope_theta=200.0,
            block_size=4,
            top_k_blocks=4,
            num_proxies=4,
            num_proxy_kv_heads=4,
            proxy_dim=32,
        ),
        data=DataConfig(source="recall", context_length=4 * BLOCKS, recall=task),
        train=TrainConfig(
            steps=steps,
            batch_size=16,
            proxy_lr=2e-3,
            warmup_steps=min(30, steps),
            decay_fraction=0.5,
            proxy_warmup_steps=3 * steps // 5,
            validate_every=steps,
            validation_batches=16,
            checkpoint_every=steps,
        ),
        selections=SelectionConfig(records=9, documents=64),
    )
