"""Recall: every answer stands where the batch says it does, read off the tokens by a scan."""

import numpy as np
import pytest
import torch

from msa_lab.config import DataConfig, RecallConfig
from msa_lab.data import open_data
from msa_lab.tasks import Recall

KINDS = {
    "plain": {},
    "two hops": {"two_hop_fraction": 0.5},
    "overwritten": {"overwrite_fraction": 0.4},
    "everything, odd block": {"two_hop_fraction": 0.3, "overwrite_fraction": 0.5, "block_size": 17},
    "long reach": {"near_blocks": 20},
}


def make(context_length=1024, **shape) -> Recall:
    data = open_data(DataConfig(source="recall", context_length=context_length, recall=RecallConfig(**shape)))
    assert isinstance(data, Recall)
    return data


def solve(row: list[int], at: int, keys: int) -> tuple[int, list[int]]:
    """Answer and value positions a reader of row[: at + 1] finds for the question at `at`: the latest pair wins."""

    def latest(key: int) -> int:
        return max(i for i in range(1, at) if row[i - 1] == key and keys <= row[i] < 2 * keys)

    places = [latest(row[at])]
    if row[at - 1] == 2 * keys + 1:
        places.append(latest(row[places[0]] - keys))
    return row[places[-1]], places


@pytest.mark.parametrize("shape", KINDS.values(), ids=KINDS)
def test_answers_really_stand_at_the_stated_distance(shape):
    data = make(**shape)
    keys, size, near = data._shape.num_keys, data._shape.block_size, data._shape.near_blocks
    batch = data.batch(0, 0, 16)
    blocks = []
    for row, targets, distance in zip(
        *(t.tolist() for t in (batch.inputs, batch.targets, batch.distance)), strict=True
    ):
        asked = [i for i in range(1, len(row)) if row[i - 1] in (2 * keys, 2 * keys + 1)]
        assert (
            asked == [i for i, t in enumerate(targets) if t != -100] == [i for i, d in enumerate(distance) if d != -1]
        )
        assert len(asked) == data.manifest["questions"]
        assert sum(row[i - 1] == 2 * keys + 1 for i in asked) == data.manifest["two_hop_questions"]
        for i in asked:
            answer, places = solve(row, i, keys)
            assert targets[i] == answer
            assert distance[i] == i - min(places)
            hops = [i // size - place // size for place in places]
            assert min(hops) >= 1, "never the question's own block"
            assert all(place // size == (place - 1) // size for place in places), "a pair lies inside one block"
            blocks.append(max(hops))
    share = np.mean(np.array(blocks) <= near)
    assert share == pytest.approx(0.5, abs=4 * 0.5 / len(blocks) ** 0.5)
    assert set(range(1, near + 1)) <= set(blocks)


def test_distances_follow_their_law():
    data = make(2048, near_fraction=0.25, near_blocks=3)
    batch = data.batch(1, 0, 200)
    row, at = np.nonzero(batch.targets.numpy() >= 0)
    source = at - batch.distance.numpy()[row, at]
    blocks = at // 16 - source // 16
    near = blocks[blocks <= 3]
    count = len(blocks)
    assert len(near) / count == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / count) ** 0.5)
    assert np.bincount(near, minlength=4)[1:] / len(near) == pytest.approx(1 / 3, abs=0.04)
    far = blocks[blocks > 3]
    law = 1 / np.arange(4, 128)
    law /= law.sum()
    for low, high in ((4, 8), (8, 16), (16, 32), (32, 64), (64, 128)):
        expected = law[low - 4 : high - 4].sum()
        assert np.mean((far >= low) & (far < high)) == pytest.approx(expected, abs=4 * (expected / len(far)) ** 0.5)


def test_overwritten_key_is_shown_twice_and_the_stale_value_is_another():
    data = make(overwrite_fraction=0.5, two_hop_fraction=0.5)
    keys, twice = 64, 0
    for row in data.batch(0, 3, 8).inputs.tolist():
        shown: dict[int, list[int]] = {}
        for i in range(1, len(row)):
            if row[i - 1] < keys and keys <= row[i] < 2 * keys:
                shown.setdefault(row[i - 1], []).append(i)
        again = {key: at for key, at in shown.items() if len(at) > 1}
        assert len(shown) == 48
        assert len(again) == 24
        for first, second in again.values():
            assert row[first] != row[second]
            assert first // 16 < second // 16
            twice += 1
    assert twice == 8 * 24


