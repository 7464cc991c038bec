"""The closed forms behind the proof, against counting; and that the proof finds what is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import proof
import pytest
from answers import truths
from measure import measured
from msa_analysis.specialization import recency
from populations import BLOCK, BLOCKS, NEWEST, OLDEST, UNEQUAL, Population, draw
from scenarios import SCENARIOS
from truth import BIN, OWNS, VISIBLE, Truth, inclusion


def test_inclusion_is_the_frequency_of_draws_without_replacement() -> None:
    """Against drawing one after the other, the plainest way."""
    rng, lean, own, count = np.random.default_rng(0), 2.0, 12, 8_000
    weight = np.exp(lean * (np.arange(own) / (own - 1) - 0.5))
    hits = np.zeros(own)
    for _ in range(count):
        hits[rng.choice(own, 2, replace=False, p=weight / weight.sum())] += 1
    expected = inclusion(np.array(lean))[list(OWNS).index(own), :own]
    error = np.sqrt(expected * (1 - expected) / count)
    assert np.abs(hits / count - expected).max() < 5 * error.max()
    assert expected.sum() == pytest.approx(2)


@pytest.mark.parametrize("lean", [NEWEST, OLDEST, 0.0, -3.0])
def test_inclusion_holds_two_blocks_a_row(lean: float) -> None:
    assert inclusion(np.array(lean)).sum(-1) == pytest.approx(2 * np.ones(len(OWNS)))


def test_closed_forms_are_what_counting_gives_in_many_documents() -> None:
    """Shared blocks, information, churn and never chosen blocks of 4,000 documents, counted without any estimator."""
    population = Population(
        lean=(1.0, -1.0),
        common=1.0,
        own=1.0,
        first=(0.0, 0.0),
        copy=(2.0, 2.0),
        lengths=UNEQUAL,
        trend=2.0,
        heavy=None,
    )
    log = draw(population, runs=1, documents=4000, rng=np.random.default_rng(1))
    ids = log["selected"].values[:, 0]  # step, document, proxy, query, slot
    own = np.arange(ids.shape[-2]) // BLOCK
    held = (ids[..., None] == np.arange(BLOCKS)).any(-2) & (np.arange(BLOCKS) < own[:, None])
    held = held[..., own >= OWNS[0], :]
    rows = held[1, :, 0].any(-1)
    answer, now = truths(population), held[1]
    assert (now[:, 0] & now[:, 1]).sum() / (2 * rows.sum()) == pytest.approx(answer["overlap"], abs=0.01)
    bins = BIN[own[own >= OWNS[0]] - OWNS[0]]
    table = np.stack([[(now[:, p] & (bins == b)).sum() for b in range(1, 6)] for p in range(2)]) / (4 * rows.sum())
    apart = table.sum(0) * table.sum(1)[:, None]
    assert (table * np.log2(table / apart)).sum() == pytest.approx(answer["mutual_information"], abs=0.004)
    # Churn is over rows weighted by the other documents that have them.
    weight = rows.sum(0) - 1
    kept = ((held[0] & held[1]).sum(-1) * weight).sum() / (2 * 2 * (rows * weight).sum())
    assert 1 - kept == pytest.approx(answer["churn"], abs=0.01)
    seen = now.any(2)
    last = log["selected"].values[1, 0, :, 0].max((-2, -1))
    missed = [(~seen[d, p, : last[d]]).sum() for d in range(len(last)) for p in range(2)]
    assert sum(missed) / (2 * last.sum()) == pytest.approx(answer["never_selected"], abs=0.01)
    assert VISIBLE.sum() == OWNS.sum()


def test_twins_and_what_they_leave_alone_are_what_counting_gives() -> None:
    """Shared and never chosen blocks of three proxies of which two copy, and churn of a third record, counted."""
    population = replace(
        SCENARIOS["twins"].population, copy=(3.0, 1.0), first=(0.0, 0.0, 0.0), records=(1, 2), heavy=None
    )
    log = draw(population, runs=1, documents=4000, rng=np.random.default_rng(1))
    ids = log["selected"].values[:, 0]
    own = np.arange(ids.shape[-2]) // BLOCK
    held = (ids[..., None] == np.arange(BLOCKS)).any(-2) & (np.arange(BLOCKS) < own[:, None])
    held = held[..., own >= OWNS[0], :]
    rows, now = held[2, :, 0].any(-1), held[2]
    chance = (rows * 2 / own[own >= OWNS[0]]).sum() / rows.sum()
    shares = {(p, q): (now[:, p] & now[:, q]).sum() / (2 * rows.sum()) for p, q in ((0, 1), (0, 2), (1, 2))}
    answer = truths(population)
    assert np.mean(list(shares.values())) == pytest.approx(answer["overlap"], abs=0.005)
    for proxy in (0, 1):
        assert (shares[0, 1] - chance) / (1 - chance) == pytest.approx(answer[f"twin[{proxy}]"], abs=0.01)
    assert "twin[2]" not in answer  # it is as much like the one as like the other
    weight = rows.sum(0) - 1
    kept = ((held[1] & held[2]).sum(-1) * weight[None]).sum() / (3 * 2 * (rows * weight).sum())
    assert 1 - kept == pytest.approx(answer["churn"], abs=0.01)


def test_documents_of_a_population_differ_as_they_should() -> None:
    """Recency of single documents scatters far more than rows drawn independently of one another would."""
    uneven, even = (
        measured(population, runs=40, documents=4, seed=[0], measures=[partial(recency, pool=("proxy",))])
        for population in (Population(common=2.0, heavy=None), Population(heavy=None))
    )
    spread = [frame[frame["metric"] == "recency"]["value"].std() for frame in (uneven, even)]
    assert spread[0] > 3 * spread[1]
    assert Truth(Population(common=2.0)).mean_of("proxy", np.ones(())).tolist() == pytest.approx([1.0, 1.0])


def _runs(value: np.ndarray, half: float, p_value: float = np.nan) -> pd.DataFrame:
    frame = pd.DataFrame({"metric": "m", "run": range(len(value)), "value": value, "null": 0.0, "p_value": p_value})
    return frame.assign(low=value - half, high=value + half, reason="")


def test_a_right_estimator_passes_and_wrong_ones_do_not() -> None:
    noise = np.random.default_rng(2).normal(0, 0.1, 1000)
    right = proof.against(_runs(1 + noise, 0.196), {"m": 1.0}).iloc[0]
    assert right["unbiased"]
    assert right["inside"]
    assert not right["outside"]
    biased = proof.against(_runs(1.13 + noise, 0.196), {"m": 1.0}).iloc[0]
    assert not biased["unbiased"]
    assert biased["outside"]
    assert biased["too_high"] > 0.2
    for half in (0.15, 0.4):  # too short, too long
        assert proof.against(_runs(1 + noise, half), {"m": 1.0}).iloc[0]["outside"]
    exact = proof.against(_runs(np.ones(10), 0.0), {"m": 1.0})
    assert exact.iloc[0]["inside"]
    assert proof.exact(exact).all()


def test_rejection_is_by_the_p_value_where_there_is_one() -> None:
    noise = np.random.default_rng(3).normal(0, 0.1, 1000)
    by_interval = proof.rejection(_runs(noise, 0.196), ["m"]).iloc[0]
    assert by_interval["test"] == "interval"
    assert by_interval["inside"]
    assert proof.rejection(_runs(noise, 0.1), ["m"]).iloc[0]["outside"]
    by_p = proof.rejection(_runs(noise, 0.1, p_value=0.5), ["m"]).iloc[0]
    assert (by_p["test"], by_p["rejected"], bool(by_p["outside"])) == ("p-value", 0.0, True)
    alone = _runs(noise, np.nan, p_value=0.01)  # a test needs no interval
    assert proof.rejection(alone, ["m"])[["test", "rejected", "null_runs"]].iloc[0].tolist() == ["p-value", 1.0, 1000]


def test_a_claim_is_one_sided_and_made_at_half_the_level() -> None:
    frame = pd.DataFrame(
        {"metric": "emergence[m]", "run": range(1000), "value": np.nan, "null": np.nan, "p_value": np.nan}
    )
    for share, inside, outside in ((0.025, True, False), (0.045, False, False), (0.065, False, True)):
        value = np.where(np.arange(1000) < 1000 * share, 300.0, np.nan)
        row = proof.rejection(frame.assign(value=value, low=value, high=value), ["emergence[m]"]).iloc[0]
        assert (row["test"], row["rejected"], row["null_runs"]) == ("one-sided", share, 1000)
        assert (row["inside"], row["outside"]) == (inside, outside)


def test_what_is_not_defined_counts_neither_as_covered_nor_as_rejected() -> None:
    frame = _runs(np.array([0.0, 0.0, np.nan]), 0.1)
    assert proof.against(frame, {"m": 0.0}).iloc[0]["defined"] == 2
    assert proof.rejection(frame, ["m"]).iloc[0]["null_runs"] == 2


def test_power_over_seeds_by_hand() -> None:
    """Groups of three: (1, 1, 1.1) is clearly above 0, (-1, 0, 1) is not."""
    frame = _runs(np.array([1.0, 1.0, 1.1, -1.0, 0.0, 1.0]), 0.1)
    assert proof.by_seeds(frame, 3) == 0.5
