"""Intervals: by documents inside one run, by seeds across runs.

The seed is the unit of replication. An interval over documents speaks of one trained model only. Too few of either
give NaN, never a number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr
from scipy import special, stats

ROUNDING = 1e-24
"""Squared deviation, relative to the value's square, that is no variance."""
MIN_DOCUMENTS = 4
"""Fewer documents than this give no interval."""
SQUARE_DOCUMENTS = 6
"""The same for a sum of squares: with fewer its intervals hold the truth in hardly nine of ten runs."""


def jackknife(
    whole: xr.DataArray,
    without: xr.DataArray,
    *,
    correct_bias: bool = False,
    level: float = 0.95,
    having: xr.DataArray | None = None,
    scale: xr.DataArray | float = 1.0,
) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """Value and interval of a statistic by leaving out one document at a time, with Student's t.

    `whole` is the statistic of all documents; `without` has one more dimension, `document`: the statistic of all
    but that one. The variance is (D - 1)/D times the sum of squared deviations of `without` from its mean, with
    D - 1 degrees of freedom (Tukey's jackknife). With `correct_bias` the value is D whole - (D - 1) mean(without),
    which removes a bias proportional to 1/D, as that of plug-in information and variance shares. `having`: how many
    documents have a case, where not all do; its t has as many degrees of freedom, less 1. `scale`: of the interval.
    """
    count = without.sizes["document"]
    mean = without.mean("document", skipna=False)
    value = count * whole - (count - 1) * mean if correct_bias else whole
    if count < MIN_DOCUMENTS:
        return value, xr.full_like(value, np.nan, dtype=float), xr.full_like(value, np.nan, dtype=float)
    variance = (count - 1) / count * ((without - mean) ** 2).sum("document", skipna=False)
    freedom = xr.full_like(variance, count) - 1 if having is None else having.clip(min=2) - 1
    half = scale * freedom.copy(data=stats.t.ppf(0.5 + level / 2, freedom)) * np.sqrt(variance)
    return value, value - half, value + half


def jackknife_skewed(
    whole: xr.DataArray, without: xr.DataArray, having: xr.DataArray, *, level: float = 0.95
) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """`jackknife` for a rate, of which most documents have little and a few have much.

    Where a sample lacks the few, its rate and its standard error are too low together: an interval of value -+ t errors
    misses from below, most of all a rate at a distance that few documents reach. Its ends are here value - T(t) errors
    and value - T(-t) errors, with Hall's transformation T(x) = 3 sqrt(D) / s ((1 + s (x / sqrt(D) - s / 6D))^(1/3) - 1)
    for documents of skewness s (P. Hall, On the removal of skewness by transformation, J. R. Stat. Soc. B 54, 1992); it
    is x for s = 0. Student's t has the degrees of freedom of the variance's own scatter, 2 D / (kurtosis - 1), and at
    most `having` - 1: the documents that have a case. Fewer than MIN_DOCUMENTS of these give no interval.
    """
    count = without.sizes["document"]
    if count < MIN_DOCUMENTS:
        return whole, xr.full_like(whole, np.nan, dtype=float), xr.full_like(whole, np.nan, dtype=float)
    deviation = without.mean("document", skipna=False) - without
    squares = (deviation**2).sum("document", skipna=False)
    error, scale = np.sqrt((count - 1) / count * squares), squares.where(squares > 0, 1)
    skewness = (deviation**3).sum("document") / scale**1.5 * count**0.5
    kurtosis = (deviation**4).sum("document") / scale**2 * count
    freedom = (2 * count / (kurtosis - 1).clip(min=1e-9)).clip(min=1, max=(having - 1).clip(min=1))
    t = freedom.copy(data=stats.t.ppf(0.5 + level / 2, freedom))
    enough = having >= MIN_DOCUMENTS
    low, high = ((whole - _skewed(x, skewness, count) * error).where(enough) for x in (t, -t))
    return whole, low, high


def _skewed(x: xr.DataArray, skewness: xr.DataArray, count: int) -> xr.DataArray:
    """Hall's transformation: where the studentized mean of so many skewed values lies if a symmetric one's is at x."""
    bent = skewness.where(abs(skewness) > 1e-6)
    root = np.cbrt(1 + bent * (x / count**0.5 - bent / (6 * count)))
    return (3 * count**0.5 / bent * (root - 1)).where(bent.notnull(), x)


def matter(whole: xr.DataArray, without: xr.DataArray) -> xr.DataArray:
    """How many documents the statistic depends on: without another it is the same, as of a place that it has not."""
    return (abs(without - whole) > ROUNDING**0.5 * (1 + abs(whole))).sum("document")


def rests_on_few(without: xr.DataArray) -> xr.DataArray:
    """Whether the jackknife variance rests on fewer than two documents (a quarter of them, if that is less).

    As where a rate has a hit or two in all: such an interval covers far less than it says.
    """
    squares = (without - without.mean("document", skipna=False)) ** 2
    total = squares.sum("document", skipna=False)
    resting = total**2 / (squares**2).sum("document", skipna=False)
    varies = total > ROUNDING * (1 + (without**2).sum("document"))
    return varies & (resting < min(2, without.sizes["document"] / 4))


