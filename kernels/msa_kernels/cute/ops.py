"""The kernels as PyTorch operations: what `torch.compile`, fake tensors and FLOP counters see of them.

Memory is bounded by windows of queries: the proxies' scores of a window, and what else is kept of each of its blocks
(`windows.py`). Operations of a gradient take what the forward pass has made ready, and build nothing.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from msa_kernels.cute import windows
from msa_kernels.documents import num_blocks

SCORE_BYTES = 2**30
"""The most that the proxies' scores of a window take."""


def _layout(cu_seqlens: Tensor | None, batch: int, sequence: int, block_size: int, device: torch.device) -> tuple:
    from msa_kernels.cute.layout import make_layout

    return make_layout(cu_seqlens, batch, sequence, block_size, device)


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
        window = windows.fitting(total, num_proxies * count * 4, SCORE_BYTES, 256)
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
    """Two for each multiply-add of a query and the keys up to it."""
    batch, sequence, num_proxies, dim = q_proxy
    return batch * num_proxies * sequence * (sequence + 1) * dim


@torch.library.custom_op("msa_kernels::cute_sparse_attention", mutates_args=())
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int, carrier: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention to the selected blocks; the output's gradient goes to a carrier, if given.

    Without one it has no gradient: that is `attention_and_kl`'s.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, _attend(q, k, v, out, blocks, cu_seqlens, block_size)


@sparse_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int, carrier: Tensor | None
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _set_nothing(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)


def _carry(_, upstream: Tensor | None, __: Tensor | None) -> tuple:
    return (None,) * 6 + (upstream,)


sparse_attention.register_autograd(_carry, setup_context=_set_nothing)


@torch.library.custom_op("msa_kernels::cute_attention_and_kl", mutates_args=())
def attention_and_kl(
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    window: int,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """A layer's forward pass on one index of its selection, for windows of so many tokens (`windows.step_window`).

    `sparse_attention`'s output and log-sum-exp and, if there are proxies, what `proxy_kl` gives; at last the index and
    the like, which the output's gradient needs.
    """
    from msa_kernels.cute import gradients, work

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device):
        ready, rows = work.prepare(q, k, v, blocks, cu_seqlens, block_size, window)
        work.attention(ready, ready.problem, out.flatten(0, 1), lse.flatten(0, 1))
        kl = _no_kl(q)
        if q_proxy is not None and k_proxy is not None:
            kl = gradients.divergence(ready, rows, q_proxy, k_proxy, lse, with_gradients=with_grad)
    return out, lse, *kl, work.kept(ready, rows)


