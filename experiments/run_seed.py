"""One seed of a study in one go: trains its stem and arms on this machine, measures them, and leaves small tables.

    python experiments/run_seed.py proxies --seed 0 --out experiments/proxies/results

The same command goes on where it was stopped or killed: finished runs and measured arms are kept. Checkpoints and
selection logs stay below --root; what is worth carrying away are the CSV files and environment.json in OUT/seed0. With
--arms they go to a folder of their own, such as OUT/seed0-p1-p2, so that a seed can be made by several commands.
`msa-lab report experiments/proxies` makes the study's page from them. With --tiny the same road is gone in minutes on a
CPU, to see it work.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from msa_analysis.reduction import NAMES, Plan, fingerprint, reduce_run
from msa_analysis.study_results import ABOUT
from msa_analysis.wording import duration

from msa_lab.config import RunConfig
from msa_lab.prepare import prepare
from msa_lab.runs import Run, arm_folder, whole, write_atomically
from msa_lab.study import FILE, SeededStudy, read_study
from msa_lab.sweep import sweep

DONE = "done.txt"
"""In a folder of an arm's tables, written last: what they were made from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one seed; returns 0, or 1 where a run or its measuring failed (the rest is there all the same)."""
    args = _arguments(argv)
    try:
        beside = Path(__file__).parent / args.study
        return run_seed(read_study(beside if (beside / FILE).exists() else args.study), args)
    except KeyboardInterrupt:
        print("stopped; the same command goes on where this one ended", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"run_seed: {error}", file=sys.stderr)
        return 2


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="a folder beside this file, such as proxies, or any folder with such a study.py")
    parser.add_argument("--seed", type=int, required=True, help="which seed; each is a stem and its arms")
    parser.add_argument("--out", type=Path, help="where the tables go (STUDY/results; with --tiny, below --root)")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where run folders are kept (runs)")
    parser.add_argument("--cache", type=Path, default=Path("data"), help="where corpora are kept (data)")
    parser.add_argument("--slots", type=int, default=3, help="runs at a time, and arms measured at a time (3)")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="these arms only, and their stems")
    parser.add_argument("--documents", type=int, default=48, help="validation rows of the interventions (48)")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a small model: every part, no result")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python", "experiments/run_seed.py", *(sys.argv[1:] if argv is None else argv)])
    return args


class Stages:
    """What is being done, how long it took, and how long all of it has taken."""

    def __init__(self) -> None:
        self.began = self.now = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.name = ""

    def start(self, name: str, what: str) -> None:
        """End the stage before and say what comes."""
        self.stop()
        self.name, self.now = name, time.monotonic()
        print(f"[{duration(self.now - self.began)}] {name}: {what}", flush=True)

    def stop(self) -> None:
        """End the running stage."""
        if self.name:
            self.seconds[self.name] = round(time.monotonic() - self.now, 1)
        self.name = ""


