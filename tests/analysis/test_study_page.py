"""One command a seed, and the page from its tables alone: what failed is named, and what a README quotes is there."""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import run_seed
from msa_analysis.reduction import Plan
from msa_analysis.study_page import is_study, page, read_tables
from msa_analysis.study_results import load, not_run
from tiny import write_corpus

from msa_lab.cli import main
from msa_lab.config import RunConfig
from msa_lab.study import read_study
from msa_lab.sweep_jobs import failures, plan
from msa_lab.train import train

pytestmark = pytest.mark.xdist_group("study_page")  # its seed is trained once, not once a worker

NUMBER = re.compile(r"\d+\.\d{3,}")
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
STUDY = """
from dataclasses import replace
from tiny import tiny_run
from msa_lab.budget import match
from msa_lab.config_model import share_every
from msa_lab.runs import arm_folder

KINDS = {
    "dense": {"attention": "dense"},
    "shared": {"attention": share_every(2, 2)},
    "coarse": {"attention": "msa", "mlp_width": 64, "proxy_dim": 16},
}
ARMS = tuple(KINDS)
SEEDS = (0, 1)
REFERENCE = "dense"
MARGIN = 0.01

def runs(seeds=SEEDS, cache="data", *, tiny=False):
    model = {"attention": "dense", "num_query_heads": 8, "d_model": 64, "mlp_width": 96}
    train = {"steps": 10, "stop_at": 4, "validation_batches": 2, "checkpoint_every": 10}
    stem = tiny_run(CORPUS, arm="stem", model=model, train=train)
    held = replace(stem.train, stop_at=0, fork_from=arm_folder(stem), fork_step=4)
    arms = [replace(stem, arm=name, model=replace(stem.model, **kind), train=held) for name, kind in KINDS.items()]
    return [replace(run, seed=seed) for seed in seeds for run in match([stem, *arms])]
"""


