"""MiniMax Sparse Attention as tensor operations: select blocks by proxies, attend to them, train the proxies."""

from msa_kernels.dispatch import (
    MSAOutput,
    block_scores,
    dense_attention,
    dense_proxy_kl,
    msa_attention,
    proxy_kl,
    select_blocks,
    select_path,
    sparse_attention,
)
from msa_kernels.selection import Selection, random_selection, row_keys, select_from_scores, window_selection

__all__ = [
    "MSAOutput",
    "Selection",
    "block_scores",
    "dense_attention",
    "dense_proxy_kl",
    "msa_attention",
    "proxy_kl",
    "random_selection",
    "row_keys",
    "select_blocks",
    "select_from_scores",
    "select_path",
    "sparse_attention",
    "window_selection",
]
