"""Tables of runs, paired differences, and the undertrained rule."""

from __future__ import annotations

import math
from pathlib import Path

import folders
import numpy as np
import planted
import pytest
from msa_analysis import quality
from msa_analysis.evidence import collect, over_seeds
from msa_analysis.logs import read_log
from msa_analysis.verdict import judge

from msa_lab.config import RecallConfig
from msa_lab.runs import arm_folder


def pair(root: Path, seed: int, dense: float, msa: float, **result: object) -> list:
    return [
        folders.finished(root, folders.config("dense", "dense", seed), quality=dense),
        folders.finished(root, folders.config("msa", "msa", seed), quality=msa, **result),
    ]


def test_paired_interval_by_hand(tmp_path: Path) -> None:
    """Differences 0.02, 0.04, 0.06: mean 0.04, sd 0.02, t(2) = 4.302653; the seeds' own spread does not enter."""
    levels = ((0, 2.0, 2.02), (1, 3.0, 3.04), (2, 2.5, 2.56))
    runs = [run for seed, dense, msa in levels for run in pair(tmp_path, seed, dense, msa)]
    row = quality.compare(runs).iloc[0]
    half = 4.302652729911275 * 0.02 / math.sqrt(3)
    assert (row["arm"], row["reference"], row["over"], row["n"]) == ("msa", "dense", "seeds", 3)
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((0.04, 0.04 - half, 0.04 + half))


def test_one_seed_speaks_of_one_pair_of_models(tmp_path: Path) -> None:
    row = quality.compare(pair(tmp_path, 0, 2.0, 2.03)).iloc[0]
    assert (row["over"], row["n"]) == ("rows", 16)
    assert row["difference"] == pytest.approx(0.03)
    assert row["low"] < 0.03 < row["high"]
    assert row["reason"] == "one seed: speaks of this one pair of models"


def test_one_seed_without_documents_has_no_interval(tmp_path: Path) -> None:
    runs = pair(tmp_path, 0, 2.0, 2.03)
    for run in runs:
        run.write_json("result.json", run.result | {"rows": []})
    row = quality.compare(runs).iloc[0]
    assert row["difference"] == pytest.approx(0.03)
    assert np.isnan(row["low"])
    assert "no interval" in row["reason"]


def test_runs_of_different_corpora_are_not_compared(tmp_path: Path) -> None:
    runs = pair(tmp_path, 0, 2.0, 2.03, corpus_hash="deadbeef")
    with pytest.raises(ValueError, match=r"msa seed 0: its corpus \(deadbeef\) are not those of dense"):
        quality.compare(runs)


def test_runs_scored_on_other_rows_or_trained_for_longer_are_not_compared(tmp_path: Path) -> None:
    runs = pair(tmp_path, 0, 2.0, 2.03)
    other = [document | {"id": f"other{i}"} for i, document in enumerate(runs[1].result["rows"])]
    runs[1].write_json("result.json", runs[1].result | {"rows": other})
    with pytest.raises(ValueError, match="validation rows"):
        quality.compare(runs)
    longer = pair(tmp_path / "longer", 0, 2.0, 2.03, tokens=1)
    with pytest.raises(ValueError, match="tokens of training"):
        quality.compare(longer)


def test_a_score_under_another_attention_stays_out_of_the_column(tmp_path: Path) -> None:
    runs = pair(tmp_path, 0, 2.0, 2.03, bits_per_byte_dense_attention=9.0)
    frame = quality.table(runs)
    assert sorted(frame["bits_per_byte"]) == [2.0, 2.03]
    assert not (frame == 9.0).any(axis=None)


def test_kernel_paths_and_configs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    first = folders.finished(tmp_path, folders.config("msa", "msa"), quality=2.0)
    second = folders.finished(tmp_path, folders.config("msa", "msa", 1), quality=2.0, path="flex")
    assert set(quality.table([first, second])["arm"]) == {"msa-reference", "msa-flex"}
    third = folders.finished(tmp_path, folders.config("msa", "msa", train={"lr": 1e-3}), quality=2.0)
    assert quality.table([first, third])["arm"].nunique() == 2


def test_a_stem_is_neither_compared_nor_judged(tmp_path: Path) -> None:
    stem_config = folders.config("stem", "dense", train={"steps": 110, "stop_at": 50})
    stem = folders.finished(tmp_path, stem_config, quality=9.0, tokens=5)
    fork = {"steps": 110, "fork_from": arm_folder(stem_config), "fork_step": 50}
    dense = folders.finished(tmp_path, folders.config("dense", "dense", train=fork), quality=2.0)
    window = folders.finished(tmp_path, folders.config("window", "window", train=fork), quality=2.1)
    runs = [stem, dense, window]
    assert list(quality.table(runs)["role"]) == ["stem", "arm", "arm"]
    assert list(quality.compare(runs)["arm"]) == ["window"]
    assert not judge(collect(runs)).undertrained  # the stem's 9.0 is above the bigram's 3.5, and that is fine


