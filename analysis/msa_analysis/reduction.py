"""A finished run as a few small tables: what of it is carried away from the machine that trained it.

    tables = reduce_run(run, cache="data")
    tables["training"]  # specialization at every record, with nulls

Checkpoints and selection logs stay where they are; studies are compared from these tables alone (`study_results`).
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from msa_analysis import quality
from msa_analysis.intervene import intervene
from msa_analysis.logs import read_log
from msa_analysis.specialization import dynamics, summary
from msa_analysis.tally import tally
from msa_lab.config_io import config_hash
from msa_lab.runs import Run

NAMES = ("runs", "rows", "curve", "answers", "training", "end", "costs")
"""Every table that a run may have; see `reduce_run`."""
METRICS = (
    *("mutual_information", "mutual_information_excess", "eta_squared", "eta_squared_excess"),
    *("kappa", "positional", "content"),
    *("recency", "excess_recency", "block_recall", "recall_excess", "coverage_over_window"),
)
"""What is kept of `specialization.dynamics`."""
CURVE = ("train/ce", "train/kl", "validation/loss", "validation/bits_per_byte", "validation/accuracy")
CURVE += ("validation/warmup/loss", "validation/warmup/bits_per_byte", "validation/warmup/accuracy")
POINTS = 60
"""Points kept of a curve of training; of validations every one."""


@dataclass(frozen=True)
class Plan:
    """Which interventions, on how many validation rows."""

    documents: int = 48
    together: tuple[str, ...] = (
        *("shared", "shared_z", "shift1", "recency", "sink_recency", "random", "other_document", "teacher"),
    )
    """Rules for all layers at once."""
    single: tuple[str, ...] = ("shared", "recency", "random")
    """Rules for one layer at a time."""


def reduce_run(
    run: Run, *, cache: str | Path = "data", plan: Plan | None = None, device: str | None = None
) -> dict[str, pd.DataFrame]:
    """The tables of a finished run, by name; each has a column arm. A run without proxies has the first ones only.

    runs: one row, `quality.table` and the machine. rows: quality of each validation row. curve: losses over training,
    thinned. answers: accuracy by distance in blocks, where the task knows it. training: the metrics `METRICS` at every
    record, a layer and (layer missing) their mean, with interval over documents and null. end: `specialization.summary`
    of the last record, with permutation p-values. costs: `intervene.intervene`, all layers at once, by distance too,
    and one layer at a time.

    Args:
        run: A finished run.
        cache: Folder of token files.
        plan: Interventions.
        device: Where to compute them; a GPU if there is one.

    Raises:
        ValueError: The run is not finished, or its corpus is another one here.
    """
    config, plan = run.config, plan or Plan()
    tables = {"runs": _about(run), "rows": _rows(run), "curve": _curve(run), "answers": _answers(run)}
    if config.model.proxy_layers:
        sums = tally(read_log(run))
        history = dynamics(sums)
        tables["training"] = _kept(history[history["metric"].isin(METRICS)].drop(columns="documents"))
        tables["end"] = _kept(summary(sums, history=history))
        tables["costs"] = _costs(run, plan, cache, device)
    return {name: _named(frame, config.arm) for name, frame in tables.items() if len(frame)}


def _about(run: Run) -> pd.DataFrame:
    frame = quality.table([run]).drop(columns=["arm", "role"])
    environment = run.environment
    about = {name: environment.get(name) for name in ("code", "device")}
    losses = run.metrics.query("name == 'train/ce'")["value"].to_numpy()
    about |= {"weights": _digest((run.path / "model.safetensors").read_bytes()), "losses": _digest(losses.tobytes())}
    return frame.assign(run=f"{run.path.parent.name}/{run.path.name}", **about, stem=run.config.train.fork_from)


def _digest(content: bytes) -> str:
    """Equal for runs that are the same bit for bit."""
    return hashlib.sha256(content).hexdigest()[:12]


def _rows(run: Run) -> pd.DataFrame:
    frame = pd.DataFrame(run.result.get("rows") or [])
    return frame.drop(columns=[name for name in ("nats",) if name in frame])


def _curve(run: Run) -> pd.DataFrame:
    metrics = run.metrics
    parts = []
    for name, part in metrics[metrics["name"].isin(CURVE)].groupby("name", sort=False):
        every = max(1, len(part) // POINTS) if str(name).startswith("train/") else 1
        parts.append(part[::-1][::every][::-1])  # the last one is always kept
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _answers(run: Run) -> pd.DataFrame:
    found = run.result.get("accuracy_by_distance") or {}
    return pd.DataFrame([{"distance": int(blocks), **numbers} for blocks, numbers in found.items()])


def _costs(run: Run, plan: Plan, cache: str | Path, device: str | None) -> pd.DataFrame:
    told: dict[str, Any] = {"documents": plan.documents, "cache": cache, "device": device, "progress": False}
    parts = [
        intervene(run, rules, layers=layers, **told)
        for rules, layers in ((plan.together, "all"), (plan.single, "each"))
        if rules
    ]
    frame = pd.concat([part.drop(columns="proxy").astype({"distance": object}) for part in parts], ignore_index=True)
    return _kept(frame[frame["layer"].isna() | frame["bin"].isna()])


def _kept(frame: pd.DataFrame) -> pd.DataFrame:
    """Without columns that hold nothing."""
    return frame.dropna(axis=1, how="all").reset_index(drop=True)


def _named(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    frame = frame.copy()
    frame.insert(0, "arm", arm)
    return frame


def fingerprint(run: Run, plan: Plan) -> str:
    """What the tables of a run depend on; another one means that they are to be made again."""
    environment = run.environment
    return f"{config_hash(run.config)} {environment['corpus']['hash']} {environment.get('code')} {plan}"
