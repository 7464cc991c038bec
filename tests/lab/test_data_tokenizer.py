"""Tokenizers give every text back, and the bigram table scores what it says it scores."""

import json
import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tiny import write_corpus

from msa_lab import bigram
from msa_lab.bigram import bigram_bits_per_byte
from msa_lab.config import DataConfig
from msa_lab.data import open_data
from msa_lab.prepare import prepare
from msa_lab.tokenizer import MARK, load_tokenizer

HARD = ["", "a", "naïve café", "日本語 🧪", " leading", "trailing \n\n", "\ttabs\r\n", f"spells {MARK} out", "\x00\x7f"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    text = write_corpus(folder / "text", documents=12, words=200)
    config = DataConfig(source="text", path=str(text), context_length=32, validation_fraction=0.3)
    return config, folder / "cache", prepare(config, bpe=300, cache=folder / "cache")


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_text_survives_the_round_trip(prepared, kind, text):
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else prepared[2].config.tokenizer)
    (tokens,) = tokenizer.encode([text.encode()])
    assert tokens[0] == tokenizer.mark
    assert tokenizer.mark not in tokens[1:]
    assert tokenizer.decode(tokens) == text
    assert tokenizer.bytes_per_token[tokens].sum() == len(text.encode())
    assert tokenizer.bytes_per_token[tokenizer.mark] == 0
    assert len(tokenizer.bytes_per_token) == tokenizer.vocab_size


def test_prepared_bpe_holds_the_same_documents_in_fewer_tokens(prepared):
    config, cache, (bpe_config, data) = prepared
    held = open_data(config, cache)
    assert data.vocab_size == 300
    assert data.hash != held.hash
    assert data.manifest["sha256"] == held.manifest["sha256"]
    sizes = [json.loads((d.folder / "header.json").read_text())["tokens"]["train"] for d in (held, data)]
    assert sizes[1] < 0.8 * sizes[0]
    whole = np.fromfile(data.folder / "validation.bin", np.uint16)
    assert data.decode(whole) == held.decode(np.fromfile(held.folder / "validation.bin", np.uint16))
    assert open_data(bpe_config, cache).hash == data.hash
    assert prepare(config, bpe=300, cache=cache).config == bpe_config
    assert prepare(config, cache=cache).data.hash == held.hash


def test_bpe_sizes_that_cannot_be_are_refused(prepared):
    config, cache, (bpe_config, _) = prepared
    with pytest.raises(ValueError, match=r"bpe=256: .*try 8192"):
        prepare(config, bpe=256, cache=cache)
    with pytest.raises(ValueError, match=r"bpe=50000: the corpus fills only (\d+) tokens; try \1"):
        prepare(config, bpe=50_000, cache=cache)
    with pytest.raises(ValueError, match=r"bpe=300: data.tokenizer="):
        prepare(bpe_config, bpe=300, cache=cache)
    with pytest.raises(ValueError, match=r"bpe=300: data.source='recall' has no text"):
        prepare(DataConfig(source="recall"), bpe=300, cache=cache)


def test_tokenizers_that_cannot_be_used_are_refused(prepared, tmp_path):
    config, cache, _ = prepared
    with pytest.raises(ValueError, match=r"data.tokenizer='nowhere.json': must be 'bytes' or a tokenizer.json"):
        open_data(replace(config, tokenizer="nowhere.json"), cache)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"must be 'bytes' or a tokenizer.json"):
        load_tokenizer(str(tmp_path / "broken.json"))
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match="has no token"):
        load_tokenizer(str(tmp_path / "words.json"))
    Tokenizer(WordLevel({MARK: 0, "日": 1}, unk_token="日")).save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match="is not byte-level"):
        load_tokenizer(str(tmp_path / "words.json"))


def brute_force(train, rows, bytes_per_token):
    pairs, follow, single = Counter(pairwise(train)), defaultdict(set), Counter(train)
    starts = Counter(train[:-1])
    for a, b in pairwise(train):
        follow[a].add(b)
    bits = size = 0.0
    for row in rows:
        for a, b in pairwise(row):
            alone = (single[b] + 1) / (len(train) + len(bytes_per_token))
            kinds = len(follow[a])
            p = (pairs[a, b] + kinds * alone) / (starts[a] + kinds) if kinds else alone
            bits -= math.log2(p)
            size += bytes_per_token[b]
    return bits / size


@pytest.mark.parametrize("dense_vocab", [4096, 0])
def test_bigram_equals_a_brute_force_count(tmp_path, monkeypatch, dense_vocab):
    monkeypatch.setattr(bigram, "DENSE_VOCAB", dense_vocab)
    monkeypatch.setattr(bigram, "PART", 7)
    rng = np.random.default_rng(0)
    train, rows = rng.integers(0, 9, 60).astype(np.uint16), rng.integers(0, 11, (3, 20)).astype(np.uint16)
    sizes = np.array([0.0, *range(1, 11)])
    value = bigram_bits_per_byte(train, rows, sizes, tmp_path / "kept.json")
    assert value == pytest.approx(brute_force(train.tolist(), rows.tolist(), sizes), rel=1e-12)
    assert bigram_bits_per_byte(train, rows, sizes, tmp_path / "kept.json") == value


def test_bigram_probabilities_sum_to_one(tmp_path):
    train = np.array([0, 1, 0, 2, 0, 1, 1, 3], np.uint16)
    for first in range(5):
        total = 0.0
        for second in range(5):
            rows = np.array([[first, second]], np.uint16)
            total += 2 ** -bigram_bits_per_byte(train, rows, np.ones(5), tmp_path / f"{first}{second}")
        assert total == pytest.approx(1.0, rel=1e-12)


def test_bigram_is_scored_on_the_first_validation_rows(prepared):
    config, cache, (bpe_config, _) = prepared
    for each in (config, bpe_config):
        data = open_data(each, cache)
        train = np.fromfile(data.folder / "train.bin", np.uint16).tolist()
        batch = data.validation(0, 3)
        rows = [[*i, t[-1]] for i, t in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)]
        assert data.bigram_bits_per_byte(3) == pytest.approx(brute_force(train, rows, data.bytes_per_token), rel=1e-9)
        assert data.bigram_bits_per_byte() != data.bigram_bits_per_byte(3)
