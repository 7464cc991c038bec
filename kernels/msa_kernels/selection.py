"""The selection: which blocks each query and proxy may read, and the rules that make one.

A selection is a value of its own, so that any rule can stand where the proxies' choice stands and run through the
same attention.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from msa_kernels import checks
from msa_kernels.documents import Layout, layout, num_blocks

ABSENT = -(2**31)
"""The rank of a block that must not be selected: below that of every score."""
FORCED = 2**31 - 1
"""The rank of a forced block: above that of every score, infinity included."""
LARGEST_CHUNK = 2**22
"""The most ranks held at one time while choosing."""
MOST_ROUNDS = 8
"""Up to so many blocks are chosen by repeated maxima; more by topk, whose time hardly depends on their number."""


class Selection(NamedTuple):
    """The block ids that each query and proxy may read: ascending, then -1 in the slots that hold no block.

    Block ids count from the start of the query's own document; block b is the document's tokens
    `b * block_size` to `(b + 1) * block_size - 1`. Each proxy serves `num_query_heads / num_proxies` adjacent heads.
    """

    blocks: Int32[Tensor, "batch proxy query slot"]
    block_size: int
    cu_seqlens: Int32[Tensor, "offsets"] | None = None

    def for_heads(self, head_to_proxy: Int64[Tensor, "heads"] | Sequence[int]) -> "Selection":
        """The same choice with one proxy per query head, for groups that are not adjacent heads.

        `head_to_proxy[h]` is the proxy that serves query head h. Raises ValueError for a proxy that does not exist.
        """
        num_proxies = self.blocks.shape[1]
        if not isinstance(head_to_proxy, Tensor) and not all(0 <= proxy < num_proxies for proxy in head_to_proxy):
            raise ValueError(f"head_to_proxy={list(head_to_proxy)} must name proxies 0 to {num_proxies - 1}")
        index = torch.as_tensor(head_to_proxy, dtype=torch.long, device=self.blocks.device)
        return self._replace(blocks=self.blocks[:, index])


def select_from_scores(
    scores: Float[Tensor, "batch proxy query block"],
    *,
    top_k_blocks: int,
    block_size: int = 128,
    cu_seqlens: Int32[Tensor, "offsets"] | None = None,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
    queries: tuple[int, int] | None = None,
    sequence: int | None = None,
) -> Selection:
    """The `top_k_blocks` best visible blocks of each query and proxy (equation 7).

    The newest `num_local_blocks` blocks (the own block first) and the oldest `num_sink_blocks` are forced and count in
    `top_k_blocks`; where they overlap, the slots go back to the scores. Scores are ranked in fp32 and ties go to the
    lower block id. A NaN or -inf marks a block as absent, unless it is forced. Blocks after the own one are never
    selected, whatever their score.

    `scores` may cover the half-open range `queries` of the positions of a row; `sequence` is then the length of the
    whole row, needed only with `cu_seqlens`. Raises ValueError where more blocks are forced than `top_k_blocks`.
    """
    checks.budget(top_k_blocks, block_size, num_local_blocks, num_sink_blocks)
    batch, num_proxies, num_queries, blocks = scores.shape
    start, stop = checks.query_range(queries, num_queries if queries is None else max(queries[1], sequence or 0))
    if stop - start != num_queries:
        raise ValueError(f"queries={queries} names {stop - start} queries but scores hold {num_queries}")
    if queries is not None and cu_seqlens is not None and sequence is None:
        raise ValueError("sequence=None: with queries and cu_seqlens, give the length of the whole row")
    grid = layout(batch, sequence or stop, block_size, cu_seqlens, scores.device)
    chosen = [
        top_blocks(
            ordered(scores[:, :, first:last]),
            grid.block[:, start + first : start + last],
            top_k_blocks,
            num_local_blocks,
            num_sink_blocks,
        )
        for first, last in _chunks(num_queries, batch * num_proxies * blocks)
    ]
    return Selection(torch.cat(chosen, 2), block_size, cu_seqlens)


def window_selection(
    batch: int,
    sequence: int,
    *,
    top_k_blocks: int,
    block_size: int = 128,
    cu_seqlens: Int32[Tensor, "offsets"] | None = None,
    device: torch.device | str | None = None,
) -> Selection:
    """The most recent `top_k_blocks` blocks, the own one included, for one proxy that serves all heads."""
    checks.budget(top_k_blocks, block_size, 1, 0)
    own = layout(batch, sequence, block_size, cu_seqlens, device).block[:, None, :, None]
    oldest = (own - (top_k_blocks - 1)).clamp(min=0)
    blocks = oldest + torch.arange(top_k_blocks, dtype=torch.int32, device=own.device)
    return Selection(torch.where(blocks <= own, blocks, -1), block_size, cu_seqlens)


def random_selection(
    batch: int,
    sequence: int,
    num_proxies: int,
    *,
    top_k_blocks: int,
    block_size: int = 128,
    keys: Int64[Tensor, "batch"],
    cu_seqlens: Int32[Tensor, "offsets"] | None = None,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
) -> Selection:
    """Forced blocks as in `select_from_scores`, the rest uniform without replacement among the visible blocks.

    The draw is a pure function of the row's key (see `row_keys`), the document's start in the row, the proxy, the
    query and the block: the same on every device, in every process and under `torch.compile`.
    """
    checks.budget(top_k_blocks, block_size, num_local_blocks, num_sink_blocks)
    if keys.shape != (batch,) or keys.dtype != torch.int64:
        raise ValueError(
            f"keys is {keys.dtype} {tuple(keys.shape)}; it must be int64 of shape ({batch},), as row_keys makes"
        )
    grid = layout(batch, sequence, block_size, cu_seqlens, keys.device)
    proxy = torch.arange(num_proxies, device=keys.device)[:, None, None]
    block = torch.arange(num_blocks(sequence, block_size), device=keys.device)
    low, high = (word[:, None, None, None] for word in (keys & _WORD, keys >> 32 & _WORD))
    chosen = []
    for first, last in _chunks(sequence, batch * num_proxies * len(block)):
        part = Layout(*(field[:, first:last] for field in grid))
        start, position = (field[:, None, :, None].long() for field in (part.start, part.position))
        # One number a place, by odd factors; two rounds only, because a compiler repeats what is used twice.
        place = start * 0x3C6EF373 + position * 0x1E3779B1 + proxy * 0x5851F42D + block * 0x2545F491
        # 30 bits: never below zero and never as high as FORCED.
        draw = _hash((place & _WORD) ^ low, high) >> 2
        chosen.append(top_blocks(draw, part.block, top_k_blocks, num_local_blocks, num_sink_blocks))
    return Selection(torch.cat(chosen, 2), block_size, cu_seqlens)


def row_keys(seed: int, step: int, layer: int, documents: Int64[Tensor, "batch"]) -> Int64[Tensor, "batch"]:
    """Keys for `random_selection` from the run's seed, the step, the layer and the document of each row."""
    words = [part & _WORD for number in (seed, step, layer) for part in (number, number >> 32)]
    low, high = documents & _WORD, documents >> 32 & _WORD
    return _hash(*words, 0, low, high) << 31 | _hash(*words, 1, low, high) >> 1