def run_seed(study: SeededStudy, args: argparse.Namespace) -> int:
    """Prepare, train, measure and collect.

    Raises:
        ValueError: An arm is unknown, or the corpus cannot be made.
    """
    stages = Stages()
    if study.corpus is not None and study.bpe and not args.tiny:
        stages.start("prepare", f"corpus and a tokenizer of {study.bpe:,}, in {args.cache}")
        _prepare(study, args.cache)
    configs = _chosen(study.runs([args.seed], str(args.cache), tiny=args.tiny), args.arms)
    results = args.root / configs[0].study if args.tiny else study.folder
    out = (args.out or results / "results") / "-".join([f"seed{args.seed}", *(args.arms or [])])
    stages.start("train", f"{len(configs)} runs, {args.slots} at a time")
    swept = sweep(configs, root=args.root, cache=args.cache, slots=args.slots)
    arms = {Run.of(config, args.root): config.arm for config in configs}
    failed = {arms[failure.run]: failure.reason for failure in swept}
    finished = [run for config in configs if (run := Run.of(config, args.root)).finished]
    stages.start("measure", f"{len(finished)} runs, {args.slots} at a time")
    plan = Plan(documents=args.documents if not args.tiny else 6)
    work = args.root / configs[0].study / "tables" / f"seed{args.seed}"
    failed |= measure(finished, work, plan, cache=args.cache, slots=args.slots)
    stages.start("collect", str(out))
    done = {run.config.arm for run in finished if _is_done(run, work, plan)}
    collect(configs, done, work, failed, out)
    stages.stop()
    about = {"command": args.command, "tiny": args.tiny, "seed": args.seed, "seconds": stages.seconds}
    about |= {"plan": str(plan), "slots": args.slots, "failed": failed}
    if finished:
        about |= _environment(finished[0])
    write_atomically(out / ABOUT, json.dumps(about, indent=1) + "\n")
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"[{duration(time.monotonic() - stages.began)}] {size / 1e6:.2f} MB of tables: {out}", flush=True)
    for arm, reason in failed.items():
        print(f"failed: {arm}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _prepare(study: SeededStudy, cache: Path) -> None:
    assert study.corpus is not None
    prepare(study.corpus, bpe=study.bpe, cache=cache, report=lambda line: print(f"  {line}", flush=True))


def _chosen(configs: list[RunConfig], arms: Sequence[str] | None) -> list[RunConfig]:
    """Runs of these arms and what they go on from; matched as in the whole study."""
    if not arms:
        return configs
    known = [config.arm for config in configs]
    if unknown := [arm for arm in arms if arm not in known]:
        raise ValueError(f"--arms {unknown[0]}: no such arm; use {', '.join(known)}")
    wanted = [config for config in configs if config.arm in arms]
    sources = {config.train.fork_from for config in wanted}
    return [config for config in configs if config in wanted or arm_folder(config) in sources]


def measure(runs: Sequence[Run], work: Path, plan: Plan, *, cache: Path, slots: int) -> dict[str, str]:
    """Reduce every run to tables in a folder of its arm below `work`, unless they are there; returns what failed."""
    waiting = [run for run in runs if not _is_done(run, work, plan)]
    # What has proxies takes longest: first, so that none is left alone at the end.
    waiting.sort(key=lambda run: -run.config.model.num_proxies * bool(run.config.model.proxy_layers))
    failed, began = {}, time.monotonic()
    if not waiting:
        return failed
    with ThreadPoolExecutor(slots) as threads:
        jobs = {threads.submit(apart, reduce_to, run, work / run.config.arm, plan, cache): run for run in waiting}
        for count, (job, run) in enumerate(_ended(jobs), 1):
            if error := job.exception():
                failed[run.config.arm] = f"measuring: {type(error).__name__}: {' '.join(str(error).split())}"
            rest = (time.monotonic() - began) / count * (len(waiting) - count)
            state = "failed" if error else "measured"
            print(f"  {run.config.arm}: {state} ({count} of {len(waiting)}), {duration(rest)} left", flush=True)
    return failed


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a process of its own: what it holds of the GPU is free when it ends, and a crash takes it alone."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _ended(jobs: dict[Future, Run]) -> Iterator[tuple[Future, Run]]:
    for job in as_completed(jobs):
        yield job, jobs[job]


def _is_done(run: Run, work: Path, plan: Plan) -> bool:
    done = work / run.config.arm / DONE
    return done.exists() and done.read_text() == fingerprint(run, plan)


def reduce_to(run: Run, folder: Path, plan: Plan, cache: Path) -> None:
    """Write the tables of one run; its folder is complete once it holds DONE."""
    rows = run.config.train.validation_batches * run.config.train.batch_size
    tables = reduce_run(run, cache=cache, plan=replace(plan, documents=min(plan.documents, rows)))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, frame in tables.items():
        _write(frame, folder / f"{name}.csv")
    write_atomically(folder / DONE, fingerprint(run, plan))


def collect(configs: Sequence[RunConfig], done: Set[str], work: Path, failed: dict[str, str], out: Path) -> None:
    """One file a table with the arms that are done; `runs` also names those that have no numbers, and why."""
    out.mkdir(parents=True, exist_ok=True)
    held = [work / config.arm for config in configs if config.arm in done]
    for name in NAMES:
        parts = [pd.read_csv(path) for folder in held if (path := folder / f"{name}.csv").exists()]
        if name == "runs":
            missing = [
                {"arm": config.arm, "seed": config.seed, "reason": failed.get(config.arm, "has not been run")}
                for config in configs
                if config.arm not in done
            ]
            parts = [part.assign(reason="") for part in parts] + ([pd.DataFrame(missing)] if missing else [])
        if parts:
            _write(pd.concat(parts, ignore_index=True), out / f"{name}.csv")
        else:
            (out / f"{name}.csv").unlink(missing_ok=True)


def _write(frame: pd.DataFrame, path: Path) -> None:
    with whole(path) as file:
        frame.to_csv(file, index=False, float_format="%.7g")


def _environment(run: Run) -> dict[str, Any]:
    held = run.environment
    names = ("device", "code", "python", "platform", "packages", "cuda", "path", "path_reason", "dense_attention")
    # The hash stands for the names of its packages and files.
    about = {name: value for name, value in held["corpus"].items() if name != "documents_file"}
    corpus = {name: len(value) if isinstance(value, list) else value for name, value in about.items()}
    return {name: held.get(name) for name in names} | {"corpus": corpus}


if __name__ == "__main__":
    sys.exit(main())
