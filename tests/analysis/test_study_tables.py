"""What a study says over its seeds is what was planted in its tables, and tables that do not belong together are
refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from msa_analysis.study_results import load, not_run
from msa_analysis.study_tables import by_seed, costs, detectable, differences, power, twins, worth
from scipy import stats

STEM = np.array([1.30, 1.17, 1.24, 1.21])
"""Bits per byte of the dense arm by seed: they differ by far more than arms do."""
APART = {
    "dense": np.zeros(4),
    "again": np.zeros(4),
    "good": np.array([0.003, 0.004, 0.005, 0.004]),
    "worse": np.array([0.030, 0.034, 0.038, 0.030]),
    "better": np.array([-0.030, -0.034, -0.038, -0.030]),
    "open": np.array([-0.030, 0.034, -0.028, 0.040]),
}


def write_seed(folder: Path, seed: int, arms: dict[str, np.ndarray] = APART, **about: object) -> Path:
    """What a command leaves for a seed; weights differ by arm and seed, apart from `again`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, scored, costs_ = [], [], []
    for arm, apart in arms.items():
        value = STEM[seed] + apart[seed]
        row = {"arm": arm, "seed": seed, "bits_per_byte": value, "validation_loss": 2 * value, "corpus_hash": "c"}
        row |= {"validation": "v", "tokens": 100, "weights": f"{arm.replace('again', 'dense')}{seed}", "losses": "l"}
        cost = {"parameters": 1000, "proxies": 2, "flops_total": 1e9, "wall_seconds": 5.0, "tokens_per_second": 100.0}
        rows.append(row | cost)
        tilt = np.array([-0.002, 0.002, 0.001, -0.001]) * (arm != "dense")
        scored += [
            {"arm": arm, "id": f"row{i}", "tokens": 10, "bytes": 50, "loss": 0.0, "bits_per_byte": value + extra}
            for i, extra in enumerate(tilt)
        ]
        for rule, scale in (("shared", 0.01), ("recency", 0.05)):
            for layer in (np.nan, 0, 1):
                planted = scale * (1 + 0.1 * seed) * (1 if np.isnan(layer) else layer)
                costs_.append({"arm": arm, "rule": rule, "layer": layer, "quantity": "loss", "value": planted})
    pd.DataFrame(rows).to_csv(folder / "runs.csv", index=False)
    pd.DataFrame(scored).to_csv(folder / "rows.csv", index=False)
    pd.DataFrame(costs_).assign(bin=np.nan).to_csv(folder / "costs.csv", index=False)
    (folder / "environment.json").write_text(json.dumps({"seed": seed, "tiny": False} | about))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four seeds."""
    for seed in range(4):
        write_seed(tmp_path / f"seed{seed}", seed)
    return tmp_path


def test_differences_are_paired_by_seed_and_judged_by_the_margin(folder: Path) -> None:
    pairs = [(arm, "dense") for arm in APART] + [("worse", "good")]
    found = differences(load(folder), pairs, margin=0.01).set_index(["arm", "reference"])
    verdicts = {arm: found.loc[(arm, "dense"), "verdict"] for arm in ("good", "worse", "better", "open")}
    assert verdicts == {"good": "as good", "worse": "worse", "better": "better", "open": "open"}
    planted = APART["worse"] - APART["good"]
    row = found.loc[("worse", "good")]
    assert row["value"] == pytest.approx(planted.mean())
    half = stats.t.ppf(0.975, 3) * planted.std(ddof=1) / 2
    assert (row["low"], row["high"]) == (pytest.approx(planted.mean() - half), pytest.approx(planted.mean() + half))
    assert row["p"] == pytest.approx(stats.ttest_1samp(planted, 0).pvalue)
    tested = found["p"].dropna()  # two arms of the same numbers differ by nothing at all, which is no test
    assert found.loc[tested.index, "q"].to_numpy() == pytest.approx(stats.false_discovery_control(tested))
    assert ("dense", "dense") not in found.index
    assert found.loc[("again", "dense"), "value"] == 0


def test_two_seeds_have_no_interval_and_no_verdict(folder: Path) -> None:
    found = differences(load(folder).only((0, 3), ()), [("worse", "dense")], margin=0.01).iloc[0]
    assert found["value"] == pytest.approx(0.03)
    assert found["seeds"] == 2
    assert np.isnan([found["low"], found["p"]]).all()
    assert found["verdict"] == ""


def test_only_the_seeds_of_a_study_count_and_arms_keep_its_order(folder: Path) -> None:
    results = load(folder).only((1, 2), ("worse", "good"))
    assert results.seeds == [1, 2]
    assert set(results.table("runs")["seed"]) == {1, 2}
    assert list(dict.fromkeys(results.table("runs")["arm"]))[-2:] == ["worse", "good"]
    absent = not_run(results, ("good", "other"), (1, 2, 9))
    assert set(zip(absent["arm"], absent["seed"], strict=True)) == {
        ("other", 1),
        ("other", 2),
        ("other", 9),
        ("good", 9),
    }


def test_one_shared_selection_is_tested_against_nothing_over_seeds(folder: Path) -> None:
    planted = 0.01 * (1 + 0.1 * np.arange(4))
    row = worth(load(folder)).set_index("arm").loc["good"]
    assert row["value"] == pytest.approx(planted.mean())
    assert row["p"] == pytest.approx(stats.ttest_1samp(planted, 0).pvalue)
    assert row["recency"] == pytest.approx(5 * planted.mean())
    layers = costs(load(folder), ("layer",)).set_index(["arm", "rule", "layer"])
    assert layers.loc[("good", "shared", 1), "value"] == pytest.approx(planted.mean())
    assert layers.loc[("good", "shared", 0), "value"] == 0


def test_power_is_that_of_the_paired_t_test(folder: Path) -> None:
    found = power(load(folder), [("worse", "dense")]).iloc[0]
    sd = APART["worse"].std(ddof=1)
    assert found["sd"] == pytest.approx(sd)
    assert found["sd_low"] < sd < found["sd_high"]
    assert found["row_error"] == pytest.approx(np.std([-0.002, 0.002, 0.001, -0.001], ddof=1) / 2, rel=1e-6)
    rng = np.random.default_rng(0)
    for count in (3, 5, 20):
        effect = found[f"seeds_{count}"] / sd
        assert effect == pytest.approx(detectable(count))
        drawn = rng.normal(effect, 1, (20_000, count))
        assert (stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.01)


def test_one_arm_twice_is_compared_bit_for_bit(folder: Path) -> None:
    found = twins(load(folder), [("dense", "again"), ("dense", "good")]).groupby("again")
    assert found.get_group("again")["weights"].all()
    assert not found.get_group("good")["weights"].any()
    assert found.get_group("good")["difference"].tolist() == pytest.approx(APART["good"])


def test_a_seed_made_by_two_commands_is_one_if_its_stem_is(folder: Path) -> None:
    more = {"dense": APART["dense"], "late": APART["good"]}
    write_seed(folder / "seed1-late", 1, more)
    results = load(folder)
    runs = results.table("runs").query("seed == 1")
    assert sorted(runs["arm"]) == sorted([*APART, "late"])
    assert len(results.table("costs").query("seed == 1 and arm == 'dense'")) == 6
    frame = pd.read_csv(folder / "seed1-late" / "runs.csv")
    frame.assign(weights="others").to_csv(folder / "seed1-late" / "runs.csv", index=False)
    with pytest.raises(ValueError, match=r"seed1-late: dense of seed 1 is another model than in .*seed1"):
        load(folder)


def test_what_does_not_belong_together_is_refused(folder: Path) -> None:
    frame = pd.read_csv(folder / "seed2" / "runs.csv")
    frame.assign(corpus_hash=np.where(frame["arm"] == "good", "other", "c")).to_csv(
        folder / "seed2" / "runs.csv", index=False
    )
    with pytest.raises(ValueError, match="good seed 2: its corpus"):
        by_seed(load(folder), [("good", "dense")])
    frame.assign(parameters=np.where(frame["arm"] == "good", 1003, 1000)).to_csv(
        folder / "seed2" / "runs.csv", index=False
    )
    with pytest.raises(ValueError, match="good seed 2: has 1,003 parameters, and dense 1,000"):
        by_seed(load(folder), [("good", "dense")])
    write_seed(folder / "seed2", 2, tiny=True)
    with pytest.raises(ValueError, match="seeds of a tiny rehearsal beside others"):
        load(folder)
    (folder / "seed2" / "environment.json").write_text("{")
    with pytest.raises(ValueError, match=r"seed2: cannot be read \(.*\); run this seed again"):
        load(folder)


def test_a_failed_run_is_in_no_number_and_keeps_its_reason(folder: Path) -> None:
    frame = pd.read_csv(folder / "seed0" / "runs.csv")
    failed = pd.DataFrame([{"arm": "good", "seed": 0, "reason": "FloatingPointError: step 3"}])
    kept = frame[frame["arm"] != "good"]
    pd.concat([kept, failed]).to_csv(folder / "seed0" / "runs.csv", index=False)
    results = load(folder)
    assert not_run(results, APART, range(4)).to_dict("records") == failed.to_dict("records")
    found = differences(results, [("good", "dense")], margin=0.01).iloc[0]
    assert found["seeds"] == 3
    assert found["value"] == pytest.approx(APART["good"][1:].mean())
