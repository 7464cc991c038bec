"""Selection logs from wherever they are, reduced to what can be measured, or the reason why nothing can."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from msa_lab.import_selections import SUFFIXES, from_file
from msa_lab.runs import Run, arm_folder, find
from msa_lab.selections import open_selections


@dataclass(frozen=True)
class Source:
    """A run, a log without a run, or a file of another model's selections."""

    path: Path
    arm: str
    seed: int | None
    """None where no run is known."""
    finished: bool
    run: Run | None

    @property
    def label(self) -> str:
        """As it is named to readers."""
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.arm}{seed}{'' if self.finished else ' (unfinished)'}"

    def open(self) -> xr.Dataset:
        """The log, as `read_log` gives it.

        Raises:
            ValueError: There is nothing to measure; it says why, without the path.
        """
        try:
            if self.run is not None:
                return read_log(self.run)
            data = from_file(self.path) if self.path.suffix in SUFFIXES else open_selections(self.path)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{self.path}: ")) from None
        return data if self.path.suffix in SUFFIXES else _checked(data)


def read_log(run: Run) -> xr.Dataset:
    """A run's selection log, read lazily, the layers with proxies only.

    Raises:
        ValueError: There is nothing to measure: no layer has proxies, nothing was recorded, no record is whole, or
            scores are not finite.
    """
    model = run.config.model
    if not model.proxy_layers:
        raise ValueError(f"no layer has proxies: attention is {', '.join(dict.fromkeys(model.attention_kinds))}")
    return _checked(open_selections(run).sel(layer=list(model.proxy_layers)))


def _checked(data: xr.Dataset) -> xr.Dataset:
    if not data.sizes["step"]:
        raise ValueError("its log holds no whole record")
    # Most of the time goes into unpacking, which lets go of the interpreter. The first broken record is the one named.
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda i: _refuse_broken_scores(data.isel(step=i)), range(data.sizes["step"])):
            pass
    return data


def sources(paths: Sequence[str | Path]) -> list[Source]:
    """Every run at or below the paths, finished or not, every file and every log without a run; each once, in order.

    Raises:
        ValueError: A path holds none of them.
    """
    found: dict[Path, Source] = {}
    for path in map(Path, paths):
        for source in _at(path):
            found.setdefault(source.path.resolve(), source)
    return list(found.values())


def _at(path: Path) -> Iterator[Source]:
    if path.suffix in SUFFIXES:
        yield Source(path, path.stem, None, True, None)
        return
    if (path / "zarr.json").exists():
        if not (path.parent / "config.yaml").exists():
            yield Source(path, path.stem, None, True, None)
            return
        path = path.parent
    for run in find(path, finished=False):
        config = run.config
        yield Source(run.path, arm_folder(config), config.seed, run.finished, run)


def _refuse_broken_scores(record: xr.Dataset) -> None:
    """One step in which a chosen block has no finite score: training had diverged, and what was chosen says nothing."""
    if "score" not in record:
        return
    dims = ("layer", "document", "proxy", "query", "slot")
    ids, score = (record[name].transpose(*dims).values for name in ("selected", "score"))
    broken = ~np.isfinite(score) & (ids >= 0)
    if broken.any():
        layer, document, *_ = np.unravel_index(broken.argmax(), broken.shape)
        where = f"layer {record['layer'].values[layer]}, {record['document'].values[document]}"
        raise ValueError(f"scores are NaN or infinite at step {int(record['step'])} ({where}): training had diverged")


def probe_documents(data: xr.Dataset) -> str:
    """A hash of what was read, so that logs of the same documents can be told from others."""
    held = data["tokens"].values.tobytes() if "tokens" in data else repr(list(data["document"].values)).encode()
    return hashlib.sha256(held).hexdigest()[:8]


def cautions(logs: Sequence[tuple[str, xr.Dataset]]) -> list[str]:
    """What keeps the numbers of these (label, log) from being compared with each other; empty for like logs."""
    lines = []
    wordings = {
        "block_size": "block sizes differ, so a distance in blocks is another one in tokens",
        "top_k_blocks": "block budgets differ, and with them every chance value",
        "num_local_blocks": "forced local blocks differ",
        "num_sink_blocks": "forced sink blocks differ",
        "query_stride": "recorded queries differ",
        "context_length": "context lengths differ, and with them every chance value",
    }
    for name, words in wordings.items():
        values = {label: data.attrs.get(name) for label, data in logs}
        if len(set(values.values())) > 1:
            lines.append(f"{words}: {_listed(values)}")
    documents = {label: probe_documents(data) for label, data in logs}
    if len(set(documents.values())) > 1:
        lines.append(f"probe documents differ: {_listed(documents)}")
    return lines


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{label} {value}" for label, value in values.items())
