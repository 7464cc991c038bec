"""Intervals against hand calculations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr
from msa_analysis.statistics import jackknife, t_interval, weighted_difference


def test_t_interval_by_hand() -> None:
    """Mean 2, standard deviation 1, n = 3: 2 -+ 4.302653 / sqrt(3)."""
    mean, low, high = t_interval([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((2.0, 2.0 - half, 2.0 + half))


def test_one_value_has_no_interval() -> None:
    mean, low, high = t_interval([5.0])
    assert mean == 5.0
    assert math.isnan(low)
    assert math.isnan(high)
    assert all(math.isnan(v) for v in t_interval([]))


def test_jackknife_of_a_mean_is_the_t_interval() -> None:
    values = np.array([0.3, 0.1, 0.7, 0.5, 0.2])
    without = xr.DataArray((values.sum() - values) / 4, dims="document")
    found = [float(v) for v in jackknife(xr.DataArray(values.mean()), without)]
    assert found == pytest.approx(t_interval(values))


def test_jackknife_removes_the_bias_of_a_square() -> None:
    """mean(x)^2 overshoots E[x]^2 by var/n; the corrected value is the unbiased one."""
    values = np.array([1.0, 4.0, 2.0, 3.0, 7.0])
    without = xr.DataArray(((values.sum() - values) / 4) ** 2, dims="document")
    value, _, _ = jackknife(xr.DataArray(values.mean() ** 2), without, correct_bias=True)
    assert float(value) == pytest.approx(values.mean() ** 2 - values.var(ddof=1) / 5)


def test_weighted_difference_of_equal_weights_is_a_paired_t_interval() -> None:
    ours, theirs = np.array([1.0, 2.0, 4.0, 4.0]), np.array([1.5, 1.0, 3.0, 3.5])
    assert weighted_difference(ours, theirs, np.full(4, 10.0)) == pytest.approx(t_interval(ours - theirs))
