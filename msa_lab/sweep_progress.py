"""What a sweep shows while it runs: a table of its runs on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from msa_lab.cost import Speeds, makespan
from msa_lab.sweep_jobs import FAILED, FINISHED, QUEUED, RUNNING, WAITING, Job, write_record

if TYPE_CHECKING:
    import rich.live
    import rich.table

SECONDS_BETWEEN_LINES = 30.0


@dataclass
class Tail:
    """The newest numbers of a growing metrics.csv, reading only what was added."""

    path: Path
    offset: int = 0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)

    def read(self) -> None:
        """Take in whole new lines; a line that is half written waits for its end."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            step, _, rest = line.partition(",")
            name, _, value = rest.rpartition(",")
            try:
                self.values[name] = float(value)
                self.step = max(self.step, int(step))
            except ValueError:
                continue

    @property
    def status(self) -> str:
        """Loss, KL and speed, as far as they are known."""
        shown = (("loss", "train/ce", ".3f"), ("KL", "train/kl", ".3f"), ("tokens/s", "tokens_per_second", ",.0f"))
        return "  ".join(f"{word} {self.values[name]:{form}}" for word, name, form in shown if name in self.values)


@dataclass
class Shown:
    """A running job on display."""

    tail: Tail
    first_step: int
    started: float
    said: float
    moving: float = 0.0
    """When the first new step was seen: from then on it trains, and does not prepare any more."""

    def seconds_left(self, last_step: int) -> float | None:
        """By the steps since it moves; None before there are any."""
        done = self.tail.step - self.first_step
        if not self.moving or done <= 0:
            return None
        return (time.monotonic() - self.moving) / done * (last_step - self.tail.step)


