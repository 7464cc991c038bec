"""Proves the instrument on planted selections: one command draws, measures, compares, and writes tables and figures.

    python experiments/planted/prove.py            all of it: 1,000 runs a population (minutes on two cores)
    python experiments/planted/prove.py --quick    the same with 100 runs, to see that it works (coarse numbers)
    python experiments/planted/prove.py --only twins "one collapsed"   these populations alone, beside what is stored
    python experiments/planted/prove.py --measures strength            these measures alone, beside what is stored

Documents are drawn from populations whose metrics are known in closed form (answers.py, which shares nothing with the
estimators). Every run of --documents documents is measured as a trained model's log would be, and the estimates are
compared with what was planted. In --out, beside it if not named otherwise:

    bias.csv       mean estimate against the planted value, a row a population and metric
    coverage.csv   how often the 95 % intervals hold the planted value
    null.csv       how often a null that holds is rejected at 5 %
    documents.csv  bias and coverage with few documents; where a number is not defined
    power.csv      how often a strength is found, by documents and by seeds
    tables.md      what is outside its bounds, and the short tables; figures/*.png and *.svg
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from answers import truths
from measure import ALL, CHUNK, Measure, measured, plain_strength, strength
from page import draw_page, write_page
from populations import BLOCK, BLOCKS, Population, draw
from proof import against, by_seeds, exact, rejection
from rich.progress import Progress
from scenarios import FEW, SCENARIOS, STRENGTHS

FEW_DOCUMENTS = (2, 3, 4, 6, 8, 12, 20, 30, 60, 120)
POWER_DOCUMENTS = (6, 12, 24, 60)
POWER_SEEDS = (3, 5, 8)
SEED_DOCUMENTS = (12, 60)
MEASURES = {measure.__name__: measure for measure in ALL}
OTHER_PARTS = ("documents", "power")
"""What is measured beside the populations of SCENARIOS."""
KEYS = dict.fromkeys(("bias", "coverage", "null"), ("scenario", "metric"))
KEYS |= {"documents": ("documents", "metric"), "power": ("lean", "documents", "seeds")}
"""What a row of each table is told by."""


class Job(NamedTuple):
    """Runs of one population."""

    part: str
    name: str
    population: Population
    documents: int
    runs: int
    seed: tuple[int, ...]
    measures: tuple[Measure, ...] = ALL


def jobs(runs: int, documents: int, seed: int) -> Iterator[Job]:
    """All that is to be measured, in chunks; a half and a quarter of the runs where rates may be coarser."""
    for i, (name, scenario) in enumerate(SCENARIOS.items()):
        yield from _chunks(Job("scenarios", name, scenario.population, documents, runs, (seed, 0, i)))
    for count in FEW_DOCUMENTS:
        yield from _chunks(Job("documents", str(count), FEW, count, runs // 2, (seed, 1, count)))
    for i, lean in enumerate(STRENGTHS):
        population = replace(FEW, lean=(lean, -lean), first=None, heads=(), heavy=None)
        for count in POWER_DOCUMENTS:
            yield from _chunks(Job("power", str(i), population, count, runs // 4, (seed, 2, i, count), (strength,)))
        # Over seeds the strength itself differs from run to run.
        seeds = replace(population, seeds=0.5)
        for count in SEED_DOCUMENTS:
            yield from _chunks(Job("seeds", str(i), seeds, count, runs // 2, (seed, 3, i, count), (plain_strength,)))


def some(wanted: Iterable[Job], only: Sequence[str], measures: Sequence[str]) -> Iterator[Job]:
    """The jobs of some populations or OTHER_PARTS, with some of MEASURES; no names: all. Power has its own measure."""
    for job in wanted:
        part = {"scenarios": job.name, "seeds": "power"}.get(job.part, job.part)
        if (not only or part in only) and not (part == "power" and measures):
            yield job._replace(measures=tuple(MEASURES[name] for name in measures)) if measures else job


def _chunks(job: Job) -> Iterator[Job]:
    for start in range(0, job.runs, CHUNK):
        yield job._replace(runs=min(CHUNK, job.runs - start), seed=(*job.seed, start))


def work(job: Job) -> pd.DataFrame:
    """One chunk: its measurements with its labels; runs are numbered over all chunks."""
    frame = measured(job.population, runs=job.runs, documents=job.documents, seed=job.seed, measures=job.measures)
    return frame.assign(part=job.part, name=job.name, documents=job.documents, run=frame["run"] + job.seed[-1])


def run_all(wanted: Sequence[Job], workers: int) -> pd.DataFrame:
    """Every chunk's measurements; a bar shows how far it is."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(workers) as pool, Progress(disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("planted runs", total=sum(job.runs for job in wanted))
        frames = []
        for job, frame in zip(wanted, pool.map(work, wanted), strict=True):
            frames.append(frame)
            bar.advance(task, job.runs)
    return pd.concat(frames, ignore_index=True)


