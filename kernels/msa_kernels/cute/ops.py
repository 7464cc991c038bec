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
    """Output and log-sum-exp of attention to the selected blocks; the output's gradient goes to a carrier, if given."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, _attend(q, k, v, out, blocks, cu_seqlens, block_size)


@sparse_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int, carrier: Tensor | None
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("msa_kernels::cute_attention_gradients", mutates_args=())
def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    out: Tensor,
    lse: Tensor,
    upstream: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sparse_attention` to q, k and v."""
    from msa_kernels.cute import gradients

    return gradients.attention_gradients(q, k, v, blocks, cu_seqlens, block_size, out, lse, upstream)


@attention_gradients.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    out: Tensor,
    lse: Tensor,
    upstream: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_inputs(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, blocks, cu_seqlens, ctx.block_size, carrier = inputs
    ctx.set_materialize_grads(False)
    ctx.carried = carrier is not None
    if not ctx.carried:
        ctx.save_for_backward(q, k, v, blocks, cu_seqlens, *output)


def _attention_backward(ctx, upstream: Tensor | None, _: Tensor | None) -> tuple:
    if upstream is None:
        return (None,) * 7
    if ctx.carried:
        return (None,) * 6 + (upstream,)
    *inputs, out, lse = ctx.saved_tensors
    return *attention_gradients(*inputs, ctx.block_size, out, lse, upstream), *(None,) * 4


sparse_attention.register_autograd(_attention_backward, setup_context=_keep_inputs)


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


@register_flop_formula(torch.ops.msa_kernels.cute_attention_gradients)
def _gradient_flops(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    blocks: torch.Size,
    cu_seqlens: object,
    block_size: int,
    *_: object,
    **__: object,
) -> int:
    """Two for each multiply-add of the scores, of the weights' gradients, and of those of q, k and v."""
    return 10 * q[2] * q[3] * _selected_pairs(blocks, block_size)


@torch.library.custom_op("msa_kernels::cute_proxy_kl", mutates_args=())
def proxy_kl(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The KL per proxy, and its gradients to each proxy's queries and keys (the latter before they are shared)."""
    from msa_kernels.cute.gradients import divergence

    given = q_proxy, k_proxy, q, k, lse, blocks, cu_seqlens, block_size
    return divergence(*given, with_gradients=with_grad)


@proxy_kl.register_fake
def _(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _kl_shapes(q_proxy, with_grad)


def _kl_shapes(q_proxy: Tensor, with_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = q_proxy.shape if with_grad else (0,)
    value = q_proxy.new_empty(q_proxy.shape[2], dtype=torch.float32)
    return value, value.new_empty(shape), value.new_empty(shape)


@torch.library.custom_op("msa_kernels::cute_scale_gradients", mutates_args=())
def scale_gradients(
    dq: Tensor, dk: Tensor, upstream: Tensor, num_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The KL's gradients times their proxies' upstream scalars, those of shared keys summed."""
    from msa_kernels.cute.gradients import scale

    results = _scaled(dq, dk, num_keys, dtype)
    for gradients, result in zip((dq, dk), results, strict=True):
        scale(gradients, upstream, result)
    return results


@scale_gradients.register_fake
def _(dq: Tensor, dk: Tensor, upstream: Tensor, num_keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _scaled(dq, dk, num_keys, dtype)


def _scaled(dq: Tensor, dk: Tensor, num_keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, sequence, _, dim = dk.shape
    return torch.empty_like(dq, dtype=dtype), dk.new_empty((batch, sequence, num_keys, dim), dtype=dtype)


def _keep_gradients(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.inputs, ctx.num_keys, ctx.dtype = len(inputs), inputs[1].shape[2], inputs[0].dtype
    ctx.save_for_backward(*output[1:])


def _kl_backward(ctx, upstream: Tensor | None, *_: Tensor | None) -> tuple:
    if upstream is None:
        return (None,) * ctx.inputs
    found = scale_gradients(*ctx.saved_tensors, upstream, ctx.num_keys, ctx.dtype)
    return *found, *(None,) * (ctx.inputs - 2)


proxy_kl.register_autograd(_kl_backward, setup_context=_keep_gradients)


@torch.library.custom_op("msa_kernels::cute_dense_proxy_kl", mutates_args=())
def dense_proxy_kl(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    student_lse: Tensor,
    cu_seqlens: Tensor | None,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `proxy_kl`, over every token of the document up to the query."""
    from msa_kernels.cute.dense import dense_divergence

    given = q_proxy, k_proxy, q, k, lse, student_lse, cu_seqlens
    return dense_divergence(*given, with_gradients=with_grad)


@dense_proxy_kl.register_fake
def _(
    q_proxy: Tensor,
    k_proxy: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    student_lse: Tensor,
    cu_seqlens: Tensor | None,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _kl_shapes(q_proxy, with_grad)


dense_proxy_kl.register_autograd(_kl_backward, setup_context=_keep_gradients)


@register_flop_formula(torch.ops.msa_kernels.cute_dense_proxy_kl)
def _dense_kl_flops(
    q_proxy: torch.Size,
    k_proxy: torch.Size,
    q: torch.Size,
    k: torch.Size,
    lse: torch.Size,
    student_lse: torch.Size,
    cu_seqlens: object,
    with_grad: bool,
    **_: object,
) -> int:
    """Two for each multiply-add of the causal half."""
    return q[0] * q[1] * q[1] * _kl_products(q_proxy, q, with_grad)


@register_flop_formula(torch.ops.msa_kernels.cute_proxy_kl)
def _kl_flops(
    q_proxy: torch.Size,
    k_proxy: torch.Size,
    q: torch.Size,
    k: torch.Size,
    lse: torch.Size,
    blocks: torch.Size,
    cu_seqlens: object,
    block_size: int,
    with_grad: bool,
    **_: object,
) -> int:
    """Two for each multiply-add."""
    return 2 * _kl_products(q_proxy, q, with_grad) * _selected_pairs(blocks, block_size)


def _kl_products(q_proxy: torch.Size, q: torch.Size, with_grad: bool) -> int:
    """Multiply-adds of a pair of tokens: the scores of both branches, and the proxies' two gradients."""
    return q_proxy[2] * q_proxy[3] * (3 if with_grad else 1) + q[2] * q[3]


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
