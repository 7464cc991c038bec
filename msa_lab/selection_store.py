"""The selection log on disk: a Zarr v3 group, `selections.zarr` in the run folder.

Every variable has its full shape from the start and one compressed, checksummed chunk per record, so that a record is
a handful of new files. `phase` and then `step` are rewritten last, in one chunk each: a record exists once its step
does, and what a kill or a full disk leaves behind before that is overwritten by the next. One process writes.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from msa_lab.config import RunConfig
from msa_lab.config_io import config_hash
from msa_lab.runs import Run
from msa_lab.selection_layout import DIMS, PHASES, dims, make, num_blocks, per_record

if TYPE_CHECKING:
    import xarray as xr

FILE = "selections.zarr"
LAST_ONLY = ("head_teacher", "head_teacher_mass", "head_step", "regrouped_divergence")
"""What `write_heads` stores, of one record."""


class SelectionStore:
    """The writer's side of the log; readers use `open_selections`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # Chunks of fill values are written too: a missing file always means a torn record.
        with zarr.config.set({"array.write_empty_chunks": True}):
            group = zarr.open_group(self.path, mode="r+")
            self.arrays: dict[str, zarr.Array] = dict(group.arrays())
        self.attrs: dict[str, Any] = dict(group.attrs)
        self.steps: list[int] = _steps(self.path, self.arrays)

    @classmethod
    def create(
        cls, path: str | Path, config: RunConfig, documents: Sequence[str], tokens: np.ndarray
    ) -> SelectionStore:
        """A new log with room for the run's records, whole or not at all; what lies at `path` is replaced.

        Args:
            path: Where to make it, `<run>/selections.zarr`.
            config: Decides dims and attributes.
            documents: Name of each probe document.
            tokens: (document, token) ids of the probe documents.

        Raises:
            ValueError: More blocks than int16 can number, or a record too large for one chunk.
        """
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            make(partial, config, documents, tokens)
            shutil.rmtree(path, ignore_errors=True)
            partial.replace(path)
        except OSError as error:
            raise _disk_error(path, "create the selection log", error) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return cls(path)

    @classmethod
    def resume(cls, path: str | Path, config: RunConfig, tokens: np.ndarray, step: int) -> SelectionStore:
        """The log of a run that goes on from `step`: later records are dropped, they will be made again.

        Raises:
            ValueError: The log belongs to another config, or to other probe documents.
        """
        store = cls(path)
        wanted, held = config_hash(config), store.attrs.get("config_hash")
        if held != wanted:
            raise ValueError(f"{path}: was recorded with config {held}, this run's is {wanted}; remove it or the run")
        if not np.array_equal(np.asarray(store.arrays["tokens"][:]), tokens):
            raise ValueError(f"{path}: was recorded on other probe documents: the corpus has changed; remove the run")
        if store.steps and store.steps[-1] > step:
            store.steps = [known for known in store.steps if known <= step]
            store._commit()
        return store

    def append(self, step: int, phase: str, values: Mapping[str, np.ndarray]) -> None:
        """Add the record of one step: variable name to (layer, document, proxy, query, slot).

        `newest_mass`, `divergence` and `entropy`, means over the queries of a block, may be left out: NaN then.

        Raises:
            ValueError: A step not after the last one, no room, a variable missing or of another shape, or a block id
                that does not fit.
            OSError: The disk refused (full, quota); the records before this one stay whole.
        """
        index = len(self.steps)
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step={step}: the log already holds step {self.steps[-1]}; records only go forward")
        if index == self.arrays["step"].shape[0]:
            raise ValueError(f"{self.path}: has room for {index} records, all taken; raise selections.records")
        names = [name for name, array in self.arrays.items() if per_record(array)]
        needed = {name for name in names if dims(self.arrays[name]) == DIMS}
        if phase not in PHASES or not needed <= set(values) <= set(names):
            raise ValueError(
                f"phase={phase!r}, variables {sorted(values)}: must be one of {PHASES} and {sorted(needed)}"
            )
        try:
            for name in names:
                held = values[name] if name in values else np.full(self.arrays[name].shape[1:], np.nan)
                self._write(name, held, index)
            codes = self.arrays["phase"]
            codes[:] = np.where(np.arange(codes.shape[0]) == index, PHASES.index(phase), np.asarray(codes[:]))
            self.steps.append(step)
            self._commit()
        except OSError as error:
            self.steps = self.steps[:index]
            raise _disk_error(self.path, f"record the selections of step {step}", error) from None

    def write_heads(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Store `head_teacher` and `head_teacher_mass`, (layer, document, head, query, slot), as of the record `step`;
        and `regrouped_divergence`, (layer, document, regrouping, query_block), where it is given.

        Raises:
            OSError: The disk refused; the records stay whole.
        """
        try:
            for name, value in values.items():
                self._write(name, value, None)
            self.arrays["head_step"][...] = step
        except OSError as error:
            raise _disk_error(self.path, f"record the heads of step {step}", error) from None

    def _write(self, name: str, value: np.ndarray, index: int | None) -> None:
        array = self.arrays[name]
        shape = array.shape if index is None else array.shape[1:]
        if value.shape != shape:
            raise ValueError(f"{name} has shape {value.shape}; it must be {shape}")
        if array.dtype == np.int16:
            least, most, blocks = int(value.min()), int(value.max()), num_blocks(self.attrs)
            if least < -1 or most >= blocks:
                raise ValueError(f"{name} holds block ids {least} to {most}; they must be -1 to {blocks - 1}")
        array[... if index is None else index] = value.astype(array.dtype)

    def _commit(self) -> None:
        steps = self.arrays["step"]
        steps[:] = np.pad(np.asarray(self.steps, np.int64), (0, steps.shape[0] - len(self.steps)), constant_values=-1)


def open_selections(run: Run | str | Path) -> xr.Dataset:
    """The selection log of a run, read lazily: a record is loaded when its values are asked for.

    Dims (step, layer, document, proxy, query, slot). `selected`: block ids, ascending, then -1. `score`: the proxy's
    score of each. `mass`: the share of the group's dense attention on it (same weights). `teacher`, `teacher_mass`: the
    group's own top blocks by that share. `head_teacher`, `head_teacher_mass` (layer, document, head, query, slot): each
    head's, at the last record. By query block, means over its recorded queries: `newest_mass` (..., distance), the
    group's dense mass of the blocks at distance 0 to top_k_blocks - 1; `divergence`, of the group's heads
    (`teacher.group_divergence`); `entropy`, of the group's dense mass by block; at the last record
    `regrouped_divergence` (layer, document, regrouping, query_block), that of random groups; logs from before these
    lack them. `tokens` (document, token): the probe documents. Scores and masses are float16, NaN where there is no
    block; a layer without proxies has no scores, and a choice that serves several groups appears once for each.
    Coordinate `phase` tells would-be choices of the warm-up from those that were used.

    Args:
        run: A run, its folder, or the path of a log.

    Raises:
        ValueError: There is no log, or the folder is no run.
    """
    import xarray as xr

    path = _find(run)
    group = zarr.open_group(path, mode="r")
    attrs: dict[str, Any] = dict(group.attrs)
    steps = _steps(path, dict(group.arrays()))
    data = xr.open_zarr(path, consolidated=False, chunks=None, mask_and_scale=False, decode_times=False)
    data = data.isel(step=slice(len(steps)))
    phase = np.array(PHASES)[data["phase"].values]
    if "head_step" in data:
        stale = not steps or int(data["head_step"]) != steps[-1]
        data = data.drop_vars([n for n in LAST_ONLY if n in data and (stale or n == "head_step")])
    coords = {"layer": attrs.pop("layers"), "document": np.array(attrs.pop("documents"), dtype=object)}
    queries = np.arange(0, attrs["context_length"], attrs["query_stride"])
    return data.assign_attrs(attrs).assign_coords(
        {name: (name, value) for name, value in coords.items()}
        | {
            "step": ("step", np.asarray(steps, np.int64)),
            "phase": ("step", phase),
            "proxy": ("proxy", np.arange(attrs["num_proxies"])),
            "query": ("query", queries),
        }
    )


def _steps(path: Path, arrays: Mapping[str, zarr.Array]) -> list[int]:
    """Steps of the whole records; a warning names a last one whose files are torn or lost."""
    steps = [int(step) for step in np.asarray(arrays["step"][:]) if step >= 0]
    while steps and not all(_whole(path / name, array, len(steps) - 1) for name, array in arrays.items()):
        warnings.warn(f"{path}: the record of step {steps.pop()} is torn and was dropped", stacklevel=3)
    return steps


def _whole(folder: Path, array: zarr.Array, index: int) -> bool:
    if not per_record(array):
        return True
    chunk = folder / array.metadata.encode_chunk_key((index,) + (0,) * (array.ndim - 1))
    try:
        return chunk.exists() and array[index] is not None
    except (ValueError, RuntimeError):
        return False


def _find(run: Run | str | Path) -> Path:
    folder = run.path if isinstance(run, Run) else Path(run)
    path = folder if (folder / "zarr.json").exists() else folder / FILE
    if (path / "zarr.json").exists():
        return path
    if (folder / "config.yaml").exists():
        raise ValueError(f"{folder}: has no {FILE}: nothing was recorded (selections.records=0, or all layers dense)")
    raise ValueError(f"{folder}: is neither a run folder nor a selection log; try runs/STUDY/ARM-HASH/seed0")


def _disk_error(path: Path, what: str, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    rest = "earlier records are whole; free some space and start the run again"
    return OSError(error.errno, f"{path}: could not {what} ({reason}); {rest}")
