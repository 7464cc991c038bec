"""Run a study on this machine: one process per run, one run per GPU or CPU slot, forks after their stem.

Processes rather than threads: a crash, a CUDA error or a kill takes one run with it, never the others.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from msa_lab.config import RunConfig
from msa_lab.runs import Run
from msa_lab.sweep_jobs import (
    FINISHED,
    QUEUED,
    RUNNING,
    Failure,
    Job,
    alone,
    depth,
    failures,
    give_up_on_forks,
    plan,
)
from msa_lab.sweep_progress import Board, open_board

TRAIN = (sys.executable, "-m", "msa_lab.cli", "train")
SUPERVISED = "MSA_LAB_SUPERVISED"
"""Set for a child: its standard input closes when the sweep is gone, and it must save and end then."""
LOCK_PATIENCE = 60.0
"""Seconds to wait for a process that still holds a run folder, such as a child of a killed sweep that is saving."""
FULL = 2**20
"""Free bytes of a disk below which it counts as full."""


@dataclass
class Child:
    """A job that is being trained."""

    job: Job
    slot: int
    log: IO[bytes]
    log_start: int
    process: subprocess.Popen[bytes]

    @property
    def is_running(self) -> bool:
        """It has not ended yet."""
        return self.process.poll() is None

    def close(self) -> None:
        """Let go of its files."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.log.close()


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
        live: A table that moves (the default on a terminal) instead of lines.

    Returns:
        What failed; a failed run stops only its own forks. Output of each run is in its folder's log.txt.

    Raises:
        ValueError: Two runs share one folder, another sweep is at work in the study's folder, or there is no slot.
        KeyboardInterrupt: After the children were told to save and did.
    """
    gpus = visible_gpus()
    slots = places(slots, gpus, len(runs))
    jobs = plan(runs, root)
    local = _Local(jobs, slots, gpus, ["--root", str(root), "--cache", str(cache)])
    with alone(jobs), open_board(jobs, slots, live) as board:
        board.say(f"{board.headline()}; {min(slots, len(runs))} at a time")
        for failure in failures(jobs):
            board.say(f"{failure.run.path}: failed: {failure.reason}")
        try:
            while not all(job.is_over for job in jobs):
                local.turn(board)
                board.turn()
                time.sleep(0.1)
        except BaseException:
            local.end()
            raise
    return failures(jobs)


def places(slots: int | None, gpus: Sequence[str], runs: int) -> int:
    """Runs at a time: as told, else one per GPU, else one per core."""
    if slots is not None and slots < 1:
        raise ValueError(f"slots={slots}: must be at least 1; leave it out for one per GPU or core")
    return slots or len(gpus) or min(os.cpu_count() or 1, runs)


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may be set to, one GPU each."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return ids[: torch.cuda.device_count()]


class _Local:
    """The children of a sweep on this machine."""

    def __init__(self, jobs: Sequence[Job], slots: int, gpus: Sequence[str], options: Sequence[str]) -> None:
        self.jobs, self.slots, self.gpus, self.options = jobs, slots, gpus, options
        self.children: list[Child] = []
        self.locked_since: dict[Job, float] = {}
        # The number of threads decides the rounding of sums, so it depends on the study and the slots, never on what
        # happens to run or to be finished.
        beside = Counter(depth(job) for job in jobs)
        self.threads = {job: max(1, (os.cpu_count() or 1) // min(slots, beside[depth(job)])) for job in jobs}

    def turn(self, board: Board) -> None:
        """Take leave of those that have ended, and start others in their place."""
        self._collect(board)
        for job in give_up_on_forks(self.jobs):
            board.say(f"{job.name}: {job.failure}")
        free = sorted(set(range(self.slots)) - {child.slot for child in self.children})
        for job in self.jobs:
            if free and job.state == QUEUED and self._is_unlocked(job):
                self._start(job, free, board)

    def _is_unlocked(self, job: Job) -> bool:
        """Nobody else is in the folder; after a while it starts all the same and says who is."""
        try:
            with job.run.lock():
                return True
        except ValueError:
            since = self.locked_since.setdefault(job, time.monotonic())
            return time.monotonic() - since > LOCK_PATIENCE
        except OSError:
            return True

    def _start(self, job: Job, free: list[int], board: Board) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads[job]), SUPERVISED: "1"}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[free[0] % len(self.gpus)]
        try:
            job.run.write_config(job.config)
            log = (job.run.path / "log.txt").open("ab")
        except (OSError, ValueError) as error:
            job.fail(str(error))
            board.stop(job, f"failed: {job.failure}")
            return
        start = log.tell()
        process = subprocess.Popen(
            [*TRAIN, "--config", str(job.run.path / "config.yaml"), *self.options],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the children once, from `end`, and not from the terminal as well
        )
        self.children.append(Child(job, free.pop(0), log, start, process))
        board.start(job)

    def _collect(self, board: Board) -> None:
        for child in list(self.children):
            job = child.job
            board.update(job)
            if child.is_running:
                continue
            self.children.remove(child)
            child.close()
            if job.run.finished:
                job.state = FINISHED
            else:
                job.fail(ending(job.run, child.process.returncode, child.log_start))
            board.stop(job, f"failed: {job.failure}" if job.failure else "finished")

    def end(self) -> None:
        """Tell the children to save and end, and wait for them; a second Ctrl-C stops waiting."""
        try:
            for child in self.children:
                child.process.send_signal(signal.SIGINT)
            for child in self.children:
                child.process.wait()
        except KeyboardInterrupt:
            for child in self.children:
                child.process.kill()
            raise
        finally:
            for child in self.children:
                child.close()
                child.job.state = QUEUED if child.job.state == RUNNING else child.job.state


def ending(run: Run, code: int, log_start: int = 0) -> str:
    """Why the training of `run` ended with this exit code and no result, in one line."""
    said = last_line(run.path / "log.txt", log_start)
    if shutil.disk_usage(run.path).free < FULL and "No space" not in said:
        return f"{run.path}: No space left on device; free some space and give the same command again"
    if code < 0:
        rest = f"; it said last: {said}" if said else ""
        out_of_memory = ", as happens when memory runs out" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{out_of_memory}{rest}"
    return said or f"ended with exit code {code}"


def last_line(path: Path, start: int = 0) -> str:
    """The last line that is not empty, of what stands behind byte `start`."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip().removeprefix("msa-lab: ") for line in reversed(lines) if line.strip()), "")