def test_an_unknown_reference_names_the_arms(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reference='moe': name one of the arms dense, msa"):
        quality.compare(pair(tmp_path, 0, 2.0, 2.1), "moe")


def test_worse_than_the_bigram_table_is_undertrained(tmp_path: Path) -> None:
    folders.finished(tmp_path, folders.config("dense", "dense"), quality=3.6)
    verdict = judge(collect(tmp_path))
    assert verdict.reasons == [
        "dense, seed 0: bits per byte must be below the bigram table's; 3.600 against the bigram table's 3.500"
    ]


def test_proxies_at_chance_few_records_and_short_rows_are_undertrained(tmp_path: Path) -> None:
    size = {"layers": 2, "context": 256, "steps": (0, 50, 110)}
    log = planted.log([planted.uniform] * 2, teacher=[planted.uniform] * 2, **size)
    made = folders.config("msa", "msa", data={"context_length": 256})
    folders.finished(tmp_path, made, quality=2.0, log=log)
    chance, few, short = judge(collect(tmp_path)).reasons
    assert "block recall must beat chance" in chance
    assert "3 recorded" in few
    assert "6% do" in short


def test_proxies_without_a_log_are_not_taken_on_trust(tmp_path: Path) -> None:
    folders.finished(tmp_path, folders.config("msa", "msa"), quality=2.0)
    assert judge(collect(tmp_path)).reasons == [
        "msa, seed 0: the proxies' block recall must beat chance with its whole interval; "
        "not defined: no selections were recorded"
    ]


def test_layers_without_proxies_do_not_enter_the_measures(tmp_path: Path) -> None:
    """A layer with a recency window records a selection too; it is no proxy's choice."""
    log = planted.log([planted.uniform] * 2, layers=2, steps=(0, 110))
    log["selected"][:, 1] = log["selected"][:, 1].isel(proxy=[0, 0]).values
    made = folders.config("mixed", "msa", model={"attention": ("msa", "window")})
    run = folders.finished(tmp_path, made, quality=2.0, log=log)
    assert read_log(run)["layer"].values.tolist() == [0]


@pytest.mark.slow
def test_measures_over_seeds_use_the_seeds_spread(tmp_path: Path) -> None:
    folders.study(tmp_path, seeds=2)
    evidence = collect(tmp_path)
    runs = evidence.specialization()
    row = over_seeds(runs).set_index("metric").loc["recency"]
    values = runs[runs["layer"].isna() & (runs["metric"] == "recency")]["value"].to_numpy()
    half = 12.706204736 * values.std(ddof=1) / math.sqrt(2)
    assert (row["n"], row["over"]) == (2, "seeds")
    assert (row["low"], row["high"]) == pytest.approx((values.mean() - half, values.mean() + half))


def test_recall_answers_must_beat_guessing_with_their_whole_interval(tmp_path: Path) -> None:
    # 64 values to guess from: 1/64 is chance, and 3 right of 100 may well be luck.
    def answers(right: float) -> dict:
        return {"2": {"accuracy": right, "questions": 60}, "9": {"accuracy": right, "questions": 40}}

    planted_task = {"source": "recall", "recall": RecallConfig(block_size=16)}
    plain = {"bits_per_byte": None, "bigram_bits_per_byte": None}
    for arm, right in (("lucky", 0.03), ("able", 0.5)):
        made = folders.config(arm, "dense", data=planted_task)
        folders.finished(tmp_path / arm, made, quality=2.0, accuracy_by_distance=answers(right), **plain)
    lucky, able = judge(collect(tmp_path / "lucky")), judge(collect(tmp_path / "able"))
    assert lucky.undertrained
    assert "accuracy must beat guessing" in lucky.reasons[0]
    assert "chance 0.016" in lucky.reasons[0]
    assert not able.undertrained


def test_runs_that_no_check_applies_to_are_not_trained_enough(tmp_path: Path) -> None:
    plain = {"bits_per_byte": None, "bigram_bits_per_byte": None}
    folders.finished(tmp_path, folders.config("dense", "dense"), quality=2.0, **plain)
    verdict = judge(collect(tmp_path))
    assert not verdict.checks
    assert verdict.undertrained
    assert "no check applies" in verdict.reasons[0]
