"""What a table of token pairs alone can predict: the bar that a model which looks further back must clear."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np

from msa_lab.runs import write_atomically

DENSE_VOCAB = 4096
"""Up to this size the table is counted in one dense array."""
PART = 1 << 22


def bigram_bits_per_byte(train: np.ndarray, rows: np.ndarray, bytes_per_token: np.ndarray, kept: Path) -> float:
    """Bits per byte of text of the pairs inside `rows` under the pairs of `train`; read from `kept` if it is there.

    Witten-Bell smoothing (Witten & Bell 1991): P(b | a) = (c(a, b) + T(a) P(b)) / (c(a) + T(a)), with c the counts,
    T(a) the number of distinct followers of a, and P(b) = (c(b) + 1) / (N + V).

    Args:
        train: (tokens,) the stream to count in.
        rows: (row, sequence + 1) tokens to score: all but the first of each row, given the one before.
        bytes_per_token: (vocab,) bytes of text of each token.
        kept: File of the result.
    """
    with suppress(OSError, ValueError, KeyError):
        return json.loads(kept.read_text())["bits_per_byte"]
    vocab = len(bytes_per_token)
    pairs, counts = _count_pairs(train, vocab)
    following = np.bincount(pairs // vocab, counts, vocab)
    followers = np.bincount(pairs // vocab, minlength=vocab)
    single = np.bincount(pairs % vocab, counts, vocab)
    single[int(train[0])] += 1
    single = (single + 1) / (len(train) + vocab)
    bits = size = 0.0
    step = max(PART // rows.shape[1], 1)
    for part in (rows[start : start + step].astype(np.int64) for start in range(0, len(rows), step)):
        first, second = part[:, :-1].ravel(), part[:, 1:].ravel()
        wanted = first * vocab + second
        place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        count = np.where(pairs[place] == wanted, counts[place], 0)
        total = following[first] + followers[first]
        seen = (count + followers[first] * single[second]) / np.maximum(total, 1)
        bits -= float(np.log2(np.where(total > 0, seen, single[second])).sum())
        size += float(bytes_per_token[second].sum())
    value = bits / size
    write_atomically(kept, json.dumps({"bits_per_byte": value}) + "\n")
    return value


def _count_pairs(tokens: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted codes first * vocab + second of the pairs that occur, and how often each does."""
    dense = np.zeros(vocab * vocab, dtype=np.int64) if vocab <= DENSE_VOCAB else None
    pairs = counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens) - 1, PART):
        part = tokens[start : start + PART + 1].astype(np.int64)
        codes = part[:-1] * vocab + part[1:]
        if dense is not None:
            dense += np.bincount(codes, minlength=len(dense))
            continue
        new, new_counts = np.unique(codes, return_counts=True)
        pairs, place = np.unique(np.concatenate([pairs, new]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, new_counts])).astype(np.int64)
    if dense is not None:
        pairs = np.flatnonzero(dense)
        counts = dense[pairs]
    return pairs, counts
