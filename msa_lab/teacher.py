"""The teacher: which blocks the main heads themselves would read, from dense attention on the same weights.

It is a diagnostic, not a ceiling: a model trained sparse has never attended densely.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float, Float32, Int32
from msa_kernels import Selection, checks
from msa_kernels.selection import LARGEST_CHUNK, ordered
from msa_kernels.selection import top_blocks as best_blocks
from torch import Tensor
from torch.nn import functional as F

TILE_SCORES = {"cpu": 2**19, "cuda": 2**25}
"""Scores held at one time: what stays in a core's cache, and what is little beside a training step's memory."""
LEAST_QUERIES = 128
"""Of a tile that holds several rows: short tiles, which see few keys beyond their own, save work but cost launches."""


@torch.no_grad()
def block_mass(
    q: Float[Tensor, "batch sequence heads dim"],
    k: Float[Tensor, "batch sequence kv_heads dim"],
    *,
    block_size: int,
    num_groups: int,
    cu_seqlens: Int32[Tensor, " offsets"] | None = None,
    queries: tuple[int, int] | None = None,
    stride: int = 1,
) -> Float32[Tensor, "batch group query block"]:
    """Share of dense causal attention that falls on each block: the mean over a group's heads of their softmax.

    P_b of the paper's recall metrics: softmax over all visible keys with scale dim^-0.5, summed over the keys of block
    b. Rows sum to 1; blocks that a query cannot see hold 0. `num_groups` groups of adjacent heads; with one group per
    head it is each head's own. `queries` is a half-open range of positions in the row, of which every `stride`-th
    counts; None is all of them. Memory is linear in the sequence; sums are fp32, or wider where q and k are.

    Raises:
        ValueError: Heads that do not divide into groups, or a range outside the row.
    """
    batch, sequence, heads, dim = q.shape
    kv_heads = k.shape[2]
    if heads % num_groups:
        raise ValueError(f"num_groups={num_groups}: must divide the {heads} query heads; try {heads}")
    if heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads: they must divide the {heads} query heads; try {heads}")
    first, last = (0, sequence) if queries is None else queries
    if not 0 <= first <= last <= sequence:
        raise ValueError(f"queries={queries}: must lie within the row's {sequence} positions; try (0, {sequence})")
    wide = torch.promote_types(q.dtype, torch.float32)
    count = -(-sequence // block_size)
    mass = torch.zeros(batch, num_groups, len(range(first, last, stride)), count, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        by_head = (q[:, first:last:stride].to(wide) * dim**-0.5).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
        keys = k.to(wide).permute(0, 2, 3, 1)
        for rows, start, stop in _documents(batch, sequence, cu_seqlens, heads, q.device.type):
            # Of the queries that count, those of this document.
            begin, end = (-(-(min(max(at, first), last) - first) // stride) for at in (start, stop))
            for low, high in _tiles(begin, end, len(keys[rows]) * heads * (stop - start), q.device.type):
                seen = keys[rows, ..., start : first + (high - 1) * stride + 1]
                shares = _shares(by_head[rows, :, :, low:high], seen, stride, block_size)
                grouped = shares.unflatten(1, (num_groups, -1)).mean(2)
                mass[rows, :, low:high, : grouped.shape[-1]] = grouped
    return mass


def top_blocks(
    mass: Float32[Tensor, "batch group query block"],
    *,
    top_k_blocks: int,
    block_size: int,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
    queries: tuple[int, int] | None = None,
    stride: int = 1,
) -> Selection:
    """The blocks with most mass, under the rules that the proxies' own choice obeys (`select_from_scores`).

    `queries` and `stride` as for `block_mass`; each row is one document.

    Raises:
        ValueError: More blocks are forced than `top_k_blocks`.
    """
    first, last = (0, mass.shape[2] * stride) if queries is None else queries
    checks.budget(top_k_blocks, block_size, num_local_blocks, num_sink_blocks)
    own = torch.arange(first, last, stride, dtype=torch.int32, device=mass.device)[None] // block_size
    size = max(1, LARGEST_CHUNK // mass[:, :, 0].numel())
    chosen = [
        best_blocks(ordered(part), of_part, top_k_blocks, num_local_blocks, num_sink_blocks)
        for part, of_part in zip(mass.split(size, 2), own.split(size, 1), strict=True)
    ]
    return Selection(torch.cat(chosen, 2), block_size)


def group_divergence(
    by_head: Float[Tensor, "batch head query block"], num_groups: int
) -> Float[Tensor, "batch group query"]:
    """Generalised Jensen-Shannon divergence, in nats, of the heads of each group of adjacent ones: 0 to log(heads).

    Entropy of the heads' mean distribution minus the mean of their entropies: what the mean of the KL divergences of
    the single heads to any one distribution exceeds the KL of their mean to it by, on distributions over blocks.
    """
    return divergence(entropy(by_head.unflatten(1, (num_groups, -1)).mean(2)), entropy(by_head))


def divergence(
    of_mean: Float[Tensor, "batch group query"], of_heads: Float[Tensor, "batch head query"]
) -> Float[Tensor, "batch group query"]:
    """`group_divergence` from the entropies of each group's mean and of the single heads."""
    return (of_mean - of_heads.unflatten(1, (of_mean.shape[1], -1)).mean(2)).clamp(min=0)


