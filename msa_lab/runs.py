"""Run folders: where a run lives, what is in it, and which runs are finished.

runs/<study>/<arm>-<hash>/seed<k>/
    config.yaml environment.json     written before the first step
    metrics.csv                      step,name,value: one row per number, the record of truth
    selections.zarr                  what the proxies chose (see `msa_lab.selections`)
    last.ckpt model.safetensors
    result.json                      written last, atomically: its presence means "finished"
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

from msa_lab.config import RunConfig
from msa_lab.config_io import config_hash, from_dict, to_dict

if TYPE_CHECKING:
    import pandas as pd


def arm_folder(config: RunConfig) -> str:
    """`study/arm-hash`: the folder of all seeds of an arm, and what `fork_from` names."""
    return f"{config.study}/{config.arm}-{config_hash(config)}"


@dataclass(frozen=True)
class Run:
    """One run folder. Cheap to make; everything is read when asked for."""

    path: Path

    @classmethod
    def of(cls, config: RunConfig, root: str | Path = "runs") -> Run:
        """The folder that `config` trains in."""
        return cls(Path(root) / arm_folder(config) / f"seed{config.seed}")

    @property
    def config(self) -> RunConfig:
        """The config the run was started with."""
        path = self.path / "config.yaml"
        if not path.exists():
            raise ValueError(f"{self.path}: is no run folder (it has no config.yaml); try runs/STUDY/ARM-HASH/seed0")
        try:
            return from_dict(yaml.safe_load(path.read_text()))
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: is no config of a run ({error}); leave this folder out") from None

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, hardware, corpus and kernel path of the run's newest start."""
        return self._json("environment.json")

    @property
    def finished(self) -> bool:
        """True once the result exists."""
        return (self.path / "result.json").exists()

    @property
    def result(self) -> dict[str, Any]:
        """Final numbers.

        Raises:
            ValueError: The run has not finished.
        """
        if not self.finished:
            raise ValueError(f"{self.path}: the run has no result.json yet; finish it with `msa-lab train` or `sweep`")
        return self._json("result.json")

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); remove {self.path} and train it again") from None

    @property
    def metrics(self) -> pd.DataFrame:
        """Columns step, name, value in the order of writing; a line torn by a kill is left out."""
        import pandas as pd

        text = complete_lines(self.path / "metrics.csv") or "step,name,value\n"
        return pd.read_csv(io.StringIO(text), dtype={"step": int, "name": str, "value": float})

    def write_config(self, config: RunConfig) -> None:
        """Store the config; a folder that holds another config is refused."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / "config.yaml"
        if path.exists() and (held := self.config) != config:
            raise ValueError(
                f"{self.path}: holds another config (arm {held.arm!r}, seed {held.seed}); "
                "use another study or arm name, or remove the folder"
            )
        write_atomically(path, yaml.safe_dump(to_dict(config), sort_keys=False))

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Store `value` under `name` in the folder, whole or not at all."""
        write_atomically(self.path / name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder: a second process that wants to write is refused, and a crash frees it."""
        import fcntl

        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path}: another process is training this run; wait for it or stop it first"
                ) from None
            except OSError as error:
                raise ValueError(
                    f"{file.name}: this file system cannot lock a file ({error.strerror}), so that two processes could "
                    "write into one folder; give a --root on another one"
                ) from None
            for partial in self.path.glob(".*.partial"):
                # Left by a process that was killed while it wrote; now nobody does.
                if partial.is_file():
                    partial.unlink()
            yield


def find(folder: str | Path = "runs", *, finished: bool = True) -> list[Run]:
    """Every run below `folder` (a run itself is fine), sorted by path; only finished ones unless told otherwise.

    Raises:
        ValueError: There is none.
    """
    found = sorted(path.parent for path in Path(folder).rglob("config.yaml"))
    runs = [Run(path) for path in found if not finished or Run(path).finished]
    if not runs:
        state = "finished run" if finished else "run"
        raise ValueError(f"{folder}: holds no {state} ({len(found)} unfinished); train one with `msa-lab train`")
    return runs


def complete_lines(path: Path) -> str:
    """The file's text up to its last line break: a line torn by a kill could hold half a number. Empty if missing."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1]


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Name the file in an OSError that names none, such as a full disk's, or that names its partial one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial)):
            error.filename = str(path)
        raise


@contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its place at the end: whole or not at all, also when the disk is full or we are
    killed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path, partial):
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole(path) as file:
        file.write(text.encode())
