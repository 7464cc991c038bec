"""Token files on disk: built once, named by their content, safe against kills and against a second builder.

<cache>/<hash>/header.json       dtype, token counts, tokenizer, manifest
<cache>/<hash>/documents.ndjson   one line a document: id, package, validation, bytes, sha256
<cache>/<hash>/train.bin validation.bin
<cache>/index/<fingerprint>.json from the names, sizes and times of the sources to the hash, so that an unchanged
                                 corpus is not read again
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from msa_lab.config import DataConfig
from msa_lab.corpus import Source, hf_source, text_source
from msa_lab.python_corpus import python_source
from msa_lab.runs import naming, write_atomically
from msa_lab.tokenizer import ByteTokenizer, Tokenizer

FORMAT = 1
SPLITS = ("train", "validation")
ENCODE_TOGETHER = 512
"""Documents handed to the tokenizer at once."""

Report = Callable[[str], None]


def corpus_folder(config: DataConfig, tokenizer: Tokenizer, cache: Path, report: Report) -> Path:
    """The folder with the tokens of `config`, built if it is not there yet.

    A corpus pinned by `config.expected_hash` is taken from the cache whatever the machine's own sources are, so a study
    can be repeated elsewhere by copying its cache folder.

    Raises:
        ValueError: The sources hold no text, a broken file, or too little for a split.
    """
    pinned = cache / config.expected_hash
    if config.expected_hash and (pinned / "header.json").exists():
        header = read_header(pinned)
        if header["settings"] == _settings(config) and header["tokenizer"] == _name(tokenizer):
            return pinned
    source = {"python": python_source, "text": text_source, "hf": hf_source}[config.source](config)
    key = _digest([FORMAT, _settings(config), source.fingerprint])
    pointer = cache / "index" / f"{key}.json"
    if (ready := _ready(pointer, tokenizer, cache)) is not None:
        return ready
    with _lock(cache):
        if (ready := _ready(pointer, tokenizer, cache)) is not None:
            return ready
        for stale in cache.glob(".building-*"):
            shutil.rmtree(stale, ignore_errors=True)
        held = _ready(pointer, ByteTokenizer(), cache)
        folder = held or _build_bytes(source, config, cache, report)
        pointer.parent.mkdir(exist_ok=True)
        write_atomically(pointer, json.dumps({"hash": folder.name}) + "\n")
        return folder if isinstance(tokenizer, ByteTokenizer) else _encode(folder, tokenizer, cache, report)


def read_header(folder: Path) -> dict[str, Any]:
    """The header, after the token files were found to be as long as it says.

    Raises:
        ValueError: The header is damaged or a token file is cut.
    """
    again = f"remove {folder} and start again: it is built anew"
    try:
        header = json.loads((folder / "header.json").read_text())
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}, not {FORMAT}")
        sizes = {split: header["tokens"][split] * np.dtype(header["dtype"]).itemsize for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'header.json'}: cannot be used ({error}); {again}") from None
    for split, size in sizes.items():
        path = folder / f"{split}.bin"
        held = path.stat().st_size if path.exists() else 0
        if held != size:
            raise ValueError(f"{path}: holds {held:,} bytes where its header says {size:,}; {again}")
    return header


def open_tokens(folder: Path, split: str) -> np.ndarray:
    """The tokens of one split, mapped read-only."""
    header = json.loads((folder / "header.json").read_text())
    return np.memmap(folder / f"{split}.bin", dtype=header["dtype"], mode="r")


def read_documents(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of documents.ndjson, each split in the order of its tokens."""
    path = folder / "documents.ndjson"
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                fix = f"remove {folder} and start again: it is built anew"
                raise ValueError(f"{path}:{number}: cannot be used ({error}); {fix}") from None


def document_texts(folder: Path, split: str) -> Iterator[bytes]:
    """The documents of one split of a corpus of bytes."""
    tokens = open_tokens(folder, split)
    rows = (row for row in read_documents(folder) if row["validation"] == (split == "validation"))
    start = 0
    for row in rows:
        end = start + 1 + row["bytes"]
        yield tokens[start + 1 : end].astype(np.uint8).tobytes()
        start = end


def _settings(config: DataConfig) -> dict[str, Any]:
    names = ("source", "text_field", "max_bytes", "validation_fraction")
    return {name: getattr(config, name) for name in names} | {"path": config.path if config.source == "hf" else ""}


def _name(tokenizer: Tokenizer) -> str:
    return "bytes" if isinstance(tokenizer, ByteTokenizer) else tokenizer.hash


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _bpe_hash(bytes_hash: str, tokenizer: Tokenizer) -> str:
    return _digest([bytes_hash, _name(tokenizer)])


