"""Which path computes, and the ops in its terms.

A path is chosen from what the inputs are, never by trying: a wish (`backend=`, or the environment variable
MSA_KERNELS) that cannot be met raises ValueError with the reason, and nothing falls back in silence.
"""

import os
from types import ModuleType
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from msa_kernels import checks, reference
from msa_kernels.selection import Selection

PATHS = ("reference", "flex", "cute")


class MSAOutput(NamedTuple):
    """What `msa_attention` gives."""

    out: Float[Tensor, "batch sequence head value_dim"]
    kl: Float[Tensor, "proxy"] | None
    """KL of each proxy in nats, the mean over its queries; None with `with_kl=False`."""
    selection: Selection


class Sizes(NamedTuple):
    """What decides which paths can compute something; what plays no part is None."""

    dtype: torch.dtype
    head_dim: int | None
    proxy_dim: int | None
    block_size: int
    group_size: int | None
    top_k_blocks: int | None


def select_path(
    *,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int | None,
    proxy_dim: int | None,
    block_size: int,
    group_size: int | None = None,
    top_k_blocks: int | None = None,
    backend: str | None = None,
) -> tuple[str, str]:
    """The path for such inputs ("reference", "flex" or "cute") and the reason for it.

    `group_size` is the number of query heads that share both proxy and keys, num_query_heads / max(num_proxies,
    num_kv_heads). What plays no part is None. `backend`, else the environment variable MSA_KERNELS, is a wish;
    ValueError where it cannot be met.
    """
    wish, source = (backend, "backend") if backend else (os.environ.get("MSA_KERNELS") or None, "MSA_KERNELS")
    if wish is not None and wish not in PATHS:
        raise ValueError(f"{source}={wish!r} is no path; use one of {', '.join(PATHS)}")
    sizes = Sizes(dtype, head_dim, proxy_dim, block_size, group_size, top_k_blocks)
    obstacles = {
        "reference": None,
        "flex": _flex_obstacle(device_type, sizes),
        "cute": _cute_obstacle(device_type, sizes),
    }
    if wish is not None:
        if obstacles[wish]:
            possible = " or ".join(path for path in PATHS if not obstacles[path])
            raise ValueError(f"{source}={wish!r} cannot be used: {obstacles[wish]}; use {possible}")
        left = _left_to_flex(block_size) if wish == "cute" else None
        return wish, f"asked for by {source}={wish}" + (f"; {left}" if left else "")
    slower = obstacles["cute"] or _left_to_flex(block_size)
    if slower is None:
        return "cute", f"the fastest path on {device_type}"
    if obstacles["flex"] is None:
        return "flex", f"the fastest path on {device_type} for these inputs: {slower}"
    return "reference", f"the only path for these inputs: {obstacles['flex']}"


def block_scores(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    *,
    block_size: int = 128,
    cu_seqlens: Int32[Tensor, "offsets"] | None = None,
    queries: tuple[int, int] | None = None,
    backend: str | None = None,
) -> Float32[Tensor, "batch proxy query block"]:
    """`reference.block_scores` on the chosen path."""
    path = _path(backend, block_size, q_proxy=q_proxy)
    return path.block_scores(q_proxy, k_proxy, block_size=block_size, cu_seqlens=cu_seqlens, queries=queries)


def select_blocks(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    *,
    top_k_blocks: int,
    block_size: int = 128,
    cu_seqlens: Int32[Tensor, "offsets"] | None = None,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
    backend: str | None = None,
) -> Selection:
    """`reference.select_blocks` on the chosen path."""
    return _path(backend, block_size, q_proxy=q_proxy, top_k_blocks=top_k_blocks).select_blocks(
        q_proxy,
        k_proxy,
        top_k_blocks=top_k_blocks,
        block_size=block_size,
        cu_seqlens=cu_seqlens,
        num_local_blocks=num_local_blocks,
        num_sink_blocks=num_sink_blocks,
    )


def sparse_attention(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head value_dim"],
    selection: Selection,
    *,
    backend: str | None = None,
) -> tuple[Float[Tensor, "batch sequence head value_dim"], Float[Tensor, "batch sequence head"]]:
    """`reference.sparse_attention` on the chosen path."""
    path = _path(backend, selection.block_size, q=q, top_k_blocks=selection.blocks.shape[3])
    return path.sparse_attention(q, k, v, selection)


def dense_attention(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head value_dim"],
    *,
    cu_seqlens: Int32[Tensor, "offsets"] | None = None,
    return_lse: bool = True,
    backend: str | None = None,
) -> tuple[Float[Tensor, "batch sequence head value_dim"], Float[Tensor, "batch sequence head"] | None]:
    """`reference.dense_attention` on the chosen path."""
    return _path(backend, 128, q=q).dense_attention(q, k, v, cu_seqlens=cu_seqlens, return_lse=return_lse)


