"""What is a choice: the query rows in which a proxy has something to choose, and the slots that it chose itself.

Forced blocks say nothing about a proxy, and neither does a query that sees hardly more blocks than it may read.
Everything that measures proxies goes through the two functions here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

NUM_SHARES = 8
"""Equal parts into which the normalised distance x is divided."""


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
        return int(log2_bin(self.own.max(initial=1))) + 1

    def position(self, distance: Int[np.ndarray, "... row slot"]) -> Float[np.ndarray, "... row slot"]:
        """x: 0 for the nearest eligible block, 1 for the farthest; (distance - 1) / (visible - 2) if only the own
        block is forced."""
        return (distance - self.nearest) / np.maximum(self.eligible - 1, 1)[:, None]

    @cached_property
    def uniform(self) -> Float[np.ndarray, "row bin"]:
        """Share of each log2 bin under a uniform choice among the eligible blocks."""
        distance = np.arange(self.own.max(initial=0) + 1)
        return self._expected(np.broadcast_to(log2_bin(distance), (len(self.own), len(distance))), self.num_bins)

    @cached_property
    def uniform_share(self) -> Float[np.ndarray, "row part"]:
        """Share of each part of x under a uniform choice among the eligible blocks."""
        distance = np.arange(self.own.max(initial=0) + 1)
        x = self.position(np.broadcast_to(distance, (len(self.own), len(distance))))
        return self._expected(share_bin(np.clip(x, 0, 1)), NUM_SHARES)

    def _expected(self, bins: Int[np.ndarray, "row distance"], count: int) -> Float[np.ndarray, "row bin"]:
        distance = np.arange(bins.shape[1])
        inside = (distance >= self.nearest) & (distance <= self.farthest[:, None])
        share = inside / np.maximum(self.eligible, 1)[:, None]
        return np.stack([(share * (bins == b)).sum(1) for b in range(count)], 1)


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
    index = np.flatnonzero(own + 1 >= least)
    local, sink = int(attrs.get("num_local_blocks", 1)), int(attrs.get("num_sink_blocks", 0))
    return Rows(index, own[index], local, sink, len(index) / max(len(own), 1))


def learned_slots(blocks: Int[np.ndarray, "... row slot"], rows: Rows) -> Int[np.ndarray, "... row slot"]:
    """The block ids that were chosen freely; -1 in slots that are unused or hold a forced block.

    `blocks` holds the counting rows only, i.e. `log[..., rows.index, :]`.
    """
    own = rows.own.astype(blocks.dtype)[:, None]
    free = (blocks >= rows.num_sink_blocks) & (blocks <= own - rows.num_local_blocks)
    return np.where(free, blocks, blocks.dtype.type(-1))


def distances(
    blocks: Int[np.ndarray, "... row slot"], own: Int[np.ndarray, " row"]
) -> tuple[Int[np.ndarray, "... row slot"], Bool[np.ndarray, "... row slot"]]:
    """Own block minus selected block, in blocks, and which slots hold a block at all (the others read 0)."""
    used = blocks >= 0
    return np.where(used, own[:, None] - blocks.astype(np.int64), 0), used


def log2_bin(distance: np.ndarray | int) -> np.ndarray:
    """0 for distance 0, then 1 for [1], 2 for [2, 3], 3 for [4 .. 7] and so on."""
    return np.frexp(np.asarray(distance, dtype=np.float64))[1]


def bin_label(bin_: int) -> str:
    """The distances of a log2 bin, in blocks."""
    if bin_ < 2:
        return str(bin_)
    return f"{2 ** (bin_ - 1)}–{2**bin_ - 1}"  # noqa: RUF001 (a range is set with an en dash)


def share_bin(x: np.ndarray) -> np.ndarray:
    """Which of the NUM_SHARES equal parts x lies in."""
    return np.minimum((x * NUM_SHARES).astype(np.int64), NUM_SHARES - 1)