def _ready(pointer: Path, tokenizer: Tokenizer, cache: Path) -> Path | None:
    try:
        name = json.loads(pointer.read_text())["hash"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folder = cache / (name if isinstance(tokenizer, ByteTokenizer) else _bpe_hash(name, tokenizer))
    return folder if folder.exists() else None


@contextmanager
def _lock(cache: Path) -> Iterator[None]:
    """One builder at a time; a crash frees it."""
    import fcntl

    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _building(cache: Path) -> Iterator[Path]:
    folder = cache / f".building-{os.getpid()}"
    folder.mkdir()
    try:
        with naming(cache):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build_bytes(source: Source, config: DataConfig, cache: Path, report: Report) -> Path:
    report(f"reading the corpus (source={config.source})")
    with _building(cache) as folder:
        documents: list[dict[str, Any]] = []
        with (folder / "texts").open("wb") as spool:
            for document in source.read():
                spool.write(document.text)
                digest = hashlib.sha256(document.text).hexdigest()
                documents.append(
                    {"id": document.id, "package": document.package, "bytes": len(document.text), "sha256": digest}
                )
        _split(documents, source, config)
        texts = np.memmap(folder / "texts", dtype=np.uint8, mode="r")
        tokenizer = ByteTokenizer()
        offset = 0
        with ExitStack() as stack:
            files = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS}
            for row in documents:
                text = texts[offset : offset + row["bytes"]].tobytes()
                offset += row["bytes"]
                files["validation" if row["validation"] else "train"].write(tokenizer.encode([text])[0].tobytes())
        (folder / "texts").unlink()
        with (folder / "documents.ndjson").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in documents)
        manifest = _manifest(documents, source, config)
        content = [manifest["packages"], [[r["id"], r["sha256"], r["validation"]] for r in documents], "bytes"]
        return _finish(folder, cache / _digest(content), _settings(config), tokenizer, manifest)


def _split(documents: list[dict[str, Any]], source: Source, config: DataConfig) -> None:
    """Set each document's `validation`: whole packages, or documents by content, in the order of their hashes."""
    if not documents:
        place = f"data.path={config.path!r}" if config.path else f"data.source={config.source!r}"
        reasons = ", ".join(f"{count} {reason}" for reason, count in source.skipped.items())
        why = f" ({reasons})" if reasons else ""
        rule = f"the corpus is empty{why}"
        fix = f"max_bytes={config.max_bytes} may be too small" if config.max_bytes else "give files that hold text"
        raise ValueError(f"{place}: {rule}; {fix}")
    unit = "package" if source.split_by_package else "sha256"
    sizes: dict[str, int] = {}
    for row in documents:
        sizes[row[unit]] = sizes.get(row[unit], 0) + row["bytes"]
    if len(sizes) < 2:
        what = "package" if source.split_by_package else "distinct document"
        rule = f"the corpus holds one {what}, which cannot be split"
        fix = f"give at least two {what}s, e.g. cut the file into parts, or raise data.max_bytes={config.max_bytes}"
        raise ValueError(f"data.validation_fraction={config.validation_fraction}: {rule}; {fix}")
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    left = config.validation_fraction * sum(sizes.values())
    chosen: set[str] = set()
    for name in order:
        if sizes[name] <= left:
            chosen.add(name)
            left -= sizes[name]
    chosen = chosen or {min(order, key=lambda name: sizes[name])}
    for row in documents:
        row["validation"] = row[unit] in chosen


def _manifest(documents: Sequence[dict[str, Any]], source: Source, config: DataConfig) -> dict[str, Any]:
    packages = {row["package"] for row in documents}
    validation = [row for row in documents if row["validation"]]
    return {
        "source": config.source,
        "packages": sorted({version for package in packages for version in source.versions.get(package, [])}),
        "documents": len(documents),
        "validation_documents": len(validation),
        "units": len(packages),
        "validation_units": len({row["package"] for row in validation}),
        "bytes": sum(row["bytes"] for row in documents),
        "validation_bytes": sum(row["bytes"] for row in validation),
        "skipped": dict(sorted(source.skipped.items())),
        "sha256": hashlib.sha256(json.dumps([[r["id"], r["sha256"]] for r in documents]).encode()).hexdigest(),
    }


def _encode(held: Path, tokenizer: Tokenizer, cache: Path, report: Report) -> Path:
    """The tokens of a corpus of bytes in another tokenizer."""
    header = read_header(held)
    total = header["manifest"]["documents"]
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    with _building(cache) as folder:
        done = 0
        for split in SPLITS:
            texts = document_texts(held, split)
            with (folder / f"{split}.bin").open("wb") as file:
                while part := list(islice(texts, ENCODE_TOGETHER)):
                    file.writelines(tokens.astype(dtype).tobytes() for tokens in tokenizer.encode(part))
                    done += len(part)
                    report(f"tokenizing {done:,} of {total:,} documents")
        shutil.copy(held / "documents.ndjson", folder)
        target = cache / _bpe_hash(held.name, tokenizer)
        return _finish(folder, target, header["settings"], tokenizer, header["manifest"])


def _finish(
    folder: Path, target: Path, settings: dict[str, Any], tokenizer: Tokenizer, manifest: dict[str, Any]
) -> Path:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    header = {
        "format": FORMAT,
        "dtype": dtype.name,
        "tokens": {split: (folder / f"{split}.bin").stat().st_size // dtype.itemsize for split in SPLITS},
        "tokenizer": _name(tokenizer),
        "settings": settings,
        "manifest": manifest,
    }
    write_atomically(folder / "header.json", json.dumps(header, indent=1) + "\n")
    if not target.exists():
        folder.replace(target)
    return target
