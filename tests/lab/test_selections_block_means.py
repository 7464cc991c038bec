"""What is recorded as a mean over the queries of a block: the newest blocks' mass, and how much heads disagree."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_run, write_corpus

from msa_lab import callbacks, selection_layout
from msa_lab.evaluate import load_model
from msa_lab.recorder import observe
from msa_lab.selections import open_selections, record
from msa_lab.teacher import block_mass, group_divergence, regrouped_divergence
from msa_lab.train import TrainingStoppedError, train

pytestmark = pytest.mark.xdist_group("block_means")  # its run is trained once, not once a worker

TOKENS = torch.arange(256).view(2, 128) % 257


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("corpus")
    config = tiny_run(write_corpus(folder), selections={"records": 2})
    return train(config, root=folder / "runs", cache=folder / "cache", progress=False, wandb="disabled")


def masses(run, config, tokens: torch.Tensor) -> torch.Tensor:
    """(layer, document, head, query, block) straight from what the layers were seen to attend with."""
    model = load_model(run)
    with record(model) as seen, torch.no_grad():
        model(tokens)
    heads = config.model.num_query_heads
    return torch.stack(
        [block_mass(s.q, s.k, block_size=config.model.block_size, num_groups=heads) for s in seen.values()]
    )


@pytest.mark.parametrize(("stride", "length"), [(1, 128), (5, 128), (7, 121)])
def test_block_means_are_over_the_recorded_queries(run, stride: int, length: int) -> None:
    """Of 121 tokens the last block has one query, which every seventh misses."""
    tokens = TOKENS[:, :length]
    config = tiny_run(Path(run.config.data.path), selections={"query_stride": stride})
    size, groups = config.model.block_size, config.model.num_proxies
    found = observe(load_model(run), tokens, config, heads=True, rows=2)
    by_head = masses(run, config, tokens)
    group = by_head.unflatten(2, (groups, -1)).mean(3).numpy()
    recorded = np.arange(0, length, stride)
    for block in range(16):
        queries = recorded[recorded // size == block]
        for distance in range(config.model.top_k_blocks):
            held = found["newest_mass"][:, :, :, block, distance]
            if not len(queries):
                assert np.isnan(held).all()
            elif distance > block:
                assert (held == 0).all()
            else:
                wanted = group[..., queries, block - distance].mean(-1)
                np.testing.assert_allclose(held, wanted, rtol=1e-5, atol=1e-7)
    divergence = torch.stack([group_divergence(layer, groups) for layer in by_head]).numpy()
    for block in np.unique(recorded // size):
        wanted = divergence[..., recorded[recorded // size == block]].mean(-1)
        np.testing.assert_allclose(found["divergence"][..., block], wanted, rtol=1e-4, atol=1e-6)
        shares = group[..., recorded[recorded // size == block], : block + 1]
        wanted = -(shares * np.log(shares)).sum(-1).mean(-1)
        np.testing.assert_allclose(found["entropy"][..., block], wanted, rtol=1e-4, atol=1e-6)
    assert found["regrouped_divergence"].shape == (*by_head.shape[:2], 16, 16)


def test_divergence_of_equal_heads_is_zero_and_of_disjoint_ones_the_log_of_their_number() -> None:
    same = torch.tensor([0.25, 0.75]).expand(1, 4, 3, 2)
    assert group_divergence(same, 2).abs().max() < 1e-6
    apart = torch.eye(4)[None, :, None, :].expand(1, 4, 3, 4)
    torch.testing.assert_close(group_divergence(apart, 1), torch.full((1, 1, 3), math.log(4)))
    torch.testing.assert_close(group_divergence(apart, 2), torch.full((1, 2, 3), math.log(2)))
    assert (group_divergence(apart, 4) == 0).all()


def test_mean_of_the_heads_kl_exceeds_the_kl_of_their_mean_by_the_divergence() -> None:
    generator = torch.Generator().manual_seed(3)
    heads, student = torch.rand(1, 4, 5, 6, generator=generator), torch.rand(1, 1, 5, 6, generator=generator)
    heads, student = heads / heads.sum(-1, keepdim=True), student / student.sum(-1, keepdim=True)

    def kl(p: torch.Tensor) -> torch.Tensor:
        return (p * (p / student).log()).sum(-1)

    excess = kl(heads).mean(1) - kl(heads.mean(1, keepdim=True))[:, 0]
    torch.testing.assert_close(group_divergence(heads, 1)[:, 0], excess, rtol=1e-4, atol=1e-6)


def test_adjacent_twins_disagree_less_than_heads_regrouped_at_random() -> None:
    """Four kinds of two heads each: the real pairs agree, a random pair is of two kinds with probability 6/7."""
    kinds = torch.eye(4).repeat_interleave(2, 0)[None, :, None, :].expand(1, 8, 2, 4)
    assert (group_divergence(kinds, 4) == 0).all()
    drawn = regrouped_divergence(kinds, 4, 200)
    assert drawn.shape == (1, 200, 2)
    assert float(drawn.mean()) == pytest.approx(6 / 7 * math.log(2), abs=0.03)
    torch.testing.assert_close(drawn, regrouped_divergence(kinds, 4, 200))


def test_a_run_whose_log_older_code_began_goes_on_without_what_is_recorded_since(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = ("newest_mass", "divergence", "entropy", "regrouped_divergence")
    kept_make, kept_end = selection_layout._variables, callbacks.StopOnSignal.on_train_batch_end

    def older(*args):
        return {name: variable for name, variable in kept_make(*args).items() if name not in since}

    def receive(self, trainer, *rest):
        self.received |= trainer.global_step == 6
        kept_end(self, trainer, *rest)

    where = {"root": tmp_path / "runs", "cache": tmp_path / "cache", "progress": False, "wandb": "disabled"}
    with monkeypatch.context() as patch:
        patch.setattr(selection_layout, "_variables", older)
        patch.setattr(callbacks.StopOnSignal, "on_train_batch_end", receive)
        with pytest.raises(TrainingStoppedError):
            train(run.config, **where)
    log, whole = open_selections(train(run.config, **where)), open_selections(run)
    assert not set(since) & set(log.variables)
    assert set(log.variables) == set(whole.variables) - set(since)
    np.testing.assert_array_equal(log["selected"].values, whole["selected"].values)
