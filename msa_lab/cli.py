"""The command line: `msa-lab COMMAND`. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from msa_lab.config import DataConfig, RunConfig
from msa_lab.config_io import from_dict
from msa_lab.config_model import ModelConfig

if TYPE_CHECKING:
    from msa_lab.runs import Run
    from msa_lab.sweep import Failure

Command = Callable[[Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0; 1 for a failed run; 2 for a wrong request, told in one line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    parser, subparsers, commands = _parser()
    try:
        try:
            parsed = parser.parse_args(arguments)
        except argparse.ArgumentError as error:
            raise ValueError(_explain(str(error), subparsers.get(arguments[0] if arguments else ""))) from None
        return commands[parsed.command](parsed[parsed.command])
    except KeyboardInterrupt:
        _complain("stopped; the same command goes on where this one ended")
        return 130
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except ValueError as error:
        _complain(str(error))
    return 2


def _complain(message: str) -> None:
    print(f"msa-lab: {' '.join(message.split())}", file=sys.stderr)


def _parser() -> tuple[ArgumentParser, dict[str, ArgumentParser], dict[str, Command]]:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="msa-lab",
        description="Train sparse-attention models whose proxies choose the blocks, record every choice, and measure.",
        exit_on_error=False,
    )
    subcommands = parser.add_subcommands(dest="command", metavar="COMMAND", help="`msa-lab COMMAND --help` says more.")
    subparsers, commands = {}, {}
    for command, add_arguments in _COMMANDS.items():
        name, text = command.__name__.strip("_"), str(command.__doc__)
        subparsers[name] = sub = ArgumentParser(description=text, exit_on_error=False)
        add_arguments(sub)
        subcommands.add_subcommand(name, sub, help=text.split(".")[0].split(":")[0])
        commands[name] = command
    return parser, subparsers, commands


def _explain(message: str, parser: ArgumentParser | None) -> str:
    """jsonargparse's complaint as one line in our terms, with the nearest key where one is unknown."""
    unknown = re.search(r"unrecognized arguments: --([\w.]+)|does not accept option '([\w.]+)'", message)
    if unknown and parser is not None:
        key = unknown[1] or unknown[2]
        keys = [k for k in _keys(parser) if k != "help"]
        near = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)[0]
        return f"{key}: unknown key; did you mean {near}?"
    choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
    if choice and "command" in message:
        near = difflib.get_close_matches(choice[1], [c.__name__.strip("_") for c in _COMMANDS], n=1, cutoff=0.0)[0]
        return f"{choice[1]}: unknown command; did you mean `msa-lab {near}`?"
    value = re.search(r'Parser key "([\w.]+)":.*(?:Got value|Given value): (.*)', message, re.DOTALL)
    if value and value[1].split(".")[0] in ("model", "data", "train", "selections"):
        plain: Any = value[2]
        for part in reversed(value[1].split(".")):
            plain = {part: plain}
        try:
            from_dict(plain)
        except ValueError as error:
            return str(error)
    return message


def _keys(parser: ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if action.dest != argparse.SUPPRESS]


def _demo(args: Namespace) -> int:
    """Train the demo study and write its report: a dense stem, and MSA, dense and recency-window models forked from it."""
    from msa_lab.demo import runs

    return _study(runs(seeds=tuple(args.seeds)), args)


def _sweep(args: Namespace) -> int:
    """Train every run of a study file: finished ones are skipped, unfinished resumed, forks wait for their stem."""
    from msa_lab.sweep import load_study

    return _study(load_study(args.study), args)


def _study(runs: list[RunConfig], args: Namespace) -> int:
    from msa_lab.runs import Run
    from msa_lab.sweep import sweep

    failures = sweep(runs, root=args.root, cache=args.cache, slots=args.slots)
    if failures:
        return _report_failures(failures)
    folder = Path(args.root) / runs[0].study
    _write_report([Run.of(run, args.root) for run in runs], folder / "report.html")
    return 0


def _report_failures(failures: list[Failure]) -> int:
    for failure in failures:
        _complain(f"{failure.run.path}: {failure.reason}")
    _complain(f"{len(failures)} runs did not finish; the same command tries them again and leaves the others alone")
    return 1


def _write_report(runs: list[Run], out: Path) -> None:
    from msa_analysis.report import summary_table, write_report

    path = write_report(runs, out)
    print(summary_table(runs))
    print(f"report: {path}")


def _report(args: Namespace) -> int:
    """Write one self-contained HTML file about the finished runs below the given folders."""
    from msa_lab.runs import find

    runs = list({run.path: run for folder in args.runs for run in find(folder)}.values())
    _write_report(runs, Path(args.out))
    return 0


def _train(args: Namespace) -> int:
    """Train one run, or go on with it: `--config run.yaml`, then flags such as `--train.lr 0.001` on top of it."""
    plain = args.as_dict()
    options = {name: plain.pop(name) for name in ("root", "cache", "wandb", "devices")}
    plain.pop("config", None)
    config: RunConfig = from_dict(plain)
    _end_with_sweep()
    for line in summary(config):
        print(line, flush=True)
    from msa_lab.train import TrainingStoppedError, train

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


