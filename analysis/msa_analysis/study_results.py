"""What the seeds of a study left (`reduction`), read back and averaged: the raw side of `study_tables`.

The seed is the unit: every interval is Student's t over seeds. Fewer than three seeds have no interval. What is missing
is a row of `not_run`.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from msa_analysis.reduction import NAMES
from msa_analysis.replication import MIN_SEEDS
from msa_analysis.statistics import t_interval

ABOUT = "environment.json"
"""In a folder of a seed's tables: the command that made them, and what it ran on."""


@dataclass(frozen=True)
class Results:
    """The tables of all seeds below each other, each with a column seed, and what each command ran on."""

    tables: dict[str, pd.DataFrame]
    about: tuple[dict[str, Any], ...]

    def table(self, name: str) -> pd.DataFrame:
        """A table of finished runs; empty where no seed has it."""
        frame = self.tables.get(name, pd.DataFrame({"arm": [], "seed": []}))
        return frame[frame["reason"].isna()] if name == "runs" and "reason" in frame else frame

    @property
    def seeds(self) -> list[int]:
        """Those that have tables."""
        return sorted({int(held["seed"]) for held in self.about})

    def only(self, seeds: Collection[int], arms: Sequence[str]) -> Results:
        """Without all other seeds, and with arms in this order, behind what is none of them."""
        place = {arm: number for number, arm in enumerate(arms)}
        tables = {
            name: frame[frame["seed"].isin(list(seeds))].sort_values(
                "arm", key=lambda held: held.map(place).fillna(-1), kind="stable"
            )
            for name, frame in self.tables.items()
        }
        return Results(tables, tuple(held for held in self.about if held["seed"] in seeds))


def load(folder: str | Path) -> Results:
    """Read `seed*/` below a study's results; nothing there is a result without seeds.

    A seed may lie in several folders, one a command, each with some of its arms.

    Raises:
        ValueError: A folder cannot be read, folders of a seed do not share one stem or hold two versions of an arm, or
            some are of a tiny rehearsal and some are not.
    """
    parts: dict[str, list[pd.DataFrame]] = {}
    about: list[dict[str, Any]] = []
    owner: dict[tuple[str, int], tuple[Path, str]] = {}
    for path in sorted(Path(folder).glob(f"seed*/{ABOUT}")):
        try:
            held = json.loads(path.read_text())
            seed = int(held["seed"])
            read = {name: pd.read_csv(file) for name in NAMES if (file := path.parent / f"{name}.csv").exists()}
            runs = read["runs"]
            trained = runs[runs["reason"].isna()] if "reason" in runs else runs
            weights = dict(zip(trained["arm"], trained.get("weights", pd.Series(dtype=str)), strict=True))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.parent}: cannot be read ({error}); run this seed again") from None
        about.append(held)
        for arm, digest in weights.items():
            first, other = owner.setdefault((arm, seed), (path.parent, digest))
            if other != digest:
                raise ValueError(
                    f"{path.parent}: {arm} of seed {seed} is another model than in {first}, so that their arms cannot "
                    "be paired; run the seed's arms by one command, or on equal machines"
                )
        for name, frame in read.items():
            mine = [owner.get((arm, seed), (path.parent, ""))[0] == path.parent for arm in frame["arm"]]
            parts.setdefault(name, []).append(frame[mine].assign(seed=seed))
    if len({bool(held.get("tiny")) for held in about}) > 1:
        raise ValueError(f"{folder}: holds seeds of a tiny rehearsal beside others; keep the two apart")
    return Results({name: pd.concat(frames, ignore_index=True) for name, frames in parts.items()}, tuple(about))


def not_run(results: Results, arms: Iterable[str], seeds: Iterable[int]) -> pd.DataFrame:
    """Columns arm, seed, reason: what the study is to consist of and has no numbers. No other number is theirs."""
    held = {(row.arm, row.seed) for row in results.table("runs").itertuples()}
    told = results.tables.get("runs", pd.DataFrame())
    reasons = {(row.arm, row.seed): row.reason for row in told.itertuples()} if "reason" in told else {}
    rows = [
        {"arm": arm, "seed": seed, "reason": reasons.get((arm, seed), "not run")}
        for seed in seeds
        for arm in arms
        if (arm, seed) not in held
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "reason"])


def over_seeds(frame: pd.DataFrame, keys: Sequence[str], *, value: str = "value") -> pd.DataFrame:
    """Mean of a column over seeds by the keys, with Student's t: keys, value, low, high, seeds, sd, p (against 0)."""
    rows = []
    for names, part in frame.groupby(list(keys), sort=False, dropna=False):
        sample = part.groupby("seed")[value].mean().dropna().to_numpy(float)
        mean, low, high = t_interval(sample) if len(sample) >= MIN_SEEDS else (_mean(sample), np.nan, np.nan)
        enough = len(sample) >= MIN_SEEDS and sample.std() > 0
        p_value = float(stats.ttest_1samp(sample, 0.0).pvalue) if enough else np.nan
        row = dict(zip(keys, names, strict=True)) | {"value": mean, "low": low, "high": high, "seeds": len(sample)}
        rows.append(row | {"sd": sample.std(ddof=1) if len(sample) > 1 else np.nan, "p": p_value})
    return pd.DataFrame(rows, columns=[*keys, "value", "low", "high", "seeds", "sd", "p"])


def _mean(sample: np.ndarray) -> float:
    return float(sample.mean()) if len(sample) else np.nan
