"""One attention layer: projections, the proxies, what chooses the blocks, and the attention over them.

The children `select` (its output is a `Selection`) and `core` (its first inputs are q, k, v) are where instruments and
interventions hook in: a forward hook on `select` that returns another Selection replaces the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int32, Int64
from msa_kernels import Selection, dense_attention, dense_proxy_kl, msa_attention, select_blocks, sparse_attention
from msa_kernels.selection import random_selection, row_keys, window_selection
from torch import Tensor, nn

from msa_lab.config import ModelConfig

Rotation = tuple[Float[Tensor, "#batch sequence 1 half"], Float[Tensor, "#batch sequence 1 half"]]


@dataclass(frozen=True)
class Context:
    """What all layers of one forward share."""

    rotation: Rotation
    """Cosine and sine for the main heads."""
    proxy_rotation: Rotation | None
    """The same for the proxies; None leaves position out of them."""
    cu_seqlens: Int32[Tensor, " offsets"] | None
    """Document offsets over the flattened batch; None makes each row one document."""
    draw: Int64[Tensor, " batch"]
    """A number per row that random blocks are drawn from."""
    sparse: bool
    """False in the warm-up phase: msa layers attend densely."""
    with_kl: bool
    """Compute the proxies' KL."""


def rotation(positions: Int[Tensor, "#batch sequence"], dim: int, theta: float) -> Rotation:
    """RoPE's cosine and sine at `positions` in float32 (Su et al., RoFormer, equation 34; halves rotated together)."""
    frequency = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions.to(torch.float32)[:, :, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Float[Tensor, "batch sequence heads dim"], by: Rotation) -> Float[Tensor, "batch sequence heads dim"]:
    """Rotate the halves of each head by the position's angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = by
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Heads(nn.Module):
    """A projection to heads, then RMSNorm and RoPE in float32, then back to the projection's dtype.

    Every tensor that reaches a kernel leaves here in one dtype, so that autocast and the norm's float32 never mix.
    """

    def __init__(self, width: int, heads: int, dim: int, *, norm: bool) -> None:
        super().__init__()
        self.shape = (heads, dim)
        self.projection = nn.Linear(width, heads * dim, bias=False)
        self.norm = nn.RMSNorm(dim, eps=1e-6) if norm else None

    def forward(
        self, x: Float[Tensor, "batch sequence width"], by: Rotation | None
    ) -> Float[Tensor, "batch sequence heads dim"]:
        projected = self.projection(x).unflatten(-1, self.shape)
        if self.norm is None and by is None:
            return projected
        wide = projected.to(torch.promote_types(projected.dtype, torch.float32))
        if self.norm is not None:
            wide = self.norm(wide)
        if by is not None:
            wide = rotate(wide, by)
        return wide.to(projected.dtype)


class Proxy(nn.Module):
    """The scoring branch: a few light query heads and their keys (paper, section "index branch")."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.query = Heads(config.d_model, config.num_proxies, config.proxy_dim, norm=config.qk_norm)
        self.key = Heads(config.d_model, config.num_proxy_kv_heads, config.proxy_dim, norm=config.qk_norm)

    def forward(
        self, x: Float[Tensor, "batch sequence width"], by: Rotation | None
    ) -> tuple[Float[Tensor, "batch sequence proxy dim"], Float[Tensor, "batch sequence key dim"]]:
        return self.query(x, by), self.key(x, by)


class ProxySelect(nn.Module):
    """Blocks by the proxies' scores."""

    def __init__(self, config: ModelConfig, backend: str | None) -> None:
        super().__init__()
        self.config, self.backend = config, backend

    def forward(
        self,
        q_proxy: Float[Tensor, "batch sequence proxy dim"],
        k_proxy: Float[Tensor, "batch sequence key dim"],
        cu_seqlens: Int32[Tensor, " offsets"] | None,
    ) -> Selection:
        return select_blocks(
            q_proxy.detach(),
            k_proxy.detach(),
            top_k_blocks=self.config.top_k_blocks,
            block_size=self.config.block_size,
            cu_seqlens=cu_seqlens,
            num_local_blocks=self.config.num_local_blocks,
            num_sink_blocks=self.config.num_sink_blocks,
            backend=self.backend,
        )


