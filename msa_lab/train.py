"""Train one run: start, fork or resume it, and leave a finished folder behind."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from safetensors.torch import save
from torch.utils import deterministic

from msa_lab.callbacks import Checkpoints, Progress, StepMetrics, StopOnSignal, Validation, WholeCheckpoints
from msa_lab.config import RunConfig
from msa_lab.config_io import to_dict
from msa_lab.environment import describe
from msa_lab.learner import Learner
from msa_lab.recorder import SelectionRecorder
from msa_lab.result import Timekeeper, summarise
from msa_lab.runs import Run, whole
from msa_lab.start import check, open_corpus, starting_checkpoint, tracking_identity, warn_if_dense
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
        check(config, devices)
        make_deterministic(config.train.deterministic)
        data = open_corpus(config, run, root, cache)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        environment = describe(config, device, {"hash": data.hash, **data.manifest})
        checkpoint = starting_checkpoint(config, run, root, environment["path"], first_process)
        warn_if_dense(config)
        if first_process:
            environment["wandb_id"] = tracking_identity(run)
            run.write_json("environment.json", environment)
        _fit(config, run, data, environment, checkpoint, progress=progress, wandb=wandb, devices=devices)
    return run


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
    plain, first_process = to_dict(config), int(os.environ.get("LOCAL_RANK", "0")) == 0
    if first_process:  # another's half-written file would be cleared away when this one takes the folder's lock
        run.write_config(config)
    mirror = wandb_mirror(run, plain, wandb, environment["wandb_id"]) if first_process else None
    log = MetricsLog(run, mirror)
    learner = Learner(plain, environment["path"], data)
    validation, time = Validation(data), Timekeeper(log, resumed=checkpoint == run.path / "last.ckpt")
    callbacks: list[L.Callback] = [time, StopOnSignal(), StepMetrics(), validation]
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
        weights = {name: value.contiguous() for name, value in learner.model.state_dict().items()}
        with whole(run.path / "model.safetensors") as file:
            file.write(save(weights))
        scores = validation.latest
        run.write_json("result.json", summarise(config, run, data, environment, scores, time))
        (run.path / "fork.ckpt").unlink(missing_ok=True)


def _trainer(config: RunConfig, log: MetricsLog, callbacks: list[L.Callback], devices: int) -> L.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for noise in (".*does not have many workers.*", ".*LeafSpec.*is deprecated.*", ".*srun. command is available.*"):
        warnings.filterwarnings("ignore", message=noise)
    return L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision="bf16-mixed" if config.train.precision == "bf16" else "32-true",
        logger=log,
        callbacks=callbacks,
        plugins=[WholeCheckpoints()],
        max_steps=config.train.last_step,
        max_epochs=-1,
        accumulate_grad_batches=config.train.accumulate,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
