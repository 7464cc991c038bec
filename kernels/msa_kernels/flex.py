"""The operations on PyTorch's FlexAttention and compiled PyTorch: any CUDA GPU, no kernel of ours.

The selection becomes a bit set per query, which FlexAttention's mask reads, and a list of the 128 x 128 tiles that
hold any selected token, outside which nothing is computed. The proxies' scores and the KL are matrix products over
chunks of queries, followed by one fused pass over the scores; the KL takes its softmaxes' log-sum-exps from attention.
A branch's scores of a chunk take at most a fixed share of the device's memory, whatever the length: short sequences
may fit into one chunk, long ones never hold their square.

Everything is repeatable bit for bit: sums run in a fixed order, without atomics. Shapes are compiled as constants, so
a new batch size or length compiles once more. On a CPU the functions run uncompiled, and FlexAttention has no backward
pass there: that is for tests, `msa_kernels.reference` is for work.
"""

import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.flop_counter import register_flop_formula

from msa_kernels import checks
from msa_kernels.documents import check_cu_seqlens, layout, num_blocks
from msa_kernels.selection import Selection, ordered, top_blocks

TILE = 128
"""FlexAttention's tile, queries and keys."""
CHUNK_SCORES = 2**26
"""The most scores of all heads held at one time (256 MiB in fp32), if the device has no room for more."""
CHUNK_SHARE = 1 / 128
"""Share of a GPU's memory that a branch's scores of one chunk may take: few chunks, because each costs host time."""
KEY_LENGTHS = 4
"""Causal chunks look at so many different numbers of keys, each compiled: 5/8 of the square, where 1/2 is visible."""
LSE_VALUES = 16
"""The narrowest values that FlexAttention takes, where only its log-sum-exp is wanted."""
UNROLLED_WORDS = 8
"""Bit sets up to so many words are read by selects, whose loads do not depend on the key; longer ones by an index."""
GRADIENT_SCALE = 1024.0
"""Keeps student minus teacher, at most 1, clear of fp16's smallest numbers."""


def block_scores(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    *,
    block_size: int = 128,
    cu_seqlens: Tensor | None = None,
    queries: tuple[int, int] | None = None,
) -> Float32[Tensor, "batch proxy query block"]:
    """As `msa_kernels.reference.block_scores`."""
    checks.proxy_branch(q_proxy, k_proxy)
    checks.budget(1, block_size, 0, 0)
    batch, sequence, num_proxies, _ = q_proxy.shape
    first, last = checks.query_range(queries, sequence)
    count = num_blocks(sequence, block_size)
    with torch.no_grad(), torch.autocast(q_proxy.device.type, enabled=False):
        start = _starts(batch, sequence, cu_seqlens, q_proxy.device)
        parts = [q_proxy.new_empty(batch, num_proxies, 0, count, dtype=torch.float32)]
        for _, *chunk in _proxy_chunks(q_proxy, k_proxy, start, first, last):
            pooled = _compiled(_pool)(*chunk, block_size)
            parts.append(F.pad(pooled, (0, count - pooled.shape[-1]), value=-torch.inf))
        return torch.cat(parts, 2)


def select_blocks(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    *,
    top_k_blocks: int,
    block_size: int = 128,
    cu_seqlens: Tensor | None = None,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
) -> Selection:
    """As `msa_kernels.reference.select_blocks`."""
    checks.proxy_branch(q_proxy, k_proxy)
    checks.budget(top_k_blocks, block_size, num_local_blocks, num_sink_blocks)
    start = _starts(q_proxy.shape[0], q_proxy.shape[1], cu_seqlens, q_proxy.device)
    rule = (top_k_blocks, block_size, num_local_blocks, num_sink_blocks)
    blocks = torch.ops.msa_kernels.flex_select_blocks(q_proxy.detach(), k_proxy.detach(), start, *rule)
    return Selection(blocks, block_size, cu_seqlens)


