"""Captured mass and coverage against attention whose mass is known, and what logs without it say."""

from __future__ import annotations

import masses
import numpy as np
import pandas as pd
import planted
import pytest
import xarray as xr
from msa_analysis import specialization
from msa_analysis.tally import tally

SIZE = {"documents": 5, "context": 192, "block_size": 8, "top_k": 3}


def near(distance: np.ndarray) -> np.ndarray:
    return 0.9**distance


def one(frame: pd.DataFrame, metric: str, **where: int) -> pd.Series:
    rows = frame[frame["metric"] == metric]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    assert len(rows) == 1
    return rows.iloc[0]


@pytest.fixture(scope="module")
def made() -> tuple[xr.Dataset, np.ndarray]:
    log = planted.log([planted.uniform, planted.leaning(4)], layers=2, steps=(0, 10), **SIZE)
    return masses.with_masses(log, near)


def test_captured_mass_and_coverage_are_those_worked_out_row_by_row(made: tuple[xr.Dataset, np.ndarray]) -> None:
    log, attention = made
    sums = tally(log)
    mass, share = specialization.captured_mass(sums), specialization.coverage(sums)
    for step, layer, proxy in ((0, 0, 0), (10, 1, 1), (10, 0, 1)):
        hand = masses.by_hand(log, attention, int(step == 10), layer, proxy)
        at = {"step": step, "layer": layer, "proxy": proxy}
        own = one(mass, "captured_mass", **at)
        assert (own["value"], own["null"]) == pytest.approx((hand["mass_own"], hand["mass_random"]), rel=1e-5)
        assert one(mass, "captured_mass_teacher", **at)["value"] == pytest.approx(hand["mass_best"], rel=1e-5)
        assert one(mass, "captured_mass_window", **at)["value"] == pytest.approx(hand["mass_newest"], rel=1e-5)
        c, random, window = (hand[f"coverage_{name}"] for name in ("own", "random", "newest"))
        held = one(share, "coverage", **at)
        assert (held["value"], held["null"]) == pytest.approx((c, random), rel=1e-5)
        over = one(share, "coverage_over_random", **at)["value"], one(share, "coverage_over_window", **at)["value"]
        assert over == pytest.approx(((c - random) / (1 - random), (c - window) / (1 - window)), rel=1e-4)


def test_uniform_choice_newest_blocks_and_the_teacher_itself_are_the_fixed_points_of_coverage() -> None:
    log = planted.log([planted.uniform, planted.newest, planted.uniform], steps=(0,), **(SIZE | {"documents": 12}))
    log, _ = masses.with_masses(log, near)
    log["selected"][:, :, :, 2] = log["teacher"][:, :, :, 2]
    log["mass"][:, :, :, 2] = log["teacher_mass"][:, :, :, 2]
    frame = specialization.coverage(log)
    random = one(frame, "coverage_over_random", proxy=0)
    assert random["low"] <= 0 <= random["high"]
    assert one(frame, "coverage_over_window", proxy=1)["value"] == pytest.approx(0, abs=1e-6)
    for metric in ("coverage", "coverage_over_random", "coverage_over_window"):
        assert one(frame, metric, proxy=2)["value"] == pytest.approx(1, abs=1e-6)


def test_coverage_by_distance_weighs_the_teachers_blocks_by_their_mass(made: tuple[xr.Dataset, np.ndarray]) -> None:
    log, attention = made
    frame = specialization.coverage_by_distance(log.isel(step=[1]))
    best, reached, newest, rows = np.zeros(6), np.zeros(6), np.zeros(6), 0
    for document in range(5):
        for query in range(12 * 8 - 8, 192):
            own = query // 8
            if own + 1 < 12:
                continue
            rows += 1
            chosen = set(log["selected"].values[1, 0, document, 1, query].tolist())
            for block in set(log["teacher"].values[1, 0, document, 1, query].tolist()) - {own}:
                bin_ = int(np.log2(own - block)) + 1
                mass = attention[0, document, 1, query, block]
                best[bin_] += mass
                reached[bin_] += mass * (block in chosen)
                newest[bin_] += mass * (own - block <= 2)
    for bin_ in range(2, 5):
        assert best[bin_] > 0
        at = {"layer": 0, "proxy": 1, "bin": bin_}
        held = one(frame, "captured_mass_by_distance", **at)["value"]
        assert held == pytest.approx(reached[bin_] / rows, rel=1e-5)
        c, window = reached[bin_] / best[bin_], newest[bin_] / best[bin_]
        assert one(frame, "coverage_by_distance", **at)["value"] == pytest.approx(c, rel=1e-5)
        over = one(frame, "coverage_over_window_by_distance", **at)["value"]
        assert over == pytest.approx((c - window) / (1 - window), rel=1e-4)
    nothing_left = one(frame, "coverage_over_window_by_distance", layer=0, proxy=1, bin=1)
    assert np.isnan(nothing_left["value"])
    assert "the newest blocks hold all of it" in nothing_left["reason"]


