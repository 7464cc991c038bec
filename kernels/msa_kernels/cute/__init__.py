"""The operations on kernels of our own, written in the CuTe DSL for Hopper (sm_90a).

Selection, sparse attention and the KL, with their gradients; gradients and the KL of a selection for blocks of 128
tokens. Everything else is that of `msa_kernels.flex`, on the same selection; dense attention is that of the fastest
library (`library`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from msa_kernels import checks, flex
from msa_kernels.cute import library, ops, windows
from msa_kernels.documents import check_cu_seqlens
from msa_kernels.flex import block_scores
from msa_kernels.selection import Selection

__all__ = [
    "attention_and_kl",
    "block_scores",
    "dense_attention",
    "dense_proxy_kl",
    "proxy_kl",
    "select_blocks",
    "sparse_attention",
]

DIMS = (64, 128)
BLOCK_SIZES = (64, 128)
GRADIENT_BLOCK_SIZES = (128,)
"""Those that gradients have kernels for."""
KL_BLOCK_SIZES = (128,)
"""Those that the KL has kernels for."""
GROUPS = (1, 2, 4, 8, 16)
MOST_SLOTS = 32


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
    _supported("top_k_blocks", top_k_blocks, range(1, MOST_SLOTS + 1))
    offsets = _offsets(cu_seqlens, q_proxy)
    rule = (top_k_blocks, block_size, num_local_blocks, num_sink_blocks)
    return Selection(ops.select_blocks(q_proxy.detach(), k_proxy.detach(), offsets, *rule), block_size, cu_seqlens)


def sparse_attention(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head dim"],
    selection: Selection,
) -> tuple[Float[Tensor, "batch sequence head dim"], Float[Tensor, "batch sequence head"]]:
    """As `msa_kernels.reference.sparse_attention`."""
    checks.main_branch(q, k, v)
    checks.selection(*selection, q, k.shape[2])
    _supported("top_k_blocks", selection.blocks.shape[3], range(1, MOST_SLOTS + 1))
    _supported("the dim of v, as that of q,", v.shape[3], (q.shape[3],))
    blocks, offsets = _for_groups(selection.blocks, q.shape[2], k.shape[2]), _offsets(selection.cu_seqlens, q)
    if not _learns(q, k, v):
        return ops.sparse_attention(q, k, v, blocks, offsets, selection.block_size, None)
    if selection.block_size not in GRADIENT_BLOCK_SIZES:
        # Its gradient is that of the same function; its value is not used.
        carrier, _ = flex.sparse_attention(q, k, v, selection)
        main = q.detach(), k.detach(), v.detach()
        out, lse = ops.sparse_attention(*main, blocks, offsets, selection.block_size, carrier)
    else:
        out, lse, _ = _step(None, None, q, k, v, blocks, offsets, selection.block_size)
    return out, lse.detach()


def attention_and_kl(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head dim"],
    selection: Selection,
) -> tuple[Float[Tensor, "batch sequence head dim"], Float[Tensor, "proxy"]]:
    """The output of `sparse_attention` and the value of `proxy_kl`, which share what both need of the selection."""

    def apart() -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(q, k, v, selection)
        return out, proxy_kl(q_proxy, k_proxy, q, k, lse, selection)

    if by_flex(selection.block_size):
        return apart()
    checks.main_branch(q, k, v)
    _supported("the dim of v, as that of q,", v.shape[3], (q.shape[3],))
    _kl_supported(q_proxy, k_proxy, q, k, selection)
    blocks = selection.blocks
    lists = _for_groups(blocks, q.shape[2], k.shape[2]), _for_proxies(blocks, q_proxy.shape[2], k_proxy.shape[2])
    if any(x is not blocks for x in lists):
        return apart()
    offsets = _offsets(selection.cu_seqlens, q)
    out, _, kl = _step(q_proxy, k_proxy, q, k, v, blocks, offsets, selection.block_size)
    return out, kl


def proxy_kl(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    lse: Float[Tensor, "batch sequence head"],
    selection: Selection,
) -> Float[Tensor, "proxy"]:
    """As `msa_kernels.reference.proxy_kl`; the gradients are made in the forward pass, together with the value."""
    if selection.block_size not in KL_BLOCK_SIZES:
        return flex.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)
    _kl_supported(q_proxy, k_proxy, q, k, selection)
    checks.lse(lse, q)
    blocks = _for_proxies(selection.blocks, q_proxy.shape[2], k_proxy.shape[2])
    given = q_proxy, k_proxy, q.detach(), k.detach(), lse.detach(), blocks, _offsets(selection.cu_seqlens, q)
    return ops.proxy_kl(*given, selection.block_size, _learns(q_proxy, k_proxy))[0]


def dense_attention(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head value_dim"],
    *,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Float[Tensor, "batch sequence head value_dim"], Float[Tensor, "batch sequence head"] | None]:
    """As `msa_kernels.reference.dense_attention`, by the fastest library that serves (`library`).

    Without `return_lse` that is FlashAttention-4 or what PyTorch chooses: MSA is compared with it.
    """
    checks.main_branch(q, k, v)
    offsets = _offsets(cu_seqlens, q)
    if not return_lse and library.chosen(q, k, v, offsets) != library.FLASH:
        return flex.dense_attention(q, k, v, cu_seqlens=cu_seqlens, return_lse=False)
    out, lse = library.attend(q, k, v, offsets)
    return out, lse if return_lse else None


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
    _teacher_supported(q, k, q_proxy.shape[2])
    offsets = _offsets(cu_seqlens, q)
    student_lse = library.log_sum_exp(q_proxy.detach(), k_proxy.detach(), offsets)
    given = q_proxy, k_proxy, q.detach(), k.detach(), lse.detach(), student_lse, offsets
    return ops.dense_proxy_kl(*given, _learns(q_proxy, k_proxy))[0]


def by_flex(block_size: int) -> str | None:
    """What of gradients and the KL is left to FlexAttention, and why; None where nothing is."""
    sizes = {"gradients": GRADIENT_BLOCK_SIZES, "the KL": KL_BLOCK_SIZES}
    left = " and ".join(name for name, own in sizes.items() if block_size not in own)
    return f"{left} by flex, for want of kernels for block_size={block_size}" if left else None


def obstacle(
    dtype: torch.dtype,
    head_dim: int | None,
    proxy_dim: int | None,
    block_size: int,
    group_size: int | None,
    top_k_blocks: int | None,
) -> str | None:
    """Why these kernels cannot compute this on the current CUDA device, or None."""
    if not torch.cuda.is_available():
        return "the CuTe DSL kernels need a CUDA device, and none is here"
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        return f"the CuTe DSL kernels are for compute capability 9.0, not {capability[0]}.{capability[1]}"
    if dtype not in checks.HALF:
        return f"the CuTe DSL kernels compute bfloat16 and float16, not {dtype}".replace("torch.", "")
    for name, value, legal in (
        ("head_dim", head_dim, DIMS),
        ("proxy_dim", proxy_dim, DIMS),
        ("block_size", block_size, BLOCK_SIZES),
        ("num_query_heads / max(num_proxies, num_kv_heads)", group_size, GROUPS),
    ):
        if value is not None and value not in legal:
            return f"the CuTe DSL kernels need {name} of {' or '.join(map(str, legal))}, not {value}"
    if top_k_blocks is not None and top_k_blocks > MOST_SLOTS:
        return f"the CuTe DSL kernels take top_k_blocks of at most {MOST_SLOTS}, not {top_k_blocks}"
    from msa_kernels.cute import compile as compiling

    return compiling.missing()


def _for_groups(blocks: Tensor, heads: int, kv_heads: int) -> Tensor:
    """The lists of a selection, repeated where too many heads, or an odd number, share them and their keys."""
    selections = blocks.shape[1]
    units = max(selections, kv_heads)
    group = heads // units
    served = max(size for size in GROUPS if group % size == 0)
    return blocks if served == group else blocks.repeat_interleave(heads // served // selections, 1)


def _for_proxies(blocks: Tensor, proxies: int, keys: int) -> Tensor:
    """The same for proxies as heads of an attention: they share a list, or keys, only in ways that it takes."""
    selected = blocks.shape[1]
    if (selected % keys and keys % selected) or proxies // max(selected, keys) not in GROUPS:
        return blocks.repeat_interleave(proxies // selected, 1)
    return blocks


def _step(
    q_proxy: Tensor | None,
    k_proxy: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    offsets: Tensor | None,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and KL, in windows for what learns."""
    main_learns = _learns(q, k, v)
    proxies_learn = q_proxy is not None and k_proxy is not None and _learns(q_proxy, k_proxy)
    size = windows.sizes(blocks, offsets, block_size)
    window = windows.step_window(size, q, k.shape[2], q_proxy, main_learns=main_learns, proxies_learn=proxies_learn)
    given = q_proxy, k_proxy, q, k, v, blocks, offsets, block_size, window, proxies_learn
    out, lse, kl = ops.attention_and_kl(*given)[:3]
    # An operation's outputs all have a gradient if one has: what comes after a frozen output would be differentiated.
    return out if main_learns else out.detach(), lse, kl if proxies_learn else kl.detach()


