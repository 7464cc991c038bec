"""What a run starts from: its corpus, its own last checkpoint or its stem's end, and what must fit together."""

from __future__ import annotations

import pickle
import secrets
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from msa_lab.budget import Unmatched
from msa_lab.callbacks import WholeCheckpoints
from msa_lab.config import RunConfig
from msa_lab.config_io import to_dict
from msa_lab.data import open_data
from msa_lab.fork import fork_checkpoint
from msa_lab.result import stem_costs
from msa_lab.runs import Run
from msa_lab.stem import stem_of

if TYPE_CHECKING:
    from msa_lab.data import Data


def open_corpus(config: RunConfig, run: Run, root: str | Path, cache: str | Path) -> Data:
    """The run's tokens.

    Raises:
        ValueError: The model's vocabulary is too small for them, or the run's earlier start, its stem or another run
            of the study read others.
    """
    data = open_data(config.data, cache)
    if config.model.vocab_size < data.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size}: the tokenizer {config.data.tokenizer!r} has "
            f"{data.vocab_size} tokens; try {data.vocab_size}"
        )
    earlier = [run] if (run.path / "environment.json").exists() else []
    if config.train.fork_from and not (run.path / "last.ckpt").exists():
        earlier.append(stem_of(config, root))
    for other in earlier:
        held = other.environment["corpus"]["hash"]
        if held != data.hash:
            raise ValueError(
                f"{other.path}: trained on corpus {held}, but it hashes to {data.hash} now (other packages or files); "
                "bring that one back, or start under another study name"
            )
    if not config.data.expected_hash:
        _check_study(config, run, data)
    return data


def _check_study(config: RunConfig, run: Run, data: Data) -> None:
    """A study that outlives an update of what it reads must not compare models of two corpora."""
    for path in sorted(run.path.parents[1].glob("*/*/environment.json")):
        other = Run(path.parent)
        try:
            same = replace(other.config.data, expected_hash="") == config.data
            held = other.environment["corpus"]["hash"]
        except (ValueError, KeyError, TypeError):  # a folder that nobody can compare with
            continue
        if same and held != data.hash:
            raise ValueError(
                f"data.source={config.data.source!r}: hashes to {data.hash} now, but {other.path} of this study read "
                f"{held}; bring that one back, take another study name, or allow both: data.expected_hash={data.hash}"
            )


def check(config: RunConfig, devices: int) -> None:
    """Refuse an unmatched arm, or a batch that does not divide among the devices."""
    train = config.train
    if isinstance(config, Unmatched):
        raise ValueError(f"{config.arm}: {config.reason}")
    if devices < 1:
        raise ValueError(f"devices={devices}: must be at least 1; try 1")
    if torch.cuda.is_available() and devices > torch.cuda.device_count():
        raise ValueError(f"devices={devices}: this machine has {torch.cuda.device_count()} GPUs")
    if train.batch_size % (devices * train.accumulate):
        raise ValueError(
            f"train.batch_size={train.batch_size}: must be a multiple of devices x accumulate = "
            f"{devices * train.accumulate}; try {devices * train.accumulate}"
        )


def warn_if_dense(config: RunConfig) -> None:
    """Say so where a sparse run would read nearly everything."""
    if config.hides_sparsity:
        warnings.warn(
            f"{config.model.top_k_blocks} blocks of {config.model.block_size} cover {config.density:.1%} of the causal "
            f"pairs of {config.data.context_length} tokens: this run is dense in all but name, and is marked so",
            stacklevel=3,
        )


def starting_checkpoint(config: RunConfig, run: Run, root: str | Path, path: str, first_process: bool) -> Path | None:
    """last.ckpt of a run that was cut short, the stem's end made into a first checkpoint, or nothing."""
    last, fork = run.path / "last.ckpt", run.path / "fork.ckpt"
    if last.exists():
        try:
            held = torch.load(last, map_location="cpu", weights_only=True, mmap=True)["hyper_parameters"]["config"]
        except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            reason = str(error).split(".")[0]
            raise ValueError(f"{last}: cannot be read ({reason}); remove it to start this run anew") from None
        if held != to_dict(config):
            raise ValueError(f"{last}: belongs to another config; move it away to start this run anew")
        return last
    if not config.train.fork_from:
        return None
    stem = stem_of(config, root)
    if first_process:
        run.write_config(config)
        WholeCheckpoints().save_checkpoint({**fork_checkpoint(config, stem, path), "callbacks": stem_costs(stem)}, fork)
    return fork


def tracking_identity(run: Run) -> str:
    """The run's name at wandb: made once, kept over resumes."""
    held = run.environment.get("wandb_id") if (run.path / "environment.json").exists() else None
    return held or secrets.token_hex(4)
