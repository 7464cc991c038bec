"""What every source of tokens hands out."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Int32, Int64
from torch import Tensor

IGNORED = -100
"""A target that is not scored."""


class Batch(NamedTuple):
    """Rows of tokens; `targets[b, i]` is what should be predicted at `inputs[b, i]`."""

    inputs: Int64[Tensor, "batch sequence"]
    targets: Int64[Tensor, "batch sequence"]
    """-100 where nothing is scored."""
    cu_seqlens: Int32[Tensor, " offsets"] | None
    """With `data.document_mask`: where documents start in the flattened rows, row starts included, then the total;
    padded by repeating the total, so that its length depends on the batch size alone."""
    distance: Int64[Tensor, "batch sequence"] | None
    """Recall: tokens between a question and its answer's source; -1 elsewhere."""


class Probe(NamedTuple):
    """Fixed validation documents on which selections are recorded."""

    tokens: Int64[Tensor, "document sequence"]
    ids: tuple[str, ...]
