"""Metrics on planted selections, whose answers are known."""

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
from msa_analysis.information import information
from msa_analysis.tally import tally

RUN = specialization.RUN


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def last(frame: pd.DataFrame, metric: str) -> pd.Series:
    rows = frame[(frame["metric"] == metric) & (frame["step"] == frame["step"].max())]
    assert len(rows) == 1
    return rows.iloc[0]


def covers(row: pd.Series, value: float) -> bool:
    return bool(row["low"] <= value <= row["high"])


@pytest.fixture(scope="module")
def at_random() -> xr.Dataset:
    return tally(planted.log([planted.uniform] * 3, teacher=[planted.uniform] * 3, documents=12, layers=2, seed=1))


def test_random_proxies_score_zero(at_random: xr.Dataset) -> None:
    recency = last(specialization.recency(at_random, pool=RUN), "recency")
    assert recency["null"] == 0.5
    assert covers(recency, 0.5)
    recall = specialization.block_recall(at_random, pool=RUN)
    assert covers(last(recall, "recall_excess"), 0.0)
    assert last(recall, "block_recall")["value"] == pytest.approx(last(recall, "block_recall")["null"], abs=0.01)
    strength = specialization.mutual_information(at_random, pool=RUN, permutations=199)
    for metric in ("mutual_information", "mutual_information_excess", "eta_squared", "eta_squared_excess"):
        assert covers(last(strength, metric), 0.0), metric
    assert last(strength, "mutual_information")["p_value"] > 0.01
    alike = specialization.overlap(at_random, pool=(*RUN, "other"))
    for metric in ("kappa", "positional", "content"):
        assert covers(last(alike, metric), 0.0), metric


def test_newest_and_oldest_blocks_get_opposite_signs() -> None:
    log = planted.log([planted.newest, planted.oldest], teacher=[planted.uniform] * 2)
    frame = specialization.recency(log)
    excess = frame[(frame["metric"] == "excess_recency") & (frame["step"] == 100)].set_index("proxy")["value"]
    index = frame[(frame["metric"] == "recency") & (frame["step"] == 100)].set_index("proxy")["value"]
    assert excess[0] > 0.4
    assert excess[1] < -0.4
    assert index[0] == pytest.approx(1 - index[1])  # mirror images of one another


def test_recency_by_hand() -> None:
    """The three newest of V blocks have x = 0, 1/(V-2), 2/(V-2), whatever V."""
    log = planted.log([planted.newest], context=512, block_size=16)
    visible = counting_rows(log).own + 1
    expected = 1 - (1 / (visible - 2)).mean()
    assert last(specialization.recency(log), "recency")["value"] == pytest.approx(expected)


def test_near_and_far_populations_are_told_apart() -> None:
    log = planted.log(
        [planted.newest, planted.newest, planted.oldest, planted.oldest],
        first=[planted.uniform] * 4,
        heads=[planted.newest, planted.oldest] * 2,
    )
    frame = specialization.mutual_information(log, pool=RUN, permutations=199)
    strength = last(frame, "mutual_information")
    assert strength["value"] == pytest.approx(1.0, abs=1e-6)  # two kinds that never share a distance bin: one bit
    assert strength["p_value"] == pytest.approx(1 / 200)
    excess = last(frame, "mutual_information_excess")
    assert excess["low"] > 0.9
    assert last(frame, "mutual_information_heads")["value"] == pytest.approx(1.0, abs=1e-6)
    assert last(frame, "eta_squared")["value"] > 0.8
    between = [last(frame, f"eta_squared{end}")["value"] for end in ("", "_excess", "_heads")]
    assert between == pytest.approx([between[0]] * 3, abs=0.01)
    for metric in ("mutual_information_excess", "eta_squared_excess"):
        first = frame[(frame["metric"] == metric) & (frame["step"] == 0)].iloc[0]
        assert np.isnan(first["value"])
        assert first["reason"] == "the first record is the reference"


def test_information_by_hand() -> None:
    table = xr.DataArray([[3.0, 1.0], [1.0, 3.0]], dims=("proxy", "bin"))
    expected = 2 * (3 / 8) * np.log2((3 / 8) / 0.25) + 2 * (1 / 8) * np.log2((1 / 8) / 0.25)
    assert float(information(table)) == pytest.approx(expected)


def test_chance_recall_is_the_simulated_one() -> None:
    """Exact expectation, row by row, against 40 documents of random choices; teachers that lean change nothing."""
    log = planted.log([planted.uniform], teacher=[planted.leaning(5)], documents=40, steps=(0,))
    recall = specialization.block_recall(log)
    row = last(recall, "block_recall")
    visible = counting_rows(log).own + 1
    assert row["null"] == pytest.approx((3 / (visible - 1)).mean())
    assert row["value"] == pytest.approx(row["null"], abs=0.005)
    by_distance = specialization.recall_by_distance(log).dropna(subset="value")
    assert by_distance["value"].to_numpy() == pytest.approx(by_distance["null"].to_numpy(), abs=0.02)


