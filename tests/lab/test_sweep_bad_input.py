"""What can go wrong in a sweep is named, costs what it must, and is never left out of a statistic in silence."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_child import CHILD, config, fork, stand_in
from tiny import tiny_run, write_corpus

from msa_lab import sweep as sweep_module
from msa_lab.budget import match
from msa_lab.config_model import ModelConfig
from msa_lab.dry_run import format_plan
from msa_lab.runs import Run
from msa_lab.sweep import sweep
from msa_lab.sweep_jobs import alone, left_out, plan
from msa_lab.train import train


@pytest.fixture
def child(tmp_path, monkeypatch):
    return stand_in(tmp_path, monkeypatch)


def test_forks_that_cannot_go_on_are_named_before_their_stem_is_trained(child, tmp_path, capsys):
    stem, other = config("stem", stop_at=200), config("other", stop_at=100)
    good = fork("good", stem)
    Run.of(other, tmp_path).write_config(other)
    changed = {
        "wider": replace(fork("wider", stem), model=replace(stem.model, d_model=64)),
        "faster": replace(fork("faster", stem), train=replace(good.train, lr=1.0)),
        "later": config("later", fork_from=good.train.fork_from, fork_step=150),
        "lost": config("lost", fork_from="s/nothing-01234567", fork_step=200),
        "early": fork("early", other),
        "other_seed": config("other_seed", seed=1, fork_from=good.train.fork_from, fork_step=200),
    }
    failures = sweep([stem, *changed.values(), good], root=tmp_path)
    said = {failure.run.path.parent.name.split("-")[0]: failure.reason for failure in failures}
    assert list(said) == list(changed)
    assert said["wider"].startswith("model.d_model=64: a fork may change attention, proxies and MLP width only")
    assert said["faster"].startswith("train.lr=1.0: a fork may change")
    assert said["later"] == "train.fork_step=150: the stem ends at step 200; try 200"
    assert said["lost"].endswith("no finished run there (seed 0); train the stem first")
    assert said["early"].endswith("seed0 has not finished; train the stem first")
    assert "no finished run there (seed 1)" in said["other_seed"]
    assert Run.of(good, tmp_path).finished
    assert not any((failure.run.path / "log.txt").exists() for failure in failures)
    shown = capsys.readouterr().out
    assert shown.index("seed0: failed: model.d_model=64") < shown.index("stem seed0: started")


def test_an_arm_that_cannot_be_matched_is_named_and_the_others_are_trained(child, tmp_path, capsys):
    stem = replace(config("stem", stop_at=200), model=ModelConfig(attention="dense"))
    forks = [fork("msa", stem), fork("dense", stem), fork("narrow", stem)]
    models = [ModelConfig(), stem.model, ModelConfig(proxy_dim=64, mlp_width=336)]
    runs = match([stem, *(replace(run, model=model) for run, model in zip(forks, models, strict=True))])
    text, problems = format_plan(runs, root=tmp_path)
    assert len(problems) == 1
    failures = sweep(runs, root=tmp_path)
    reason = "model.mlp_width=336: a fork may only be wider than its stem stem; try 352"
    assert [failure.reason for failure in failures] == [reason]
    assert problems[0].endswith(f"{failures[0].run.path.name}: {reason}")
    assert " cannot " in text
    assert all(Run.of(run, tmp_path).finished for run in runs[:3])
    assert f"seed0: failed: {reason}" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"narrow: model\.mlp_width="):
        train(runs[3], root=tmp_path, wandb="disabled")


def test_two_sweeps_on_one_folder_are_refused_and_the_first_is_named(child, tmp_path):
    runs = [config("a")]
    with alone(plan(runs, tmp_path)):
        with pytest.raises(ValueError, match=rf"/s: another sweep \(process {os.getpid()} on .*\) is at work here"):
            sweep(runs, root=tmp_path)
        # Another study in the same root is none of its business.
        assert sweep([replace(runs[0], study="t")], root=tmp_path) == []
    assert sweep(runs, root=tmp_path) == []


def test_a_diverged_seed_is_recorded_and_named_by_whoever_counts_the_others(child, tmp_path):
    child.write_text(CHILD.replace("much ado", "").replace("ValueError: data.path='x'", "step 7: the loss is nan"))
    stem = config("bad_stem", stop_at=200)
    runs = [config("a"), config("a", 1), config("bad"), stem, fork("msa", stem)]
    sweep(runs, root=tmp_path)
    finished = [Run.of(run, tmp_path) for run in runs[:2]]
    assert left_out(finished) == {
        str(Run.of(runs[2], tmp_path).path): "step 7: the loss is nan: no such folder",
        str(Run.of(stem, tmp_path).path): "step 7: the loss is nan: no such folder",
        str(
            Run.of(runs[4], tmp_path).path
        ): "not run, because the run that it forks from (bad_stem seed0) did not finish",
    }
    states = {row["run"].split("-")[0]: row["state"] for row in json.loads((tmp_path / "s/sweep.json").read_text())}
    assert states == {"a": "finished", "bad": "failed", "bad_stem": "failed", "msa": "failed"}
    # Trained later after all, by hand: it is missing no more.
    (Run.of(runs[2], tmp_path).path / "result.json").write_text("{}")
    assert str(Run.of(runs[2], tmp_path).path) not in left_out(finished)


def test_without_a_sweep_unfinished_folders_are_what_is_missing(tmp_path):
    done, begun = (Run.of(run, tmp_path) for run in (config("a"), config("b")))
    for run, held in ((done, config("a")), (begun, config("b"))):
        run.write_config(held)
    (done.path / "result.json").write_text("{}")
    assert left_out([done]) == {str(begun.path): "has not finished"}


def test_a_run_that_is_killed_says_so_and_not_its_last_progress(child, tmp_path):
    child.write_text(CHILD.replace("time.sleep(0.3)", "os.kill(os.getpid(), signal.SIGKILL)"))
    (failure,) = sweep([config("a")], root=tmp_path)
    assert failure.reason == "killed by SIGKILL, as happens when memory runs out; it said last: training a"


@pytest.fixture
def small_disk(tmp_path):
    """A real disk of a quarter of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip("a small disk cannot be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_for_each_run_and_the_same_sweep_goes_on_once_there_is_room(child, small_disk, capsys):
    fill = """if config["arm"] == "big":
    try:
        (folder / "big").write_bytes(bytes(2**20))
    except OSError:
        sys.exit(3)  # and not a word in the log, where there is no room for one
"""
    child.write_text(CHILD.replace('if config["arm"].startswith("bad")', f'{fill}if config["arm"].startswith("bad")'))
    big, after = config("big"), config("after")
    failures = sweep([big, after], root=small_disk, slots=1)
    assert [failure.run for failure in failures] == [Run.of(big, small_disk), Run.of(after, small_disk)]
    assert all("No space left on device" in failure.reason for failure in failures)
    assert str(Run.of(after, small_disk).path) in failures[1].reason
    (Run.of(big, small_disk).path / "big").unlink()
    child.write_text(CHILD)
    assert sweep([big, after], root=small_disk, slots=1) == []


def test_a_study_reads_one_corpus_unless_it_is_told_otherwise(tmp_path):
    texts = write_corpus(tmp_path / "texts")
    where = {"root": tmp_path / "runs", "cache": tmp_path / "data", "progress": False, "wandb": "disabled"}
    short = {"steps": 2, "warmup_steps": 1, "proxy_warmup_steps": 0}
    train(tiny_run(texts, arm="before", model={"attention": "dense"}, train=short), **where)
    (texts / "doc00.txt").write_text("another text " * 500)
    after = tiny_run(texts, arm="after", model={"attention": "dense"}, train=short)
    with pytest.raises(ValueError, match=r"data\.source='text': hashes to (\w+) now, but .*before-.* read") as error:
        train(after, **where)
    told = str(error.value).rpartition("data.expected_hash=")[2]
    assert train(replace(after, data=replace(after.data, expected_hash=told)), **where).finished
    # Another study has its own, and so have runs of this study that read something else on purpose.
    assert train(replace(after, study="other"), **where).finished
    other = tiny_run(texts, arm="longer", model={"attention": "dense"}, train=short, data={"context_length": 64})
    assert train(other, **where).finished


def test_the_same_sweep_is_free_again_when_the_first_was_killed(child, tmp_path):
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from sweep_child import config; from msa_lab.sweep_jobs import alone, plan\n"
        "with alone(plan([config('a')], sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)])
    assert (tmp_path / "s" / ".sweep.lock").exists()
    assert sweep_module.sweep([config("a")], root=tmp_path) == []