def test_two_hop_farther_hop_may_be_either():
    data = make(two_hop_fraction=1.0)
    first = []
    for row in data.batch(0, 0, 8).inputs.tolist():
        for i in (i for i in range(1, len(row)) if row[i - 1] == 129):
            _, places = solve(row, i, 64)
            first.append(places[0] < places[1])
    assert 0.3 < np.mean(first) < 0.7


def test_rows_depend_on_seed_and_step_alone_and_validation_on_neither():
    one, other = make(), make()
    batch = one.batch(1, 5, 4)
    one.batch(1, 6, 4)
    for a, b in zip(batch[:2], other.batch(1, 5, 4)[:2], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(batch.inputs, other.batch(1, 6, 4).inputs)
    assert not torch.equal(batch.inputs, other.batch(2, 5, 4).inputs)
    assert torch.equal(one.validation(2, 8).inputs, other.validation(1, 16).inputs[:8])
    assert torch.equal(one.probe(4).tokens, one.validation(0, 4).inputs)
    assert one.probe(2).ids == ("recall/0", "recall/1")
    assert len(one.validation(2, 100).inputs) == 56
    with pytest.raises(ValueError, match="there are only 256"):
        one.validation(3, 100)
    with pytest.raises(ValueError, match=r"selections\.documents=300: .*try 256"):
        one.probe(300)


def test_every_field_of_the_shape_changes_the_rows_and_the_hash():
    base = RecallConfig()
    changes = {
        "num_keys": 65,
        "pairs": 47,
        "near_fraction": 0.6,
        "near_blocks": 3,
        "two_hop_fraction": 0.1,
        "overwrite_fraction": 0.1,
        "block_size": 32,
    }
    even = {"distances": (1, 3), "coded_from": 3}  # tested with the rows that they make
    assert set(changes) | set(even) == set(vars(base))
    plain = make()
    for name, value in changes.items():
        other = make(**{name: value})
        assert other.hash != plain.hash
        assert not torch.equal(other.batch(0, 0, 4).inputs, plain.batch(0, 0, 4).inputs), name


EVEN = {"num_keys": 80, "pairs": 40, "distances": (1, 3, 9), "block_size": 9}
"""Rows of 20 blocks of 9 tokens: two pairs, two questions, and a token over."""


@pytest.mark.parametrize("coded_from", [0, 3])
def test_even_rows_hold_the_same_everywhere_and_answers_at_the_named_distances_alone(coded_from):
    data = make(180, **EVEN, coded_from=coded_from)
    batch = data.batch(0, 0, 100)
    assert data.manifest["questions"] == 22
    blocks, second, answered = [], [], batch.targets.numpy() >= 0
    starts = [9 * block + place for block in range(9, 20) for place in (4, 6)]
    assert (answered == np.isin(np.arange(180), [start + 1 for start in starts])).all()
    for row, targets, distance in zip(
        *(t.tolist() for t in (batch.inputs, batch.targets, batch.distance)), strict=True
    ):
        for start in range(0, 180, 9):
            assert max(row[start], row[start + 2]) < 80 <= min(row[start + 1], row[start + 3]), "two pairs first"
        assert [i for i, token in enumerate(row) if token == 160] == starts
        for i in (start + 1 for start in starts):
            answer, (place,) = solve(row, i, 80)
            blocks.append(i // 9 - place // 9)
            second.append(place % 9 == 3)
            assert distance[i] == i - place
            assert targets[i] == (80 + (answer - 80 + 40) % 80 if coded_from and blocks[-1] >= coded_from else answer)
    share = np.bincount(blocks, minlength=10) / len(blocks)
    assert set(np.flatnonzero(share)) == {1, 3, 9}
    assert share[[1, 3, 9]] == pytest.approx(1 / 3, abs=4 * (2 / 9 / len(blocks)) ** 0.5)
    assert np.mean(second) == pytest.approx(0.5, abs=4 * 0.5 / len(second) ** 0.5)


def test_even_rows_follow_their_shape_and_leave_other_rows_as_they_were():
    plain = make(180, **EVEN)
    for change in ({"distances": (1, 3, 8)}, {"coded_from": 9}):
        other = make(180, **(EVEN | change))
        assert other.hash != plain.hash
        assert not torch.equal(other.batch(0, 0, 4).targets, plain.batch(0, 0, 4).targets)
    assert torch.equal(make(180, **EVEN, coded_from=10).batch(0, 0, 4).targets, plain.batch(0, 0, 4).targets)
    # The hash that rows without distances had before rows with them existed: runs of then and now are of one corpus.
    assert make().hash == "3db58f1335aa83a4"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"distances": (3, 1)}, r"recall\.distances=\(3, 1\): must be 1 or more blocks.*try \(1, 3\)"),
        ({"distances": (1, 1)}, r"recall\.distances=\(1, 1\): .* none twice; try \(1,\)"),
        ({"distances": (0,)}, r"recall\.distances=\(0,\): must be 1 or more"),
        ({"coded_from": -1}, r"recall\.coded_from=-1: must be at least 0"),
        ({"near_blocks": 3}, r"recall\.near_blocks=3: is not read with distances=\(1, 3, 9\); try 2"),
        ({"two_hop_fraction": 0.5}, r"recall\.two_hop_fraction=0\.5: is not read with distances"),
        ({"distances": (), "coded_from": 3}, r"recall\.coded_from=3: is read with distances only; try 0"),
        ({"distances": (1, 20)}, r"context_length=180: distances=\(1, 20\) need 21 blocks.* holds 20; try 189"),
        ({"pairs": 30}, r"recall\.pairs=30: with distances each of the 20 blocks.*1 to 3; try 20"),
        ({"pairs": 80}, r"recall\.pairs=80: with distances each of the 20 blocks"),
        ({"block_size": 3, "pairs": 60}, r"recall\.block_size=3: .*a pair and a question.*try 16"),
        ({"num_keys": 1, "pairs": 1, "coded_from": 3}, r"recall\.num_keys=1: coded_from=3 needs a second value; try 2"),
    ],
)
def test_even_rows_that_cannot_be_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        make(180, **(EVEN | shape))


