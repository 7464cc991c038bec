"""Reading text files and Hugging Face datasets: every format, and one line for every kind of bad file."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msa_lab.config import DataConfig, RecallConfig
from msa_lab.corpus import hf_source, text_source
from msa_lab.data import open_data


def config(path: Path | str, **changes) -> DataConfig:
    return DataConfig(**{"source": "text", "path": str(path), "context_length": 8, **changes})


def texts(path: Path | str, **changes) -> dict[str, str]:
    return {d.id: d.text.decode() for d in text_source(config(path, **changes)).read()}


def lines(*rows: str) -> bytes:
    return "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()


def test_every_format_is_read_in_a_fixed_order(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("plain")
    (tmp_path / "b.md").write_text("märkdown")
    (tmp_path / "c.jsonl").write_bytes(lines("one", "", "two") + b"\n")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines("zipped")))
    with pa.CompressedOutputStream(str(tmp_path / "e.jsonl.zst"), "zstd") as file:
        file.write(lines("z" * 100_000, "standard"))
    pq.write_table(pa.table({"text": ["columns", "rows"], "other": [1, 2]}), tmp_path / "f.parquet")
    (tmp_path / "ignored.csv").write_text("no")
    assert texts(tmp_path) == {
        "b.md": "märkdown",
        "c.jsonl:1": "one",
        "c.jsonl:3": "two",
        "d.jsonl.gz:1": "zipped",
        "deep/a.txt": "plain",
        "e.jsonl.zst:1": "z" * 100_000,
        "e.jsonl.zst:2": "standard",
        "f.parquet:0": "columns",
        "f.parquet:1": "rows",
    }
    assert list(texts(tmp_path / "*.jsonl")) == ["c.jsonl:1", "c.jsonl:3"]
    assert list(texts(f"{tmp_path}/**/*.txt")) == ["deep/a.txt"]
    assert list(texts(tmp_path / "b.md")) == ["b.md"]


def test_max_bytes_stops_before_the_document_that_would_exceed_it(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    assert list(texts(tmp_path, max_bytes=20)) == ["a.txt", "b.txt"]
    assert list(texts(tmp_path, max_bytes=19)) == ["a.txt"]


CUT_OFF = gzip.compress(lines(*map(str, range(9999))), mtime=0)[:2000]
"""Without a time of its own: workers must see the same tests."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"caf\xe9", r"x\.txt: not UTF-8 at byte 3; convert it"),
        ("x.jsonl", lines("ok") + b'{"text": \n', r"x\.jsonl:2: not JSON"),
        ("x.jsonl", lines("ok") + b'{"text": "\xe9"}\n', r"x\.jsonl:2: not UTF-8"),
        (
            "x.jsonl",
            lines("ok") + b'{"body": "hi"}\n',
            r":2: has no field 'text' \(data.text_field\), only 'body'",
        ),
        ("x.jsonl", b'{"text": 3}\n', r"x\.jsonl:1: field 'text' .* holds int"),
        ("x.jsonl", b'["text"]\n', r"x\.jsonl:1: has no field 'text'"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', r"x\.jsonl:1: .*surrogate"),
        ("x.jsonl.gz", CUT_OFF, r"x\.jsonl\.gz:\d+: cannot be read on"),
        ("x.jsonl.gz", b"not gzip", r"x\.jsonl\.gz:1: cannot be read on"),
        ("x.jsonl.zst", b"not zstd", r"x\.jsonl\.zst:1: cannot be read on"),
        ("x.parquet", b"not parquet", r"x\.parquet:0: cannot be read as parquet"),
    ],
)
def test_bad_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        open_data(config(tmp_path), tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").glob(".building*"))


def test_text_field_picks_the_column(tmp_path):
    pq.write_table(pa.table({"body": ["columns"]}), tmp_path / "f.parquet")
    assert texts(tmp_path, text_field="body") == {"f.parquet:0": "columns"}
    with pytest.raises(ValueError, match=r"f\.parquet: has no column 'text' \(data.text_field\), only 'body'"):
        texts(tmp_path)


def test_nothing_to_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path='.*nowhere': holds no \.txt"):
        open_data(config(tmp_path / "nowhere"), tmp_path / "cache")
    (tmp_path / "a.txt").write_text("  \n")
    with pytest.raises(ValueError, match=r"data\.path=.*: the corpus is empty"):
        open_data(config(tmp_path), tmp_path / "cache")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ValueError, match=r"data\.validation_fraction=0\.1: .*one distinct document"):
        open_data(config(tmp_path), tmp_path / "cache")


