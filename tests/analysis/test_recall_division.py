"""The study of near and far recall: its runs are what it says, and its tests and tables find what is planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from draw_division import draw
from measure_division import analyse, write
from msa_analysis.specialization import recall_by_distance
from msa_analysis.tally import tally
from named_tests import agreement, compare_arms
from run_tables import accuracy_by_bin, asked_only, distance_prior, keyless_reader

from msa_lab.batch import Batch
from msa_lab.data import open_data
from msa_lab.study import load_study
from msa_lab.train import train

STUDY = Path(__file__).parents[2] / "experiments" / "recall_division"


def test_the_arms_differ_in_the_share_of_near_questions_alone(tmp_path: Path) -> None:
    runs = load_study(STUDY / "study.py")
    assert len(runs) == 12
    assert {(run.arm, run.seed) for run in runs} == {(arm, s) for arm in ("mixture", "near_only") for s in range(6)}
    assert len({(run.model, run.train, run.selections) for run in runs}) == 1
    tasks = {run.arm: run.data for run in runs}
    near = replace(tasks["mixture"].recall, near_fraction=1.0)
    assert replace(tasks["mixture"], recall=near) == tasks["near_only"]
    for run in runs[:2]:
        assert open_data(run.data, tmp_path).vocab_size == run.model.vocab_size
        learned = run.model.top_k_blocks - run.model.num_local_blocks
        assert run.data.recall.near_blocks == learned
        assert run.data.context_length // run.model.block_size > 4 * run.model.top_k_blocks


def _numbers(first: list[float], second: list[float], shared: float) -> pd.DataFrame:
    arms = {"mixture": first, "near_only": second}
    rows = [
        {"arm": arm, "seed": seed, "metric": metric, "value": value * scale}
        for arm, values in arms.items()
        for seed, value in enumerate(values)
        for metric, scale in (("mutual_information_excess", 1.0), ("cost_shared", shared))
    ]
    return pd.DataFrame(rows)


def test_the_named_test_needs_a_difference_in_the_right_direction() -> None:
    high, low = [6.0, 7, 8, 9, 10, 11], [0.0, 1, 2, 3, 4, 5]
    apart = compare_arms(_numbers(high, low, 0.1))
    assert apart["p"].tolist() == pytest.approx([2 / 924] * 2)
    assert apart["p_holm"].tolist() == pytest.approx([4 / 924] * 2)
    assert apart["holds"].all()
    assert not compare_arms(_numbers(low, high, 1.0))["holds"].any()
    assert compare_arms(_numbers(high, low, -1.0))["holds"].tolist() == [True, False]
    mixed = compare_arms(_numbers([0.0, 3, 4, 7, 8, 11], [1.0, 2, 5, 6, 9, 10], 1.0))
    assert not mixed["holds"].any()
    assert (mixed["p"] > 0.5).all()


def test_agreement_is_that_of_accuracy_and_recall_in_each_run() -> None:
    bins, rng = np.arange(1, 6), np.random.default_rng(0)
    recall = np.linspace(0.9, 0.2, 5)

    def table(accuracy) -> pd.DataFrame:
        runs = [pd.DataFrame({"bin": bins, "recall": recall, "accuracy": accuracy()}).assign(seed=s) for s in range(6)]
        return pd.concat(runs).assign(arm="mixture")

    runs, test = agreement(table(lambda: recall / 2 + rng.normal(0, 0.01, 5)))
    assert len(runs) == 6
    assert test["mean_r"].item() > 0.95
    assert test["holds"].item()
    assert not agreement(table(lambda: rng.permutation(recall)))[1]["holds"].item()
    assert not agreement(table(lambda: 1 - recall + rng.normal(0, 0.01, 5)))[1]["holds"].item()


def _window_log(batch: Batch, block: int, top_k: int) -> xr.Dataset:
    """Two proxies: one that chooses the newest blocks, one that chooses nothing but its own."""
    documents, length = batch.inputs.shape
    own = np.arange(length) // block
    newest = own[:, None] - np.arange(top_k)[::-1]
    newest = np.sort(np.where(newest >= 0, newest, -1), -1)
    alone = np.concatenate([own[:, None], np.full((length, top_k - 1), -1)], 1)
    blocks = np.stack([newest, alone]).astype(np.int16)
    shape = (1, 1, documents, 2, length, top_k)
    dims = ("step", "layer", "document", "proxy", "query", "slot")
    return xr.Dataset(
        {"selected": (dims, np.broadcast_to(blocks, shape).copy())},
        coords={
            "step": [0],
            "phase": ("step", ["sparse"]),
            "layer": [0],
            "document": [f"row{i}" for i in range(documents)],
            "proxy": [0, 1],
            "query": np.arange(length),
            "slot": np.arange(top_k),
        },
        attrs={"block_size": block, "top_k_blocks": top_k, "num_local_blocks": 1, "num_sink_blocks": 0},
    )


def test_recall_of_the_source_is_exact_for_a_window(tmp_path: Path) -> None:
    data = open_data(load_study(STUDY / "study.py")[0].data, tmp_path)
    batch = data.validation(0, 24)
    asked = asked_only(_window_log(batch, 4, 4), batch, 4)
    sums = tally(asked, min_visible=5)
    position, distance = np.arange(128), batch.distance.numpy()
    apart = (position // 4 - (position - distance) // 4)[(distance >= 0) & (position >= 16)]
    bins = np.searchsorted([1, 2, 4, 8, 16], apart, side="right")
    assert sums["wanted"].sel(proxy=0).sum("document").values.ravel().tolist() == np.bincount(bins).tolist()
    frame = recall_by_distance(sums, pool=("layer",)).set_index(["proxy", "bin"])["value"]
    # Distances 1 to 3 lie in the window; the second proxy has no choice of its own, which is no miss.
    assert [frame[0, bin_] for bin_ in range(1, 6)] == [1, 1, 0, 0, 0]
    assert frame[1].isna().all()


def test_recall_needs_a_task_that_plants_dependencies() -> None:
    tokens = torch.zeros(2, 64, dtype=torch.long)
    batch = Batch(tokens, tokens, None, torch.zeros(2, 64, dtype=torch.long))
    with pytest.raises(ValueError, match=r"batch\.distance=None"):
        asked_only(_window_log(batch, 4, 4), Batch(tokens, tokens, None, None), 4)


def test_the_prior_is_that_of_the_task(tmp_path: Path) -> None:
    config = load_study(STUDY / "study.py")[0]
    assert config.arm == "mixture"
    batch = open_data(config.data, tmp_path).batch(0, 0, 400)
    position = np.arange(128)
    distance = batch.distance.numpy()
    apart = (position // 4 - (position - distance) // 4)[distance >= 0]
    prior = distance_prior(0.5, 3, 32)
    assert prior.sum() == pytest.approx(1)
    seen = np.bincount(apart, minlength=32) / len(apart)
    assert np.abs(seen - prior).max() < 4 * np.sqrt(0.25 / len(apart))


def test_the_best_reader_knows_the_answer_where_one_value_was_shown() -> None:
    config = load_study(STUDY / "study.py")[1]
    assert config.arm == "near_only"
    tokens = torch.full((2, 128), 40)
    targets, distance = torch.full((2, 128), -100), torch.full((2, 128), -1)
    tokens[:, [40, 41]], tokens[:, [48, 49]] = torch.tensor([3, 16 + 7]), torch.tensor([32, 3])
    tokens[1, [44, 45]] = torch.tensor([5, 16 + 9])
    targets[:, 49], distance[:, 49] = 16 + 7, 8
    found = keyless_reader(Batch(tokens, targets, None, distance), config)
    assert found["bin"].tolist() == [2, 2]
    # With a second value one block back, which leaves less room for its question, the guess goes to the farther.
    assert found["right"].tolist() == [1.0, 1.0]


def test_accuracy_is_pooled_over_the_questions_of_a_bin() -> None:
    found = {"1": (0.5, 4), "2": (1.0, 1), "3": (0.0, 3)}
    frame = accuracy_by_bin({blocks: {"accuracy": a, "questions": n} for blocks, (a, n) in found.items()})
    assert frame["accuracy"].tolist() == [0.5, 0.25]
    assert frame["questions"].tolist() == [4, 4]


@pytest.mark.slow
def test_every_table_and_figure_is_made_from_trained_folders(tmp_path: Path) -> None:
    study = [run for run in load_study(STUDY / "study.py") if run.seed < 2]
    runs = []
    for config in study:
        short = replace(config.train, steps=2, warmup_steps=1, proxy_warmup_steps=1, batch_size=4, validate_every=2)
        log = replace(config.selections, records=2, documents=5)
        short = replace(config, train=replace(short, checkpoint_every=2), selections=log)
        runs.append(train(short, root=tmp_path / "runs", cache=tmp_path / "data", progress=False, wandb="disabled"))
    tables = analyse(runs, cache=tmp_path / "data", documents=5)
    numbers = tables["numbers"]
    assert set(numbers["metric"]) >= {"mutual_information_excess", "cost_shared", "cost_recency", "kappa", "content"}
    # The heads of a model that has learned nothing may not differ, and then the share of it is not defined.
    assert numbers.query("metric != 'mutual_information_share'")["value"].notna().all()
    assert (numbers.groupby(["arm", "metric"])["seed"].nunique() == 2).all()
    assert (
        tables["by_distance"].query("arm == 'mixture'").groupby("seed")["bin"].apply(list).tolist()
        == [[1, 2, 3, 4, 5]] * 2
    )
    assert len(tables["test_arms"]) == 2
    write(tables, draw(tables), runs, tmp_path / "out", "as tested")
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "numbers.csv",
        "test_arms.csv",
        "environment.json",
        "endpoints.png",
        "agreement.svg",
        "profiles.png",
    } <= made
    assert pd.read_csv(tmp_path / "out" / "by_distance.csv")["recall"].notna().any()
