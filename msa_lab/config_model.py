"""The network's config, and the checks that all configs use."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

AttentionKind = Literal["dense", "msa", "window", "random", "regrouped", "shared"]
HAVE_PROXIES = ("msa", "regrouped")
"""Kinds of layers with proxies of their own."""


def require(ok: bool, field_name: str, value: object, rule: str, fix: str) -> None:
    if not ok:
        raise ValueError(f"{field_name}={value!r}: {rule}; try {fix}")


def at_least(minimum: int, config: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value >= minimum, f"{section}.{name}", value, f"must be at least {minimum}", str(minimum))


def share(config: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0.0 <= value <= 1.0, f"{section}.{name}", value, "is a share from 0 to 1", "0.1")


def finite(config: Any, section: str = "") -> None:
    """Refuse infinity and NaN in any number of a config, also of the configs within it."""
    for one in fields(config):
        name, value = section + one.name, getattr(config, one.name)
        if is_dataclass(value):
            finite(value, f"{name}.")
        elif isinstance(value, float):
            require(math.isfinite(value), name, value, "must be a finite number", repr(one.default))


def divisors(n: int) -> str:
    return "one of " + ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention; which attention each layer uses is a field."""

    vocab_size: int = 257
    """Rows of the embedding; at least the tokenizer's size (257 for bytes: 256 values and the document mark)."""
    num_layers: int = 4
    """Transformer blocks."""
    d_model: int = 128
    """Width of the residual stream."""
    num_query_heads: int = 4
    """Query heads of the main attention."""
    num_kv_heads: int = 2
    """Key/value heads; divides num_query_heads."""
    head_dim: int = 32
    """Dimension of one head of the main attention; even, because of RoPE."""
    mlp_width: int | tuple[int, ...] = 352
    """Hidden units of the SwiGLU MLP: one number, or one per layer (as `msa-lab budget` solves them)."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""
    qk_norm: bool = True
    """RMSNorm on queries and keys, of the proxies too."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer."""
    attention: AttentionKind | tuple[AttentionKind, ...] = "msa"
    """One kind for all layers, or one per layer: dense; msa (proxies choose); window (the most recent blocks, same
    key budget); random (blocks drawn anew at every step, same key budget); regrouped (as msa, but each proxy serves
    heads drawn at random, by seed and layer, across KV heads); shared (reads what the nearest msa layer before it
    chose, and teaches its proxies too; `share_every` lists the kinds of such a model)."""
    block_size: int = 128
    """Keys per block."""
    top_k_blocks: int = 16
    """Blocks (not tokens) that a query may read, forced ones included."""
    num_local_blocks: int = 1
    """Forced most recent blocks, the query's own first; 0 lets the proxy choose everything."""
    num_sink_blocks: int = 0
    """Forced first blocks of the document."""
    num_proxies: int = 2
    """Proxies, i.e. groups of query heads with a selection of their own; divides num_query_heads."""
    num_proxy_kv_heads: int = 1
    """Keys that the proxies share: 1 for one common key, num_proxies for one each."""
    proxy_dim: int = 32
    """Dimension of a proxy; even, because of RoPE."""
    proxy_rope: bool = True
    """RoPE on the proxies, as on the main branch; without it a proxy cannot see distance."""
    detach_proxy_input: bool = True
    """Keep the proxies' loss from the backbone (the paper's stop-gradient); False is an ablation."""

    def __post_init__(self) -> None:
        at_least(1, self, "model", "vocab_size", "num_layers", "d_model", "num_query_heads", "num_kv_heads")
        at_least(1, self, "model", "block_size", "top_k_blocks", "num_proxies", "num_proxy_kv_heads")
        at_least(0, self, "model", "num_local_blocks", "num_sink_blocks")
        for name in ("head_dim", "proxy_dim"):
            value = getattr(self, name)
            require(value >= 2 and value % 2 == 0, f"model.{name}", value, "RoPE needs an even dimension", "64")
        require(self.rope_theta > 0, "model.rope_theta", self.rope_theta, "must be above 0", "10000.0")
        forced = self.num_local_blocks + self.num_sink_blocks
        require(
            forced <= self.top_k_blocks,
            "model.num_local_blocks + model.num_sink_blocks",
            forced,
            f"forced blocks must fit into top_k_blocks={self.top_k_blocks}",
            f"top_k_blocks={max(forced, 1)}",
        )
        self._check_heads()
        require(
            all(kind in typing.get_args(AttentionKind) for kind in self.attention_kinds),
            "model.attention",
            self.attention,
            f"must be one of {', '.join(typing.get_args(AttentionKind))}",
            "msa",
        )
        self._check_kinds()
        for name, values, default in (("attention", self.attention, "msa"), ("mlp_width", self.mlp_width, 352)):
            if isinstance(values, tuple):
                rule = f"needs one value, or one per layer (num_layers={self.num_layers})"
                require(len(values) == self.num_layers, f"model.{name}", values, rule, repr((*values, default)[0]))
        require(min(self.mlp_widths) >= 1, "model.mlp_width", self.mlp_width, "must be at least 1", "352")

    def _check_heads(self) -> None:
        query, kv, proxies, keys = self.num_query_heads, self.num_kv_heads, self.num_proxies, self.num_proxy_kv_heads
        require(query % kv == 0, "model.num_kv_heads", kv, f"must divide num_query_heads={query}", divisors(query))
        rule = f"must divide num_query_heads={query}"
        require(query % proxies == 0, "model.num_proxies", proxies, rule, divisors(query))
        rule = f"must divide num_proxies={proxies}"
        require(proxies % keys == 0, "model.num_proxy_kv_heads", keys, rule, divisors(proxies))
        rule = f"num_proxies and num_kv_heads={kv} must divide one another"
        require(proxies % kv == 0 or kv % proxies == 0, "model.num_proxies", proxies, rule, str(kv))

    def _check_kinds(self) -> None:
        kinds = self.attention_kinds
        for layer, kind in enumerate(kinds):
            earlier = [other for other in kinds[:layer] if other != "shared"]
            ok = kind != "shared" or (bool(earlier) and earlier[-1] == "msa")
            rule = f"layer {layer} shares, so the nearest layer before it that does not must be msa"
            require(ok, "model.attention", self.attention, rule, repr(share_every(min(2, len(kinds)), len(kinds))))
        if "regrouped" in kinds:
            rule = f"regrouped heads need more than one proxy and fewer than num_query_heads={self.num_query_heads}"
            ok = 1 < self.num_proxies < self.num_query_heads
            require(ok, "model.num_proxies", self.num_proxies, rule, str(self.num_kv_heads))

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The kind of each layer."""
        return self.attention if isinstance(self.attention, tuple) else (self.attention,) * self.num_layers

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The MLP width of each layer."""
        return self.mlp_width if isinstance(self.mlp_width, tuple) else (self.mlp_width,) * self.num_layers

    @property
    def proxy_layers(self) -> tuple[int, ...]:
        """The layers that have proxies of their own."""
        return tuple(i for i, kind in enumerate(self.attention_kinds) if kind in HAVE_PROXIES)

    @property
    def served_layers(self) -> tuple[int, ...]:
        """The layers whose heads read what proxies chose, and teach them by the KL: those with proxies, and shared."""
        return tuple(i for i, kind in enumerate(self.attention_kinds) if kind in (*HAVE_PROXIES, "shared"))


def share_every(every: int, num_layers: int) -> tuple[AttentionKind, ...]:
    """`ModelConfig.attention` in which every `every`-th layer, from the first on, chooses for those that follow it.

    Raises:
        ValueError: `every` is not 1 to `num_layers`.
    """
    require(1 <= every <= num_layers, "share_every", every, f"must lie within 1 to num_layers={num_layers}", "2")
    return tuple("shared" if layer % every else "msa" for layer in range(num_layers))
