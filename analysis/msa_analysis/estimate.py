"""From a statistic of per-document sums to rows of a tidy table: value, interval, null, and why where there is none."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis.statistics import MIN_DOCUMENTS, jackknife
from msa_analysis.tally import totals

Statistic = Callable[[xr.Dataset], xr.DataArray]
TEACHER = re.compile("teacher|recall|heads|excess_recency")
"""Metrics that need the teacher's blocks."""
LABELS = ("step", "phase", "layer", "proxy", "other")


def estimate(
    sums: xr.Dataset,
    metric: str,
    statistic: Statistic,
    *,
    null: Statistic,
    pool: Sequence[str] = (),
    correct_bias: bool = False,
) -> pd.DataFrame:
    """Value, jackknife interval and null of a statistic, as rows."""
    held = sums["slots"].sel(source="proxy").sum([d for d in sums["slots"].dims if d not in ("document", "source")])
    # Labels are put aside meanwhile: aligning them costs more than the arithmetic.
    labels = {name: sums[name] for name in LABELS if name in sums.coords}
    sums = sums.drop_vars([*labels, "document"], errors="ignore").isel(document=np.flatnonzero(held.values > 0))
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        whole, without = totals(sums)
        numbers = [statistic(whole), statistic(without), null(whole)]
        over = [dim for dim in pool if dim in numbers[0].dims]
        value, left_out, reference = (number.mean(over, skipna=True) for number in numbers)
        value, low, high = jackknife(value, left_out, correct_bias=correct_bias)
    table = xr.Dataset({"value": value, "low": low, "high": high, "null": reference})
    table = table.assign_coords({name: label for name, label in labels.items() if set(label.dims) <= set(table.dims)})
    frame = table.drop_vars("source", errors="ignore").to_dataframe().reset_index()
    frame.insert(0, "metric", metric)
    return _explained(frame, sums.sizes["document"], correct_bias)


def _explained(frame: pd.DataFrame, documents: int, correct_bias: bool) -> pd.DataFrame:
    """With the number of documents, and the reason of every number that is not defined."""
    frame["documents"], frame["reason"] = documents, ""
    absent = "no teacher blocks in these rows" if TEACHER.search(frame["metric"].iloc[0]) else "no learned slots"
    frame.loc[frame["low"].isna(), "reason"] = absent
    if documents < MIN_DOCUMENTS:
        frame["reason"] = f"{documents} documents: an interval needs {MIN_DOCUMENTS}"
        if correct_bias:
            frame["value"] = np.nan
    if documents == 0:
        frame["reason"] = "no query sees enough blocks to have a choice"
    return frame
