"""What runs inside a Slurm job: one run's training, as a child that is told to save before the job is taken away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from msa_lab.runs import Run
from msa_lab.sweep import LOCK_PATIENCE, SUPERVISED, ending

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

MAX_FRUITLESS = 3
"""Starts in a row that may end without a new checkpoint before the job gives up."""


@dataclass
class TrainingJob:
    """Picklable; submitit calls it on the node, and asks it for its `checkpoint` before the time is up."""

    command: list[str]
    folder: str
    """The run's."""
    started: float = 0.0
    fruitless: int = 0
    asked: int = 0
    """The signal with which Slurm asked for the end."""

    def __call__(self) -> None:
        """Train until the run has finished, or until Slurm wants the node back.

        Raises:
            RuntimeError: The training failed; the run's log.txt says why.
        """
        run = Run(Path(self.folder))
        if run.finished:
            return
        self.started, self.asked = time.time(), 0
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGUSR2, signal.SIGTERM)}
        try:
            self._wait_for_others(run)
            code = self._train()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        requeue = before[signal.SIGUSR2]
        if run.finished:
            return
        if self.asked and callable(requeue):
            if self.asked == signal.SIGTERM and slurm_state(os.environ["SLURM_JOB_ID"]) != "RUNNING":
                sys.exit(1)  # cancelled, or put back into the queue by Slurm itself
            try:
                # submitit's: calls `checkpoint`, puts the job back into the queue and exits.
                requeue(signal.SIGUSR2, None)
            except subprocess.SubprocessError:
                self._note("saved and stopped: Slurm wants the node, and does not take this job back into the queue")
                raise
        reason = ending(run, code)
        if code < 0:  # it had no time to say so itself
            self._note(reason)
        raise RuntimeError(reason)

    def _wait_for_others(self, run: Run) -> None:
        """Let what an earlier start of this job left behind save and end; whoever stays is named by the child."""
        while time.time() - self.started < LOCK_PATIENCE:
            try:
                with run.lock():
                    return
            except ValueError:
                time.sleep(1.0)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = number

    def _train(self) -> int:
        """The exit code of the child."""
        # Lightning must not take the job for one that it manages, with a process per task.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        threads = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE") or "1"
        environment |= {"OMP_NUM_THREADS": threads, SUPERVISED: "1"}
        with (Path(self.folder) / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,  # closes when this process is killed, and the child saves and ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Slurm's signals reach it once, through this process
            )
            told = False
            while process.poll() is None:
                if self.asked and not told:
                    process.send_signal(signal.SIGTERM)
                    told = True
                time.sleep(0.2)
            assert process.stdin is not None
            process.stdin.close()
        return process.returncode

    def checkpoint(self) -> DelayedSubmission | None:
        """What runs when the job is started again; None where it would go round in circles."""
        from submitit.helpers import DelayedSubmission

        saved = Path(self.folder) / "last.ckpt"
        gained = saved.exists() and saved.stat().st_mtime >= self.started
        fruitless = 0 if gained else self.fruitless + 1
        if fruitless >= MAX_FRUITLESS:
            self._note(f"nothing new was saved in {fruitless} starts of this job; give it more slurm.time")
            return None
        return DelayedSubmission(replace(self, fruitless=fruitless))

    def _note(self, line: str) -> None:
        with (Path(self.folder) / "log.txt").open("a") as log:
            log.write(f"{line}\n")


def slurm_state(job_id: str) -> str:
    """RUNNING, COMPLETING, ...; empty where Slurm does not know the job or does not answer."""
    rows = ask_slurm("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job_id}")
    return rows[0].strip() if rows else ""


def ask_slurm(*command: str) -> list[str]:
    """Lines that a command of Slurm prints; none for jobs that it does not know.

    Raises:
        OSError: The controller does not answer.
    """
    done: Any = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise OSError(0, (done.stderr.strip().splitlines() or ["no answer"])[-1], command[0])
    return [line for line in done.stdout.splitlines() if line.strip()]
