"""Batches as pure functions of (seed, step), fixed validation rows and probe documents, from any source of tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, is_dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from msa_lab.batch import Batch, Probe
from msa_lab.bigram import bigram_bits_per_byte
from msa_lab.config import DataConfig
from msa_lab.store import Report, corpus_folder, open_tokens, read_documents, read_header
from msa_lab.tasks import Recall
from msa_lab.tokenizer import Tokenizer, load_tokenizer


def open_data(config: DataConfig, cache: Path | str = "data", report: Report | None = None) -> Data:
    """The tokens that `config` names; builds what the cache folder does not hold yet.

    Args:
        config: What to read.
        cache: Folder of token files.
        report: Called with one line a stage of building; by default nothing is said.

    Raises:
        ValueError: A field that this source does not read is set, bad or too little text, or another corpus than
            `config.expected_hash`.
    """
    _refuse_unread(config)
    if config.source == "recall":
        data = Recall(config)
    else:
        tokenizer = load_tokenizer(config.tokenizer)
        folder = corpus_folder(config, tokenizer, Path(cache), report or (lambda line: None))
        data = Corpus(config, folder, tokenizer)
    if config.expected_hash not in ("", data.hash):
        rule = f"the corpus here hashes to {data.hash!r} (other packages, files or settings)"
        fix = f"copy the original's {cache} folder here, or set data.expected_hash={data.hash} to accept this one"
        raise ValueError(f"data.expected_hash={config.expected_hash!r}: {rule}; {fix}")
    return data


def _refuse_unread(config: DataConfig) -> None:
    unread = {
        "python": ("path", "text_field", "recall"),
        "text": ("recall",),
        "hf": ("recall",),
        "recall": ("path", "text_field", "max_bytes", "tokenizer", "document_mask", "validation_fraction"),
    }
    for name in unread[config.source]:
        value, default = getattr(config, name), getattr(DataConfig(), name)
        shown = [(name, value, default)]
        if is_dataclass(value):
            shown = [(f"{name}.{f.name}", getattr(value, f.name), getattr(default, f.name)) for f in fields(value)]
        for field, given, plain in shown:
            if given != plain:
                raise ValueError(f"data.{field}={given!r}: source={config.source} does not read it; leave it {plain!r}")


class Corpus:
    """Text as a stream of tokens, split into train and validation.

    Attributes:
        hash: Over package versions, documents, split and tokenizer.
        manifest: What went in, as plain values; `documents_file` lists every document with its sha256.
        tokenizer: Text to tokens and back.
        vocab_size: Rows of embedding that the tokens need.
        bytes_per_token: float64 (vocab,): bytes of text a token stands for; 0 for the document mark.
        num_validation_rows: Rows that `validation` can give.
    """

    def __init__(self, config: DataConfig, folder: Path, tokenizer: Tokenizer) -> None:
        header = read_header(folder)
        self.folder, self.hash = folder, folder.name
        self.manifest: dict[str, Any] = header["manifest"] | {"documents_file": str(folder / "documents.ndjson")}
        self.tokenizer = tokenizer
        self.vocab_size = self.tokenizer.vocab_size
        self.bytes_per_token = self.tokenizer.bytes_per_token
        self._length, self._mask_documents = config.context_length, config.document_mask
        self._train, self._validation = open_tokens(folder, "train"), open_tokens(folder, "validation")
        for split, tokens in (("train", self._train), ("validation", self._validation)):
            if len(tokens) <= self._length:
                rule = f"a row needs one token more, and the {split} split holds {len(tokens):,}"
                fix = f"{max(len(tokens) // 2, 2)}, or give more text"
                raise ValueError(f"data.context_length={self._length}: {rule}; try {fix}")
        self.num_validation_rows = (len(self._validation) - 1) // self._length

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Training rows of one step: a pure function of the arguments.

        The stream of training tokens is a circle, cut once an epoch at a random place into windows of
        `context_length` that are taken in random order without replacement, so that no token is favoured.
        """
        windows = len(self._train) // self._length
        epochs, places = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), windows)
        starts = np.empty(batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            offset, order = _epoch(seed, int(epoch), windows, len(self._train))
            here = epochs == epoch
            starts[here] = offset + order[places[here]] * self._length
        index = (starts[:, None] + np.arange(self._length + 1)) % len(self._train)
        return self._rows(self._train[index])

    def validation(self, index: int, batch_size: int) -> Batch:
        """Fixed rows, the same for every seed: windows of the validation stream in an order in which the first n rows
        are spread over the whole stream, for any n. The last batch may hold fewer rows.

        Raises:
            ValueError: There is no such batch.
        """
        return self._rows(self._validation_rows(index * batch_size, (index + 1) * batch_size))

    def _validation_rows(self, start: int, end: int) -> np.ndarray:
        total = self.num_validation_rows
        rows = np.arange(start, min(end, total))
        if not len(rows):
            raise ValueError(f"validation row {start}: there are only {total}; use fewer validation batches")
        starts = self._spread[rows] * self._length
        return self._validation[starts[:, None] + np.arange(self._length + 1)]

    @cached_property
    def _spread(self) -> np.ndarray:
        # Multiples of the golden section that fall below any bound come at even intervals.
        return np.argsort(np.arange(self.num_validation_rows) * 0.6180339887498949 % 1.0, kind="stable")

    def _rows(self, tokens: np.ndarray) -> Batch:
        rows = torch.from_numpy(tokens.astype(np.int64))
        offsets = self._offsets(tokens[:, :-1]) if self._mask_documents else None
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), offsets, None)

    def _offsets(self, inputs: np.ndarray) -> Int32[Tensor, " offsets"]:
        starts = inputs == self.tokenizer.mark
        starts[:, 0] = True
        found = np.flatnonzero(starts)
        offsets = np.full(len(inputs) * self._capacity + 1, inputs.size, dtype=np.int32)
        offsets[: len(found)] = found
        return torch.from_numpy(offsets)

    @cached_property
    def _capacity(self) -> int:
        """Documents, whole or cut, that one row can hold at most."""
        most = 0
        for tokens in (self._train, self._validation):
            marks = _positions(tokens, self.tokenizer.mark)
            around = np.append(marks, marks + len(tokens))
            ends = np.searchsorted(around, marks + self._length)
            most = max(most, int((ends - np.arange(len(marks))).max()))
        return most + 1

    def probe(self, documents: int) -> Probe:
        """The first `context_length` tokens of long validation documents, taken round-robin over packages.

        Raises:
            ValueError: Too few documents are longer than a row.
        """
        marks = _positions(self._validation, self.tokenizer.mark)
        lengths = np.diff(marks, append=len(self._validation))
        rows = [row for row in read_documents(self.folder) if row["validation"]]
        long = [(row, m) for row, m, n in zip(rows, marks, lengths, strict=True) if n > self._length]
        if len(long) < documents:
            rule = f"only {len(long)} validation documents are longer than context_length={self._length}"
            fewer = f"{len(long)}, " if long else ""
            fix = f"{fewer}a shorter context, or more text (data.max_bytes, data.validation_fraction)"
            raise ValueError(f"selections.documents={documents}: {rule}; try {fix}")
        long.sort(key=lambda item: item[0]["sha256"])
        taken: Counter[str] = Counter()
        turns = []
        for row, mark in long:
            turns.append((taken[row["package"]], len(turns), row["id"], mark))
            taken[row["package"]] += 1
        chosen = sorted(turns)[:documents]
        tokens = np.stack([self._validation[mark : mark + self._length] for *_, mark in chosen]).astype(np.int64)
        return Probe(torch.from_numpy(tokens), tuple(name for _, _, name, _ in chosen))

    def decode(self, tokens: Any) -> str:
        """The text of a sequence of token ids."""
        return self.tokenizer.decode(tokens)

    def bigram_bits_per_byte(self, rows: int | None = None) -> float:
        """Bits per byte of the training split's bigram table on the first `rows` validation rows (default: all).

        See `msa_lab.bigram`. Kept beside the tokens, so it is worked out once.
        """
        rows = self.num_validation_rows if rows is None else min(rows, self.num_validation_rows)
        kept = self.folder / f"bigram-{self._length}-{rows}.json"
        scored = self._validation_rows(0, rows)
        return bigram_bits_per_byte(self._train, scored, self.bytes_per_token, kept)


def _positions(tokens: np.ndarray, value: int) -> np.ndarray:
    part = 1 << 26
    return np.concatenate([i + np.flatnonzero(tokens[i : i + part] == value) for i in range(0, len(tokens), part)])


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, windows: int, tokens: int) -> tuple[int, np.ndarray]:
    """Where the circle of tokens is cut, and the order of the windows.

    Made of raw bits, whose stream NumPy keeps the same over versions.
    """
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(windows + 1)
    return int(raw[0] % tokens), np.argsort(raw[1:], kind="stable")


Data = Corpus | Recall
"""What `open_data` returns."""