def scenarios(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Bias with coverage, and rejection, by scenario."""
    part = frame[frame["part"] == "scenarios"]
    compared, rejected = [], []
    for name, mine in part.groupby("name", sort=False):
        scenario = SCENARIOS[str(name)]
        compared.append(against(mine, truths(scenario.population)).assign(scenario=name))
        rejected.append(rejection(mine, scenario.nulls).assign(scenario=name))
    return pd.concat(compared, ignore_index=True), pd.concat(rejected, ignore_index=True)


def few(frame: pd.DataFrame) -> pd.DataFrame:
    """Bias and coverage by documents; `defined_share`: runs in which the interval is a number at all."""
    part, truth, tables = frame[frame["part"] == "documents"], truths(FEW), []
    for count, mine in part.groupby("documents"):
        share = mine.groupby("metric")["low"].apply(lambda low: low.notna().mean())
        valued = mine.groupby("metric")["value"].apply(lambda value: value.notna().mean())
        tested = mine.groupby("metric")["p_value"].apply(lambda p: p.notna().mean())
        table = against(mine, truth).set_index("metric")
        known = [name for name in share.index if name in truth]
        table = table.reindex(known).assign(defined_share=share, value_share=valued, p_value_share=tested)
        tables.append(table.reset_index().assign(documents=count))
    return pd.concat(tables, ignore_index=True)


def powers(frame: pd.DataFrame) -> pd.DataFrame:
    """Share of runs (or of groups of seeds) in which a strength is found at 5 %."""
    rows = []
    mutual = frame[frame["metric"] == "mutual_information"]
    for (part, name, count), mine in mutual[mutual["part"].isin(["power", "seeds"])].groupby(
        ["part", "name", "documents"]
    ):
        lean = STRENGTHS[int(name)]
        bits = truths(replace(FEW, lean=(lean, -lean), first=None, heads=()))["mutual_information"]
        about = {"lean": lean, "bits": bits, "documents": count, "runs": len(mine)}
        if part == "power":
            rows.append({**about, "seeds": 1, "power": (mine["p_value"] <= 0.05).mean()})
        else:
            rows += [{**about, "seeds": seeds, "power": by_seeds(mine, seeds)} for seeds in POWER_SEEDS]
    return pd.DataFrame(rows).sort_values(["seeds", "documents", "bits"], ignore_index=True)


def pictures(seed: int) -> dict[str, np.ndarray]:
    """How often each block was chosen, (proxy, query block, key block), of full documents by scenario."""
    rates = {}
    for i, (name, scenario) in enumerate(SCENARIOS.items()):
        population = replace(scenario.population, lengths=(BLOCKS,), heads=())
        ids = draw(population, runs=1, documents=100, rng=np.random.default_rng((seed, 4, i)))["selected"].values[-1, 0]
        chosen = (ids[..., None] == np.arange(BLOCKS)).any(-2)
        rates[name] = chosen.reshape(*chosen.shape[:2], BLOCKS, BLOCK, BLOCKS).mean((0, 3))
    return rates


def tables_of(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables by name, as they are stored; those of which nothing was measured are missing."""
    parts, named = set(frame["part"]), {}
    if "scenarios" in parts:
        compared, rejected = scenarios(frame)
        compared["exact"] = exact(compared)
        about = ["scenario", "metric", "truth"]
        bias = [*about, "mean", "bias", "bias_error", "spread", "half", "relative_bias", "bias_in_halves", "unbiased"]
        cover = [*about, "coverage", "too_high", "too_low", "runs", "defined", "exact", "inside", "outside"]
        named |= {"bias": compared[bias], "coverage": compared[cover], "null": rejected}
    if "documents" in parts:
        named["documents"] = few(frame)
    return named | ({"power": powers(frame)} if "power" in parts else {})


def beside(stored: pd.DataFrame, table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The stored rows, those of `table` in place of the same keys; new ones follow the others of their first key."""
    old, new = stored.set_index(list(keys)), table.set_index(list(keys))
    order = [*old.index, *(key for key in new.index if key not in old.index)]
    both = pd.concat([old[~old.index.isin(new.index)], new]).loc[order].reset_index()[stored.columns]
    rank = {value: i for i, value in enumerate(both[keys[0]].unique())}
    return both.sort_values(keys[0], key=lambda first: first.map(rank), kind="stable")


def write(tables: Mapping[str, pd.DataFrame], out: Path, about: Mapping[str, object], *, keep: bool = False) -> None:
    """CSV files, each row with what it was made by. `keep`: rows that are stored and not made again stay."""
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        path, table = out / f"{name}.csv", table.assign(**about)
        if keep and path.exists():
            table = beside(pd.read_csv(path), table, KEYS[name])
        table.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def read(out: Path) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """The stored tables, and the commands that they were made by."""
    tables = {name: pd.read_csv(out / f"{name}.csv") for name in KEYS}
    commands = list(dict.fromkeys(command for table in tables.values() for command in table["command"]))
    return {name: table.drop(columns=["seed", "command"]) for name, table in tables.items()}, commands


def main() -> None:
    """Parse the command line, draw and measure, write tables and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 runs a population instead of --runs")
    parser.add_argument("--runs", type=int, default=1000, help="runs a population (default 1000)")
    parser.add_argument("--documents", type=int, default=60, help="documents a run (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes (default 2)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the tables")
    names = [*SCENARIOS, *OTHER_PARTS]
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="NAME", help="of " + "; ".join(names))
    parser.add_argument("--measures", nargs="+", default=[], choices=MEASURES, help="these alone (power has its own)")
    args = parser.parse_args()
    start, runs = time.monotonic(), 100 if args.quick else args.runs
    wanted = some(jobs(runs, args.documents, args.seed), args.only, args.measures)
    frame = run_all(list(wanted), args.workers)
    command = f"prove.py --runs {runs} --documents {args.documents} --seed {args.seed}"
    for name in ("only", "measures"):
        command += f" --{name} {shlex.join(chosen)}" if (chosen := getattr(args, name)) else ""
    about = {"seed": args.seed, "command": command}
    write(tables_of(frame), args.out, about, keep=bool(args.only or args.measures))
    tables, commands = read(args.out)
    draw_page(tables, pictures(args.seed), args.out / "figures")
    write_page(tables, args.out / "tables.md", commands)
    print(f"{args.out / 'tables.md'}: {int(frame['run'].size):,} numbers in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
