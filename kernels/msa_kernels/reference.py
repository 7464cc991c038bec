"""MiniMax Sparse Attention in plain PyTorch: the specification that every faster path is tested against.

Any device, float type, head dim, block size, length and head ratio. Tensors are (batch, sequence, heads, dim); both
branches scale their scores by dim^-0.5, and everything between inputs and results is fp32, or wider where the inputs
are. Work goes by chunks of queries whose intermediates are recomputed in the backward pass once they grow large, so
that memory grows linearly with the sequence. Equation numbers are those of the paper (arXiv 2606.13392).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from msa_kernels import checks
from msa_kernels.documents import Layout, layout, num_blocks
from msa_kernels.selection import Selection, select_from_scores

CHUNK_SCORES = 2**23
"""Scores (batch x heads x queries x keys) that one chunk may hold."""
CHUNK_QUERIES = 128
"""Queries of the largest chunk: a chunk only meets the keys up to its last query, so short chunks skip the future."""
GPU_SCORES = 2**26
"""The same on a GPU where scores are only looked at."""
KEPT_SCORES = 2**25
"""Scores that one op may keep for the backward pass; beyond it, chunks are recomputed."""


def block_scores(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    *,
    block_size: int = 128,
    cu_seqlens: Tensor | None = None,
    queries: tuple[int, int] | None = None,
    stride: int = 1,
) -> Float32[Tensor, "batch proxy query block"]:
    """M of equation 6: the largest visible score of each block, -inf where none is visible, NaN where one is NaN.

    `queries` is a half-open range of positions in the row, None all of them; every `stride`-th counts. Not
    differentiable.
    """
    checks.proxy_branch(q_proxy, k_proxy)
    checks.budget(1, block_size, 0, 0)
    batch, sequence, num_proxies, _ = q_proxy.shape
    maxima = _block_maxima(q_proxy, k_proxy, block_size, cu_seqlens)
    counted = range(*checks.query_range(queries, sequence), stride)
    chunks = _score_chunks(len(counted), batch * num_proxies * sequence, q_proxy.device)
    parts = [maxima(counted[low], counted[high - 1] + 1, stride) for low, high in chunks]
    if not parts:
        parts = [q_proxy.new_empty(batch, num_proxies, 0, num_blocks(sequence, block_size), dtype=torch.float32)]
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
    """I of equation 7: `select_from_scores` of the proxies' `block_scores`."""
    checks.proxy_branch(q_proxy, k_proxy)
    checks.budget(top_k_blocks, block_size, num_local_blocks, num_sink_blocks)
    batch, sequence, num_proxies, _ = q_proxy.shape
    maxima = _block_maxima(q_proxy, k_proxy, block_size, cu_seqlens)
    chosen = [
        select_from_scores(
            maxima(*chunk),
            top_k_blocks=top_k_blocks,
            block_size=block_size,
            cu_seqlens=cu_seqlens,
            num_local_blocks=num_local_blocks,
            num_sink_blocks=num_sink_blocks,
            queries=chunk,
            sequence=sequence,
        ).blocks
        for chunk in _score_chunks(sequence, batch * num_proxies * sequence, q_proxy.device)
    ]
    return Selection(torch.cat(chosen, 2), block_size, cu_seqlens)


def sparse_attention(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head value_dim"],
    selection: Selection,
) -> tuple[Float[Tensor, "batch sequence head value_dim"], Float[Tensor, "batch sequence head"]]:
    """O of equation 8: softmax attention over the selected blocks' tokens up to the query; and its log-sum-exp.

    The log-sum-exp is natural, fp32 or wider, and not differentiable. A query without any selected block gives zero
    output, zero gradient and a log-sum-exp of -inf.
    """
    checks.main_branch(q, k, v)
    checks.selection(*selection, q, k.shape[2])
    return _attention(q, k, v, selection.cu_seqlens, selection)


def dense_attention(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head value_dim"],
    *,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Float[Tensor, "batch sequence head value_dim"], Float[Tensor, "batch sequence head"] | None]:
    """`sparse_attention` over every token of the document up to the query.

    Without `return_lse` the second result is None, and PyTorch's fused attention serves where there are no documents.
    """
    checks.main_branch(q, k, v)
    if return_lse or cu_seqlens is not None:
        out, lse = _attention(q, k, v, cu_seqlens, None)
        return out, lse if return_lse else None
    with _full_precision(q):
        query, key, value = (x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).to(q.dtype), None


