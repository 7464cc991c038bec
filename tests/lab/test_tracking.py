"""metrics.csv is the record: nothing lost, nothing twice; wandb mirrors it."""

import time
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_run, write_corpus

from msa_lab.runs import Run
from msa_lab.tracking import MetricsLog, wandb_mirror
from msa_lab.train import train


def log_in(folder: Path) -> MetricsLog:
    log = MetricsLog(Run(folder))
    log.rewind(0)
    return log


def test_rewinding_leaves_one_row_per_step_and_name(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for step in range(1, 16):
        log.log_metrics({"loss": float(step), "kl": 0.0}, step)
    log.rewind(10)
    for step in range(11, 21):
        log.log_metrics({"loss": 100.0 + step, "kl": 0.5}, step)
    frame = Run(tmp_path).metrics
    assert not frame.duplicated(["step", "name"]).any()
    assert sorted(frame.step.unique()) == list(range(1, 21))
    loss = frame[frame.name == "loss"].set_index("step").value
    assert loss[10] == 10.0
    assert loss[15] == 115.0


def test_a_zero_is_logged_as_zero_and_floats_survive_exactly(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.log_metrics({"zero": 0.0, "third": 1 / 3, "tiny": 1e-300}, 1)
    values = Run(tmp_path).metrics.set_index("name").value
    assert values["zero"] == 0.0
    assert values["third"] == 1 / 3
    assert values["tiny"] == 1e-300


@pytest.mark.parametrize("torn", ["16,lo", "16,loss", "16,loss,", "16,loss,-", "16,loss,1.2", "1"])
def test_a_torn_last_line_is_left_out_and_removed(torn: str, tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.log_metrics({"loss": 1.0}, 15)
    with log.path.open("a") as file:
        file.write(torn)
    assert Run(tmp_path).metrics.step.tolist() == [15]
    log.rewind(15)
    log.log_metrics({"loss": 2.0}, 16)
    assert Run(tmp_path).metrics.value.tolist() == [1.0, 2.0]


def test_a_resumed_run_keeps_its_identity_and_another_one_gets_its_own(tmp_path: Path) -> None:
    config = tiny_run(write_corpus(tmp_path / "corpus"))
    options = {"cache": tmp_path / "cache", "progress": False, "wandb": "disabled"}
    runs = [train(config, root=tmp_path / name, **options) for name in ("first", "second")]
    identities = [run.environment["wandb_id"] for run in runs]
    assert identities[0] != identities[1]
    (runs[0].path / "result.json").unlink()
    assert train(config, root=tmp_path / "first", **options).environment["wandb_id"] == identities[0]


def test_wandb_offline_gets_every_row_and_a_second_start_goes_on_under_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    run = Run(tmp_path / "tiny" / "msa-01234567" / "seed0")
    run.path.mkdir(parents=True)
    for last in (20, 30):
        log = MetricsLog(run, wandb_mirror(run, {"study": "tiny"}, "offline", "abcd1234"))
        log.rewind(10)
        for step in range(last - 19, last + 1):
            log.log_metrics({"train/ce": 1000.25 + step}, step)
            log.log_metrics({"validation/loss": 2000.75 + step}, step)
        log.log_image("selections", np.eye(8), last)
        log.finalize("success")
        time.sleep(1.1)  # wandb names its folders by the second, and writes their last rows just after it has finished
    records = sorted((run.path / "wandb").glob("offline-run-*-abcd1234/run-abcd1234.wandb"))
    for record, last in zip(records, (20, 30), strict=True):
        held = record.read_bytes()
        for step in range(last - 19, last + 1):
            assert str(1000.25 + step).encode() in held
            assert str(2000.75 + step).encode() in held
        assert list(record.parent.glob("files/media/images/selections_*.png"))
    assert "must only increase" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_run_that_is_started_again_in_its_folder_goes_on_with_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    config = tiny_run(write_corpus(tmp_path / "corpus"))
    options = {"root": tmp_path / "runs", "cache": tmp_path / "cache", "progress": False, "wandb": "offline"}
    run = train(config, **options)
    first, held = run.environment["wandb_id"], run.metrics
    assert train(config, **options).environment["wandb_id"] == first
    assert len(list((run.path / "wandb").glob("offline-run-*"))) == 1, "a finished run is not started again"
    (run.path / "result.json").unlink()
    (run.path / "last.ckpt").unlink()
    time.sleep(1.1)  # wandb names its folders by the second
    assert train(config, **options).environment["wandb_id"] == first
    assert len(list((run.path / "wandb").glob(f"offline-run-*-{first}"))) == 2
    again = run.metrics
    assert not again.duplicated(["step", "name"]).any()
    timed = ["tokens_per_second", "mfu"]
    assert again[~again.name.isin(timed)].equals(held[~held.name.isin(timed)])


@pytest.mark.slow
def test_wandb_offline_mirrors_every_step_under_one_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    config = tiny_run(write_corpus(tmp_path / "corpus"), train={"accumulate": 2})
    run = train(config, root=tmp_path / "runs", cache=tmp_path / "cache", progress=False, wandb="offline")
    assert list((run.path / "wandb").glob(f"offline-run-*-{run.environment['wandb_id']}"))
    other = train(config, root=tmp_path / "again", cache=tmp_path / "cache", progress=False, wandb="offline")
    assert other.environment["wandb_id"] != run.environment["wandb_id"]
    assert "must only increase" not in "".join(capfd.readouterr())
