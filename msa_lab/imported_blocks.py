"""Foreign block ids brought into the log's form, ascending and -1 last, and refused where they are no selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float16, Int
from torch import Tensor

Array = np.ndarray | Tensor
DIMS = ("step", "layer", "document", "proxy", "query", "slot")
MOST_BLOCKS = 2**15
"""Ids are stored as int16."""


@dataclass(frozen=True)
class Grid:
    """What the block ids of a set of selections mean."""

    block_size: int
    top_k_blocks: int
    num_local_blocks: int
    num_sink_blocks: int
    query_stride: int
    context_length: int
    unused: int | None

    def __post_init__(self) -> None:
        least = {"num_local_blocks": 0, "num_sink_blocks": 0, "unused": 0}
        for name, value in vars(self).items():
            if not (isinstance(value, int | np.integer) and value >= least.get(name, 1)) and value is not None:
                rule = f"must be one whole number of at least {least.get(name, 1)}"
                raise ValueError(f"{name}={value!r}: {rule}; try {max(1, least.get(name, 1))}")
        if self.num_blocks > MOST_BLOCKS:
            rule = f"makes {self.num_blocks} blocks of {self.context_length} tokens, of at most {MOST_BLOCKS}"
            raise ValueError(f"block_size={self.block_size}: {rule}; try {-(-self.context_length // MOST_BLOCKS)}")

    @property
    def num_blocks(self) -> int:
        """Blocks of a whole document; as an id, an unused slot."""
        return -(-self.context_length // self.block_size)

    @cached_property
    def own(self) -> Int[np.ndarray, " query"]:
        """The block that holds each recorded query."""
        return np.arange(0, self.context_length, self.query_stride) // self.block_size

    def forced(self) -> list[tuple[str, Int[np.ndarray, " query"]]]:
        """Each forced block of every query by the name of its rule; -1 where the query does not see it."""
        local = [("num_local_blocks", self.own - i) for i in range(self.num_local_blocks)]
        sink = [("num_sink_blocks", np.where(self.own >= i, i, -1)) for i in range(self.num_sink_blocks)]
        return local + sink


@dataclass(frozen=True)
class Canonical:
    """Block ids in the log's form, and the order that brought them there."""

    ids: Int[np.ndarray, "step layer document proxy query slot"]
    order: Int[np.ndarray, "step layer document proxy query given_slot"]

    def follow(self, values: np.ndarray) -> Float16[np.ndarray, "step layer document proxy query slot"]:
        """Values of the given slots, moved to where their blocks are; NaN where there is no block.

        The log keeps float16; finite values beyond its range become its largest.
        """
        moved = _fitted(np.take_along_axis(values, self.order, -1).astype(float), self.ids.shape[-1], np.nan)
        largest = float(np.finfo(np.float16).max)
        clipped = np.where(np.isfinite(moved), moved.clip(-largest, largest), moved)
        return np.where(self.ids >= 0, clipped, np.nan).astype(np.float16)


def stacked(name: str, value: Array | Mapping[int, Array]) -> tuple[np.ndarray, list[int]]:
    """One array (step, layer, document, proxy, query, slot) and the layers' numbers.

    Raises:
        ValueError: No layer, layers of unlike shapes, or not 5 or 6 dims.
    """
    if isinstance(value, Mapping):
        layers = sorted(value)
        parts = [as_array(value[layer]) for layer in layers]
        shapes = {layer: part.shape for layer, part in zip(layers, parts, strict=True)}
        if len(set(shapes.values())) != 1:
            rule = "all layers must have one shape, and so one number of proxies and slots"
            raise ValueError(f"{name}: {rule}; it has {shapes or 'no layer'}; import unlike layers apart")
        whole = np.stack(parts, -5) if parts[0].ndim >= 4 else np.stack(parts)
    else:
        whole = as_array(value)
        layers = list(range(whole.shape[-5] if whole.ndim >= 5 else 0))
    whole = whole[None] if whole.ndim == 5 else whole
    if whole.ndim != 6 or not whole.size:
        wanted = "([step,] layer, document, proxy, query, slot), none of them 0"
        raise ValueError(f"{name} has shape {tuple(as_array(whole).shape)}: must be {wanted}")
    return whole, layers


