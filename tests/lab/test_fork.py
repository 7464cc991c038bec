"""Forks: the loss at the fork is the stem's, and only attention, proxies and MLP width may change."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_run, write_corpus

from msa_lab.config import RunConfig
from msa_lab.config_io import to_dict
from msa_lab.fork import fork_checkpoint
from msa_lab.learner import Learner, Parts
from msa_lab.runs import Run, arm_folder
from msa_lab.stem import check_fork
from msa_lab.train import train

pytestmark = pytest.mark.xdist_group("fork")  # its study is trained once, not once a worker


def fit(config: RunConfig, folder: Path) -> Run:
    return train(config, root=folder / "runs", cache=folder / "cache", progress=False, wandb="disabled")


@pytest.fixture(scope="module")
def stem(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("fork")
    corpus = write_corpus(folder / "corpus")
    dense = {"attention": "dense"}
    return fit(tiny_run(corpus, arm="stem", model=dense, train={"steps": 20, "stop_at": 8}), folder)


def fork_of(stem: Run, **model: object) -> RunConfig:
    held = stem.config
    return replace(
        held,
        arm="fork",
        model=replace(held.model, **model),  # pyright: ignore[reportArgumentType]
        train=replace(held.train, stop_at=0, fork_from=arm_folder(held), fork_step=8),
    )


@pytest.mark.parametrize(
    "model", [{"attention": "dense", "mlp_width": (56, 57)}, {"attention": "msa", "mlp_width": 50}]
)
def test_widening_keeps_the_loss_and_the_moments(stem: Run, model: dict) -> None:
    from msa_lab.data import open_data

    config = fork_of(stem, **model)
    checkpoint = fork_checkpoint(config, stem, "reference")
    old = Learner.load_from_checkpoint(stem.path / "last.ckpt", weights_only=True)
    new = Learner(to_dict(config), "reference")
    new.load_state_dict(checkpoint["state_dict"])
    data = open_data(config.data, stem.path.parents[3] / "cache")
    part = next(iter(Parts(data, config, 8, 0, 1)))
    expected = old.model(part.inputs).logits
    torch.testing.assert_close(new.model(part.inputs, sparse=False).logits, expected, atol=1e-6, rtol=1e-6)
    hidden = stem.config.model.mlp_widths[0]
    names = [n for n, _ in new.named_parameters()]
    optimizer = new.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for name, parameter in zip(names, new.parameters(), strict=True):
        state = optimizer.state.get(parameter)
        if ".proxy." in name:
            assert not state
        elif name.endswith(("gate.weight", "up.weight")):
            assert state["exp_avg"][:hidden].abs().sum() > 0
            assert state["exp_avg"][hidden:].abs().sum() == state["exp_avg_sq"][hidden:].abs().sum() == 0
    # New units must be able to learn: their input weights are not zero.
    assert new.model.layers[0].mlp.gate.weight[hidden:].abs().min() > 0


def test_a_fork_goes_on_with_the_stems_step_and_data(stem: Run) -> None:
    folder = stem.path.parents[3]
    run = fit(fork_of(stem, attention="msa"), folder)
    steps = sorted(run.metrics[run.metrics.name == "train/ce"].step)
    assert steps[0] == 9
    assert steps[-1] == 20
    phases = run.metrics[run.metrics.name == "phase"].set_index("step").value
    assert list(phases) == [0.0] * 4 + [1.0] * 8
    rates = run.metrics[run.metrics.name == "lr/proxy"].set_index("step").value
    assert rates[9] < rates[10] == pytest.approx(run.config.train.proxy_lr)
    assert run.result["tokens"] == 20 * 4 * 128
    assert run.result["wall_seconds"] > stem.result["wall_seconds"]
    assert run.result["flops_total"] > stem.result["flops_total"]


def test_an_unchanged_fork_is_the_uninterrupted_run(stem: Run) -> None:
    folder = stem.path.parents[3]
    straight = fit(replace(stem.config, arm="straight", train=replace(stem.config.train, stop_at=0)), folder)
    forked = fit(fork_of(stem, attention="dense"), folder)
    names = ["train/ce", "grad_norm/base", "lr/base"]
    ours, theirs = (r.metrics[r.metrics.name.isin(names) & (r.metrics.step > 8)] for r in (forked, straight))
    assert ours.value.tolist() == theirs.value.tolist()


def test_a_fork_may_change_nothing_else(stem: Run) -> None:
    good = fork_of(stem, attention="msa")
    for field, value in (("d_model", 64), ("num_layers", 3), ("qk_norm", False), ("vocab_size", 300)):
        with pytest.raises(ValueError, match=rf"model\.{field}=.*a fork may change attention, proxies and MLP width"):
            check_fork(replace(good, model=replace(good.model, **{field: value})), stem.config)
    with pytest.raises(ValueError, match=r"train\.lr="):
        check_fork(replace(good, train=replace(good.train, lr=1.0)), stem.config)
    with pytest.raises(ValueError, match=r"data\.context_length="):
        check_fork(replace(good, data=replace(good.data, context_length=64)), stem.config)
    with pytest.raises(ValueError, match="a fork can only widen"):
        check_fork(replace(good, model=replace(good.model, mlp_width=8)), stem.config)
    with pytest.raises(ValueError, match="seed=1"):
        check_fork(replace(good, seed=1), stem.config)


def test_a_missing_stem_or_another_last_step_is_named(stem: Run, tmp_path: Path) -> None:
    good = fork_of(stem, attention="msa")
    with pytest.raises(ValueError, match="train the stem first"):
        fit(replace(good, train=replace(good.train, fork_from="nothing/here")), tmp_path)
    with pytest.raises(ValueError, match=r"train\.fork_step=7: the stem ends at step 8; try 8"):
        fit(replace(good, train=replace(good.train, fork_step=7)), stem.path.parents[3])


def test_another_corpus_than_the_stems_is_refused(tmp_path: Path) -> None:
    own = write_corpus(tmp_path / "corpus")
    stem = fit(tiny_run(own, arm="stem", model={"attention": "dense"}, train={"steps": 20, "stop_at": 8}), tmp_path)
    (own / "doc00.txt").write_text("another text " * 500)
    with pytest.raises(ValueError, match=r"trained on corpus .* or start under another study name"):
        fit(fork_of(stem, attention="msa"), tmp_path)


def test_proxies_are_new_even_where_the_stem_has_some(stem: Run) -> None:
    folder = stem.path.parents[3]
    msa = fit(replace(stem.config, arm="msa_stem", model=replace(stem.config.model, attention="msa")), folder)
    config = fork_of(msa, attention="msa", num_proxies=4)
    checkpoint = fork_checkpoint(config, msa, "reference")
    fresh = Learner(to_dict(config), "reference")
    optimizer = fresh.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for name, parameter in fresh.named_parameters():
        held = torch.equal(checkpoint["state_dict"][name], parameter)
        if ".proxy." in name:
            assert held, name
            assert not optimizer.state.get(parameter), name
        elif parameter.ndim > 1:
            assert not held, name


def test_a_fork_keeps_the_optimizer_of_its_device(stem: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU the fused optimizer runs; a checkpoint made from CPU tensors must not turn it off.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    groups = fork_checkpoint(fork_of(stem, attention="msa"), stem, "reference")["optimizer_states"][0]["param_groups"]
    assert [group["fused"] for group in groups] == [True] * 3
