"""Intervals: by documents inside one run, by seeds across runs.

The seed is the unit of replication. An interval over documents speaks of one trained model only. Too few of either
give NaN, never a number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from scipy import stats

MIN_DOCUMENTS = 4
"""Fewer documents than this give no interval."""


def jackknife(
    whole: xr.DataArray, without: xr.DataArray, *, correct_bias: bool = False, level: float = 0.95
) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """Value and interval of a statistic by leaving out one document at a time, with Student's t.

    `whole` is the statistic of all documents; `without` has one more dimension, `document`: the statistic of all
    but that one. The variance is (D - 1)/D times the sum of squared deviations of `without` from its mean, with
    D - 1 degrees of freedom (Tukey's jackknife). With `correct_bias` the value is D whole - (D - 1) mean(without),
    which removes a bias proportional to 1/D, as that of plug-in information and variance shares.
    """
    count = without.sizes["document"]
    mean = without.mean("document", skipna=False)
    value = count * whole - (count - 1) * mean if correct_bias else whole
    if count < MIN_DOCUMENTS:
        return value, xr.full_like(value, np.nan, dtype=float), xr.full_like(value, np.nan, dtype=float)
    variance = (count - 1) / count * ((without - mean) ** 2).sum("document", skipna=False)
    half = stats.t.ppf(0.5 + level / 2, count - 1) * np.sqrt(variance)
    return value, value - half, value + half


def t_interval(values: Sequence[float] | np.ndarray, *, level: float = 0.95) -> tuple[float, float, float]:
    """Mean and Student-t interval of independent values, one a seed; one value has no interval (NaN)."""
    sample = np.asarray(values, dtype=float)
    if len(sample) == 0:
        return np.nan, np.nan, np.nan
    mean = float(sample.mean())
    if len(sample) == 1:
        return mean, np.nan, np.nan
    half = float(stats.t.ppf(0.5 + level / 2, len(sample) - 1) * sample.std(ddof=1) / np.sqrt(len(sample)))
    return mean, mean - half, mean + half


def weighted_difference(
    first: np.ndarray, second: np.ndarray, weight: np.ndarray, *, level: float = 0.95
) -> tuple[float, float, float]:
    """Weighted mean of first - second over documents with its jackknife-t interval (a ratio, hence no plain t)."""
    total, mass = (first - second) * weight, weight.astype(float)
    whole = xr.DataArray(total.sum() / mass.sum())
    left = (total.sum() - total) / (mass.sum() - mass) if len(mass) > 1 else np.full(1, np.nan)
    value, low, high = jackknife(whole, xr.DataArray(left, dims="document"), level=level)
    return float(value), float(low), float(high)