def as_array(value: Any) -> np.ndarray:
    """On the host; bfloat16, which numpy has not, as float32."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype.is_floating_point else value
        return value.numpy()
    return np.asarray(value)


def canonical(name: str, given: np.ndarray, layers: Sequence[int], grid: Grid) -> Canonical:
    """`given` ids in the log's form.

    Raises:
        ValueError: Ids that are no selection: see the rules.
    """
    if not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"{name} is {given.dtype}: must hold whole numbers; try {name}.astype('int16')")
    given, own, place = given.astype(np.int64), grid.own[:, None], _Places(name, layers, grid)
    used = (given >= 0) & (given != grid.num_blocks) & (given != (-1 if grid.unused is None else grid.unused))
    absent = f"an unused slot must hold -1 or {grid.num_blocks}, or what `unused` says"
    place.refuse(used & (given > own), f"lies after the query's own block; {absent}", given)
    key = np.where(used, given, np.iinfo(np.int64).max)
    order = key.argsort(-1, kind="stable")
    ids = np.take_along_axis(np.where(used, given, -1), order, -1)
    twice = np.zeros(ids.shape, bool)
    twice[..., 1:] = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)
    place.refuse(twice, f"stands twice in its row; {absent}", ids)
    count = used.sum(-1)
    if (most := int(count.max())) > grid.top_k_blocks:
        raise ValueError(f"top_k_blocks={grid.top_k_blocks}: a row of {name} holds {most} blocks; try {most}")
    for rule, wanted in grid.forced():
        missing = (wanted >= 0) & (count > 0) & ~(ids == wanted[:, None]).any(-1)
        fix = f"if it is not forced, try {rule}=0"
        place.refuse(
            missing[..., None], f"is not chosen though it is forced; {fix}", wanted[:, None] + 0 * ids[..., :1]
        )
    _refuse_unlike(name, count, layers, grid)
    _refuse_empty(name, count)
    return Canonical(_fitted(ids, grid.top_k_blocks, -1).astype(np.int16), order)


def refuse_not_finite(name: str, values: np.ndarray, ids: np.ndarray, layers: Sequence[int], grid: Grid) -> None:
    """A chosen block has a value, unless the layer has none at all; a forced one needs none."""
    own = grid.own[:, None]
    free = (ids >= grid.num_sink_blocks) & (ids <= own - grid.num_local_blocks)
    bare = np.isnan(values).all((2, 3, 4, 5), keepdims=True)
    text = f"has a {name} that is not finite, so how it was chosen is unknown; leave {name} or the document out"
    _Places(name, layers, grid).refuse(free & ~bare & ~np.isfinite(values), text, ids)


@dataclass(frozen=True)
class _Places:
    """Says where in an array something is wrong."""

    name: str
    layers: Sequence[int]
    grid: Grid

    def refuse(self, wrong: Bool[np.ndarray, "*axes"], rule: str, ids: np.ndarray) -> None:
        if not wrong.any():
            return
        at = tuple(int(i) for i in np.unravel_index(wrong.argmax(), wrong.shape))
        step, layer, document, proxy, query, _ = at
        where = f"record {step}, layer {self.layers[layer]}, document {document}, proxy {proxy}"
        where = f"{where}, query {query * self.grid.query_stride}"
        raise ValueError(f"{self.name}: block {ids[at]} of {where} {rule}")


def _refuse_unlike(name: str, count: Int[np.ndarray, "*axes query"], layers: Sequence[int], grid: Grid) -> None:
    """Numbers of proxies with unlike budgets would differ for that reason alone."""
    most = np.where(grid.own + 1 >= grid.top_k_blocks, count, 0).max((2, 4))
    if most.max() == 0 or (most[most > 0] == most.max()).all():
        return
    step, layer, proxy = (int(i) for i in np.argwhere((most > 0) & (most < most.max()))[0])
    where = f"record {step}, layer {layers[layer]}, proxy {proxy}"
    raise ValueError(
        f"{name}: {where} chooses at most {most[step, layer, proxy]} blocks, another {most.max()}: proxies of unlike "
        "budgets cannot be compared; import them apart"
    )


def _refuse_empty(name: str, count: Int[np.ndarray, "step layer document proxy query"]) -> None:
    empty = np.flatnonzero(count.sum((0, 1, 3, 4)) == 0)
    if len(empty):
        raise ValueError(f"{name}: document {empty[0]} is empty, no row of it holds a block; leave it out")


def _fitted(values: np.ndarray, slots: int, fill: float) -> np.ndarray:
    """Cut or filled up to `slots`."""
    spare = max(0, slots - values.shape[-1])
    return np.pad(values[..., :slots], [(0, 0)] * (values.ndim - 1) + [(0, spare)], constant_values=fill)
