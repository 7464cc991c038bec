"""Every field of training, data and log changes what comes out of a run: none is accepted and left unread.

The network's fields are in tests/test_architecture.py. Here a tiny run differs from another in one field.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_run, write_corpus

from msa_lab.config import DataConfig, RunConfig, SelectionConfig, TrainConfig
from msa_lab.runs import Run
from msa_lab.selections import open_selections
from msa_lab.train import train

BASE: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 1},
    "data": {"context_length": 48},
    "train": {"steps": 8, "warmup_steps": 1, "proxy_warmup_steps": 3, "validate_every": 4, "checkpoint_every": 4},
    "selections": {"records": 2, "documents": 2},
}
CHANGES: dict[str, Any] = {
    "train.steps": 7,
    "train.stop_at": 6,
    "train.batch_size": 8,
    "train.accumulate": 2,
    "train.lr": 1e-3,
    "train.schedule": "cosine",
    "train.warmup_steps": 4,
    "train.decay_fraction": 0.6,
    "train.min_lr_ratio": 0.5,
    "train.beta2": 0.9,
    "train.weight_decay": 0.0,
    "train.clip": 0.1,
    "train.proxy_lr": 1e-3,
    "train.proxy_clip": 0.01,
    "train.kl_weight": 0.5,
    "train.proxy_warmup_steps": 2,
    "train.precision": "bf16",
    "train.log_every": 2,
    "train.validate_every": 3,
    "train.validation_batches": 2,
    "data.max_bytes": 15_000,
    "data.context_length": 40,
    "data.document_mask": True,
    "data.validation_fraction": 0.2,
    "selections.records": 3,
    "selections.documents": 1,
    "selections.query_stride": 2,
    "selections.teacher": False,
}
NO_NUMBER = {"train.deterministic": False, "train.activation_checkpointing": True, "train.checkpoint_every": 3}
"""These change speed, memory or what a killed run repeats, and on a CPU not one bit of what comes out."""
ELSEWHERE = {
    **dict.fromkeys(("train.fork_from", "train.fork_step"), "test_fork.py"),
    **dict.fromkeys(("data.source", "data.path", "data.text_field", "data.tokenizer"), "test_data_*.py"),
    "data.expected_hash": "test_data_store.py",
    "train.compile": "tests/gpu",
    "train.cuda_graphs": "tests/lab/test_learner.py",
}


def fit(config: RunConfig, corpus: Path) -> Run:
    """Trained in a root of its own: every start reads the configs of all runs that lie in its study."""
    root = corpus.with_name(f"{config.arm}-runs")
    return train(config, root=root, cache=corpus.with_name("cache"), progress=False, wandb="disabled")


def outcome(corpus: Path, changes: dict[str, Any], name: str) -> dict[str, Any]:
    """Everything a run leaves behind that is no time: numbers, weights, the log's sizes and the result."""
    parts = {section: dict(values) for section, values in BASE.items()}
    for field, value in changes.items():
        section, key = field.split(".")
        parts[section][key] = value
    run = fit(tiny_run(corpus, arm=name, **parts), corpus)
    metrics = run.metrics[~run.metrics.name.isin(["tokens_per_second", "mfu"])]
    return {
        "metrics": metrics.to_csv(),
        "weights": load_file(run.path / "model.safetensors"),
        "log": dict(open_selections(run).sizes) | {"names": sorted(map(str, open_selections(run).data_vars))},
        "result": {key: run.result[key] for key in ("validation_loss", "steps")},
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    weights, others = one["weights"], other["weights"]
    return (
        all(one[key] == other[key] for key in ("metrics", "log", "result"))
        and weights.keys() == others.keys()
        and all(torch.equal(weight, others[name]) for name, weight in weights.items())
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("fields") / "corpus", documents=120, words=40)


@pytest.fixture(scope="module")
def plain(corpus: Path) -> dict[str, Any]:
    return outcome(corpus, {}, "plain")


def test_every_field_is_tried_here_or_somewhere_named() -> None:
    sections = {"data": DataConfig, "train": TrainConfig, "selections": SelectionConfig}
    known = {
        f"{section}.{field.name}"
        for section, cls in sections.items()
        for field in fields(cls)
        if not is_dataclass(field.default_factory)
    }
    assert {*CHANGES, *NO_NUMBER, *ELSEWHERE} == known
    assert len({*CHANGES, *NO_NUMBER, *ELSEWHERE}) == len(CHANGES) + len(NO_NUMBER) + len(ELSEWHERE)
    assert {field.name for field in fields(RunConfig)} == {"study", "arm", "seed", "backend", "model", *sections}


@pytest.mark.xdist_group("fields")
@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_changes_what_comes_out(field: str, corpus: Path, plain: dict[str, Any]) -> None:
    assert not same(plain, outcome(corpus, {field: CHANGES[field]}, field))


@pytest.mark.xdist_group("fields")
def test_the_seed_changes_what_comes_out_and_a_name_does_not(corpus: Path, plain: dict[str, Any]) -> None:
    assert same(plain, outcome(corpus, {}, "again"))
    run = fit(tiny_run(corpus, seed=1, arm="seed", **BASE), corpus)
    assert run.result["validation_loss"] != plain["result"]["validation_loss"]


@pytest.mark.xdist_group("fields")
@pytest.mark.parametrize("field", NO_NUMBER)
def test_a_field_that_is_about_speed_changes_no_number(field: str, corpus: Path, plain: dict[str, Any]) -> None:
    assert same(plain, outcome(corpus, {field: NO_NUMBER[field]}, field))
