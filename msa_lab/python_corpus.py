"""The `python` corpus: the source of every module importable here, without copies.

Packages are distributions (those that share a top-level name count as one), and the standard library's top modules.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from msa_lab.config import DataConfig
from msa_lab.corpus import Document, Source

OWN = ("msa-lab",)
"""Distributions left out, so that the corpus does not change with this project."""
SHINGLE = 3
"""Consecutive non-blank lines that are compared as one."""
NEAR_DUPLICATE = 0.5
"""Share of a document's shingles that other documents may hold before it counts as a copy."""


class _File(NamedTuple):
    id: str
    package: str
    path: str
    size: int
    time: int


def python_source(config: DataConfig, *, stdlib: Path | None = None, sites: Sequence[Path] | None = None) -> Source:
    """Modules of the standard library and of installed distributions, one document a file.

    `config.max_bytes` takes files round-robin over the packages, in an order given by hashes of their names, so that a
    small corpus is spread over all packages and is a subset of a larger one. Files that are not UTF-8 are left out and
    counted; so are copies, exact or near (`NEAR_DUPLICATE`, see `near_duplicates`).

    Args:
        config: Of it, `max_bytes`.
        stdlib: Folder of the standard library; this interpreter's by default.
        sites: Folders of installed packages in order of precedence; by default the
            folders called site-packages or dist-packages on `sys.path`.
    """
    stdlib = Path(sysconfig.get_path("stdlib")) if stdlib is None else stdlib
    if sites is None:
        sites = [Path(p) for p in dict.fromkeys(sys.path) if Path(p).name in ("site-packages", "dist-packages")]
    groups, versions = _packages(sites)
    found: dict[str, _File] = {}
    for root, in_stdlib in [(stdlib, True), *((site, False) for site in sites)]:
        for relative, entry in _modules(root):
            top = relative.split("/", 1)[0].removesuffix(".py")
            package = f"python/{top}" if in_stdlib else groups.get(top, top)
            stat = entry.stat()
            file = _File(f"python/{relative}" if in_stdlib else relative, package, entry.path, *_key(stat))
            if package not in OWN and stat.st_size:
                found.setdefault(file.id, file)
    files = sorted(_spread(list(found.values()), config.max_bytes), key=lambda f: (f.package, f.id))
    used = {file.package for file in files}
    standard = [f"python=={platform.python_version()}"]
    named = {p: standard if p.startswith("python/") else versions.get(p, []) for p in used}
    skipped: Counter[str] = Counter()
    fingerprint = [sorted(named.items()), [(f.id, f.package, f.size, f.time) for f in files]]
    return Source(fingerprint, lambda: _read(files, skipped), True, named, skipped)


def _key(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _modules(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(path below root, entry) of every importable .py file."""
    pending = [("", str(root))]
    while pending:
        below, folder = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                if entry.is_dir(follow_symlinks=False):
                    if name.isidentifier() and name != "__pycache__":
                        pending.append((f"{below}{name}/", entry.path))
                elif _is_module(name) and entry.is_file():
                    yield below + name, entry


def _is_module(name: str) -> bool:
    return name.endswith(".py") and name[:-3].isidentifier() and not name.startswith("__editable__")


def _packages(sites: Sequence[Path]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Top-level name to package, and package to its `name==version`s.

    Distributions that write into the same top-level folder (namespace packages) become one package.
    """
    tops_of: dict[str, set[str]] = {}
    version: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=[str(site) for site in sites]):
        name = distribution.metadata["Name"]
        if not name or name in version:
            continue
        version[name] = distribution.version
        lines = (distribution.read_text("RECORD") or distribution.read_text("top_level.txt") or name).splitlines()
        tops = {line.split("/", 1)[0].split(",", 1)[0].removesuffix(".py") for line in lines}
        tops_of[name] = {top for top in tops if top.isidentifier() and top != "__pycache__"}
    groups: dict[str, str] = {}
    for name in sorted(tops_of):
        merged = {groups[top] for top in tops_of[name] if top in groups}
        label = min({name, *merged})
        groups = {top: label if group in merged else group for top, group in groups.items()}
        groups.update(dict.fromkeys(tops_of[name], label))
    versions: dict[str, list[str]] = {}
    for name in sorted(tops_of):
        for label in {groups[top] for top in tops_of[name]}:
            versions.setdefault(label, []).append(f"{name}=={version[name]}")
    return groups, versions


def _spread(files: list[_File], max_bytes: int) -> list[_File]:
    """The first `max_bytes` of the files taken round-robin over packages, in the order of their names' hashes."""
    if not max_bytes:
        return files
    order = {file.id: hashlib.sha256(file.id.encode()).digest() for file in files}
    files = sorted(files, key=lambda file: order[file.id])
    taken: Counter[str] = Counter()
    turn: dict[str, int] = {}
    for file in files:
        turn[file.id] = taken[file.package]
        taken[file.package] += 1
    files.sort(key=lambda file: turn[file.id])
    ends = np.cumsum([file.size for file in files])
    return files[: int(np.searchsorted(ends, max_bytes, side="right"))]


def _read(files: list[_File], skipped: Counter[str]) -> Iterator[Document]:
    documents: list[Document] = []
    seen: set[bytes] = set()
    for file in files:
        text = Path(file.path).read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError:
            skipped["not UTF-8"] += 1
            continue
        digest = hashlib.sha256(text).digest()
        if not text.strip() or digest in seen:
            skipped["copy" if text.strip() else "empty"] += 1
            continue
        seen.add(digest)
        documents.append(Document(file.id, file.package, text))
    copies = near_duplicates([document.text for document in documents])
    skipped["near copy"] += int(copies.sum())
    return (document for document, copy in zip(documents, copies, strict=True) if not copy)


def near_duplicates(texts: Sequence[bytes]) -> np.ndarray:
    """bool (document,): dropped, so that no remaining document has more than `NEAR_DUPLICATE` of its distinct shingles
    in the other remaining ones, whichever side of the split they come to lie on.

    First go the documents that mostly repeat earlier ones, so that the first of a family of copies stays; then those
    that are mostly contained in others. A shingle is `SHINGLE` consecutive non-blank lines without their indentation.
    """
    hashes = [_shingles(text) for text in texts]
    sizes = np.array([len(h) for h in hashes], dtype=np.int64)
    owner = np.repeat(np.arange(len(texts)), sizes)
    if not len(owner):
        return np.zeros(len(texts), dtype=bool)
    _, first, shingle = np.unique(np.concatenate(hashes), return_index=True, return_inverse=True)
    repeats = owner[first[shingle]] != owner
    dropped = np.bincount(owner, repeats, len(texts)) > NEAR_DUPLICATE * sizes
    left = ~dropped[owner]
    shared = left & (np.bincount(shingle, left)[shingle] > 1)
    return dropped | (np.bincount(owner, shared, len(texts)) > NEAR_DUPLICATE * sizes)


def _shingles(text: bytes) -> np.ndarray:
    """uint64, sorted and distinct."""
    lines = [zlib.crc32(line) for raw in text.split(b"\n") if (line := raw.strip())]
    rolled = np.array(lines, dtype=np.uint64)
    if len(rolled) < SHINGLE:
        return rolled[:0]
    mixed = np.zeros(len(rolled) - SHINGLE + 1, dtype=np.uint64)
    for offset in range(SHINGLE):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + rolled[offset : offset + len(mixed)]
    return np.unique(mixed)
