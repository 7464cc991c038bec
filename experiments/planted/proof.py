"""From what was measured and what is true: bias, coverage, rejection and power, as tidy tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pandas as pd
from scipy import stats

MOST_BIAS = 0.1
COVERAGE = (0.92, 0.99)
REJECTION = (0.03, 0.07)
LEVEL = 0.05
ONE_SIDED = "emergence"
"""Metrics whose value is a claim by itself, made by the lower end of a 95 % interval: at half the level."""
TINY = 1e-9
"""What rounding may do to a number that is exact."""
SURE = 3.0
"""Standard errors of the simulation beyond which a bias, or a rate outside its bounds, counts as real."""


def against(frame: pd.DataFrame, truth: Mapping[str, float]) -> pd.DataFrame:
    """A row a metric with a known value: mean estimate, bias, coverage and what the verdicts rest on.

    `defined`: runs in which there is an interval. `relative_bias` is bias / truth; `bias_in_halves` is bias / half the
    mean width of the intervals: the measure where the truth is smaller than that, so that no single run could tell it
    from 0.
    """
    frame = frame[frame["metric"].isin(truth)]
    frame = frame.assign(truth=frame["metric"].map(truth))
    frame["covers"] = (frame["low"] <= frame["truth"] + TINY) & (frame["truth"] <= frame["high"] + TINY)
    frame["above"], frame["below"] = frame["low"] > frame["truth"] + TINY, frame["high"] < frame["truth"] - TINY
    frame["half"] = (frame["high"] - frame["low"]) / 2
    # Coverage is of the intervals that there are; a mean over those alone would be a choice among the estimates.
    known = ["covers", "above", "below"]
    frame[known] = frame[known].astype(float).where(frame["low"].notna() & frame["high"].notna())
    table = (
        frame.dropna(subset=["value", "truth"])
        .groupby("metric", sort=False)
        .agg(
            truth=("truth", "first"),
            mean=("value", "mean"),
            spread=("value", "std"),
            half=("half", "mean"),
            coverage=("covers", "mean"),
            too_high=("above", "mean"),
            too_low=("below", "mean"),
            runs=("value", "size"),
            defined=("half", "count"),
        )
    )
    table = table.reset_index()
    table["bias"] = table["mean"] - table["truth"]
    table["bias_error"] = table["spread"] / np.sqrt(table["runs"])
    nonzero = table["truth"].abs() > TINY
    table["relative_bias"] = (table["bias"] / table["truth"]).where(nonzero)
    table["bias_in_halves"] = (table["bias"] / table["half"]).where(table["half"] > TINY, 0.0)
    sure = exact(table)
    table["unbiased"] = unbiased(table)
    table["inside"] = table["coverage"].between(*COVERAGE) | sure
    return table.assign(outside=shown_outside(table["coverage"], table["defined"], *COVERAGE) & ~sure)


def exact(table: pd.DataFrame) -> pd.Series:
    """Nothing is left to chance: every run gives the truth, and an interval of no width or none."""
    return ~(table["half"] >= TINY) & (table["bias"].abs() < TINY) & ~(table["spread"] >= TINY)


def unbiased(table: pd.DataFrame) -> pd.Series:
    """|bias| at most MOST_BIAS of the truth (of half the interval where the truth is smaller), or not shown to be."""
    scale = np.fmax(table["truth"].abs(), table["half"])
    return table["bias"].abs() - SURE * table["bias_error"].fillna(0) <= MOST_BIAS * scale + TINY


def shown_outside(rate: pd.Series, count: pd.Series, low: float | np.ndarray, high: float | np.ndarray) -> pd.Series:
    """Is a rate of so many runs so far outside the bounds that chance is no excuse?"""
    error = [SURE * np.sqrt(bound * (1 - bound) / count) for bound in (low, high)]
    return (rate < low - error[0]) | (rate > high + error[1])


def rejection(frame: pd.DataFrame, nulls: Collection[str]) -> pd.DataFrame:
    """How often each null that holds is rejected at LEVEL: by its p-value, or else by an interval without it.

    What is ONE_SIDED is rejected where it has a value, at half of LEVEL.
    """
    frame = frame[frame["metric"].isin(nulls)]
    claim, by_p = frame["metric"].str.startswith(ONE_SIDED), frame["p_value"].notna()
    kinds = [claim, by_p, frame[["low", "high"]].notna().all(axis=1)]
    outside = (frame["null"] < frame["low"] - TINY) | (frame["null"] > frame["high"] + TINY)
    rejected = np.select(kinds, [frame["value"].notna(), frame["p_value"] <= LEVEL, outside])
    test = np.select(kinds, ["one-sided", "p-value", "interval"], "")
    frame = frame.assign(test=test, rejected=rejected.astype(bool))[test != ""]
    table = frame.groupby(["metric", "test"], sort=False)["rejected"].agg(["mean", "size"]).reset_index()
    table = table.rename(columns={"mean": "rejected", "size": "null_runs"})
    hits = table["rejected"] * table["null_runs"]
    low, high = stats.beta.interval(0.95, hits + 0.5, table["null_runs"] - hits + 0.5)
    part = np.where(table["test"] == "one-sided", 0.5, 1.0)
    least, most = (bound * part for bound in REJECTION)
    table["inside"] = table["rejected"].between(least, most)
    return table.assign(low=low, high=high, outside=shown_outside(table["rejected"], table["null_runs"], least, most))


def by_seeds(frame: pd.DataFrame, seeds: int) -> float:
    """Share of groups of `seeds` runs whose mean is shown above 0 by a two-sided t-test at LEVEL."""
    values = frame.sort_values("run")["value"].to_numpy()
    groups = values[: len(values) // seeds * seeds].reshape(-1, seeds)
    if not len(groups) or np.isnan(groups).any():
        return np.nan
    error = groups.std(1, ddof=1) / np.sqrt(seeds)
    return float((groups.mean(1) > stats.t.ppf(1 - LEVEL / 2, seeds - 1) * error).mean())
