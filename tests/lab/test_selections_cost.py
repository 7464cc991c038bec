"""A record computes no more than it holds, and the same numbers as one that computes everything."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_run, write_corpus

from msa_lab import callbacks, recorder, selections
from msa_lab.config import RunConfig
from msa_lab.model import Transformer
from msa_lab.recorder import observe
from msa_lab.selections import Enough, SelectionStore, open_selections, record, record_steps
from msa_lab.teacher import block_mass, entropy, group_divergence, regrouped_divergence
from msa_lab.train import train

TOKENS = torch.arange(3 * 128).view(3, 128) * 31 % 257


def small(folder: Path, *kinds: str) -> tuple[RunConfig, Transformer]:
    """An untrained model whose layers have these kinds of attention."""
    config = tiny_run(folder, model={"num_layers": len(kinds), "attention": kinds})
    return config, Transformer(config.model, "reference").eval()


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    "kinds",
    [
        ("msa", "msa"),
        ("msa", "dense"),
        ("dense", "random"),
        ("window", "msa", "dense"),
        ("msa", "shared", "dense"),
        ("dense", "msa", "regrouped"),
    ],
)
def test_what_a_record_leaves_out_of_the_forward_changes_no_bit_of_it(tmp_path, monkeypatch, kinds, sparse):
    config, model = small(tmp_path, *kinds)
    found = observe(model, TOKENS, config, sparse=sparse, heads=True, rows=2)
    monkeypatch.setattr(recorder, "record", lambda model, until: selections.record(model))
    whole = observe(model, TOKENS, config, sparse=sparse, heads=True, rows=2)
    assert set(found) == set(whole)
    for name, value in whole.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_nothing_after_the_last_choice_is_computed(tmp_path):
    config, model = small(tmp_path, "msa", "msa", "dense")
    ran: list[str] = []
    for path, module in model.named_modules():
        module.register_forward_hook(lambda *_, path=path: ran.append(path))
    observe(model, TOKENS[:1], config)
    assert "layers.1.attention.select" in ran
    assert "layers.0.mlp" in ran
    after = ("layers.1.attention.core", "layers.1.attention.output", "layers.1.mlp", "layers.2", "norm")
    assert not [path for path in ran if path.startswith(after)]


def test_a_forward_that_ends_early_shows_what_a_whole_one_shows_and_leaves_no_hook(tmp_path):
    _, model = small(tmp_path, "msa", "msa")
    with torch.no_grad(), record(model) as seen:
        logits = model(TOKENS).logits
    whole = dict(seen)
    with torch.no_grad(), record(model, until="layers.1.attention.core") as seen:
        for part in (TOKENS[:1], TOKENS):
            with pytest.raises(Enough):
                model(part)
        assert list(seen) == list(whole)
        for path, one in whole.items():
            assert torch.equal(seen[path].selection.blocks, one.selection.blocks)
            for name in ("q_proxy", "k_proxy", "q", "k"):
                assert torch.equal(getattr(seen[path], name), getattr(one, name)), (path, name)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, logits)


def test_a_forward_that_never_gets_there_is_seen_whole(tmp_path):
    _, model = small(tmp_path, "msa", "msa")
    with torch.no_grad(), record(model, until="layers.7.attention.core") as seen, suppress(Enough):
        assert model(TOKENS).logits.shape[1] == 128
    assert list(seen) == ["layers.0.attention.select", "layers.1.attention.select"]


def test_what_is_computed_once_for_two_variables_is_what_each_is_by_itself(tmp_path):
    config, model = small(tmp_path, "msa", "msa")
    found = observe(model, TOKENS, config, heads=True, rows=3)
    with torch.no_grad(), record(model) as seen:
        model(TOKENS)
    blocks = torch.arange(128) // 8
    for layer, one in enumerate(seen.values()):
        by_head = block_mass(one.q, one.k, block_size=8, num_groups=4)
        plain = {
            "divergence": group_divergence(by_head, 2),
            "entropy": entropy(by_head.unflatten(1, (2, -1)).mean(2)),
            "regrouped_divergence": regrouped_one_by_one(by_head),
        }
        assert torch.equal(regrouped_divergence(by_head, 2, 16), plain["regrouped_divergence"])
        for name, values in plain.items():
            means = recorder._by_query_block(values, blocks, 16)
            np.testing.assert_array_equal(found[name][layer], means.numpy(), err_msg=name)


def regrouped_one_by_one(by_head: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(4, generator=generator) for _ in range(16)]
    return torch.stack([group_divergence(by_head[:, order], 2).mean(1) for order in orders], 1)


def test_the_default_schedule_has_forty_records_each_of_little_beside_the_steps_between():
    config = RunConfig()
    steps = record_steps(0, config.train.last_step, config.selections.records)
    assert len(steps) >= 40
    # A recorded row has cost 0.36 to 0.54 of a trained one (experiments/recording_cost): 2 % of the default run at 0.5.
    rows = len(steps) * config.selections.documents / (config.train.last_step * config.train.batch_size)
    assert 0.5 * rows <= 0.02


def test_a_checkpoint_waits_for_the_record_that_is_being_written(tmp_path, monkeypatch):
    append, save, held = SelectionStore.append, callbacks.WholeCheckpoints.save_checkpoint, {}

    def slow(*given):
        time.sleep(0.5)
        append(*given)

    def look(self, checkpoint, path, **rest):
        held[checkpoint["global_step"]] = open_selections(Path(path).parent)["step"].values.tolist()
        save(self, checkpoint, path, **rest)

    monkeypatch.setattr(SelectionStore, "append", slow)
    monkeypatch.setattr(callbacks.WholeCheckpoints, "save_checkpoint", look)
    config = tiny_run(write_corpus(tmp_path / "corpus"), train={"steps": 6}, selections={"records": 7})
    run = train(config, root=tmp_path / "runs", cache=tmp_path / "cache", progress=False, wandb="disabled")
    assert held == {5: [*range(6)], 6: [*range(7)]}
    assert open_selections(run)["step"].values.tolist() == [*range(7)]
