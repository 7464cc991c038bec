"""Stems: which run a fork goes on from, and what of it a fork may change.

Apart from `msa_lab.fork`, so that a study can be checked before anything is trained and without loading PyTorch.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from msa_lab.config import RunConfig
from msa_lab.runs import Run

_MAY_DIFFER = {
    "model": {
        "attention",
        "mlp_width",
        "block_size",
        "top_k_blocks",
        "num_local_blocks",
        "num_sink_blocks",
        "num_proxies",
        "num_proxy_kv_heads",
        "proxy_dim",
        "proxy_rope",
        "detach_proxy_input",
    },
    "data": {"expected_hash"},
    "train": {
        "stop_at",
        "fork_from",
        "fork_step",
        "proxy_lr",
        "proxy_clip",
        "kl_weight",
        "proxy_warmup_steps",
        "log_every",
        "validate_every",
        "validation_batches",
        "checkpoint_every",
    },
}


def stem_of(config: RunConfig, root: str | Path) -> Run:
    """The run that `train.fork_from` names: an arm's folder below `root` (the same seed's run), or a run folder.

    Raises:
        ValueError: It is missing or unfinished, ends at another step, or differs in what a fork may not change.
    """
    name = config.train.fork_from
    places = [Run(Path(root) / name / f"seed{config.seed}"), Run(Path(name))]
    run = next((run for run in places if run.finished), None)
    if run is None:
        begun = next((run for run in places if (run.path / "config.yaml").exists()), None)
        state = f"the run in {begun.path} has not finished" if begun else f"no finished run there (seed {config.seed})"
        raise ValueError(f"train.fork_from={name!r}: {state}; train the stem first")
    if not (run.path / "last.ckpt").exists():
        raise ValueError(f"train.fork_from={name!r}: {run.path} holds no last.ckpt to go on from; train the stem again")
    check_fork(config, run.config)
    return run


def check_fork(config: RunConfig, stem: RunConfig) -> None:
    """Whether `config` may go on where `stem` ends.

    Raises:
        ValueError: It forks at another step, changes more than attention, proxies and MLP width, or narrows an MLP.
    """
    last = stem.train.last_step
    if last != config.train.fork_step:
        raise ValueError(f"train.fork_step={config.train.fork_step}: the stem ends at step {last}; try {last}")
    if config.seed != stem.seed:
        raise ValueError(f"seed={config.seed}: the stem's is {stem.seed}, and a fork goes on with its data order")
    for section, allowed in _MAY_DIFFER.items():
        ours, theirs = getattr(config, section), getattr(stem, section)
        for field in fields(ours):
            value, held = getattr(ours, field.name), getattr(theirs, field.name)
            if field.name not in allowed and value != held:
                raise ValueError(
                    f"{section}.{field.name}={value!r}: a fork may change attention, proxies and MLP width only; "
                    f"the stem has {held!r}"
                )
    if any(kind != "dense" for kind in stem.model.attention_kinds) and stem.model.attention != config.model.attention:
        raise ValueError(f"train.fork_from: the stem's attention is {stem.model.attention!r}; fork from a dense stem")
    for layer, (ours, theirs) in enumerate(zip(config.model.mlp_widths, stem.model.mlp_widths, strict=True)):
        if ours < theirs:
            raise ValueError(f"model.mlp_width={ours} in layer {layer}: the stem has {theirs}; a fork can only widen")