def test_recall_of_the_teacher_itself_is_one_without_the_forced_block() -> None:
    log = planted.log([planted.uniform], steps=(0,))
    log["teacher"] = log["selected"]
    assert last(specialization.block_recall(log), "block_recall")["value"] == 1.0
    # Own blocks alone agree: that is no recall.
    log = planted.log([planted.newest], teacher=[planted.oldest], steps=(0,))
    assert last(specialization.block_recall(log), "block_recall")["value"] == 0.0


def test_same_places_are_positional_and_same_text_is_content() -> None:
    """Two proxies that share a fixed stride overlap in any document; two that share the document's own draw do not."""
    log = planted.log([planted.newest, planted.newest])
    frame = specialization.overlap(log, pool=(*RUN, "other"))
    assert last(frame, "kappa")["value"] == pytest.approx(1.0)
    assert last(frame, "positional")["value"] == pytest.approx(1.0)
    assert last(frame, "content")["value"] == pytest.approx(0.0, abs=1e-9)

    log = planted.log([planted.uniform, planted.uniform])
    log["selected"][:, :, :, 1] = log["selected"][:, :, :, 0]
    frame = specialization.overlap(log, pool=(*RUN, "other"))
    assert last(frame, "kappa")["value"] == pytest.approx(1.0)
    assert covers(last(frame, "positional"), 0.0)
    assert last(frame, "content")["value"] == pytest.approx(1.0, abs=0.02)


def test_overlap_with_other_documents_is_the_mean_over_all_pairs() -> None:
    log = planted.log([planted.uniform, planted.leaning(3)], documents=5, steps=(0,))
    rows = counting_rows(log)
    chosen = learned_slots(log["selected"].values[0, 0][:, :, rows.index], rows)
    shares = []
    for a, b in itertools.permutations(range(5), 2):
        shared = [len((set(p) & set(q)) - {-1}) for p, q in zip(chosen[a, 0], chosen[b, 1], strict=True)]
        shares.append(np.mean(shared) / 3)
    pair = specialization.overlap(log, pool=())
    held = pair.set_index("metric")["value"]
    chance = pair.set_index("metric").loc["overlap", "null"]
    assert held["positional"] == pytest.approx((np.mean(shares) - chance) / (1 - chance))


def test_leaving_documents_out_equals_a_log_without_them() -> None:
    from msa_analysis.tally import totals, without_two

    rules = [planted.uniform, planted.leaning(3)]
    log = planted.log(rules, heads=rules * 2, documents=5)
    sums = tally(log)
    _, without = totals(sums)
    two = without_two(sums, without)
    assert {"shared_other", "slots_other", "chance_other", "bins"} <= set(two)
    for left, kept, place in ((without, [0, 1, 3, 4], 2), (two, [0, 1, 4], 2), (two, [1, 2, 3], 4)):
        whole, _ = totals(tally(log.isel(document=kept)))
        for name in left.data_vars:
            expected = pytest.approx(whole[name].values, nan_ok=True)
            assert left[name].isel(document=place).values == expected, name


def test_nominal_intervals_cover_and_null_p_values_reject_as_often_as_they_say() -> None:
    """100 independent layers of proxies that choose alike: recency has a known value, strength and content are zero."""
    size = {"context": 288, "top_k": 3, "steps": (0,)}
    rules = [planted.leaning(2)] * 2
    truth = planted.log(rules, **size, documents=300, seed=98)
    truth = last(specialization.recency(truth, pool=RUN), "recency")["value"]
    sums = tally(planted.log(rules, **size, documents=6, layers=100))
    pool = ("proxy",)
    strength = specialization.mutual_information(sums, pool=pool, permutations=199)
    parts = [strength, specialization.overlap(sums), specialization.recency(sums, pool=pool)]
    frame = pd.concat(parts, ignore_index=True)
    for metric, value in {"recency": truth, "mutual_information": 0.0, "content": 0.0, "excess_recency": 0.0}.items():
        rows = frame[frame["metric"] == metric]
        assert len(rows) == 100
        assert rows.apply(covers, axis=1, value=value).sum() >= 89, metric  # 95 expected
    rejected = (frame["p_value"] <= 0.05).sum()
    assert rejected <= 11  # 5 expected, at most: there are 32 relabellings


def test_too_few_documents_are_not_defined() -> None:
    log = planted.log([planted.newest, planted.oldest], documents=2)
    frame = specialization.summary(log)
    assert frame[["low", "high"]].isna().all(axis=None)
    assert frame["reason"].str.fullmatch("2 documents: an interval needs [46]").all()
    strength = frame[frame["metric"] == "mutual_information"]
    assert strength["value"].isna().all()
    assert strength["p_value"].isna().all()


