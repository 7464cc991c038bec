"""How good are the models: one row a run, and paired differences between arms.

Lower is better for every metric here. A difference is paired by seed (arms of a study see the same tokens in the same
order); its interval is Student's t over seeds. One seed has no such interval: what is given then speaks of that one
pair of models, over validation rows, and says so.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from msa_analysis.statistics import MIN_DOCUMENTS, t_interval, weighted_difference
from msa_lab.runs import Run, arm_folder

METRICS = {"bits_per_byte": ("bits_per_byte", "bytes"), "validation_loss": ("loss", "tokens")}
"""Metric of a run, and what holds it, and its weight, in a validation document."""
_COPIED = (
    *("steps", "tokens", "bits_per_byte", "bigram_bits_per_byte", "validation_loss", "flops_per_token", "flops_total"),
    *("wall_seconds", "tokens_per_second", "path", "path_reason", "corpus_hash", "density", "hides_sparsity"),
    "peak_memory_bytes",
)


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a finished run: arm, seed, size, cost, quality, kernel path, and whether it is sparse at all.

    bits_per_byte is that of the model with its own attention; scores under another attention have other names and
    never come into this column. `role` is "stem" for a run that others were forked from. `kinds` names the kinds of
    attention. Two configs under one arm name are told apart by their hash; kernel paths within an arm by the path.
    """
    frame = pd.DataFrame([_row(run) for run in runs])
    for key, part in (("config_hash", "config_hash"), ("path", "path"), ("study", "study")):
        several = frame.groupby("arm")[key].transform("nunique") > 1
        frame["arm"] = frame["arm"].where(~several, frame["arm"] + "-" + frame[part].astype(str))
    stems = {run.config.train.fork_from for run in runs} - {""}
    names = [(arm_folder(run.config), str(run.path)) for run in runs]
    frame.insert(3, "role", ["stem" if stems & set(name) else "arm" for name in names])
    return frame


def _row(run: Run) -> dict[str, Any]:
    result, config = run.result, run.config
    kinds = list(dict.fromkeys(result["attention"]))
    parameters = result["parameters"]
    rows = result.get("rows") or []
    identity = repr([(d.get("id"), d.get("tokens"), d.get("bytes")) for d in rows])
    return {
        "study": result["study"],
        "arm": result["arm"],
        "seed": result["seed"],
        "kinds": "+".join(kinds),
        "proxies": config.model.num_proxies if config.model.proxy_layers else 0,
        "parameters": parameters["total"],
        "non_embedding": parameters["non_embedding"],
        "proxy_parameters": parameters["proxy"],
        **{name: result.get(name) for name in _COPIED},
        "config_hash": result["config_hash"],
        "validation": hashlib.sha256(identity.encode()).hexdigest()[:8] if rows else "",
        "run": str(run.path),
    }


def metric_of(frame: pd.DataFrame) -> str:
    """bits_per_byte, or validation_loss (nats per scored token) where the task has no bytes."""
    return "bits_per_byte" if frame["bits_per_byte"].notna().all() else "validation_loss"


def reference_arm(frame: pd.DataFrame) -> str | None:
    """The arm that all others are compared with: the dense one that is no stem; None if there is not exactly one."""
    dense = frame[(frame["kinds"] == "dense") & (frame["role"] == "arm")]["arm"].unique()  # pyright: ignore[reportAttributeAccessIssue]
    return str(dense[0]) if len(dense) == 1 else None


