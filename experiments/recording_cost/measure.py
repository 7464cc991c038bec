"""Measures what recording selections adds to training, and writes the numbers beside this file.

    python experiments/recording_cost/measure.py demo        the demo's MSA model and schedule
    python experiments/recording_cost/measure.py default     a RunConfig with no field set: 40 records in 1,000 steps
    python experiments/recording_cost/measure.py flex_30m    the model of experiments/flex_30m, for a GPU

A few steps are trained, half of them in the warm-up phase, once with a record after every fourth and once without any.
What four steps and their record take more than four others, the median of each phase, gives the share at the config's
own schedule. Wall-clock says what a user waits; the processor time of all threads says it on a machine that is busy
with other work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from msa_lab import demo, recorder
from msa_lab.config import RunConfig
from msa_lab.learner import Learner
from msa_lab.recorder import SelectionRecorder
from msa_lab.selections import SelectionStore, record_steps
from msa_lab.train import train

PARTS = {
    "record": (SelectionRecorder, "_record"),
    "observe": (recorder, "observe"),
    "describe": (recorder, "_describe"),
    "append": (SelectionStore, "append"),
    "heads": (SelectionStore, "write_heads"),
}
"""Where a record's time is spent: `describe` lies inside `observe`, and this inside `record`; what writes runs beside
the next step."""
EVERY = 4
"""Steps between records: enough for one to be written meanwhile, as it is in a run."""
CLOCKS = ("wall", "processor")
Clocks = dict[str, float]
Event = tuple[str, int, Clocks]
"""(what, the step that runs, -1 before the first, seconds by clock)"""


def configuration(name: str, cache: Path) -> RunConfig:
    """The run whose schedule is asked about."""
    if name == "default":
        return RunConfig()
    if name == "demo":
        return next(run for run in demo.runs() if run.arm == "msa")
    sys.path.insert(0, str(Path(__file__).parents[1] / name))
    return next(run for run in import_module("study").runs(cache=str(cache)) if run.arm == "msa")


def now() -> Clocks:
    """Both clocks, when the device has done what it was given."""
    # What writes a record in a thread of its own must not disturb a CUDA graph that is being captured in another.
    if torch.cuda.is_available() and threading.current_thread() is threading.main_thread():
        torch.cuda.synchronize()
    return {"wall": time.perf_counter(), "processor": time.process_time()}


@contextmanager
def watched() -> Iterator[list[Event]]:
    """Times every optimizer step and every part of a record made inside."""
    events: list[Event] = []
    kept = {name: getattr(owner, attribute) for name, (owner, attribute) in PARTS.items()}
    start_of_step, state = Learner.on_train_batch_start, {"step": -1}

    def timed(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = now()
            value = kept[name](*args, **kwargs)
            events.append((name, state["step"], {clock: at - before[clock] for clock, at in now().items()}))
            return value

        return call

    def starting(self: Learner, batch: Any, batch_idx: int) -> None:
        state["step"] = self.global_step
        events.append(("step", self.global_step, now()))
        start_of_step(self, batch, batch_idx)

    try:
        Learner.on_train_batch_start = starting
        for name, (owner, attribute) in PARTS.items():
            setattr(owner, attribute, timed(name))
        yield events
    finally:
        Learner.on_train_batch_start = start_of_step
        for name, (owner, attribute) in PARTS.items():
            setattr(owner, attribute, kept[name])


def run(config: RunConfig, steps: int, records: int, cache: Path) -> list[Event]:
    """Train the config for a few steps, the first half of them in the warm-up phase."""
    short = replace(
        config.train,
        steps=steps,
        stop_at=0,
        fork_from="",  # the stem is not needed to know what a step costs
        fork_step=0,
        proxy_warmup_steps=steps // 2,
        warmup_steps=1,
        validate_every=10**6,
        validation_batches=1,
        checkpoint_every=10**6,
    )
    made = replace(config, train=short, selections=replace(config.selections, records=records))
    with tempfile.TemporaryDirectory() as folder, watched() as events:
        train(made, root=folder, cache=cache, progress=False, wandb="disabled")
    return events


def by_phase(events: list[Event], steps: int) -> dict[str, dict[str, Clocks]]:
    """Median seconds of a step and of a record with its parts, by phase; `last` is the record with the single heads'.

    The first two steps of a phase (compilation, caches) and the last step (validation, saving) are left out.
    """
    switch, seconds = steps // 2, {"warmup": {}, "sparse": {}, "last": {}}
    for step, (parts, length) in _each_step(events).items():
        if step % switch >= 2 and length:
            phase = "sparse" if step >= switch else "warmup"
            spent = {clock: value - parts.get("record", {}).get(clock, 0.0) for clock, value in length.items()}
            seconds[phase].setdefault("step", []).append(spent)
        # A record follows its step, so that it sees the model one step further; the first one is of no step.
        phase = "last" if step == steps - 1 else ("sparse" if step + 1 >= switch else "warmup")
        for what, clocks in parts.items():
            seconds[phase].setdefault(what, []).append(clocks)
    return {
        phase: {what: {c: statistics.median(s[c] for s in all_) for c in all_[0]} for what, all_ in parts.items()}
        for phase, parts in seconds.items()
    }


def _each_step(events: list[Event]) -> dict[int, tuple[dict[str, Clocks], Clocks]]:
    """By step: the sums of the parts of its record, and the time until the next step (none for the last)."""
    starts = {step: clocks for what, step, clocks in events if what == "step"}
    found: dict[int, tuple[dict[str, Clocks], Clocks]] = {}
    for step, clocks in starts.items():
        after = starts.get(step + 1)
        found[step] = ({}, {clock: after[clock] - at for clock, at in clocks.items()} if after else {})
    for what, step, clocks in events:
        if what != "step" and step >= 0:
            held = found[step][0].setdefault(what, dict.fromkeys(clocks, 0.0))
            held |= {clock: held[clock] + value for clock, value in clocks.items()}
    return found


def added(events: list[Event], steps: int, plain: dict[str, dict[str, Clocks]]) -> dict[str, Clocks]:
    """By phase, median seconds that a record adds: what the steps from one to the next take more than `plain` ones.

    So the steps count beside which it is written. The last one is waited for and stands alone: with all its parts.
    """
    lengths = {step: length for step, (_, length) in _each_step(events).items()}
    last = by_phase(events, steps)["last"]
    found = {"last": {clock: sum(last[part][clock] for part in ("record", "append", "heads")) for clock in CLOCKS}}
    for phase, first in (("warmup", 0), ("sparse", steps // 2)):
        # A record follows the step before the one that it is named by. The first of a phase meet compilation.
        starts = range(first + 2 * EVERY - 1, first + steps // 2 - EVERY, EVERY)
        step = plain[phase]["step"]
        more = [
            {clock: sum(lengths[start + i][clock] - step[clock] for i in range(EVERY)) for clock in CLOCKS}
            for start in starts
        ]
        found[phase] = {clock: statistics.median(one[clock] for one in more) for clock in CLOCKS}
    return found


def at_schedule(
    config: RunConfig, more: dict[str, Clocks], plain: dict[str, dict[str, Clocks]], clock: str
) -> dict[str, float]:
    """Seconds of the whole run's steps, of what its records add to them, and the second over the first."""
    first, last, switch = config.train.fork_step, config.train.last_step, config.train.sparse_step
    due = record_steps(first, last, config.selections.records)
    warm = min(max(switch - first, 0), last - first)
    training = warm * plain["warmup"]["step"][clock] + (last - first - warm) * plain["sparse"]["step"][clock]
    recording = sum(more["warmup" if step < switch else "sparse"][clock] for step in due[:-1]) + more["last"][clock]
    return {"training_seconds": training, "recording_seconds": recording, "share": recording / training}