def proxy_kl(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    lse: Float[Tensor, "batch sequence head"],
    selection: Selection,
) -> Float[Tensor, "proxy"]:
    """L_KL of equation 10 for each proxy: KL(mean over its heads of their softmax || its own softmax), in nats.

    Both distributions live on the selected tokens up to the query; the mean goes over the queries that have any.
    Gradients reach q_proxy and k_proxy only. `lse` is what `sparse_attention` gave for the same q, k and selection;
    on the CPU a ValueError says when it is not (the heads' probabilities do not sum to 1).
    """
    checks.both_branches(q_proxy, k_proxy, q, k)
    checks.selection(*selection, q, k.shape[2])
    checks.lse(lse, q)
    checks.shared_selection(selection.blocks.shape[1], q_proxy.shape[2])
    return _kl(q_proxy, k_proxy, q, k, lse, selection.cu_seqlens, selection)


def dense_proxy_kl(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    lse: Float[Tensor, "batch sequence head"],
    *,
    cu_seqlens: Tensor | None = None,
) -> Float[Tensor, "proxy"]:
    """`proxy_kl` over every token of the document up to the query: the objective of the warm-up."""
    checks.both_branches(q_proxy, k_proxy, q, k)
    checks.lse(lse, q)
    return _kl(q_proxy, k_proxy, q, k, lse, cu_seqlens, None)


def _block_maxima(
    q_proxy: Tensor, k_proxy: Tensor, block_size: int, cu_seqlens: Tensor | None
) -> Callable[..., Tensor]:
    """The function that gives M of equation 6 for the queries from start to stop, every `stride`-th."""
    batch, sequence = q_proxy.shape[:2]
    count = num_blocks(sequence, block_size)
    grid = layout(batch, sequence, block_size, cu_seqlens, q_proxy.device)
    pool = _pool_rows if cu_seqlens is None else _pool_documents
    q, k = _by_head(q_proxy.detach(), k_proxy.shape[2]), _by_head(k_proxy.detach())

    def maxima(start: int, stop: int, stride: int = 1) -> Tensor:
        rows = slice(start, stop, stride)
        low = _first_key(grid, cu_seqlens, start)
        doubtful = start if cu_seqlens is None else low  # without documents, every earlier key is visible
        hidden = ~_causal(grid, cu_seqlens, start, stop, doubtful, stride)
        with _full_precision(q):
            scores = _scores(q[:, :, :, rows], k[:, :, low:stop])
        scores[..., doubtful - low :].masked_fill_(hidden, -torch.inf)
        return pool(scores, grid.start[:, None, rows, None] - low, block_size, count).float()

    return maxima


