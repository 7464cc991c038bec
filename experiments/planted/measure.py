"""What the estimators say about drawn runs: one row a run and metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import xarray as xr
from msa_analysis import specialization
from msa_analysis.tally import tally
from populations import Population, draw

CHUNK = 125
"""Runs in memory at once."""
COLUMNS = ["metric", "run", "value", "low", "high", "null", "p_value", "reason"]
PLACES = ("bin", "part", "position", "proxy")
"""Labels that stand in brackets behind the metric's name."""
Measure = Callable[..., pd.DataFrame]
PERMUTATIONS = 199


def strength(sums: xr.Dataset, permutations: int = PERMUTATIONS) -> pd.DataFrame:
    """The mutual information and its relations, as a whole and by proxy, with the permutation test."""
    parts = [
        specialization.mutual_information(sums, pool=("proxy",), permutations=permutations),
        specialization.proxy_information(sums, permutations=permutations),
    ]
    return pd.concat(parts, ignore_index=True)


def plain_strength(sums: xr.Dataset) -> pd.DataFrame:
    """The mutual information without its test."""
    return specialization.mutual_information(sums, pool=("proxy",), permutations=0)


def looks(sums: xr.Dataset) -> pd.DataFrame:
    """Where proxies look, and what they find of what their heads want; means over proxies."""
    return _tables(sums, PLACED, ("proxy",))


def likeness(sums: xr.Dataset) -> pd.DataFrame:
    """How alike choices are: of two proxies, of one at two records, of one in two documents; and the alarm."""
    alarms = specialization.collapse(sums)
    parts = [
        specialization.overlap(sums),
        _tables(sums, (specialization.churn, specialization.fixed_choice), ("proxy",)),
        alarms[alarms["metric"].isin(["twin", "collapse"])].drop(columns="other"),
    ]
    return pd.concat(parts, ignore_index=True)


def heads(sums: xr.Dataset) -> pd.DataFrame:
    """What single heads want, and their groups; nothing where the log has none."""
    if "head_bins" not in sums:
        return pd.DataFrame({"metric": [], "step": [], "layer": []})
    parts = [
        specialization.head_groups(sums, permutations=PERMUTATIONS),
        _tables(sums, (specialization.group_divergence, specialization.teacher_entropy), ("proxy",)),
    ]
    return pd.concat(parts, ignore_index=True)


def _tables(sums: xr.Dataset, functions: Sequence[Measure], pool: tuple[str, ...]) -> pd.DataFrame:
    return pd.concat([function(sums, pool=pool) for function in functions], ignore_index=True)


PLACED = (
    specialization.distance_profile,
    specialization.position_profile,
    specialization.recency,
    specialization.sink_share,
    specialization.never_selected,
    specialization.block_recall,
    specialization.recall_by_distance,
    specialization.recall_by_position,
    specialization.captured_mass,
    specialization.coverage,
    specialization.coverage_by_distance,
    specialization.coverage_by_position,
)
ALL: tuple[Measure, ...] = (looks, likeness, strength, heads)


def measured(
    population: Population, *, runs: int, documents: int, seed: Sequence[int], measures: Sequence[Measure] = ALL
) -> pd.DataFrame:
    """COLUMNS for so many runs, at their last record; with `emergence` of what was measured, where there are more."""
    log = draw(population, runs=runs, documents=documents, rng=np.random.default_rng(seed))
    sums = tally(log)
    frame = pd.concat([_named(measure(sums)) for measure in measures], ignore_index=True)
    if log.sizes["step"] > 1:
        since = specialization.emergence(frame)
        frame = pd.concat([frame, since.assign(metric="emergence[" + since["of"] + "]")], ignore_index=True)
    return frame[frame["step"] == log["step"].values[-1]].rename(columns={"layer": "run"})[COLUMNS]


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    metric = frame["metric"]
    for label in (label for label in PLACES if label in frame):
        known = frame[label].notna()
        metric = metric.where(~known, metric + "[" + frame[label].astype("Int64").astype(str) + "]")
    return frame.assign(metric=metric, p_value=frame.get("p_value", np.nan))
