"""The decoder-only transformer: embedding, layers of attention and SwiGLU, and the output layer."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from msa_kernels.documents import layout
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from msa_lab.attention import Attention, Carried, Context, rotation
from msa_lab.config import ModelConfig


class Output(NamedTuple):
    """What a forward returns."""

    logits: Float[Tensor, "batch sequence vocab"]
    kl: Float[Tensor, "served_layer proxy"] | None
    """KL(teacher || proxy) in nats per layer that proxies serve; None where not computed."""


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "batch sequence width"]) -> Float[Tensor, "batch sequence width"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention, then MLP, each on a normalised copy and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, backend: str | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.attention = Attention(config, layer, backend)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.mlp = MLP(config.d_model, config.mlp_widths[layer])

    def forward(
        self, x: Float[Tensor, "batch sequence width"], context: Context, carried: Carried | None
    ) -> tuple[Float[Tensor, "batch sequence width"], Float[Tensor, " proxy"] | None, Carried | None]:
        attended, kl, lent = self.attention(self.attention_norm(x), context, carried)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), kl, lent


class Transformer(nn.Module):
    """The model that a `ModelConfig` describes.

    Args:
        config: Sizes and kinds of attention.
        backend: Kernel path, or None for the one that `msa_kernels.select_path` finds.
        seed: Decides the initial weights. Each parameter is drawn by its own name, so that models which share a
            part start with the same numbers in it.
        activation_checkpointing: Recompute each layer in the backward.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: str | None = None,
        *,
        seed: int = 0,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config, i, backend) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.initialise(seed)

    def forward(
        self,
        tokens: Int64[Tensor, "batch sequence"],
        cu_seqlens: Int32[Tensor, " offsets"] | None = None,
        *,
        sparse: bool = True,
        with_kl: bool = False,
        draw: Int64[Tensor, " batch"] | None = None,
    ) -> Output:
        """Next-token logits.

        Args:
            tokens: Token ids.
            cu_seqlens: Document offsets over the flattened batch; None makes each row one document.
            sparse: False in the warm-up phase: msa layers attend densely and their KL has full support.
            with_kl: Also compute the proxies' KL.
            draw: A number per row for layers of kind `random`; the row's index where not given.
        """
        context = self._context(tokens, cu_seqlens, sparse, with_kl, draw)
        x, kls, lent = self.embedding(tokens), [], None
        for layer in self.layers:
            if self.activation_checkpointing and self.training:
                made = checkpoint(layer, x, context, lent, use_reentrant=False)
                x, kl, lent = made  # pyright: ignore[reportGeneralTypeIssues]
            else:
                x, kl, lent = layer(x, context, lent)
            if kl is not None:
                kls.append(kl)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return Output(F.linear(self.norm(x), weight), torch.stack(kls) if kls else None)

    def _context(
        self,
        tokens: Int64[Tensor, "batch sequence"],
        cu_seqlens: Int32[Tensor, " offsets"] | None,
        sparse: bool,
        with_kl: bool,
        draw: Int64[Tensor, " batch"] | None,
    ) -> Context:
        config, (batch, sequence) = self.config, tokens.shape
        if cu_seqlens is None:
            positions = torch.arange(sequence, device=tokens.device)[None]
        else:
            positions = layout(batch, sequence, config.block_size, cu_seqlens, tokens.device).position
        return Context(
            rotation=rotation(positions, config.head_dim, config.rope_theta),
            proxy_rotation=rotation(positions, config.proxy_dim, config.rope_theta) if config.proxy_rope else None,
            cu_seqlens=cu_seqlens,
            draw=torch.arange(batch, device=tokens.device) if draw is None else draw,
            sparse=sparse,
            with_kl=with_kl,
        )

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal weights of deviation 0.02, those that write to the residual stream smaller by sqrt(2 layers).

        Also draws which heads the proxies of `regrouped` layers serve.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            writes = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = 0.02 / (2 * self.config.num_layers) ** 0.5 if writes else 0.02
            parameter.copy_(torch.normal(0.0, std, parameter.shape, generator=_generator(seed, name)))
        for name, module in self.named_modules():
            if isinstance(module, Attention) and module.head_order is not None:
                module.regroup(self.config.num_proxies, _generator(seed, f"{name}.head_order"))

    def proxy_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The named parameters that only the KL trains."""
        return [(name, p) for name, p in self.named_parameters() if ".proxy." in name]


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
