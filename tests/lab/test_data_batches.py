"""Rows: which tokens a step sees, without favour and without chance."""

from collections import Counter

import numpy as np
import pytest
import torch
from tiny import write_corpus

from msa_lab.config import DataConfig
from msa_lab.data import open_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text"), documents=20, words=300)


def open_corpus(folder, **changes):
    settings = {"source": "text", "path": str(folder), "context_length": 64, "validation_fraction": 0.3, **changes}
    return open_data(DataConfig(**settings), folder / "cache")


def stream(data, split):
    return np.fromfile(data.folder / f"{split}.bin", np.uint16).astype(np.int64)


def test_batch_depends_on_seed_and_step_alone(folder):
    one, other = open_corpus(folder), open_corpus(folder)
    expected = [one.batch(3, step, 4).inputs for step in range(200)]
    for step in (150, 7, 199, 0):
        assert torch.equal(other.batch(3, step, 4).inputs, expected[step])
    assert not torch.equal(one.batch(4, 7, 4).inputs, expected[7])


def test_targets_are_the_next_tokens(folder):
    data = open_corpus(folder)
    text = stream(data, "train").tobytes()
    for row in range(8):
        batch = data.batch(0, row, 1)
        assert torch.equal(batch.inputs[0, 1:], batch.targets[0, :-1])
    inner = [torch.cat([b.inputs[0], b.targets[0, -1:]]) for b in (data.batch(0, s, 1) for s in range(8))]
    found = [row.numpy().tobytes() in text for row in inner]
    assert sum(found) >= 7, "only a window over the end of the circle is not in the stream"
    assert batch.distance is None
    assert batch.cu_seqlens is None


def test_no_window_returns_within_an_epoch_and_none_is_left_out(folder):
    data = open_corpus(folder)
    tokens = len(stream(data, "train"))
    windows = tokens // 64
    position = {}
    text = np.append(stream(data, "train"), stream(data, "train")[:64])
    for start in range(tokens):
        position.setdefault(text[start : start + 65].tobytes(), []).append(start)
    for epoch in range(2):
        starts = []
        for place in range(windows):
            batch = data.batch(1, epoch * windows + place, 1)
            row = np.append(batch.inputs[0].numpy(), batch.targets[0, -1].numpy())
            starts.append(position[row.tobytes()])
        single = sorted(s[0] for s in starts if len(s) == 1)
        assert len(single) > 0.9 * windows
        assert min(np.diff(single)) >= 64, "windows of an epoch do not overlap"
    assert [data.batch(1, i, 1).inputs.tolist() for i in range(3)] != [
        data.batch(1, windows + i, 1).inputs.tolist() for i in range(3)
    ]


def test_no_token_is_favoured_by_its_place_in_the_stream(tmp_path):
    # 20 distinct bytes in one training document, so that a row tells its place.
    (tmp_path / "a.txt").write_bytes(bytes(range(65, 85)))
    (tmp_path / "b.txt").write_bytes(bytes(range(97, 107)))
    data = open_corpus(tmp_path, context_length=9, validation_fraction=0.4)
    assert len(stream(data, "train")) == 21
    seen = Counter(int(t) for step in range(400) for t in data.batch(0, step, 8).inputs.flatten())
    expected = 400 * 8 * 9 / 21
    assert len(seen) == 21
    assert all(abs(count - expected) < 6 * expected**0.5 for count in seen.values())


def test_validation_rows_are_fixed_disjoint_and_spread(folder):
    data = open_corpus(folder)
    total = data.num_validation_rows
    text = stream(data, "validation")
    windows = {text[i * 64 : i * 64 + 64].tobytes(): i for i in range(total)}
    rows = [windows[row.numpy().tobytes()] for i in range(-(-total // 4)) for row in data.validation(i, 4).inputs]
    assert sorted(rows) == list(range(total))
    quarter = np.sort(rows[: total // 4])
    assert np.diff(quarter, prepend=-1, append=total).max() <= 5
    assert len(data.validation(total // 4, 4).inputs) == total % 4
    with pytest.raises(ValueError, match=f"there are only {total}"):
        data.validation(-(-total // 4), 4)


def test_documents_restart_at_their_marks(folder):
    data = open_corpus(folder, document_mask=True, context_length=400)
    plain = open_corpus(folder, context_length=400)
    lengths = set()
    for step in range(20):
        batch = data.batch(0, step, 3)
        assert torch.equal(batch.inputs, plain.batch(0, step, 3).inputs)
        starts = [i for i, t in enumerate(batch.inputs.flatten().tolist()) if t == 256 or i % 400 == 0]
        offsets = batch.cu_seqlens
        assert offsets.dtype == torch.int32
        assert offsets.tolist() == starts + [1200] * (len(offsets) - len(starts))
        assert len(offsets) > len(starts)
        lengths.add(len(offsets))
    assert len(lengths) == 1
    offsets = data.validation(0, 2).cu_seqlens
    assert (len(offsets) - 1) / 2 == (lengths.pop() - 1) / 3


def test_row_full_of_tiny_documents_has_room_for_all_offsets(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([65 + i]))
    data = open_corpus(tmp_path, context_length=7, document_mask=True, validation_fraction=0.5)
    for step in range(30):
        batch = data.batch(0, step, 4)
        starts = [i for i, t in enumerate(batch.inputs.flatten().tolist()) if t == 256 or i % 7 == 0]
        assert batch.cu_seqlens[: len(starts)].tolist() == starts
        assert int(batch.cu_seqlens[-1]) == 28


def test_probe_rows_are_starts_of_long_validation_documents(folder):
    data = open_corpus(folder)
    probe = data.probe(4)
    assert torch.equal(probe.tokens, open_corpus(folder).probe(4).tokens)
    assert len(set(probe.ids)) == 4
    for name, row in zip(probe.ids, probe.tokens, strict=True):
        assert data.decode(row) == (folder / name).read_text()[:63]
        assert row[0] == 256


def test_probe_takes_no_document_that_ends_within_its_row(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(chr(65 + i) * (20 if i % 2 else 9))
    data = open_corpus(tmp_path, context_length=20, validation_fraction=0.5)
    assert all(256 not in row[1:] for row in data.probe(3).tokens)
    with pytest.raises(ValueError, match=r"documents=40: only (\d+) validation documents are longer.*try \1"):
        data.probe(40)
