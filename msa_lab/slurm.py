"""Run a study on a Slurm cluster: one job per run, forks after their stem, put back into the queue when preempted.

The sweep submits and watches. It may be stopped: the jobs go on, and the same command watches them again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import NamedTuple

from msa_lab.config import RunConfig
from msa_lab.runs import write_atomically
from msa_lab.slurm_job import TrainingJob, ask_slurm
from msa_lab.slurm_options import SlurmOptions
from msa_lab.sweep import TRAIN, last_line
from msa_lab.sweep_jobs import (
    FINISHED,
    QUEUED,
    RUNNING,
    WAITING,
    Failure,
    Job,
    alone,
    depth,
    failures,
    give_up_on_forks,
    plan,
)
from msa_lab.sweep_progress import Board, open_board

SUBMITTED = "slurm.json"
"""In a run folder: the job that trains it."""
PATIENCE = 20.0
"""Seconds for which a job may be over without a result: shared file systems are late, and so is a requeue."""
LOST = {
    "NODE_FAIL": "its node {node} vanished",
    "BOOT_FAIL": "its node {node} did not start",
    "OUT_OF_MEMORY": "the memory it asked for was not enough; try a larger mem in slurm.more",
    "TIMEOUT": "its time was up before it had saved; try a longer slurm.time",
    "CANCELLED": "it was cancelled",
    "DEADLINE": "its deadline passed",
    "PREEMPTED": "it was preempted, and this cluster does not put jobs back into the queue",
}
"""Why a job is over, by Slurm's state; one that failed by itself has said so in the run's log."""
ENDED = {*LOST, "COMPLETED", "FAILED", "REVOKED", ""}


class Seen(NamedTuple):
    """What Slurm says of a job; an empty state means that it knows none."""

    state: str = ""
    reason: str = ""
    node: str = ""
    name: str = ""


@dataclass
class Ticket:
    """A submitted job."""

    job: Job
    job_id: str
    log_start: int
    node: str = ""
    over_since: float = 0.0


def sweep_on_slurm(
    runs: Sequence[RunConfig],
    options: SlurmOptions | None = None,
    *,
    root: str | Path = "runs",
    cache: str | Path = "data",
    live: bool | None = None,
    poll: float = 5.0,
    patience: float = PATIENCE,
) -> list[Failure]:
    """Submit every run that has not finished and has no job yet, and watch until all are over.

    Args:
        runs: The study. A run whose `train.fork_from` names another one's arm depends on the job of its stem.
        options: What each job asks for.
        root: Folder that holds all studies; the nodes must see it under the same path.
        cache: Folder of prepared corpora, likewise.
        live: A table that moves (the default on a terminal) instead of lines.
        poll: Seconds between two looks.
        patience: Seconds for which a job may be over without a result before its run counts as failed.

    Returns:
        What failed; a failed run stops only its own forks.

    Raises:
        ValueError: submitit or Slurm is not installed, two runs share one folder, or another sweep is at work here.
    """
    _check_installed()
    options = options or SlurmOptions()
    jobs = plan(runs, Path(root).absolute())
    watch = _Watch(jobs, options, Path(root).absolute(), Path(cache).absolute(), patience)
    with alone(jobs), open_board(jobs, len(jobs), live) as board:
        board.say(board.headline())
        for failure in failures(jobs):
            board.say(f"{failure.run.path}: failed: {failure.reason}")
        try:
            watch.submit(board)
            while not all(job.is_over for job in jobs):
                watch.turn(board)
                board.slots = max(1, sum(job.state == RUNNING for job in jobs))
                board.turn()
                if not all(job.is_over for job in jobs):
                    time.sleep(poll)
        except KeyboardInterrupt:
            ids = " ".join(ticket.job_id for ticket in watch.tickets if not ticket.job.is_over)
            board.say(f"the jobs go on without this watch; to end them: scancel {ids}")
            raise
    return failures(jobs)


def _check_installed() -> None:
    if util.find_spec("submitit") is None:
        raise ValueError("executor=slurm: needs submitit; try `pip install 'msa-lab[slurm]'`")
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise ValueError("executor=slurm: there is no sbatch here; start it where jobs are submitted, or leave it out")


class _Watch:
    def __init__(self, jobs: Sequence[Job], options: SlurmOptions, root: Path, cache: Path, patience: float) -> None:
        self.jobs, self.options, self.root, self.cache, self.patience = jobs, options, root, cache, patience
        self.tickets: list[Ticket] = []
        self.silent = ""

    def submit(self, board: Board) -> None:
        """A job for each run that needs one, stems first; a run whose job is still in the queue keeps it."""
        held = {job: _held(job) for job in self.jobs if not job.is_over}
        seen = look([ticket.job_id for ticket in held.values() if ticket])
        for job in sorted(held, key=depth):
            for failed in give_up_on_forks(self.jobs):
                board.stop(failed, failed.failure)
            if job.is_over:
                continue
            ticket = held[job]
            known = seen.get(ticket.job_id, Seen()) if ticket else Seen()
            lives = known.state not in ENDED and known.reason != "DependencyNeverSatisfied"
            if ticket and lives and known.name == _job_name(job):  # a cluster that was set up anew counts from 1 again
                board.say(f"{job.name}: Slurm job {ticket.job_id} is {known.state.lower()} already")
            else:
                try:
                    ticket = self._submit(job)
                except (OSError, ValueError, RuntimeError) as error:
                    job.fail(f"could not be submitted: {_last(str(error))}")
                    board.stop(job, f"failed: {job.failure}")
                    continue
                board.say(f"{job.name}: submitted as Slurm job {ticket.job_id}")
            self.tickets.append(ticket)

    def _submit(self, job: Job) -> Ticket:
        import submitit

        folder = job.run.path
        job.run.write_config(job.config)
        parameters = self.options.parameters() | {"job_name": _job_name(job)}
        stem = next((ticket for ticket in self.tickets if ticket.job is job.stem), None)
        if stem is not None and stem.job.state != FINISHED:
            parameters["dependency"] = f"afterok:{stem.job_id}"
        # How often a job may come back is decided by what it gains each time (see TrainingJob.checkpoint).
        executor = submitit.SlurmExecutor(folder / "slurm", max_num_timeout=10**6)
        executor.update_parameters(**parameters)
        devices = ["--devices", str(self.options.gpus)] if self.options.gpus > 1 else []
        where = ["--root", str(self.root), "--cache", str(self.cache)]
        command = [*TRAIN, "--config", str(folder / "config.yaml"), *where, *devices]
        submitted = executor.submit(TrainingJob(command, str(folder)))
        ticket = Ticket(job, submitted.job_id, _size(folder / "log.txt"))
        write_atomically(folder / SUBMITTED, json.dumps({"job_id": ticket.job_id, "log_start": ticket.log_start}))
        return ticket

    def turn(self, board: Board) -> None:
        """See what has become of the jobs."""
        open_tickets = [ticket for ticket in self.tickets if not ticket.job.is_over]
        try:
            seen = look([ticket.job_id for ticket in open_tickets])
        except OSError as error:
            if str(error) != self.silent:
                board.say(f"Slurm does not answer ({error.strerror}); the jobs may go on, and this watch does")
            self.silent = str(error)
            return
        self.silent = ""
        for ticket in open_tickets:
            self._follow(ticket, seen.get(ticket.job_id, Seen()), board)
        for failed in give_up_on_forks(self.jobs):
            board.stop(failed, failed.failure)

    def _follow(self, ticket: Ticket, seen: Seen, board: Board) -> None:
        job = ticket.job
        if job.state == RUNNING:
            board.update(job)
        if job.run.finished:
            job.state, job.note = FINISHED, ""
            board.stop(job, "finished")
        elif seen.state in ENDED and job.stem is not None and job.stem.state != FINISHED:
            pass  # Slurm cancels the forks of a failed stem; whether it has failed is judged first
        elif seen.state in ENDED:
            ticket.over_since = ticket.over_since or time.monotonic()
            if time.monotonic() - ticket.over_since >= self.patience:
                job.fail(_why(ticket, seen))
                board.stop(job, f"failed: {job.failure}")
        else:
            ticket.over_since = 0.0
            self._show(ticket, seen, board)

    def _show(self, ticket: Ticket, seen: Seen, board: Board) -> None:
        """A job that is not over: running, or in the queue, perhaps again."""
        job = ticket.job
        if seen.state == "RUNNING":
            ticket.node = seen.node
            job.note = f"job {ticket.job_id} on {seen.node}"
            if job.state != RUNNING:
                board.start(job)
        elif seen.state == "PENDING":
            if job.state == RUNNING:
                job.state = QUEUED
                board.stop(job, f"back in the queue ({seen.reason or 'no reason given'}), was on {ticket.node}")
            waits = seen.reason == "Dependency" and job.stem is not None and not job.stem.is_over
            job.state = WAITING if waits else QUEUED
            job.note = f"job {ticket.job_id}: {seen.reason}"
        else:
            job.note = f"job {ticket.job_id}: {seen.state.lower()}"


def look(job_ids: Sequence[str]) -> dict[str, Seen]:
    """What Slurm says of these jobs; those that it has forgotten are missing.

    Raises:
        OSError: The controller does not answer.
    """
    if not job_ids:
        return {}
    rows = ask_slurm("squeue", "--noheader", "--states=all", "--format=%i|%T|%r|%N|%j", f"--jobs={','.join(job_ids)}")
    parts = [row.split("|", 4) for row in rows]
    return {part[0].strip(): Seen(*(text.strip() for text in part[1:])) for part in parts if len(part) == 5}


def _held(job: Job) -> Ticket | None:
    """The job that an earlier sweep submitted for this run."""
    try:
        held = json.loads((job.run.path / SUBMITTED).read_text())
        return Ticket(job, str(held["job_id"]), int(held["log_start"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _job_name(job: Job) -> str:
    return f"{job.run.path.parents[1].name}/{job.run.path.parent.name}/{job.run.path.name}"


def _why(ticket: Ticket, seen: Seen) -> str:
    """Slurm's reason, then what the run or its job said last."""
    folder = ticket.job.run.path
    said = last_line(folder / "log.txt", ticket.log_start)
    said = said or last_line(folder / "slurm" / f"{ticket.job_id}_0_log.err")
    cause = LOST.get(seen.state, "").format(node=seen.node or ticket.node or "?")
    if not seen.state:
        cause = "Slurm does not know it any more"
    if not cause:
        return said or f"Slurm job {ticket.job_id} ended as {seen.state} and said nothing"
    return f"Slurm job {ticket.job_id}: {cause}" + (f"; it said last: {said}" if said else "")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no reason given"
    )