class RuleSelect(nn.Module):
    """Blocks by a rule that looks at nothing: the most recent ones, or a random draw per row and layer."""

    def __init__(self, config: ModelConfig, layer: int, *, random: bool) -> None:
        super().__init__()
        self.config, self.layer, self.random = config, layer, random

    def forward(self, q: Float[Tensor, "batch sequence heads dim"], context: Context) -> Selection:
        batch, sequence = q.shape[:2]
        budget = {"top_k_blocks": self.config.top_k_blocks, "block_size": self.config.block_size}
        if not self.random:
            return window_selection(batch, sequence, cu_seqlens=context.cu_seqlens, device=q.device, **budget)
        return random_selection(
            batch,
            sequence,
            self.config.num_proxies,
            keys=row_keys(0, 0, self.layer, context.draw),
            cu_seqlens=context.cu_seqlens,
            num_local_blocks=self.config.num_local_blocks,
            num_sink_blocks=self.config.num_sink_blocks,
            **budget,
        )


class Core(nn.Module):
    """Attention over the selection (or over everything), and the KL that trains the proxies."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.backend = backend

    def forward(
        self,
        q: Float[Tensor, "batch sequence heads dim"],
        k: Float[Tensor, "batch sequence kv_heads dim"],
        v: Float[Tensor, "batch sequence kv_heads dim"],
        selection: Selection | None,
        proxies: tuple[Tensor, Tensor] | None,
        context: Context,
    ) -> tuple[Float[Tensor, "batch sequence heads dim"], Float[Tensor, " proxy"] | None]:
        learn = proxies is not None and context.with_kl
        if selection is None or (proxies is not None and not context.sparse):
            out, lse = dense_attention(q, k, v, cu_seqlens=context.cu_seqlens, return_lse=learn, backend=self.backend)
            if proxies is None or lse is None:
                return out, None
            return out, dense_proxy_kl(*proxies, q, k, lse, cu_seqlens=context.cu_seqlens, backend=self.backend)
        if proxies is None:
            return sparse_attention(q, k, v, selection, backend=self.backend)[0], None
        step = msa_attention(*proxies, q, k, v, selection=selection, with_kl=learn, backend=self.backend)
        return step.out, step.kl


class Attention(nn.Module):
    """Grouped-query attention of one of the four kinds of `ModelConfig.attention`."""

    def __init__(self, config: ModelConfig, layer: int, backend: str | None) -> None:
        super().__init__()
        self.kind = config.attention_kinds[layer]
        self.detach = config.detach_proxy_input
        width, dim = config.d_model, config.head_dim
        self.query = Heads(width, config.num_query_heads, dim, norm=config.qk_norm)
        self.key = Heads(width, config.num_kv_heads, dim, norm=config.qk_norm)
        self.value = Heads(width, config.num_kv_heads, dim, norm=False)
        if self.kind == "msa":
            self.proxy = Proxy(config)
            self.select = ProxySelect(config, backend)
        elif self.kind != "dense":
            self.select = RuleSelect(config, layer, random=self.kind == "random")
        self.core = Core(backend)
        self.output = nn.Linear(config.num_query_heads * dim, width, bias=False)

    def forward(
        self, x: Float[Tensor, "batch sequence width"], context: Context
    ) -> tuple[Float[Tensor, "batch sequence width"], Float[Tensor, " proxy"] | None]:
        """The layer's output, and the KL of each proxy where there are proxies and it is wanted."""
        q, k = self.query(x, context.rotation), self.key(x, context.rotation)
        v = self.value(x, None)
        proxies = selection = None
        if self.kind == "msa":
            proxies = self.proxy(x.detach() if self.detach else x, context.proxy_rotation)
            # In warm-up a training step has no use for the choice; an evaluation records what it would be.
            if context.sparse or not self.training:
                selection = self.select(*proxies, context.cu_seqlens)
        elif self.kind != "dense":
            selection = self.select(q, context)
        out, kl = self.core(q, k, v, selection, proxies, context)
        return self.output(out.flatten(2)), kl
