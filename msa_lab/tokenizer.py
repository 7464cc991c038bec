"""Text to tokens and back: UTF-8 bytes, or a byte-level BPE that `tokenizers` trained.

Both have a document mark, the first token of every document; it stands for no bytes of text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

MARK = "<|document|>"


class ByteTokenizer:
    """One token per byte of UTF-8 (ids 0 to 255) and the document mark (id 256)."""

    spec = "bytes"
    vocab_size = 257
    mark = 256

    @cached_property
    def bytes_per_token(self) -> np.ndarray:
        """float64 (vocab,): bytes of text that a token stands for; 0 for the mark."""
        return np.append(np.ones(256), 0.0)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of each document, mark first."""
        return [np.append(np.uint16(self.mark), np.frombuffer(text, np.uint8).astype(np.uint16)) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; marks are left out and a cut character shows as U+FFFD."""
        return bytes(t for t in map(int, tokens) if t != self.mark).decode(errors="replace")


class BpeTokenizer:
    """A byte-level BPE read from a tokenizer.json.

    Raises:
        ValueError: The file is missing, no tokenizer, not byte-level, or lacks the document mark.
    """

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer

        self.spec = str(path)
        try:
            content = Path(path).read_text(encoding="utf-8")
            self._bpe = Tokenizer.from_str(content)
        except Exception as error:  # tokenizers raises bare Exception
            rule = "must be 'bytes' or a tokenizer.json"
            fix = "make one with `msa-lab prepare --bpe 8192`"
            raise ValueError(f"data.tokenizer={self.spec!r}: {rule} ({error}); {fix}") from None
        # A text that spells the mark out stays text.
        self._bpe.encode_special_tokens = True
        self._bpe.no_padding()
        self._bpe.no_truncation()
        self.hash = hashlib.sha256(content.encode()).hexdigest()
        self.vocab_size = max(self._bpe.get_vocab().values()) + 1
        mark = self._bpe.token_to_id(MARK)
        if mark is None:
            raise ValueError(f"data.tokenizer={self.spec!r}: has no token {MARK!r}; train one with `msa-lab prepare`")
        self.mark: int = mark
        self.bytes_per_token = self._count_bytes()

    def _count_bytes(self) -> np.ndarray:
        """float64 (vocab,): bytes of text that a token stands for; 0 for the mark.

        Byte-level BPE writes each byte as one printable character, so characters of a token are bytes of text.
        """
        from tokenizers.pre_tokenizers import ByteLevel

        alphabet = set(ByteLevel.alphabet())
        count = np.zeros(self.vocab_size)
        for token, index in self._bpe.get_vocab().items():
            if token != MARK and not alphabet.issuperset(token):
                raise ValueError(
                    f"data.tokenizer={self.spec!r}: token {token!r} is not byte-level; train one with `msa-lab prepare`"
                )
            count[index] = 0 if token == MARK else len(token)
        return count

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of each document, mark first."""
        encoded = self._bpe.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        return [np.array([self.mark, *e.ids], np.uint32) for e in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; marks are left out and a cut character shows as U+FFFD."""
        return self._bpe.decode([t for t in map(int, tokens) if t != self.mark], skip_special_tokens=False)


Tokenizer = ByteTokenizer | BpeTokenizer


def load_tokenizer(spec: str) -> Tokenizer:
    """`bytes`, or the tokenizer.json at a path.

    Raises:
        ValueError: See `BpeTokenizer`.
    """
    return ByteTokenizer() if spec == "bytes" else BpeTokenizer(spec)


def train_bpe(texts: Iterator[bytes], size: int, path: Path) -> None:
    """Train a byte-level BPE of `size` tokens (mark included) on documents and write it to `path`.

    Raises:
        ValueError: `size` is below 257, or the texts are too few to fill it.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    if size < 257:
        raise ValueError(f"bpe={size}: must hold the 256 bytes and the document mark; try 8192")
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bpe.decoder = ByteLevelDecoder()
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[MARK], show_progress=False)
    bpe.train_from_iterator((text.decode() for text in texts), trainer)
    reached = bpe.get_vocab_size()
    if reached < size:
        raise ValueError(f"bpe={size}: the corpus fills only {reached} tokens; try {reached}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    bpe.save(str(partial))
    partial.replace(path)