def in_this_process(patch: pytest.MonkeyPatch) -> list[str]:
    """Runs are trained and measured here rather than in processes of their own; returns who is trained."""
    trained = []

    def sweep(configs, *, root, cache, slots):
        jobs = plan(configs, root)
        for job in jobs:
            if not job.is_over:
                trained.append(job.config.arm)
                train(job.config, root=root, cache=cache, progress=False, wandb="disabled")
        return failures(jobs)

    patch.setattr(run_seed, "sweep", sweep)
    patch.setattr(run_seed, "apart", lambda function, *arguments: function(*arguments))
    return trained


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of which seed 0 was run; its run folders are gone."""
    folder = tmp_path_factory.mktemp("study")
    corpus = write_corpus(folder / "corpus")
    (folder / "mine").mkdir()
    (folder / "mine" / "study.py").write_text(f"CORPUS = __import__('pathlib').Path({str(corpus)!r})\n{STUDY}")
    told = [str(folder / "mine"), "--seed", "0", "--root", str(folder / "runs"), "--cache", str(folder / "cache")]
    with pytest.MonkeyPatch.context() as patch:
        trained = in_this_process(patch)
        assert run_seed.main([*told, "--documents", "6"]) == 1  # an arm failed; the rest is there all the same
        assert trained == ["stem", "dense", "shared"]
        patch.setattr(run_seed, "reduce_run", lambda *_, **__: pytest.fail("measured again"))
        assert run_seed.main([*told, "--documents", "6", "--arms", "shared"]) == 0
        assert len(trained) == 3
        assert run_seed.main([*told, "--arms", "shard"]) == 2
    shutil.rmtree(folder / "runs")
    return folder / "mine"


def test_a_seed_leaves_tables_that_name_what_failed(study: Path) -> None:
    results = load(study / "results")
    assert [held["seed"] for held in results.about] == [0, 0]
    assert sorted(path.name for path in (study / "results").iterdir()) == ["seed0", "seed0-shared"]
    runs = results.table("runs")
    assert sorted(runs["arm"]) == ["dense", "shared", "stem"]  # once, though two commands left them
    absent = not_run(results, ("dense", "shared", "coarse"), (0, 1)).set_index(["arm", "seed"])["reason"]
    assert "a fork may only be wider than its stem stem; try 96" in absent["coarse", 0]
    assert absent["coarse", 1] == absent["dense", 1] == absent["shared", 1] == "not run"
    assert len(absent) == 4
    text = "".join(path.read_text() for path in study.glob("results/*/*"))
    assert "documents.ndjson" not in text  # a path of the machine that trained


def test_measuring_that_crashes_is_named_and_its_old_numbers_are_not_taken(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(BrokenProcessPool):
        run_seed.apart(os._exit, 1)
    runs = [SimpleNamespace(config=RunConfig(arm=arm), path=tmp_path) for arm in ("good", "bad")]

    def crash(function, run, folder: Path, *_) -> None:
        if run.config.arm == "bad":
            raise BrokenProcessPool("killed")
        (folder / "runs.csv").write_text("arm,seed\ngood,0\n")

    monkeypatch.setattr(run_seed, "apart", crash)
    monkeypatch.setattr(run_seed, "_is_done", lambda *_: False)
    for run in runs:
        (tmp_path / run.config.arm).mkdir()
        (tmp_path / run.config.arm / "runs.csv").write_text("arm,seed\nold,0\n")
    failed = run_seed.measure(runs, tmp_path, Plan(), cache=tmp_path, slots=1)
    assert failed == {"bad": "measuring: BrokenProcessPool: killed"}
    run_seed.collect([run.config for run in runs], {"good"}, tmp_path, failed, tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "runs.csv").set_index("arm")["reason"]
    assert table.index.tolist() == ["good", "bad"]
    assert table["bad"] == failed["bad"]


def test_what_layers_share_is_replaced_where_it_is_chosen(study: Path) -> None:
    costs = pd.read_csv(study / "results" / "seed0" / "costs.csv")
    assert set(costs["arm"]) == {"shared"}
    assert set(costs["layer"].dropna()) == {0}
    whole = costs[(costs["quantity"] == "loss") & costs["bin"].isna()]
    for rule in ("shared", "recency", "random"):  # the second layer follows the first, so that one layer is all
        values = whole[whole["rule"] == rule]["value"]
        assert len(values) == 2
        assert values.nunique() == 1


def test_the_page_is_made_of_the_tables_alone(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert is_study(study)
    assert main(["report", str(study), "--out", str(tmp_path)]) == 0
    assert str(tmp_path / "results.md") in capsys.readouterr().out
    text = (tmp_path / "results.md").read_text()
    drawn = re.findall(r"!\[.+\]\((figures/\w+\.png)\)", text)
    assert {Path(name).stem for name in drawn} == {"differences", "quality", "costs", "layers", "training", "loss"}
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)
    runs = pd.read_csv(study / "results" / "seed0" / "runs.csv").set_index("arm")["bits_per_byte"]
    assert f"| dense | 1 | {runs['dense']:.4f} |" in text
    apart = f"{runs['shared'] - runs['dense']:+.4f}".replace("-", "\N{MINUS SIGN}")
    assert f"| shared \N{MINUS SIGN} dense | 1 | {apart} |" in text
    assert "2 of 6 runs (3 arms, 2 seeds) have numbers" in text
    assert re.search(r"\| coarse \| 0 \| .*wider than its stem", text)
    assert "nan" not in text
    assert main(["report", str(study), str(tmp_path)]) == 2
    assert "is a study, with a page of its own" in capsys.readouterr().err
    # What a README quotes is compared with these tables; here with one that quotes them right, then wrong.
    number = re.search(r"\| dense \| 1 \| (\d\.\d{4})", text)
    assert number
    shutil.copytree(study / "results", tmp_path / "results")
    shutil.copy(study / "study.py", tmp_path)
    readme = "# Mine\n\nA margin of 0.123.\n\n## Result\n\nDense reaches {}.\n"
    for quote, wrong in ((number[1], []), ("9.8765", ["9.8765: in no table"])):
        (tmp_path / "README.md").write_text(readme.format(quote))
        (tmp_path / "results.md").write_text(text.replace("# Results of mine", f"# Results of {tmp_path.name}"))
        assert unsupported(tmp_path) == wrong
    (tmp_path / "results.md").write_text(text)
    assert unsupported(tmp_path) == ["9.8765: in no table", "results.md: is another one"]


def quoted(readme: str) -> set[str]:
    """Numbers of three decimals or more behind the heading "Result"."""
    return set(NUMBER.findall(readme.partition("\n## Result\n")[2]))


def unsupported(folder: Path) -> list[str]:
    """What of a study's page, figures and README is not what its tables give."""
    text = page(*read_tables(folder))
    readme = quoted((folder / "README.md").read_text())
    wrong = [f"{number}: in no table" for number in sorted(readme - set(NUMBER.findall(text)))]
    wrong += [] if (folder / "results.md").read_text() == text else ["results.md: is another one"]
    named = set(re.findall(r"figures/(\w+\.png)", text))
    return wrong if named == {path.name for path in folder.glob("figures/*.png")} else [*wrong, "figures: are others"]


def test_committed_studies_are_what_their_tables_give() -> None:
    finished = [path.parent for path in sorted(EXPERIMENTS.glob("*/study.py")) if is_study(path.parent)]
    assert [wrong for folder in finished for wrong in unsupported(folder)] == []


def test_findings_quote_what_the_studies_found() -> None:
    findings = (EXPERIMENTS / "README.md").read_text().partition("\n## Findings\n")[2].partition("\n## ")[0]
    texts = re.split(r"^\*\*\[(?=\w+\]\()", findings, flags=re.MULTILINE)[1:]
    assert texts
    for text in texts:
        name = text.partition("]")[0]
        page = EXPERIMENTS / name / ("results.md" if is_study(EXPERIMENTS / name) else "README.md")
        assert set(NUMBER.findall(text)) <= set(NUMBER.findall(page.read_text())), name


@pytest.mark.parametrize("name", ["noise", "proxies", "recall", "budget", "recipe"])
def test_studies_over_seeds_are_what_they_say(name: str) -> None:
    study = read_study(EXPERIMENTS / name)
    runs = study.runs([3], tiny=True)
    assert {run.seed for run in runs} == {3}
    assert {type(run) for run in runs} == {RunConfig}  # every arm was matched
    trained = {run.arm for run in runs}
    assert set(study.arms) <= trained
    assert all("stem" in arm for arm in trained - set(study.arms))
    compared = [run for run in runs if run.arm in study.arms]
    assert len({run.train.last_step * run.train.batch_size * run.data.context_length for run in compared}) == 1
    assert not any(run.hides_sparsity for run in compared)
    assert (EXPERIMENTS / name / "README.md").exists()
