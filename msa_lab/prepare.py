"""Build a corpus ahead of training, and the BPE tokenizer for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from msa_lab.config import DataConfig
from msa_lab.data import Corpus, Data, open_data
from msa_lab.store import Report, document_texts
from msa_lab.tokenizer import train_bpe


class Prepared(NamedTuple):
    """A corpus that is ready in the cache."""

    config: DataConfig
    """The given config, with the new tokenizer if one was trained."""
    data: Data


def prepare(
    config: DataConfig, *, bpe: int | None = None, cache: Path | str = "data", report: Report | None = None
) -> Prepared:
    """Build the token files of `config`; with `bpe`, train a byte-level BPE of that many tokens on its training split
    first, write it to `<cache>/tokenizers/<corpus hash>-<size>.json`, and build the token files with it.

    Args:
        config: The corpus.
        bpe: Tokens of the BPE, the document mark included.
        cache: Folder of token files.
        report: Called with one line a stage.

    Raises:
        ValueError: As `open_data`; `bpe` is below 257 or more than the corpus can fill; the config already names a
            tokenizer or has no text.
    """
    if bpe is None:
        return Prepared(config, open_data(config, cache, report))
    if config.tokenizer != "bytes":
        raise ValueError(f"bpe={bpe}: data.tokenizer={config.tokenizer!r} names one already; leave it 'bytes'")
    held = open_data(dataclasses.replace(config, expected_hash=""), cache, report)
    if not isinstance(held, Corpus):
        raise ValueError(f"bpe={bpe}: data.source={config.source!r} has no text; try data.source=python")
    path = Path(cache) / "tokenizers" / f"{held.hash}-{bpe}.json"
    if not path.exists():
        if report is not None:
            report(f"training a BPE of {bpe:,} tokens")
        train_bpe(document_texts(held.folder, "train"), bpe, path)
    config = dataclasses.replace(config, tokenizer=str(path))
    return Prepared(config, open_data(config, cache, report))
