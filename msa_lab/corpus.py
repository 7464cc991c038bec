"""Where text comes from: files in a folder, and Hugging Face datasets. (`python_corpus` reads installed modules.)"""

from __future__ import annotations

import glob
import gzip
import importlib.util
import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from msa_lab.config import DataConfig

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


class Document(NamedTuple):
    """One text."""

    id: str
    """Unique and the same on every machine, e.g. `json/decoder.py` or `notes.jsonl:17`."""
    package: str
    """What it belongs to: a distribution (python), a file (text), a dataset (hf)."""
    text: bytes
    """UTF-8."""


@dataclass
class Source:
    """Texts, and what names them before they are read."""

    fingerprint: list[Any]
    """Changes whenever the texts may have changed; cheap: names, sizes and times, no contents."""
    read: Callable[[], Iterator[Document]]
    """Yields the documents in a fixed order."""
    split_by_package: bool = False
    """Keep a package's documents on one side of the split; otherwise each document is placed by its own hash."""
    versions: dict[str, list[str]] = field(default_factory=dict)
    """Package to `name==version` of what is in it."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Reasons for which files were left out; filled by `read`."""


def text_source(config: DataConfig) -> Source:
    """The .txt, .md, .jsonl(.gz/.zst) and .parquet files of a folder, file or glob.

    A .txt or .md file is one document; the others hold one per line or row, in the column `config.text_field`.

    Raises:
        ValueError: Nothing to read there; later, while reading, a broken file (its name and line are given).
    """
    base, files = _files(config.path)
    stats = [(path, path.stat()) for path in files]

    def read() -> Iterator[Document]:
        for path in files:
            name = path.relative_to(base).as_posix()
            for place, text in _documents(path, config.text_field):
                yield Document(name + place, name, text)

    fingerprint = [(path.relative_to(base).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return Source(fingerprint, lambda: _limited(read(), config.max_bytes))


def hf_source(config: DataConfig) -> Source:
    """The train split of a Hugging Face dataset (`name` or `name:config`) or of a local folder in the hub's format.

    It is streamed. A dataset on the hub is named by its name alone, so a new revision is read only into a new cache.

    Raises:
        ValueError: `datasets` is missing; later, while reading, the dataset or its column does not exist.
    """
    local = Path(config.path).is_dir()
    name, _, subset = (config.path, "", "") if local else config.path.partition(":")
    label = Path(name).resolve().name if local else config.path
    files = sorted(path for path in Path(name).rglob("*") if path.is_file()) if local else []
    fingerprint = [(str(p.relative_to(name)), p.stat().st_size, p.stat().st_mtime_ns) for p in files] or [config.path]

    def read() -> Iterator[Document]:
        for index, row in enumerate(_hf_rows(config, name, subset, on_hub=not local)):
            text = _field(dict(row), config.text_field, f"{label}:{index}")
            yield Document(f"{label}:{index}", label, text)

    return Source(fingerprint, lambda: _limited(read(), config.max_bytes))


def _hf_rows(config: DataConfig, name: str, subset: str, *, on_hub: bool) -> Iterator[Any]:
    try:
        import datasets
        import huggingface_hub
        from huggingface_hub.utils import HfHubHTTPError
    except ImportError:
        raise ValueError("data.source='hf': needs the datasets package; pip install 'msa-lab[hf]'") from None
    for library in ("datasets", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        if on_hub and not huggingface_hub.constants.HF_HUB_OFFLINE:
            # Without a connection this fails at once, where loading tries again for half a minute. What the hub itself
            # answers, such as that there is no such dataset, loading says more plainly.
            with suppress(HfHubHTTPError):
                huggingface_hub.HfApi().dataset_info(name, timeout=10)
        yield from datasets.load_dataset(name, subset or None, split="train", streaming=True)
    except Exception as error:  # the hub client raises many kinds, all about this name
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"data.path={config.path!r}: cannot read this dataset ({reason})") from None


def _limited(documents: Iterator[Document], max_bytes: int) -> Iterator[Document]:
    """Non-empty documents until the next one would exceed `max_bytes`; 0 is no limit."""
    total = 0
    for document in documents:
        total += len(document.text)
        if max_bytes and total > max_bytes:
            return
        if document.text.strip():
            yield document


def _files(path: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files, sorted."""
    place = Path(path)
    if place.is_dir():
        base, found = place, list(place.rglob("*"))
    elif place.is_file():
        base, found = place.parent, [place]
    else:
        fixed = list(takewhile(lambda part: not glob.has_magic(part), place.parts[:-1]))
        base = Path(*fixed)
        found = list(base.glob("/".join(place.parts[len(fixed) :])))
    files = sorted(file for file in found if file.is_file() and file.name.endswith(SUFFIXES))
    if not files:
        raise ValueError(f"data.path={path!r}: holds no {' '.join(SUFFIXES)} file; try a folder, file or glob of them")
    return base, files


def _documents(path: Path, column: str) -> Iterator[tuple[str, bytes]]:
    """Pairs of (place inside the file, text)."""
    if path.suffix in (".txt", ".md"):
        yield "", _utf8(path.read_bytes(), str(path))
    elif path.suffix == ".parquet":
        yield from _parquet(path, column)
    else:
        yield from _jsonl(path, column)


def _utf8(raw: bytes, place: str) -> bytes:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        fix = "convert it, e.g. `iconv -f latin1 -t utf-8`"
        raise ValueError(f"{place}: not UTF-8 at byte {error.start}; {fix}") from None
    return raw


def _field(row: Any, column: str, place: str) -> bytes:
    if not isinstance(row, dict) or column not in row:
        held = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{place}: has no field {column!r} (data.text_field), only {held}")
    if not isinstance(row[column], str):
        raise ValueError(f"{place}: field {column!r} (data.text_field) holds {type(row[column]).__name__}, not text")
    try:
        return row[column].encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place}: field {column!r} holds half a surrogate pair, which is no UTF-8 text") from None


def _jsonl(path: Path, column: str) -> Iterator[tuple[str, bytes]]:
    number = 0
    try:
        with _lines(path) as lines:
            for number, raw in enumerate(lines, 1):
                place = f"{path}:{number}"
                if not raw.strip():
                    continue
                try:
                    row = json.loads(_utf8(raw, place))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{place}: not JSON ({error.msg}); one object a line is needed") from None
                yield f":{number}", _field(row, column, place)
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}:{number + 1}: cannot be read on ({error}); the file is damaged or cut") from None


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[bytes]]:
    if path.suffix == ".gz":
        with gzip.open(path) as file:
            yield iter(file)
    elif path.suffix == ".zst":
        _require_pyarrow(path)
        import pyarrow as pa

        with pa.CompressedInputStream(pa.OSFile(str(path)), "zstd") as stream, io.BufferedReader(stream) as file:
            yield iter(file)
    else:
        with path.open("rb") as file:
            yield iter(file)


def _parquet(path: Path, column: str) -> Iterator[tuple[str, bytes]]:
    _require_pyarrow(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(f"{path}: has no column {column!r} (data.text_field), only {', '.join(map(repr, names))}")
        for part in file.iter_batches(columns=[column]):
            for value in part.column(0).to_pylist():
                yield f":{row}", _field({column: value}, column, f"{path}:{row}")
                row += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}:{row}: cannot be read as parquet ({error})".splitlines()[0]) from None


def _require_pyarrow(path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{path}: reading this needs pyarrow; pip install pyarrow")
