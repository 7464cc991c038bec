"""From one dense stem a seed: one proxy to one a head, heads regrouped, choices shared across layers, and controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msa_lab.budget import match
from msa_lab.config import DataConfig, RunConfig, SelectionConfig, TrainConfig
from msa_lab.config_model import ModelConfig, share_every
from msa_lab.runs import arm_folder

ARMS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "p1": {"num_proxies": 1},
    "p2": {"num_proxies": 2},
    "p4": {"num_proxies": 4},
    "p8": {"num_proxies": 8},
    "regrouped": {"attention": "regrouped", "num_proxies": 2},
    "shared2": {"attention": share_every(2, 8), "num_proxies": 2},
    "window": {"attention": "window"},
    "random": {"attention": "random"},
}
"""Arm to what of the model it changes: a new arm is a new line. p2 is the paper's: a proxy for each KV head."""
SEEDS = range(5)
REFERENCE = "dense"
CONTRASTS = (("p2", "p1"), ("p2", "regrouped"), ("p2", "shared2"))
"""What it is worth, in training, that proxies are two, serve heads that share keys, and choose in every layer."""
MARGIN = 0.01
"""Bits per byte by which an arm may be worse than the reference and still count as good as it."""
BPE = 8192
STEM_STEPS, STEPS = 1221, 2137
"""Steps of 32,768 tokens: 40.0 M of stem, 30.0 M of a fork."""
DATA = DataConfig(max_bytes=300_000_000, context_length=4096)


def runs(seeds: Sequence[int] = SEEDS, cache: str = "data", *, tiny: bool = False) -> list[RunConfig]:
    """For each seed its stem, then the arms that go on from its end; `tiny` is the same road in seconds, on a CPU."""
    stem = tiny_stem("proxies-tiny") if tiny else full_stem("proxies", cache)
    return forked(stem, ARMS, seeds)


def forked(stem: RunConfig, arms: dict[str, dict[str, Any]], seeds: Sequence[int]) -> list[RunConfig]:
    """The stem and its arms at one number of parameters; what an arm changes of `train` stands under that name."""
    train = replace(stem.train, stop_at=0, fork_from=arm_folder(stem), fork_step=stem.train.last_step)
    made = []
    for name, changes in arms.items():
        kinds = changes.get("attention", "msa")
        # A smaller model than the one the arm was written for takes the first of its layers.
        kinds = kinds if isinstance(kinds, str) else kinds[: stem.model.num_layers]
        of_model = {field: value for field, value in changes.items() if field != "train"}
        model = replace(stem.model, **{**of_model, "attention": kinds})
        # What looks at nothing has nothing to record.
        records = stem.selections.records if model.proxy_layers else 0
        log = replace(stem.selections, records=records)
        own = replace(train, **changes.get("train", {}))
        made.append(replace(stem, arm=name, model=model, train=own, selections=log))
    return [replace(run, seed=seed) for seed in seeds for run in match([stem, *made])]


def full_stem(study: str, cache: str) -> RunConfig:
    """A dense model of 27 M parameters, trained to where the arms leave it.

    Raises:
        ValueError: The cache holds no BPE tokenizer of 8,192, or several.
    """
    found = sorted(Path(cache, "tokenizers").glob(f"*-{BPE}.json"))
    if len(found) != 1:
        make = (
            f"make one with `msa-lab prepare --data.max_bytes {DATA.max_bytes} --data.context_length 4096 --bpe {BPE}`"
        )
        raise ValueError(f"{cache}: holds {len(found)} tokenizers of {BPE}; {make}")
    return RunConfig(
        study=study,
        arm="stem",
        model=ModelConfig(
            vocab_size=BPE,
            num_layers=8,
            d_model=512,
            num_query_heads=8,
            num_kv_heads=2,
            head_dim=64,
            mlp_width=1408,
            attention="dense",
            block_size=128,
            top_k_blocks=4,
            proxy_dim=64,
        ),
        data=replace(DATA, tokenizer=str(found[0])),
        train=TrainConfig(
            steps=STEPS,
            stop_at=STEM_STEPS,
            batch_size=8,
            lr=1.5e-3,
            proxy_lr=3e-3,
            warmup_steps=100,
            proxy_warmup_steps=92,
            precision="bf16",
            compile=True,
            log_every=20,
            validate_every=458,
            validation_batches=16,
            checkpoint_every=250,
        ),
        selections=SelectionConfig(records=12, documents=16, query_stride=4),
    )


def tiny_stem(study: str) -> RunConfig:
    """Two layers and a few steps on bytes: every part works, nothing is learned."""
    model = ModelConfig(
        num_layers=2,
        d_model=64,
        num_query_heads=8,
        num_kv_heads=2,
        head_dim=8,
        mlp_width=96,
        attention="dense",
        block_size=8,
        top_k_blocks=3,
        proxy_dim=8,
    )
    train = TrainConfig(
        steps=14,
        stop_at=6,
        batch_size=4,
        warmup_steps=2,
        proxy_warmup_steps=3,
        log_every=1,
        validate_every=4,
        validation_batches=2,
        checkpoint_every=2,
    )
    return RunConfig(
        study=study,
        arm="stem",
        model=model,
        data=DataConfig(max_bytes=2_000_000, context_length=128),
        train=train,
        selections=SelectionConfig(records=3, documents=6),
    )