def summary(config: RunConfig) -> list[str]:
    """What is about to be trained, in a few lines.

    Raises:
        ValueError: The kernel path that the config asks for cannot be had here.
    """
    import torch

    from msa_lab.budget import count_parameters
    from msa_lab.environment import kernel_path

    model, length = config.model, config.data.context_length
    count, blocks = count_parameters(model), -(-length // model.block_size)
    path, reason = kernel_path(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    kinds = ", ".join(f"{model.attention_kinds.count(kind)} {kind}" for kind in dict.fromkeys(model.attention_kinds))
    lines = [
        f"model: {count.total:,} parameters ({count.non_embedding:,} without embedding, {count.proxy:,} in proxies); "
        f"layers: {kinds}"
    ]
    if set(model.attention_kinds) != {"dense"}:
        k, size = model.top_k_blocks, model.block_size
        lines.append(f"selection: {k} blocks x {size} = {k * size} tokens of {length}; density {config.density:.6f}")
        if k > blocks:
            fix = k // size if k % size == 0 and 1 < k // size <= blocks else max(1, blocks // 4)
            lines.append(
                f"warning: model.top_k_blocks={k}: counts blocks, not tokens, and only {blocks} blocks of {size} exist "
                f"in {length} tokens, so attention is dense; try {fix}"
            )
    return [*lines, f"kernels: {path}, {reason}"]


def _prepare(args: Namespace) -> int:
    """Build the corpus that `--data.*` describes, so that training starts at once; with `--bpe` train a tokenizer first."""
    from msa_lab.data import open_data, train_tokenizer

    config: DataConfig = from_dict(args.data.as_dict(), DataConfig, "data.")
    if args.bpe:
        print(f"tokenizer: {train_tokenizer(config, args.bpe, args.cache)} (give it as --data.tokenizer)")
        return 0
    data = open_data(config, args.cache)
    print(json.dumps({"vocab_size": data.vocab_size, "hash": data.hash, **data.manifest}, indent=2))
    return 0


def _evaluate(args: Namespace) -> int:
    """Score a finished run on its validation rows, with the attention it was trained with, and print JSON."""
    from msa_lab.evaluate import evaluate
    from msa_lab.runs import Run

    print(json.dumps(evaluate(Run(Path(args.run)), batches=args.batches, cache=args.cache), indent=2))
    return 0


def _budget(args: Namespace) -> int:
    """Count parameters and FLOPs: of a study's arms (`msa-lab budget study.py`), or of the model that `--model.*` gives."""
    from msa_lab import budget

    if args.study:
        from msa_lab.sweep import load_study

        print(budget.format_table(load_study(args.study)))
    else:
        model: ModelConfig = from_dict(args.model.as_dict(), ModelConfig, "model.")
        print(budget.format_model(model, args.context_length))
    return 0


def _doctor(args: Namespace) -> int:
    """Say what is installed, which GPU there is, and which kernel paths work here or why not."""
    from msa_lab.doctor import examine

    report, problems = examine()
    print("\n".join(report))
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


def _sweep_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--root", default="runs", help="Folder of all runs.")
    parser.add_argument("--cache", default="data", help="Folder of prepared corpora.")
    parser.add_argument(
        "--slots", type=int | None, default=None, help="Runs at a time; one per GPU or core if not given."
    )


def _add_demo(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="One stem and three forks for each.")
    _sweep_arguments(parser)


def _add_sweep(parser: ArgumentParser) -> None:
    parser.add_argument("study", help="A Python file with `def runs() -> list[RunConfig]`.")
    _sweep_arguments(parser)


def _add_train(parser: ArgumentParser) -> None:
    parser.add_argument("--config", action="config", help="A run's YAML, such as the config.yaml of a run folder.")
    parser.add_class_arguments(RunConfig, nested_key=None, as_group=False)
    parser.add_argument("--root", default="runs", help="Folder of all runs.")
    parser.add_argument("--cache", default="data", help="Folder of prepared corpora.")
    parser.add_argument("--wandb", default="offline", help="offline, online or disabled.")
    parser.add_argument("--devices", type=int, default=1, help="GPUs (or CPU processes) that share each batch.")


def _add_prepare(parser: ArgumentParser) -> None:
    parser.add_class_arguments(DataConfig, "data")
    parser.add_argument("--bpe", type=int, default=0, help="Train a BPE tokenizer of this size on the corpus instead.")
    parser.add_argument("--cache", default="data", help="Folder of prepared corpora.")


def _add_evaluate(parser: ArgumentParser) -> None:
    parser.add_argument("run", help="A run folder, such as runs/demo/msa-12345678/seed0.")
    parser.add_argument(
        "--batches", type=int | None, default=None, help="Validation batches; the run's own number if not given."
    )
    parser.add_argument("--cache", default="data", help="Folder of prepared corpora.")


def _add_report(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="Run folders, or folders that hold some.")
    parser.add_argument("--out", default="report.html", help="The file to write.")


def _add_budget(parser: ArgumentParser) -> None:
    parser.add_argument("study", nargs="?", default="", help="A study file; its arms are compared.")
    parser.add_class_arguments(ModelConfig, "model")
    parser.add_argument("--context_length", type=int, default=4096, help="Tokens per row, for FLOPs.")


_COMMANDS: dict[Command, Callable[[ArgumentParser], None]] = {
    _demo: _add_demo,
    _prepare: _add_prepare,
    _train: _add_train,
    _sweep: _add_sweep,
    _evaluate: _add_evaluate,
    _report: _add_report,
    _budget: _add_budget,
    _doctor: lambda parser: None,
}

if __name__ == "__main__":
    sys.exit(main())
