"""A stand-in for training, so that sweeps can be tried in seconds: what it does depends on the arm's name."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from msa_lab import sweep as sweep_module
from msa_lab.config import RunConfig, TrainConfig
from msa_lab.runs import Run, arm_folder

CHILD = textwrap.dedent(
    """
    import json, os, signal, sys, threading, time
    from pathlib import Path

    import yaml

    folder = Path(sys.argv[2]).parent
    config = yaml.safe_load(Path(sys.argv[2]).read_text())
    assert Path(sys.argv[4]) == folder.parents[2]

    def stop(*_):
        (folder / "last.ckpt").write_text("saved")
        sys.exit(130)

    def watch():
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=watch, daemon=True).start()
    with (folder / "times").open("a") as file:
        file.write(f"{time.time()} {os.environ['OMP_NUM_THREADS']} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
    print("training", config["arm"], "again" if (folder / "last.ckpt").exists() else "")
    with (folder / "metrics.csv").open("a") as file:
        file.write("step,name,value\\n10,train/ce,2.5\\n20,train/ce,1.25\\n30,tr")
    if config["arm"].startswith("slow"):
        time.sleep(60)
    if config["arm"].startswith("bad"):
        print("Traceback: much ado")
        print("ValueError: data.path='x': no such folder")
        sys.exit(2)
    time.sleep(0.3)
    (folder / "end").write_text(str(time.time()))
    (folder / "last.ckpt").write_text("end")
    (folder / "result.json").write_text("{}")
    """
)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sweeps start the stand-in from now on, and see no GPU; returns its script."""
    script = folder / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(sweep_module, "TRAIN", (sys.executable, str(script)))
    monkeypatch.setattr(sweep_module, "visible_gpus", list)
    return script


def config(arm: str, seed: int = 0, **train) -> RunConfig:
    """A run of study `s`, of 400 steps."""
    return RunConfig(study="s", arm=arm, seed=seed, train=TrainConfig(**{"steps": 400, **train}))


def fork(arm: str, stem: RunConfig) -> RunConfig:
    """A run that goes on where `stem` ends, at step 200."""
    return config(arm, stem.seed, fork_from=arm_folder(stem), fork_step=200)


def began(run: Run) -> list[float]:
    """When it was started, each time."""
    return [float(line.split()[0]) for line in (run.path / "times").read_text().splitlines()]
