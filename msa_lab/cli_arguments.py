"""The arguments of each command, and what is said about wrong ones. Imports nothing heavy: `--help` is made of this."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from jsonargparse import ArgumentParser, set_parsing_settings

from msa_lab.config import DataConfig, RunConfig
from msa_lab.config_io import checked, from_dict
from msa_lab.config_model import ModelConfig
from msa_lab.slurm_options import SlurmOptions


def make_parser() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The parser, and that of each command by its name."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _new_parser(
        "Train sparse-attention models whose proxies choose the blocks, record every choice, and measure.",
        prog="msa-lab",
    )
    subcommands = parser.add_subcommands(dest="command", metavar="COMMAND")
    by_name = {}
    for add_arguments in _COMMANDS:
        name, text = add_arguments.__name__.strip("_"), str(add_arguments.__doc__)
        by_name[name] = _new_parser(text)
        add_arguments(by_name[name])
        subcommands.add_subcommand(name, by_name[name], help=text.split(": ")[0])
    return parser, by_name


def _new_parser(description: str, **options: Any) -> ArgumentParser:
    return ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False, **options)


def explain(message: str, parsers: dict[str, ArgumentParser], arguments: Sequence[str]) -> str:
    """jsonargparse's complaint about `arguments` in our terms, with the nearest name where one is unknown."""
    command = arguments[0] if arguments else ""
    if command not in parsers and not command.startswith("-"):
        return f"{command or 'no command'}: must be one of {', '.join(parsers)}; try {_nearest(command, parsers)}"
    unknown = re.search(r"unrecognized arguments: --([\w.]+)|does not accept option '([\w.]+)'", message)
    if unknown and command in parsers:
        key = unknown[1] or unknown[2]
        known = [action.dest for action in parsers[command]._actions if action.dest not in ("help", "print_config")]
        return f"{key}: unknown key; did you mean {_nearest(key, known)}?"
    value = re.search(r'Parser key "([\w.]+)"[^:]*:.*(?:Got value|Given value): (.*)', message, re.DOTALL)
    if value and command in parsers:
        try:
            _check(value[1], value[2], parsers[command])
        except ValueError as error:
            return str(error)
    files = " or ".join(
        text for text in re.split(r"[ =]", " ".join(arguments)) if text.endswith((".yaml", ".yml", ".json"))
    )
    if message.startswith("Problems parsing config"):
        return f"{files}: is no valid YAML:{message.partition(':')[2]}"
    if message.startswith("Unexpected config"):
        return f"{files}: holds no fields of a run; try a run folder's config.yaml"
    if message.startswith("'utf-8' codec"):
        return f"{files}: is not UTF-8 text; try a run folder's config.yaml"
    return message


def _check(key: str, text: str, parser: ArgumentParser) -> None:
    """Refuse `text` with the rule of what `key` names: a field of a run, or else an option."""
    if key.split(".")[0] in RunConfig.__dataclass_fields__:
        plain: Any = text
        for part in reversed(key.split(".")):
            plain = {part: plain}
        from_dict(plain)
    for action in parser._actions:
        if action.dest == key and (hint := getattr(action, "_typehint", None)):
            checked(text, hint, key, action.default)


def _nearest(word: str, words: Iterable[str]) -> str:
    return difflib.get_close_matches(word, words, n=1, cutoff=0.0)[0]


def _folders(parser: ArgumentParser) -> None:
    parser.add_argument("--root", default="runs", help="Folder of all runs.")
    _cache(parser)


def _cache(parser: ArgumentParser) -> None:
    parser.add_argument("--cache", default="data", help="Folder of prepared corpora.")


def _viewer(parser: ArgumentParser, path: str) -> None:
    text = f"Also write a page on which one clicks through the selections with the text beside them: {path}."
    parser.add_argument("--viewer", action="store_true", help=text)


def _slots(parser: ArgumentParser) -> None:
    text = "Runs at a time; one per GPU, or per core where there is none, if not given."
    parser.add_argument("--slots", type=int | None, default=None, help=text)