def test_corpus_shorter_than_one_context_is_refused_with_one_that_fits(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 20)
    with pytest.raises(ValueError, match=r"data\.context_length=21: .*holds 21; try 10"):
        open_data(config(tmp_path, context_length=21), tmp_path / "cache")
    assert open_data(config(tmp_path, context_length=20), tmp_path / "cache").num_validation_rows == 1


def test_copies_of_a_document_lie_on_one_side_of_the_split(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(30):
        text = rng.bytes(60).hex()
        (tmp_path / f"a{i}.txt").write_text(text)
        (tmp_path / f"b{i}.txt").write_text(text)
    data = open_data(config(tmp_path, validation_fraction=0.3), tmp_path / "cache")
    rows = [json.loads(line) for line in Path(data.manifest["documents_file"]).read_text().splitlines()]
    sides = {side: {r["sha256"] for r in rows if r["validation"] == side} for side in (True, False)}
    assert len(sides[True]) == 9
    assert len(sides[False]) == 21
    assert not sides[True] & sides[False]


def test_hf_dataset_on_disk_is_streamed_without_network(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "small"
    (folder / "data").mkdir(parents=True)
    rows = [f"document number {i}" for i in range(40)]
    pq.write_table(pa.table({"content": rows}), folder / "data" / "train-00000-of-00001.parquet")
    pq.write_table(pa.table({"content": ["held out"]}), folder / "data" / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - {split: train, path: data/train-*}\n  - {split: test, path: data/test-*}\n---\n"
    )
    settings = config(folder, source="hf", text_field="content")
    assert [d.text.decode() for d in hf_source(settings).read()] == rows
    assert next(hf_source(settings).read()).id == "small:0"
    data = open_data(settings, tmp_path / "cache")
    assert data.manifest["documents"] == 40
    with pytest.raises(ValueError, match="small:0: has no field 'text'"):
        list(hf_source(config(folder, source="hf")).read())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data\.path='.*empty': cannot read this dataset") as error:
        list(hf_source(config(tmp_path / "empty", source="hf")).read())
    assert "\n" not in str(error.value)


def test_a_hub_that_cannot_be_reached_is_said_in_one_line_and_at_once(tmp_path):
    """Nothing listens on the endpoint; the hub's own client says thirteen lines in half a minute."""
    pytest.importorskip("datasets")
    command = [sys.executable, "-m", "msa_lab.cli", "prepare", "--data.source", "hf", "--data.path", "some/texts"]
    reached = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    began = time.monotonic()
    done = subprocess.run([*command, "--cache", tmp_path], env=reached, capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if not line.startswith("reading the corpus")]
    assert done.returncode == 2
    assert len(said) == 1, said
    assert said[0].startswith("msa-lab: data.path='some/texts': cannot read this dataset (")
    assert time.monotonic() - began < 25, "each of five tries waits longer"


def test_only_the_changed_part_of_a_config_that_is_not_read_is_named(tmp_path):
    settings = DataConfig(source="text", path="x", recall=RecallConfig(num_keys=99))
    with pytest.raises(ValueError, match="not read it") as error:
        open_data(settings, tmp_path)
    assert str(error.value) == "data.recall.num_keys=99: source=text does not read it; leave it 64"


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "python", "path": "x"},
        {"source": "python", "text_field": "x"},
        {"source": "recall", "max_bytes": 9},
        {"source": "recall", "document_mask": True},
        {"source": "recall", "tokenizer": "x.json"},
        {"source": "text", "path": "x", "recall": RecallConfig(pairs=3)},
    ],
)
def test_field_that_the_source_does_not_read_is_refused(settings, tmp_path):
    with pytest.raises(ValueError, match=r"data\.[\w.]+=.*does not read it"):
        open_data(DataConfig(**settings), tmp_path)
