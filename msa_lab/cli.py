"""The command line: `msa-lab COMMAND`. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from msa_lab.cli_arguments import explain, make_parser
from msa_lab.config import DataConfig, RunConfig
from msa_lab.config_io import from_dict
from msa_lab.config_model import ModelConfig

if TYPE_CHECKING:
    import xarray as xr

    from msa_lab.runs import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 is success, 1 a failed run or an unsound machine, 2 a wrong request or a full disk (told in one line), and 130
    Ctrl-C. A traceback is a fault of this program.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Threads that spin while they wait make training ten times slower as soon as anything else uses a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        parser, by_name = make_parser()
        try:
            parsed = parser.parse_args(arguments)
        except (argparse.ArgumentError, UnicodeDecodeError) as error:
            raise ValueError(explain(str(error), by_name, arguments)) from None
        return _COMMANDS[parsed.command](parsed[parsed.command])
    except KeyboardInterrupt:
        _complain("stopped; the same command goes on where this one ended")
        return 130
    except OSError as error:
        _complain(_about(error))
    except ValueError as error:
        _complain(str(error))
    except FloatingPointError as error:
        _complain(str(error))
        return 1
    return 2


def _about(error: OSError) -> str:
    text = error.strerror or str(error)
    if error.filename is None:
        return text
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    rest = "; free some space and give the same command again: what is finished is kept" if full else ""
    return f"{error.filename}: {text}{rest}"


def _complain(message: str) -> None:
    print(f"msa-lab: {' '.join(message.split())}", file=sys.stderr)


def _demo(args: Namespace) -> int:
    from msa_lab.demo import runs

    return _train_study(runs(seeds=args.seeds), args)


def _sweep(args: Namespace) -> int:
    from msa_lab.cli_sweep import dry_run
    from msa_lab.study import load_study

    runs = load_study(args.study)
    return dry_run(runs, args, _complain) if args.dry_run else _train_study(runs, args)


def _train_study(runs: list[RunConfig], args: Namespace) -> int:
    """The report is written also when runs failed, as long as one finished: it names those that are missing."""
    from msa_lab.cli_sweep import run_study
    from msa_lab.runs import Run

    failures = run_study(runs, args, _complain)
    for failure in failures:
        _complain(f"{failure.run.path}: {failure.reason}")
    finished = [run for run in (Run.of(config, args.root) for config in runs) if run.finished]
    if finished:
        _write_report(finished, Path(args.root) / runs[0].study / "report.html")
    if failures:
        _complain(f"{len(failures)} runs did not finish; the same command tries them again and keeps the finished ones")
        return 1
    return 0


def _write_report(runs: list[Run], out: Path) -> None:
    from msa_analysis.evidence import collect
    from msa_analysis.gallery import write_figures
    from msa_analysis.report import selection_table, summary_table, write_report
    from msa_analysis.verdict import judge

    evidence = collect(runs)
    path = write_report(evidence, out)
    figures = out.with_name(f"{out.stem}-figures")
    write_figures(evidence, figures)
    for table in (summary_table(evidence), selection_table(evidence)):
        print(table.to_string(index=False) if len(table) else "no proxies were recorded", end="\n\n")
    print("\n".join(f"undertrained: {reason}" for reason in judge(evidence).reasons) or "trained enough to compare")
    _name_left_out(runs)
    print(f"figures and their numbers: {figures}")
    print(f"report: {path}")


def _name_left_out(runs: Sequence[Run]) -> None:
    from msa_lab.sweep_jobs import left_out

    for folder, reason in left_out(runs).items():
        print(f"left out, because it did not finish: {folder}: {reason}")


def _report(args: Namespace) -> int:
    from msa_analysis.study_page import is_study, write_study

    from msa_lab.runs import find

    if studies := [folder for folder in args.runs if is_study(folder)]:
        if len(args.runs) > 1 or args.viewer:
            raise ValueError(f"{studies[0]}: is a study, with a page of its own; name it alone and without --viewer")
        print(f"page: {write_study(studies[0], args.out)}")
        return 0
    runs = list({run.path: run for folder in args.runs for run in find(folder)}.values())
    out = Path(args.out or "report.html")
    _write_report(runs, out)
    if args.viewer:
        from msa_lab.selection_store import FILE

        recorded = [run for run in runs if (run.path / FILE).exists()]
        if not recorded:
            raise ValueError("--viewer: none of these runs recorded selections; leave it out, or name one that did")
        _write_viewer(recorded, out.with_name(f"{out.stem}-viewer.html"))
    return 0


def _write_viewer(logs: Sequence[Run | xr.Dataset], out: Path) -> None:
    from msa_analysis.viewer import write_viewer

    print(f"viewer: {write_viewer(logs, out)}")


def _analyze(args: Namespace) -> int:
    from msa_analysis.analyze import analyze, refuse_format, write_tables
    from msa_analysis.describe import describe

    refuse_format(args.format)
    measured, skipped = analyze(args.runs)
    print(describe(measured, skipped), end="\n\n")
    _name_left_out([item.source.run for item in measured if item.source.run])
    written = write_tables(measured, skipped, Path(args.out), kind=args.format)
    print(f"{len(written)} tables: {args.out}")
    if args.viewer:
        _write_viewer([item.source.run or item.data for item in measured], Path(args.out) / "viewer.html")
    return 0


def _intervene(args: Namespace) -> int:
    from msa_analysis.intervene import RULES, cost_table, intervene

    from msa_lab.runs import Run, whole

    wanted = {name: args[name] for name in ("documents", "layers", "proxies", "cache")}
    table = intervene(Run(Path(args.run)), args.rules or RULES, **wanted)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out) as file:
        table.to_csv(file, index=False)
    print(cost_table(table).to_string(), end="\n\n")
    print(f"table: {out}")
    return 0


def _inspect(args: Namespace) -> int:
    from msa_analysis.inspect import inspect_text, read_text

    from msa_lab.runs import Run

    text = Path(args.text)
    page = inspect_text(Run(Path(args.run)), read_text(text), Path(args.out), name=text.name, max_mb=args.max_mb)
    print(f"page: {page}")
    return 0


def _train(args: Namespace) -> int:
    plain = args.as_dict()
    options = {name: plain.pop(name) for name in ("root", "cache", "wandb", "devices")}
    plain.pop("config", None)
    config: RunConfig = from_dict(plain)
    _end_with_sweep()
    from msa_lab.summary import summary
    from msa_lab.train import TrainingStoppedError, train

    print("\n".join(summary(config)), flush=True)
    try:
        run = train(config, **options)
    except TrainingStoppedError as stopped:
        _complain(str(stopped))
        return 130
    print(f"finished: {run.path}")
    return 0


def _end_with_sweep() -> None:
    """In a child of a sweep: save and end when the sweep is gone, which closes our standard input."""
    from msa_lab.sweep import SUPERVISED

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ.pop(SUPERVISED, None):
        threading.Thread(target=wait, daemon=True).start()


def _prepare(args: Namespace) -> int:
    from msa_lab.prepare import prepare

    config, data = prepare(
        from_dict(args.data.as_dict(), DataConfig, "data."), bpe=args.bpe, cache=args.cache, report=print
    )
    print(json.dumps({"hash": data.hash, "vocab_size": data.vocab_size, **data.manifest}, indent=2))
    if args.bpe:
        print(f"use it with --data.tokenizer {config.tokenizer} --model.vocab_size {data.vocab_size}")
    return 0


def _evaluate(args: Namespace) -> int:
    from msa_lab.evaluate import evaluate
    from msa_lab.runs import Run

    print(json.dumps(evaluate(Run(Path(args.run)), batches=args.batches, cache=args.cache), indent=2))
    return 0


def _budget(args: Namespace) -> int:
    from msa_lab.budget import format_model, format_table

    if args.study:
        from msa_lab.study import load_study

        print(format_table(load_study(args.study)))
    else:
        print(format_model(from_dict(args.model.as_dict(), ModelConfig, "model."), args.context_length))
    return 0


def _doctor(args: Namespace) -> int:
    from msa_lab.doctor import examine

    facts, problems = examine()
    print("\n".join([*facts, *(f"PROBLEM: {problem}" for problem in problems)]))
    return 1 if problems else 0


_COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "demo": _demo,
    "prepare": _prepare,
    "train": _train,
    "sweep": _sweep,
    "evaluate": _evaluate,
    "report": _report,
    "analyze": _analyze,
    "intervene": _intervene,
    "inspect": _inspect,
    "budget": _budget,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