def proxy_kl(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    lse: Float[Tensor, "batch sequence head"],
    selection: Selection,
    *,
    backend: str | None = None,
) -> Float[Tensor, "proxy"]:
    """`reference.proxy_kl` on the chosen path."""
    slots = selection.blocks.shape[3]
    path = _path(backend, selection.block_size, q=q, k=k, q_proxy=q_proxy, top_k_blocks=slots)
    return path.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)


def dense_proxy_kl(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    lse: Float[Tensor, "batch sequence head"],
    *,
    cu_seqlens: Int32[Tensor, "offsets"] | None = None,
    backend: str | None = None,
) -> Float[Tensor, "proxy"]:
    """`reference.dense_proxy_kl` on the chosen path."""
    path = _path(backend, 128, q=q, k=k, q_proxy=q_proxy)
    return path.dense_proxy_kl(q_proxy, k_proxy, q, k, lse, cu_seqlens=cu_seqlens)


def msa_attention(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head value_dim"],
    *,
    selection: Selection | None = None,
    top_k_blocks: int | None = None,
    block_size: int = 128,
    cu_seqlens: Int32[Tensor, "offsets"] | None = None,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
    with_kl: bool = True,
    backend: str | None = None,
) -> MSAOutput:
    """The training step's op: select, attend, and (unless `with_kl=False`) the proxies' KL on the same selection.

    Give either `top_k_blocks`, which the four arguments after it belong to, or a `selection` made elsewhere, which
    brings its own block size and documents. Gradients of `out` reach q, k and v; those of `kl` the proxies only.
    """
    if selection is not None and top_k_blocks is not None:
        raise ValueError(f"selection and top_k_blocks={top_k_blocks} are both given; give exactly one of them")
    checks.both_branches(q_proxy, k_proxy, q, k)
    size, slots = block_size, top_k_blocks
    if selection is not None:
        size, slots = selection.block_size, selection.blocks.shape[3]
    path = _path(backend, size, q=q, k=k, q_proxy=q_proxy, top_k_blocks=slots)
    if selection is not None:
        if cu_seqlens is not None and selection.cu_seqlens is None:
            raise ValueError("cu_seqlens is given but the selection was made without it; give it to what selects")
        chosen = selection
    elif top_k_blocks is None:
        raise ValueError("neither selection nor top_k_blocks is given; give exactly one, such as top_k_blocks=16")
    else:
        chosen = path.select_blocks(
            q_proxy,
            k_proxy,
            top_k_blocks=top_k_blocks,
            block_size=block_size,
            cu_seqlens=cu_seqlens,
            num_local_blocks=num_local_blocks,
            num_sink_blocks=num_sink_blocks,
        )
    if with_kl and hasattr(path, "attention_and_kl"):
        out, kl = path.attention_and_kl(q_proxy, k_proxy, q, k, v, chosen)
        return MSAOutput(out, kl, chosen)
    out, lse = path.sparse_attention(q, k, v, chosen)
    kl = path.proxy_kl(q_proxy, k_proxy, q, k, lse, chosen) if with_kl else None
    return MSAOutput(out, kl, chosen)


def _path(
    backend: str | None,
    block_size: int,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    q_proxy: Tensor | None = None,
    top_k_blocks: int | None = None,
) -> ModuleType:
    given = q if q is not None else q_proxy
    assert given is not None
    group_size = None
    if q is not None and k is not None and q_proxy is not None:
        group_size = q.shape[2] // max(q_proxy.shape[2], k.shape[2])
    path, _ = select_path(
        device_type=given.device.type,
        dtype=given.dtype,
        head_dim=None if q is None else q.shape[-1],
        proxy_dim=None if q_proxy is None else q_proxy.shape[-1],
        block_size=block_size,
        group_size=group_size,
        top_k_blocks=top_k_blocks,
        backend=backend,
    )
    if path == "reference":
        return reference
    # Here, because importing FlexAttention costs every CPU user.
    if path == "cute":
        from msa_kernels import cute

        return cute
    from msa_kernels import flex

    return flex


def _cute_obstacle(device_type: str, sizes: Sizes) -> str | None:
    """Why the CuTe DSL kernels cannot compute this, or None."""
    if device_type != "cuda":
        return f"the CuTe DSL kernels are for CUDA devices of compute capability 9.0, not for {device_type}"
    from msa_kernels.cute import obstacle

    return obstacle(*sizes)


def _left_to_flex(block_size: int) -> str | None:
    """What the CuTe DSL kernels do not compute themselves, or None."""
    from msa_kernels.cute import by_flex

    return by_flex(block_size)


def _flex_obstacle(device_type: str, sizes: Sizes) -> str | None:
    """Why FlexAttention cannot compute this, or None."""
    if device_type != "cuda":
        return f"FlexAttention trains on CUDA devices only, not on {device_type}"
    if sizes.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"FlexAttention computes bfloat16, float16 and float32, not {sizes.dtype}".replace("torch.", "")
    for name, dim in (("head_dim", sizes.head_dim), ("proxy_dim", sizes.proxy_dim)):
        if dim is not None and dim < 16:
            return f"FlexAttention needs {name} of at least 16, not {dim}"
    return None
