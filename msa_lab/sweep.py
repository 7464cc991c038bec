"""Run a study: one process per run, one run per GPU or CPU slot, forks after their stem.

Processes rather than threads: a crash, a CUDA error or a kill takes one run with it, never the others.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, NamedTuple

from msa_lab.config import RunConfig
from msa_lab.runs import Run, arm_folder
from msa_lab.sweep_progress import Progress, open_progress

TRAIN = (sys.executable, "-m", "msa_lab.cli", "train")
SUPERVISED = "MSA_LAB_SUPERVISED"
"""Set for a child: its standard input closes when the sweep is gone, and it must save and end then."""
LOCK_PATIENCE = 60.0
"""Seconds to wait for a process that still holds a run folder, such as a child of a killed sweep that is saving."""


class Failure(NamedTuple):
    """A run that did not finish, and the reason in one line."""

    run: Run
    reason: str


@dataclass
class Job:
    """One run of the sweep and where it stands."""

    config: RunConfig
    run: Run
    stem: Job | None = None
    threads: int = 1
    slot: int = -1
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None
    log_start: int = 0
    locked_since: float = 0.0
    failure: str = ""

    @property
    def name(self) -> str:
        return f"{self.config.arm} seed{self.config.seed}"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


def sweep(
    runs: Sequence[RunConfig],
    *,
    root: str | Path = "runs",
    cache: str | Path = "data",
    slots: int | None = None,
    live: bool | None = None,
) -> list[Failure]:
    """Train every run that has not finished; resume what was begun.

    Args:
        runs: The study. A run whose `train.fork_from` names another one's arm waits for the run of its seed.
        root: Folder that holds all studies.
        cache: Folder of prepared corpora.
        slots: Runs at a time. Without it, one per GPU (`CUDA_VISIBLE_DEVICES` is respected), or on a machine without
            GPUs one per core. More slots than GPUs share them in turn.
        live: Bars that move (the default on a terminal) instead of lines.

    Returns:
        What failed; a failed run stops only its own forks. Output of each run is in its folder's log.txt.

    Raises:
        ValueError: Two runs share one folder, or there is no slot.
        KeyboardInterrupt: After the children were told to save and did.
    """
    if slots is not None and slots < 1:
        raise ValueError(f"slots={slots}: must be at least 1; leave it out for one per GPU or core")
    options = ["--root", str(root), "--cache", str(cache)]
    gpus = _gpus()
    slots = slots or len(gpus) or min(os.cpu_count() or 1, len(runs))
    jobs = _jobs(runs, Path(root), slots)
    pending = [job for job in jobs if not job.run.finished]
    running: list[Job] = []
    with open_progress(live) as progress:
        progress.say(
            f"{len(jobs)} runs, {len(jobs) - len(pending)} finished already, {min(slots, len(runs))} at a time"
        )
        try:
            while pending or running:
                _collect(running, progress)
                _give_up_on_forks(pending, progress)
                free = sorted(set(range(slots)) - {job.slot for job in running})
                for job in list(pending):
                    if not free or not _is_ready(job):
                        continue
                    pending.remove(job)
                    job.slot = free.pop(0)
                    if _start(job, options, gpus, progress):
                        running.append(job)
                time.sleep(0.1)
        except BaseException:
            _end(running)
            raise
    return [Failure(job.run, job.failure) for job in jobs if job.failure]


def check_folders(runs: Sequence[RunConfig]) -> None:
    """Raise a ValueError where two runs would write into one folder."""
    for folder, count in Counter(str(Run.of(run, ".").path) for run in runs).items():
        if count > 1:
            raise ValueError(f"{count} runs share the folder {folder}; give each its own seed, arm or settings")


def _jobs(runs: Sequence[RunConfig], root: Path, slots: int) -> list[Job]:
    """Jobs with their stems; threads so that the runs that can go together share the cores.

    The number of threads decides the rounding of sums, so it depends on the study and the slots, never on what
    happens to run or to be finished.
    """
    check_folders(runs)
    jobs = [Job(config, Run.of(config, root)) for config in runs]
    stems = {name: job for job in jobs for name in ((arm_folder(job.config), job.config.seed), str(job.run.path))}
    for job in jobs:
        source = job.config.train.fork_from
        job.stem = stems.get((source, job.config.seed)) or stems.get(source)
    beside = Counter(_depth(job) for job in jobs)
    for job in jobs:
        job.threads = max(1, (os.cpu_count() or 1) // min(slots, beside[_depth(job)]))
    return jobs


def _depth(job: Job) -> int:
    return 0 if job.stem is None else 1 + _depth(job.stem)


def _gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may be set to, one GPU each."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return ids[: torch.cuda.device_count()]


def _is_ready(job: Job) -> bool:
    """Stem finished and gone, and nobody else in the folder (after a while it starts all the same and says who is)."""
    if job.stem is not None and (job.stem.is_running or not job.stem.run.finished):
        return False
    try:
        with job.run.lock():
            return True
    except ValueError:
        job.locked_since = job.locked_since or time.monotonic()
        return time.monotonic() - job.locked_since > LOCK_PATIENCE
    except OSError:
        return True


def _start(job: Job, options: list[str], gpus: list[str], progress: Progress) -> bool:
    environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), SUPERVISED: "1"}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[job.slot % len(gpus)]
    try:
        job.run.write_config(job.config)
        job.log = (job.run.path / "log.txt").open("ab")
    except (OSError, ValueError) as error:
        job.failure = str(error)
        progress.say(f"{job.name}: failed: {job.failure}")
        return False
    job.log_start = job.log.tell()
    job.process = subprocess.Popen(
        [*TRAIN, "--config", str(job.run.path / "config.yaml"), *options],
        stdin=subprocess.PIPE,
        stdout=job.log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches the children once, from _end, and not from the terminal as well
    )
    progress.start(job.name, job.run, job.config)
    return True


def _collect(running: list[Job], progress: Progress) -> None:
    """Show how far the running are, and take leave of those that have ended."""
    for job in list(running):
        assert job.process is not None
        assert job.log is not None
        progress.update(job.name)
        if job.is_running:
            continue
        running.remove(job)
        _close(job)
        if not job.run.finished:
            said = _last_line(job.run.path / "log.txt", job.log_start)
            job.failure = said or f"ended with exit code {job.process.returncode}"
        progress.stop(job.name, f"failed: {job.failure}" if job.failure else "finished")


def _give_up_on_forks(pending: list[Job], progress: Progress) -> None:
    for job in list(pending):
        if job.stem is not None and job.stem.failure:
            pending.remove(job)
            job.failure = f"not run, because the run that it forks from ({job.stem.name}) did not finish"
            progress.say(f"{job.name}: {job.failure}")


def _end(running: list[Job]) -> None:
    """Tell the children to save and end, and wait for them; a second Ctrl-C stops waiting."""
    processes = [job.process for job in running if job.process is not None]
    try:
        for process in processes:
            process.send_signal(signal.SIGINT)
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise
    finally:
        for job in running:
            _close(job)


def _close(job: Job) -> None:
    if job.process is not None and job.process.stdin is not None:
        job.process.stdin.close()
    if job.log is not None:
        job.log.close()


def _last_line(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip().removeprefix("msa-lab: ") for line in reversed(lines) if line.strip()), "")


def load_study(path: str | Path) -> list[RunConfig]:
    """The runs of a study file: what its `runs()` returns.

    Raises:
        ValueError: The file is missing, raises, has no `runs()`, returns anything but a list of RunConfig, or puts
            two runs into one folder; names the file, and the line where there is one.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such study file; try experiments/demo/study.py")
    try:
        module = _import(path)
        if not callable(getattr(module, "runs", None)):
            raise ValueError(f"{path}: has no function runs(); a study defines `def runs() -> list[RunConfig]`")
        runs = module.runs()
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.absolute()]
        if not lines and isinstance(error, ValueError):
            raise
        place = f"{path}:{lines[-1]}" if lines else str(path)
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{place}: {kind}{' '.join(str(error).split())}") from error
    if not isinstance(runs, list) or not runs or not all(isinstance(run, RunConfig) for run in runs):
        given = repr(runs) if not runs else f"{type(runs).__name__}"
        raise ValueError(f"{path}: runs() must return a list of RunConfig with at least one, not {given}")
    try:
        check_folders(runs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return runs


def _import(path: Path) -> ModuleType:
    name = f"study_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: is no Python file; a study's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
