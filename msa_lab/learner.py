"""The LightningModule: loss, two optimizer groups with their own rate and clipping, and what is logged of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import torch
from jaxtyping import Float, Int32, Int64
from msa_kernels.cute import by_flex
from msa_kernels.selection import row_keys
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from msa_lab.budget import flops_per_token
from msa_lab.config import RunConfig, TrainConfig
from msa_lab.config_io import from_dict
from msa_lab.cost import peak_flops
from msa_lab.model import Transformer

if TYPE_CHECKING:
    from msa_lab.data import Data


class Part(NamedTuple):
    """The share of one step's batch that one device computes at a time."""

    inputs: Int64[Tensor, "batch sequence"]
    targets: Int64[Tensor, "batch sequence"]
    cu_seqlens: Int32[Tensor, " offsets"] | None
    draw: Int64[Tensor, " batch"]
    """A number per row, from (seed, step, row), for random blocks."""
    weight: float
    """Scored tokens here over the mean of all parts, so that parts average to the whole batch's mean."""


class Parts(IterableDataset):
    """The parts of every step from `first_step` on; nothing to save, because a batch is a function of (seed, step)."""

    def __init__(self, data: Data, config: RunConfig, first_step: int, rank: int, world: int) -> None:
        self.data, self.config, self.first_step, self.rank, self.world = data, config, first_step, rank, world

    def __iter__(self) -> Iterator[Part]:
        train, step = self.config.train, self.first_step
        rows = train.batch_size // (self.world * train.accumulate)
        while True:
            batch = self.data.batch(self.config.seed, step, train.batch_size)
            scored = (batch.targets >= 0).sum(1).double()
            for i in range(train.accumulate):
                start = (self.rank * train.accumulate + i) * rows
                part = slice(start, start + rows)
                offsets = batch.cu_seqlens
                if offsets is not None:
                    length = batch.inputs.shape[1]
                    offsets = (offsets.clamp(start * length, (start + rows) * length) - start * length).contiguous()
                draw = row_keys(self.config.seed, step, 0, torch.arange(start, start + rows))
                weight = float(scored[part].mean() / scored.mean())
                yield Part(batch.inputs[part], batch.targets[part], offsets, draw, weight)
            step += 1


def schedule(train: TrainConfig, step: int, first: int = 0) -> float:
    """The learning rate's factor at `step` for a group whose schedule starts at step `first`; 1 is the peak.

    Warm-up is linear from `first`. `cosine` then falls to the end. `wsd` stays at 1 and falls linearly in the last
    `decay_fraction` of all steps, at the same step for both groups.
    """
    since, length = step - first, train.steps - first
    warmup = min(train.warmup_steps, length)
    if since < warmup:
        return (since + 1) / warmup
    if train.schedule == "cosine":
        progress = (since - warmup) / max(1, length - warmup)
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        decay = round(train.decay_fraction * train.steps)
        fall = min(1.0, (train.steps - step) / decay) if decay else 1.0
    return train.min_lr_ratio + (1 - train.min_lr_ratio) * fall


class Clock:
    """Training time between two readings, without what is paused."""

    def __init__(self) -> None:
        self.started, self.tokens, self.left_out = time.perf_counter(), 0, 0.0

    def read(self) -> float:
        """Tokens per second since the last reading."""
        now = time.perf_counter()
        rate = self.tokens / max(now - self.started, 1e-9)
        self.started, self.tokens = now, 0
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before = time.perf_counter()
        yield
        seconds = time.perf_counter() - before
        self.started += seconds
        self.left_out += seconds


