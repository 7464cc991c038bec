"""How far the kernels lie from fp64 in one model: loss, KL, gradients, and which blocks the proxies choose."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from msa_kernels import Selection, select_blocks
from torch import Tensor
from torch.nn import functional as F

from msa_lab.config import RunConfig
from msa_lab.evaluate import autocast
from msa_lab.learner import Part
from msa_lab.model import Transformer
from msa_lab.selections import record


@contextmanager
def selections(model: Transformer, given: list[Selection] | None) -> Iterator[list[Selection]]:
    """The layers' selections: taken from `given`, or kept as they are made."""
    kept: list[Selection] = []

    def hook(layer: int) -> Callable[[object, object, Selection], Selection]:
        def replace_or_keep(_: object, __: object, made: Selection) -> Selection:
            if given is not None:
                return given[layer]
            kept.append(made)
            return made

        return replace_or_keep

    layers = range(len(model.layers))
    selects = [model.get_submodule(f"layers.{layer}.attention.select") for layer in layers]
    handles = [select.register_forward_hook(hook(layer)) for layer, select in zip(layers, selects, strict=True)]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def gradients(
    model: Transformer, part: Part, *, sparse: bool, exact: bool, given: list[Selection] | None
) -> tuple[dict[str, Tensor], list[Selection]]:
    """Loss, KL and every parameter's gradient in fp64, and the selections that were used."""
    model.train()
    model.zero_grad(set_to_none=True)
    with selections(model, given) as kept, autocast(torch.device("cuda"), "32" if exact else "bf16"):
        output = model(part.inputs, part.cu_seqlens, sparse=sparse, with_kl=True, draw=part.draw)
    logits = output.logits if exact else output.logits.float()
    ce = F.cross_entropy(logits.flatten(0, 1), part.targets.flatten(), ignore_index=-100)
    assert output.kl is not None
    (ce + output.kl.mean(1).sum()).backward()
    found = {"loss": ce.detach()[None].double(), "kl": output.kl.detach().flatten().double()}
    return found | {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}, kept


def compare(model: Transformer, config: RunConfig, part: Part, *, sparse: bool) -> dict[str, Any]:
    """Errors of the kernels and of the bf16 reference against fp64, the worst tensor first."""

    def built(path: str, dtype: torch.dtype) -> Transformer:
        other = Transformer(config.model, path).cuda().to(dtype)
        other.load_state_dict(model.state_dict())
        return other

    ours, kept = gradients(built("cute", torch.float32), part, sparse=sparse, exact=False, given=None)
    given = kept or None
    plain, _ = gradients(built("reference", torch.float32), part, sparse=sparse, exact=False, given=given)
    truth, _ = gradients(built("reference", torch.float64), part, sparse=sparse, exact=True, given=given)
    errors = {}
    for name, value in truth.items():
        size = value.norm().clamp(min=1e-300)
        errors[name] = ((ours[name] - value).norm() / size).item(), ((plain[name] - value).norm() / size).item()
    ratios = {name: a / max(b, 1e-12) for name, (a, b) in errors.items()}
    worst = sorted(ratios, key=lambda name: -ratios[name])
    return {
        "tensors": len(errors),
        "over_twice_the_reference": [name for name in worst if ratios[name] > 2],
        "median_ratio": statistics.median(ratios.values()),
        "worst": {name: {"kernels": errors[name][0], "reference": errors[name][1]} for name in worst[:5]},
        "loss": {"kernels": errors["loss"][0], "reference": errors["loss"][1], "value": truth["loss"].item()},
        "kl": {"kernels": errors["kl"][0], "reference": errors["kl"][1], "value": truth["kl"].mean().item()},
    }


@torch.no_grad()
def choices(model: Transformer, config: RunConfig, part: Part) -> dict[str, Any]:
    """By layer: of a query's blocks, the share that fp32 chooses too from the same proxies; and of queries, that of
    those with all blocks equal. Where they differ, scores are equal but for the order of their sums."""
    rules = {name: getattr(config.model, name) for name in ("block_size", "num_local_blocks", "num_sink_blocks")}
    with record(model) as seen, autocast(torch.device("cuda"), "bf16"):
        model(part.inputs, part.cu_seqlens, sparse=True, draw=part.draw)
    found: dict[str, list[float]] = {"mean_overlap": [], "equal_queries": []}
    for one in seen.values():
        assert one.q_proxy is not None
        assert one.k_proxy is not None
        q_proxy, k_proxy, ours = one.q_proxy.float(), one.k_proxy.float(), one.selection.blocks
        rules |= {"top_k_blocks": ours.shape[-1], "cu_seqlens": one.selection.cu_seqlens}
        exact = select_blocks(q_proxy, k_proxy, **rules, backend="reference").blocks
        held = (ours >= 0).sum(-1)
        both = ((ours[..., None] == exact[..., None, :]) & (ours >= 0)[..., None]).sum((-1, -2))
        found["mean_overlap"].append((both / held).mean().item())
        found["equal_queries"].append((both == held).double().mean().item())
    return found
