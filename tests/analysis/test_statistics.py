"""Intervals against hand calculations."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from msa_analysis.estimate import estimate, ratio
from msa_analysis.statistics import (
    discoveries,
    interval_p_value,
    jackknife,
    jackknife_skewed,
    jackknife_square,
    pair_shrinkage,
    rests_on_few,
    t_interval,
    weighted_difference,
)
from scipy import stats as scipy_stats


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


def test_discoveries_by_hand_and_without_what_is_no_test() -> None:
    """Benjamini and Hochberg: p times tests over rank, made monotone from the largest down."""
    found = discoveries(np.array([0.01, np.nan, 0.04, 0.03, 0.5]))
    assert found[[0, 2, 3, 4]] == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])
    assert math.isnan(found[1])
    assert np.isnan(discoveries(np.array([np.nan]))).all()


def test_p_value_of_an_interval_is_that_of_the_t_test() -> None:
    sample = np.array([0.3, 0.1, 0.7, 0.5, 0.2])
    mean, low, high = (np.array(v) for v in t_interval(sample))
    expected = scipy_stats.ttest_1samp(sample, 0.1).pvalue
    assert interval_p_value(mean, low, high, np.array(0.1), np.array(5)) == pytest.approx(expected)
    one = np.array(1.0)
    assert interval_p_value(one, one, one, one, np.array(5)) == 1
    assert interval_p_value(one, one, one, 0 * one, np.array(5)) == 0
    assert np.isnan(interval_p_value(one, one * np.nan, one * np.nan, 0 * one, np.array(5)))


@pytest.mark.parametrize("null", [0.39, 0.41, 0.79, 0.81])
def test_p_value_of_a_lopsided_interval_agrees_with_the_interval(null: float) -> None:
    found = interval_p_value(*(np.array(v) for v in (0.5, 0.4, 0.8, null, 12)))
    assert (found <= 0.05) == (not 0.4 <= null <= 0.8)


def squared_means(strength: float, repeats: int, documents: int) -> tuple[np.ndarray, float]:
    """Intervals of the sum of 4 squared means, each of so many normal values with a mean of `strength`."""
    values = np.random.default_rng(1).normal(strength, 1.0, (repeats, 4, documents))
    total = values.sum(-1, keepdims=True)
    whole = xr.DataArray(((total[..., 0] / documents) ** 2).sum(1), dims="run")
    left = xr.DataArray((((total - values) / (documents - 1)) ** 2).sum(1), dims=("run", "document"))
    _, low, high = jackknife_square(whole, left, degrees=4)
    return np.stack([low.values, high.values]), 4 * strength**2


@pytest.mark.parametrize("strength", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("documents", [12, 60])
def test_intervals_of_sums_of_squares_cover_from_zero_to_strong(strength: float, documents: int) -> None:
    """A plain jackknife-t misses from below near 0; 95 % +- 3 standard errors of 1,000 runs, and more is allowed."""
    (low, high), truth = squared_means(strength, 1000, documents)
    assert ((low <= truth) & (truth <= high)).mean() >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 1000) - 0.01
    assert (low >= 0).all()


def test_a_square_has_no_interval_below_six_documents() -> None:
    for documents in (5, 6):
        values = np.arange(1.0, documents + 1)
        left = xr.DataArray(((values.sum() - values) / (documents - 1)) ** 2, dims="document")
        value, low, high = jackknife_square(xr.DataArray(values.mean() ** 2), left, degrees=1)
        assert np.isfinite(value)
        assert np.isnan([low, high]).all() == (documents == 5)


def test_far_from_zero_the_interval_of_a_square_is_the_jackknife_of_its_bias_corrected_value() -> None:
    values = np.random.default_rng(2).normal(5.0, 1.0, 40)
    whole = xr.DataArray(values.mean() ** 2)
    left = xr.DataArray(((values.sum() - values) / 39) ** 2, dims="document")
    ours = [float(v) for v in jackknife_square(whole, left, degrees=1)]
    theirs = [float(v) for v in jackknife(whole, left, correct_bias=True)]
    assert ours == pytest.approx(theirs, rel=0.02)


def pair_means(kernel: np.ndarray) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """Means of h (run, document, other) over pairs: of all documents, without each, without each and the next."""
    documents = kernel.shape[-1]

    def mean(kept: list[int]) -> np.ndarray:
        first, second = np.triu_indices(len(kept), 1)
        return kernel[:, kept][:, :, kept][:, first, second].mean(-1)

    def but(*left: int) -> list[int]:
        return [d for d in range(documents) if d not in left]

    without = [mean(but(d)) for d in range(documents)]
    two = [mean(but(d, (d + 1) % documents)) for d in range(documents)]
    whole = xr.DataArray(mean(but()), dims="run")
    return whole, *(xr.DataArray(np.stack(each, -1), dims=("run", "document")) for each in (without, two))


def normal_pairs(first: float, runs: int, documents: int) -> np.ndarray:
    """h = a_d + a_e + x_d x_e, of normal a (deviation `first`) and 40 normal x: the mean over pairs has mean 0."""
    rng = np.random.default_rng(5)
    x, alone = rng.normal(size=(runs, documents, 40)), first * rng.normal(size=(runs, documents))
    return x @ x.swapaxes(1, 2) / 40**0.5 + alone[:, :, None] + alone[:, None]


@pytest.mark.parametrize("first", [0.0, 0.1, 0.2, 1.0])
def test_intervals_of_means_over_pairs_miss_as_often_where_documents_differ_as_where_they_do_not(first: float) -> None:
    """The jackknife alone misses 1 % where first = 0: that is less than can happen here."""
    runs, documents = 1500, 40
    whole, without, two = pair_means(normal_pairs(first, runs, documents))
    _, low, high = jackknife(whole, without, scale=pair_shrinkage(whole, without, two))
    missed = float(((low > 0) | (high < 0)).mean())
    error = math.sqrt(0.05 * 0.95 / runs)
    assert 0.03 - 2 * error < missed < 0.065 + 3 * error


def test_the_error_of_a_mean_over_pairs_by_hand() -> None:
    """From the kernel itself: 4/D of what documents bring, 2/(D (D - 1)) of what pairs do, by the neighbours' pairs."""
    for first in (0.0, 1.0):
        kernel = normal_pairs(first, 1, 12)
        whole, without, two = pair_means(kernel)
        tukey = 11 / 12 * float(((without - without.mean()) ** 2).sum())
        neighbours = np.array([kernel[0, d, (d + 1) % 12] for d in range(12)])
        # Mean squares of pairs are d + 2 f, and the jackknife's variance is 4 f / D + 4 d / (D (D - 2)).
        square = ((neighbours - whole.item()) ** 2).mean()
        pairs, documents = np.linalg.solve([[1, 2], [4 / 120, 4 / 12]], [square, tukey])
        found = 2 / 132 * pairs + (4 / 12 * documents if 4 / 12 * documents > 4 / 12**0.5 * 2 / 132 * pairs else 0)
        assert float(pair_shrinkage(whole, without, two)[0]) == pytest.approx((found / tukey) ** 0.5)
    unknown = two.where(xr.DataArray(np.arange(12) < 11, dims="document"))
    assert np.isfinite(pair_shrinkage(whole, without, unknown)).all()


