"""Near and far dependencies against near ones alone: may proxies divide the labour by distance, or not?"""

from __future__ import annotations

from collections.abc import Sequence

from msa_lab.config import DataConfig, RecallConfig, RunConfig, SelectionConfig, TrainConfig
from msa_lab.config_model import ModelConfig
from msa_lab.tasks import FILLERS

NUM_KEYS = 16
ARMS = {"mixture": 0.5, "near_only": 1.0}
"""Arm to the share of questions whose answer lies 1 to 3 blocks back: all that the two arms differ in."""
SEEDS = range(6)


def runs(seeds: Sequence[int] = SEEDS, steps: int = 480) -> list[RunConfig]:
    """Each seed in both arms: one layer, four heads with a proxy each, three learned slots."""
    return [_run(arm, seed, steps) for seed in seeds for arm in ARMS]


def _run(arm: str, seed: int, steps: int) -> RunConfig:
    task = RecallConfig(num_keys=NUM_KEYS, pairs=16, near_fraction=ARMS[arm], near_blocks=3, block_size=4)
    return RunConfig(
        study="recall_division",
        arm=arm,
        seed=seed,
        model=ModelConfig(
            vocab_size=2 * NUM_KEYS + 2 + FILLERS,
            num_layers=1,
            d_model=64,
            num_query_heads=4,
            num_kv_heads=4,
            head_dim=32,
            mlp_width=64,
            block_size=4,
            top_k_blocks=4,
            num_proxies=4,
            num_proxy_kv_heads=4,
            proxy_dim=32,
        ),
        data=DataConfig(source="recall", context_length=128, recall=task),
        train=TrainConfig(
            steps=steps,
            batch_size=16,
            proxy_lr=2e-3,
            warmup_steps=min(30, steps),
            decay_fraction=0.5,
            proxy_warmup_steps=steps // 2,
            validate_every=steps,
            validation_batches=16,
            checkpoint_every=steps,
        ),
        selections=SelectionConfig(records=9, documents=64),
    )
