"""What happens around the training steps: validation, checkpoints, stopping on a signal, and the progress line."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from msa_lab.evaluate import score
from msa_lab.learner import Learner
from msa_lab.runs import Run, whole

if TYPE_CHECKING:
    from msa_lab.data import Data


def stepped(learner: L.LightningModule, batch_idx: int) -> bool:
    """True after the last part of a batch, when the optimizer has stepped."""
    assert isinstance(learner, Learner)
    return (batch_idx + 1) % learner.train_config.accumulate == 0


class StepMetrics(L.Callback):
    """Logs the step before anything is saved, so that no checkpoint holds a step that was not logged or not finite."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if stepped(pl_module, batch_idx):
            pl_module.log_step()


class Validation(L.Callback):
    """Scores the fixed validation rows every `validate_every` steps and at the end.

    Metrics: `validation/loss` (nats per scored token), `validation/bits_per_byte` and `validation/accuracy` where the
    task has them. A model with proxies is dense in its warm-up phase, another model than it will be: its scores are
    then `validation/warmup/loss` and so on, so that no curve takes the switch for learning.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        self.latest: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        train, step = pl_module.train_config, trainer.global_step
        due = step % train.validate_every == 0 or step == train.last_step
        if not due or not stepped(pl_module, batch_idx) or not trainer.is_global_zero:
            return
        with pl_module.clock.paused():
            # The end is scored as the model will be used, whatever phase it ends in.
            sparse = pl_module.sparse or step == train.last_step
            self.latest = score(
                pl_module.model, self.data, pl_module.run_config, train.validation_batches, sparse=sparse
            )
        dense = not sparse and pl_module.run_config.model.proxy_layers
        group = "validation/warmup" if dense else "validation"
        metrics = {f"{group}/loss": self.latest["validation_loss"]}
        if self.latest["bits_per_byte"] is not None:
            metrics[f"{group}/bits_per_byte"] = self.latest["bits_per_byte"]
        if self.latest["accuracy_by_distance"]:
            answers = self.latest["accuracy_by_distance"].values()
            asked = sum(a["questions"] for a in answers)
            metrics[f"{group}/accuracy"] = sum(a["accuracy"] * a["questions"] for a in answers) / asked
        if trainer.logger is not None:
            trainer.logger.log_metrics(metrics, step)

    def state_dict(self) -> dict[str, Any]:
        """The newest scores: a run killed after its last checkpoint need not score again."""
        return {"latest": self.latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what the checkpoint holds."""
        self.latest = state_dict["latest"]


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints written where they belong, whole or not at all; Lightning's way needs as much memory and room in the
    temporary folder."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Store `checkpoint` as `path`."""
        with whole(Path(path)) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:
                # torch closes its archive after a failed write, and complains of that instead.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise


class Checkpoints(L.Callback):
    """Writes last.ckpt every `checkpoint_every` steps, at the end and when stopped."""

    def __init__(self, run: Run) -> None:
        self.run, self.saved = run, -1

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        train, step = pl_module.train_config, trainer.global_step
        due = step % train.checkpoint_every == 0 or step == train.last_step or trainer.should_stop
        if due and step != self.saved and stepped(pl_module, batch_idx):
            with pl_module.clock.paused():
                trainer.save_checkpoint(self.run.path / "last.ckpt")
            self.saved = step


class StopOnSignal(L.Callback):
    """Ctrl-C or SIGTERM ends training after the running step, so that it is saved; a second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        # Not earlier: Lightning's own handler, which would end training without saving, is in place by now.
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self.received = True
        for known, handler in self._before.items():
            signal.signal(known, handler)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not stepped(pl_module, batch_idx):
            return
        if trainer.world_size == 1:
            trainer.should_stop |= self.received
        elif trainer.global_step % pl_module.train_config.log_every == 0:
            # Processes must agree, which waits for the devices: only when that is waited for anyway.
            received = torch.tensor(float(self.received), device=pl_module.device)
            trainer.should_stop |= bool(trainer.strategy.reduce(received, reduce_op="sum") > 0)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Progress(L.Callback):
    """A bar with loss, KL, tokens/s, MFU and time left on a terminal; a plain line every so often elsewhere."""

    def __init__(self, title: str, *, seconds_between_lines: float = 20.0) -> None:
        self.title, self.pause = title, seconds_between_lines
        self.bar: Any = None
        self.task: Any = None
        self.said = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        self.began, self.first = time.monotonic(), trainer.global_step
        if not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.bar.start()
        last = pl_module.train_config.last_step
        self.task = self.bar.add_task(self.title, total=last, completed=trainer.global_step, numbers="")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero or not stepped(pl_module, batch_idx):
            return
        step, last, now = trainer.global_step, pl_module.train_config.last_step, time.monotonic()
        numbers = _numbers(getattr(trainer.logger, "latest", {}))
        if self.bar is not None:
            self.bar.update(self.task, completed=step, numbers=numbers)
        elif now - self.said >= self.pause or step == last:
            self.said = now
            left = (now - self.began) / max(1, step - self.first) * (last - step)
            print(f"{self.title}  step {step}/{last}  {numbers}  left {left:.0f} s", flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _numbers(latest: dict[str, float]) -> str:
    shown = []
    for name, label, form in (
        ("train/ce", "loss", "{:.3f}"),
        ("train/kl", "KL", "{:.3f}"),
        ("tokens_per_second", "tokens/s", "{:,.0f}"),
        ("mfu", "MFU", "{:.1%}"),
    ):
        if name in latest:
            shown.append(f"{label} {form.format(latest[name])}")
    return "  ".join(shown)
