"""Train one run: start, fork or resume it, and leave a finished folder behind."""

from __future__ import annotations

import logging
import os
import secrets
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from safetensors.torch import save_file
from torch.utils import deterministic

from msa_lab.budget import count_parameters, flops_per_token
from msa_lab.callbacks import Checkpoints, Progress, StopOnSignal, Validation
from msa_lab.config import RunConfig
from msa_lab.config_io import config_hash, to_dict
from msa_lab.data import open_data
from msa_lab.environment import describe
from msa_lab.evaluate import score
from msa_lab.fork import fork_checkpoint, stem_of
from msa_lab.learner import Learner
from msa_lab.recorder import SelectionRecorder
from msa_lab.runs import Run
from msa_lab.tracking import MetricsLog, wandb_mirror

if TYPE_CHECKING:
    from msa_lab.data import Data


class TrainingStoppedError(Exception):
    """Training was stopped by a signal, after saving."""


def train(
    config: RunConfig,
    *,
    root: str | Path = "runs",
    cache: str | Path = "data",
    progress: bool = True,
    wandb: str = "offline",
    devices: int = 1,
) -> Run:
    """Train `config` to its end and return its folder; a finished run is returned at once, an unfinished one resumed.

    Args:
        config: The run.
        root: Folder of all runs.
        cache: Folder of prepared corpora.
        progress: Show a bar (on a terminal) or lines.
        wandb: `offline`, `online` or `disabled`.
        devices: GPUs of this machine (or processes on a CPU) that share each batch.

    Raises:
        TrainingStoppedError: Ctrl-C or SIGTERM; the run is saved, and the same call goes on with it.
        ValueError: The config cannot be trained here, or another process trains this run.
    """
    run = Run.of(config, root)
    if run.finished:
        return run
    first_process = int(os.environ.get("LOCAL_RANK", "0")) == 0
    with run.lock() if first_process else nullcontext():
        data = _open(config, cache)
        _check(config, data, devices)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        environment = describe(config, device, {"hash": data.hash, **data.manifest})
        checkpoint = _starting_checkpoint(config, run, root, environment["path"], first_process)
        if first_process:
            environment["wandb_id"] = _identity(run)
            run.write_json("environment.json", environment)
        _fit(config, run, data, environment, checkpoint, progress=progress, wandb=wandb, devices=devices)
    return run


def _open(config: RunConfig, cache: str | Path) -> Data:
    data = open_data(config.data, cache)
    if config.model.vocab_size < data.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size}: the tokenizer {config.data.tokenizer!r} has "
            f"{data.vocab_size} tokens; try {data.vocab_size}"
        )
    return data


def _check(config: RunConfig, data: Data, devices: int) -> None:
    train = config.train
    if train.batch_size % (devices * train.accumulate):
        raise ValueError(
            f"train.batch_size={train.batch_size}: must be a multiple of devices x accumulate = "
            f"{devices * train.accumulate}; try {devices * train.accumulate}"
        )
    if config.hides_sparsity:
        warnings.warn(
            f"{config.model.top_k_blocks} blocks of {config.model.block_size} cover {config.density:.1%} of the causal "
            f"pairs of {config.data.context_length} tokens: this run is dense in all but name, and is marked so",
            stacklevel=3,
        )


def _starting_checkpoint(config: RunConfig, run: Run, root: str | Path, path: str, first_process: bool) -> Path | None:
    """last.ckpt of a run that was cut short, the stem's end made into a first checkpoint, or nothing."""
    last, fork = run.path / "last.ckpt", run.path / "fork.ckpt"
    if last.exists():
        held = torch.load(last, map_location="cpu", weights_only=True, mmap=True)["hyper_parameters"]["config"]
        if held != to_dict(config):
            raise ValueError(f"{last}: belongs to another config; move it away to start this run anew")
        return last
    if not config.train.fork_from:
        return None
    stem = stem_of(config, root)
    if first_process:
        run.write_config(config)
        partial = run.path / ".fork.ckpt.partial"
        torch.save(fork_checkpoint(config, stem, path), partial)
        partial.replace(fork)
    return fork


def _identity(run: Run) -> str:
    """The run's name at wandb: made once, kept over resumes."""
    held = run.environment.get("wandb_id") if (run.path / "environment.json").exists() else None
    return held or secrets.token_hex(4)


def make_deterministic(on: bool) -> None:
    """Ask every library for results that repeat bit for bit; must come before the first CUDA call to be complete."""
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.benchmark = False
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Filling what is about to be overwritten costs bandwidth and decides nothing.
        deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        if torch.cuda.is_available():
            import torch._inductor.config as inductor

            # Choices that are timed on the device change the order of sums from process to process.
            inductor.deterministic = True


