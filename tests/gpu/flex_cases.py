"""Problems for the FlexAttention path on a GPU, and what its tests measure of a result.

The measure is the relative L2 error of each tensor: at most twice that of the reference given the same rounded inputs,
whose arithmetic is fp32, so that its error is the rounding of its results. Results in fp32 may differ in the last bits
for the order of a sum: FLOAT_ERROR.
"""

from typing import NamedTuple

import torch
from msa_kernels.selection import Selection

FLOAT_ERROR = 1e-5
NAMES = ("out", "lse", "kl", "dq", "dk", "dv", "dq_proxy", "dk_proxy")


class Case(NamedTuple):
    dtype: torch.dtype
    batch: int
    sequence: int
    heads: int
    kv_heads: int
    proxies: int
    proxy_kv_heads: int
    dim: int
    proxy_dim: int
    block_size: int
    top_k_blocks: int
    documents: tuple[int, ...] | None = None


CASES = {
    "paper_like": Case(torch.bfloat16, 2, 1024, 8, 2, 4, 1, 64, 64, 128, 4),
    "odd_length": Case(torch.bfloat16, 1, 1003, 6, 1, 2, 2, 128, 64, 64, 5),
    "documents": Case(torch.bfloat16, 2, 400, 4, 2, 2, 1, 64, 32, 32, 3, (0, 37, 37, 300, 400, 401, 670, 800)),
    "fp16_small_blocks": Case(torch.float16, 1, 700, 4, 2, 4, 1, 64, 64, 16, 9),
    "fp32_proxy_over_kv_heads": Case(torch.float32, 2, 257, 8, 4, 2, 1, 32, 32, 48, 3),
    "large_blocks_short": Case(torch.bfloat16, 3, 100, 2, 2, 1, 1, 64, 64, 256, 1),
}


def inputs(case: Case, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """q_proxy, k_proxy, q, k, v (correlated enough for peaked softmaxes) and the documents' offsets."""
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = (case.proxies, case.proxy_kv_heads, case.heads, case.kv_heads, case.kv_heads)
    dims = (case.proxy_dim, case.proxy_dim, case.dim, case.dim, case.dim)
    tensors = [
        torch.randn(case.batch, case.sequence, number, dim, device="cuda", generator=generator).to(case.dtype)
        for number, dim in zip(heads, dims, strict=True)
    ]
    offsets = case.documents and torch.tensor(case.documents, dtype=torch.int32, device="cuda")
    return tensors, offsets


def results(path, tensors: list[torch.Tensor], selection: Selection | None, offsets: torch.Tensor | None) -> dict:
    """All outputs and gradients of one path, for the given selection or over the full support."""
    q_proxy, k_proxy, q, k, v = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    if selection is None:
        out, lse = path.dense_attention(q, k, v, cu_seqlens=offsets)
        kl = path.dense_proxy_kl(q_proxy, k_proxy, q, k, lse, cu_seqlens=offsets)
    else:
        out, lse = path.sparse_attention(q, k, v, selection)
        kl = path.proxy_kl(q_proxy, k_proxy, q, k, lse, selection)
    # Exact in every dtype, so that all paths are asked for the same gradient.
    upstream = (
        torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(9)).bfloat16().to(out)
    )
    weights = torch.arange(1, len(kl) + 1, device="cuda").to(kl)
    torch.autograd.backward((out, kl), (upstream, weights))
    gradients = [leaf.grad for leaf in (q, k, v, q_proxy, k_proxy)]
    return dict(zip(NAMES, (out.detach(), lse, kl.detach(), *gradients), strict=True))


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()
