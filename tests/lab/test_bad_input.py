"""Bad input through the command line: one line that names the thing, exit code 2, and nothing finished is lost."""

import json
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tiny import tiny_run, write_corpus

from msa_lab.callbacks import WholeCheckpoints
from msa_lab.cli import main
from msa_lab.config_io import to_dict
from msa_lab.runs import Run
from msa_lab.tracking import MetricsLog
from msa_lab.train import train


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with texts, a prepared cache and one finished run; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("made")
    write_corpus(folder / "texts")
    train(tiny_run(folder / "texts"), root=folder / "runs", cache=folder / "data", progress=False, wandb="disabled")
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    for name in ("runs", "data"):
        shutil.copytree(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(tiny_run(made / "texts"))))
    return tmp_path


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused; gives the one line it says."""

    def refuse(*arguments: str) -> str:
        assert main(arguments) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
        assert len(lines) == 1, lines
        assert lines[0].startswith("msa-lab: ")
        return lines[0]

    return refuse


def training(*more: str) -> tuple[str, ...]:
    return ("train", "--config", "run.yaml", "--wandb", "disabled", *more)


def the_run(place: Path) -> Run:
    return Run(next(place.glob("runs/tiny/msa-*/seed0")))


@contextmanager
def small_disk(size: int):
    """No file can grow beyond `size` bytes, which fails as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "--model.mlp_width", "[]"), "model.mlp_width=(): needs one value, or one per layer"),
        (("train", "--model.attention", "[]"), "model.attention=(): needs one value, or one per layer"),
        (("train", "--model.rope_theta", "0"), "model.rope_theta=0.0: must be above 0; try 10000.0"),
        (("train", "--seed", "-1"), "seed=-1: must be at least 0; try 0"),
        (("train", "--model.num_query_heads", "6", "--model.num_kv_heads", "4"), "try one of 1, 2, 3, 6"),
        (("demo", "--slots", "-1"), "slots=-1: must be at least 1"),
        (("demo", "--slots", "0"), "slots=0: must be at least 1"),
        (("demo", "--seeds", "0", "0"), "2 runs share the folder"),
        (("budget", "--context_length", "0"), "context_length=0: must be at least 1"),
    ],
)
def test_impossible_numbers_are_refused_before_anything_starts(arguments, said, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"model: 5", "model=5: must hold fields"),
        (b"- 1", "bad.yaml: holds no fields of a run"),
        (b"", "bad.yaml: holds no fields of a run"),
        (b"\xff\xfe", "bad.yaml: is not UTF-8"),
        (b"data: {recall: {num_key: 3}}", "data.recall.num_key: unknown key; did you mean data.recall.num_keys?"),
    ],
)
def test_a_config_file_that_is_none_is_named(text, said, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_bytes(text)
    assert said in refused("train", "--config", "bad.yaml")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\nsys.exit(3)", "study.py:2: SystemExit: 3"),
        ("def runs(x):\n    return []", "study.py: TypeError: runs() missing 1 required positional argument"),
        ("def runs():\n    yield 1", "study.py: runs() must return a list of RunConfig"),
        ("def runs():\n    raise RuntimeError('one\\ntwo')", "study.py:2: RuntimeError: one two"),
    ],
)
def test_a_study_that_ends_or_breaks_in_its_own_way_is_named(code, said, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("study.py").write_text(code)
    assert said in refused("sweep", "study.py")


def test_a_corpus_that_cannot_be_used_is_named(place, refused):
    for name, texts in (
        ("empty", [b"", b" "]),
        ("latin", [b"caf\xe9 au lait", b"more"]),
        ("short", [b"hello", b"world"]),
    ):
        (place / name).mkdir()
        for i, text in enumerate(texts):
            (place / name / f"{i}.txt").write_bytes(text)
    assert "data.path='empty': the corpus is empty" in refused(*training("--data.path", "empty"))
    assert "latin/0.txt: not UTF-8 at byte 3; convert it" in refused(*training("--data.path", "latin"))
    assert "the train split holds 6; try 3, or give more text" in refused(*training("--data.path", "short"))
    assert "holds no .txt" in refused(*training("--data.path", "nowhere"))
    told = refused(*training("--data.context_length", "6000"))
    assert "only 0 validation documents are longer than context_length=6000; try a shorter context" in told


def test_damaged_token_files_are_named_with_the_way_out(place, refused):
    folder = next(path.parent for path in place.glob("data/*/header.json"))
    held = (folder / "documents.ndjson").read_bytes()
    (folder / "documents.ndjson").write_bytes(held[:100])
    told = refused(*training("--arm", "other"))
    assert f"{folder.relative_to(place)}/documents.ndjson:1: cannot be used" in told
    assert "start again: it is built anew" in told
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(1001)
    assert "train.bin: holds 1,001 bytes where its header says" in refused(*training("--arm", "other"))
    assert "train.bin: holds 1,001 bytes" in refused("evaluate", str(the_run(place).path))


def test_a_damaged_bigram_file_is_worked_out_again(place):
    kept = next(place.glob("data/*/bigram-*.json"))
    right = json.loads(kept.read_text())
    kept.write_text('{"bits')
    assert main(training("--arm", "other")) == 0
    assert json.loads(kept.read_text()) == right


def test_a_checkpoint_of_another_config_or_a_damaged_one_is_not_taken(place, refused):
    run = the_run(place)
    (run.path / "result.json").unlink()
    last = run.path / "last.ckpt"
    other = torch.load(last, weights_only=True)
    other["hyper_parameters"]["config"]["train"]["lr"] = 0.5
    torch.save(other, last)
    assert "last.ckpt: belongs to another config; move it away" in refused(*training())
    last.write_bytes(last.read_bytes()[:3000])
    assert "last.ckpt: cannot be read (PytorchStreamReader failed reading zip archive" in refused(*training())
    last.write_bytes(b"")
    assert "last.ckpt: cannot be read" in refused(*training())
    last.unlink()
    assert main(training()) == 0


def test_a_second_process_in_the_same_run_folder_is_refused(place, refused):
    run = the_run(place)
    (run.path / "result.json").unlink()
    with run.lock():
        assert "another process is training this run" in refused(*training())
    assert main(training()) == 0


def test_a_finished_run_is_never_written_again(place):
    files = [path for path in the_run(place).path.rglob("*") if path.is_file()]
    before = [path.stat().st_mtime_ns for path in files]
    assert main(training()) == 0
    assert [path.stat().st_mtime_ns for path in files] == before


def test_a_fork_without_its_stem_is_told_what_to_train(place, refused):
    told = refused(*training("--arm", "fork", "--train.fork_from", "tiny/stem-1234", "--train.fork_step", "4"))
    assert "train.fork_from='tiny/stem-1234': no finished run there (seed 0); train the stem first" in told


def test_foreign_and_damaged_folders_are_named_by_evaluate_and_report(place, refused):
    (place / "empty").mkdir()
    assert "empty: is no run folder (it has no config.yaml)" in refused("evaluate", "empty")
    assert "empty: holds no finished run (0 unfinished)" in refused("report", "empty")
    run = the_run(place)
    path = str(run.path.relative_to(place))
    for name, text in (("config.yaml", "foo: 1"), ("config.yaml", "a: ["), ("result.json", '{"study":')):
        held = (run.path / name).read_text()
        (run.path / name).write_text(text)
        assert f"{path}/{name}: " in refused("report", path)
        (run.path / name).write_text(held)
    (run.path / "model.safetensors").write_bytes(b"torn")
    assert "model.safetensors: cannot be loaded" in refused("evaluate", path)
    (run.path / "model.safetensors").unlink()
    assert "no model.safetensors; finish the run" in refused("evaluate", path)
    (run.path / "result.json").unlink()
    assert f"{path}: holds no finished run (1 unfinished)" in refused("report", path)


def test_a_report_that_cannot_be_written_is_named(place, refused, monkeypatch):
    monkeypatch.setattr("msa_analysis.report.pictures", lambda *_: iter(()))
    shutil.rmtree(the_run(place).path / "selections.zarr")  # neither pictures nor selections: they take seconds
    (place / "taken").mkdir()
    assert refused("report", "runs", "--out", "taken") == "msa-lab: taken: Is a directory"
    with small_disk(10_000):
        assert "page.html: File too large; free some space" in refused("report", "runs", "--out", "page.html")
    assert not list(place.glob("*.html")) + list(place.glob(".*.partial"))


@pytest.mark.parametrize("batches", ["0", "-3"])
def test_no_batches_to_evaluate_is_not_taken_for_all(batches, place, refused):
    assert f"batches={batches}: must be at least 1" in refused(
        "evaluate", str(the_run(place).path), "--batches", batches
    )


@pytest.mark.parametrize("devices", ["0", "-1"])
def test_no_devices_to_train_on_is_refused(devices, place, refused):
    assert f"devices={devices}: must be at least 1" in refused(*training("--arm", "other", "--devices", devices))


@pytest.mark.parametrize(
    ("size", "full"),
    [(5_000, "selections.zarr"), (20_000, "last.ckpt"), (150_000, "last.ckpt")],
    ids=["while recording", "while torch closes a checkpoint", "while saving a checkpoint"],
)
def test_a_full_disk_ends_a_run_in_one_line_and_the_same_command_goes_on(size, full, place, refused):
    with small_disk(size):
        told = refused(*training("--arm", "other"))
    assert f"/seed0/{full}: " in told
    assert "File too large" in told
    assert "free some space" in told
    folder = next(place.glob("runs/tiny/other-*/seed0"))
    assert not Run(folder).finished
    assert not list(folder.glob(".*.partial"))
    assert main(training("--arm", "other")) == 0
    again, plain = Run(folder), the_run(place)
    assert again.result["validation_loss"] == plain.result["validation_loss"]
    for name in ("train/ce", "train/kl"):
        ours, theirs = (frame[frame["name"] == name] for frame in (again.metrics, plain.metrics))
        np.testing.assert_array_equal(ours[["step", "value"]], theirs[["step", "value"]])


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path):
    path = tmp_path / "last.ckpt"
    WholeCheckpoints().save_checkpoint({"step": 1}, path)
    with small_disk(20_000), pytest.raises(OSError, match="File too large") as error:
        WholeCheckpoints().save_checkpoint({"weights": torch.zeros(10_000)}, path)
    assert error.value.filename == str(path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_leaves_no_half_result_and_no_nameless_error(tmp_path):
    run = Run(tmp_path)
    with small_disk(100), pytest.raises(OSError, match="File too large") as error:
        run.write_json("result.json", {"documents": list(range(1000))})
    assert error.value.filename == str(tmp_path / "result.json")
    assert not run.finished
    log = MetricsLog(run)
    log.rewind(0)
    log.log_metrics({"train/ce": 1.0}, 1)
    with small_disk(60), pytest.raises(OSError, match="File too large") as error:
        log.log_metrics({"train/ce": 1.0, "train/kl": 2.0, "lr/base": 3.0}, 2)
    assert error.value.filename == str(run.path / "metrics.csv")
    assert run.metrics.iloc[0].tolist() == [1, "train/ce", 1.0]
    log.rewind(1)
    assert len(run.metrics) == 1


def test_a_full_disk_while_the_corpus_is_built_names_the_cache_and_leaves_nothing(place, refused):
    with small_disk(5_000):
        told = refused(*training("--arm", "other", "--cache", "fresh"))
    assert "fresh: File too large; free some space" in told
    assert not [path for path in (place / "fresh").iterdir() if path.name != ".lock"]


def test_what_a_killed_writer_left_is_removed_by_the_next_one(place):
    run = the_run(place)
    (run.path / ".last.ckpt.123.partial").write_text("torn")
    with run.lock():
        assert not list(run.path.glob(".*.partial"))