@attention_and_kl.register_fake
def _(
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    window: int,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    size, rows = windows.sizes(blocks, cu_seqlens, block_size), tuple(blocks.shape[:3])
    index = (size.edges,), (size.tasks(window), 4), (size.windows(window) + 1,)
    shapes = (size.tokens,), (size.ids,), (size.ids,), *index, rows, rows
    kl = _no_kl(q) if q_proxy is None else _kl_shapes(q_proxy, with_grad)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    return out, lse, *kl, [q.new_empty(shape, dtype=torch.int32) for shape in shapes]


@torch.library.custom_op("msa_kernels::cute_attention_gradients", mutates_args=())
def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    block_size: int,
    window: int,
    out: Tensor,
    lse: Tensor,
    upstream: Tensor,
    kept: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the output of `attention_and_kl`, whose window and last result it is given, to q, k and v."""
    from msa_kernels.cute import gradients, work

    with torch.cuda.device(q.device):
        ready, rows = work.resume(q, k, v, blocks, block_size, window, kept)
        return gradients.attention_gradients(ready, rows, out, lse, upstream)


@attention_gradients.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    block_size: int,
    window: int,
    out: Tensor,
    lse: Tensor,
    upstream: Tensor,
    kept: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _no_kl(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value, dq, dk = (q.new_empty(0, dtype=torch.float32) for _ in range(3))
    return value, dq, dk


def _keep(ctx, inputs: tuple, output: tuple) -> None:
    _, k_proxy, q, k, v, blocks, _, ctx.block_size, ctx.window, _ = inputs
    out, lse, _, *gradients, kept = output
    ctx.set_materialize_grads(False)
    ctx.num_keys, ctx.dtype = 0 if k_proxy is None else k_proxy.shape[2], q.dtype
    main = (q, k, v, blocks, out, lse, *kept) if any(ctx.needs_input_grad[2:5]) else ()
    ctx.save_for_backward(*gradients, *main)


def _step_backward(ctx, upstream: Tensor | None, _: object, of_kl: Tensor | None, *__: object) -> tuple:
    dq, dk, *main = ctx.saved_tensors
    to_main, to_proxies = (None,) * 3, (None,) * 2
    # In this order, the results of the second do not add to the memory that the first takes.
    if upstream is not None and main:
        *inputs, out, lse = main[:6]
        to_main = attention_gradients(*inputs, ctx.block_size, ctx.window, out, lse, upstream, main[6:])
    if of_kl is not None and dq.numel():
        to_proxies = scale_gradients(dq, dk, of_kl, ctx.num_keys, ctx.dtype)
    return *to_proxies, *to_main, *(None,) * 5


attention_and_kl.register_autograd(_step_backward, setup_context=_keep)


@torch.library.custom_op("msa_kernels::cute_selected_lse", mutates_args=())
def selected_lse(q: Tensor, k: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int) -> Tensor:
    """Log-sum-exp of the scaled scores of the selected blocks: the proxies' own, on their selection."""
    return _attend(q, k, None, None, blocks, cu_seqlens, block_size)


@selected_lse.register_fake
def _(q: Tensor, k: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _selected_pairs(blocks: torch.Size, block_size: int) -> int:
    """Pairs of queries and keys of a head: every query has its own block up to itself, and k - 1 or all earlier ones.

    Exact for rows that are one document and selections without free slots. Lengths of documents are not among the
    shapes: packed ones count as if each row were one, which is too many.
    """
    batch, _, sequence, slots = blocks
    whole, rest = sequence // block_size, sequence % block_size
    most = min(slots - 1, whole)
    # Over the whole blocks, the sum of min(k - 1, earlier blocks).
    earlier = most * (2 * whole - most - 1) // 2 * block_size + rest * most
    own = whole * block_size * (block_size + 1) // 2 + rest * (rest + 1) // 2
    return batch * (earlier * block_size + own)


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


@register_flop_formula(torch.ops.msa_kernels.cute_attention_and_kl)
def _step_flops(
    q_proxy: torch.Size | None,
    k_proxy: torch.Size | None,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    blocks: torch.Size,
    cu_seqlens: object,
    block_size: int,
    window: int,
    with_grad: bool,
    **_: object,
) -> int:
    """Those of `sparse_attention` and `proxy_kl`."""
    kl = 0 if q_proxy is None else _kl_products(q_proxy, q, with_grad)
    return (4 * q[2] * q[3] + 2 * kl) * _selected_pairs(blocks, block_size)


@register_flop_formula(torch.ops.msa_kernels.cute_attention_gradients)
def _gradient_flops(
    q: torch.Size, k: torch.Size, v: torch.Size, blocks: torch.Size, block_size: int, *_: object, **__: object
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
    from msa_kernels.cute import gradients, work

    size = windows.sizes(blocks, cu_seqlens, block_size)
    window = windows.part_window(size, windows.kl_parts(q_proxy, block_size, with_grad), q)
    with torch.cuda.device(q.device):
        ready, rows = work.prepare(q, k, None, blocks, cu_seqlens, block_size, window)
        return gradients.divergence(ready, rows, q_proxy, k_proxy, lse, with_gradients=with_grad)


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
    scale((dq, dk), upstream, results)
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
    """Two for each multiply-add of a query and the keys up to it."""
    return q[0] * q[1] * (q[1] + 1) * _kl_products(q_proxy, q, with_grad)


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
    """Fill `out`, if there are values, and give the log-sum-exps."""
    from msa_kernels.cute import work

    _, _, heads, dim = q.shape
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    line_bytes = 4 + (0 if v is None else dim * q.element_size())
    window = windows.forward_window(windows.sizes(blocks, cu_seqlens, block_size), heads, line_bytes)
    with torch.cuda.device(q.device):
        ready, _ = work.prepare(q, k, v, blocks, cu_seqlens, block_size, window)
        work.attention(ready, ready.problem, None if out is None else out.flatten(0, 1), lse.flatten(0, 1))
    return lse
