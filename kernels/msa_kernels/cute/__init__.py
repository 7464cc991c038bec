"""The operations on kernels of our own, written in the CuTe DSL for Hopper (sm_90a).

Selection and the forward pass of sparse attention. Gradients, the KL and dense attention are those of
`msa_kernels.flex`, on the same selection.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from msa_kernels import checks, flex
from msa_kernels.cute import ops
from msa_kernels.flex import block_scores, dense_attention, dense_proxy_kl, proxy_kl
from msa_kernels.selection import Selection

__all__ = [
    "block_scores",
    "dense_attention",
    "dense_proxy_kl",
    "proxy_kl",
    "select_blocks",
    "sparse_attention",
]

DIMS = (64, 128)
BLOCK_SIZES = (64, 128)
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
    offsets = _on_device(cu_seqlens, q_proxy)
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
    units = max(selection.blocks.shape[1], k.shape[2])
    _supported("num_query_heads / max(num_proxies, num_kv_heads)", q.shape[2] // units, GROUPS)
    _supported("top_k_blocks", selection.blocks.shape[3], range(1, MOST_SLOTS + 1))
    _supported("the dim of v, as that of q,", v.shape[3], (q.shape[3],))
    carrier = None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        # Its gradient is that of the same function; its value is not used.
        carrier, _ = flex.sparse_attention(q, k, v, selection)
    offsets = _on_device(selection.cu_seqlens, q)
    main = q.detach(), k.detach(), v.detach()
    return ops.sparse_attention(*main, selection.blocks, offsets, selection.block_size, carrier)


def obstacle(dtype: torch.dtype, head_dim: int | None, proxy_dim: int | None, block_size: int) -> str | None:
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
    ):
        if value is not None and value not in legal:
            return f"the CuTe DSL kernels need {name} of {' or '.join(map(str, legal))}, not {value}"
    from msa_kernels.cute import compile as compiling

    return compiling.missing()


def _supported(name: str, value: int, legal: range | tuple[int, ...]) -> None:
    if value not in legal:
        nearest = min(legal, key=lambda n: (abs(n - value), n))
        raise ValueError(f"{name} is {value}; the cute kernels take {nearest} as the nearest, or use MSA_KERNELS=flex")


def _on_device(cu_seqlens: Tensor | None, like: Tensor) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(like.device)
