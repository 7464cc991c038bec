"""What a sweep shows while it runs: a bar per run on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from msa_lab.config import RunConfig
from msa_lab.runs import Run

if TYPE_CHECKING:
    import rich.progress

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
        shown = (("loss", "train/ce", ".3f"), ("KL", "train/kl", ".3f"), ("tokens/s", "tokens_per_second", ",.0f"))
        return "  ".join(f"{word} {self.values[name]:{form}}" for word, name, form in shown if name in self.values)


@dataclass
class Shown:
    """A run on display."""

    tail: Tail
    last_step: int
    started: float
    said: float
    bar: rich.progress.TaskID | None = None


class Progress:
    """Where the runs of a sweep stand."""

    def __init__(self, bars: rich.progress.Progress | None) -> None:
        self.bars = bars
        self.shown: dict[str, Shown] = {}

    def say(self, line: str) -> None:
        if self.bars is None:
            print(line, flush=True)
        else:
            self.bars.console.print(line, highlight=False, markup=False)

    def start(self, name: str, run: Run, config: RunConfig) -> None:
        tail = Tail(run.path / "metrics.csv", step=config.train.fork_step)
        tail.read()
        now = time.monotonic()
        self.shown[name] = shown = Shown(tail, config.train.last_step, now, now)
        if self.bars is None:
            self.say(f"{name}: started, step {tail.step} of {shown.last_step}")
        else:
            shown.bar = self.bars.add_task(name, total=shown.last_step, completed=tail.step, status="starting")

    def update(self, name: str) -> None:
        shown, now = self.shown[name], time.monotonic()
        before = shown.tail.step
        shown.tail.read()
        if self.bars is not None and shown.bar is not None:
            if shown.tail.step != before:
                self.bars.update(shown.bar, completed=shown.tail.step, status=shown.tail.status)
        elif shown.tail.step != before and now - shown.said > SECONDS_BETWEEN_LINES:
            shown.said = now
            self.say(f"{name}: step {shown.tail.step} of {shown.last_step}  {shown.tail.status}")

    def stop(self, name: str, how: str) -> None:
        shown = self.shown.pop(name)
        if self.bars is not None and shown.bar is not None:
            self.bars.remove_task(shown.bar)
        self.say(f"{name}: {how} after {time.monotonic() - shown.started:.0f} s  {shown.tail.status}")


@contextmanager
def open_progress(live: bool | None) -> Iterator[Progress]:
    """Bars where `live` (by default: on a terminal), lines elsewhere."""
    if not (sys.stdout.isatty() if live is None else live):
        yield Progress(None)
        return
    from rich import progress as p

    columns = (
        p.TextColumn("{task.description:<18}", markup=False),
        p.BarColumn(bar_width=24),
        p.MofNCompleteColumn(),
        p.TextColumn("{task.fields[status]}", markup=False),
        p.TimeRemainingColumn(),
    )
    with p.Progress(*columns) as bars:
        yield Progress(bars)
