"""What another selection changes, in any model: per-document sums, small and additive, by distance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Float64, Int, Int64
from msa_kernels import Selection
from msa_kernels.documents import layout
from torch import Tensor, nn
from torch.nn import functional as F

from msa_analysis.choices import log2_bin
from msa_analysis.replacement import replaced
from msa_analysis.rules import Rule, group_mass, query_ranges
from msa_lab.batch import Batch
from msa_lab.selections import Seen, record
from msa_lab.teacher import at_blocks

NO_BIN = -1
"""The bin of tokens without a distance."""
Forward = Callable[[nn.Module, Batch, Int64[Tensor, " batch"]], Float[Tensor, "batch sequence vocab"]]
"""(model, batch on the model's device, numbers of its documents) to logits."""


@dataclass(frozen=True)
class Intervention:
    """A rule, and the place where it acts."""

    rule: Rule
    layers: tuple[str, ...]
    """Paths of the modules whose selections are replaced."""
    proxy: int | None = None
    """The one proxy whose rows are replaced; None is all of them."""


@torch.no_grad()
def tally_changes(
    model: nn.Module,
    batches: Sequence[Batch],
    interventions: Sequence[Intervention],
    *,
    block_size: int,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
    bytes_per_token: Float[np.ndarray, " vocab"] | None = None,
    forward: Forward | None = None,
    done: Callable[[], None] = lambda: None,
) -> xr.Dataset:
    """What each intervention changes: sums over the scored tokens of each document, by distance.

    Dims intervention, document, bin. `nats` (cross-entropy) and `hits` (right answers): with the replaced selection
    minus with the model's own; `own_nats`, `own_hits`, `tokens`, and `bytes` (0 where there is no text).

    A token's bin is the log2 bin of a distance in blocks: 0, 1, 2 for 2-3, 3 for 4-7 and so on. Where the batches know
    on what a token depends (`distance_of`: "dependency") it is that distance. Elsewhere it is the distance of the best
    lost block ("lost block"): of the blocks that the intervention took away from the query, over the replaced layers
    and proxies, the one on which most of its heads' dense attention falls in the unchanged model. Bin -1 holds tokens
    that lost nothing, or that depend on nothing; and all tokens where a module shows no heads (`distance_of`: "").

    Args:
        model: Any model whose selections `msa_lab.selections.record` sees, in the mode in which it is to be measured.
        batches: Documents, one a row (or packed, for rules that allow it), all rows of one length. The other document
            of each is the one before it; that of the first is the last.
        interventions: What to put where.
        block_size: Tokens per block in which distances count.
        num_local_blocks: Newest blocks that the model forces.
        num_sink_blocks: Oldest blocks that it forces.
        bytes_per_token: Bytes of text that each token stands for; None where there is no text.
        forward: How the model is called; without it `model(inputs)` or `model(inputs, cu_seqlens)`, whose output is
            the logits or has `logits`.
        done: Called after each forward: 1 + len(interventions) a batch, and one more where a rule needs another
            document.

    Raises:
        ValueError: A layer gives no selection or several in one forward, or lacks what a rule needs.
    """
    device = next(model.parameters()).device
    meter = _Meter(model, forward or _call, interventions, (num_local_blocks, num_sink_blocks), done)
    planted = all(batch.distance is not None for batch in batches)
    bins = int(log2_bin(-(-batches[0].inputs.shape[1] // block_size))) + 2
    total = sum(len(batch.inputs) for batch in batches)
    before: dict[str, Tensor] = {}
    if any(one.rule.needs == "another document" for one in interventions):
        final = Batch(batches[-1].inputs[-1:], batches[-1].targets[-1:], None, None)
        before = _blocks(meter.own(_on(final, device), torch.tensor([total - 1], device=device))[1])
    tables, by_heads, first = [], True, 0
    for batch in (_on(batch, device) for batch in batches):
        documents = torch.arange(first, first + len(batch.inputs), device=device)
        first += len(documents)
        own, seen = meter.own(batch, documents)
        blocks, held = _blocks(seen), None if planted else _held(seen)
        del seen  # every layer's heads: a replaced forward needs their memory
        other = {path: torch.cat((last, blocks[path][:-1])) for path, last in before.items()}
        before = {path: blocks[path][-1:] for path in before}
        by_heads = by_heads and held is not None
        rows = []
        for one, new, put in meter.replaced(batch, documents, other):
            where = _dependency(batch, block_size) if planted else _lost(one, held, put, own.nats.shape)
            rows.append(_sums(own, new, where, bins, bytes_per_token))
        tables.append(xr.concat(rows, "intervention"))
    result = xr.concat(tables, "document").assign_coords(bin=np.arange(bins) + NO_BIN)
    return result.assign_attrs(distance_of="dependency" if planted else "lost block" if by_heads else "")


class _Scored(NamedTuple):
    """Per token of a batch; `targets` are below 0 where nothing is scored."""

    targets: Int[np.ndarray, "document token"]
    nats: Float64[np.ndarray, "document token"]
    hits: Bool[np.ndarray, "document token"]


@dataclass(frozen=True)
class _Meter:
    """Forwards of a model with its own selections and with others."""

    model: nn.Module
    forward: Forward
    interventions: Sequence[Intervention]
    forced: tuple[int, int]
    done: Callable[[], None]

    def own(self, batch: Batch, documents: Tensor) -> tuple[_Scored, Mapping[str, Seen]]:
        with record(self.model) as watched:
            scored = self._scored(batch, documents)
        wanted = list(dict.fromkeys(path for one in self.interventions for path in one.layers))
        for path in wanted:
            if path not in watched or f"{path}#2" in watched:
                rule = "gives several selections" if path in watched else "gives no selection"
                raise ValueError(f"layers: {path!r} {rule} in a forward; name one of {', '.join(watched) or 'none'}")
        return scored, {path: watched[path] for path in wanted}

    def replaced(
        self, batch: Batch, documents: Tensor, other: Mapping[str, Tensor]
    ) -> Iterator[tuple[Intervention, _Scored, Mapping[str, Selection]]]:
        local, sink = self.forced
        for one in self.interventions:
            proxies = None if one.proxy is None else [one.proxy]
            where = {"layers": one.layers, "proxies": proxies, "num_local_blocks": local, "num_sink_blocks": sink}
            with replaced(self.model, one.rule, documents=documents, other=other, **where) as put:
                scored = self._scored(batch, documents)
            if missing := set(one.layers) - set(put):
                raise ValueError(f"{min(missing)}: has no module `core` beside it, where {one.rule.name} could act")
            yield one, scored, put

    def _scored(self, batch: Batch, documents: Tensor) -> _Scored:
        logits = self.forward(self.model, batch, documents).float()
        targets = batch.targets
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
        hits = logits.argmax(-1) == targets
        self.done()
        return _Scored(*(part.cpu().numpy() for part in (targets, nats.view_as(targets).double(), hits)))


def _call(model: nn.Module, batch: Batch, documents: Tensor) -> Tensor:
    output = model(batch.inputs) if batch.cu_seqlens is None else model(batch.inputs, batch.cu_seqlens)
    return getattr(output, "logits", output)


def _on(batch: Batch, device: torch.device) -> Batch:
    inputs, targets, offsets, distance = batch
    optional = (None if part is None else part.to(device) for part in (offsets, distance))
    return Batch(inputs.to(device), targets.to(device), *optional)


def _blocks(seen: Mapping[str, Seen]) -> dict[str, Tensor]:
    return {path: one.selection.blocks for path, one in seen.items()}


class _Held(NamedTuple):
    """What a layer's queries had in the unchanged model."""

    blocks: Int[np.ndarray, "document proxy query slot"]
    mass: Float[np.ndarray, "document proxy query slot"]
    own: Int[np.ndarray, "document query"]


def _held(seen: Mapping[str, Seen]) -> dict[str, _Held] | None:
    """By path; None where a module does not show its heads."""
    held = {}
    for path, one in seen.items():
        if one.q is None or one.k is None:
            return None
        blocks, size, offsets = one.selection
        batch, _, sequence, _ = blocks.shape
        mass = [at_blocks(group_mass(one, part), blocks[:, :, slice(*part)]) for part in query_ranges(sequence)]
        own = layout(batch, sequence, size, offsets, blocks.device).block
        held[path] = _Held(*(part.cpu().numpy() for part in (blocks, torch.cat(mass, 2), own)))
    return held


def _lost(
    one: Intervention, held: Mapping[str, _Held] | None, put: Mapping[str, Selection], shape: tuple[int, ...]
) -> Int[np.ndarray, "document token"]:
    """The bin of the best block that each query lost."""
    best, where = np.full(shape, -1.0), np.full(shape, NO_BIN)
    for path, (blocks, mass, own) in (held or {}).items():
        if path not in one.layers:
            continue
        gone = blocks >= 0
        for kept in put[path].blocks.cpu().numpy().transpose(3, 0, 1, 2):
            gone &= blocks != kept[..., None]
        # One row a query: the slots of all proxies side by side.
        value, ids = (np.moveaxis(part, 1, 2).reshape(*shape, -1) for part in (np.where(gone, mass, -1.0), blocks))
        place = value.argmax(-1)[..., None]
        value, ids = (np.take_along_axis(part, place, -1)[..., 0] for part in (value, ids))
        better = value > best
        best, where = np.where(better, value, best), np.where(better, log2_bin(own - ids), where)
    return where


def _dependency(batch: Batch, block_size: int) -> Int[np.ndarray, "document token"]:
    """The bin of what each token depends on: its own block minus the source's."""
    assert batch.distance is not None
    distance = batch.distance.cpu().numpy()
    position = np.arange(distance.shape[1])
    apart = position // block_size - (position - distance) // block_size
    return np.where(distance >= 0, log2_bin(np.maximum(apart, 0)), NO_BIN)


def _sums(own: _Scored, new: _Scored, where: np.ndarray, bins: int, bytes_per_token: np.ndarray | None) -> xr.Dataset:
    scored = own.targets >= 0
    rows = len(scored)
    place = (np.arange(rows)[:, None] * bins + where - NO_BIN)[scored]
    size = np.zeros(len(place)) if bytes_per_token is None else bytes_per_token[own.targets[scored]]
    values: dict[str, Any] = {
        "nats": (new.nats - own.nats)[scored],
        "hits": new.hits[scored].astype(float) - own.hits[scored],
        "own_nats": own.nats[scored],
        "own_hits": own.hits[scored],
        "tokens": np.ones(len(place)),
        "bytes": size,
    }
    sums = {name: np.bincount(place, value, rows * bins).reshape(rows, bins) for name, value in values.items()}
    return xr.Dataset({name: (("document", "bin"), value) for name, value in sums.items()})
