"""A study: a Python file whose `runs()` returns the runs that answer one question.

One that is repeated over seeds also says what is compared with what (`SeededStudy`).
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from msa_lab.config import DataConfig, RunConfig
from msa_lab.runs import Run

FILE = "study.py"
"""The study in a folder that holds one."""


@dataclass(frozen=True)
class SeededStudy:
    """What the `study.py` of a study over seeds says, by the names there."""

    folder: Path
    runs: Callable[..., list[RunConfig]]
    """`runs(seeds, cache, *, tiny)`: for each seed its stem and arms; `tiny` is the same road in seconds."""
    arms: tuple[str, ...]
    """ARMS: what is compared, in the order of tables; stems are not among them."""
    seeds: tuple[int, ...]
    """SEEDS: what the study is to be made of."""
    reference: dict[str, str]
    """REFERENCE: the arm that an arm is held against; one name in the file, where it is the same for all."""
    contrasts: tuple[tuple[str, str], ...]
    """CONTRASTS: further pairs of arms, the first minus the second."""
    margin: float
    """MARGIN: how much worse than its reference an arm may be and still count as good as it."""
    twice: tuple[tuple[str, str], ...]
    """TWICE: pairs of arms that are one arm."""
    corpus: DataConfig | None
    """DATA: the corpus that is to be prepared first."""
    bpe: int | None
    """BPE: tokens of the tokenizer that is trained on it."""


def load_study(path: str | Path) -> list[RunConfig]:
    """The runs of a study file, or of the `study.py` in a folder: what its `runs()` returns.

    Raises:
        ValueError: The file is missing, raises, has no `runs()`, returns anything but a list of RunConfig, or puts
            two runs into one folder; names the file, and the line where there is one.
    """
    path = _file(path)
    with _telling(path):
        runs = _import(path).runs()
    if not isinstance(runs, list) or not runs or not all(isinstance(run, RunConfig) for run in runs):
        given = repr(runs) if not runs else f"{type(runs).__name__}"
        raise ValueError(f"{path}: runs() must return a list of RunConfig with at least one, not {given}")
    try:
        check_folders(runs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return runs


def read_study(path: str | Path) -> SeededStudy:
    """A study over seeds, by its folder or file.

    Raises:
        ValueError: There is none, it raises, or it lacks what such a study must say or names an arm that it has not.
    """
    path = _file(path)
    with _telling(path):
        said = vars(_import(path))
    for wanted in ("ARMS", "SEEDS", "REFERENCE", "MARGIN"):
        if wanted not in said:
            raise ValueError(f"{path}: says no {wanted}; a study over seeds says ARMS, SEEDS, REFERENCE and MARGIN")
    arms: tuple[str, ...] = tuple(said["ARMS"])
    reference: dict[str, str] | str = said["REFERENCE"]
    study = SeededStudy(
        folder=path.parent,
        runs=said["runs"],
        arms=arms,
        seeds=tuple(said["SEEDS"]),
        reference=dict.fromkeys(arms, reference) if isinstance(reference, str) else reference,
        contrasts=tuple(said.get("CONTRASTS", ())),
        margin=float(said["MARGIN"]),
        twice=tuple(said.get("TWICE", ())),
        corpus=said.get("DATA"),
        bpe=said.get("BPE"),
    )
    for name, pairs in (("REFERENCE", study.reference.items()), ("CONTRASTS", study.contrasts), ("TWICE", study.twice)):
        for arm in (arm for pair in pairs for arm in pair):
            if arm not in arms:
                raise ValueError(f"{path}: {name} names {arm!r}, which is no arm; use {', '.join(arms)}")
    return study


def _file(path: str | Path) -> Path:
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path}: no such study file; try experiments/demo")
    return path


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Errors of a study name its file, and the line where there is one."""
    try:
        yield
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.absolute()]
        if not lines and isinstance(error, ValueError):
            raise
        place = f"{path}:{lines[-1]}" if lines else str(path)
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{place}: {kind}{' '.join(str(error).split())}") from error


def _import(path: Path) -> ModuleType:
    name = f"study_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: is no Python file; a study's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, "runs", None)):
        raise ValueError(f"{path}: has no function runs(); a study defines `def runs() -> list[RunConfig]`")
    return module


def check_folders(runs: Sequence[RunConfig]) -> None:
    """Raise a ValueError where two runs would write into one folder."""
    for folder, count in Counter(str(Run.of(run, ".").path) for run in runs).items():
        if count > 1:
            raise ValueError(f"{count} runs share the folder {folder}; give each its own seed, arm or settings")
