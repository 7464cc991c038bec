"""Heads against their groups: planted heads that agree within groups, across them, or not at all."""

from __future__ import annotations

import numpy as np
import pandas as pd
import planted
import pytest
import xarray as xr
from msa_analysis import specialization
from msa_analysis.tally import tally

RUN = specialization.RUN
NEAR, FAR = planted.leaning(4), planted.leaning(-4)


def one(frame: pd.DataFrame, metric: str, **where: float) -> pd.Series:
    rows = frame[frame["metric"] == metric]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    assert len(rows) == 1
    return rows.iloc[0]


def logged(heads: list[planted.Rule], proxies: int = 4, **changes: int) -> xr.Dataset:
    log = planted.log([planted.uniform] * proxies, heads=heads, documents=8, **changes)
    return log.assign_attrs(num_query_heads=len(heads))


def test_groups_of_like_heads_hold_more_information_than_random_ones() -> None:
    frame = specialization.head_groups(logged([NEAR, NEAR, FAR, FAR] * 2), permutations=199)
    alike = one(frame, "group_information")
    assert alike["value"] == pytest.approx(
        one(specialization.mutual_information(logged([NEAR, NEAR, FAR, FAR] * 2)), "mutual_information_heads")["value"],
        abs=0.01,
    )
    assert alike["value"] > alike["null_high"] > alike["null"] > 0
    assert one(frame, "group_information_excess")["low"] > 0
    assert one(frame, "group_information_excess")["p_value"] == alike["p_value"]
    # Of the 105 groupings of eight heads into pairs, 9 keep the two kinds apart: none can be much rarer.
    assert alike["p_value"] <= 0.15
    mixed = specialization.head_groups(logged([NEAR, FAR] * 4), permutations=199)
    assert one(mixed, "group_information")["value"] < 0.01
    assert one(mixed, "group_information_excess")["high"] < 0
    assert one(mixed, "group_information")["p_value"] > 0.7


def test_overlap_within_groups_is_held_against_all_pairs() -> None:
    log = logged([planted.uniform] * 8)
    log["head_teacher"][:, :, 1::2] = log["head_teacher"][:, :, ::2].values
    frame = specialization.head_groups(log)
    within = one(frame, "kappa_within_groups")
    assert within["value"] == pytest.approx(1)
    pairs = one(frame, "kappa_heads")
    assert pairs["value"] == pytest.approx(4 / 28, abs=0.01)  # 4 of 28 pairs are the same choice
    assert within["null"] == pairs["value"]
    overlap = one(frame, "overlap_heads")
    assert overlap["null"] == pytest.approx((3 / np.arange(15, 32)).mean(), abs=1e-6)


def test_information_of_groups_is_that_of_a_log_whose_proxies_are_the_groups() -> None:
    """Pooling two heads into a group gives the counts of a proxy that chose for both."""
    heads = [NEAR, planted.uniform, FAR, FAR, planted.uniform, NEAR, planted.leaning(1), FAR]
    log = logged(heads)
    real = one(specialization.head_groups(log), "group_information")["value"]
    bins = tally(log)["head_bins"].sum("document").isel(layer=0).values.reshape(4, 2, -1).sum(1)
    joint = bins / bins.sum()
    apart = joint.sum(0) * joint.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        assert real == pytest.approx(np.nansum(joint * np.log2(joint / apart)))


@pytest.mark.parametrize("proxies", [1, 8])
def test_one_head_a_group_or_one_group_cannot_be_regrouped(proxies: int) -> None:
    frame = specialization.head_groups(logged([NEAR, FAR] * 4, proxies))
    grouped = frame[frame["metric"].isin(["kappa_within_groups", "group_information", "group_information_excess"])]
    assert grouped["value"].isna().all()
    assert (grouped["reason"] == "one head a group, or one group: nothing to regroup").all()
    assert one(frame, "kappa_heads")["reason"] == ""


def test_too_few_groupings_have_no_p_value_and_a_log_without_heads_no_numbers() -> None:
    frame = specialization.head_groups(logged([NEAR, NEAR, FAR, FAR], 2))  # three groupings
    assert np.isnan(one(frame, "group_information")["p_value"])
    assert one(frame, "group_information")["value"] > 0
    absent = specialization.head_groups(planted.log([NEAR] * 2))
    assert absent["value"].isna().all()
    assert (absent["reason"] == "the log holds no single heads of its last record").all()
    assert len(absent) == absent["metric"].nunique() == 5


