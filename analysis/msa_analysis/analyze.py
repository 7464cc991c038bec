"""Every metric of a set of selection logs, as tidy tables to keep: what `msa-lab analyze` does.

    measured, skipped = analyze(["runs/demo"])
    write_tables(measured, skipped, Path("tables"))

A table a subject (`TABLES`, then `dynamics`, `emergence` and `summary`), all logs below each other: columns run, arm,
seed, block_size and top_k_blocks, then those of its function in `msa_analysis.specialization`, where each number's
definition, null and interval stand. What is not defined is a row with its reason, never a number.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis import specialization as spec
from msa_analysis.logs import Source, cautions, sources
from msa_analysis.replication import across_seeds, match_proxies
from msa_analysis.tally import tally
from msa_lab.runs import whole

FORMATS = ("csv", "parquet")
TABLES: dict[str, Callable[[xr.Dataset], pd.DataFrame]] = {
    "distance_profile": spec.distance_profile,
    "position_profile": spec.position_profile,
    "recency": spec.recency,
    "sink_share": spec.sink_share,
    "block_recall": spec.block_recall,
    "recall_by_distance": spec.recall_by_distance,
    "recall_by_position": spec.recall_by_position,
    "captured_mass": spec.captured_mass,
    "coverage": spec.coverage,
    "coverage_by_distance": spec.coverage_by_distance,
    "coverage_by_position": spec.coverage_by_position,
    "overlap": lambda sums: spec.tested(spec.overlap(sums, pool=())),
    "fixed_choice": spec.fixed_choice,
    "head_groups": spec.head_groups,
    "group_divergence": spec.group_divergence,
    "churn": spec.churn,
    "never_selected": spec.never_selected,
    "collapse": spec.collapse,
    "proxies": spec.proxies,
}
"""File name to what is in it: a row a proxy (or pair of proxies, or layer) and record; `proxies` is the last record,
with p-values corrected over layers and proxies, as those of `overlap` are over layers and pairs."""


@dataclass(frozen=True)
class Measured:
    """One log and everything that was measured of it."""

    source: Source
    data: xr.Dataset
    sums: xr.Dataset
    tables: dict[str, pd.DataFrame]

    @property
    def last(self) -> int:
        """Step of the last record."""
        return int(self.sums["step"].values[-1])


class Skipped(NamedTuple):
    """A run of which nothing is defined, and why."""

    source: Source
    reason: str


def analyze(paths: Sequence[str | Path]) -> tuple[list[Measured], list[Skipped]]:
    """Measure every run, log and file at or below `paths`; a bar shows how far it is where there is a terminal.

    Raises:
        ValueError: Nothing is there, or nothing of it can be measured.
    """
    found = sources(paths)
    measured, skipped = [], []
    with _bar() as say:
        for place, source in enumerate(found):
            say(f"{source.label} ({place + 1} of {len(found)})", 0, 1)
            try:
                data = source.open()
            except ValueError as error:
                skipped.append(Skipped(source, str(error)))
            else:
                measured.append(_measure(source, data, say))
    if not measured:
        first = skipped[0]
        rest = f" (and {len(skipped) - 1} more like it)" if len(skipped) > 1 else ""
        raise ValueError(f"{first.source.path}: {first.reason}{rest}")
    return measured, skipped


Say = Callable[[str | None, int, int], None]
"""(what is being done or None for the same, parts done, parts in all)"""


def _measure(source: Source, data: xr.Dataset, say: Say) -> Measured:
    records, steps = data.sizes["step"], len(TABLES) + 3
    sums = tally(data, progress=lambda done: say(None, done, records + steps))
    tables = {}
    for name, table in TABLES.items():
        tables[name] = table(sums)
        say(None, records + len(tables), records + steps)
    tables["dynamics"] = spec.dynamics(sums)
    tables["emergence"] = spec.emergence(tables["dynamics"])
    tables["summary"] = spec.summary(sums, history=tables["dynamics"])
    kept = {"block_size": int(data.attrs["block_size"]), "top_k_blocks": int(data.attrs["top_k_blocks"])}
    who = {"run": str(source.path), "arm": source.arm, "seed": source.seed}
    labelled = {name: _prefixed(frame, who | kept) for name, frame in tables.items()}
    return Measured(source, data, sums, labelled)


def _prefixed(frame: pd.DataFrame, labels: dict[str, object]) -> pd.DataFrame:
    left = pd.DataFrame(labels, index=frame.index)
    left["seed"] = left["seed"].astype("Int64")
    return pd.concat([left, frame], axis=1)


def seeds(measured: Sequence[Measured]) -> pd.DataFrame:
    """Means over the seeds of each arm at the last record, with Student's t over seeds: the unit of replication.

    Proxies are matched between seeds within a layer first. Columns arm and those of `replication.across_seeds`; empty
    where no arm has two seeds. Logs of one arm that are not alike give "not defined".
    """
    arms: dict[str, list[Measured]] = {}
    for item in measured:
        if item.source.seed is not None:
            arms.setdefault(item.source.arm, []).append(item)
    parts = [_over_seeds(arm, runs) for arm, runs in arms.items() if len(runs) > 1]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _over_seeds(arm: str, runs: list[Measured]) -> pd.DataFrame:
    unlike = cautions([(item.source.label, item.data) for item in runs])
    if len({item.last for item in runs}) > 1:
        unlike.append("last records are of different steps")
    numbers = [item.source.seed for item in runs]
    if unlike or len(set(numbers)) < len(numbers):
        reason = "; ".join(unlike) or f"seed {max(numbers, key=numbers.count)} is there twice"
        nothing = {"metric": "all", "value": np.nan, "low": np.nan, "high": np.nan, "seeds": 0, "reason": reason}
        return pd.DataFrame([{"arm": arm, **nothing}])
    matched = match_proxies([item.sums.isel(step=[-1]) for item in runs])
    frames = {}
    for seed, sums, item in zip(numbers, matched, runs, strict=True):
        by_proxy = [function(sums) for function in (spec.recency, spec.sink_share, spec.block_recall, spec.coverage)]
        of_layers = item.tables["summary"][["metric", "step", "phase", "layer", "value", "null", "reason"]]
        frames[seed] = pd.concat([*by_proxy, of_layers], ignore_index=True)
    return across_seeds(frames).assign(arm=arm)


def refuse_format(kind: str) -> None:
    """Before long work: raises ValueError where `kind` is unknown or the library for it is missing."""
    if kind not in FORMATS:
        raise ValueError(f"format={kind!r}: must be one of {', '.join(FORMATS)}")
    if kind == "parquet" and not importlib.util.find_spec("pyarrow"):
        raise ValueError("format='parquet': needs the package pyarrow, which is not installed; try csv")


def write_tables(
    measured: Sequence[Measured], skipped: Sequence[Skipped], folder: Path, *, kind: str = "csv"
) -> list[Path]:
    """Each table of all logs as one csv or parquet file, and `runs` with what was read and what was not, and why.

    Tables that an earlier call wrote there in the other format are removed, so that no old number stays beside a new.

    Raises:
        ValueError: `kind` is unknown, or parquet's library is missing.
    """
    refuse_format(kind)
    names = list(measured[0].tables)
    tables = {name: pd.concat([item.tables[name] for item in measured], ignore_index=True) for name in names}
    tables |= {"runs": _read(measured, skipped), "seeds": seeds(measured)}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in tables.items():
        for other in FORMATS:
            if other != kind or table.empty:
                (folder / f"{name}.{other}").unlink(missing_ok=True)
        if table.empty:
            continue
        path = folder / f"{name}.{kind}"
        with whole(path) as file:
            table.to_csv(file, index=False) if kind == "csv" else table.to_parquet(file, index=False)
        written.append(path)
    return written


def _read(measured: Sequence[Measured], skipped: Sequence[Skipped]) -> pd.DataFrame:
    rows = []
    for item in measured:
        sizes = {name: item.data.sizes[name] for name in ("step", "layer", "document", "proxy")}
        rows.append(_row(item.source) | {"reason": ""} | sizes | {"row_share": item.sums.attrs["row_share"]})
    rows += [_row(source) | {"reason": f"not measured: {reason}"} for source, reason in skipped]
    return pd.DataFrame(rows).astype({"seed": "Int64"})


def _row(source: Source) -> dict[str, object]:
    return {"run": str(source.path), "arm": source.arm, "seed": source.seed, "finished": source.finished}


@contextmanager
def _bar() -> Iterator[Say]:
    """A progress bar on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=1)

        def say(what: str | None, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, **({} if what is None else {"description": what}))

        yield say
