"""A fork: another run's checkpoint turned into the first checkpoint of this one.

Weights, optimizer moments and the data position carry over. New MLP units get zero output weights and zero moments,
so that the loss at the fork is unchanged; proxies are new and start untrained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msa_lab.config import RunConfig
from msa_lab.config_io import from_dict, to_dict
from msa_lab.learner import Learner
from msa_lab.runs import Run


def fork_checkpoint(config: RunConfig, stem: Run, backend: str | None) -> dict[str, Any]:
    """The checkpoint from which `config` goes on where `stem` ended."""
    checkpoint = torch.load(stem.path / "last.ckpt", map_location="cpu", weights_only=True)
    held: RunConfig = from_dict(checkpoint["hyper_parameters"]["config"])
    fresh, old = Learner(to_dict(config), backend), Learner(to_dict(held), backend)
    checkpoint["state_dict"] = widen(checkpoint["state_dict"], fresh.state_dict())
    checkpoint["optimizer_states"] = [_optimizer_state(checkpoint["optimizer_states"][0], old, fresh)]
    checkpoint["hyper_parameters"] = dict(fresh.hparams)
    return checkpoint


def widen(stem: dict[str, Tensor], fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """`fresh` (as initialised) with the stem's numbers in it, proxies excepted, which are always new.

    New MLP units write zeros to the residual stream.
    """
    state = {}
    for name, value in fresh.items():
        held = None if ".proxy." in name else stem.get(name)
        if held is None:
            state[name] = value
        elif held.shape == value.shape:
            state[name] = held
        else:
            state[name] = _padded(held, torch.zeros_like(value) if name.endswith("mlp.down.weight") else value)
    return state


def _padded(held: Tensor, onto: Tensor) -> Tensor:
    padded = onto.clone()
    padded[tuple(slice(0, n) for n in held.shape)] = held
    return padded


def _optimizer_state(stem: dict[str, Any], old: Learner, fresh: Learner) -> dict[str, Any]:
    """AdamW's moments moved to the fork's parameters by name; what is new has none yet."""
    held = {name: stem["state"][i] for i, name in enumerate(_optimizer_names(old)) if i in stem["state"]}
    shapes = dict(fresh.named_parameters())
    state: dict[int, Any] = {}
    for i, name in enumerate(_optimizer_names(fresh)):
        if name in held and ".proxy." not in name:
            like = torch.zeros(shapes[name].shape)
            state[i] = {
                key: value if value.ndim == 0 else _padded(value, like.to(value.dtype))
                for key, value in held[name].items()
            }
    return {"state": state, "param_groups": fresh.configure_optimizers().state_dict()["param_groups"]}


def _optimizer_names(learner: Learner) -> list[str]:
    names = {id(parameter): name for name, parameter in learner.named_parameters()}
    return [names[id(p)] for group in learner.configure_optimizers().param_groups for p in group["params"]]
