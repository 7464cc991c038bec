"""Finished run folders with planted numbers, written through the lab's own writers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import planted
import xarray as xr

from msa_lab.config import DataConfig, ModelConfig, RunConfig, SelectionConfig, TrainConfig
from msa_lab.config_io import config_hash
from msa_lab.runs import Run
from msa_lab.selections import SelectionStore


def config(arm: str, kind: str, seed: int = 0, **changes: Any) -> RunConfig:
    model = {"attention": kind, "block_size": 16, "top_k_blocks": 4, "num_layers": 2, "num_query_heads": 4}
    model |= changes.pop("model", {})
    data = {"context_length": 512} | changes.pop("data", {})
    train = {"steps": 110, "proxy_warmup_steps": 20} | changes.pop("train", {})
    wanted = {"records": 12, "documents": 8} | changes.pop("selections", {})
    return RunConfig(
        study="planted",
        arm=arm,
        seed=seed,
        model=ModelConfig(**model),
        data=DataConfig(**data),
        train=TrainConfig(**train),
        selections=SelectionConfig(**wanted),
    )


def finished(
    root: Path, made: RunConfig, *, quality: float, log: xr.Dataset | None = None, documents: int = 16, **result: Any
) -> Run:
    """A run whose bits per byte are `quality`; single documents scatter around it, alike in every run of a seed."""
    run = Run.of(made, root)
    run.write_config(made)
    kinds = list(made.model.attention_kinds)
    corpus = {"hash": result.get("corpus_hash", "c0ffee00"), "packages": 12, "bytes": 3_000_000}
    run.write_json(
        "environment.json",
        {
            "device": "x86_64 CPU",
            "python": "3.11.7",
            "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
            "path": "reference",
            "path_reason": "no GPU here",
            "corpus": corpus,
        },
    )
    rng = np.random.default_rng(made.seed)
    scatter = rng.normal(0, 0.2, documents)
    own = np.random.default_rng(made.seed + 100 + len(made.arm)).normal(0, 0.004, documents)
    size = rng.integers(400, 600, documents).astype(float)
    values = quality + scatter + own
    values += quality - (values * size).sum() / size.sum()
    scored = [
        {"id": f"row{i}", "tokens": 512, "bytes": b, "bits_per_byte": v, "loss": v * np.log(2)}
        for i, (b, v) in enumerate(zip(size.tolist(), values.tolist(), strict=True))
    ]
    plain = {
        "study": made.study,
        "arm": made.arm,
        "seed": made.seed,
        "config_hash": config_hash(made),
        "attention": kinds,
        "steps": made.train.last_step,
        "tokens": made.train.last_step * 8 * made.data.context_length,
        "wall_seconds": 100.0 + 20 * ("msa" in kinds),
        "tokens_per_second": 5000.0 - 1000 * ("msa" in kinds),
        "parameters": {
            "total": 1_000_000,
            "non_embedding": 900_000,
            "proxy": 40_000 if "msa" in kinds else 0,
            "embedding": 100_000,
        },
        "flops_per_token": 6.1e6 - 1e5 * ("msa" in kinds),
        "flops_total": 3e12 - 1e11 * ("msa" in kinds),
        "validation_loss": quality * np.log(2),
        "bits_per_byte": quality,
        "bigram_bits_per_byte": 3.5,
        "rows": scored,
        "accuracy_by_distance": None,
        "path": "reference",
        "path_reason": "no GPU here",
        "corpus_hash": "c0ffee00",
        "peak_memory_bytes": None,
        "density": made.density,
        "hides_sparsity": made.hides_sparsity,
    }
    if log is not None:
        write_log(run, made, log)
    write_metrics(run, made, quality)
    run.write_json("result.json", plain | result)
    return run


def write_log(run: Run, made: RunConfig, log: xr.Dataset) -> None:
    tokens = np.zeros((log.sizes["document"], made.data.context_length), np.uint32)
    store = SelectionStore.create(run.path / "selections.zarr", made, list(log["document"].values), tokens)
    for i, step in enumerate(log["step"].values):
        record = {name: log[name].isel(step=i).values for name in ("selected", "teacher") if name in log}
        for name in ("score", "mass", "teacher_mass"):
            if name in store.arrays:
                record[name] = np.zeros(record["selected"].shape, np.float16)
        store.append(int(step), str(log["phase"].values[i]), record)
    if "head_teacher" in log:
        heads = log["head_teacher"].values
        values = {"head_teacher": heads, "head_teacher_mass": np.zeros(heads.shape, np.float16)}
        store.write_heads(int(log["step"].values[-1]), values)


def write_metrics(run: Run, made: RunConfig, quality: float) -> None:
    rng = np.random.default_rng(made.seed)
    lines = ["step,name,value"]
    for step in range(10, made.train.last_step + 1, 10):
        loss = quality * 0.7 + 2.5 * np.exp(-step / 40) + rng.normal(0, 0.02)
        lines.append(f"{step},train/ce,{loss:.5f}")
        if "msa" in made.model.attention_kinds:
            for layer in range(made.model.num_layers):
                lines.append(f"{step},train/kl/layer{layer},{0.1 + 0.1 * layer + np.exp(-step / 20):.5f}")
        if step % 50 == 0 or step == made.train.last_step:
            lines.append(f"{step},validation/loss,{loss:.5f}")
            lines.append(f"{step},validation/bits_per_byte,{loss / 0.7:.5f}")
    (run.path / "metrics.csv").write_text("\n".join(lines) + "\n")


@functools.cache
def trained_log(seed: int = 0, proxies: int = 2) -> xr.Dataset:
    """Twelve records: proxies that start alike and end near and far, with teachers and heads that lean the same way."""
    final = [4.0, -2.0, 6.0, 0.0][:proxies]
    parts = []
    for i in range(12):
        strength = i / 11
        rules = [planted.leaning(strength * value) for value in final]
        heads = [planted.leaning(value) for value in (final * 4)[:4]]
        step = 10 * i
        parts.append(
            planted.log(
                rules, teacher=rules, heads=heads if i == 11 else None, steps=(step,), layers=2, seed=seed * 20 + i
            )
        )
    heads = parts[-1]["head_teacher"]
    joined = xr.concat([part.drop_vars("head_teacher", errors="ignore") for part in parts], "step")
    joined["head_teacher"] = heads
    joined["phase"] = ("step", ["warmup", "warmup", *["sparse"] * 10])
    # The proxy finds half of what its heads want: the own choice with every other row replaced by the teacher's.
    wanted = joined["teacher"].values.copy()
    wanted[..., ::2, :] = joined["selected"].values[..., ::2, :]
    joined["teacher"] = (joined["teacher"].dims, wanted)
    return joined


def study(root: Path, *, seeds: int = 2) -> list[Run]:
    runs = []
    for seed in range(seeds):
        shift = 0.05 * seed
        runs.append(finished(root, config("dense", "dense", seed), quality=2.80 + shift))
        runs.append(
            finished(root, config("msa", "msa", seed), quality=2.81 + shift + 0.002 * seed, log=trained_log(seed))
        )
        runs.append(finished(root, config("window", "window", seed), quality=2.86 + shift))
    return runs


SMALL = {"model": {"num_layers": 1}, "selections": {"documents": 8, "records": 2}}
"""Changes of `config` for the runs that hold a `small_log`."""


def small_log(*, proxies: int = 2, documents: int = 8, seed: int = 0, records: int = 2, **sizes: int) -> xr.Dataset:
    """One near proxy, one far (or only the first), alike in the first record."""
    rules = [planted.leaning(6.0), planted.leaning(-6.0)][:proxies]
    first, steps = [planted.uniform] * proxies, tuple(range(0, 10 * records, 10))
    return planted.log(rules, teacher=rules, first=first, steps=steps, documents=documents, seed=seed, **sizes)


def small_run(root: Path, log: xr.Dataset | None, *, arm: str = "msa", kind: str = "msa", **changes: Any) -> Run:
    """A finished run of SMALL and these changes."""
    changes = {name: {**SMALL.get(name, {}), **dict(value)} for name, value in changes.items()}
    return finished(root, config(arm, kind, **{**SMALL, **changes}), quality=2.8, log=log)
