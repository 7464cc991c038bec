"""What a sweep would do, and what that costs, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msa_lab.budget import TOLERANCE, Unmatched, table
from msa_lab.config import RunConfig
from msa_lab.cost import Assumed, Cost, Estimate, Speeds, makespan, own_cost
from msa_lab.sweep_jobs import FAILED, FINISHED, Job, plan
from msa_lab.sweep_progress import in_words


class Row(NamedTuple):
    """A run, what it costs from its start or fork to its end, and what of that is left."""

    job: Job
    kind: str
    cost: Cost
    estimate: Estimate
    share_left: float


def rows(jobs: Sequence[Job], assumed: Assumed | None = None) -> list[Row]:
    """One per job, in the study's order."""
    speeds = Speeds(((job.config, job.run) for job in jobs), assumed)
    stems = {job.stem for job in jobs}
    found = []
    for job in jobs:
        kinds = "+".join(dict.fromkeys(job.config.model.attention_kinds))
        role = "stem" if job in stems else "fork" if job.config.train.fork_from else "run"
        done = 1.0 if job.state == FINISHED else _share_done(job)
        found.append(Row(job, f"{kinds} {role}", own_cost(job.config), speeds.estimate(job.config), 1.0 - done))
    return found


def _share_done(job: Job) -> float:
    """Of an unfinished run, by its newest row of metrics; what it must repeat since its checkpoint is not counted."""
    from msa_lab.sweep_progress import Tail

    if not (job.run.path / "last.ckpt").exists():
        return 0.0
    train = job.config.train
    tail = Tail(job.run.path / "metrics.csv", step=train.fork_step)
    tail.read()
    return (tail.step - train.fork_step) / (train.last_step - train.fork_step)


def unmatched(runs: Sequence[RunConfig]) -> list[str]:
    """A line for each arm that was not matched to the largest one's number of parameters."""
    refused = {run.arm for run in runs if isinstance(run, Unmatched)}  # told with the other failures
    return [
        f"{row.arm}: {row.total:,} parameters, {row.percent:+.2f} % from the largest arm; "
        "let runs() return msa_lab.budget.match(...) to compare at equal parameters"
        for row in table(runs)
        if not row.is_stem and row.arm not in refused and abs(row.percent) >= 100 * TOLERANCE
    ]


def format_plan(
    runs: Sequence[RunConfig],
    *,
    root: str | Path = "runs",
    slots: int = 1,
    unit: str = "GPU",
    assumed: Assumed | None = None,
) -> tuple[str, list[str]]:
    """The plan as text, and what stands in the way of it, a line each.

    Args:
        runs: The study.
        root: Folder that holds all studies; what is finished there is not trained again and gives the speeds.
        slots: Runs at a time.
        unit: What a run occupies.
        assumed: A speed that goes before the measured ones.

    Raises:
        ValueError: Two runs share one folder, or the assumed speed makes no sense.
    """
    jobs = plan(runs, root)
    found = rows(jobs, assumed)
    wide = max(len(row.job.name) for row in found)
    kinds = max(len(row.kind) for row in found)
    minutes = f"{unit}-minutes"
    lines = [f"{'run':<{wide}}  {'kind':<{kinds}}  {'state':<9}{'tokens':>16}{'FLOPs':>12}{minutes:>14}"]
    for row in found:
        cells = _cells(row.cost, row.estimate.seconds)
        lines.append(f"{row.job.name:<{wide}}  {row.kind:<{kinds}}  {_state(row):<9}{cells}")
    left = [(row.cost, row.estimate.seconds, row.share_left) for row in found if row.job.state != FAILED]
    for title, parts in (("all", [(row.cost, row.estimate.seconds, 1.0) for row in found]), ("left to do", left)):
        tokens = round(sum(cost.tokens * share for cost, _, share in parts))
        flops = sum(cost.flops * share for cost, _, share in parts)
        seconds = [0.0 if share == 0 else None if s is None else s * share for _, s, share in parts]
        total = sum(s for s in seconds if s is not None) if None not in seconds else None
        lines.append(f"{title:<{wide + kinds + 13}}{_cells(Cost(tokens, flops), total)}")
    lines += ["", *_basis(found, unit), *_ending(found, slots)]
    problems = [f"{job.run.path}: {job.failure}" for job in jobs if job.state == FAILED]
    return "\n".join(lines), [*problems, *unmatched(runs)]


def _state(row: Row) -> str:
    begun = 0.0 < row.share_left < 1.0
    return f"{1 - row.share_left:.0%} done" if begun else {FAILED: "cannot"}.get(row.job.state, row.job.state)


def _cells(cost: Cost, seconds: float | None) -> str:
    minutes = "?" if seconds is None else f"{seconds / 60:,.1f}"
    return f"{cost.tokens:>16,}{cost.flops:>12.3e}{minutes:>14}"


def _basis(found: Sequence[Row], unit: str) -> list[str]:
    """What the minutes rest on."""
    by_basis: dict[str, list[str]] = {}
    for row in found:
        names = by_basis.setdefault(row.estimate.basis, [])
        if row.job.config.arm not in names:
            names.append(row.job.config.arm)
    lines = [f"minutes rest on {basis} ({', '.join(names)})" for basis, names in by_basis.items()]
    if any(row.estimate.seconds is not None for row in found):
        lines.append(f"a run alone on its {unit}; without start, compilation, validation, recording and saving")
    return lines


def _ending(found: Sequence[Row], slots: int) -> list[str]:
    todo = [row for row in found if row.share_left and row.job.state != FAILED]
    seconds = [row.estimate.seconds * row.share_left for row in todo if row.estimate.seconds is not None]
    if not todo or len(seconds) < len(todo):
        return []
    places = {row.job: i for i, row in enumerate(todo)}
    stems = [None if row.job.stem is None else places.get(row.job.stem) for row in todo]
    return [f"about {in_words(makespan(seconds, stems, slots))} with {slots} at a time"]
