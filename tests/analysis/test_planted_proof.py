"""Every metric on uneven documents whose values are known: bias, coverage of intervals, rejection of nulls.

The bounds are so wide that a right estimator would fail them less than once in 10,000 new seeds; experiments/planted is
the same with many more runs, and says how close to the nominal rates they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pandas as pd
import proof
import pytest
import xarray as xr
from answers import truths
from measure import ALL, heads, likeness, looks, measured, plain_strength, strength
from msa_analysis import specialization
from populations import UNEQUAL, Population
from scenarios import FEW, SCENARIOS
from scipy import stats

pytestmark = pytest.mark.xdist_group("planted")  # what it measures is made once, not once a worker

RARE = 1e-7
"""Of a single check; there are fewer than 1,000."""
RUNS = 40


@cache
def compared(name: str) -> pd.DataFrame:
    population, measures = SCENARIOS[name].population, (looks, likeness, partial(strength, permutations=0), heads)
    frame = measured(population, runs=RUNS, documents=60, seed=[11], measures=measures)
    return proof.against(frame, truths(population))


UNEVEN = [
    "near and far",
    "other places, same content",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("same stride", "one collapsed")),
]


@pytest.mark.parametrize("name", UNEVEN)
def test_every_metric_recovers_what_was_planted(name: str) -> None:
    """Within 10 % of the truth (of half an interval where the truth is smaller), or not distinguishable from that."""
    table = compared(name)
    assert len(table) > 100
    scale = np.fmax(table["truth"].abs(), table["half"])
    noise = stats.t.isf(RARE / 2, table["runs"] - 1) * table["bias_error"].fillna(0)
    wrong = table[table["bias"].abs() > proof.MOST_BIAS * scale + noise + proof.TINY]
    assert wrong.empty, wrong[["metric", "truth", "mean"]].to_string()


@pytest.mark.parametrize("name", UNEVEN)
def test_intervals_hold_what_was_planted(name: str) -> None:
    table = compared(name)
    least = stats.binom.ppf(RARE, table["defined"], proof.COVERAGE[0])
    wrong = table[(table["coverage"] * table["defined"] < least) & ~proof.exact(table)]
    assert wrong.empty, wrong[["metric", "truth", "mean", "half", "coverage"]].to_string()


def places(sums: xr.Dataset) -> pd.DataFrame:
    functions = (specialization.distance_profile, specialization.recency, specialization.never_selected)
    return pd.concat([function(sums, pool=("proxy",)) for function in functions], ignore_index=True)


@pytest.mark.parametrize("name", ["newest", "oldest", "fixed stride"])
def test_what_leaves_nothing_to_chance_is_exact(name: str) -> None:
    population = replace(SCENARIOS[name].population, first=None, heavy=None)
    frame = measured(population, runs=1, documents=5, seed=[0], measures=[places, likeness])
    table = proof.against(frame, truths(population))
    table = table[~table["metric"].str.contains("excess|teacher")]
    assert len(table) >= 12
    assert table["mean"].to_numpy() == pytest.approx(table["truth"].to_numpy())
    assert table["half"].dropna().to_numpy() == pytest.approx(0.0)


@pytest.mark.parametrize("lean", [0.0, 0.2])
def test_intervals_of_a_weak_strength_are_not_too_short(lean: float) -> None:
    """A squared statistic has no standard error at 0: value -+ t errors would hold the truth in four of five runs."""
    population = Population(lean=(lean, -lean), common=1.5, own=1.5, lengths=UNEQUAL, heavy=None)
    runs = 200
    frame = measured(population, runs=runs, documents=60, seed=[3], measures=[plain_strength])
    table = proof.against(frame, truths(population)).set_index("metric")["coverage"]
    for metric in ("mutual_information", "eta_squared"):
        assert table[metric] * runs >= stats.binom.ppf(1e-5, runs, 0.92), metric


MANY = 250


@cache
def uneven() -> tuple[Population, pd.DataFrame]:
    """Documents of unequal length, each with a lean of its own, in which no proxy differs from another on the whole."""
    population = replace(SCENARIOS["alike but uneven"].population, heads=(), first=None, heavy=None)
    measures = (looks, partial(strength, permutations=99))
    return population, measured(population, runs=MANY, documents=30, seed=[5], measures=measures)


def test_nulls_that_hold_are_rejected_as_often_as_the_level_says() -> None:
    _, frame = uneven()
    table = proof.rejection(frame, ("mutual_information", "eta_squared", "recency", "excess_recency"))
    assert list(table["test"]) == ["interval", "interval", "p-value", "p-value"]
    least, most = stats.binom.ppf([1e-5, 1 - 1e-5], MANY, proof.REJECTION)
    assert (table["rejected"] * MANY).between(least, most).all(), table.to_string()
    for metric in ("mutual_information", "eta_squared"):
        p_values = frame.loc[frame["metric"] == metric, "p_value"]
        assert stats.kstest(p_values, "uniform").pvalue > 1e-5, metric


def test_intervals_are_not_too_short_for_uneven_documents() -> None:
    population, frame = uneven()
    table = proof.against(frame, truths(population))
    assert len(table) > 30
    wrong = table[table["coverage"] * table["defined"] < stats.binom.ppf(RARE, table["defined"], proof.COVERAGE[0])]
    assert wrong.empty, wrong[["metric", "truth", "mean", "half", "coverage"]].to_string()


def test_overlap_by_place_alone_has_no_content_whatever_the_lengths() -> None:
    population = replace(SCENARIOS["same places, other content"].population, heavy=None, first=None)
    frame = measured(population, runs=MANY, documents=30, seed=[5], measures=[specialization.overlap])
    rejected = proof.rejection(frame, ["content"])["rejected"].iloc[0] * MANY
    assert rejected <= stats.binom.ppf(1 - 1e-5, MANY, proof.REJECTION[1])


def test_too_few_documents_give_no_interval() -> None:
    frame = measured(FEW, runs=2, documents=3, seed=[0], measures=ALL)
    assert frame[["low", "high"]].isna().all(axis=None)
    assert frame["reason"].str.len().gt(0).all()
    tested = frame["metric"].str.contains("mutual_information|proxy_information|eta_squared")
    assert frame.loc[tested, ["value", "p_value"]].isna().all(axis=None)


def test_squared_statistics_have_intervals_and_tests_from_six_documents_on() -> None:
    """Two proxies and D documents have 2^(D - 1) labellings, and 5 % needs 20; intervals of fewer are too short."""
    squares = "mutual_information|mutual_information_teacher|eta_squared|proxy_information.*"
    for documents in (4, 5, 6):
        frame = measured(FEW, runs=2, documents=documents, seed=[0], measures=[strength])
        frame = frame[frame["metric"].str.fullmatch(squares)]
        assert frame["value"].notna().all()
        assert (frame["low"].notna() == (documents == 6)).all()
        assert (frame["reason"] == ("" if documents == 6 else f"{documents} documents: an interval needs 6")).all()
        tested = frame[frame["metric"] != "mutual_information_teacher"]
        assert (tested["p_value"].notna() == (documents == 6)).all()


def test_the_planted_step_of_emergence_is_named() -> None:
    """Two records before it differ from the first by chance alone, and count at most once in forty runs each."""
    population = replace(SCENARIOS["emerges"].population, heavy=None)
    frame = measured(population, runs=100, documents=30, seed=[7], measures=[plain_strength])
    for metric in ("mutual_information_excess", "eta_squared_excess"):
        step = frame[frame["metric"] == f"emergence[{metric}]"]
        truth = truths(population)[f"emergence[{metric}]"]
        assert (step["value"] == truth).sum() >= stats.binom.ppf(RARE, 100, 0.95)
        named = step[step["value"] == truth]
        assert (named["low"] == truth - 100).all()


def test_a_step_is_named_where_nothing_emerged_as_often_as_one_end_of_an_interval_errs() -> None:
    population = replace(SCENARIOS["different from the start"].population, heavy=None)
    frame = measured(population, runs=MANY, documents=30, seed=[8], measures=[plain_strength])
    table = proof.rejection(frame, [f"emergence[{name}_excess]" for name in ("mutual_information", "eta_squared")])
    assert table["test"].tolist() == ["one-sided"] * 2
    assert (table["rejected"] * MANY <= stats.binom.ppf(1 - 1e-5, MANY, proof.REJECTION[1] / 2)).all()


def test_twins_are_known_from_a_proxy_that_chooses_for_itself() -> None:
    population = replace(SCENARIOS["twins"].population, heavy=None)
    frame = measured(population, runs=100, documents=60, seed=[9], measures=[likeness])
    table = proof.against(frame, truths(population)).set_index("metric")
    for proxy in (0, 1):
        row = table.loc[f"twin[{proxy}]"]
        assert row["unbiased"]
        assert row["coverage"] * 100 >= stats.binom.ppf(RARE, 100, proof.COVERAGE[0])
    assert [table.loc[f"collapse[{p}]", "mean"] for p in range(3)] == [1, 1, 0]


def test_the_largest_of_equal_estimates_is_too_large_by_less_than_the_docstring_says() -> None:
    """Kappa of a proxy with three others is 0; the largest of three independent normals is 0.85 errors above."""
    population = Population(lean=(0.0,) * 4, lengths=UNEQUAL, heavy=None)
    assert not any(name.startswith("twin") for name in truths(population))
    frame = measured(population, runs=MANY, documents=30, seed=[10], measures=[likeness])
    largest = frame[frame["metric"] == "twin[0]"]
    error = (largest["high"] - largest["low"]).mean() / 2 / stats.t.ppf(0.975, 29)
    assert 0.5 < largest["value"].mean() / error < 0.85 + 5 / np.sqrt(MANY)


@pytest.mark.parametrize("name", ["random, unequal lengths", "one near, one random"])
def test_intervals_of_means_over_pairs_are_as_long_as_estimates_scatter(name: str) -> None:
    """Where documents do not differ (the first) the jackknife alone makes them 1.4 times as long."""
    population = replace(SCENARIOS[name].population, heavy=None, first=None, heads=())
    measures = [specialization.overlap, partial(specialization.fixed_choice, pool=("proxy",))]
    frame = measured(population, runs=MANY, documents=60, seed=[6], measures=measures)
    table = proof.against(frame, truths(population)).set_index("metric")
    for metric in ("positional", "fixed_choice"):
        length = table.loc[metric, "half"] / (stats.t.ppf(0.975, 59) * table.loc[metric, "spread"])
        assert 0.85 < length < 1.25, metric
