"""What every path asks of its inputs: one place, one wording."""

import torch
from torch import Tensor

from msa_kernels.documents import check_cu_seqlens

HALF = (torch.bfloat16, torch.float16)


def budget(top_k_blocks: int, block_size: int, num_local_blocks: int, num_sink_blocks: int) -> None:
    """Raise ValueError unless the forced blocks fit into a legal `top_k_blocks`."""
    if block_size < 1:
        raise ValueError(f"block_size={block_size} must be at least 1, such as 128")
    if top_k_blocks < 1:
        raise ValueError(f"top_k_blocks={top_k_blocks} must be at least 1")
    for name, value in (("num_local_blocks", num_local_blocks), ("num_sink_blocks", num_sink_blocks)):
        if value < 0:
            raise ValueError(f"{name}={value} must be at least 0")
    forced = num_local_blocks + num_sink_blocks
    if forced > top_k_blocks:
        raise ValueError(
            f"num_local_blocks={num_local_blocks} + num_sink_blocks={num_sink_blocks} force more blocks than "
            f"top_k_blocks={top_k_blocks}; raise top_k_blocks to at least {forced}"
        )


def query_range(queries: tuple[int, int] | None, sequence: int) -> tuple[int, int]:
    """The half-open range of queries meant by `queries`; None is all of them."""
    start, stop = (0, sequence) if queries is None else queries
    if not 0 <= start <= stop <= sequence:
        raise ValueError(f"queries={queries} must be a (start, stop) with 0 <= start <= stop <= {sequence}")
    return start, stop


def main_branch(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Raise ValueError unless q, k and v are one attention's tensors."""
    _branch("q", q, "k", k)
    if v is not None:
        _same_kind("q", q, "v", v)
        if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
            raise ValueError(
                f"v has shape {tuple(v.shape)}; batch, sequence and heads must be k's {tuple(k.shape[:3])}"
            )
    _divides("num_query_heads", q.shape[2], "num_kv_heads", k.shape[2])


def proxy_branch(q_proxy: Tensor, k_proxy: Tensor) -> None:
    """Raise ValueError unless q_proxy and k_proxy are one proxy branch's tensors."""
    _branch("q_proxy", q_proxy, "k_proxy", k_proxy)
    _divides("num_proxies", q_proxy.shape[2], "num_proxy_kv_heads", k_proxy.shape[2])


def both_branches(q_proxy: Tensor, k_proxy: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise ValueError unless the proxies can serve the main branch's heads."""
    proxy_branch(q_proxy, k_proxy)
    main_branch(q, k)
    _same_kind("q", q, "q_proxy", q_proxy)
    if q.shape[:2] != q_proxy.shape[:2]:
        raise ValueError(
            f"q_proxy has (batch, sequence) {tuple(q_proxy.shape[:2])}; it must be q's {tuple(q.shape[:2])}"
        )
    proxy_groups(q_proxy.shape[2], q.shape[2], k.shape[2])


def proxy_groups(num_proxies: int, num_query_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless each proxy serves whole heads that share, or wholly contain, KV groups."""
    _divides("num_query_heads", num_query_heads, "num_proxies", num_proxies)
    if num_proxies % num_kv_heads and num_kv_heads % num_proxies:
        legal = [
            n
            for n in range(1, num_query_heads + 1)
            if num_query_heads % n == 0 and (n % num_kv_heads == 0 or num_kv_heads % n == 0)
        ]
        raise ValueError(
            f"num_proxies={num_proxies} and num_kv_heads={num_kv_heads}: one must divide the other; "
            f"the nearest legal num_proxies is {_nearest(legal, num_proxies)}"
        )


def selection(blocks: Tensor, block_size: int, cu_seqlens: Tensor | None, q: Tensor, num_kv_heads: int) -> None:
    """Raise ValueError unless the selection belongs to queries shaped like q."""
    batch, sequence, num_query_heads, _ = q.shape
    if blocks.dtype != torch.int32 or blocks.ndim != 4:
        raise ValueError(
            f"selection.blocks is {blocks.dtype} {tuple(blocks.shape)}; it must be int32 (batch, proxy, query, slot)"
        )
    if blocks.shape[0] != batch or blocks.shape[2] != sequence:
        raise ValueError(
            f"selection.blocks has batch {blocks.shape[0]} and {blocks.shape[2]} queries; q has {batch} and {sequence}"
        )
    if blocks.device != q.device:
        raise ValueError(f"selection.blocks lies on {blocks.device}; move it to q's device, {q.device}")
    budget(max(blocks.shape[3], 1), block_size, 0, 0)
    proxy_groups(blocks.shape[1], num_query_heads, num_kv_heads)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, sequence)
    if blocks.device.type == "cpu" and not torch.compiler.is_compiling():
        ids, following = blocks[..., :-1], blocks[..., 1:]
        if bool((blocks < -1).any() | ((following != -1) & ((ids >= following) | (ids == -1))).any()):
            raise ValueError("selection.blocks must ascend strictly, with -1 in the slots that are left: [0, 3, 7, -1]")


def shared_selection(selected: int, num_proxies: int) -> None:
    """Raise ValueError unless each selection serves whole proxies, so that a proxy's heads have one support."""
    if num_proxies % selected:
        raise ValueError(
            f"selection has {selected} proxies and q_proxy {num_proxies}: the KL needs one selection for each proxy, "
            f"or one that several share; give a selection of {num_proxies} proxies or of 1"
        )


def lse(value: Tensor, q: Tensor) -> None:
    """Raise ValueError unless `value` has one entry per query and head of q."""
    if value.shape != q.shape[:3]:
        raise ValueError(
            f"lse has shape {tuple(value.shape)}; it must be (batch, sequence, heads) = {tuple(q.shape[:3])}"
        )


def _branch(q_name: str, q: Tensor, k_name: str, k: Tensor) -> None:
    for name, tensor in ((q_name, q), (k_name, k)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be (batch, sequence, heads, dim)")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}; it must be floating point, such as torch.bfloat16")
        if not tensor.numel():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; every size must be at least 1")
    _same_kind(q_name, q, k_name, k)
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{k_name} has shape {tuple(k.shape)}; batch, sequence and dim must be {q_name}'s {tuple(q.shape)}"
        )


def _same_kind(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise ValueError(f"{other_name} is {other.dtype} but {name} is {tensor.dtype}; cast all inputs to one dtype")
    if tensor.device != other.device:
        raise ValueError(f"{other_name} lies on {other.device} but {name} on {tensor.device}; move all to one device")


def _divides(many_name: str, many: int, few_name: str, few: int) -> None:
    if many % few:
        legal = [n for n in range(1, many + 1) if many % n == 0]
        raise ValueError(
            f"{many_name}={many} must be a multiple of {few_name}={few}; "
            f"the nearest legal {few_name} is {_nearest(legal, few)}"
        )


def _nearest(legal: list[int], wished: int) -> int:
    return min(legal, key=lambda n: (abs(n - wished), n))