def test_tokens_lie_in_the_vocabulary_and_have_names():
    data = make(two_hop_fraction=0.5)
    tokens = data.batch(0, 0, 16).inputs
    assert tokens.max() == data.vocab_size - 1 == 2 * 64 + 2 + 15
    assert tokens.min() == 0
    assert data.decode([0, 64, 128, 129, 130]) == "k0 v0 ? ?? f0"
    assert data.bytes_per_token is None
    assert data.bigram_bits_per_byte() is None


@pytest.mark.parametrize(
    ("context_length", "shape", "message", "works"),
    [
        (256, {}, r"recall\.pairs=48: takes 96 of the row's 128 places.*context_length=384 or pairs=32", (384, {})),
        (
            256,
            {},
            r"recall\.pairs=48: takes 96 of the row's 128 places.*context_length=384 or pairs=32",
            (256, {"pairs": 32}),
        ),
        (32, {"pairs": 2}, r"context_length=32: near_blocks=2 needs 4 blocks.*try 64", (64, {"pairs": 2})),
        (48, {"pairs": 2, "overwrite_fraction": 0.5, "near_fraction": 1.0}, None, None),
        (32, {"pairs": 2, "overwrite_fraction": 0.5, "near_fraction": 1.0}, r"try 48", None),
        (1024, {"block_size": 1}, r"recall\.block_size=1: a pair takes two", None),
        (1024, {"pairs": 4, "two_hop_fraction": 0.05}, r"two_hop_fraction=0\.05: is no whole question", None),
        (1024, {"num_keys": 1, "pairs": 1, "overwrite_fraction": 1.0}, r"num_keys=1: .*try 2", None),
    ],
)
def test_shape_that_does_not_fit_is_refused_with_one_that_does(context_length, shape, message, works):
    if message is None:
        make(context_length, **shape).batch(0, 0, 4)
        return
    with pytest.raises(ValueError, match=message):
        make(context_length, **shape)
    if works:
        make(works[0], **works[1]).batch(0, 0, 4)


@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_fullest_allowed_row_can_always_be_placed(size):
    for blocks in (3, 4, 8, 64):
        pairs = blocks * (size // 2) // 4
        if pairs:
            shape = {"num_keys": pairs, "pairs": pairs, "near_blocks": 1, "block_size": size}
            data = make(blocks * size, **shape)
            for step in range(10):
                assert (data.batch(0, step, 32).targets >= 0).sum() == 32 * pairs


def test_recall_hash_is_checked_too():
    data = make()
    with pytest.raises(ValueError, match=rf"hashes to '{data.hash}'"):
        open_data(DataConfig(source="recall", expected_hash="0" * 16))