def _fit(
    config: RunConfig,
    run: Run,
    data: Data,
    environment: dict[str, Any],
    checkpoint: Path | None,
    *,
    progress: bool,
    wandb: str,
    devices: int,
) -> None:
    run.write_config(config)
    make_deterministic(config.train.deterministic)
    plain, first_process = to_dict(config), int(os.environ.get("LOCAL_RANK", "0")) == 0
    mirror = wandb_mirror(run, plain, wandb, environment["wandb_id"]) if first_process else None
    log = MetricsLog(run, mirror)
    learner = Learner(plain, environment["path"], data)
    validation, stop = Validation(data), StopOnSignal()
    callbacks: list[L.Callback] = [_Timekeeper(log), stop, validation]
    if config.selections.records and any(kind != "dense" for kind in config.model.attention_kinds):
        callbacks.append(SelectionRecorder(run, config, data))
    callbacks.append(Checkpoints(run))
    if progress:
        callbacks.append(Progress(f"{config.arm} seed {config.seed}"))
    trainer = _trainer(config, log, callbacks, devices)
    trainer.fit(learner, ckpt_path=checkpoint, weights_only=True)
    if trainer.global_step < config.train.last_step:
        raise TrainingStoppedError(
            f"{run.path}: stopped and saved at step {trainer.global_step} of {config.train.last_step}; "
            "run the same command again to go on"
        )
    if trainer.is_global_zero:
        save_file(
            {name: value.contiguous() for name, value in learner.model.state_dict().items()},
            run.path / "model.safetensors",
        )
        scores = validation.latest or score(learner.model, data, config, config.train.validation_batches)
        run.write_json("result.json", _result(config, run, data, environment, scores, learner))
        (run.path / "fork.ckpt").unlink(missing_ok=True)


def _trainer(config: RunConfig, log: MetricsLog, callbacks: list[L.Callback], devices: int) -> L.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    return L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision="bf16-mixed" if config.train.precision == "bf16" else "32-true",
        logger=log,
        callbacks=callbacks,
        max_steps=config.train.last_step,
        max_epochs=-1,
        accumulate_grad_batches=config.train.accumulate,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


class _Timekeeper(L.Callback):
    """Adds up the wall time of a run over its restarts, and rewinds the metrics to where training goes on."""

    def __init__(self, metrics: MetricsLog) -> None:
        self.metrics, self.seconds, self.began = metrics, 0.0, time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.metrics.rewind(trainer.global_step)
        self.began = time.perf_counter()

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.elapsed}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.seconds = state_dict["seconds"]

    @property
    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.began


def _result(
    config: RunConfig,
    run: Run,
    data: Data,
    environment: dict[str, Any],
    scores: dict[str, Any],
    learner: Learner,
) -> dict[str, Any]:
    model, train, parameters = config.model, config.train, count_parameters(config.model)
    per_step = train.batch_size * config.data.context_length
    rows = train.validation_batches * train.batch_size
    sparse = flops_per_token(model, config.data.context_length, phase="sparse").training.total
    warmup = flops_per_token(model, config.data.context_length, phase="warmup").training.total
    own = train.last_step - train.fork_step
    warmup_steps = min(own, train.proxy_warmup_steps)
    before = stem_of(config, run.path.parents[2]).result if train.fork_from else {}
    seconds = next(c for c in learner.trainer.callbacks if isinstance(c, _Timekeeper)).elapsed  # pyright: ignore
    metrics = run.metrics
    speed = metrics.loc[metrics["name"] == "tokens_per_second", "value"].to_numpy()
    return {
        "study": config.study,
        "arm": config.arm,
        "seed": config.seed,
        "config_hash": config_hash(config),
        "attention": list(model.attention_kinds),
        "steps": train.last_step,
        "tokens": train.last_step * per_step,
        "wall_seconds": seconds + before.get("wall_seconds", 0.0),
        "tokens_per_second": float(np.median(speed[len(speed) // 2 :])) if len(speed) else None,
        "parameters": {
            "total": parameters.total,
            "non_embedding": parameters.non_embedding,
            "embedding": parameters.embedding,
            "proxy": parameters.proxy,
        },
        "flops_per_token": sparse,
        "flops_total": before.get("flops_total", 0.0)
        + per_step * (warmup_steps * warmup + (own - warmup_steps) * sparse),
        "bigram_bits_per_byte": data.bigram_bits_per_byte(rows),
        **scores,
        "path": environment["path"],
        "path_reason": environment["path_reason"],
        "corpus_hash": data.hash,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "density": config.density,
        "hides_sparsity": config.hides_sparsity,
    }
