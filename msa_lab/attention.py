"""One attention layer: projections, the proxies, what chooses the blocks, and the attention over them.

The children `select` (its output is a `Selection`) and `core` (its first inputs are q, k, v) are where instruments and
interventions hook in: a forward hook on `select` that returns another Selection replaces the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int32, Int64
from msa_kernels import Selection, dense_attention, dense_proxy_kl, msa_attention, select_blocks, sparse_attention
from msa_kernels.selection import random_selection, row_keys, window_selection
from torch import Tensor, nn
from torch.nn import functional as F

from msa_lab.config import ModelConfig
from msa_lab.config_model import HAVE_PROXIES

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


class Carried(NamedTuple):
    """What a layer hands to those behind it that share its choice."""

    proxies: tuple[Float[Tensor, "batch sequence proxy dim"], Float[Tensor, "batch sequence key dim"]]
    selection: Selection | None
    """None in a training step of the warm-up phase."""


def rotation(positions: Int[Tensor, "#batch sequence"], dim: int, theta: float) -> Rotation:
    """RoPE's cosine and sine at `positions` in float32 (Su et al., RoFormer, equation 34; halves rotated together)."""
    return torch.ops.msa_lab.rotation(positions, dim, theta)


# An operation that the compiler cannot look into: it would compute the angles anew in every kernel that rotates.
@torch.library.custom_op("msa_lab::rotation", mutates_args=())
def _rotation(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    frequency = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions.to(torch.float32)[:, :, None, None] * frequency
    return angle.cos(), angle.sin()


@_rotation.register_fake
def _(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, 1, dim // 2)
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)


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
        self,
        x: Float[Tensor, "batch sequence width"],
        by: Rotation | None,
        order: Int64[Tensor, " heads_out"] | None = None,
    ) -> Float[Tensor, "batch sequence heads_out dim"]:
        """`order` names the head that stands in each place (one may stand in several); None leaves them as they are."""
        weight, shape = self.projection.weight, self.shape
        if order is not None:
            # Of the weights, not of the heads: it moves little, and its gradient is a short sum in a fixed order.
            weight = weight.unflatten(0, shape).index_select(0, order).flatten(0, 1)
            shape = (len(order), shape[1])
        projected = F.linear(x, weight).unflatten(-1, shape)
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


class SharedSelect(nn.Module):
    """The choice of an earlier layer once more; the proxies are there for those who look."""

    def forward(
        self,
        q_proxy: Float[Tensor, "batch sequence proxy dim"],
        k_proxy: Float[Tensor, "batch sequence key dim"],
        selection: Selection,
    ) -> Selection:
        return Selection(*selection)  # a value of its own, so that another may take its place in this layer alone


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
    """Grouped-query attention of one of the kinds of `ModelConfig.attention`.

    A proxy serves adjacent heads. In a `regrouped` layer the heads stand in an order of their own, `head_order`, from
    the projections on, each with a key and value head to itself; the output projection knows the order. All that is
    behind it (kernels, instruments) then meets adjacent heads. The price: keys and values are made once per query
    head, and no two heads share keys in the kernels.

    A `shared` layer reads the choice of the layer before it, and its heads are a teacher of the proxies that made it:
    the loss of such proxies is the sum of their KLs to all layers that read by them.
    """

    def __init__(self, config: ModelConfig, layer: int, backend: str | None) -> None:
        super().__init__()
        kinds = config.attention_kinds
        self.kind = kinds[layer]
        self.lends = "shared" in kinds[layer + 1 : layer + 2]
        self.detach = config.detach_proxy_input
        width, dim = config.d_model, config.head_dim
        self.query = Heads(width, config.num_query_heads, dim, norm=config.qk_norm)
        self.key = Heads(width, config.num_kv_heads, dim, norm=config.qk_norm)
        self.value = Heads(width, config.num_kv_heads, dim, norm=False)
        if self.kind in HAVE_PROXIES:
            self.proxy = Proxy(config)
            self.select = ProxySelect(config, backend)
        elif self.kind == "shared":
            self.select = SharedSelect()
        elif self.kind != "dense":
            self.select = RuleSelect(config, layer, random=self.kind == "random")
        order = torch.arange(config.num_query_heads) if self.kind == "regrouped" else None
        self.head_order: Int64[Tensor, " heads"] | None
        self.register_buffer("head_order", order)
        self.share = config.num_query_heads // config.num_kv_heads
        self.core = Core(backend)
        self.output = nn.Linear(config.num_query_heads * dim, width, bias=False)

    def forward(
        self, x: Float[Tensor, "batch sequence width"], context: Context, carried: Carried | None = None
    ) -> tuple[Float[Tensor, "batch sequence width"], Float[Tensor, " proxy"] | None, Carried | None]:
        """The layer's output, the KL of each proxy where there are proxies and it is wanted, and what it lends."""
        order = self.head_order
        keys = None if order is None else order // self.share
        q, k = self.query(x, context.rotation, order), self.key(x, context.rotation, keys)
        v = self.value(x, None, keys)
        proxies, selection = self._choose(x, q, context, carried)
        out, kl = self.core(q, k, v, selection, proxies, context)
        lent = None if proxies is None or not self.lends else Carried(proxies, selection)
        if order is None:
            return self.output(out.flatten(2)), kl, lent
        weight = self.output.weight.unflatten(1, out.shape[2:]).index_select(1, order).flatten(1)
        return F.linear(out.flatten(2), weight), kl, lent

    def _choose(
        self, x: Tensor, q: Tensor, context: Context, carried: Carried | None
    ) -> tuple[tuple[Tensor, Tensor] | None, Selection | None]:
        """The proxies' queries and keys, and the selection; None for what the layer does not have."""
        if self.kind == "dense":
            return None, None
        if isinstance(self.select, RuleSelect):
            return None, self.select(q, context)
        # In warm-up a training step has no use for the choice; an evaluation records what it would be.
        wanted = context.sparse or not self.training
        if self.kind == "shared":
            assert carried is not None
            return carried.proxies, self.select(*carried.proxies, carried.selection) if wanted else None
        proxies = self.proxy(x.detach() if self.detach else x, context.proxy_rotation)
        return proxies, self.select(*proxies, context.cu_seqlens) if wanted else None

    @torch.no_grad()
    def regroup(self, num_proxies: int, generator: torch.Generator) -> None:
        """Draw which heads each proxy serves: any groups of equal size but the adjacent heads."""
        assert self.head_order is not None
        heads = torch.arange(len(self.head_order))
        as_is = {tuple(group) for group in heads.view(num_proxies, -1).tolist()}
        while True:
            drawn = heads[torch.randperm(len(heads), generator=generator)].view(num_proxies, -1).sort(1).values
            if {tuple(group) for group in drawn.tolist()} != as_is:
                self.head_order.copy_(drawn.flatten())
                return
