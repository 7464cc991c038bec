"""Trains what is not finished of `recall_distance`, measures every run, and writes its tables and figures.

python experiments/recall_division/measure_distance.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from distance_tables import measure
from draw_distance import draw
from measure_division import arguments, common_tables, trained, write
from named_tests import agreement, compare_arms

from msa_lab.runs import Run
from msa_lab.study import load_study

STUDY = Path(__file__).parents[1] / "recall_distance"
CONTROLS = ("near_only", "far_only")
"""The control of the named test, and the one beside it."""


def analyse(runs: Sequence[Run], *, cache: str | Path, documents: int = 64) -> dict[str, pd.DataFrame]:
    """Every table of the study, by name, from its finished runs."""
    tables = common_tables({run: measure(run, cache=cache, documents=documents) for run in runs})
    tables["test_arms"] = compare_controls(tables["numbers"])
    points = tables["by_distance"].rename(columns={"probability": "accuracy"})
    per_run, tables["test_agreement"] = agreement(points)
    tables["agreement_runs"] = per_run.rename(columns={"bins": "points"})
    return tables


def compare_controls(numbers: pd.DataFrame) -> pd.DataFrame:
    """The named test against each control; columns `arms` and, in the place of the control's name, `control`."""
    parts = [
        compare_arms(numbers, control).rename(columns={control: "control"}).assign(arms=f"mixture - {control}")
        for control in CONTROLS
    ]
    return pd.concat(parts, ignore_index=True)


def main() -> None:
    """Parse the command line."""
    args = arguments(__doc__, STUDY)
    runs = trained(load_study(STUDY / "study.py"), root=args.root, cache=args.cache, slots=args.slots)
    tables = analyse(runs, cache=args.cache)
    write(tables, draw(tables), runs, args.out, "python experiments/recall_division/measure_distance.py")
    for name in ("test_arms", "test_agreement"):
        print(tables[name].to_string(index=False))


if __name__ == "__main__":
    main()
