"""The text of probe documents, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int

from msa_lab.data import open_data
from msa_lab.runs import Run
from msa_lab.tasks import Recall
from msa_lab.tokenizer import Tokenizer, load_tokenizer

Speak = Callable[[Int[np.ndarray, " token"]], tuple[bytes, Int[np.ndarray, " token"]]]
"""Tokens to their text in UTF-8 and the number of its bytes that each token stands for."""


def run_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer that the run's tokens were made with; a copy beside the log is preferred to the original."""
    beside = run.path / "tokenizer.json"
    return load_tokenizer(str(beside) if beside.exists() else run.config.data.tokenizer)


def speaker(run: Run) -> Speak:
    """How the run's tokens read: as text, or as words of the recall task."""
    config = run.config.data
    if config.source != "recall":
        return speak_with(run_tokenizer(run))
    task = open_data(config, Path())
    assert isinstance(task, Recall)
    return lambda tokens: _words([task.decode([token]) for token in tokens.tolist()])


def speak_with(tokenizer: Tokenizer) -> Speak:
    """Text of a tokenizer whose tokens each stand for whole bytes."""

    def speak(tokens: Int[np.ndarray, " token"]) -> tuple[bytes, Int[np.ndarray, " token"]]:
        lengths = tokenizer.bytes_per_token[tokens].astype(np.int64)
        if tokenizer.spec == "bytes":
            return tokens[lengths > 0].astype(np.uint8).tobytes(), lengths
        # Only a character cut at the row's end can take another number of bytes than its tokens say.
        text = tokenizer.decode(tokens.tolist()).encode()
        ends = np.minimum(np.cumsum(lengths), len(text))
        return text, np.diff(ends, prepend=0)

    return speak


def speak_numbers(tokens: Int[np.ndarray, " token"]) -> tuple[bytes, Int[np.ndarray, " token"]]:
    """Token ids as they are, where no tokenizer is known."""
    return _words([str(token) for token in tokens.tolist()])


def _words(words: list[str]) -> tuple[bytes, Int[np.ndarray, " token"]]:
    parts = [f"{word} ".encode() for word in words]
    return b"".join(parts), np.array([len(part) for part in parts])