def sparse_attention(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head value_dim"],
    selection: Selection,
) -> tuple[Float[Tensor, "batch sequence head value_dim"], Float[Tensor, "batch sequence head"]]:
    """As `msa_kernels.reference.sparse_attention`."""
    checks.main_branch(q, k, v)
    checks.selection(*selection, q, k.shape[2])
    start = _starts(q.shape[0], q.shape[1], selection.cu_seqlens, q.device)
    return _compiled(_sparse_attention)(q, k, v, selection.blocks, start, selection.block_size)


def dense_attention(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head value_dim"],
    *,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Float[Tensor, "batch sequence head value_dim"], Float[Tensor, "batch sequence head"] | None]:
    """As `msa_kernels.reference.dense_attention`, by PyTorch's own fused kernels where they serve.

    Without `return_lse` the second result is None and PyTorch chooses the kernel: its fastest, or FlashAttention, whose
    backward pass can be repeated, under `torch.use_deterministic_algorithms`. With it, it is always FlashAttention.
    """
    checks.main_branch(q, k, v)
    if not return_lse and _flash_serves(q, v, cu_seqlens):
        by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True).transpose(1, 2), None
    out, lse = _dense_with_lse(q, k, v, _starts(q.shape[0], q.shape[1], cu_seqlens, q.device))
    return out, lse if return_lse else None


