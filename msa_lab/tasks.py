"""Associative recall in which the distance of every dependency is chosen in blocks.

A row shows pairs (`key value`) between filler tokens, and asks for them later:

    ... k7 v31 ... f3 f0 ... ? k7 ...          answer at k7: v31
    ... k2 v9 ... k9 v40 ... ?? k2 ...         two hops: v9 names k9, whose value is the answer, v40

A pair always lies inside one block, and never in the block of its question. The answer is not shown after the question,
so nothing nearer than the stated source can give it away.

Vocabulary, for K = num_keys: keys 0 to K-1, values K to 2K-1 (value K+i names key i), `?` 2K, `??` 2K+1, then FILLERS
filler tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from msa_lab.batch import IGNORED, Batch, Probe
from msa_lab.config import DataConfig

FILLERS = 16
"""Distinct filler tokens, drawn uniformly wherever nothing else stands."""
VALIDATION_ROWS = 256
TRIES = 10_000
"""Draws of a place for one question before giving up; at the allowed load a handful is enough."""
TRAINING, VALIDATION = 1, 2
"""First word of the random key, so that no training batch repeats validation."""
VERSION = 1
"""Part of the hash; changes when the same config gives other tokens."""


class _Rows(NamedTuple):
    inputs: np.ndarray
    targets: np.ndarray
    distance: np.ndarray


class Recall:
    """The recall task; the same methods as `msa_lab.data.Corpus`.

    Every key is asked for once: each question takes one key, or two when it has two hops. Its distance in blocks is
    uniform over 1 to near_blocks with probability near_fraction, else log-uniform over what lies beyond; the block of
    the question is uniform over those that leave room for it. The distance of a two-hop question is that of its farther
    hop (either one); the other hop is log-uniform up to there. An overwritten key is shown with another value in
    an earlier block too.

    With `distances` every block begins with equally many pairs, and the rest of each block from the farthest distance
    on is questions: one of the distances each, uniformly, and one of the pairs that stand there. All distances are
    then open to every question, a key may be asked for more than once or never, and nothing but the key tells which
    of them it is. An answer at `coded_from` or beyond is given as value i + num_keys / 2 (modulo num_keys).

    Attributes:
        hash: Over the task's shape and context_length.
        manifest: The shape and the counts, as plain values.
        vocab_size: Keys, values, two question marks and fillers.
        bytes_per_token: None: there is no text.
        num_validation_rows: Rows that `validation` can give.

    Raises:
        ValueError: The pairs and questions do not fit into the row at these distances.
    """

    bytes_per_token = None
    tokenizer = None
    num_validation_rows = VALIDATION_ROWS

    def __init__(self, config: DataConfig) -> None:
        shape = config.recall
        self._shape, self._length = shape, config.context_length
        self._blocks, self._slots = self._length // shape.block_size, shape.block_size // 2
        self._two_hop = min(
            round(shape.two_hop_fraction * shape.pairs / (1 + shape.two_hop_fraction)), shape.pairs // 2
        )
        self._questions = shape.pairs - self._two_hop
        overwritten = round(shape.overwrite_fraction * shape.pairs)
        self._overwritten = np.zeros(shape.pairs, dtype=bool)
        self._overwritten[np.linspace(0, shape.pairs - 1, overwritten).round().astype(int)] = True
        if shape.distances:
            self._check_even()
            self._questions = (self._blocks - shape.distances[-1]) * (self._slots - shape.pairs // self._blocks)
        else:
            self._check()
        plain = {"source": "recall", "version": VERSION, "context_length": self._length, **asdict(shape)}
        if not shape.distances:
            del plain["distances"], plain["coded_from"]  # rows without them are what they were before there were any
        self.hash = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
        counts = {"questions": self._questions, "two_hop_questions": self._two_hop, "overwritten_keys": overwritten}
        self.manifest: dict[str, Any] = plain | counts
        self.vocab_size = 2 * shape.num_keys + 2 + FILLERS

    def _check(self) -> None:
        shape, size = self._shape, self._shape.block_size
        if size < 2:
            raise ValueError(f"data.recall.block_size={size}: a pair takes two tokens of one block; try 16")
        if shape.overwrite_fraction and shape.num_keys < 2:
            raise ValueError(f"data.recall.num_keys={shape.num_keys}: overwriting needs a second value; try 2")
        for name, count in (("two_hop_fraction", self._two_hop), ("overwrite_fraction", self._overwritten.sum())):
            if (value := getattr(shape, name)) and not count:
                rule = f"is no whole question of pairs={shape.pairs}"
                raise ValueError(f"data.recall.{name}={value}: {rule}; try {name}=0.5 with pairs=4 or more")
        needed = 1 + (shape.near_blocks + 1 if shape.near_fraction < 1 else 1) + bool(self._overwritten.any())
        if self._blocks < needed:
            rule = f"near_blocks={shape.near_blocks} needs {needed} blocks of {size} tokens, a row holds {self._blocks}"
            raise ValueError(f"data.context_length={self._length}: {rule}; try {needed * size}")
        places, taken = self._blocks * self._slots, shape.pairs + int(self._overwritten.sum()) + self._questions
        if 2 * taken > places:
            rule = f"takes {taken} of the row's {places} places of two tokens, and at most half may be taken"
            longer = -(-2 * taken // self._slots) * size
            fewer = int(shape.pairs * places / (2 * taken))
            fix = f"data.context_length={longer}" + (f" or pairs={fewer}" if fewer else "")
            raise ValueError(f"data.recall.pairs={shape.pairs}: {rule}; try {fix}")

    def _check_even(self) -> None:
        shape, size, blocks = self._shape, self._shape.block_size, self._blocks
        if size < 4:
            rule = f"with distances={shape.distances} a block holds a pair and a question, two tokens each"
            raise ValueError(f"data.recall.block_size={size}: {rule}; try 16")
        if blocks <= shape.distances[-1]:
            rule = f"distances={shape.distances} need {shape.distances[-1] + 1} blocks of {size} tokens, a row holds"
            fix = (shape.distances[-1] + 1) * size
            raise ValueError(f"data.context_length={self._length}: {rule} {blocks}; try {fix}")
        if shape.pairs % blocks or shape.pairs // blocks >= self._slots:
            rule = f"with distances each of the {blocks} blocks holds equally many, 1 to {self._slots - 1}"
            raise ValueError(f"data.recall.pairs={shape.pairs}: {rule}; try {blocks}, with num_keys at least as many")

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Training rows of one step: a pure function of the arguments."""
        return _batch(self._generate([TRAINING, seed, step], batch_size))

    def validation(self, index: int, batch_size: int) -> Batch:
        """Fixed rows, the same for every seed; the last batch may hold fewer.

        Raises:
            ValueError: There is no such batch.
        """
        start = index * batch_size
        if start >= VALIDATION_ROWS:
            raise ValueError(f"validation row {start}: there are only {VALIDATION_ROWS}; use fewer validation batches")
        return _batch(_Rows(*(part[start : start + batch_size] for part in self._validation)))

    def probe(self, documents: int) -> Probe:
        """The first validation rows, so `validation` gives their targets and distances.

        Raises:
            ValueError: There are fewer.
        """
        if documents > VALIDATION_ROWS:
            rule = f"recall has {VALIDATION_ROWS} validation rows"
            raise ValueError(f"selections.documents={documents}: {rule}; try {VALIDATION_ROWS}")
        tokens = torch.from_numpy(self._validation.inputs[:documents].copy())
        return Probe(tokens, tuple(f"recall/{row}" for row in range(documents)))

    def decode(self, tokens: Iterable[int]) -> str:
        """The tokens as words: k7, v31, ?, ??, f3."""
        keys = self._shape.num_keys
        names = [f"k{i}" for i in range(keys)] + [f"v{i}" for i in range(keys)] + ["?", "??"]
        names += [f"f{i}" for i in range(FILLERS)]
        return " ".join(names[int(token)] for token in tokens)

    def bigram_bits_per_byte(self, rows: int | None = None) -> None:
        """None: there is no text."""
        return

    @cached_property
    def _validation(self) -> _Rows:
        return self._generate([VALIDATION], VALIDATION_ROWS)

    def _generate(self, key: list[int], rows: int) -> _Rows:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
        return self._even(rng, rows) if self._shape.distances else self._scattered(rng, rows)

    def _even(self, rng: np.random.Generator, rows: int) -> _Rows:
        """Rows whose blocks hold the same at the same places: first pairs, then questions."""
        shape, count = self._shape, self._shape.num_keys
        each = shape.pairs // self._blocks
        places = np.arange(self._blocks)[:, None] * shape.block_size + 2 * np.arange(self._slots)
        shown, asked = places[:, :each].ravel(), places[shape.distances[-1] :, each:].ravel()
        keys = np.argsort(rng.random((rows, count)), axis=1)[:, : shape.pairs]
        values = _below(count, rng.random((rows, shape.pairs)))
        inputs = 2 * count + 2 + _below(FILLERS, rng.random((rows, self._length)))
        targets, distance = np.full_like(inputs, IGNORED), np.full_like(inputs, -1)
        blocks = np.array(shape.distances)[_below(len(shape.distances), rng.random((rows, len(asked))))]
        pair = (asked // shape.block_size - blocks) * each + _below(each, rng.random(blocks.shape))
        inputs[:, shown], inputs[:, shown + 1] = keys, count + values
        inputs[:, asked], inputs[:, asked + 1] = 2 * count, np.take_along_axis(keys, pair, axis=1)
        coded = (blocks >= shape.coded_from) & (shape.coded_from > 0)
        targets[:, asked + 1] = count + (np.take_along_axis(values, pair, axis=1) + coded * (count // 2)) % count
        distance[:, asked + 1] = asked - shown[pair]
        return _Rows(inputs, targets, distance)

    def _scattered(self, rng: np.random.Generator, rows: int) -> _Rows:
        shape, count = self._shape, self._shape.num_keys
        keys = np.argsort(rng.random((rows, count)), axis=1)[:, : shape.pairs]
        values = _below(count, rng.random((rows, shape.pairs)))
        chained = 2 * self._two_hop
        values[:, 0:chained:2] = keys[:, 1:chained:2]
        stale = (values + 1 + _below(count - 1, rng.random((rows, shape.pairs)))) % count
        inputs = 2 * count + 2 + _below(FILLERS, rng.random((rows, self._length)))
        targets, distance = np.full_like(inputs, IGNORED), np.full_like(inputs, -1)
        order = np.argsort(rng.random((rows, self._blocks, self._slots)), axis=2)
        free = np.full((rows, self._blocks), self._slots)
        row = np.arange(rows)
        for hops in self._hops():
            again = [hop for hop in hops if self._overwritten[hop]]
            asked, *shown = self._place(rng, free, order, hops).T
            kept = [values[:, hop] for hop in hops] + [stale[:, hop] for hop in again]
            for place, hop, value in zip(shown, [*hops, *again], kept, strict=True):
                inputs[row, place], inputs[row, place + 1] = keys[:, hop], count + value
            inputs[row, asked], inputs[row, asked + 1] = 2 * count + len(hops) - 1, keys[:, hops[0]]
            targets[row, asked + 1] = count + values[:, hops[-1]]
            distance[row, asked + 1] = asked - np.min(shown[: len(hops)], axis=0)
        return _Rows(inputs, targets, distance)

    def _hops(self) -> list[tuple[int, ...]]:
        """The keys (columns) of each question, in the order of the hops."""
        chained = 2 * self._two_hop
        return [(i, i + 1) for i in range(0, chained, 2)] + [(i,) for i in range(chained, self._shape.pairs)]

    def _place(
        self, rng: np.random.Generator, free: np.ndarray, order: np.ndarray, hops: tuple[int, ...]
    ) -> np.ndarray:
        """Tokens (row, thing) where question, pairs and stale pairs start; takes from `free` (row, block)."""
        near = rng.random(len(free)) < self._shape.near_fraction
        waiting = np.arange(len(free))
        blocks = self._draw(rng, near, hops)
        before = free.copy()
        for _ in range(TRIES):
            left = before[waiting]
            np.subtract.at(left, (np.arange(len(waiting))[:, None], blocks[waiting]), 1)
            fits = left.min(axis=1) >= 0
            free[waiting[fits]] = left[fits]
            waiting = waiting[~fits]
            if not len(waiting):
                break
            blocks[waiting] = self._draw(rng, near[waiting], hops)
        else:
            rule = "found no free place for a question at its distance"
            raise ValueError(f"data.recall.pairs={self._shape.pairs}: {rule}; try {max(self._shape.pairs // 2, 1)}")
        row, places = np.arange(len(free)), np.empty_like(blocks)
        for thing, block in enumerate(blocks.T):
            slot = order[row, block, before[row, block] - 1]
            before[row, block] -= 1
            places[:, thing] = block * self._shape.block_size + 2 * slot
        return places

    def _draw(self, rng: np.random.Generator, near: np.ndarray, hops: tuple[int, ...]) -> np.ndarray:
        """Blocks (row, thing) of a question, its pairs in the order of the hops, and their stale pairs."""
        again = self._overwritten[list(hops)]
        margin = int(again.any())
        furthest = self._blocks - 1 - margin
        nearest = min(self._shape.near_blocks, furthest)
        u = rng.random((4 + len(hops), len(near)))
        weight = np.cumsum(1 / np.arange(1, self._blocks))
        far = weight[nearest - 1] + u[0] * (weight[furthest - 1] - weight[nearest - 1])
        distance = 1 + np.where(near, _below(nearest, u[0]), np.searchsorted(weight, far, side="right"))
        question = distance + margin + _below(self._blocks - distance - margin, u[1])
        pairs = [question - distance]
        if len(hops) == 2:
            other = question - 1 - np.searchsorted(weight, u[2] * weight[distance - 1], side="right")
            pairs = [np.where(u[3] < 0.5, pairs[0], other), np.where(u[3] < 0.5, other, pairs[0])]
        stale = [_below(pair, u[4 + i]) for i, pair in enumerate(pairs) if again[i]]
        return np.stack([question, *pairs, *stale], axis=1)


def _below(limit: int | np.ndarray, uniform: np.ndarray) -> np.ndarray:
    return (uniform * limit).astype(np.int64)


def _batch(rows: _Rows) -> Batch:
    inputs, targets, distance = (torch.from_numpy(part.copy()) for part in rows)
    return Batch(inputs, targets, None, distance)
