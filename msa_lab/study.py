"""A study: a Python file whose `runs()` returns the runs that answer one question."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from msa_lab.config import RunConfig
from msa_lab.runs import Run

FILE = "study.py"
"""The study in a folder that holds one."""


def load_study(path: str | Path) -> list[RunConfig]:
    """The runs of a study file, or of the `study.py` in a folder: what its `runs()` returns.

    Raises:
        ValueError: The file is missing, raises, has no `runs()`, returns anything but a list of RunConfig, or puts
            two runs into one folder; names the file, and the line where there is one.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        raise ValueError(f"{path}: no such study file; try experiments/demo")
    try:
        module = _import(path)
        if not callable(getattr(module, "runs", None)):
            raise ValueError(f"{path}: has no function runs(); a study defines `def runs() -> list[RunConfig]`")
        runs = module.runs()
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.absolute()]
        if not lines and isinstance(error, ValueError):
            raise
        place = f"{path}:{lines[-1]}" if lines else str(path)
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{place}: {kind}{' '.join(str(error).split())}") from error
    if not isinstance(runs, list) or not runs or not all(isinstance(run, RunConfig) for run in runs):
        given = repr(runs) if not runs else f"{type(runs).__name__}"
        raise ValueError(f"{path}: runs() must return a list of RunConfig with at least one, not {given}")
    try:
        check_folders(runs)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return runs


def _import(path: Path) -> ModuleType:
    name = f"study_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: is no Python file; a study's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def check_folders(runs: Sequence[RunConfig]) -> None:
    """Raise a ValueError where two runs would write into one folder."""
    for folder, count in Counter(str(Run.of(run, ".").path) for run in runs).items():
        if count > 1:
            raise ValueError(f"{count} runs share the folder {folder}; give each its own seed, arm or settings")
