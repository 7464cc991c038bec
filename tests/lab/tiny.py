"""The smallest real runs: a corpus on disk and configs that train in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from msa_lab.config import DataConfig, ModelConfig, RunConfig, SelectionConfig, TrainConfig

MODEL = ModelConfig(
    num_layers=2,
    d_model=32,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=48,
    block_size=8,
    top_k_blocks=3,
    num_proxies=2,
    proxy_dim=8,
)
TRAIN = TrainConfig(
    steps=12,
    batch_size=4,
    warmup_steps=2,
    proxy_warmup_steps=4,
    log_every=1,
    validate_every=6,
    validation_batches=1,
    checkpoint_every=5,
)


def write_corpus(folder: Path, documents: int = 24, words: int = 900) -> Path:
    """Text files of words with a Zipf-like frequency, the same at every call."""
    rng = np.random.default_rng(0)
    vocabulary = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(2, 7))) for _ in range(60)]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        picks = np.minimum(rng.zipf(1.5, size=words), len(vocabulary)) - 1
        (folder / f"doc{i:02}.txt").write_text(" ".join(vocabulary[p] for p in picks))
    return folder


def tiny_run(folder: Path, **changes: Any) -> RunConfig:
    """A run on the corpus in `folder`; `model`, `train`, `data` and `selections` take dicts of changes."""
    if not folder.exists():
        write_corpus(folder)
    model, train = dict(changes.pop("model", {})), dict(changes.pop("train", {}))
    data, selections = dict(changes.pop("data", {})), dict(changes.pop("selections", {}))
    plain = DataConfig(source="text", path=str(folder), context_length=128, validation_fraction=0.3)
    return RunConfig(
        study="tiny",
        model=replace(MODEL, **model),
        train=replace(TRAIN, **train),
        data=replace(plain, **data),
        selections=replace(SelectionConfig(records=3, documents=2), **selections),
        **changes,
    )
