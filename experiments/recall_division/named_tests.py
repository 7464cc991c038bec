"""The tests that README.md names, on tables of all runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
from msa_analysis.statistics import t_interval
from scipy import stats

ENDPOINTS = ("mutual_information_excess", "cost_shared")
LEVEL = 0.01
FIRST, SECOND = "mixture", "near_only"


def compare_arms(numbers: pd.DataFrame, second: str = SECOND) -> pd.DataFrame:
    """The two primary endpoints of `mixture` and another arm: means, their difference, p (exact permutation) and
    p_holm; `holds` says whether p_holm is below 0.01 and the difference positive.

    Args:
        numbers: Columns arm, seed, metric, value.
        second: The other arm.
    """
    rows = []
    for metric in ENDPOINTS:
        part = numbers[numbers["metric"] == metric]
        one, control = (part.loc[part["arm"] == arm, "value"].to_numpy(float) for arm in (FIRST, second))
        welch = stats.ttest_ind(one, control, equal_var=False).confidence_interval()
        row = {
            "endpoint": metric,
            FIRST: one.mean(),
            second: control.mean(),
            "difference": one.mean() - control.mean(),
        }
        row |= {"low": welch.low, "high": welch.high, "p": permutation_p(one, control)}
        rows.append(row | {"runs": f"{len(one)} and {len(control)}"})
    frame = pd.DataFrame(rows)
    order = frame["p"].to_numpy().argsort(kind="stable")
    steps = frame["p"].to_numpy()[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return frame.assign(p_holm=corrected, holds=(corrected < LEVEL) & (frame["difference"].to_numpy() > 0))


def permutation_p(first: np.ndarray, second: np.ndarray) -> float:
    """Exact two-sided p-value of the difference of means over all ways to label the runs."""

    def difference(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return x.mean(axis) - y.mean(axis)

    found = stats.permutation_test((first, second), difference, n_resamples=np.inf, vectorized=True)
    return float(found.pvalue)


def agreement(by_distance: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Pearson's r of accuracy and recall over the rows of a run of `mixture`, and the test of their mean over runs.

    Args:
        by_distance: Columns arm, seed, accuracy, recall; a row a distance.
    """
    part = by_distance[by_distance["arm"] == FIRST].dropna(subset=["accuracy", "recall"])
    rows = [
        {"seed": seed, "r": stats.pearsonr(run["accuracy"], run["recall"]).statistic, "bins": len(run)}
        for seed, run in part.groupby("seed")
    ]
    runs = pd.DataFrame(rows)
    mean, low, high = t_interval(runs["r"])
    p = float(stats.ttest_1samp(runs["r"], 0.0).pvalue)
    return runs, pd.DataFrame(
        [{"mean_r": mean, "low": low, "high": high, "p": p, "runs": len(runs), "holds": p < LEVEL and mean > 0.8}]
    )


def over_seeds(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Mean of `value` over runs with Student's t interval, by the keys."""
    rows = []
    for names, part in frame.groupby(keys, sort=False, dropna=False):
        values = part["value"].dropna().to_numpy(float)
        mean, low, high = t_interval(values)
        rows.append(
            dict(zip(keys, names, strict=True)) | {"value": mean, "low": low, "high": high, "runs": len(values)}
        )
    return pd.DataFrame(rows)
