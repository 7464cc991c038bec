"""Every arm of a study leaves the same stem with its function and its moments, and trains from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_run, write_corpus

from msa_lab.budget import count_parameters, match, table
from msa_lab.config import RunConfig
from msa_lab.config_io import to_dict
from msa_lab.config_model import share_every
from msa_lab.evaluate import load_model
from msa_lab.fork import fork_checkpoint
from msa_lab.learner import Learner
from msa_lab.model import Transformer
from msa_lab.runs import Run, arm_folder
from msa_lab.selections import open_selections
from msa_lab.train import train

pytestmark = pytest.mark.xdist_group("arms")  # its stem is trained once, not once a worker


def tokens() -> torch.Tensor:
    return torch.randint(0, 257, (2, 64), generator=torch.Generator().manual_seed(1))


ARMS = {
    "dense": {"attention": "dense"},
    "p1": {"num_proxies": 1},
    "p2": {"num_proxies": 2},
    "p4": {"num_proxies": 4},
    "p8": {"num_proxies": 8},
    "regrouped": {"attention": "regrouped"},
    "shared": {"attention": share_every(2, 2)},
    "window": {"attention": "window"},
    "random": {"attention": "random"},
}


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, dict[str, RunConfig]]:
    """A trained dense stem, and every arm matched to it; the arms are not trained."""
    folder = tmp_path_factory.mktemp("arms")
    model = {"attention": "dense", "num_query_heads": 8, "d_model": 64, "mlp_width": 96}
    stem = tiny_run(write_corpus(folder / "corpus"), arm="stem", model=model, train={"steps": 12, "stop_at": 6})
    held = replace(stem.train, stop_at=0, fork_from=arm_folder(stem), fork_step=6)
    forks = [
        replace(stem, arm=name, model=replace(stem.model, **({"attention": "msa"} | change)), train=held)
        for name, change in ARMS.items()
    ]
    runs = match([stem, *forks])
    assert all(abs(row.percent) < 0.1 for row in table(runs)[1:]), table(runs)
    run = train(runs[0], root=folder / "runs", cache=folder / "cache", progress=False, wandb="disabled")
    return folder, run, {run.arm: run for run in runs[1:]}


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_leaves_the_stem_with_its_function_and_its_moments(name: str, arms) -> None:
    _, stem, forks = arms
    config = forks[name]
    checkpoint = fork_checkpoint(config, stem, "reference")
    new = Learner(to_dict(config), "reference")
    new.load_state_dict(checkpoint["state_dict"])
    optimizer = new.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    assert all(optimizer.state[p] for n, p in new.named_parameters() if ".proxy." not in n)
    assert sum(p.numel() for p in new.parameters()) == count_parameters(config.model).total
    if name in ("window", "random"):  # they read less from the first step on, which changes the function
        everything = replace(config.model, top_k_blocks=16)
        full = Transformer(everything, "reference")
        full.load_state_dict(new.model.state_dict())
        new.model = full
    expected = load_model(stem)(tokens()).logits
    torch.testing.assert_close(new.model(tokens(), sparse=False).logits, expected, atol=1e-5, rtol=1e-5)


def test_new_arms_train_from_the_stem_and_come_back_from_disk(arms) -> None:
    folder, _, forks = arms
    for name in ("regrouped", "shared"):
        run = train(forks[name], root=folder / "runs", cache=folder / "cache", progress=False, wandb="disabled")
        layers = [f"train/kl/layer{layer}" for layer in (0, 1)]
        assert set(layers) <= set(run.metrics["name"])
        log = open_selections(run)
        assert log["layer"].values.tolist() == [0, 1]
        assert (log["selected"].values[-1] >= 0).any()
        model = load_model(run)
        fresh = Transformer(run.config.model, seed=run.config.seed)
        for one, other in zip(model.layers, fresh.layers, strict=True):
            if name == "regrouped":
                assert torch.equal(one.attention.head_order, other.attention.head_order)