def top_blocks(
    rank: Int32[Tensor, "batch proxy query block"],
    own: Int32[Tensor, "batch query"],
    top_k_blocks: int,
    num_local_blocks: int,
    num_sink_blocks: int,
) -> Int32[Tensor, "batch proxy query slot"]:
    """The ids of the highest ranks among the visible blocks, ascending, -1 last."""
    count = rank.shape[-1]
    block = torch.arange(count, device=rank.device)
    own = own[:, None, :, None].long()
    forced = (block > own - num_local_blocks) | (block < num_sink_blocks)
    # Rank above, block id below, in one integer: unique keys, so that ties go to the lower id on every device.
    key = rank.long().masked_fill(forced, FORCED).masked_fill(block > own, ABSENT) * 2**32 + (count - 1 - block)
    ids = _best_by_rounds(key, top_k_blocks) if top_k_blocks <= MOST_ROUNDS else _best_by_sorting(key, top_k_blocks)
    ids = ids.masked_fill(ids == count, -1).int()
    return torch.nn.functional.pad(ids, (0, top_k_blocks - ids.shape[-1]), value=-1)


def _best_by_rounds(key: Int64[Tensor, "*rows block"], top_k_blocks: int) -> Int64[Tensor, "*rows slot"]:
    """The ids in the highest keys, ascending, the block count where a key is absent: one maximum a round.

    Nothing here needs a sort of its own on a GPU, where a compiler makes one kernel of it.
    """
    count = key.shape[-1]
    ids = []
    for _ in range(min(top_k_blocks, count)):
        best = key.amax(-1, keepdim=True)
        ids.append(_block_id(best, count))
        key = key.masked_fill(key == best, torch.iinfo(torch.int64).min)
    # A sorting network: neighbours swap, even pairs and odd pairs in turn.
    for turn in range(len(ids)):
        for i in range(turn % 2, len(ids) - 1, 2):
            ids[i], ids[i + 1] = torch.minimum(ids[i], ids[i + 1]), torch.maximum(ids[i], ids[i + 1])
    return torch.cat(ids, -1)


def _best_by_sorting(key: Int64[Tensor, "*rows block"], top_k_blocks: int) -> Int64[Tensor, "*rows slot"]:
    """As `_best_by_rounds`."""
    count = key.shape[-1]
    best = key.topk(min(top_k_blocks, count), dim=-1, sorted=False).values
    return _block_id(best, count).sort(dim=-1).values


def _block_id(key: Int64[Tensor, "..."], count: int) -> Int64[Tensor, "..."]:
    """The block id in a key of `top_blocks`; `count` where the block is absent."""
    return torch.where(key < (ABSENT + 1) * 2**32, count, count - 1 - (key & _WORD))


def ordered(scores: Float[Tensor, "..."]) -> Int32[Tensor, "..."]:
    """Integers in the order of the fp32 scores; NaN and -inf become ABSENT."""
    scores = scores.detach().float()
    bits = (scores + 0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0, so that the two tie
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return order.masked_fill(scores.isnan() | (scores == -torch.inf), ABSENT)


def _chunks(count: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover 0 to `count`, of at most LARGEST_CHUNK / `width` each."""
    size = max(1, LARGEST_CHUNK // max(width, 1))
    for first in range(0, max(count, 1), size):
        yield first, min(first + size, count)


_WORD = 0xFFFFFFFF


def _hash(*words: Tensor | int) -> Int64[Tensor, "..."]:
    """A 32-bit hash of 32-bit words in int64 arithmetic that never overflows, so that every device agrees."""
    value: Tensor | int = 0
    for word in words:
        value = (value + word + 0x9E3779B9) & _WORD
        value = value ^ (value >> 16)
        value = (value * 0x21F0AAAD) & _WORD
        value = value ^ (value >> 15)
        value = (value * 0x735A2D97) & _WORD
        value = value ^ (value >> 15)
    return value  # pyright: ignore[reportReturnType]  (one of the words is a tensor)
