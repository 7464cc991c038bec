"""What a finished run says of itself: `result.json`, and the account of time and arithmetic behind it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch

from msa_lab.budget import count_parameters, flops_per_token
from msa_lab.config import RunConfig
from msa_lab.config_io import config_hash
from msa_lab.cost import own_cost
from msa_lab.runs import Run
from msa_lab.tracking import MetricsLog

if TYPE_CHECKING:
    from msa_lab.data import Data


class Timekeeper(L.Callback):
    """Adds up a run's training time over its restarts, its stem's included, and rewinds the metrics at each start.

    Args:
        metrics: The run's log.
        resumed: A checkpoint of this run exists; otherwise nothing that an earlier try logged is kept.
    """

    def __init__(self, metrics: MetricsLog, *, resumed: bool) -> None:
        self.metrics, self.resumed = metrics, resumed
        self.seconds, self.stem_flops = 0.0, 0.0
        self.learner: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Training goes on from here."""
        self.metrics.rewind(trainer.global_step if self.resumed else -1)
        self.learner, self.began = pl_module, time.perf_counter()
        pl_module.clock.left_out = 0.0

    def state_dict(self) -> dict[str, float]:
        """For the checkpoint."""
        return {"seconds": self.elapsed, "stem_flops": self.stem_flops}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Time of earlier starts; at a fork, what the stem cost."""
        self.seconds, self.stem_flops = state_dict["seconds"], state_dict["stem_flops"]

    @property
    def elapsed(self) -> float:
        """Seconds of training, without validation, recording and saving."""
        if self.learner is None:
            return self.seconds
        return self.seconds + time.perf_counter() - self.began - self.learner.clock.left_out


def stem_costs(stem: Run) -> dict[str, dict[str, float]]:
    """The Timekeeper's state with which a fork of `stem` starts."""
    result = stem.result
    return {Timekeeper.__qualname__: {"seconds": result["wall_seconds"], "stem_flops": result["flops_total"]}}


def summarise(
    config: RunConfig,
    run: Run,
    data: Data,
    environment: dict[str, Any],
    scores: dict[str, Any],
    time: Timekeeper,
) -> dict[str, Any]:
    """The contents of result.json.

    `wall_seconds` and `flops_total` are those of the whole training, stem included; `flops_per_token` is a sparse
    step's by `budget.flops_per_token`; `tokens_per_second` is the median over the second half of the run's log.
    """
    model, train, parameters = config.model, config.train, count_parameters(config.model)
    metrics = run.metrics
    speed = metrics.loc[metrics["name"] == "tokens_per_second", "value"].to_numpy()
    return {
        "study": config.study,
        "arm": config.arm,
        "seed": config.seed,
        "config_hash": config_hash(config),
        "attention": list(model.attention_kinds),
        "steps": train.last_step,
        "tokens": train.last_step * train.batch_size * config.data.context_length,
        "wall_seconds": time.elapsed,
        "tokens_per_second": float(np.median(speed[len(speed) // 2 :])) if len(speed) else None,
        "parameters": {
            "total": parameters.total,
            "non_embedding": parameters.non_embedding,
            "embedding": parameters.embedding,
            "proxy": parameters.proxy,
        },
        "flops_per_token": flops_per_token(model, config.data.context_length, phase="sparse").training.total,
        "flops_total": time.stem_flops + own_cost(config).flops,
        "bigram_bits_per_byte": data.bigram_bits_per_byte(train.validation_batches * train.batch_size),
        **scores,
        "path": environment["path"],
        "path_reason": environment["path_reason"],
        "corpus_hash": data.hash,
        # Reserved, not allocated: what CUDA graphs hold is not among the latter.
        "peak_memory_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
        "density": config.density,
        "hides_sparsity": config.hides_sparsity,
    }
