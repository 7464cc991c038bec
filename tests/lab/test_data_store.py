"""Token files: built once, found again, safe against cuts, kills and a second builder."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import write_corpus

from msa_lab import store
from msa_lab.config import DataConfig
from msa_lab.data import open_data


@pytest.fixture
def config(tmp_path):
    folder = write_corpus(tmp_path / "text", documents=12, words=60)
    return DataConfig(source="text", path=str(folder), context_length=32, validation_fraction=0.3)


def test_files_hold_mark_and_bytes_of_every_document(config, tmp_path):
    data = open_data(config, tmp_path / "cache")
    held = {split: np.fromfile(data.folder / f"{split}.bin", np.uint16).tolist() for split in store.SPLITS}
    expected: dict[str, list[int]] = {"train": [], "validation": []}
    for row in store.read_documents(data.folder):
        text = (Path(config.path) / row["id"]).read_bytes()
        expected["validation" if row["validation"] else "train"] += [256, *text]
    assert held == expected
    names = [row["id"] for row in store.read_documents(data.folder) if row["validation"]]
    texts = [(Path(config.path) / name).read_bytes() for name in names]
    assert list(store.document_texts(data.folder, "validation")) == texts
    assert json.loads(json.dumps(data.manifest)) == data.manifest


def test_unchanged_corpus_is_not_read_again(config, tmp_path, monkeypatch):
    first = open_data(config, tmp_path / "cache")
    said: list[str] = []
    assert open_data(config, tmp_path / "cache", said.append).hash == first.hash
    assert said == []
    (Path(config.path) / "doc00.txt").write_text("changed " * 30)
    second = open_data(config, tmp_path / "cache", said.append)
    assert said
    assert second.hash != first.hash
    assert (tmp_path / "cache" / first.hash).exists()


@pytest.mark.parametrize(
    "change", [{"validation_fraction": 0.6}, {"max_bytes": 1500}, {"expected_hash": ""}, {"context_length": 64}]
)
def test_hash_covers_what_changes_the_tokens_and_nothing_else(config, tmp_path, change):
    same = set(change) <= {"expected_hash", "context_length"}
    one, two = open_data(config, tmp_path / "cache"), open_data(replace(config, **change), tmp_path / "cache")
    assert (one.hash == two.hash) == same


def test_hash_is_the_same_wherever_and_whenever_it_is_built(config, tmp_path):
    moved = write_corpus(tmp_path / "elsewhere" / "text2", documents=12, words=60)
    one = open_data(config, tmp_path / "cache")
    two = open_data(replace(config, path=str(moved)), tmp_path / "cache2")
    assert one.hash == two.hash
    assert one.manifest["sha256"] == two.manifest["sha256"]


def test_another_corpus_than_expected_is_refused(config, tmp_path):
    data = open_data(config, tmp_path / "cache")
    assert open_data(replace(config, expected_hash=data.hash), tmp_path / "cache").hash == data.hash
    (Path(config.path) / "doc00.txt").write_text("changed " * 30)
    other = open_data(config, tmp_path / "cache2")
    with pytest.raises(ValueError, match=rf"expected_hash='{data.hash}': the corpus here hashes to '{other.hash}'"):
        open_data(replace(config, expected_hash=data.hash), tmp_path / "cache2")


def test_pinned_corpus_is_taken_from_a_copied_cache(config, tmp_path):
    data = open_data(config, tmp_path / "cache")
    (Path(config.path) / "doc00.txt").write_text("changed " * 30)
    pinned = replace(config, expected_hash=data.hash)
    assert open_data(pinned, tmp_path / "cache").hash == data.hash
    with pytest.raises(ValueError, match="the corpus here hashes to"):
        open_data(replace(pinned, max_bytes=1500), tmp_path / "cache")


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "header.json"])
def test_truncated_file_is_named_with_the_way_out(config, tmp_path, name):
    data = open_data(config, tmp_path / "cache")
    path = data.folder / name
    path.write_bytes(path.read_bytes()[:-2])
    path.write_bytes(path.read_bytes()[: 20 if name == "header.json" else None])
    with pytest.raises(ValueError, match=rf"{name}: .*remove \S+{data.hash} and start again") as error:
        open_data(config, tmp_path / "cache")
    assert "\n" not in str(error.value)
    for file in data.folder.iterdir():
        file.unlink()
    data.folder.rmdir()
    assert open_data(config, tmp_path / "cache").hash == data.hash


def test_failed_build_leaves_nothing_and_the_next_one_works(config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(store, "_finish", full)
        with pytest.raises(OSError, match="No space left"):
            open_data(config, tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".lock"]
    (tmp_path / "cache" / ".building-1").mkdir()
    assert open_data(config, tmp_path / "cache").num_validation_rows
    assert not list((tmp_path / "cache").glob(".building*"))


def test_two_processes_building_at_once_build_once(config, tmp_path):
    program = (  # what `open_data` does before it needs torch, which takes seconds to import
        "import sys, time\nfrom pathlib import Path\nfrom msa_lab.config import DataConfig\n"
        "from msa_lab.store import corpus_folder, open_tokens\nfrom msa_lab.tokenizer import ByteTokenizer\n"
        "config = DataConfig(source='text', path=sys.argv[1], context_length=32, validation_fraction=0.3)\nsaid = []\n"
        "print('ready', flush=True)\nsys.stdin.read(1)\n"
        "report = lambda line: (said.append(line), time.sleep(0.5))\n"
        "folder = corpus_folder(config, ByteTokenizer(), Path(sys.argv[2]), report)\n"
        "print(folder.name, len(said), open_tokens(folder, 'train').sum())"
    )
    command = [sys.executable, "-c", program, config.path, str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("x")
        process.stdin.flush()
    answers = [process.communicate(timeout=120)[0].split() for process in processes]
    assert answers[0][0] == answers[1][0]
    assert answers[0][2] == answers[1][2]
    assert sorted(answer[1] for answer in answers) == ["0", "1"]
    assert len([p for p in (tmp_path / "cache").iterdir() if (p / "header.json").exists()]) == 1
