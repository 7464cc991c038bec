"""Do proxies specialize? Each number with its null and its interval, as tidy tables.

Every function takes a selection Dataset (`msa_lab.selections.open_selections(run)`) or its `tally`, which is worth
keeping when several are called. Learned slots of unsaturated rows count, nothing else (`msa_analysis.choices`).

Columns: metric, step, phase, layer, proxy (other, bin, position, where they apply), value, low, high (95 %,
delete-one-document jackknife with Student's t: it speaks of this one model), null (what a choice without the property
would give), documents, reason (why a number is "not defined", i.e. NaN). `pool` names dimensions that are averaged
over before the interval is taken: ("proxy",) gives a number a layer, ("layer", "proxy") one a run.

Student's t has the freedom of the documents that have a case, as at a place that only long ones reach. Where a metric
is a rate, the interval allows for skewness (`statistics.jackknife_skewed`), so that its ends are not equally far; it is
not defined at exactly 0 or 1, with fewer than four documents that have a case, nor where it would rest on fewer than
two. That of a squared statistic (information, variance share) needs six documents. `positional`, `fixed_choice`,
`mutual_information_excess` and `eta_squared_excess` are made of pairs of documents: their intervals tell what a
document brings from what a pair does (`statistics.pair_shrinkage`). Each null has one test: the p-value where there is
one, else the interval. That every metric recovers planted answers, and how often its interval covers and its null is
rejected, is measured in `experiments/planted`.

By subject: `profiles` (where proxies look), `fidelity` (do they find what their heads want), `overlaps` (are choices
alike), `division` (do proxies divide the labour), `heads` (do the heads differ), `training` (since when; collapse).
Across runs: `replication`.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis.division import KEYS, mutual_information, proxy_information
from msa_analysis.estimate import NUMBERS, RUN, table
from msa_analysis.fidelity import (
    block_recall,
    captured_mass,
    coverage,
    coverage_by_distance,
    coverage_by_position,
    recall_by_distance,
    recall_by_position,
)
from msa_analysis.heads import group_divergence, head_groups, teacher_entropy
from msa_analysis.overlaps import churn, fixed_choice, overlap
from msa_analysis.profiles import distance_profile, never_selected, position_profile, recency, sink_share
from msa_analysis.statistics import discoveries, interval_p_value
from msa_analysis.tally import tally
from msa_analysis.training import collapse, emergence

__all__ = [
    "RUN",
    "block_recall",
    "captured_mass",
    "churn",
    "collapse",
    "coverage",
    "coverage_by_distance",
    "coverage_by_position",
    "distance_profile",
    "dynamics",
    "emergence",
    "fixed_choice",
    "group_divergence",
    "head_groups",
    "mutual_information",
    "never_selected",
    "overlap",
    "position_profile",
    "proxies",
    "proxy_information",
    "recall_by_distance",
    "recall_by_position",
    "recency",
    "sink_share",
    "summary",
    "teacher_entropy",
    "tested",
]

_PER_PROXY = (recency, sink_share, block_recall, captured_mass, coverage, fixed_choice, never_selected, churn)
_PER_PROXY += (group_divergence, teacher_entropy)
TESTABLE = ("recency", "excess_recency", "sink_excess", "recall_excess", "coverage_over_random", "coverage_over_window")
TESTABLE += ("kappa", "positional", "content", "fixed_choice", "stability", "group_divergence_excess")
"""Metrics whose null is a constant, so that their interval is a test; information is tested by permutation."""


def summary(data: xr.Dataset, *, history: pd.DataFrame | None = None) -> pd.DataFrame:
    """The last record in one table: each metric a layer, and the mean over layers (layer is missing there).

    `p_value`: of the mutual information and of eta squared by permuted labels, of groups of heads by regrouping, of
    what has a constant as its null by its interval. `q_value`: corrected over layers (Benjamini and Hochberg).
    What needs the whole of it is here as well: `emergence` (of the mutual information over untrained proxies),
    `collapse` (share of proxies whose alarm is on), the groups of heads. `history` is what `dynamics` gave for the same
    data, where that is at hand.
    """
    sums = _tallied(data)
    history = dynamics(sums) if history is None else history
    frame = history[history["step"] == sums["step"].values[-1]].drop(columns=["null_mean", "null_high", "p_value"])
    end = sums.isel(step=[-1])
    null = table(*(mutual_information(end, pool=pool, permutations=999) for pool in (("proxy",), RUN)))
    frame = frame.merge(null[[*KEYS, "null_mean", "null_high", "p_value"]], how="left", on=KEYS)
    frame["p_value"] = frame["p_value"].fillna(tested(frame)["p_value"])
    grouped = table(*(head_groups(end, pool=pool) for pool in ((), ("layer",))))
    since = emergence(history, ("mutual_information_excess",)).drop(columns="of")
    return _corrected(table(frame, grouped, since, _alarms(end)), "metric")


def _alarms(end: xr.Dataset) -> pd.DataFrame:
    """Share of proxies that have collapsed, by layer and in all."""
    frame = collapse(end)
    frame = frame[frame["metric"] == "collapse"].drop(columns=["because", "proxy"])
    wanted = {"value": "mean"} | {name: "first" for name in frame if name not in ("value", "layer")}
    return table(
        frame.groupby("layer", as_index=False).agg(wanted),
        pd.DataFrame(
            [
                frame.drop(columns="layer").agg(
                    {
                        name: (lambda s: s.mean()) if name == "value" else (lambda s: s.iloc[0])
                        for name in frame
                        if name != "layer"
                    }
                )
            ]
        ),
    )


def dynamics(data: xr.Dataset) -> pd.DataFrame:
    """Every scalar metric at every record, a layer and (layer missing) their mean."""
    sums = _tallied(data)
    parts = [function(sums, pool=pool) for function in _PER_PROXY for pool in (("proxy",), RUN)]
    parts += [overlap(sums, pool=pool) for pool in (("proxy", "other"), (*RUN, "other"))]
    parts += [mutual_information(sums, pool=pool, permutations=0) for pool in (("proxy",), RUN)]
    return table(*parts)


def proxies(data: xr.Dataset) -> pd.DataFrame:
    """The last record, a row a metric, layer and proxy; `p_value` and `q_value` (see `tested`) where they apply."""
    end = _tallied(data).isel(step=[-1])
    frame = tested(table(*(function(end) for function in _PER_PROXY)))
    return table(frame, proxy_information(end), collapse(end).query("metric in ('twin', 'collapse')"))


def tested(frame: pd.DataFrame) -> pd.DataFrame:
    """With `p_value`, two-sided, from each jackknife-t interval against its null, for metrics whose null is a constant;
    and `q_value`: corrected over layers x proxies within a metric and record (Benjamini and Hochberg)."""
    frame = frame.reset_index(drop=True)
    numbers = [frame[name].to_numpy(float) for name in (*NUMBERS, "null", "documents")]
    known = frame["metric"].str.replace(r"_by_(distance|position)$", "", regex=True).isin(TESTABLE)
    p_value = np.where(known & frame["documents"].gt(1), interval_p_value(*numbers), np.nan)
    return _corrected(frame.assign(p_value=p_value), "metric", "step")


def _corrected(frame: pd.DataFrame, *families: str) -> pd.DataFrame:
    """With `q_value`, of single layers' rows."""
    frame = frame.reset_index(drop=True).assign(q_value=np.nan)
    family = frame[frame["layer"].notna()] if "layer" in frame else frame
    for _, part in family.groupby(list(families)):
        frame.loc[part.index, "q_value"] = discoveries(part["p_value"])
    return frame


def _tallied(data: xr.Dataset) -> xr.Dataset:
    return tally(data) if "selected" in data else data
