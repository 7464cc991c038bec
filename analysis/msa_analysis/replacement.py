"""Another selection in place of a model's own, while its weights stay as they are."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int32, Int64
from msa_kernels import Selection
from torch import Tensor, nn

from msa_analysis.rules import Choice, Rule, find_rule
from msa_lab.selections import Seen, record


@contextmanager
def replaced(
    model: nn.Module,
    rule: Rule | str,
    *,
    layers: Collection[str] | None = None,
    proxies: Sequence[int] | None = None,
    documents: Int64[Tensor, " batch"] | None = None,
    other: Mapping[str, Int32[Tensor, "batch proxy query slot"]] | None = None,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
) -> Iterator[Mapping[str, Selection]]:
    """Inside, every forward of `model` attends to what `rule` chooses instead of the model's own selections.

        with replaced(model, "recency", layers=["layers.0.attention.select"]) as put:
            logits = model(tokens).logits
        put["layers.0.attention.select"].blocks

    For any model in which a module's output is a Selection (see `msa_lab.selections`); a rule that needs the main heads
    acts on the argument `selection` of the module `core` beside it. A layer behind a replaced one sees what the
    replacement makes of its input. The mapping holds the latest selection that was put into each module's place. Only
    handles made here are removed, also after an exception.

    Args:
        model: The model, not compiled.
        rule: A name that `find_rule` knows, or a rule of your own.
        layers: Paths of the modules whose selections are replaced; None is all of them.
        proxies: Proxies whose rows are replaced; None is all of them.
        documents: Numbers of the batch's documents, for `random`; a row's index where not given.
        other: By path, the blocks that another document's queries chose, for `other_document`.
        num_local_blocks: Newest blocks that the model forces.
        num_sink_blocks: Oldest blocks that it forces.

    Raises:
        ValueError: The model is compiled or has no such module; in a forward: no such proxy, something that the rule
            needs is missing, or what it gives has not the shape of the selection that it replaces.
    """
    with record(model):
        pass  # refuses a compiled model, in which no hook would fire
    modules = dict(model.named_modules())
    if unknown := set(layers or ()) - set(modules):
        raise ValueError(f"layers: the model has no module {min(unknown)!r}; `record` names those with a selection")
    forced = (num_local_blocks, num_sink_blocks)
    stand_in = _StandIn(find_rule(rule) if isinstance(rule, str) else rule, proxies, documents, other or {}, forced)
    handles = []
    try:
        for place, (path, module) in enumerate(modules.items()):
            if layers is None or path in layers:
                hook = partial(stand_in.choose, path, place)
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
            if path.rpartition(".")[2] == "core":
                hook = partial(stand_in.attend, path)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield stand_in.put
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _StandIn:
    """Chooses in the modules' place."""

    rule: Rule
    proxies: Sequence[int] | None
    documents: Tensor | None
    other: Mapping[str, Tensor]
    forced: tuple[int, int]
    put: dict[str, Selection] = field(default_factory=dict)
    waiting: dict[str, Choice] = field(default_factory=dict)

    def choose(
        self, path: str, place: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: object
    ) -> Selection | None:
        """After a module: the selection that takes its output's place."""
        # A module around another one hands the same selection on: it has been replaced already.
        if not isinstance(output, Selection) or any(output is made for made in self.put.values()):
            return None
        given = _bound(module, args, kwargs).arguments
        seen = Seen(output, given.get("q_proxy"), given.get("k_proxy"), None, None)
        documents = torch.arange(len(output.blocks)) if self.documents is None else self.documents
        choice = Choice(
            path,
            place,
            seen,
            documents.to(output.blocks.device),
            self.other.get(path),
            *self.forced,
            backend=getattr(module, "backend", None),
        )
        if self.rule.needs != "heads":
            return self._put(choice)
        parent = path.rpartition(".")[0]
        self.waiting[f"{parent}.core" if parent else "core"] = choice
        return None

    def attend(self, path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Before a `core`: its arguments with the selection that takes the place of the one chosen beside it."""
        choice = self.waiting.pop(path, None)
        if choice is None:
            return None
        call = _bound(module, args, kwargs)
        seen = replace(choice.seen, q=call.arguments.get("q"), k=call.arguments.get("k"))
        if "selection" not in call.arguments:
            raise ValueError(f"{path}: is not called with a selection, so that {self.rule.name} cannot replace it")
        call.arguments["selection"] = self._put(replace(choice, seen=seen))
        return call.args, call.kwargs

    @torch.no_grad()
    def _put(self, choice: Choice) -> Selection:
        own, made = choice.seen.selection, self.rule.choose(choice)
        if made.blocks.shape != own.blocks.shape or made.block_size != own.block_size:
            rule = f"gives blocks {tuple(made.blocks.shape)} of {made.block_size} tokens"
            kept = f"{tuple(own.blocks.shape)} of {own.block_size}"
            raise ValueError(f"rule {self.rule.name}: {rule} in place of {kept}; a replacement keeps the budget")
        if self.proxies is not None:
            blocks, count = own.blocks.clone(), own.blocks.shape[1]
            if not all(0 <= proxy < count for proxy in self.proxies):
                raise ValueError(f"proxies={list(self.proxies)}: must name proxies 0 to {count - 1}; try [0]")
            blocks[:, self.proxies] = made.blocks[:, self.proxies]
            made = made._replace(blocks=blocks)
        self.put[choice.path] = made
        return made


def _bound(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
    return inspect.signature(module.forward).bind(*args, **kwargs)