def test_a_p_value_that_no_relabelling_can_reach_is_not_defined() -> None:
    """Two proxies and five documents have 16 labellings: 1/16 is above 0.05. Six documents have 32."""
    for documents, defined in ((5, False), (6, True)):
        log = planted.log([planted.newest, planted.oldest], documents=documents)
        frame = specialization.mutual_information(log, pool=RUN, permutations=99)
        assert np.isfinite(last(frame, "mutual_information")["p_value"]) == defined


def test_one_proxy_has_nothing_to_tell_apart() -> None:
    log = tally(planted.log([planted.uniform]))
    apart = [specialization.mutual_information(log, permutations=9), specialization.overlap(log)]
    frame = pd.concat([*apart, specialization.recency(log)])
    apart = frame[frame["metric"].isin(["mutual_information", "eta_squared", "kappa", "content", "positional"])]
    assert apart["metric"].nunique() == 5
    assert apart["value"].isna().all()
    assert apart["reason"].str.startswith("one proxy").all()
    assert frame[frame["metric"] == "recency"]["value"].notna().all()


def test_a_log_without_teacher_or_without_long_rows_says_so() -> None:
    frame = specialization.summary(planted.log([planted.uniform] * 2).drop_vars("teacher"))
    recall = frame[frame["metric"] == "block_recall"]
    assert recall["value"].isna().all()
    assert (recall["reason"] == "no teacher blocks in these rows").all()
    assert frame[frame["metric"] == "recency"]["value"].notna().all()
    frame = specialization.summary(planted.log([planted.uniform] * 2, context=128))
    assert frame["value"].isna().all()
    assert (frame["reason"] == "no query sees enough blocks to have a choice").all()


def test_profile_is_a_distribution_and_its_null_is_uniform_choice(at_random: xr.Dataset) -> None:
    frame = specialization.distance_profile(at_random)
    own = frame[frame["metric"] == "distance_profile"]
    keys = ["step", "layer", "proxy"]
    assert own.groupby(keys)["value"].sum().to_numpy() == pytest.approx(1.0)
    assert own["value"].to_numpy() == pytest.approx(own["null"].to_numpy(), abs=0.02)
    frame = specialization.position_profile(at_random, pool=RUN)
    assert frame[frame["metric"] == "position_profile"].groupby("step")["value"].sum().to_numpy() == pytest.approx(1)


def test_strength_grows_over_training() -> None:
    steps = (0, 10, 20)
    logs = [
        planted.log([planted.leaning(s), planted.leaning(-s)], steps=(step,), seed=step)
        for step, s in zip(steps, (0, 2, 6), strict=True)
    ]
    frame = specialization.mutual_information(xr.concat(logs, "step"), pool=RUN, permutations=0)
    whole = frame[frame["metric"] == "mutual_information"].sort_values("step")
    assert list(whole["step"]) == list(steps)
    assert whole["value"].is_monotonic_increasing
    assert whole["value"].iloc[-1] > 0.2


def test_a_log_that_begins_with_trained_proxies_has_no_excess_over_untrained_ones() -> None:
    log = planted.log([planted.newest, planted.oldest], first=[planted.uniform] * 2, layers=1, steps=(240, 250, 260))
    log.attrs["first_step"] = 240
    whole = specialization.mutual_information(log)
    late = specialization.mutual_information(log.isel(step=slice(1, None)))
    for metric in ("mutual_information", "eta_squared"):
        assert np.isfinite(last(whole, f"{metric}_excess")["value"])
        row = last(late, f"{metric}_excess")
        assert np.isnan(row["value"])
        assert row["reason"] == "the log does not begin with untrained proxies"
        assert np.isfinite(last(late, metric)["value"])


def test_variance_between_proxies_beyond_untrained_ones_is_the_difference_of_two_by_hand() -> None:
    log = planted.log([planted.leaning(3), planted.leaning(-3)], first=[planted.leaning(1), planted.leaning(-1)])
    rows = counting_rows(log)

    def between(step: int) -> float:
        chosen = learned_slots(log["selected"].values[step, 0][:, :, rows.index], rows)
        far = np.log2(np.where(chosen >= 0, rows.own[:, None] - chosen, 1))
        held = chosen >= 0
        values = [far[:, p][held[:, p]] for p in (0, 1)]
        return float(np.var([part.mean() for part in values]) / np.concatenate(values).var())

    frame = specialization.mutual_information(log, permutations=0)
    row = last(frame, "eta_squared_excess")
    assert row["value"] == pytest.approx(between(1) - between(0), abs=0.003)
    assert row["low"] < row["value"] < row["high"]
    assert last(frame, "eta_squared")["plug_in"] == pytest.approx(between(1))
