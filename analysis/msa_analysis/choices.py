"""What is a choice: the query rows in which a proxy has something to choose, and the slots that it chose itself.

Forced blocks say nothing about a proxy, and neither does a query that sees hardly more blocks than it may read.
Everything that measures proxies goes through the two functions here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

NUM_SHARES = 8
"""Equal parts into which the normalised distance x is divided."""
NUM_POSITIONS = 8
"""Equal parts into which the context is divided, by the query's own block."""


@dataclass(frozen=True)
class Rows:
    """Query rows that count, and what is eligible in each: distances `nearest` to `farthest`, in blocks."""

    index: Int[np.ndarray, " row"]
    """Their place along the log's query axis."""
    own: Int[np.ndarray, " row"]
    """The block that holds the query; it sees own + 1 blocks."""
    num_local_blocks: int
    num_sink_blocks: int
    share: float
    """Counting rows over all rows of the log."""
    num_blocks: int
    """Blocks of the whole context."""

    @property
    def nearest(self) -> int:
        """Smallest distance that is not forced."""
        return self.num_local_blocks

    @property
    def farthest(self) -> Int[np.ndarray, " row"]:
        """Largest distance that is not forced."""
        return self.own - self.num_sink_blocks

    @property
    def eligible(self) -> Int[np.ndarray, " row"]:
        """Blocks among which the learned slots are chosen."""
        return self.farthest - self.nearest + 1

    @property
    def num_bins(self) -> int:
        """Log2 bins of distance, from [0] and [1] to the bin of the farthest block."""
        return int(log2_bin(max(self.num_blocks - 1, 1))) + 1

    @cached_property
    def blocks(self) -> tuple[Int[np.ndarray, " own"], Int[np.ndarray, " own"]]:
        """The own blocks of these rows, ascending, and the row at which each begins."""
        own, start = np.unique(self.own, return_index=True)
        return own, start

    @cached_property
    def own_place(self) -> Int[np.ndarray, " row"]:
        """Each row's place among the own blocks."""
        return np.searchsorted(self.blocks[0], self.own)

    def stand_in(self) -> Rows:
        """The log's first row, where none counts: for the shapes of sums over rows."""
        return replace(self, index=np.zeros(1, int), own=np.full(1, self.num_blocks - 1))

    def parts(self, size: int) -> Iterator[Rows]:
        """The rows in pieces of at most `size`."""
        for start in range(0, len(self.index), max(size, 1)):
            piece = slice(start, start + max(size, 1))
            yield replace(self, index=self.index[piece], own=self.own[piece])

    def by_own(self, values: Float[np.ndarray, "*lead row"]) -> Float[np.ndarray, "*lead own"]:
        """Sums over the rows of each own block."""
        return np.add.reduceat(values, self.blocks[1], -1, dtype=float)

    def position(self, own: np.ndarray) -> np.ndarray:
        """Which of the NUM_POSITIONS equal parts of the context an own block lies in."""
        return own * NUM_POSITIONS // self.num_blocks

    def by_position(self, values: Float[np.ndarray, "*lead own"]) -> Float[np.ndarray, "*lead position"]:
        """Sums over the own blocks of each part of the context."""
        return values @ (self.position(self.blocks[0])[:, None] == np.arange(NUM_POSITIONS)).astype(float)

    @cached_property
    def grid(self) -> Grid:
        """What every block is to every own block."""
        own = self.blocks[0][:, None]
        block = np.arange(self.num_blocks)
        distance = own - block
        inside = (block >= self.num_sink_blocks) & (distance >= self.nearest)
        eligible = np.maximum(own - self.num_sink_blocks - self.nearest + 1, 1)
        x = np.where(inside, (distance - self.nearest) / np.maximum(eligible - 1, 1), 1.0)
        return Grid(np.where(inside, distance, 0), x, inside / eligible)


@dataclass(frozen=True)
class Grid:
    """By own block and block: `distance` in blocks (0 where not eligible), `x` and the `chance` of one uniform choice.

    x: 0 for the nearest eligible block, 1 for the farthest (and where not eligible): (distance - 1) / (visible - 2) if
    only the own block is forced.
    """

    distance: Int[np.ndarray, "own block"]
    x: Float[np.ndarray, "own block"]
    chance: Float[np.ndarray, "own block"]


def counting_rows(dataset: xr.Dataset, *, min_visible: int | None = None) -> Rows:
    """The query rows that see at least `min_visible` blocks (default 4 x top_k_blocks: no saturation).

    Raises:
        ValueError: min_visible does not exceed top_k_blocks, so that some rows would have no choice.
    """
    attrs = dataset.attrs
    top_k = int(attrs["top_k_blocks"])
    least = 4 * top_k if min_visible is None else min_visible
    if least <= top_k:
        rule = f"a query that sees no more than top_k_blocks={top_k} blocks has no choice"
        raise ValueError(f"min_visible={least}: {rule}; try {4 * top_k}")
    own = dataset["query"].values.astype(np.int64) // int(attrs["block_size"])
    if not len(own):
        raise ValueError("query=[]: the log holds no query; record documents of at least one token")
    index = np.flatnonzero(own + 1 >= least)
    local, sink = int(attrs.get("num_local_blocks", 1)), int(attrs.get("num_sink_blocks", 0))
    blocks = int(own.max()) + 1
    return Rows(index, own[index], local, sink, len(index) / max(len(own), 1), blocks)


def learned_slots(blocks: Int[np.ndarray, "... row slot"], rows: Rows) -> Int[np.ndarray, "... row slot"]:
    """The block ids that were chosen freely; -1 in slots that are unused or hold a forced block.

    `blocks` holds the counting rows only, i.e. `log[..., rows.index, :]`.
    """
    own = rows.own.astype(blocks.dtype)[:, None]
    free = (blocks >= rows.num_sink_blocks) & (blocks <= own - rows.num_local_blocks)
    return np.where(free, blocks, blocks.dtype.type(-1))


def by_slot(blocks: Int[np.ndarray, "... query slot"], rows: Rows) -> Int[np.ndarray, "... slot row"]:
    """The learned slots of the counting rows, slot by slot: sums over few slots are then sums of long vectors."""
    return np.ascontiguousarray(learned_slots(blocks[..., rows.index, :], rows).swapaxes(-1, -2))


def log2_bin(distance: np.ndarray | int) -> np.ndarray:
    """0 for distance 0, then 1 for [1], 2 for [2, 3], 3 for [4 .. 7] and so on."""
    return np.frexp(np.asarray(distance, dtype=np.float64))[1]


def bin_label(bin_: int) -> str:
    """The distances of a log2 bin, in blocks."""
    if bin_ < 2:
        return str(bin_)
    return f"{2 ** (bin_ - 1)}–{2**bin_ - 1}"  # noqa: RUF001 (a range is set with an en dash)


def position_label(position: int, num_blocks: int) -> str:
    """The own blocks of a part of the context."""
    first, last = (-(-p * num_blocks // NUM_POSITIONS) for p in (position, position + 1))
    return str(first) if last - first == 1 else f"{first}–{last - 1}"  # noqa: RUF001 (a range is set with an en dash)


def share_bin(x: np.ndarray) -> np.ndarray:
    """Which of the NUM_SHARES equal parts x lies in."""
    return np.minimum((x * NUM_SHARES).astype(np.int64), NUM_SHARES - 1)
