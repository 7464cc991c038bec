"""The study of recall at named distances: its runs are what it says, and its tables find what is planted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from distance_tables import CONDITIONS, FIRST_BLOCK, answers, asking, held_by
from draw_distance import draw
from measure_distance import analyse, compare_controls
from named_tests import agreement
from torch.nn import functional as F

from msa_lab.data import open_data
from msa_lab.evaluate import load_model
from msa_lab.runs import Run
from msa_lab.selections import open_selections
from msa_lab.study import load_study
from msa_lab.train import train

pytestmark = pytest.mark.xdist_group("recall_distance")  # its runs are trained once, not once a worker

STUDY = Path(__file__).parents[2] / "experiments" / "recall_distance"


def test_the_arms_differ_in_their_distances_alone(tmp_path: Path) -> None:
    runs = load_study(STUDY / "study.py")
    assert {(run.arm, run.seed) for run in runs} == {
        (arm, seed) for arm in ("mixture", "near_only", "far_only") for seed in range(8)
    }
    assert len({(run.model, run.train, run.selections) for run in runs}) == 1
    assert len({replace(run.data, recall=replace(run.data.recall, distances=())) for run in plainly(runs)}) == 1
    by_arm = {run.arm: run.data.recall.distances for run in runs}
    learned = runs[0].model.top_k_blocks - runs[0].model.num_local_blocks
    assert by_arm["mixture"] == by_arm["near_only"] + by_arm["far_only"]
    assert len(by_arm["near_only"]) == len(by_arm["far_only"]) == learned
    assert by_arm["near_only"][-1] < runs[0].data.recall.coded_from == by_arm["far_only"][0]
    assert by_arm["mixture"][-1] == FIRST_BLOCK
    assert open_data(runs[0].data, tmp_path).vocab_size == runs[0].model.vocab_size


def plainly(runs: list) -> list:
    """The runs with answers in no code, which goes with distances only."""
    return [replace(run, data=replace(run.data, recall=replace(run.data.recall, coded_from=0))) for run in runs]


def test_best_losses_are_those_that_the_page_states() -> None:
    """By drawing the values that a reader of these blocks sees: the right one among 6, among 3, or in 3 of the 6."""
    rng, count, values = np.random.default_rng(0), 400_000, 20
    shown = rng.integers(values, size=(count, 6))
    answer = shown[np.arange(count), rng.integers(6, size=count)]
    found = {
        "mixture": (shown == answer[:, None]).mean(1),
        "near_only": (shown[:, :3] == shown[:, :1]).mean(1),
        "shared": (shown[:, :3] == answer[:, None]).sum(1) / 6 + 0.5 / values,
    }
    page = (STUDY / "README.md").read_text()
    for name, probability in found.items():
        loss = -np.log(probability)
        stated = {"mixture": 1.625, "near_only": 1.030, "shared": 2.492}[name]
        assert loss.mean() == pytest.approx(stated, abs=4 * loss.std() / math.sqrt(count) + 0.0005)
        assert f"| {stated:.3f} |" in page


def test_recall_counts_the_proxies_that_hold_the_source() -> None:
    blocks = np.array([[[0, 3, 5], [1, 4, 5]], [[2, 5, -1], [0, 1, 2]]])
    assert held_by(blocks, np.array([3, 2])).tolist() == [0.5, 1.0]
    assert held_by(blocks, np.array([5, 4])).tolist() == [1.0, 0.0]


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Run], Path]:
    """Two seeds of each arm, trained for two steps, and the cache."""
    folder = tmp_path_factory.mktemp("recall_distance")
    runs = []
    for config in (run for run in load_study(STUDY / "study.py") if run.seed < 2):
        short = replace(config.train, steps=2, warmup_steps=1, proxy_warmup_steps=1, batch_size=4, validate_every=2)
        log = replace(config.selections, records=2, documents=5)
        config = replace(config, train=replace(short, checkpoint_every=2), selections=log)
        runs.append(train(config, root=folder / "runs", cache=folder / "data", progress=False, wandb="disabled"))
    return runs, folder / "data"


def test_only_rows_that_ask_and_see_every_distance_are_measured(short_runs: tuple[list[Run], Path]) -> None:
    runs, cache = short_runs
    for run in runs[:3]:
        log = asking(open_selections(run), open_data(run.config.data, cache).validation(0, 5))
        assert log["query"].values.tolist() == [4 * block + 3 for block in range(10, 20)]


def test_answers_under_a_window_are_recalled_where_the_window_is(short_runs: tuple[list[Run], Path]) -> None:
    runs, cache = short_runs
    assert runs[0].config.arm == "mixture"
    batch = open_data(runs[0].config.data, cache).validation(0, 64)
    frame = answers(runs[0], batch, ["recency", "own"])
    window = frame[frame["condition"] == "recency"].set_index("distance")
    assert window["recall"].to_dict() == {1: 1, 2: 1, 3: 1, 8: 0, 9: 0, 10: 0}
    assert window["questions"].sum() == 64 * 10
    # Under its own selection it is the run's model as it is, without anything put in place.
    nats = F.cross_entropy(load_model(runs[0])(batch.inputs).logits.mT, batch.targets, reduction="none").detach()
    apart = torch.arange(80) // 4 - (torch.arange(80) - batch.distance) // 4
    own = frame[frame["condition"] == "own"].set_index("distance")["probability"]
    for distance in (1, 10):
        asked = (batch.targets >= 0) & (apart == distance)
        assert own[distance] == pytest.approx(float(nats[asked].neg().exp().mean()))


@pytest.mark.slow
def test_every_table_and_figure_is_made_from_trained_folders(short_runs: tuple[list[Run], Path]) -> None:
    runs, cache = short_runs
    tables = analyse(runs, cache=cache, documents=5)
    numbers = tables["numbers"]
    wanted = {"mutual_information_excess", "mutual_information_excess_all_rows", "cost_shared", "cost_shift1", "kappa"}
    assert wanted <= set(numbers["metric"])
    assert (numbers.groupby(["arm", "metric"])["seed"].nunique() == 2).all()
    assert tables["test_arms"]["arms"].tolist() == ["mixture - near_only"] * 2 + ["mixture - far_only"] * 2
    assert tables["test_arms"]["control"].notna().all()
    assert tables["agreement_runs"]["points"].tolist() == [6 * len(CONDITIONS)] * 2
    assert set(draw(tables)) == {"endpoints", "agreement", "profiles"}


def test_the_page_states_what_the_committed_tables_give() -> None:
    tables = {path.stem: pd.read_csv(path) for path in (STUDY / "results").glob("*.csv")}
    page = (STUDY / "README.md").read_text()
    found = compare_controls(tables["numbers"])
    for name in ("difference", "p", "p_holm"):
        assert found[name].to_numpy() == pytest.approx(tables["test_arms"][name].to_numpy(), rel=1e-4)
    for row in found.itertuples():
        name = {"mutual_information_excess": "information", "cost_shared": "cost"}[row.endpoint]
        stated = (f"{row.mixture:.3f}", f"{row.control:.3f}", f"{row.difference:.3f} ({row.low:.3f} to {row.high:.3f})")
        line = next(line for line in page.splitlines() if line.startswith(f"| {name}") and row.arms.split()[-1] in line)
        assert all(f"| {number}" in line for number in stated), line
        assert f"{row.p_holm:.2g}" in line
    runs, test = agreement(tables["by_distance"].rename(columns={"probability": "accuracy"}))
    assert len(runs) == 8
    assert f"r = {test['mean_r'].item():.3f} ({test['low'].item():.3f} to {test['high'].item():.3f})" in page