def _learns(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _kl_supported(q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor, selection: Selection) -> None:
    checks.both_branches(q_proxy, k_proxy, q, k)
    checks.selection(*selection, q, k.shape[2])
    checks.shared_selection(selection.blocks.shape[1], q_proxy.shape[2])
    _teacher_supported(q, k, q_proxy.shape[2])
    _supported("top_k_blocks", selection.blocks.shape[3], range(1, MOST_SLOTS + 1))


def _teacher_supported(q: Tensor, k: Tensor, num_proxies: int) -> None:
    group = q.shape[2] // max(num_proxies, k.shape[2])
    _supported("num_query_heads / max(num_proxies, num_kv_heads)", group, GROUPS)


def _supported(name: str, value: int, legal: range | tuple[int, ...]) -> None:
    if value not in legal:
        nearest = min(legal, key=lambda n: (abs(n - value), n))
        raise ValueError(f"{name} is {value}; the cute kernels take {nearest} as the nearest, or use MSA_KERNELS=flex")


def _offsets(cu_seqlens: Tensor | None, like: Tensor) -> Tensor | None:
    if cu_seqlens is None:
        return None
    # Where they are given: their values can be looked at on the CPU, but on a device not without waiting for it.
    check_cu_seqlens(cu_seqlens, *like.shape[:2])
    return cu_seqlens.to(like.device)
