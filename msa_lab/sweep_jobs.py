"""The jobs of a sweep: which waits for which, what stands in the way of each, and the record of where they stand."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msa_lab.budget import Unmatched
from msa_lab.config import RunConfig
from msa_lab.runs import Run, arm_folder, write_atomically
from msa_lab.stem import check_fork, stem_of
from msa_lab.study import check_folders

RECORD = "sweep.json"
"""In a study's folder: every run of its newest sweep and where it stands."""
WAITING, QUEUED, RUNNING, FINISHED, FAILED = "waiting", "queued", "running", "finished", "failed"


class Failure(NamedTuple):
    """A run that did not finish, and the reason in one line."""

    run: Run
    reason: str


@dataclass(eq=False)
class Job:
    """One run of the sweep and where it stands."""

    config: RunConfig
    run: Run
    stem: Job | None = None
    state: str = QUEUED
    failure: str = ""
    note: str = ""
    """What the scheduler says of it, where there is one."""

    @property
    def name(self) -> str:
        """As it is shown."""
        return f"{self.config.arm} seed{self.config.seed}"

    @property
    def is_over(self) -> bool:
        """Nothing more will happen to it in this sweep."""
        return self.state in (FINISHED, FAILED)

    def fail(self, reason: str) -> None:
        """It did not and will not finish in this sweep."""
        self.state, self.failure = FAILED, reason


def plan(runs: Sequence[RunConfig], root: str | Path) -> list[Job]:
    """A job per run in the study's order; finished ones are over, and so are those that cannot be trained.

    Raises:
        ValueError: Two runs share one folder.
    """
    check_folders(runs)
    jobs = [Job(config, Run.of(config, root)) for config in runs]
    stems = {name: job for job in jobs for name in ((arm_folder(job.config), job.config.seed), str(job.run.path))}
    for job in jobs:
        source = job.config.train.fork_from
        job.stem = stems.get((source, job.config.seed)) or stems.get(source)
        if job.run.finished:
            job.state = FINISHED
    for job in jobs:
        problem = "" if job.is_over else _problem(job, root)
        if problem:
            job.fail(problem)
        elif not job.is_over and job.stem is not None and job.stem.state != FINISHED:
            job.state = WAITING
    return jobs


def _problem(job: Job, root: str | Path) -> str:
    """Why a run cannot be compared or go on from its stem, told before hours are spent on the stem."""
    if isinstance(job.config, Unmatched):
        return job.config.reason
    if (job.run.path / "last.ckpt").exists():  # it has left its stem behind
        return ""
    try:
        if job.stem is not None and not job.stem.run.finished:
            check_fork(job.config, job.stem.config)
        elif job.config.train.fork_from:
            stem_of(job.config, root)
    except ValueError as error:
        return str(error)
    return ""


def depth(job: Job) -> int:
    """How many runs it goes on from."""
    return 0 if job.stem is None else 1 + depth(job.stem)


def give_up_on_forks(jobs: Sequence[Job]) -> list[Job]:
    """Fail the jobs whose stem failed, and let those whose stem has finished into the queue; returns the failed."""
    given_up = []
    for job in sorted(jobs, key=depth):
        if job.state not in (WAITING, QUEUED) or job.stem is None:
            continue
        if job.stem.state == FAILED:
            job.fail(f"not run, because the run that it forks from ({job.stem.name}) did not finish")
            given_up.append(job)
        elif job.stem.state == FINISHED and job.state == WAITING:
            job.state = QUEUED
    return given_up


def failures(jobs: Sequence[Job]) -> list[Failure]:
    """What failed, in the study's order."""
    return [Failure(job.run, job.failure) for job in jobs if job.state == FAILED]


@contextmanager
def alone(jobs: Sequence[Job]) -> Iterator[None]:
    """Hold the folders of the jobs' studies; freed also when this process is killed.

    Raises:
        ValueError: Another sweep is at work in one of them.
    """
    with ExitStack() as stack:
        for folder in sorted({job.run.path.parents[1] for job in jobs}):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".sweep.lock").open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                holder = file.read().strip() or "an unknown process"
                raise ValueError(
                    f"{folder}: another sweep ({holder}) is at work here; wait for it or stop it first"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


def write_record(jobs: Sequence[Job]) -> None:
    """Store where the jobs stand in their studies' folders, so that what is missing from a report can be named."""
    for folder in {job.run.path.parents[1] for job in jobs}:
        rows = [
            {"run": str(job.run.path.relative_to(folder)), "state": job.state, "reason": job.failure}
            for job in jobs
            if job.run.path.parents[1] == folder
        ]
        write_atomically(folder / RECORD, json.dumps(rows, indent=1) + "\n")


def left_out(runs: Sequence[Run]) -> dict[str, str]:
    """Runs of the same studies that have not finished, by folder, each with the reason.

    A statistic over `runs` is one without them: whoever shows it names them. What a study consists of is what its
    newest sweep trained; without a sweep, every run folder in it.
    """
    missing: dict[str, str] = {}
    for folder in sorted({run.path.parents[1] for run in runs}):
        for run, reason in _study_runs(folder):
            if not run.finished and run not in runs:
                missing[str(run.path)] = reason
    return missing


def _study_runs(folder: Path) -> list[tuple[Run, str]]:
    try:
        rows = json.loads((folder / RECORD).read_text())
        return [(Run(folder / row["run"]), row["reason"] or f"{row['state']} when last seen") for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return [(Run(path.parent), "has not finished") for path in sorted(folder.glob("*/*/config.yaml"))]
