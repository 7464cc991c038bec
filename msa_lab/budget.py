"""Parameters and FLOPs by formula, from the config alone, and arms matched to one number of parameters.

Nothing here builds a model; a test holds the formulas against the built one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from msa_lab.config import RunConfig, density
from msa_lab.config_model import ModelConfig
from msa_lab.runs import arm_folder

TOLERANCE = 1e-3
"""Arms count as matched when their totals differ by less than this share."""


class Parameters(NamedTuple):
    """Numbers of parameters, all of them trainable; tied embeddings count once."""

    embedding: int
    attention: int
    proxy: int
    mlp: int
    norm: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding


def count_parameters(config: ModelConfig) -> Parameters:
    """What the model of `config` holds.

    The embedding includes the output layer when the two are not tied. The gains of the norm on queries and keys
    count as norm, those on the proxies as proxy, so that `proxy` is all that a model without proxies lacks.
    """
    c = config
    gains = 2 * c.d_model + (2 * c.head_dim if c.qk_norm else 0)
    proxy_gains = 2 * c.proxy_dim if c.qk_norm else 0
    return Parameters(
        embedding=c.vocab_size * c.d_model * (1 if c.tie_embeddings else 2),
        attention=c.num_layers * _attention_weights(c),
        proxy=len(c.proxy_layers) * (_proxy_weights(c) + proxy_gains),
        mlp=sum(3 * c.d_model * width for width in c.mlp_widths),
        norm=c.num_layers * gains + c.d_model,
    )


def _attention_weights(c: ModelConfig) -> int:
    """Queries and output per query head, keys and values per KV head."""
    return c.d_model * c.head_dim * 2 * (c.num_query_heads + c.num_kv_heads)


def _proxy_weights(c: ModelConfig) -> int:
    return c.d_model * c.proxy_dim * (c.num_proxies + c.num_proxy_kv_heads)


class Flops(NamedTuple):
    """FLOPs per token by part; a multiply-add is two."""

    projections: float
    proxy_projections: float
    mlp: float
    logits: float
    attention: float
    proxy_scoring: float
    kl: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class TokenFlops:
    """Per token: the forward alone, as at inference, and a training step (forward and backward)."""

    forward: Flops
    training: Flops


def flops_per_token(
    config: ModelConfig, context_length: int, *, phase: Literal["warmup", "sparse"] = "sparse"
) -> TokenFlops:
    """FLOPs per token, averaged over a full row that is one document of `context_length` tokens.

    Assumptions:
    - Matrix products only: norms, RoPE, softmax, top-k and the embedding lookup are left out.
    - Dense attention reads the (S + 1) / 2 causal keys of a mean query, not S. Window, random and MSA layers read the
      keys that `config.density` counts: exact as long as the own block is forced, an upper bound with
      num_local_blocks=0 (where an earlier, full block may take its place the count is low by less than a block).
    - Scores and values take 2 head_dim each per query head and key.
    - Proxy scoring is quadratic and counted in full: 2 proxy_dim per proxy and causal key (the index term of the
      paper's F_MSA). It has no backward: nothing differentiates through the top-k.
    - The KL is paid in training only. It needs the group's scores (2 head_dim per query head) and the proxies'
      (2 proxy_dim per proxy) on its support, the selected keys, or all causal ones in the warm-up; its backward goes
      to the proxies' queries and keys, twice the proxies' scores.
    - Backward of everything else is twice its forward. The proxies' projections have a gradient to their weights only
      when their input is detached, so once their forward.
    - Regrouped layers make keys and values once per query head; shared layers choose nothing but have a KL.
    - Work done again to save memory (a fused kernel's scores, activation checkpointing) is not counted.
    - In the warm-up, layers that proxies serve attend densely and nothing is selected; window and random layers are as
      ever.
    """
    c = config
    causal = (context_length + 1) / 2
    selected = density(context_length, c.block_size, c.top_k_blocks) * causal
    choosing, served = len(c.proxy_layers), len(c.served_layers)
    dense = c.attention_kinds.count("dense") + (served if phase == "warmup" else 0)
    keys = dense * causal + (c.num_layers - dense) * selected
    proxy_score = 2 * c.num_proxies * c.proxy_dim
    again = c.d_model * c.head_dim * 2 * (c.num_query_heads - c.num_kv_heads) * c.attention_kinds.count("regrouped")
    kl_keys = served * (causal if phase == "warmup" else selected)
    forward = Flops(
        projections=2 * (c.num_layers * _attention_weights(c) + again),
        proxy_projections=2 * choosing * _proxy_weights(c),
        mlp=2 * 3 * c.d_model * sum(c.mlp_widths),
        logits=2 * c.d_model * c.vocab_size,
        attention=4 * c.num_query_heads * c.head_dim * keys,
        proxy_scoring=0 if phase == "warmup" else choosing * proxy_score * causal,
        kl=0,
    )
    training = Flops(
        projections=3 * forward.projections,
        proxy_projections=(2 if c.detach_proxy_input else 3) * forward.proxy_projections,
        mlp=3 * forward.mlp,
        logits=3 * forward.logits,
        attention=3 * forward.attention,
        proxy_scoring=forward.proxy_scoring,
        kl=kl_keys * (2 * c.num_query_heads * c.head_dim + 3 * proxy_score),
    )
    return TokenFlops(forward, training)


@dataclass(frozen=True, kw_only=True)
class Unmatched(RunConfig):
    """An arm that `match` could not bring to the common number of parameters: it is reported, and never trained."""

    reason: str
    """Why, and what would help."""


def match(runs: Sequence[RunConfig]) -> list[RunConfig]:
    """Give every arm the total of the largest one by widening MLPs.

    Units are spread evenly over the layers, the first ones taking the remainder, in multiples of 8 where that leaves
    less than 0.1 % of the total, else of 4, 2 or 1. An arm that others fork from stays as it is. An arm that no width
    brings within 0.1 %, or that would be narrower than its stem, comes back as `Unmatched`, so that a sweep names it
    among the failed and trains the others.
    """
    stems = _stems(runs)
    target = _target(runs, stems)
    return [run if arm_folder(run) in stems else _widened(run, target, stems.get(run.train.fork_from)) for run in runs]


def _stems(runs: Sequence[RunConfig]) -> dict[str, RunConfig]:
    sources = {run.train.fork_from for run in runs}
    return {folder: run for run in runs if (folder := arm_folder(run)) in sources}


def _target(runs: Sequence[RunConfig], stems: dict[str, RunConfig]) -> int:
    arms = [run for run in runs if arm_folder(run) not in stems] or list(runs)
    return max((count_parameters(run.model).total for run in arms), default=0)


def _widened(run: RunConfig, target: int, stem: RunConfig | None) -> RunConfig:
    model, widths = run.model, run.model.mlp_widths
    need = target - count_parameters(model).total
    for step in (8, 4, 2, 1):
        steps, quantum = round(need / (3 * model.d_model * step)), 3 * model.d_model * step
        if any(width % step for width in widths) or abs(need - steps * quantum) >= TOLERANCE * target:
            continue
        each, more = divmod(steps, model.num_layers)
        wider = tuple(width + step * (each + (layer < more)) for layer, width in enumerate(widths))
        if stem is not None and any(a < b for a, b in zip(wider, stem.model.mlp_widths, strict=True)):
            return _unmatched(
                run,
                f"model.mlp_width={_widths(wider)}: a fork may only be wider than its stem {stem.arm}; "
                f"try {stem.model.mlp_width}",
            )
        width = wider if len(set(wider)) > 1 else wider[0]
        return run if wider == widths else replace(run, model=replace(model, mlp_width=width))
    unit = 3 * model.d_model
    return _unmatched(
        run,
        f"model.mlp_width={model.mlp_width}: no width comes within {TOLERANCE:.1%} of the {target:,} parameters of the "
        f"largest arm (one unit is {unit:,}); try a proxy_dim or d_model that makes the difference of {need:,} a "
        "multiple of it",
    )


def _unmatched(run: RunConfig, reason: str) -> Unmatched:
    held = {field.name: getattr(run, field.name) for field in fields(RunConfig)}
    return Unmatched(**held, reason=reason)


class Row(NamedTuple):
    """One arm of a study; `difference` is what it has more than the largest arm that is compared."""

    arm: str
    total: int
    non_embedding: int
    proxy: int
    mlp_width: str
    difference: int
    percent: float
    is_stem: bool


def table(runs: Sequence[RunConfig]) -> list[Row]:
    """One row per arm, in the study's order; after `match`, `difference` is the remainder that widths left."""
    stems = _stems(runs)
    target = _target(runs, stems)
    rows = {}
    for run in runs:
        count = count_parameters(run.model)
        difference = count.total - target
        rows[arm_folder(run)] = Row(
            run.arm,
            count.total,
            count.non_embedding,
            count.proxy,
            _widths(run.model.mlp_widths),
            difference,
            100 * difference / target,
            arm_folder(run) in stems,
        )
    return list(rows.values())


def _widths(widths: tuple[int, ...]) -> str:
    low, high = min(widths), max(widths)
    return str(low) if low == high else f"{high} x{widths.count(high)}, {low} x{widths.count(low)}"


def format_table(runs: Sequence[RunConfig]) -> str:
    """`table` as text, with the training FLOPs of each arm's sparse phase."""
    flops = {run.arm: flops_per_token(run.model, run.data.context_length).training.total for run in runs}
    lines = [
        f"{'arm':<16}{'total':>15}{'non-embedding':>15}{'proxies':>13}{'difference':>12}{'%':>9}"
        f"{'FLOPs/token':>13}  MLP width"
    ]
    for row in table(runs):
        compared = f"{row.difference:>+12,}{row.percent:>+9.4f}" if not row.is_stem else f"{'stem':>12}{'':>9}"
        lines.append(
            f"{row.arm:<16}{row.total:>15,}{row.non_embedding:>15,}{row.proxy:>13,}{compared}"
            f"{flops[row.arm]:>13.3e}  {row.mlp_width}"
        )
    refused = {run.arm: run.reason for run in runs if isinstance(run, Unmatched)}
    lines += [f"{arm}: cannot be matched: {reason}" for arm, reason in refused.items()]
    far = [row for row in table(runs) if not row.is_stem and abs(row.percent) >= 100 * TOLERANCE]
    if any(row.arm not in refused for row in far):
        lines.append(f"not matched to {TOLERANCE:.1%}: let runs() return msa_lab.budget.match(...)")
    return "\n".join(lines)


def format_model(config: ModelConfig, context_length: int) -> str:
    """Parameters and FLOPs of one model by part, and the MLP widths of a dense model of its size."""
    if context_length < 1:
        raise ValueError(f"context_length={context_length}: must be at least 1; try 4096")
    count, flops = count_parameters(config), flops_per_token(config, context_length)
    lines = [f"parameters  {name:<18}{value:>16,}" for name, value in count._asdict().items()]
    lines += [f"parameters  {name:<18}{getattr(count, name):>16,}" for name in ("non_embedding", "total")]
    for name in (*Flops._fields, "total"):
        forward, training = getattr(flops.forward, name), getattr(flops.training, name)
        lines.append(f"FLOPs/token {name:<18}{forward:>16,.0f} forward {training:>16,.0f} training")
    if count.proxy:
        arms = [RunConfig(arm="msa", model=config), RunConfig(arm="dense", model=replace(config, attention="dense"))]
        twin, row = match(arms)[1], table(match(arms))[1]
        told = f"MLP width {row.mlp_width}: {row.difference:+,} parameters ({row.percent:+.4f} %)"
        lines.append(f"dense twin  {twin.reason if isinstance(twin, Unmatched) else told}")
    return "\n".join(lines)
