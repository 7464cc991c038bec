"""The block grid of packed documents.

`cu_seqlens` holds int32 offsets over the flattened batch x sequence: document d is the tokens `cu_seqlens[d]` up to
`cu_seqlens[d + 1]`. Every row boundary is among them, so a document lies within one row. Repeated offsets are empty
documents: they pad the offsets to a static length. `None` makes each row one document.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor


class Layout(NamedTuple):
    """Where each token lies; computed on the device, without waiting for it."""

    document: Int32[Tensor, "batch sequence"]
    """Index of the token's document (among the offsets when there are any, else its row)."""
    start: Int32[Tensor, "batch sequence"]
    """Position in the row of the first token of the document."""
    position: Int32[Tensor, "batch sequence"]
    """Position inside the document."""
    block: Int32[Tensor, "batch sequence"]
    """The token's own block, counted from the document's start."""


def num_blocks(sequence: int, block_size: int) -> int:
    """The most blocks that one document of a row can have."""
    return -(-sequence // block_size)


def layout(
    batch: int,
    sequence: int,
    block_size: int,
    cu_seqlens: Int32[Tensor, "offsets"] | None = None,
    device: torch.device | str | None = None,
) -> Layout:
    """Document, position and own block of every token of a `(batch, sequence)` grid.

    Raises ValueError for offsets that break the rules at the top of this module; their values are looked at only
    where they lie on the CPU, because looking at them elsewhere would wait for the device.
    """
    if cu_seqlens is None:
        rows = torch.arange(batch, dtype=torch.int32, device=device)[:, None].expand(batch, sequence)
        position = torch.arange(sequence, dtype=torch.int32, device=device).expand(batch, sequence)
        return Layout(rows, torch.zeros_like(position), position, position // block_size)
    check_cu_seqlens(cu_seqlens, batch, sequence)
    device = cu_seqlens.device if device is None else device
    offsets = cu_seqlens.to(device)
    token = torch.arange(batch * sequence, dtype=torch.int32, device=device)
    document = torch.searchsorted(offsets, token, right=True, out_int32=True) - 1
    position = token - offsets[document.long()]
    start = token % sequence - position
    return Layout(*(field.view(batch, sequence) for field in (document, start, position, position // block_size)))


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, sequence: int) -> None:
    """Raise ValueError unless the offsets describe documents of a `(batch, sequence)` grid."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} with {cu_seqlens.ndim} dimensions; it must be int32 with 1, "
            "such as torch.tensor([0, 100, 256], dtype=torch.int32)"
        )
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    total = batch * sequence
    if not len(cu_seqlens) or cu_seqlens[0] != 0 or cu_seqlens[-1] != total:
        ends = [int(cu_seqlens[0]), int(cu_seqlens[-1])] if len(cu_seqlens) else []
        raise ValueError(f"cu_seqlens begins and ends with {ends}; it must go from 0 to batch x sequence = {total}")
    steps = cu_seqlens.diff()
    if bool((steps < 0).any()):
        at = int((steps < 0).nonzero()[0])
        raise ValueError(f"cu_seqlens falls from {int(cu_seqlens[at])} to {int(cu_seqlens[at + 1])}; it must not fall")
    rows = torch.arange(0, total + 1, max(sequence, 1), dtype=torch.int32)
    missing = rows[~torch.isin(rows, cu_seqlens)]
    if len(missing):
        raise ValueError(
            f"cu_seqlens lacks {int(missing[0])}; every row boundary (multiples of sequence = {sequence}) "
            "must be an offset, because a document lies within one row"
        )
