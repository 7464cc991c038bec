"""Churn, stability, emergence, unused blocks and the collapse alarm on selections whose course is planted."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pandas as pd
import planted
import pytest
import xarray as xr
from msa_analysis import specialization
from msa_analysis.choices import counting_rows, learned_slots
from msa_analysis.tally import tally
from scipy import stats

RUN = specialization.RUN


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def one(frame: pd.DataFrame, metric: str, **where: float) -> pd.Series:
    rows = frame[frame["metric"] == metric]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    assert len(rows) == 1
    return rows.iloc[0]


def covers(row: pd.Series, value: float) -> bool:
    return bool(row["low"] <= value <= row["high"])


def shortened(log: xr.Dataset, blocks: list[int]) -> xr.Dataset:
    """The log with documents of so many blocks: later queries choose nothing."""
    own = log["query"].values // int(log.attrs["block_size"])
    longer = own[None] >= np.array(blocks)[:, None]
    gone = xr.DataArray(longer, dims=("document", "query"))
    return log.assign({name: log[name].where(~gone, -1).astype(np.int16) for name in ("selected", "teacher")})


def test_churn_is_held_against_what_would_change_if_only_the_position_mattered() -> None:
    """Fresh uniform draws at each record share nothing but chance; fixed places are kept in any document."""
    log = planted.log([planted.uniform, planted.newest], documents=10, steps=(0, 10))
    frame = specialization.churn(log)
    fresh = one(frame, "churn", step=10, proxy=0)
    expected = 1 - (3 / counting_rows(log).own).mean()
    assert fresh["value"] == pytest.approx(expected, abs=0.01)
    assert fresh["null"] == pytest.approx(expected, abs=0.005)
    assert covers(one(frame, "stability", step=10, proxy=0), 0)
    fixed = one(frame, "churn", step=10, proxy=1)
    assert (fixed["value"], fixed["null"]) == (0, 0)
    nowhere = one(frame, "stability", step=10, proxy=1)
    assert np.isnan(nowhere["value"])  # nothing changes anywhere: there is no churn to stay below


def test_a_choice_that_is_kept_for_its_content_is_stable() -> None:
    log = planted.log([planted.uniform], documents=8, steps=(0, 10, 20))
    for step in (1, 2):
        log["selected"][step] = log["selected"][0]
    half = int(log.sizes["query"] * 0.75)  # every unsaturated query before this one keeps its choice, the others draw
    log["selected"][2, :, :, :, half:] = planted.log([planted.uniform], documents=8, seed=5)["selected"][
        0, :, :, :, half:
    ]
    frame = specialization.churn(log)
    assert one(frame, "stability", step=10)["value"] == pytest.approx(1)
    assert one(frame, "churn", step=10)["value"] == 0
    kept = (counting_rows(log).index < half).mean()
    assert one(frame, "stability", step=20)["value"] == pytest.approx(kept, abs=0.02)
    first = one(frame, "churn", step=0)
    assert np.isnan(first["value"])
    assert first["reason"] == "there is no record before this one"


def test_churn_against_other_documents_is_the_mean_over_all_pairs() -> None:
    log = shortened(planted.log([planted.leaning(3)], documents=4), [20, 24, 28, 32])
    rows = counting_rows(log)
    before, now = (learned_slots(log["selected"].values[i, 0, :, 0][:, rows.index], rows) for i in (0, 1))
    here, other, slots = 0, 0, 0
    for a, b in itertools.permutations(range(4), 2):
        for row in range(len(rows.index)):
            chosen, same, foreign = (set(ids.tolist()) - {-1} for ids in (now[a, row], before[a, row], before[b, row]))
            if chosen and foreign:
                here, other, slots = here + len(chosen & same), other + len(chosen & foreign), slots + len(chosen)
    held = one(specialization.churn(log), "churn", step=100)
    assert (held["value"], held["null"]) == pytest.approx((1 - here / slots, 1 - other / slots))


def test_documents_of_unequal_length_do_not_pass_for_similarity() -> None:
    """Early rows, which all documents have, see fewer blocks, so that chance is higher there."""
    lengths = np.linspace(17, 32, 24).astype(int).tolist()
    log = shortened(planted.log([planted.uniform] * 2, documents=24), lengths)
    frame = specialization.overlap(log, pool=(*RUN, "other"))
    for metric in ("kappa", "positional", "content"):
        assert covers(one(frame, metric, step=100), 0), metric
    for proxy in (0, 1):
        assert covers(one(specialization.fixed_choice(log), "fixed_choice", step=100, proxy=proxy), 0)
    # Places alone: everything is positional, whatever the lengths.
    log = shortened(planted.log([planted.oldest] * 2, documents=24), lengths)
    frame = specialization.overlap(log, pool=(*RUN, "other"))
    assert one(frame, "positional", step=100)["value"] == pytest.approx(1)
    assert one(frame, "content", step=100)["value"] == pytest.approx(0, abs=1e-9)


def test_blocks_never_selected_and_their_expectation_are_those_counted_by_hand() -> None:
    log = shortened(planted.log([planted.uniform, planted.oldest], documents=5, steps=(0,)), [18, 22, 26, 30, 32])
    rows = counting_rows(log)
    chosen = learned_slots(log["selected"].values[0, 0][:, :, rows.index], rows)
    for proxy in (0, 1):
        never = choosable = expected = 0.0
        for document in range(5):
            own = rows.own[(chosen[document, proxy] >= 0).any(-1)]
            for block in range(int(own.max())):
                later = own[own > block]
                choosable += 1
                never += block not in chosen[document, proxy]
                expected += np.prod(1 - 3 / later)
        row = one(specialization.never_selected(log), "never_selected", proxy=proxy)
        assert (row["value"], row["null"]) == pytest.approx((never / choosable, expected / choosable))


def test_uniform_choice_leaves_as_many_blocks_unused_as_it_should() -> None:
    log = planted.log([planted.uniform], documents=40, context=512, block_size=16)
    row = one(specialization.never_selected(log.isel(query=slice(None, None, 8))), "never_selected", step=100)
    assert row["null"] > 0.02
    assert covers(row, row["null"])


def test_a_collapsed_proxy_sets_the_alarm_off_and_its_neighbours_do_not() -> None:
    rules = [planted.uniform, planted.newest, planted.uniform, planted.uniform, planted.oldest]
    log = planted.log(rules, steps=(0,))
    log["selected"][:, :, :, 3] = log["selected"][:, :, :, 2]  # two that choose the same by content
    frame = specialization.collapse(log)
    alarms = frame[frame["metric"] == "collapse"].set_index("proxy")
    assert alarms["value"].to_dict() == {0: 0, 1: 1, 2: 1, 3: 1, 4: 1}
    because = {0: "", 1: "fixed_choice", 2: "twin", 3: "twin", 4: "fixed_choice, never_selected"}
    assert alarms["because"].to_dict() == because
    assert one(frame, "twin", proxy=2)["other"] == 3
    assert one(frame, "twin", proxy=3)["other"] == 2
    summary = specialization.summary(log)
    assert one(summary[summary["layer"].isna()], "collapse")["value"] == pytest.approx(0.8)


def test_one_proxy_has_no_twin_but_may_collapse_and_two_documents_tell_nothing() -> None:
    alone = specialization.collapse(planted.log([planted.newest], steps=(0,)))
    assert np.isnan(one(alone, "twin")["value"])
    assert one(alone, "collapse")["value"] == 1
    few = one(specialization.collapse(planted.log([planted.newest], steps=(0,), documents=2)), "collapse")
    assert np.isnan(few["value"])
    assert few["reason"] == "2 documents: an interval needs 4"


def history(lows: list[float], metric: str = "content") -> pd.DataFrame:
    low = np.array(lows)
    steps = np.arange(len(low)) * 10
    frame = pd.DataFrame({"metric": metric, "step": steps, "phase": "sparse", "layer": 0.0, "value": low + 0.1})
    return frame.assign(low=low, high=low + 0.2, null=0.0, documents=8, reason="")


def test_a_property_has_emerged_when_it_stays_above_its_null_to_the_end() -> None:
    row = specialization.emergence(history([-1, 0.1, -0.1, 0.2, 0.1, 0.3])).iloc[0]
    assert (row["low"], row["value"], row["high"], row["of"]) == (20, 30, 30, "content")
    row = specialization.emergence(history([0.1, 0.2])).iloc[0]
    assert (row["low"], row["value"]) == (0, 0)
    row = specialization.emergence(history([0.1, 0.2, 0.0])).iloc[0]
    assert np.isnan(row["value"])
    assert row["reason"] == "not above its null at the end"
    row = specialization.emergence(history([np.nan, 0.2])).iloc[0]
    assert (row["low"], row["value"]) == (0, 10)


def test_emergence_of_planted_specialization_is_found_at_its_record() -> None:
    logs = [
        planted.log([planted.leaning(s), planted.leaning(-s)], steps=(step,), seed=step, documents=12)
        for step, s in ((0, 0), (10, 0), (20, 3), (30, 6))
    ]
    frame = specialization.summary(xr.concat(logs, "step"))
    row = one(frame[frame["layer"].isna()], "emergence")
    assert (row["low"], row["value"]) == (10, 20)


def test_summary_holds_each_metric_once_a_layer_and_once_in_all() -> None:
    # Nothing divides, so that p-values differ from layer to layer.
    log = planted.log([planted.uniform] * 2, layers=3, heads=[planted.uniform] * 4)
    frame = specialization.summary(tally(log))
    counts = frame.groupby("metric")["layer"].agg(["count", "size"])
    assert (counts["count"] == 3).all()
    assert (counts["size"] == 4).all()
    unknown = frame["value"].isna()
    assert (frame.loc[unknown, "reason"] != "").all()
    strength = frame[(frame["metric"] == "mutual_information") & frame["layer"].notna()]
    corrected = stats.false_discovery_control(strength["p_value"])  # over layers
    assert (corrected > strength["p_value"]).any()
    assert strength["q_value"].to_numpy() == pytest.approx(corrected)
