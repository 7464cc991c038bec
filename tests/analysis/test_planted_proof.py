"""Every metric on uneven documents whose values are known: bias, coverage of intervals, rejection of nulls.

The bounds are so wide that a right estimator would fail them less than once in 10,000 new seeds; experiments/planted is
the same with many more runs, and says how close to the nominal rates they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import planted  # noqa: F401 (makes the modules of experiments/planted importable)
import proof
import pytest
from answers import truths
from measure import ALL, likeness, looks, measured, plain_strength, strength
from populations import UNEQUAL, Population
from scenarios import FEW, SCENARIOS
from scipy import stats

RARE = 1e-7
"""Of a single check; there are fewer than 1,000."""
RUNS = 40


@cache
def runs_of(name: str) -> pd.DataFrame:
    return measured(SCENARIOS[name].population, runs=RUNS, documents=60, seed=[11], measures=ALL)


def few_hits(metric: str) -> bool:
    """Rates at one distance may rest on hardly any hits."""
    return "_by_" in metric


UNEVEN = ("near and far", "other places, same content", "same stride", "one collapsed")


@pytest.mark.parametrize("name", UNEVEN)
def test_every_metric_recovers_what_was_planted(name: str) -> None:
    """Within 10 % of the truth (of half an interval where the truth is smaller), or not distinguishable from that."""
    table = proof.against(runs_of(name), truths(SCENARIOS[name].population))
    assert len(table) > 70
    scale = np.fmax(table["truth"].abs(), table["half"])
    noise = stats.t.isf(RARE / 2, table["runs"] - 1) * table["bias_error"].fillna(0)
    wrong = table[table["bias"].abs() > proof.MOST_BIAS * scale + noise + proof.TINY]
    assert wrong.empty, wrong[["metric", "truth", "mean"]].to_string()


@pytest.mark.parametrize("name", UNEVEN)
def test_intervals_hold_what_was_planted(name: str) -> None:
    table = proof.against(runs_of(name), truths(SCENARIOS[name].population))
    table = table[~table["metric"].map(few_hits)]
    least = stats.binom.ppf(RARE, table["defined"], proof.COVERAGE[0])
    wrong = table[(table["coverage"] * table["defined"] < least) & ~proof.exact(table)]
    assert wrong.empty, wrong[["metric", "truth", "mean", "half", "coverage"]].to_string()


@pytest.mark.parametrize("name", ["newest", "oldest", "fixed stride"])
def test_what_leaves_nothing_to_chance_is_exact(name: str) -> None:
    population = replace(SCENARIOS[name].population, first=None, heavy=None)
    frame = measured(population, runs=1, documents=5, seed=[0], measures=ALL[:2])
    table = proof.against(frame, truths(population))
    table = table[~table["metric"].str.contains("recall|excess|teacher|coverage|mass|group|heads")]
    assert len(table) >= 12
    assert table["mean"].to_numpy() == pytest.approx(table["truth"].to_numpy())
    assert table["half"].dropna().to_numpy() == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("population", "documents"),
    [
        (Population(common=1.5, own=1.5, lengths=UNEQUAL, heavy=None), 60),
        (Population(lean=(0.2, -0.2), common=1.5, own=1.5, lengths=UNEQUAL, heavy=None), 60),
        (Population(lean=(0.5, -0.5), common=1.5, own=1.5, lengths=UNEQUAL, heavy=None), 60),
        (Population(lean=(0.0,) * 4, heavy=None), 30),
    ],
)
def test_intervals_of_a_weak_strength_are_not_too_short(population: Population, documents: int) -> None:
    """A squared statistic has no standard error at 0: value -+ t errors would hold the truth in three of four runs."""
    runs = 200
    frame = measured(population, runs=runs, documents=documents, seed=[3], measures=[plain_strength])
    table = proof.against(frame, truths(population)).set_index("metric")["coverage"]
    for metric in ("mutual_information", "eta_squared"):
        assert table[metric] * runs >= stats.binom.ppf(1e-5, runs, 0.92), metric


MANY = 250


@cache
def uneven() -> tuple[Population, pd.DataFrame]:
    """Documents of unequal length, each with a lean of its own, in which no proxy differs from another on the whole."""
    population = replace(SCENARIOS["alike but uneven"].population, heads=(), first=None, heavy=None)
    return population, measured(population, runs=MANY, documents=30, seed=[5], measures=(looks, strength))


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
    table = table[~table["metric"].map(few_hits)]
    assert len(table) > 30
    wrong = table[table["coverage"] * table["defined"] < stats.binom.ppf(RARE, table["defined"], proof.COVERAGE[0])]
    assert wrong.empty, wrong[["metric", "truth", "mean", "half", "coverage"]].to_string()


def test_overlap_by_place_alone_has_no_content_whatever_the_lengths() -> None:
    population = replace(SCENARIOS["same places, other content"].population, heavy=None, first=None)
    frame = measured(population, runs=MANY, documents=30, seed=[5], measures=[likeness])
    rejected = proof.rejection(frame, ["content"])["rejected"].iloc[0] * MANY
    assert rejected <= stats.binom.ppf(1 - 1e-5, MANY, proof.REJECTION[1])


@pytest.mark.parametrize("documents", [2, 3])
def test_too_few_documents_give_no_interval(documents: int) -> None:
    frame = measured(FEW, runs=2, documents=documents, seed=[0])
    assert frame[["low", "high"]].isna().all(axis=None)
    assert frame["reason"].str.len().gt(0).all()
    tested = frame["metric"].str.contains("mutual_information|proxy_information|eta_squared")
    assert frame.loc[tested, ["value", "p_value"]].isna().all(axis=None)


def test_the_permutation_test_is_not_defined_where_no_relabelling_could_reach_its_level() -> None:
    """Two proxies and D documents have 2^(D - 1) labellings; 5 % needs 20."""
    defined = {}
    for documents in (4, 5, 6):
        frame = measured(FEW, runs=2, documents=documents, seed=[0], measures=[strength])
        mutual = frame[frame["metric"] == "mutual_information"]
        assert mutual["value"].notna().all()
        defined[documents] = mutual["p_value"].notna().all()
    assert defined == {4: False, 5: False, 6: True}
