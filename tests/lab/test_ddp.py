"""Two processes: the same gradients, KL and weights as one, one folder, and no unused parameters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_run, write_corpus

from msa_lab.runs import Run
from msa_lab.train import train

pytestmark = pytest.mark.xdist_group("ddp")  # its runs are trained once, not once a worker

CHANGES = {
    "dense": {"model": {"attention": "dense"}, "train": {"steps": 6}},
    "no-kl": {"train": {"steps": 6, "kl_weight": 0.0}},
    "msa": {"train": {"steps": 6, "proxy_warmup_steps": 2, "log_every": 3, "accumulate": 2}},
}
SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tiny import tiny_run
from msa_lab.train import train
if __name__ == "__main__":
    (Path({corpus!r}).parent / "imported.json").write_text(json.dumps(sorted(sys.modules)))
    for changes in {changes!r}:
        train(tiny_run(Path({corpus!r}), **changes), root={root!r}, cache={cache!r}, progress=False,
              wandb={wandb!r}, devices=2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the runs of all cases, trained by two processes."""
    return fit_on_two(tmp_path_factory.mktemp("ddp"), list(CHANGES.values()))


def fit_on_two(folder: Path, changes: list[dict], wandb: str = "disabled") -> Path:
    text = SCRIPT.format(
        tests=str(Path(__file__).parent),
        corpus=str(write_corpus(folder / "corpus")),
        changes=changes,
        root=str(folder / "two"),
        cache=str(folder / "cache"),
        wandb=wandb,
    )
    script = folder / "two.py"
    script.write_text(text)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("case", CHANGES)
def test_two_processes_train_the_model_of_one(case: str, folder: Path) -> None:
    config = tiny_run(folder / "corpus", **CHANGES[case])
    two = Run.of(config, folder / "two")
    one = train(config, root=folder / "one", cache=folder / "cache", progress=False, wandb="disabled")
    both = one.metrics.merge(two.metrics, on=["step", "name"], suffixes=("", "_two"))
    both = both[both.name != "tokens_per_second"]
    assert len(both) == sum(one.metrics.name != "tokens_per_second")
    assert both.value_two.to_numpy() == pytest.approx(both.value.to_numpy(), rel=5e-4, abs=1e-6)
    first = both[both.step == 1]
    assert first.value_two.to_numpy() == pytest.approx(first.value.to_numpy(), rel=1e-5, abs=1e-7)
    ours, theirs = (torch.load(r.path / "last.ckpt", weights_only=True)["state_dict"] for r in (two, one))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=2e-4, rtol=2e-3, msg=name)


def test_two_processes_leave_one_folder_a_run(folder: Path) -> None:
    for name in ("result.json", "last.ckpt", "model.safetensors"):
        assert len(list((folder / "two").rglob(name))) == len(CHANGES)
    assert not list(folder.rglob("*.partial"))


def test_importing_what_trains_imports_no_compiler_no_tracker_and_nothing_that_draws(folder: Path) -> None:
    imported = set(json.loads((folder / "imported.json").read_text()))
    assert {"msa_lab.train", "msa_lab.evaluate", "lightning"} <= imported
    assert not imported & {"cutlass", "wandb", "seaborn", "plotly"}


@pytest.mark.slow
def test_two_processes_are_one_run_for_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    folder = fit_on_two(tmp_path, [CHANGES["msa"]], wandb="offline")
    assert len(list(folder.rglob("offline-run-*"))) == 1


def test_only_the_first_process_writes_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A half-written file of another process would be cleared away under its hands by the one that takes the lock.
    def stop(*_: object) -> None:
        raise RuntimeError("about to train")

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("msa_lab.train._trainer", stop)
    config = tiny_run(write_corpus(tmp_path / "corpus"))
    with pytest.raises(RuntimeError, match="about to train"):
        train(config, root=tmp_path / "runs", cache=tmp_path / "cache", progress=False, wandb="disabled", devices=2)
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