def test_with_fewer_than_six_documents_pairs_are_not_told_apart() -> None:
    whole, without, two = pair_means(normal_pairs(0.0, 20, 5))
    assert (pair_shrinkage(whole, without, two) == 1).all()


def cases(hits: list[int], documents: int) -> tuple[pd.Series, np.ndarray]:
    """The row of a rate of 10 cases in each of the first documents and none in the others; and its influences."""
    wanted, found = np.zeros((documents, 1)), np.zeros((documents, 1))
    wanted[: len(hits), 0], found[: len(hits), 0] = 10, hits
    both, slots = ("document", "layer"), xr.DataArray(np.ones((documents, 1, 1)), dims=("document", "layer", "source"))
    sums = xr.Dataset({"hits": (both, found), "wanted": (both, wanted), "slots": slots.assign_coords(source=["proxy"])})
    rate = ratio("hits", "wanted")
    left = ((found.sum() - found) / (wanted.sum() - wanted))[:, 0]
    return estimate(sums, "rate", rate, null=rate, rate=rate).iloc[0], left.mean() - left


def test_documents_without_a_case_give_the_interval_no_degrees_of_freedom() -> None:
    """Four of forty documents have rows at a place, none of them unlike the others: three degrees of freedom."""
    row, deviation = cases([3, 7, 3, 7], 40)
    half = scipy_stats.t.ppf(0.975, 3) * np.sqrt(39 / 40 * (deviation**2).sum())
    assert (row["value"], row["low"], row["high"]) == pytest.approx((0.5, 0.5 - half, 0.5 + half))