def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, selection: Selection | None
) -> tuple[Tensor, Tensor]:
    batch, sequence, heads, _ = q.shape
    grid = layout(batch, sequence, selection.block_size if selection else 1, cu_seqlens, q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int, low: int) -> tuple[Tensor, ...]:
        # Made here, not by the caller: a recomputed chunk then keeps no token indices for the backward pass.
        support = _support(grid, cu_seqlens, selection, start, stop, low)
        scores = _pick(_scores(q, k), support)
        weights = scores.softmax(-1)
        with torch.no_grad():  # the largest weight is exp(max - lse)
            lse = scores.amax(-1) - weights.amax(-1).log()
        spread = _spread(weights, support, k.shape[2])
        out = (spread.view(*k.shape[:2], -1, k.shape[2]) @ v).view(batch, heads, -1, v.shape[-1])
        if selection is None:
            return out, lse
        empty = ~_per_head(support.visible.any(-1), heads)
        return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)

    with _full_precision(q):
        queries, keys, values = _by_head(q, k.shape[2]), _by_head(k), _by_head(v)
        outs, lses = [], []
        run = _runner(batch * heads * sequence * sequence // 2)
        for start, stop in _largest_first(0, sequence, batch * heads * sequence):
            low = _first_key(grid, cu_seqlens, start)
            part = queries[:, :, :, start:stop], keys[:, :, low:stop], values[:, :, low:stop]
            out, lse = run(attend, *part, start, stop, low)
            outs.append(out)
            lses.append(lse)
        out, lse = (torch.cat(parts[::-1], 2).transpose(1, 2) for parts in (outs, lses))
    return out.to(q.dtype), lse


def _kl(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    selection: Selection | None,
) -> Tensor:
    batch, sequence, num_proxies, _ = q_proxy.shape
    heads = q.shape[2]
    grid = layout(batch, sequence, selection.block_size if selection else 1, cu_seqlens, q.device)

    def divergence(
        q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, lse: Tensor, start: int, stop: int, low: int
    ) -> tuple[Tensor, ...]:
        support = _support(grid, cu_seqlens, selection, start, stop, low)
        counted = _per_head(support.visible.any(-1), num_proxies)
        with torch.no_grad():
            known = _per_head(counted, heads)
            lse = lse.masked_fill(~known, 0.0)
            probabilities = _pick(_scores(q, k), support).sub_(lse[..., None]).exp_()
            error = ((probabilities.sum(-1) - 1).abs() * known).amax()
            teacher = probabilities.unflatten(1, (num_proxies, -1)).mean(2)
            negative_entropy = torch.special.xlogy(teacher, teacher).sum(-1)
        log_student = _pick(_scores(q_proxy, k_proxy), support).log_softmax(-1)
        rows = negative_entropy - (teacher * log_student).sum(-1)  # without a token, exactly zero
        return rows.sum((0, 2)), counted.sum((0, 2)) * (batch // counted.shape[0]), error

    with torch.no_grad(), _full_precision(q):
        q, k = _by_head(q, k.shape[2]), _by_head(k)
        lse = lse.transpose(1, 2).to(q.dtype)
    with _full_precision(q_proxy):
        queries, keys = _by_head(q_proxy, k_proxy.shape[2]), _by_head(k_proxy)
        total = count = queries.new_zeros(())
        errors = []
        run = _runner(batch * num_proxies * sequence * sequence // 2)
        for start, stop in _largest_first(0, sequence, batch * max(heads, num_proxies) * sequence):
            low = _first_key(grid, cu_seqlens, start)
            student = queries[:, :, :, start:stop], keys[:, :, low:stop]
            teacher = q[:, :, :, start:stop], k[:, :, low:stop], lse[:, :, start:stop]
            rows, counted, error = run(divergence, *student, *teacher, start, stop, low)
            total, count = total + rows, count + counted
            errors.append(error)
        _check_teacher(torch.stack(errors), half=q_proxy.dtype in checks.HALF)
        return total / count.clamp(min=1)


def _by_head(x: Tensor, groups: int | None = None) -> Tensor:
    """(batch, sequence, heads, dim) to (batch, heads, sequence, dim), in fp32 or wider.

    With `groups`, (batch, groups, heads / groups, sequence, dim) scaled by dim^-0.5: the queries, by the key head they
    share.
    """
    x = x.transpose(1, 2).to(torch.promote_types(x.dtype, torch.float32))
    return x.contiguous() if groups is None else (x * x.shape[-1] ** -0.5).unflatten(1, (groups, -1))


def _scores(q: Tensor, k: Tensor) -> Float[Tensor, "batch head query key"]:
    """S of equation 6: scaled queries (batch, groups, heads / group, query, dim) times (batch, groups, key, dim)."""
    batch, groups, share, queries, dim = q.shape
    scores = q.reshape(batch, groups, share * queries, dim) @ k.transpose(-1, -2)
    return scores.view(batch, groups * share, queries, k.shape[2])


class Support(NamedTuple):
    """T of equation 10 for some queries: the tokens that each may read."""

    visible: Bool[Tensor, "#batch #proxy query token"]
    """Which of the tokens the query may read."""
    tokens: Int64[Tensor, "batch proxy query token"] | None = None
    """The key of each token; None where the tokens are the keys themselves."""


def _pick(scores: Float[Tensor, "batch head query key"], support: Support) -> Float[Tensor, "batch head query token"]:
    """The scores of the support's tokens; the rest is the least finite number, which no softmax gives any weight.

    (Least and finite, because minus infinity would make NaN of a row without any token.)
    """
    grouped = scores.unflatten(1, (support.visible.shape[1], -1))
    if support.tokens is not None:
        grouped = grouped.gather(-1, _for_group(support.tokens, grouped.shape[2]))
    return grouped.masked_fill(~support.visible[:, :, None], torch.finfo(scores.dtype).min).flatten(1, 2)


def _spread(
    weights: Float[Tensor, "batch head query token"], support: Support, keys: int
) -> Float[Tensor, "batch head query key"]:
    """The reverse of `_pick`: each token's weight at its key, zero elsewhere."""
    if support.tokens is None:
        return weights
    grouped = weights.unflatten(1, (support.tokens.shape[1], -1))
    at = _for_group(support.tokens, grouped.shape[2])
    return grouped.new_zeros(*grouped.shape[:4], keys).scatter_add(-1, at, grouped).flatten(1, 2)


def _for_group(tokens: Tensor, share: int) -> Tensor:
    return tokens[:, :, None].expand(-1, -1, share, -1, -1)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """What is given per proxy, (batch, proxy, ...), for each query head."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _causal(grid: Layout, cu_seqlens: Tensor | None, start: int, stop: int, low: int, stride: int = 1) -> Tensor:
    """Which keys low..stop the queries start..stop may see at all, (batch or 1, 1, query, key)."""
    rows = 1 if cu_seqlens is None else None
    key = torch.arange(low, stop, device=grid.start.device)
    query = torch.arange(start, stop, stride, device=grid.start.device)[:, None]
    return (key <= query) & (key >= grid.start[:rows, None, start:stop:stride, None])


def _support(
    grid: Layout, cu_seqlens: Tensor | None, selection: Selection | None, start: int, stop: int, low: int
) -> Support:
    """The selected blocks' tokens up to the query (all tokens up to the query, without a selection)."""
    if selection is None:
        return Support(_causal(grid, cu_seqlens, start, stop, low))
    size = selection.block_size
    # Ids ascend, so those of the blocks that exist up to `stop` fill the first slots.
    ids = selection.blocks[:, :, start:stop, : num_blocks(stop, size), None].long()
    within = torch.arange(size, device=ids.device)
    document = grid.start[:, None, start:stop, None].long()
    tokens = document + (ids * size + within).flatten(-2)
    query = torch.arange(start, stop, device=ids.device)[:, None]
    visible = (tokens >= document) & (tokens <= query)
    return Support(visible, (tokens - low).clamp(0, stop - low - 1))


def _pool_rows(scores: Tensor, _first: Tensor, block_size: int, count: int) -> Tensor:
    """The largest score of each block of the row."""
    missing = count * block_size - scores.shape[-1]
    return torch.nn.functional.pad(scores, (0, missing), value=-torch.inf).unflatten(-1, (count, -1)).amax(-1)


def _pool_documents(scores: Tensor, first: Tensor, block_size: int, count: int) -> Tensor:
    """The largest score of each block of the query's document, whose first token is key `first`.

    A running maximum over block_size keys, by doubling, read where the blocks begin.
    """
    keys, span = scores.shape[-1], 1
    running = torch.nn.functional.pad(scores, (0, block_size - 1), value=-torch.inf)
    while span < block_size:
        step = min(span, block_size - span)
        running = torch.maximum(running[..., : running.shape[-1] - step], running[..., step:])
        span += step
    begin = first.long() + torch.arange(count, device=scores.device) * block_size
    pooled = running.gather(-1, begin.clamp(0, keys - 1).expand(*scores.shape[:3], count))
    return pooled.masked_fill(begin >= keys, -torch.inf)


def _first_key(grid: Layout, cu_seqlens: Tensor | None, start: int) -> int:
    """The first key that the queries from `start` on may see: known without waiting only on the CPU."""
    if cu_seqlens is None or grid.start.device.type != "cpu" or torch.compiler.is_compiling():
        return 0
    return int(grid.start[:, start].min())


def _chunks(first: int, last: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of queries from first to last, each of at most CHUNK_SCORES / `width` and CHUNK_QUERIES."""
    size = max(1, min(CHUNK_QUERIES, CHUNK_SCORES // width))
    for start in range(first, last, size):
        yield start, min(start + size, last)


def _score_chunks(count: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges of queries whose scores alone are held: large ones on a GPU, where small ones are all launches."""
    if device.type != "cuda":
        yield from _chunks(0, count, width)
        return
    size = max(1, GPU_SCORES // width)
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _largest_first(first: int, last: int, width: int) -> list[tuple[int, int]]:
    """The chunks from the last to the first: later ones then fit where earlier, larger ones were, and the heap of a
    process does not grow with their number."""
    return list(_chunks(first, last, width))[::-1]


def _runner(scores: int) -> Callable[..., tuple[Tensor, ...]]:
    """How to run a chunk of an op with that many scores: plainly, or recomputed in the backward pass."""

    def recomputed(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | int) -> tuple[Tensor, ...]:
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    def plain(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | int) -> tuple[Tensor, ...]:
        return function(*inputs)

    return recomputed if scores > KEPT_SCORES and torch.is_grad_enabled() else plain


def _full_precision(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


def _check_teacher(errors: Tensor, *, half: bool) -> None:
    """Raise ValueError where the teacher's rows do not sum to 1; only on the CPU, where looking does not wait."""
    if errors.device.type != "cpu" or torch.compiler.is_compiling():
        return
    worst = float(errors.amax())
    if worst > (2e-2 if half else 1e-3):
        raise ValueError(
            f"lse belongs to another selection, q or k: the heads' probabilities miss a sum of 1 by {worst:.3g}; "
            "give the lse that sparse_attention (or dense_attention) returned for these"
        )