def _demo(parser: ArgumentParser) -> None:
    """Train the demo study and write its report: a dense stem, and MSA, dense and recency-window models from it."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="A stem and three forks for each.")
    _slots(parser)
    _folders(parser)


def _prepare(parser: ArgumentParser) -> None:
    """Build a corpus, so that training starts at once: the one that `--data.*` describes."""
    parser.add_class_arguments(DataConfig, "data")
    text = "Also train a BPE tokenizer of this many tokens on it, for `--data.tokenizer`."
    parser.add_argument("--bpe", type=int | None, default=None, help=text)
    _cache(parser)


def _train(parser: ArgumentParser) -> None:
    """Train one run, or go on with it: `--config run.yaml`, then flags such as `--train.lr 0.001` on top of it."""
    parser.add_argument("--config", action="config", help="A run's YAML, such as the config.yaml of a run folder.")
    parser.add_class_arguments(RunConfig, nested_key=None, as_group=False)
    mode = Literal["offline", "online", "disabled"]
    parser.add_argument("--wandb", type=mode, default="offline", help="Where wandb's copy of the metrics goes.")
    parser.add_argument("--devices", type=int, default=1, help="GPUs (or CPU processes) that share each batch.")
    _folders(parser)


def _sweep(parser: ArgumentParser) -> None:
    """Train every run of a study: finished ones are skipped, unfinished resumed, forks wait for their stem."""
    text = "A Python file with `def runs() -> list[RunConfig]`, or a folder with such a study.py."
    parser.add_argument("study", help=text)
    text = "Train nothing; print each run with its cost in tokens, FLOPs and minutes."
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help=text)
    text = "With --dry-run: the speed of a run, in place of what was measured."
    parser.add_argument("--tokens_per_second", type=float | None, default=None, help=text)
    text = "With --dry-run: the share of the GPU's peak that training reaches, in place of what was measured."
    parser.add_argument("--mfu", type=float | None, default=None, help=text)
    parser.add_argument(
        "--gpu", default="", help="With --mfu: the GPU's name, such as H100; the one here if not given."
    )
    text = "local: processes on this machine. slurm: a job per run, on a cluster."
    parser.add_argument("--executor", type=Literal["local", "slurm"], default="local", help=text)
    parser.add_class_arguments(SlurmOptions, "slurm")
    _slots(parser)
    _folders(parser)


def _evaluate(parser: ArgumentParser) -> None:
    """Score a finished run on its validation rows and print JSON: with the attention that it was trained with."""
    parser.add_argument("run", help="A run folder, such as runs/demo/msa-12345678/seed0.")
    text = "Validation batches; as many as in training if not given."
    parser.add_argument("--batches", type=int | None, default=None, help=text)
    _cache(parser)


def _report(parser: ArgumentParser) -> None:
    """Write one self-contained HTML file about finished runs: those below the given folders.

    Of a study's folder whose results/ holds tables of its seeds (`experiments/run_seed.py` makes them), such as
    experiments/proxies, write instead results.md and figures/, from these tables alone.
    """
    parser.add_argument("runs", nargs="+", help="Run folders, or folders that hold some; or one study's folder.")
    text = "The file to write (report.html); of a study the folder (its own)."
    parser.add_argument("--out", type=str | None, default=None, help=text)
    _viewer(parser, "OUT-viewer.html, without .html in OUT")


def _analyze(parser: ArgumentParser) -> None:
    """Measure what the proxies choose: all metrics as tables, and a summary in plain words.

    Beside each number stands its null, what it would be without the property, and a 95 % interval; what cannot be said
    is "not defined", with the reason. docs/any_model.md has the keys of files of other models.
    """
    text = "Run folders (finished or not), folders that hold some, or .npz and .safetensors files of other models."
    parser.add_argument("runs", nargs="+", help=text)
    parser.add_argument("--out", default="tables", help="Folder for the tables, one file a subject.")
    parser.add_argument("--format", type=Literal["csv", "parquet"], default="csv", help="Kind of file.")
    _viewer(parser, "OUT/viewer.html")


def _intervene(parser: ArgumentParser) -> None:
    """Put other selections in place of the proxies' own and measure what that costs: weights stay as they are.

    The cost of `shared`, one selection for all proxies of a layer, is what specializing is worth to this model.
    """
    parser.add_argument("run", help="A finished run's folder, such as runs/demo/msa-12345678/seed0.")
    text = "What is put in place; all but own if not given: shared, shared_z, shift, recency, sink_recency, random, "
    text += "other_document, teacher, own (changes nothing)."
    parser.add_argument("--rules", nargs="+", default=None, help=text)
    parser.add_argument("--documents", type=int, default=32, help="Validation rows to score; intervals are over them.")
    text = "Replace in all layers at once, in each alone, or both ways."
    parser.add_argument("--layers", type=Literal["all", "each", "both"], default="both", help=text)
    text = "Replace for all proxies at once, or also for each alone."
    parser.add_argument("--proxies", type=Literal["all", "each"], default="all", help=text)
    parser.add_argument("--out", default="interventions.csv", help="The table to write.")
    _cache(parser)


def _inspect(parser: ArgumentParser) -> None:
    """See what a run's proxies choose in a text of yours: one page that opens offline."""
    parser.add_argument("run", help="A finished run's folder, such as runs/demo/msa-12345678/seed0.")
    parser.add_argument("--text", required=True, help="A UTF-8 text file; longer ones are cut to the run's context.")
    parser.add_argument("--out", default="inspect.html", help="The page to write.")
    parser.add_argument("--max_mb", type=float, default=50.0, help="Largest size of the page, in megabytes.")


def _budget(parser: ArgumentParser) -> None:
    """Count parameters and FLOPs: of a study's arms (`msa-lab budget STUDY`), or of the model in `--model.*`."""
    parser.add_argument("study", nargs="?", default="", help="A study's file or folder; its arms are compared.")
    parser.add_class_arguments(ModelConfig, "model")
    parser.add_argument("--context_length", type=int, default=4096, help="Tokens per row, for FLOPs.")


def _doctor(parser: ArgumentParser) -> None:
    """Say what works here: versions, GPU, which kernel paths are usable and why not; exit 1 if parts do not fit."""


_COMMANDS = (
    *(_demo, _prepare, _train, _sweep, _evaluate, _report),
    *(_analyze, _intervene, _inspect, _budget, _doctor),
)