def test_fewer_than_four_documents_with_a_case_give_no_interval() -> None:
    row, _ = cases([3, 7, 4], 40)
    assert row["value"] == pytest.approx(14 / 30)
    assert np.isnan([row["low"], row["high"]]).all()
    assert row["reason"] == "fewer than 4 documents have a case: no interval"
    # A document at the rate itself has cases too.
    assert np.isfinite(cases([3, 7, 5, 5], 40)[0]["low"])


def test_the_interval_of_a_skewed_rate_is_hall_s() -> None:
    """Both ends solve his cubic: t = T + s (2 T^2 + 1) / (6 sqrt(n)) + s^2 T^3 / (27 n), T = (value - end) / error."""
    row, deviation = cases([1, 0, 1, 2, 0, 1, 6, 1, 4, 2], 10)
    skewness = (deviation**3).mean() / (deviation**2).mean() ** 1.5
    kurtosis = (deviation**4).mean() / (deviation**2).mean() ** 2
    t = scipy_stats.t.ppf(0.975, min(2 * 10 / (kurtosis - 1), 9))
    error = np.sqrt(9 / 10 * (deviation**2).sum())
    for end, wanted in (("low", t), ("high", -t)):
        at = (row["value"] - row[end]) / error
        cubic = at + skewness * (2 * at**2 + 1) / (6 * 10**0.5) + skewness**2 * at**3 / (27 * 10)
        assert cubic == pytest.approx(wanted), end
    assert row["high"] - row["value"] > 1.3 * (row["value"] - row["low"])


@pytest.mark.parametrize(("documents", "most"), [(8, 0.08), (20, 0.05), (60, 0.045)])
def test_intervals_of_skewed_rates_do_not_miss_from_below(documents: int, most: float) -> None:
    """Masses that half the documents hardly have: value -+ t errors misses 17, 12 and 7 %, nearly all from below."""
    rng, runs = np.random.default_rng(4), 4000
    values = rng.exponential(1.0, (runs, documents)) * np.where(rng.random((runs, documents)) < 0.5, 0.1, 1.0)
    whole = xr.DataArray(values.mean(1), dims="run")
    left = xr.DataArray((values.sum(1, keepdims=True) - values) / (documents - 1), dims=("run", "document"))
    _, low, high = jackknife_skewed(whole, left, xr.full_like(whole, documents))
    missed = float((low > 0.55).mean()), float((high < 0.55).mean())
    assert sum(missed) <= most + 3 * math.sqrt(most * (1 - most) / runs), missed
    assert documents < 20 or min(missed) > 0.01, missed


def test_a_rate_that_one_document_decides_rests_on_few() -> None:
    hits = np.zeros((3, 20))
    hits[0, 0], hits[1, :6] = 1, 1
    left = xr.DataArray((hits.sum(1, keepdims=True) - hits) / 19, dims=("cell", "document"))
    assert rests_on_few(left).values.tolist() == [True, False, False]
