"""The corpus of installed modules: what is taken, what is left out, and on which side of the split it lies."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from msa_lab import python_corpus, store
from msa_lab.config import DataConfig
from msa_lab.data import open_data
from msa_lab.python_corpus import near_duplicates, python_source

CONFIG = DataConfig(context_length=16)


def code(seed: int, lines: int = 30) -> str:
    rng = np.random.default_rng(seed)
    return "".join(f"name_{rng.integers(1 << 40)} = {rng.integers(1 << 40)}\n" for _ in range(lines))


def shingles(text: bytes) -> set[tuple[bytes, ...]]:
    lines = [line.strip() for line in text.split(b"\n") if line.strip()]
    return set(zip(lines, lines[1:], lines[2:], strict=False))


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def distribution(site: Path, name: str, version: str, files: dict[str, str | bytes]) -> None:
    write(site, files)
    record = "".join(f"{file},,\n" for file in files) + "../../bin/tool,,\n"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write(site / f"{name.replace('-', '_')}-{version}.dist-info", {"METADATA": metadata, "RECORD": record})


@pytest.fixture
def roots(tmp_path):
    stdlib, site = tmp_path / "lib", tmp_path / "site-packages"
    write(
        stdlib,
        {
            "json/__init__.py": code(1),
            "json/decoder.py": code(2),
            "abc.py": code(3),
            "site-packages/x.py": code(4),
            "__pycache__/abc.py": code(5),
            "config-3/tool.py": code(6),
        },
    )
    distribution(site, "Alpha", "1.0", {"alpha/core.py": code(10), "_alpha.py": code(11)})
    distribution(site, "names-a", "2.0", {"names/a.py": code(12)})
    distribution(site, "names-b", "3.0", {"names/b.py": code(13), "alone.py": code(14)})
    distribution(site, "msa-lab", "0.1", {"msa_lab/config.py": code(15)})
    write(site, {"loose.py": code(16), "__editable___x_finder.py": code(17), "alpha/empty.py": "", "alpha/n.txt": "x"})
    return stdlib, site


def read(roots, config=CONFIG):
    return python_source(config, stdlib=roots[0], sites=[roots[1]])


def test_packages_are_distributions_and_top_modules_of_the_standard_library(roots):
    source = read(roots)
    assert {d.id: d.package for d in source.read()} == {
        "python/json/__init__.py": "python/json",
        "python/json/decoder.py": "python/json",
        "python/abc.py": "python/abc",
        "alpha/core.py": "Alpha",
        "_alpha.py": "Alpha",
        "names/a.py": "names-a",
        "names/b.py": "names-a",
        "alone.py": "names-a",
        "loose.py": "loose",
    }
    assert source.versions["names-a"] == ["names-a==2.0", "names-b==3.0"]
    assert source.versions["python/json"][0].startswith("python==3.")


def test_order_of_the_file_system_changes_nothing(roots, monkeypatch):
    expected = [list(read(roots, DataConfig(max_bytes=size)).read()) for size in (0, 4000)]
    scandir = python_corpus.os.scandir

    class Reversed:
        def __init__(self, path):
            self.entries = sorted(scandir(path), key=lambda e: e.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(python_corpus.os, "scandir", Reversed)
    assert [list(read(roots, DataConfig(max_bytes=size)).read()) for size in (0, 4000)] == expected


def test_max_bytes_is_spread_over_packages_and_nested(roots):
    write(roots[1], {f"alpha/more{i}.py": code(100 + i) for i in range(20)})
    sizes = [len(code(3)) * n + 50 for n in (3, 5, 9)]
    taken = [{d.id: d.package for d in read(roots, DataConfig(max_bytes=size)).read()} for size in sizes]
    assert len(set(taken[0].values())) == 3
    assert set(taken[1].values()) == {"Alpha", "python/json", "python/abc", "names-a", "loose"}
    assert set(taken[0]) < set(taken[1]) < set(taken[2])


def test_files_that_are_not_utf8_and_copies_are_left_out_and_counted(roots):
    original = code(10)
    edited = original.replace("\n", "\n\n", 3).replace("name_", "    name_") + "extra = 1\n"
    write(roots[1], {"latin.py": b"# caf\xe9\n", "blank.py": "\n\n", "same.py": original, "vendored/core.py": edited})
    source = read(roots)
    names = [d.id for d in source.read()]
    assert source.skipped == {"not UTF-8": 1, "empty": 1, "copy": 1, "near copy": 1}
    assert "alpha/core.py" in names
    assert not {"latin.py", "blank.py", "same.py", "vendored/core.py"} & set(names)


def test_near_duplicates_are_those_that_share_most_lines():
    a, b = code(1), code(2)
    half = "".join(a.splitlines(keepends=True)[:12] + b.splitlines(keepends=True)[12:])
    most = "".join(a.splitlines(keepends=True)[:22] + code(3).splitlines(keepends=True)[22:])
    texts = [t.encode() for t in (a, b, most, "x = 1\n", "x = 1\ny = 2\n")]
    assert near_duplicates(texts).tolist() == [False, False, True, False, False]
    assert near_duplicates([a.encode(), half.encode()]).tolist() == [False, False]
    assert near_duplicates([]).tolist() == []


def test_document_contained_in_a_larger_later_one_is_dropped():
    small, large = code(1, 20), code(1, 20) + code(2, 60)
    texts = [t.encode() for t in (small, large, code(3))]
    assert near_duplicates(texts).tolist() == [True, False, False]


def test_train_and_validation_share_no_package_and_no_near_copy(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    for i in range(40):
        files: dict[str, str | bytes] = {f"pkg{i}/a.py": code(i, 60), f"pkg{i}/b.py": code(1000 + i, 60)}
        files[f"pkg{i}/vendor.py"] = code(5000 + i % 4, 60) + f"version = {i}\n"
        distribution(site, f"pkg{i}", "1.0", files)
    made_up = python_source
    monkeypatch.setattr(store, "python_source", lambda config: made_up(config, stdlib=tmp_path / "lib", sites=[site]))
    (tmp_path / "lib").mkdir()
    data = open_data(DataConfig(context_length=64, validation_fraction=0.2), tmp_path / "cache")
    rows = [json.loads(line) for line in Path(data.manifest["documents_file"]).read_text().splitlines()]
    sides = [{r["package"] for r in rows if r["validation"] == side} for side in (True, False)]
    assert not sides[0] & sides[1]
    assert len(rows) == 84
    assert data.manifest["skipped"] == {"near copy": 36}
    assert 0.15 < data.manifest["validation_bytes"] / data.manifest["bytes"] <= 0.2
    assert data.manifest["packages"] == sorted(f"pkg{i}==1.0" for i in range(40))
    probe = data.probe(6)
    assert len({name.split("/")[0] for name in probe.ids}) == 6
    assert {name.split("/")[0] for name in probe.ids} <= sides[0]
    with pytest.raises(ValueError, match=r"selections\.documents=99: only \d+ validation documents are longer"):
        data.probe(99)
    shutil.rmtree(site / "pkg39-1.0.dist-info")
    distribution(site, "pkg39", "1.1", {})
    pinned = DataConfig(context_length=64, validation_fraction=0.2, expected_hash="0123456789abcdef")
    with pytest.raises(
        ValueError, match=r"expected_hash='0123456789abcdef': the corpus here hashes to '(\w+)'"
    ) as error:
        open_data(pinned, tmp_path / "cache")
    assert data.hash not in str(error.value)


def test_real_modules_make_a_corpus_in_seconds(tmp_path):
    config = DataConfig(max_bytes=1_000_000, context_length=512, validation_fraction=0.2)
    start = time.monotonic()
    data = open_data(config, tmp_path)
    assert time.monotonic() - start < 60
    assert 500_000 < data.manifest["bytes"] <= 1_000_000
    assert data.manifest["validation_units"] >= 8
    assert 0.15 < data.manifest["validation_bytes"] / data.manifest["bytes"] <= 0.2
    assert not any("msa_lab" in row for row in Path(data.manifest["documents_file"]).read_text().splitlines())
    assert open_data(config, tmp_path).hash == data.hash
    assert 2.5 < data.bigram_bits_per_byte() < 5.0
    probe = data.probe(8)
    assert tuple(probe.tokens.shape) == (8, 512)
    assert len(set(probe.ids)) == 8
    assert set(probe.tokens[:, 0].tolist()) == {256}
    known = set().union(*map(shingles, store.document_texts(data.folder, "train")))
    for text in store.document_texts(data.folder, "validation"):
        own = shingles(text)
        assert len(own & known) <= 0.5 * len(own), text[:200]