def measure(name: str, config: RunConfig, steps: int, cache: Path) -> dict[str, Any]:
    """With and without records: seconds by phase, and the share at the config's schedule."""
    events = run(config, steps, steps // EVERY + 1, cache)
    plain = by_phase(run(config, steps, 0, cache), steps)
    more = added(events, steps, plain)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    packages = {package: version(package) for package in ("torch", "lightning", "zarr", "numpy")}
    return {
        "machine": gpu or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": packages,
        "config": name,
        "schedule": {
            "steps": config.train.last_step - config.train.fork_step,
            "rows_per_step": config.train.batch_size,
            "records": config.selections.records,
            "probe_documents": config.selections.documents,
            "query_stride": config.selections.query_stride,
        },
        "measured_steps": steps,
        "seconds": by_phase(events, steps),
        "seconds_without_records": {phase: plain[phase]["step"] for phase in ("warmup", "sparse")},
        "seconds_that_a_record_adds": more,
        "at_schedule": {clock: at_schedule(config, more, plain, clock) for clock in CLOCKS},
    }


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", choices=("demo", "default", "flex_30m"))
    parser.add_argument("--steps", type=int, default=32, help="optimizer steps to train; a multiple of 8, at least 24")
    parser.add_argument("--records", type=int, help="another number of records than the config's")
    parser.add_argument("--documents", type=int, help="another number of probe documents than the config's")
    parser.add_argument("--query-stride", type=int, help="record every n-th query")
    parser.add_argument("--cache", type=Path, default=Path("data"), help="folder of prepared corpora")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where the numbers go")
    args = parser.parse_args()
    if args.steps < 24 or args.steps % 8:
        parser.error(f"--steps={args.steps}: must be a multiple of 8 and at least 24; try 32")
    config = configuration(args.config, args.cache)
    changes = {name: getattr(args, name) for name in ("records", "documents", "query_stride")}
    changes = {name: value for name, value in changes.items() if value is not None}
    config = replace(config, selections=replace(config.selections, **changes))
    report = measure(args.config, config, args.steps, args.cache)
    options = [f"--{name.replace('_', '-')} {value}" for name, value in {"steps": args.steps, **changes}.items()]
    command = " ".join(["python experiments/recording_cost/measure.py", args.config, *options])
    args.out.mkdir(parents=True, exist_ok=True)
    device = "gpu" if torch.cuda.is_available() else "cpu"
    path = args.out / (
        "_".join([args.config, device, *(f"{name}{value}" for name, value in changes.items())]) + ".json"
    )
    path.write_text(json.dumps({"command": command, **report}, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