def test_parts_by_position_are_the_metric_of_those_rows_alone(made: tuple[xr.Dataset, np.ndarray]) -> None:
    log, _ = made
    by_position = specialization.coverage_by_position(log.isel(step=[1]))
    recall = specialization.recall_by_position(log.isel(step=[1]))
    part = log.isel(step=[1], query=slice(6 * 24, 7 * 24))  # the seventh eighth of 192 tokens
    part = part.assign_coords(query=log["query"].values[6 * 24 : 7 * 24])
    for metric, whole in (
        ("coverage", specialization.coverage(part)),
        ("coverage_over_window", specialization.coverage(part)),
        ("captured_mass", specialization.captured_mass(part)),
        ("block_recall", specialization.block_recall(part)),
    ):
        frame = recall if metric == "block_recall" else by_position
        name = "recall_by_position" if metric == "block_recall" else f"{metric}_by_position"
        for layer, proxy in ((0, 0), (1, 1)):
            ours = one(frame, name, layer=layer, proxy=proxy, position=6)
            theirs = one(whole, metric, layer=layer, proxy=proxy)
            # Over all of the context a mass is taken as a mean, in a part of it as a skewed rate.
            ends = ("low", "high") if metric == "block_recall" else ()
            for column in ("value", "null", *ends):
                assert ours[column] == pytest.approx(theirs[column]), (metric, column)
    assert one(recall, "recall_by_position", layer=0, proxy=0, position=6)["blocks"] == "18\N{EN DASH}20"


def test_logs_without_masses_or_without_the_newest_blocks_say_so(made: tuple[xr.Dataset, np.ndarray]) -> None:
    log, _ = made
    older = specialization.coverage(log.drop_vars("newest_mass"), pool=specialization.RUN)
    assert older[older["metric"] == "coverage_over_random"]["value"].notna().all()
    window = older[older["metric"] == "coverage_over_window"]
    assert window["value"].isna().all()
    assert (window["reason"] == "the log holds no mass of the newest blocks").all()
    by_distance = specialization.coverage_by_distance(log.drop_vars("newest_mass"), pool=specialization.RUN)
    assert by_distance["value"].notna().any()
    bare = log.drop_vars(["mass", "teacher_mass", "newest_mass"])
    for function in (specialization.captured_mass, specialization.coverage):
        frame = function(bare)
        assert frame["value"].isna().all()
        assert frame["reason"].str.startswith("the log holds no").all()


def test_a_mass_that_is_not_a_number_makes_no_number(made: tuple[xr.Dataset, np.ndarray]) -> None:
    log = made[0].copy(deep=True)
    log["mass"][1, 0, 0, 0, -1, 0] = np.nan
    frame = specialization.coverage(log)
    torn = one(frame, "coverage", step=10, layer=0, proxy=0)
    assert np.isnan(torn["value"])
    assert torn["reason"]
    assert np.isfinite(one(frame, "coverage", step=10, layer=0, proxy=1)["value"])


def test_sink_share_counts_block_zero_against_uniform_choice() -> None:
    log = planted.log([planted.uniform, planted.oldest, planted.newest], documents=12, steps=(0,))
    frame = specialization.sink_share(log)
    chance = one(frame, "sink_share", proxy=0)
    assert chance["low"] <= chance["null"] <= chance["high"]
    assert one(frame, "sink_share", proxy=1)["value"] == 1.0
    assert one(frame, "sink_share", proxy=2)["value"] == 0.0
    assert one(frame, "sink_excess", proxy=1)["value"] == pytest.approx(1 - chance["null"])
    log.attrs["num_sink_blocks"] = 1
    forced = specialization.sink_share(log)
    assert forced[forced["metric"].isin(["sink_share", "sink_excess"])]["value"].isna().all()
    assert forced["reason"].str.contains("block 0 is forced|no teacher").all()
