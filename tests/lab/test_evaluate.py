"""Scores: the same rows for everyone, true bits per byte, accuracy by the distance that the task planted."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msa_kernels import reference
from tiny import MODEL, tiny_run, write_corpus
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from msa_lab.config import DataConfig, RecallConfig, RunConfig
from msa_lab.data import open_data
from msa_lab.evaluate import score
from msa_lab.model import Output, Transformer


class Oracle(nn.Module):
    """Answers rightly when the answer's source lies at most `reach` blocks away, wrongly otherwise."""

    def __init__(self, data: Any, reach: int, block_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.data, self.reach, self.block_size, self.index = data, reach, block_size, 0

    def forward(self, tokens: torch.Tensor, *_: object, **__: object) -> Output:
        batch = self.data.validation(self.index, len(tokens))
        self.index += 1
        position = torch.arange(tokens.shape[1]).expand_as(tokens)
        apart = position // self.block_size - (position - batch.distance) // self.block_size
        answer = torch.where(apart <= self.reach, batch.targets.clamp(min=0), 0)
        return Output(100.0 * nn.functional.one_hot(answer, self.data.vocab_size).float(), None)


def test_accuracy_is_reported_at_the_distance_of_each_dependency() -> None:
    recall = RecallConfig(block_size=8, num_keys=16, pairs=12)
    config = RunConfig(
        model=replace(MODEL, vocab_size=512), data=DataConfig(source="recall", context_length=256, recall=recall)
    )
    data = open_data(config.data)
    found = score(Oracle(data, 5, 8), data, config, 4)["accuracy_by_distance"]  # pyright: ignore[reportArgumentType]
    distances = [int(d) for d in found]
    assert min(distances) >= 1
    assert min(distances) <= 5 < max(distances)
    for blocks, answer in found.items():
        assert answer["accuracy"] == (1.0 if int(blocks) <= 5 else 0.0), blocks
        assert answer["questions"] > 0


def test_uniform_guesses_cost_the_logarithm_of_the_vocabulary(tmp_path: Path) -> None:
    config = tiny_run(write_corpus(tmp_path / "corpus"))
    data = open_data(config.data, tmp_path / "cache")
    model = Transformer(config.model)
    with torch.no_grad():
        model.embedding.weight.zero_()
    found = score(model, data, config, 1)
    assert found["validation_loss"] == pytest.approx(math.log(257))
    # A document mark stands for no bytes, so a byte costs a little more than log2(257).
    assert found["bits_per_byte"] == pytest.approx(math.log2(257), rel=0.01)
    assert found["bits_per_byte"] > math.log2(257) - 1e-6
    tokens = sum(row["tokens"] for row in found["rows"])
    assert tokens == 4 * 128
    assert found["accuracy_by_distance"] is None


def test_scoring_restores_the_mode_and_splits_do_not_matter(tmp_path: Path) -> None:
    config = tiny_run(write_corpus(tmp_path / "corpus"))
    data = open_data(config.data, tmp_path / "cache")
    model = Transformer(config.model).train()
    whole = score(model, data, config, 2)
    assert model.training
    split = score(model, data, replace(config, train=replace(config.train, accumulate=4)), 2)
    assert split["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=1e-6)
    assert [row["id"] for row in split["rows"]] == [row["id"] for row in whole["rows"]]


def test_an_evaluation_computes_no_kl_and_keeps_nothing_for_a_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(write_corpus(tmp_path / "corpus"))
    data = open_data(config.data, tmp_path / "cache")
    monkeypatch.setattr(reference, "proxy_kl", lambda *_: pytest.fail("KL work"))
    with saved_tensors_hooks(lambda _: pytest.fail("kept"), lambda tensor: tensor):
        score(Transformer(config.model), data, config, 1)