class Learner(L.LightningModule):
    """Trains a `Transformer` as a `RunConfig` says.

    Args:
        config: The run as plain values (`config_io.to_dict`), so that a checkpoint holds nothing else.
        backend: Kernel path; None lets `msa_kernels` decide.
        data: Where training rows come from; not needed to load a checkpoint.
    """

    def __init__(self, config: dict[str, Any], backend: str | None = None, data: Data | None = None) -> None:
        super().__init__()
        self.save_hyperparameters({"config": config, "backend": backend})
        self.run_config: RunConfig = from_dict(config)
        self.train_config = self.run_config.train
        self.data = data
        self.model = Transformer(
            self.run_config.model,
            backend,
            seed=self.run_config.seed,
            activation_checkpointing=self.train_config.activation_checkpointing,
        )
        if self.train_config.kl_weight == 0:
            # Without the KL nothing trains the proxies, and DDP refuses parameters that never get a gradient.
            for _, parameter in self.model.proxy_parameters():
                parameter.requires_grad_(False)
        self.clock = Clock()
        self._sums: list[Tensor] = []
        self._norms: dict[str, Tensor] = {}
        self._speed_known = False

    @cached_property
    def losses(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """`_losses`, or that compiled and, where nothing forbids it, replayed as CUDA graphs.

        A host needs longer to launch the kernels of a small model's step than a GPU to run them. Gradients that add up
        over parts would be overwritten by the next replay; FlexAttention, which serves documents and small blocks on
        every path, and several processes were not tried. Decided at the first step: processes are known then.
        """
        train = self.train_config
        if not train.compile:
            return self._losses
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        ours = self.hparams["backend"] == "cute" and by_flex(self.run_config.model.block_size) is None
        allowed = train.cuda_graphs and train.accumulate == 1 and ours and not self.run_config.data.document_mask
        graphs = allowed and alone and torch.cuda.is_available()
        return torch.compile(self._losses, dynamic=False, mode="reduce-overhead" if graphs else None)

    def _losses(self, part: Part, sparse: bool) -> tuple[Float[Tensor, ""], Float[Tensor, "served_layer proxy"] | None]:
        output = self.model(
            part.inputs, part.cu_seqlens, sparse=sparse, with_kl=self.train_config.kl_weight > 0, draw=part.draw
        )
        ce = F.cross_entropy(output.logits.flatten(0, 1).float(), part.targets.flatten(), ignore_index=-100)
        return ce, output.kl

    def training_step(self, part: Part, batch_idx: int) -> Float[Tensor, ""]:
        """Cross-entropy plus `kl_weight` x the sum over layers of the proxies' mean KL (paper, section "training")."""
        inputs = Part(*part[:4], weight=1.0)  # the weight stays outside: a new value must not compile anew
        ce, kl = self.losses(inputs, self.sparse)
        loss = ce * part.weight
        if kl is not None:
            loss = loss + self.train_config.kl_weight * kl.mean(1).sum()
        logged = [ce.detach()[None].float() * part.weight]
        if kl is not None:
            logged.append(kl.detach().flatten().float())
        self._sums.append(torch.cat(logged))
        self.clock.tokens += part.inputs.numel() * self.trainer.world_size
        return loss

    @property
    def sparse(self) -> bool:
        """False while this step belongs to the warm-up phase."""
        return self.global_step >= self.train_config.sparse_step

    def train_dataloader(self) -> DataLoader:
        """Batches from the step that training has reached on."""
        assert self.data is not None
        parts = Parts(self.data, self.run_config, self.global_step, self.global_rank, self.trainer.world_size)
        return DataLoader(parts, batch_size=None, pin_memory=self.device.type == "cuda")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over three groups; role says which rate and which clipping a group has."""
        proxies = [p for _, p in self.model.proxy_parameters() if p.requires_grad]
        proxy_ids = {id(p) for p in proxies}
        base = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in proxy_ids]
        plain = [p for n, p in base if p.ndim < 2 or n == "embedding.weight"]
        decayed = [p for n, p in base if p.ndim >= 2 and n != "embedding.weight"]
        train = self.train_config
        groups: list[dict[str, Any]] = [
            {"params": decayed, "role": "base", "lr": train.lr, "weight_decay": train.weight_decay},
            {"params": plain, "role": "base", "lr": train.lr, "weight_decay": 0.0},
        ]
        if proxies:
            groups.append({"params": proxies, "role": "proxy", "lr": train.proxy_lr, "weight_decay": 0.0})
        return torch.optim.AdamW(groups, betas=(0.9, train.beta2), eps=1e-8, fused=torch.cuda.is_available())

    def on_train_start(self) -> None:
        """The first reading of the clock after a start holds set-up and compilation, and is not logged."""
        self._speed_known = False

    def on_train_batch_start(self, batch: Part, batch_idx: int) -> None:
        """Set the rates of the coming step: a function of the step alone, so there is no scheduler to restore."""
        train = self.train_config
        for group in self._groups():
            proxy = group["role"] == "proxy"
            first = train.fork_step if proxy else 0
            group["lr"] = (train.proxy_lr if proxy else train.lr) * schedule(train, self.global_step, first)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip base and proxies apart: one must not shrink the other's step."""
        limits = {"base": self.train_config.clip, "proxy": self.train_config.proxy_clip}
        for role, limit in limits.items():
            groups = [group["params"] for group in optimizer.param_groups if group["role"] == role]
            if groups:
                parameters = [p for group in groups for p in group]
                self._norms[role] = torch.nn.utils.clip_grad_norm_(parameters, limit or math.inf)

    def log_step(self) -> None:
        """Write the row of the step just taken where one is due; only then is the device waited for."""
        train, step = self.train_config, self.global_step
        if step % train.log_every and step not in (train.fork_step + 1, train.last_step):
            self._sums.clear()
            return
        mean = torch.stack(self._sums[-train.accumulate :]).mean(0)
        self._sums.clear()
        if self.trainer.world_size > 1:
            mean = self.trainer.strategy.reduce(mean, reduce_op="mean")
        values = mean.tolist()
        if not math.isfinite(sum(values)):
            raise FloatingPointError(
                f"step {step}: the loss is not finite; lower train.lr or look at the data of this step"
            )
        metrics = {"train/ce": values[0], **self._kl_metrics(values[1:])}
        metrics["train/loss"] = values[0] + train.kl_weight * metrics.get("train/kl", 0.0)
        metrics |= {f"grad_norm/{role}": float(norm) for role, norm in self._norms.items()}
        metrics |= {f"lr/{group['role']}": group["lr"] for group in self._groups()}
        # The step just taken decides its phase, not the one that comes next.
        metrics["phase"] = float(step - 1 >= train.sparse_step)
        metrics |= self._speed()
        if self.logger is not None:
            self.logger.log_metrics(metrics, step)

    def _kl_metrics(self, values: list[float]) -> dict[str, float]:
        layers = self.run_config.model.served_layers
        if not values:
            return {}
        proxies, metrics, total = len(values) // len(layers), {}, 0.0
        for row, layer in enumerate(layers):
            own = values[row * proxies : (row + 1) * proxies]
            metrics[f"train/kl/layer{layer}"] = sum(own) / proxies
            metrics |= {f"train/kl/layer{layer}/proxy{p}": value for p, value in enumerate(own)}
            total += sum(own) / proxies
        return {"train/kl": total, **metrics}

    def _speed(self) -> dict[str, float]:
        rate, known = self.clock.read(), self._speed_known
        self._speed_known = True
        if not known:
            return {}
        speed = {"tokens_per_second": rate}
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        if peak := peak_flops(name):
            config = self.run_config
            phase = "sparse" if self.global_step - 1 >= config.train.sparse_step else "warmup"
            flops = flops_per_token(config.model, config.data.context_length, phase=phase).training.total
            speed["mfu"] = rate * flops / (peak * self.trainer.world_size)
        return speed

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        return optimizer.param_groups
