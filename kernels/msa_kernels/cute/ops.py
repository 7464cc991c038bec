"""The kernels as PyTorch operations: what `torch.compile`, fake tensors and FLOP counters see of them.

Memory is bounded by windows of queries: the proxies' scores of a window, and single blocks' results of a window.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from msa_kernels.documents import num_blocks

SCORE_BYTES = 2**28
"""The most that the proxies' scores of a window take."""
PARTIAL_BYTES = 2**31
"""The most that single blocks' results of a window take."""


def _layout(cu_seqlens: Tensor | None, batch: int, sequence: int, block_size: int, device: torch.device) -> tuple:
    from msa_kernels.cute.layout import make_layout

    return make_layout(cu_seqlens, batch, sequence, block_size, device)


def _window(total: int, bytes_a_token: int, most: int, multiple: int) -> int:
    """Tokens of a window: all, or as many as fit into `most` bytes."""
    fitting = max(most // bytes_a_token // multiple, 1) * multiple
    return min(fitting, -(-total // multiple) * multiple)


@torch.library.custom_op("msa_kernels::cute_select_blocks", mutates_args=())
def select_blocks(
    q_proxy: Tensor,
    k_proxy: Tensor,
    cu_seqlens: Tensor | None,
    top_k_blocks: int,
    block_size: int,
    num_local_blocks: int,
    num_sink_blocks: int,
) -> Tensor:
    """The ids of `Selection.blocks`."""
    from msa_kernels.cute.scores import score
    from msa_kernels.cute.topk import choose

    batch, sequence, num_proxies, _ = q_proxy.shape
    total, count = batch * sequence, num_blocks(sequence, block_size)
    blocks = torch.empty(batch, num_proxies, sequence, top_k_blocks, dtype=torch.int32, device=q_proxy.device)
    with torch.cuda.device(q_proxy.device):
        q_proxy, k_proxy = q_proxy.contiguous(), k_proxy.contiguous()
        first, starts, _ = _layout(cu_seqlens, batch, sequence, block_size, q_proxy.device)
        window = _window(total, num_proxies * count * 4, SCORE_BYTES, 256)
        for begin in range(0, total, window):
            end = min(begin + window, total)
            # A window inside one row sees no more blocks than lie before its end.
            inside = begin // sequence == (end - 1) // sequence
            seen = num_blocks((end - 1) % sequence + 1, block_size) if inside else count
            scores = score(q_proxy, k_proxy, first, starts, begin, end, block_size=block_size, blocks=seen)
            choose(
                scores,
                first,
                starts,
                blocks,
                begin,
                end,
                block_size=block_size,
                num_local_blocks=num_local_blocks,
                num_sink_blocks=num_sink_blocks,
            )
    return blocks


@select_blocks.register_fake
def _(
    q_proxy: Tensor,
    k_proxy: Tensor,
    cu_seqlens: Tensor | None,
    top_k_blocks: int,
    block_size: int,
    num_local_blocks: int,
    num_sink_blocks: int,
) -> Tensor:
    batch, sequence, num_proxies, _ = q_proxy.shape
    return q_proxy.new_empty(batch, num_proxies, sequence, top_k_blocks, dtype=torch.int32)


@register_flop_formula(torch.ops.msa_kernels.cute_select_blocks)
def _select_flops(q_proxy: torch.Size, *_: object, **__: object) -> int:
    """Two for each multiply-add of the causal half."""
    batch, sequence, num_proxies, dim = q_proxy
    return batch * num_proxies * sequence * sequence * dim


@torch.library.custom_op("msa_kernels::cute_sparse_attention", mutates_args=())
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int, carrier: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention to the selected blocks; the output's gradient goes to the carrier."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, _attend(q, k, v, out, blocks, cu_seqlens, block_size)


@sparse_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int, carrier: Tensor | None
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _to_carrier(ctx, upstream: Tensor | None, _: Tensor | None) -> tuple:
    return (None,) * 6 + (upstream,)


sparse_attention.register_autograd(
    _to_carrier, setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False)
)


@torch.library.custom_op("msa_kernels::cute_selected_lse", mutates_args=())
def selected_lse(q: Tensor, k: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int) -> Tensor:
    """Log-sum-exp of the scaled scores of the selected blocks: the proxies' own, on their selection."""
    return _attend(q, k, None, None, blocks, cu_seqlens, block_size)


@selected_lse.register_fake
def _(q: Tensor, k: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _selected_pairs(blocks: torch.Size, block_size: int) -> int:
    """Pairs of queries and keys of a head, where every query has its k blocks and sees half of its own."""
    batch, _, sequence, slots = blocks
    return batch * sequence * min(slots * block_size - block_size // 2, (sequence + 1) // 2)


@register_flop_formula(torch.ops.msa_kernels.cute_sparse_attention)
def _attention_flops(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    blocks: torch.Size,
    cu_seqlens: object,
    block_size: int,
    *_: object,
    **__: object,
) -> int:
    """Two for each multiply-add of the scores and of the weighted sums."""
    return 4 * q[2] * q[3] * _selected_pairs(blocks, block_size)


@register_flop_formula(torch.ops.msa_kernels.cute_selected_lse)
def _lse_flops(
    q: torch.Size, k: torch.Size, blocks: torch.Size, cu_seqlens: object, block_size: int, **_: object
) -> int:
    """Two for each multiply-add of the scores."""
    return 2 * q[2] * q[3] * _selected_pairs(blocks, block_size)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    out: Tensor | None,
    blocks: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
) -> Tensor:
    """Fill `out`, if there are values, and give the log-sum-exps, window after window."""
    from msa_kernels.cute.attend import Problem, Window, attend, room
    from msa_kernels.cute.index import TILE, build
    from msa_kernels.cute.merge import merge

    batch, sequence, heads, dim = q.shape
    total = batch * sequence
    lse = torch.empty(batch, sequence, heads, dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device):
        first, starts, ends = _layout(cu_seqlens, batch, sequence, block_size, q.device)
        q, k = q.contiguous().flatten(0, 1), k.contiguous().flatten(0, 1)
        v = None if v is None else v.contiguous().flatten(0, 1)
        problem = Problem(q, k, v, blocks.contiguous(), block_size, first, starts, ends)
        bytes_a_token = heads * blocks.shape[3] * (4 + (0 if v is None else dim * q.element_size()))
        size = _window(total, bytes_a_token, PARTIAL_BYTES, TILE)
        index = build(problem.blocks, problem.first, problem.starts, size, block_size=block_size)
        partial = room(problem, min(size, total))
        for number, begin in enumerate(range(0, total, size)):
            window = Window(number, begin, min(begin + size, total))
            attend(problem, index, partial, window)
            merge(problem, index, partial, window, None if out is None else out.flatten(0, 1), lse.flatten(0, 1))
    return lse