def proxy_kl(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    lse: Float[Tensor, "batch sequence head"],
    selection: Selection,
) -> Float[Tensor, "proxy"]:
    """As `msa_kernels.reference.proxy_kl`; the gradients are made in the forward pass, together with the value."""
    checks.both_branches(q_proxy, k_proxy, q, k)
    checks.selection(*selection, q, k.shape[2])
    checks.lse(lse, q)
    num_proxies, selected = q_proxy.shape[2], selection.blocks.shape[1]
    checks.shared_selection(selected, num_proxies)
    blocks = selection.blocks
    if selected != num_proxies:
        blocks = blocks.repeat_interleave(num_proxies // selected, 1)
    return _kl(q_proxy, k_proxy, q, k, lse, blocks, selection.cu_seqlens, selection.block_size)


def dense_proxy_kl(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    lse: Float[Tensor, "batch sequence head"],
    *,
    cu_seqlens: Tensor | None = None,
) -> Float[Tensor, "proxy"]:
    """As `msa_kernels.reference.dense_proxy_kl`."""
    checks.both_branches(q_proxy, k_proxy, q, k)
    checks.lse(lse, q)
    return _kl(q_proxy, k_proxy, q, k, lse, None, cu_seqlens, 1)


# The support: which keys a query may see.


# FlexAttention must read stored tensors of the plain layout. Inductor writes what it could fuse into the attention
# kernel's mask, where the reductions behind a bit set do not compile; and the kernel takes for granted that a list of
# tiles lies contiguously, where Inductor chooses the stride of a dimension of size 1, one head say, as it likes: of a
# batch, all rows but the first then read other memory. Operations that Inductor cannot look into prevent both.


def _starts(batch: int, sequence: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor | None:
    """Position in the row of each token's document, None where every row is one document."""
    if cu_seqlens is None:
        return None
    # Where they are given: their values can be looked at on the CPU, but on a device not without waiting for it.
    check_cu_seqlens(cu_seqlens, batch, sequence)
    return torch.ops.msa_kernels.flex_starts(cu_seqlens.to(device), batch, sequence)


@torch.library.custom_op("msa_kernels::flex_starts", mutates_args=())
def _document_starts(cu_seqlens: Tensor, batch: int, sequence: int) -> Tensor:
    return layout(batch, sequence, 1, cu_seqlens, cu_seqlens.device).start.clone()


@_document_starts.register_fake
def _(cu_seqlens: Tensor, batch: int, sequence: int) -> Tensor:
    return cu_seqlens.new_empty(batch, sequence, dtype=torch.int32)


def _bit_set(blocks: Int32[Tensor, "batch proxy query slot"], count: int) -> Int32[Tensor, "word batch proxy query"]:
    """The selected ids below `count` as bits: block b is bit b % 32 of word b // 32."""
    word = torch.arange(-(-count // 32), dtype=torch.int32, device=blocks.device)[:, None, None, None, None]
    bit = torch.ones_like(blocks) << (blocks & 31)
    return torch.where(blocks >> 5 == word, bit, 0).sum(-1, dtype=torch.int32)


def _sees(
    bits: Tensor | None,
    start: Tensor | None,
    block_size: int,
    at: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
) -> Tensor:
    """Whether a query may see a key. `at` = (row of the batch, proxy, index of the query in `bits` and `start`)."""
    batch, proxy, index = at
    causal = key <= query
    if start is not None:
        key = key - start[batch, index]
        causal = causal & (key >= 0)
    if bits is None:
        return causal
    # Before its document a key's block is negative: wrong, but no index out of range, and `causal` is false there.
    power_of_two = block_size & (block_size - 1) == 0
    block = key >> block_size.bit_length() - 1 if power_of_two else key // block_size
    if bits.shape[0] > UNROLLED_WORDS:
        word = bits[block >> 5, batch, proxy, index]
    else:
        word = bits[batch * 0, batch, proxy, index]
        for i in range(1, bits.shape[0]):
            word = torch.where(block >> 5 == i, bits[batch * 0 + i, batch, proxy, index], word)
    return causal & ((word >> (block & 31)) & 1 == 1)


# Attention.


class _Tiles(NamedTuple):
    """The 128 x 128 tiles to compute: for each row of query tiles how many and which, ascending; then by key tiles."""

    count: Int32[Tensor, "batch head query_tile"]
    order: Int32[Tensor, "batch head query_tile key_tile"]
    by_key_count: Int32[Tensor, "batch head key_tile"] | None
    by_key_order: Int32[Tensor, "batch head key_tile query_tile"] | None


def _sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, start: Tensor | None, block_size: int
) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // blocks.shape[1]
    bits, *tiles = torch.ops.msa_kernels.flex_selected(blocks, start, block_size, group, torch.is_grad_enabled())

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _sees(bits, start, block_size, (batch, head // group, query), query, key)

    return _attend(q, k, v, _Tiles(*tiles), mask)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _sees(None, start, 1, (batch, head, query), query, key)

    tiles = torch.ops.msa_kernels.flex_causal_tiles(q.detach(), start, torch.is_grad_enabled())
    return _attend(q, k, v, _Tiles(*tiles), mask)


def _flash_serves(q: Tensor, v: Tensor, documents: Tensor | None) -> bool:
    """Whether PyTorch's FlashAttention takes these, causal, with any number of key heads."""
    dim = q.shape[-1]
    fits = v.shape[-1] == dim and dim % 8 == 0 and dim <= 256
    return fits and documents is None and q.is_cuda and q.dtype in checks.HALF


def _dense_with_lse(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    if not _flash_serves(q, v, start):
        return _compiled(_dense_attention)(q, k, v, start)
    by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*by_head, 0.0, True, False)[:2]
    return out.transpose(1, 2), lse.transpose(1, 2).detach()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: _Tiles,
    mask: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    # Only the backward pass goes by the tiles of each key.
    by_key = tiles[2:] if torch.is_grad_enabled() else (None, None)
    lengths = q.shape[1], k.shape[1]
    block_mask = BlockMask(lengths, *tiles[:2], None, None, *by_key, None, None, (TILE, TILE), mask)
    out, aux = flex_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=block_mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # the kernel for few queries wants other tiles
    )
    assert aux.lse is not None
    return out.transpose(1, 2), aux.lse.transpose(1, 2).detach()


@torch.library.custom_op("msa_kernels::flex_selected", mutates_args=())
def _stored_selection(
    blocks: Tensor, start: Tensor | None, block_size: int, group: int, by_key: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The selection as bit sets, and its tiles for each query head (the last two empty without `by_key`)."""
    return _compiled(_bits_and_tiles)(blocks, start, block_size, group, by_key)


@_stored_selection.register_fake
def _(
    blocks: Tensor, start: Tensor | None, block_size: int, group: int, by_key: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, proxies, sequence, _ = blocks.shape
    words = -(-num_blocks(sequence, block_size) // 32)
    bits = blocks.new_empty(words, batch, proxies, sequence)
    return bits, *_unlisted(blocks, batch, proxies * group, sequence, by_key)


def _bits_and_tiles(
    blocks: Tensor, start: Tensor | None, block_size: int, group: int, by_key: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    bits = _bit_set(blocks, num_blocks(blocks.shape[2], block_size))
    tiles = _selected_tiles(blocks, start, block_size).repeat_interleave(group, 1)
    return bits, *_listed(tiles, by_key)


@torch.library.custom_op("msa_kernels::flex_causal_tiles", mutates_args=())
def _stored_causal_tiles(q: Tensor, start: Tensor | None, by_key: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tiles of full causal attention, the same for every head."""
    return _compiled(_causal_tiles)(q, start, by_key)


@_stored_causal_tiles.register_fake
def _(q: Tensor, start: Tensor | None, by_key: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _unlisted(q, q.shape[0], 1, q.shape[1], by_key)


def _causal_tiles(q: Tensor, start: Tensor | None, by_key: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, sequence = q.shape[:2]
    tile = torch.arange(-(-sequence // TILE), device=q.device)
    tiles = (tile <= tile[:, None]).expand(batch, 1, -1, -1)
    if start is not None:
        # Documents follow one another: the first query of a tile has the oldest document.
        tiles = tiles & (tile >= (start[:, None, ::TILE, None] // TILE))
    return _listed(tiles, by_key)


def _listed(
    tiles: Bool[Tensor, "batch head query_tile key_tile"], by_key: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tiles as `_Tiles` has them; the last two empty without `by_key`."""
    if by_key:
        return *_order(tiles), *_order(tiles.transpose(-1, -2))
    return *_order(tiles), *(tiles.new_empty(0, dtype=torch.int32), tiles.new_empty(0, dtype=torch.int32))


def _order(tiles: Bool[Tensor, "*rows tile"]) -> tuple[Int32[Tensor, "*rows"], Int32[Tensor, "*rows tile"]]:
    """How many tiles each row has, and their indices in ascending order, followed by the others'."""
    order = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.to(torch.int32, memory_format=torch.contiguous_format)


def _unlisted(
    like: Tensor, batch: int, heads: int, sequence: int, by_key: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `_listed` returns, without its values."""
    count = -(-sequence // TILE)
    counts, orders = (batch, heads, count), (batch, heads, count, count)
    a, b = (like.new_empty(shape, dtype=torch.int32) for shape in (counts, orders))
    c, d = (like.new_empty(shape if by_key else (0,), dtype=torch.int32) for shape in (counts, orders))
    return a, b, c, d


def _selected_tiles(
    blocks: Int32[Tensor, "batch proxy query slot"], start: Tensor | None, block_size: int
) -> Bool[Tensor, "batch proxy query_tile key_tile"]:
    """The tiles that hold a token selected by any query of the tile's rows."""
    batch, proxies, sequence, _ = blocks.shape
    count = -(-sequence // TILE)
    first = blocks * block_size
    if start is not None:
        first = first + start[:, None, :, None]
    query = torch.arange(sequence, dtype=torch.int32, device=blocks.device)[:, None]
    last = torch.minimum(first + block_size - 1, query)
    aligned = start is None and (TILE % block_size == 0 or block_size % TILE == 0)
    most = -(-block_size // TILE) if aligned else (block_size - 2) // TILE + 2
    tile = first[..., None] // TILE + torch.arange(most, dtype=torch.int32, device=blocks.device)
    tile = torch.where((blocks[..., None] >= 0) & (tile * TILE <= last[..., None]), tile, -1)
    tile = F.pad(tile.flatten(3), (0, 0, 0, count * TILE - sequence), value=-1).view(batch, proxies, count, -1, 1)
    # Comparisons rather than a scatter, which deterministic mode would turn into a sort.
    return (tile == torch.arange(count, dtype=torch.int32, device=blocks.device)).any(-2)


# The proxies' scores.


def _most_scores(device: torch.device) -> int:
    if device.type != "cuda":
        return CHUNK_SCORES
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(CHUNK_SCORES, 2 ** int(memory * CHUNK_SHARE / 4).bit_length() // 2)


def _chunks(first: int, last: int, sequence: int, heads: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of queries, each with the number of keys to look at: few different numbers, because each is compiled.

    `most` bounds the scores of one range, heads * queries * keys.
    """
    step = -(-sequence // (KEY_LENGTHS * TILE)) * TILE if sequence > 16 * TILE else sequence
    size = max(1, most // (heads * sequence))
    size = min(step, size // TILE * TILE or size)
    for start in range(first, last, size):
        stop = min(start + size, last)
        yield start, stop, min(sequence, -(-stop // step) * step)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched product, accumulated and given in fp32 or wider."""
    if a.dtype not in checks.HALF:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(batch, sequence, heads, dim) to (batch * groups, heads / groups * sequence, dim)."""
    batch, _, _, dim = x.shape
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).reshape(batch * groups, -1, dim)


def _scores(q: Tensor, keys: Float[Tensor, "batch*groups key dim"]) -> Float[Tensor, "batch head query key"]:
    """Dot products, unscaled, of the queries of a chunk (batch, query, head, dim) with the keys of their group."""
    batch, queries, heads, _ = q.shape
    scores = _matmul(_by_group(q, keys.shape[0] // batch), keys.transpose(1, 2))
    return scores.view(batch, heads, queries, keys.shape[1])


def _proxy_chunks(
    q_proxy: Tensor, k_proxy: Tensor, start: Tensor | None, first: int, last: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor | None]]:
    """For each chunk of queries: their range, themselves, the keys, positions and documents' starts."""
    batch, sequence, num_proxies, _ = q_proxy.shape
    keys = _by_group(k_proxy, k_proxy.shape[2])
    query = torch.arange(sequence, dtype=torch.int32, device=q_proxy.device)
    for begin, end, length in _chunks(first, last, sequence, batch * num_proxies, _most_scores(q_proxy.device)):
        rows = slice(begin, end)
        yield rows, q_proxy[:, rows], keys[:, :length], query[rows], None if start is None else start[:, rows]


def _pool(q_proxy: Tensor, keys: Tensor, query: Tensor, start: Tensor | None, block_size: int) -> Tensor:
    """The largest visible scaled score of each block of the query's document."""
    scores = _scores(q_proxy, keys)
    length = scores.shape[-1]
    count = num_blocks(length, block_size)
    key = torch.arange(count * block_size, dtype=torch.int32, device=scores.device)
    if start is None:
        scores = F.pad(scores, (0, count * block_size - length))
    else:
        key = key + start[:, None, :, None]
        scores = scores.gather(-1, key.clamp(max=length - 1).long().expand(-1, scores.shape[1], -1, -1))
    scores = torch.where(key <= query[:, None], scores * q_proxy.shape[-1] ** -0.5, -torch.inf)
    return scores.unflatten(-1, (count, block_size)).amax(-1).float()


def _choose(
    q_proxy: Tensor,
    keys: Tensor,
    query: Tensor,
    start: Tensor | None,
    rule: tuple[int, int, int, int],
    blocks: Int32[Tensor, "batch proxy query slot"],
) -> None:
    """Write the selection of a chunk of queries to `blocks`."""
    top_k_blocks, block_size, num_local_blocks, num_sink_blocks = rule
    rank = ordered(_pool(q_proxy, keys, query, start, block_size))
    own = (query.expand(q_proxy.shape[0], -1) if start is None else query - start) // block_size
    blocks.copy_(top_blocks(rank, own, top_k_blocks, num_local_blocks, num_sink_blocks))


@torch.library.custom_op("msa_kernels::flex_select_blocks", mutates_args=())
def _select_blocks(
    q_proxy: Tensor,
    k_proxy: Tensor,
    start: Tensor | None,
    top_k_blocks: int,
    block_size: int,
    num_local_blocks: int,
    num_sink_blocks: int,
) -> Tensor:
    rule = (top_k_blocks, block_size, num_local_blocks, num_sink_blocks)
    batch, sequence, num_proxies, _ = q_proxy.shape
    blocks = q_proxy.new_empty(batch, num_proxies, sequence, top_k_blocks, dtype=torch.int32)
    with torch.no_grad(), torch.autocast(q_proxy.device.type, enabled=False):
        for rows, *chunk in _proxy_chunks(q_proxy.detach(), k_proxy.detach(), start, 0, sequence):
            _compiled(_choose)(*chunk, rule, blocks[:, :, rows])
    return blocks


@_select_blocks.register_fake
def _(
    q_proxy: Tensor,
    k_proxy: Tensor,
    start: Tensor | None,
    top_k_blocks: int,
    block_size: int,
    num_local_blocks: int,
    num_sink_blocks: int,
) -> Tensor:
    batch, sequence, num_proxies, _ = q_proxy.shape
    return q_proxy.new_empty(batch, num_proxies, sequence, top_k_blocks, dtype=torch.int32)


@register_flop_formula(torch.ops.msa_kernels.flex_select_blocks)
def _select_flops(q_proxy: torch.Size, *_: object, **__: object) -> int:
    """Two for each multiply-add of the causal half."""
    batch, sequence, num_proxies, dim = q_proxy
    return batch * num_proxies * sequence * sequence * dim


# The KL.


def _kl(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    blocks: Tensor | None,
    cu_seqlens: Tensor | None,
    block_size: int,
) -> Tensor:
    start = _starts(q.shape[0], q.shape[1], cu_seqlens, q.device)
    with_grad = torch.is_grad_enabled() and (q_proxy.requires_grad or k_proxy.requires_grad)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        student_lse = _student_lse(q_proxy.detach(), k_proxy.detach(), blocks, start, block_size)
    inputs = q_proxy, k_proxy, q.detach(), k.detach(), lse.detach(), student_lse
    return torch.ops.msa_kernels.flex_proxy_kl(*inputs, blocks, start, block_size, with_grad)[0]


def dense_student_lse(
    q_proxy: Tensor, k_proxy: Tensor, cu_seqlens: Tensor | None
) -> Float[Tensor, "batch query proxy"]:
    """The log-sum-exp of the proxies' scaled scores over every token of the document up to the query."""
    start = _starts(q_proxy.shape[0], q_proxy.shape[1], cu_seqlens, q_proxy.device)
    with torch.no_grad(), torch.autocast(q_proxy.device.type, enabled=False):
        return _student_lse(q_proxy, k_proxy, None, start, 1)


def _student_lse(
    q_proxy: Tensor, k_proxy: Tensor, blocks: Tensor | None, start: Tensor | None, block_size: int
) -> Float[Tensor, "batch query proxy"]:
    """The log-sum-exp of the proxies' scaled scores; -inf where a query sees no key."""
    if not q_proxy.is_cuda:  # FlexAttention rounds the scores of half types there
        q_proxy, k_proxy = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q_proxy, k_proxy))
    if blocks is None:
        return _dense_with_lse(q_proxy, k_proxy, k_proxy, start)[1]
    values = k_proxy[..., :LSE_VALUES]
    return _compiled(_sparse_attention)(q_proxy, k_proxy, values, blocks, start, block_size)[1]


def _divergence(
    teacher: Float[Tensor, "batch head query key"],
    student: Float[Tensor, "batch proxy query key"],
    lse: Float[Tensor, "batch query head"],
    student_lse: Float[Tensor, "batch query proxy"],
    sees: Bool[Tensor, "batch proxy query key"],
    dims: tuple[int, int],
) -> tuple[Float[Tensor, "batch proxy query"], Float[Tensor, "batch proxy query key"]]:
    """Each query's KL, and (student - teacher) * GRADIENT_SCALE, from dot products.

    One pass over dot products: this is where the time of the KL goes. Logarithms are to the base 2, which a GPU has
    instructions for.
    """
    scale, proxy_scale = (dim**-0.5 / math.log(2) for dim in dims)
    num_proxies = student.shape[1]
    heads = teacher.unflatten(1, (num_proxies, -1))
    share = heads.shape[2]
    lses = (lse / math.log(2) + math.log2(share)).transpose(1, 2).unflatten(1, (num_proxies, -1))[..., None]
    parts = [(heads[:, :, i] * scale - lses[:, :, i]).exp2() for i in range(share)]
    mean = torch.where(sees, functools.reduce(torch.add, parts), 0.0)
    log_student = student * proxy_scale - (student_lse / math.log(2)).transpose(1, 2)[..., None]
    rows = torch.where(mean == 0, 0.0, mean * (mean.log2() - log_student)).sum(-1) * math.log(2)
    return rows, (torch.where(sees, log_student.exp2(), 0.0) - mean) * GRADIENT_SCALE


def _kl_chunk(
    q: Float[Tensor, "batch query head dim"],
    keys: Float[Tensor, "batch*kv_head key dim"],
    q_proxy: Float[Tensor, "batch query proxy proxy_dim"],
    proxy_keys: Float[Tensor, "batch*proxy_kv_head key proxy_dim"],
    lse: Float[Tensor, "batch query head"],
    student_lse: Float[Tensor, "batch query proxy"],
    bits: Int32[Tensor, "word batch proxy query"] | None,
    start: Int32[Tensor, "batch query"] | None,
    query: Int32[Tensor, "query"],
    block_size: int,
    scale: Float[Tensor, "proxy 1"],
    rows: Float[Tensor, "batch proxy query"],
    dq: Float[Tensor, "batch query proxy proxy_dim"] | None,
    dk: Float[Tensor, "batch*proxy key proxy_dim"] | None,
) -> None:
    """Write the KL of a chunk's queries to `rows` and their gradient, times `scale`, to `dq`; add to `dk`."""
    batch, queries, num_proxies, dim = q_proxy.shape
    length = keys.shape[1]
    row = torch.arange(batch, device=q.device)[:, None, None, None]
    proxy = torch.arange(num_proxies, device=q.device)[:, None, None]
    index = torch.arange(queries, device=q.device)[:, None]
    key = torch.arange(length, dtype=torch.int32, device=q.device)
    sees = _sees(bits, start, block_size, (row, proxy, index), query[:, None], key)
    sees = sees.expand(batch, num_proxies, queries, length)
    scores = _scores(q, keys), _scores(q_proxy, proxy_keys)
    divergence, weights = _divergence(*scores, lse, student_lse, sees, (q.shape[-1], dim))
    rows.copy_(divergence)
    if dq is None or dk is None:
        return
    weights = weights.to(q_proxy.dtype)
    to_queries = _matmul(weights.view(proxy_keys.shape[0], -1, length), proxy_keys)
    dq.copy_(to_queries.view(batch, num_proxies, queries, dim).transpose(1, 2) * scale)
    by_proxy = weights.view(batch * num_proxies, queries, length)
    dk += _matmul(by_proxy.transpose(1, 2), _by_group(q_proxy, num_proxies))


@torch.library.custom_op("msa_kernels::flex_proxy_kl", mutates_args=())
def _proxy_kl(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    student_lse: Tensor,
    blocks: Tensor | None,
    start: Tensor | None,
    block_size: int,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The KL per proxy, and its gradients to each proxy's queries and keys (the latter before they are shared)."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        q_proxy, k_proxy = q_proxy.detach(), k_proxy.detach()
        batch, sequence, num_proxies, dim = q_proxy.shape
        wide = torch.promote_types(q_proxy.dtype, torch.float32)
        bits = None if blocks is None else _compiled(_bit_set)(blocks, num_blocks(sequence, block_size))
        count = (student_lse != -torch.inf).sum((0, 1)).clamp(min=1)
        scale = (dim**-0.5 / GRADIENT_SCALE / count.to(wide))[:, None]
        keys, proxy_keys = _by_group(k, k.shape[2]), _by_group(k_proxy, k_proxy.shape[2])
        query = torch.arange(sequence, dtype=torch.int32, device=q.device)
        rows = lse.new_empty(batch, num_proxies, sequence, dtype=wide)
        dq = rows.new_empty((batch, sequence, num_proxies, dim) if with_grad else (0,))
        dk = rows.new_zeros((batch * num_proxies, sequence, dim) if with_grad else (0,))
        heads = batch * max(q.shape[2], num_proxies)
        for begin, end, length in _chunks(0, sequence, sequence, heads, _most_scores(q.device)):
            at = slice(begin, end)
            _compiled(_kl_chunk)(
                q[:, at],
                keys[:, :length],
                q_proxy[:, at],
                proxy_keys[:, :length],
                lse[:, at],
                student_lse[:, at],
                None if bits is None else bits[..., at],
                None if start is None else start[:, at],
                query[at],
                block_size,
                scale,
                rows[..., at],
                dq[:, at] if with_grad else None,
                dk[:, :length] if with_grad else None,
            )
        if with_grad:
            shared = dk.view(batch, num_proxies, sequence, dim).transpose(1, 2)
            dk = torch.mul(shared, scale, out=torch.empty_like(dq))
        return rows.sum((0, 2)) / count, dq, dk


@_proxy_kl.register_fake
def _(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    student_lse: Tensor,
    blocks: Tensor | None,
    start: Tensor | None,
    block_size: int,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q_proxy.dtype, torch.float32)
    shape = q_proxy.shape if with_grad else (0,)
    value = q_proxy.new_empty(q_proxy.shape[2], dtype=wide)
    return value, value.new_empty(shape), value.new_empty(shape)


@register_flop_formula(torch.ops.msa_kernels.flex_proxy_kl)
def _kl_flops(
    q_proxy: torch.Size,
    k_proxy: torch.Size,
    q: torch.Size,
    k: torch.Size,
    lse: torch.Size,
    student_lse: torch.Size,
    blocks: torch.Size | None,
    start: torch.Size | None,
    block_size: int,
    with_grad: bool,
    **_: object,
) -> int:
    """Two for each multiply-add of the causal half: the scores of both branches, and the proxies' two gradients."""
    batch, sequence, num_proxies, proxy_dim = q_proxy
    products = num_proxies * proxy_dim * (3 if with_grad else 1) + q[2] * q[3]
    return batch * sequence * sequence * products


def _keep_gradients(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.kv_heads, ctx.dtype = inputs[1].shape[2], inputs[0].dtype
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, upstream: Tensor | None, *_: Tensor | None) -> tuple:
    if upstream is None:
        return (None,) * 10
    dq, dk = (gradient * upstream[:, None] for gradient in ctx.saved_tensors)
    dk = dk.unflatten(2, (ctx.kv_heads, -1)).sum(3)
    return dq.to(ctx.dtype), dk.to(ctx.dtype), *(None,) * 8


_proxy_kl.register_autograd(_scale_gradients, setup_context=_keep_gradients)


# Compilation.


def _compiled(function: Callable) -> Callable:
    """The function compiled, where that makes sense: not inside another compilation, not on a CPU."""

    def run(tensor: Tensor, *args: object) -> object:
        if torch.compiler.is_compiling() or not tensor.is_cuda:
            return function(tensor, *args)
        known = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in (tensor, *args))
        return _compile(function, known)(tensor, *args)

    return run


@functools.cache
def _compile(function: Callable, shapes: tuple) -> Callable:
    # Dynamo gives up after eight compilations of one code object, and looks through all of them at every call: each
    # shape has a code object of its own, with only its modes (grad, inference, inside compiled code) to tell apart.
    code = function.__code__.replace(co_name=f"{function.__name__}_{_compile.cache_info().currsize}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    inline: dict[str, Any] = {
        # Compute again rather than write down what several results share: scores are large, the arithmetic is cheap.
        "realize_reads_threshold": 1000,
        "realize_opcount_threshold": 100_000,
        "realize_acc_reads_threshold": 1000,
        # Short reductions written out term by term would then repeat themselves within one another.
        "unroll_reductions_threshold": 1,
    }
    return torch.compile(own, fullgraph=True, dynamic=False, options=inline)
