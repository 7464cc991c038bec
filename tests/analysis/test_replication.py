"""Runs of several seeds: proxies matched within layers, and intervals whose unit is the seed."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import planted
import pytest
import xarray as xr
from msa_analysis import replication, specialization
from msa_analysis.statistics import t_interval
from msa_analysis.tally import tally

KINDS = [planted.leaning(6), planted.leaning(0), planted.leaning(-6)]


def runs(orders: list[list[list[int]]], **changes: int):
    """One run a seed; its layers hold the kinds in that order."""
    made = []
    for seed, layers in enumerate(orders):
        logs = [
            planted.log([KINDS[k] for k in order], documents=5, seed=10 * seed + i, **changes)
            for i, order in enumerate(layers)
        ]
        merged = logs[0].isel(layer=[0] * len(logs)).assign_coords(layer=np.arange(len(logs)))
        for name in ("selected", "teacher"):
            merged[name] = (merged[name].dims, np.concatenate([log[name].values for log in logs], 1))
        made.append(tally(merged))
    return made


ORDERS = [[[0, 1, 2], [2, 0, 1]], [[2, 1, 0], [1, 2, 0]], [[1, 0, 2], [0, 1, 2]]]


def test_proxies_of_one_kind_get_one_place_in_every_layer_of_every_seed() -> None:
    before = runs(ORDERS)
    after = replication.match_proxies(before)
    for sums, matched, layers in zip(before, after, ORDERS, strict=True):
        frame = specialization.recency(matched)
        index = frame[(frame["metric"] == "recency") & (frame["step"] == 100)]
        for _, part in index.groupby("layer"):
            assert part.sort_values("proxy")["value"].is_monotonic_decreasing  # the nearest first
        for layer, order in enumerate(layers):
            for place, kind in enumerate([0, 1, 2]):
                was = order.index(kind)
                for name in ("bins", "hits", "slots"):
                    ours, theirs = matched[name].isel(layer=layer, proxy=place), sums[name].isel(layer=layer, proxy=was)
                    np.testing.assert_array_equal(ours.values, theirs.values)
                other = order.index((kind + 1) % 3)
                pair = matched["shared"].isel(layer=layer, proxy=place, other=(place + 1) % 3)
                np.testing.assert_array_equal(
                    pair.values, sums["shared"].isel(layer=layer, proxy=was, other=other).values
                )
        assert matched["proxy"].values.tolist() == [0, 1, 2]
        assert matched.attrs == sums.attrs


def test_numbers_of_layers_are_the_same_before_and_after_matching() -> None:
    before = runs(ORDERS[:1])[0]
    after = replication.match_proxies([before])[0]
    for function in (specialization.overlap, specialization.mutual_information):
        ours, theirs = (function(sums)[["metric", "layer", "value", "low", "high"]] for sums in (after, before))
        pd.testing.assert_frame_equal(ours, theirs, check_exact=False, rtol=1e-9, atol=1e-12)


def test_unlike_runs_are_not_matched() -> None:
    short, long = runs(ORDERS[:1]), runs(ORDERS[1:2], context=1024)
    with pytest.raises(ValueError, match=r"have \[6, 7\] of bin"):
        replication.match_proxies([*short, *long])
    with pytest.raises(ValueError, match="hold the layers"):
        replication.match_proxies([short[0], short[0].assign_coords(layer=[4, 5])])
    with pytest.raises(ValueError, match="nothing to match"):
        replication.match_proxies([])


def frames(values: list[float], metric: str = "recency") -> dict[int, pd.DataFrame]:
    rows = {"metric": [metric], "step": [9], "layer": [0], "proxy": [1], "low": [0.0], "high": [1.0], "null": [0.5]}
    return {
        seed: pd.DataFrame(rows | {"value": [value], "reason": ["" if math.isfinite(value) else "no slots"]})
        for seed, value in enumerate(values)
    }


def test_interval_over_seeds_is_student_t_of_the_seeds() -> None:
    row = replication.across_seeds(frames([0.2, 0.5, 0.9])).iloc[0]
    assert (row["value"], row["low"], row["high"]) == pytest.approx(t_interval([0.2, 0.5, 0.9]))
    assert (row["null"], row["seeds"], row["reason"]) == (0.5, 3, "")


def test_fewer_than_three_seeds_have_no_interval_and_undefined_seeds_do_not_count() -> None:
    row = replication.across_seeds(frames([0.2, 0.6])).iloc[0]
    assert row["value"] == pytest.approx(0.4)
    assert np.isnan(row["low"])
    assert row["reason"] == "2 seeds: an interval needs 3"
    row = replication.across_seeds(frames([0.2, 0.5, 0.9, math.nan])).iloc[0]
    assert (row["value"], row["low"], row["high"]) == pytest.approx(t_interval([0.2, 0.5, 0.9]))
    assert row["reason"] == "defined in 3 of 4 seeds: no slots"
    row = replication.across_seeds(frames([math.nan] * 3)).iloc[0]
    assert np.isnan(row["value"])
    assert row["reason"] == "no slots"


def test_differences_between_arms_are_paired_by_seed() -> None:
    """Seeds that differ much, arms that differ little: only the pairing shows it."""
    ours, theirs = frames([0.1, 0.5, 0.9, 0.3]), frames([0.08, 0.49, 0.87])
    row = replication.paired_difference(ours, theirs).iloc[0]
    assert (row["value"], row["low"], row["high"]) == pytest.approx(t_interval([0.02, 0.01, 0.03]))
    assert (row["null"], row["seeds"]) == (0, 3)
    with pytest.raises(ValueError, match="none in common"):
        replication.paired_difference({1: ours[1]}, {2: theirs[2]})


def strengths(sums: xr.Dataset) -> pd.DataFrame:
    """A row a layer, and one without a layer: their mean."""
    pools = (("proxy",), specialization.RUN)
    return pd.concat([specialization.mutual_information(sums, pool=pool, permutations=0) for pool in pools])


def test_tables_of_whole_runs_and_of_distances_keep_their_rows_apart() -> None:
    logs = dict(enumerate(replication.match_proxies(runs(ORDERS))))
    whole = replication.across_seeds({seed: strengths(sums) for seed, sums in logs.items()})
    strength = whole[(whole["metric"] == "mutual_information") & (whole["step"] == 100)]
    assert len(strength) == 3  # two layers and their mean
    assert (strength["low"] > 0).all()
    profile = replication.across_seeds({seed: specialization.distance_profile(sums) for seed, sums in logs.items()})
    own = profile[(profile["metric"] == "distance_profile") & (profile["step"] == 100)]
    assert len(own) == 2 * 3 * logs[0].sizes["bin"]
    assert own.groupby(["layer", "proxy"])["value"].sum().to_numpy() == pytest.approx(1.0)
