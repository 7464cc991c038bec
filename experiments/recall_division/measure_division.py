"""Trains what is not finished of the study, measures every run, and writes tables and figures to results/.

python experiments/recall_division/measure_division.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
import xarray as xr
from draw_division import draw
from matplotlib.figure import Figure
from msa_analysis.replication import across_seeds, match_proxies
from msa_analysis.specialization import distance_profile, recency
from named_tests import agreement, compare_arms, over_seeds
from run_tables import Measured, measure

from msa_lab.config import RunConfig
from msa_lab.runs import Run
from msa_lab.study import load_study
from msa_lab.sweep import sweep

HERE = Path(__file__).parent


def analyse(runs: Sequence[Run], *, cache: str | Path, documents: int = 64) -> dict[str, pd.DataFrame]:
    """Every table of the study, by name, from its finished runs."""
    tables = common_tables({run: measure(run, cache=cache, documents=documents) for run in runs})
    tables["test_arms"] = compare_arms(tables["numbers"])
    tables["agreement_runs"], tables["test_agreement"] = agreement(tables["by_distance"])
    return tables


def common_tables(measured: Mapping[Run, Measured]) -> dict[str, pd.DataFrame]:
    """The tables that need no test, by name."""
    found = {(run.config.arm, run.config.seed): one for run, one in measured.items()}
    sums = {key: one.sums for key, one in found.items()}
    tables = {
        "runs": pd.DataFrame([summary(run) for run in measured]),
        "numbers": stacked({key: one.numbers for key, one in found.items()}),
        "by_distance": stacked({key: one.by_distance for key, one in found.items()}),
        "costs": stacked({key: one.costs for key, one in found.items()}),
        "matched": pd.concat([matched(sums, arm) for arm in dict.fromkeys(arm for arm, _ in found)]),
    }
    return tables | {"numbers_over_seeds": over_seeds(tables["numbers"], ["arm", "metric"])}


def summary(run: Run) -> dict[str, object]:
    """One row of the table of runs."""
    config, result = run.config, run.result
    names = ("config_hash", "validation_loss", "wall_seconds", "tokens", "path", "corpus_hash")
    found = {name: result[name] for name in names} | {"code": run.environment["code"]}
    return {"arm": config.arm, "seed": config.seed} | found


def stacked(frames: Mapping[tuple[str, int], pd.DataFrame]) -> pd.DataFrame:
    """One table of the tables by (arm, seed)."""
    return pd.concat([frame.assign(arm=arm, seed=seed) for (arm, seed), frame in frames.items()], ignore_index=True)


def matched(found: Mapping[tuple[str, int], xr.Dataset], arm: str) -> pd.DataFrame:
    """Recency and distance profile of each proxy at the end, matched across the arm's seeds: mean over seeds."""
    seeds = [seed for name, seed in found if name == arm]
    sums = [one.isel(step=[-1]) for one in match_proxies([found[arm, seed] for seed in seeds])]
    parts = [
        across_seeds({s: of(one) for s, one in zip(seeds, sums, strict=True)}) for of in (recency, distance_profile)
    ]
    return pd.concat(parts).assign(arm=arm)


def write(
    tables: Mapping[str, pd.DataFrame], figures: Mapping[str, Figure], runs: Iterable[Run], out: Path, command: str
) -> None:
    """Tables as CSV, the figures, and what was run on what."""
    from msa_analysis.figures import save

    out.mkdir(parents=True, exist_ok=True)
    for name, frame in tables.items():
        frame.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    environment = next(iter(runs)).environment
    held = {
        name: environment[name]
        for name in ("device", "python", "packages", "path", "path_reason", "code")
        if name in environment
    }
    where = {
        "command": command,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    (out / "environment.json").write_text(json.dumps(where | held, indent=2) + "\n")
    for name, figure in figures.items():
        save(figure, out / f"{name}.png", dpi=110)
        save(figure, out / f"{name}.svg", kind="svg")


def trained(study: Sequence[RunConfig], *, root: Path, cache: str | Path, slots: int) -> list[Run]:
    """The study's runs, trained where they were not finished.

    Raises:
        SystemExit: A run failed.
    """
    failures = sweep(study, root=root, cache=cache, slots=slots)
    if failures:
        raise SystemExit(f"{len(failures)} runs failed; {root}/{study[0].study} holds their logs")
    return [Run.of(config, root) for config in study]


def arguments(description: str | None, here: Path) -> argparse.Namespace:
    """The command line of a study whose folder is `here`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--cache", type=Path, default=Path("data"), help="where corpora are kept")
    parser.add_argument("--out", type=Path, default=here / "results", help="where tables and figures go")
    parser.add_argument("--slots", type=int, default=1, help="runs trained at a time")
    return parser.parse_args()


def main() -> None:
    """Parse the command line."""
    args = arguments(__doc__, HERE)
    runs = trained(load_study(HERE / "study.py"), root=args.root, cache=args.cache, slots=args.slots)
    tables = analyse(runs, cache=args.cache)
    write(tables, draw(tables), runs, args.out, "python experiments/recall_division/measure_division.py")
    for name in ("test_arms", "test_agreement"):
        print(tables[name].to_string(index=False))


if __name__ == "__main__":
    main()
