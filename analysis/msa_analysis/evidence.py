"""Everything that is read from run folders, read once: what tables, figures and the report are made of."""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis import quality, specialization
from msa_analysis.logs import read_log
from msa_analysis.statistics import t_interval
from msa_analysis.tally import tally
from msa_lab.runs import Run, find
from msa_lab.sweep_jobs import left_out


@dataclass(frozen=True)
class Selected:
    """A run's selection log, reduced to the layers whose proxies choose."""

    label: str
    data: xr.Dataset
    sums: xr.Dataset
    summary: pd.DataFrame
    dynamics: pd.DataFrame


@dataclass(frozen=True)
class Evidence:
    """Runs and what they left behind."""

    runs: list[Run]
    table: pd.DataFrame
    selected: dict[str, Selected]
    """By run folder; runs of which nothing can be measured are missing."""
    unmeasured: dict[str, str]
    """By run folder: why nothing could be measured, of runs that have proxies."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By run folder: why it did not finish, of the other runs of the same studies; no number here is theirs."""

    @property
    def labels(self) -> dict[str, str]:
        """Run folder to `arm, seed k`."""
        return {row.run: f"{row.arm}, seed {row.seed}" for row in self.table.itertuples()}  # pyright: ignore[reportAttributeAccessIssue]

    def specialization(self) -> pd.DataFrame:
        """`summary` of every run, with columns arm, seed and run."""
        return self._stacked({path: item.summary for path, item in self.selected.items()})

    def dynamics(self) -> pd.DataFrame:
        """Every record of every run, with columns arm, seed and run."""
        return self._stacked({path: item.dynamics for path, item in self.selected.items()})

    def metrics(self) -> pd.DataFrame:
        """`metrics.csv` of every run, with columns arm, seed and run."""
        return self._stacked({str(run.path): run.metrics for run in self.runs})

    def _stacked(self, frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
        by_run = self.table.set_index("run")
        parts = [
            frame.assign(arm=by_run.loc[path, "arm"], seed=by_run.loc[path, "seed"], run=path)
            for path, frame in frames.items()
        ]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def collect(runs: Evidence | Sequence[Run] | str | Path) -> Evidence:
    """Read the finished runs, or all finished runs below a folder; what was read already is returned as it is.

    Raises:
        ValueError: There is none.
    """
    if isinstance(runs, Evidence):
        return runs
    runs = find(runs) if isinstance(runs, str | Path) else list(runs)
    if not runs:
        raise ValueError("runs=[]: nothing to report; train a run first")
    table = quality.table(runs)
    labels = {row.run: f"{row.arm}, seed {row.seed}" for row in table.itertuples()}  # pyright: ignore[reportAttributeAccessIssue]
    selected: dict[str, Selected] = {}
    unmeasured: dict[str, str] = {}
    for run in runs:
        if run.config.model.proxy_layers:
            try:
                data = read_log(run)
            except ValueError as error:
                unmeasured[str(run.path)] = str(error)
            else:
                selected[str(run.path)] = _selected(data, labels[str(run.path)])
    return Evidence(runs, table, selected, unmeasured, left_out(runs))


def _selected(data: xr.Dataset, label: str) -> Selected:
    sums = tally(data)
    history = specialization.dynamics(sums)
    return Selected(label, data, sums, specialization.summary(sums, history=history), history)


def over_seeds(frame: pd.DataFrame) -> pd.DataFrame:
    """Numbers of whole runs (layer missing) by arm and metric: mean over seeds, t interval, n.

    Columns arm, metric, value, low, high, null, n, over ("seeds", or "documents" with one seed), p_value (of one seed's
    documents), reason.
    """
    columns = ["arm", "metric", "value", "low", "high", "null", "n", "over", "p_value", "reason"]
    if frame.empty:
        return pd.DataFrame(columns=columns)
    rows = []
    for _, part in frame[frame["layer"].isna()].groupby(["arm", "metric"], sort=False):
        row = part.iloc[0].to_dict() | {"n": int(part["documents"].iloc[0]), "over": "documents"}  # pyright: ignore[reportAttributeAccessIssue]
        if len(part) > 1:
            mean, low, high = t_interval(part["value"].to_numpy(float))  # pyright: ignore[reportAttributeAccessIssue]
            reason = "" if np.isfinite(low) else "; ".join(part["reason"][part["reason"] != ""].unique())  # pyright: ignore[reportAttributeAccessIssue]
            row |= {"value": mean, "low": low, "high": high, "n": len(part), "over": "seeds", "reason": reason}
            row |= {"null": part["null"].mean(), "p_value": np.nan}
        rows.append(row)
    return pd.DataFrame(rows)[columns]