def with_divergence(log: xr.Dataset, own: list[float], regrouped: float) -> xr.Dataset:
    sizes = [log.sizes[name] for name in ("step", "layer", "document", "proxy")]
    noise = np.random.default_rng(0).normal(0, 0.01, (*sizes, 32))
    held = np.array(own)[:, None] + noise
    dims = ("step", "layer", "document", "proxy", "query_block")
    drawn = regrouped + noise[0, :, :, [0] * 16].transpose(1, 2, 0, 3)
    return log.assign(
        divergence=(dims, held), regrouped_divergence=(("layer", "document", "regrouping", dims[-1]), drawn)
    )


def test_divergence_of_groups_is_the_mean_over_counting_rows_beside_random_groups() -> None:
    log = with_divergence(logged([NEAR] * 8, layers=2), [0.1, 0.2, 0.3, 0.4], 0.5)
    frame = specialization.group_divergence(log)
    for proxy, expected in enumerate([0.1, 0.2, 0.3, 0.4]):
        row = one(frame, "group_divergence", step=100, layer=1, proxy=proxy)
        hand = log["divergence"].values[1, 1, :, proxy, 15:].mean()
        assert row["value"] == pytest.approx(hand)
        assert row["value"] == pytest.approx(expected, abs=0.01)
        assert row["null"] == pytest.approx(0.5, abs=0.01)
        excess = one(frame, "group_divergence_excess", layer=1, proxy=proxy)
        assert excess["value"] == pytest.approx(row["value"] - row["null"])
        assert excess["high"] < 0
    assert np.isnan(one(frame, "group_divergence", step=0, layer=1, proxy=0)["null"])
    pooled = specialization.group_divergence(log, pool=RUN)
    assert one(pooled, "group_divergence_excess")["value"] == pytest.approx(-0.25, abs=0.01)


def test_logs_without_divergence_and_single_heads_say_so() -> None:
    frame = specialization.group_divergence(logged([NEAR] * 8))
    assert frame["value"].isna().all()
    assert (frame["reason"] == "the log holds no divergence of heads").all()
    log = with_divergence(logged([NEAR] * 4), [0.0] * 4, 0.0)
    alone = specialization.group_divergence(log)  # four proxies, four heads
    assert alone["value"].isna().all()
    assert (alone["reason"] == "one head a group: nothing to disagree").all()


def test_entropy_of_the_teacher_is_held_against_even_attention() -> None:
    log = logged([NEAR] * 8)
    even = np.log(np.arange(32) + 1)
    sizes = tuple(log.sizes[name] for name in ("step", "layer", "document", "proxy"))
    halves = np.array([1.0, 0.5, 0.25, 0.0])[:, None] * even
    log["entropy"] = (("step", "layer", "document", "proxy", "query_block"), np.broadcast_to(halves, (*sizes, 32)))
    frame = specialization.teacher_entropy(log)
    most = np.log(np.arange(15, 32) + 1).mean()
    for proxy, part in enumerate([1.0, 0.5, 0.25, 0.0]):
        row = one(frame, "teacher_entropy", step=100, proxy=proxy)
        assert (row["value"], row["null"]) == pytest.approx((part * most, most))
    absent = specialization.teacher_entropy(logged([NEAR] * 8))
    assert absent["value"].isna().all()
    assert (absent["reason"] == "the log holds no entropy of the dense attention").all()


@pytest.mark.parametrize("form", ["mutual_information", "eta_squared"])
def test_share_of_the_heads_own_strength_needs_heads_that_differ(form: str) -> None:
    heads = [NEAR, FAR, NEAR, FAR]
    log = planted.log([planted.leaning(1), planted.leaning(-1)], heads=heads, documents=8)
    frame = specialization.mutual_information(log)
    share = one(frame, f"{form}_share")
    ours, theirs = (one(frame, m, step=100)["value"] for m in (form, f"{form}_heads"))
    assert share["value"] == pytest.approx(ours / theirs, rel=0.02)
    assert 0 < share["low"] < share["value"] < share["high"] < 1
    alike = planted.log([planted.leaning(1), planted.leaning(-1)], heads=[NEAR] * 4, documents=8)
    row = one(specialization.mutual_information(alike), f"{form}_share")
    assert np.isnan(row["value"])
    assert row["reason"] == "the heads' own interval reaches 0"