def regrouped_divergence(
    by_head: Float[Tensor, "batch head query block"], num_groups: int, regroupings: int
) -> Float[Tensor, "batch regrouping query"]:
    """`group_divergence`, mean over groups, for the heads in so many random orders, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(by_head.shape[1], generator=generator) for _ in range(regroupings)]
    of_heads, drawn = entropy(by_head), []
    # One at a time: each holds as much as the teacher's masses do.
    for order in (order.to(by_head.device) for order in orders):
        of_mean = entropy(by_head[:, order].unflatten(1, (num_groups, -1)).mean(2))
        drawn.append(divergence(of_mean, of_heads[:, order]).mean(1))
    return torch.stack(drawn, 1)


def entropy(shares: Float[Tensor, "*lead block"]) -> Float[Tensor, "*lead"]:
    """Entropy of a distribution over blocks, in nats."""
    return -torch.special.xlogy(shares, shares).sum(-1)


def at_blocks(
    values: Float[Tensor, "batch proxy query block"], blocks: Int32[Tensor, "batch proxy query slot"]
) -> Float[Tensor, "batch proxy query slot"]:
    """The values (scores, masses) of the selected blocks; NaN in slots that hold none."""
    return values.gather(-1, blocks.clamp(min=0).long()).masked_fill(blocks < 0, torch.nan)


def _shares(q: Tensor, k: Tensor, stride: int, block_size: int) -> Float[Tensor, "row head query block"]:
    """Softmax mass per block and head of queries `stride` apart, the last of them at a document's last key so far."""
    scores = torch.matmul(q.flatten(2, 3), k).unflatten(2, q.shape[2:4])
    key = torch.arange((q.shape[-2] - 1) * stride + 1, device=q.device)
    scores[..., -len(key) :].masked_fill_(key > key[::stride, None], -torch.inf)
    attention = scores.softmax(-1)
    if missing := -attention.shape[-1] % block_size:
        attention = F.pad(attention, (0, missing))  # copies all of it
    return attention.unflatten(-1, (-1, block_size)).sum(-1).flatten(1, 2)


def _documents(
    batch: int, sequence: int, cu_seqlens: Tensor | None, heads: int, device: str
) -> Iterator[tuple[slice, int, int]]:
    """Rows, first and last position of every document; rows that are one each go together, as many as a tile holds."""
    if cu_seqlens is None:
        together = max(1, TILE_SCORES.get(device, TILE_SCORES["cuda"]) // (heads * max(sequence, 1) * LEAST_QUERIES))
        for row in range(0, batch if sequence else 0, together):
            yield slice(row, min(row + together, batch)), 0, sequence
        return
    for start, stop in pairwise(cu_seqlens.tolist()):
        if stop > start:
            row = start // sequence
            yield slice(row, row + 1), start - row * sequence, stop - row * sequence


def _tiles(first: int, last: int, width: int, device: str) -> Iterator[tuple[int, int]]:
    """Ranges that cover `first` to `last`, each of as many queries as TILE_SCORES allows."""
    size = max(1, TILE_SCORES.get(device, TILE_SCORES["cuda"]) // width)
    for low in range(first, last, size):
        yield low, min(low + size, last)