class Board:
    """Where the runs of a sweep stand, and about how long the rest takes."""

    def __init__(self, jobs: Sequence[Job], slots: int, live: rich.live.Live | None) -> None:
        self.jobs, self.slots, self.live = jobs, slots, live
        self.shown: dict[Job, Shown] = {}
        self.counted = self.complained = ""
        self.estimates: dict[Job, float | None] = {}
        self._estimate()

    def say(self, line: str) -> None:
        """One line, above the table where there is one."""
        if self.live is None:
            print(line, flush=True)
        else:
            self.live.console.print(line, highlight=False, markup=False)

    def start(self, job: Job) -> None:
        """It runs from now on."""
        tail = Tail(job.run.path / "metrics.csv", step=job.config.train.fork_step)
        tail.read()
        now = time.monotonic()
        job.state = RUNNING
        self.shown[job] = Shown(tail, tail.step, now, now)
        if self.live is None:
            self.say(f"{job.name}: started, step {tail.step} of {job.config.train.last_step}")

    def update(self, job: Job) -> None:
        """Read how far a running job is."""
        shown, now, last = self.shown[job], time.monotonic(), job.config.train.last_step
        before = shown.tail.step
        shown.tail.read()
        if shown.tail.step == before:
            return
        if not shown.moving:
            shown.first_step, shown.moving = shown.tail.step, now
        if self.live is None and now - shown.said > SECONDS_BETWEEN_LINES:
            shown.said = now
            left = shown.seconds_left(last)
            rest = "" if left is None else f"  left {in_words(left)}"
            self.say(f"{job.name}: step {shown.tail.step} of {last}  {shown.tail.status}{rest}")

    def stop(self, job: Job, how: str) -> None:
        """It runs no more; `how` says why."""
        shown = self.shown.pop(job, None)
        after = f" after {time.monotonic() - shown.started:.0f} s  {shown.tail.status}" if shown else ""
        self.say(f"{job.name}: {how}{after}")
        self._estimate()
        if self.live is None and not all(job.is_over for job in self.jobs):
            self.say(self.headline())

    def turn(self) -> None:
        """Redraw, and record the states where one has changed."""
        if self.live is not None:
            self.live.update(self.table())
        counts = self.counts()
        if counts == self.counted:
            return
        self.counted = counts
        try:
            write_record(self.jobs)
        except OSError as error:  # a full disk: the runs say so themselves, and this must not end the others
            if str(error) != self.complained:
                self.complained = str(error)
                self.say(f"the states of the runs cannot be stored: {error}")

    def counts(self) -> str:
        """How many jobs are in which state."""
        found = Counter(job.state for job in self.jobs)
        return ", ".join(f"{found[s]} {s}" for s in (RUNNING, QUEUED, WAITING, FINISHED, FAILED) if found[s])

    def headline(self) -> str:
        """The states of all, and the time left for all where anything is known of it."""
        left = self.seconds_left()
        return f"{len(self.jobs)} runs: {self.counts()}" + (f"; about {in_words(left)} left" if left else "")

    def seconds_left(self) -> float | None:
        """Until the last run ends, by the speed of those that have trained; None while that is unknown."""
        todo = [job for job in self.jobs if not job.is_over]
        seconds = []
        for job in todo:
            shown = self.shown.get(job)
            left = shown.seconds_left(job.config.train.last_step) if shown else None
            left = self.estimates.get(job) if left is None else left
            if left is None:
                return None
            seconds.append(left)
        places = {job: i for i, job in enumerate(todo)}
        stems = [None if job.stem is None else places.get(job.stem) for job in todo]
        return makespan(seconds, stems, self.slots) if todo else 0.0

    def _estimate(self) -> None:
        with suppress(OSError, ValueError):  # a file that cannot be read costs the estimate, not the sweep
            speeds = Speeds((job.config, job.run) for job in self.jobs)
            self.estimates = {job: speeds.estimate(job.config).seconds for job in self.jobs}

    def table(self) -> rich.table.Table:
        """A row per run, those that move first; as many as fit on the screen."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.headline(), title_justify="left", box=None, pad_edge=False)
        order = [RUNNING, FAILED, QUEUED, WAITING, FINISHED]
        room = max(3, (self.live.console.height if self.live else 40) - 6)
        for title in ("run", "state", "step", "left", ""):
            # Where the screen is narrow only the last column, which may be a long reason, gives way.
            table.add_column(title, justify="right" if title in ("step", "left") else "left", no_wrap=bool(title))
        for job in sorted(self.jobs, key=lambda job: order.index(job.state))[:room]:
            table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in self._cells(job)))
        if len(self.jobs) > room:
            table.add_row(f"and {len(self.jobs) - room} more")
        return table

    def _cells(self, job: Job) -> tuple[str, ...]:
        last, shown = job.config.train.last_step, self.shown.get(job)
        if shown is None:
            waits = f"for {job.stem.name}" if job.state == WAITING and job.stem else job.note
            return job.name, job.state, "", "", job.failure or waits
        left = shown.seconds_left(last)
        words = "" if left is None else in_words(left)
        return (
            job.name,
            job.state,
            f"{shown.tail.step}/{last}",
            words,
            "  ".join(filter(None, (shown.tail.status, job.note))),
        )


def in_words(seconds: float) -> str:
    """A time that is easy to read: 40 s, 12 min, 3.5 h, 2.1 days."""
    for unit, size, above in (("days", 86400.0, 172800.0), ("h", 3600.0, 5400.0), ("min", 60.0, 90.0)):
        if seconds >= above:
            return f"{seconds / size:.0f} {unit}" if unit == "min" else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def open_board(jobs: Sequence[Job], slots: int, live: bool | None) -> Iterator[Board]:
    """A table where `live` (by default: on a terminal), lines elsewhere."""
    if not (sys.stdout.isatty() if live is None else live):
        board = Board(jobs, slots, None)
        try:
            yield board
        finally:
            board.turn()
        return
    from rich.live import Live

    with Live(refresh_per_second=4) as screen:
        board = Board(jobs, slots, screen)
        try:
            yield board
        finally:
            board.turn()