def pair_shrinkage(whole: xr.DataArray, without: xr.DataArray, without_two: xr.DataArray) -> xr.DataArray:
    """What the standard error of a statistic is as a share of the one that `jackknife` gives, where pairs matter.

    A mean over pairs of documents (a U-statistic; near it, a square) varies by what each document brings to all its
    pairs (V1) and by what a pair has beyond its two documents (V2). The jackknife variance is V1 + 2 (D - 1)/(D - 2) V2
    (Efron and Stein, The jackknife estimate of variance, Ann. Stat. 9, 1981): too much where documents do not differ,
    so that V1 = 0. What one pair adds, that of each document and the next, comes from leaving out one, the other and
    both (`without_two`; NaN where unknown); D (D - 1)/2 times its mean square is V2 + V1/(D - 1). V1 counts where it is
    more than its standard error would be at V1 = 0, 4 V2/sqrt(D): less is noise, and noise cut off at 0 makes intervals
    too long. With fewer than SQUARE_DOCUMENTS the two cannot be told apart: 1.
    """
    count = without.sizes["document"]
    if count < SQUARE_DOCUMENTS:
        return xr.ones_like(whole)
    squares = (count - 1) / count * ((without - without.mean("document", skipna=False)) ** 2).sum("document")
    pairs = [n * (n - 1) / 2 for n in (count, count - 1, count - 2)]
    both = without + without.roll(document=-1)
    added = (pairs[0] * whole - pairs[1] * both + pairs[2] * without_two - whole) / pairs[0]
    met = pairs[0] * (added**2).mean("document")
    second = ((met - squares / (count - 1)) / (1 - 2 / (count - 2))).clip(min=0)
    first = squares - 2 * (count - 1) / (count - 2) * second
    variance = first.where(first > 4 * second / count**0.5, 0) + second
    return ((variance / squares.where(squares > 0)) ** 0.5).fillna(1)


def jackknife_square(
    whole: xr.DataArray, without: xr.DataArray, *, degrees: float, level: float = 0.95
) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """`jackknife` with `correct_bias` for a plug-in that is a sum of squares near 0: information, a variance share.

    Near 0 such a plug-in is a multiple of a noncentral chi-square with at most `degrees` degrees of freedom, so that
    its standard error vanishes just where the estimate is lowest: an interval of value -+ t errors misses from below.
    This one inverts that distribution. Its scale is the jackknife variance over 4 whole (exact far from 0) or the bias
    a degree (exact at 0, fading away from it), whichever is more, widened by t over normal for few documents. Ends are
    never below 0, while the value, which is unbiased, may be.
    """
    count = without.sizes["document"]
    value, plain_low, plain_high = jackknife(whole, without, correct_bias=True, level=level)
    if count < SQUARE_DOCUMENTS:
        return value, xr.full_like(plain_low, np.nan), xr.full_like(plain_high, np.nan)
    tail = 0.5 + level / 2
    mean = without.mean("document", skipna=False)
    variance = (count - 1) / count * ((without - mean) ** 2).sum("document", skipna=False)
    bias = (whole - value).clip(min=0)
    far, at_zero = variance / (4 * whole), bias / degrees * (bias / whole).clip(max=1)
    scale = far.where(far > at_zero, at_zero)
    freedom = (bias / scale).clip(min=1, max=degrees)
    x = whole / (scale * (stats.t.ppf(tail, count - 1) / stats.norm.ppf(tail)) ** 2)
    # Beyond this the two intervals are the same, and the inversion is slow.
    ends = [_noncentrality(x.where(x < FAR), freedom, p) * whole / x for p in (tail, 1 - tail)]
    low, high = (end.where(x < FAR, plain) for end, plain in zip(ends, (plain_low, plain_high), strict=True))
    return value, low.where(whole > 0, 0 * whole), high.where(whole > 0, 0 * whole)


FAR = 1e4
"""Scaled plug-in above which its distribution is taken as normal."""


def _noncentrality(x: xr.DataArray, freedom: xr.DataArray, p: float) -> xr.DataArray:
    """The noncentrality at which the distribution function at x is p; 0 where it is lower without any."""
    found = xr.apply_ufunc(special.chndtrinc, x, freedom, p)
    return found.where(xr.apply_ufunc(special.chndtr, x, freedom, 0.0) > p, 0 * x)


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


def discoveries(p_values: pd.Series | np.ndarray) -> np.ndarray:
    """The p-values of one family corrected for their number (Benjamini and Hochberg); what is NaN is no test."""
    values = np.asarray(p_values, dtype=float)
    result = np.full(values.shape, np.nan)
    held = np.isfinite(values)
    if held.any():
        result[held] = stats.false_discovery_control(values[held])
    return result


def interval_p_value(
    value: np.ndarray, low: np.ndarray, high: np.ndarray, null: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Two-sided p-value of a value against a constant, from its 95 % Student-t interval of `count` documents or seeds.

    Of an interval that is longer on one side, the side towards the constant decides, so that p <= 0.05 is where the
    interval leaves the constant out. NaN where there is no interval; 1 where the interval is the null itself.
    """
    freedom = np.maximum(np.asarray(count, dtype=float) - 1, 1)
    error = np.where(null < value, value - low, high - value) / stats.t.ppf(0.975, freedom)
    with np.errstate(divide="ignore", invalid="ignore"):
        p_value = 2 * stats.t.sf(np.abs(value - null) / error, freedom)
    return np.where((error == 0) & (value == null), 1.0, p_value)


def weighted_difference(
    first: np.ndarray, second: np.ndarray, weight: np.ndarray, *, level: float = 0.95
) -> tuple[float, float, float]:
    """Weighted mean of first - second over documents with its jackknife-t interval (a ratio, hence no plain t)."""
    total, mass = (first - second) * weight, weight.astype(float)
    whole = xr.DataArray(total.sum() / mass.sum())
    left = (total.sum() - total) / (mass.sum() - mass) if len(mass) > 1 else np.full(1, np.nan)
    value, low, high = jackknife(whole, xr.DataArray(left, dims="document"), level=level)
    return float(value), float(low), float(high)