def compare(runs: Sequence[Run], reference: str | None = None, *, metric: str | None = None) -> pd.DataFrame:
    """Each arm minus the reference arm, paired by seed: arm, reference, metric, difference, low, high, over, n, reason.

    `over` is "seeds" (t interval, n seeds) or "rows" (one pair of models, n validation rows, jackknife-t; the
    difference is then the weighted mean over those rows; rows that share a file make the interval too narrow).
    Stems are left out: they were trained for less.

    Raises:
        ValueError: Runs to be paired differ in corpus, validation rows or tokens; no such arm; no dense arm to take.
    """
    frame = table(runs)
    by_path = {str(run.path): run for run in runs}
    frame = frame[frame["role"] == "arm"]
    arms = list(frame["arm"].unique())  # pyright: ignore[reportAttributeAccessIssue]
    reference = reference or reference_arm(frame)
    if reference not in arms:
        raise ValueError(f"reference={reference!r}: name one of the arms {', '.join(arms)}")
    metric = metric or metric_of(frame)
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: must be one of {', '.join(METRICS)}")
    base = frame[frame["arm"] == reference]
    rows = []
    for arm in arms:
        if arm != reference:
            pairs = frame[frame["arm"] == arm].merge(base, on="seed", suffixes=("", "_base"))  # pyright: ignore[reportAttributeAccessIssue]
            refuse_unlike(pairs, arm, reference)
            rows.append({"arm": arm, "reference": reference, "metric": metric, **_difference(pairs, metric, by_path)})
    columns = ["arm", "reference", "metric", "difference", "low", "high", "over", "n", "reason"]
    return pd.DataFrame(rows, columns=columns)


def refuse_unlike(pairs: pd.DataFrame, arm: str, reference: str) -> None:
    """Raise a ValueError where runs of a pair saw another corpus or more of it, or are scored on other rows.

    `pairs` has the columns of `table` for both, those of the reference with `_base` behind their names.
    """
    for name, what in (("corpus_hash", "corpus"), ("validation", "validation rows"), ("tokens", "tokens of training")):
        for seed, ours, theirs in zip(pairs["seed"], pairs[name], pairs[f"{name}_base"], strict=True):
            if ours != theirs:
                raise ValueError(
                    f"{arm} seed {seed}: its {what} ({ours}) are not those of {reference} ({theirs}), so that the two "
                    "cannot be compared; report them apart"
                )


def _difference(pairs: pd.DataFrame, metric: str, by_path: dict[str, Run]) -> dict[str, Any]:
    if pairs.empty:
        nothing = {"difference": np.nan, "low": np.nan, "high": np.nan, "over": "seeds", "n": 0}
        return {**nothing, "reason": "no seed in common"}
    if len(pairs) > 1:
        mean, low, high = t_interval((pairs[metric] - pairs[f"{metric}_base"]).to_numpy(float))
        return {"difference": mean, "low": low, "high": high, "over": "seeds", "n": len(pairs), "reason": ""}
    row = pairs.iloc[0]
    ours, theirs = (by_path[row[name]].result.get("rows") or [] for name in ("run", "run_base"))
    value, weight = METRICS[metric]
    scored = [(a[value], b[value], a[weight]) for a, b in zip(ours, theirs, strict=True) if value in a]
    if not scored:
        plain = float(row[metric] - row[f"{metric}_base"])
        reason = "one seed, and no scores of single rows: no interval"
        return {"difference": plain, "low": np.nan, "high": np.nan, "over": "seeds", "n": 1, "reason": reason}
    difference, low, high = weighted_difference(*np.array(scored, dtype=float).T)
    few = "" if len(scored) >= MIN_DOCUMENTS else f"; {len(scored)} rows are too few for an interval"
    reason = f"one seed: speaks of this one pair of models{few}"
    return {"difference": difference, "low": low, "high": high, "over": "rows", "n": len(scored), "reason": reason}


def arms(frame: pd.DataFrame) -> pd.DataFrame:
    """A row an arm: seeds, mean quality with its t interval over seeds (NaN with one seed), mean size and cost."""
    metric, rows = metric_of(frame), []
    for arm, part in frame.groupby("arm", sort=False):
        mean, low, high = t_interval(part[metric].to_numpy(float))
        means = part[["parameters", "proxy_parameters", "flops_total", "wall_seconds", "tokens_per_second"]].mean()
        first = part.iloc[0][["role", "kinds", "proxies", "path", "path_reason", "density", "hides_sparsity"]]
        numbers = {"seeds": len(part), "metric": metric, "value": mean, "low": low, "high": high}
        rows.append({"arm": arm, **first, **numbers, **means, "bigram": part["bigram_bits_per_byte"].mean()})
    return pd.DataFrame(rows)
