"""What runs cost before they are trained: tokens and FLOPs by formula, time by the speed of what has been trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from msa_lab.budget import flops_per_token
from msa_lab.config import RunConfig
from msa_lab.runs import Run, arm_folder, complete_lines

UNKNOWN = "nothing: no run of this study has measured its speed; give --tokens_per_second, or --mfu on a known GPU"


class Cost(NamedTuple):
    """What a run itself trains on, without its stem."""

    tokens: int
    flops: float


def own_cost(config: RunConfig) -> Cost:
    """Tokens and FLOPs of the run from its start, or from its fork, by `budget.flops_per_token`."""
    train, length = config.train, config.data.context_length
    steps = train.last_step - train.fork_step
    warmup_steps = min(steps, train.proxy_warmup_steps)
    per_step = train.batch_size * length
    warmup = flops_per_token(config.model, length, phase="warmup").training.total
    sparse = flops_per_token(config.model, length, phase="sparse").training.total
    return Cost(steps * per_step, per_step * (warmup_steps * warmup + (steps - warmup_steps) * sparse))


class Assumed(NamedTuple):
    """A speed that the user states; it goes before what was measured."""

    tokens_per_second: float | None = None
    mfu: float | None = None
    gpu: str = ""

    def flops_per_second(self) -> float | None:
        """Of the stated share of the GPU's peak.

        Raises:
            ValueError: A number is not positive, both are given, or the GPU's peak is not known.
        """
        if self.tokens_per_second is not None and not self.tokens_per_second > 0:
            raise ValueError(f"tokens_per_second={self.tokens_per_second}: must be above 0; try 100000")
        if self.mfu is None:
            return None
        if self.tokens_per_second is not None:
            raise ValueError(f"mfu={self.mfu}: cannot go together with tokens_per_second; give one of them")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu={self.mfu}: is a share of the GPU's peak, above 0 and up to 1; try 0.3")
        peak = peak_flops(self.gpu)
        if peak is None:
            raise ValueError(f"gpu={self.gpu!r}: is no GPU whose peak is known; try H100, or give tokens_per_second")
        return self.mfu * peak


class Estimate(NamedTuple):
    """Seconds that a run takes alone on its GPU or slot, and what that rests on; None where nothing is known."""

    seconds: float | None
    basis: str


class Speeds:
    """Tokens per second of a study's runs: stated, else measured by its arm, else scaled by FLOPs from other arms."""

    def __init__(self, runs: Iterable[tuple[RunConfig, Run]], assumed: Assumed | None = None) -> None:
        self.assumed = assumed or Assumed()
        self.rate = self.assumed.flops_per_second()
        measured: dict[str, list[float]] = {}
        self.configs: dict[str, RunConfig] = {}
        for config, run in runs:
            speed = measured_speed(run)
            if speed:
                measured.setdefault(arm_folder(config), []).append(speed)
                self.configs[arm_folder(config)] = config
        self.measured = {arm: median(values) for arm, values in measured.items()}

    def estimate(self, config: RunConfig) -> Estimate:
        """For the whole of the run."""
        cost = own_cost(config)
        if self.assumed.tokens_per_second is not None:
            return Estimate(cost.tokens / self.assumed.tokens_per_second, "the stated tokens/s")
        if self.rate is not None:
            return Estimate(cost.flops / self.rate, f"the stated MFU of {self.assumed.mfu} on {self.assumed.gpu}")
        arm = arm_folder(config)
        if arm in self.measured:
            return Estimate(cost.tokens / self.measured[arm], "the speed measured on the arm itself")
        if self.measured:
            rate = median(self._flops_per_second(other) for other in self.measured)
            names = ", ".join(sorted(self.configs[other].arm for other in self.measured))
            return Estimate(cost.flops / rate, f"FLOPs at the rate measured on {names}")
        return Estimate(None, UNKNOWN)

    def _flops_per_second(self, arm: str) -> float:
        tokens, flops = own_cost(self.configs[arm])
        return self.measured[arm] * flops / tokens


def measured_speed(run: Run) -> float | None:
    """Tokens per second of a finished run, or the median of what an unfinished one has logged so far."""
    if run.finished:
        try:
            return run.result.get("tokens_per_second")
        except ValueError:
            return None
    lines = (line.split(",") for line in complete_lines(run.path / "metrics.csv").splitlines())
    values = [float(line[2]) for line in lines if len(line) == 3 and line[1] == "tokens_per_second"]
    return median(values[len(values) // 2 :]) if values else None


def makespan(seconds: Sequence[float], stems: Sequence[int | None], slots: int) -> float:
    """Seconds until all jobs are done, `slots` at a time in the given order, each after its stem (an index)."""
    ends: dict[int, float] = {}
    free = [0.0] * max(1, slots)

    def start(job: int) -> float:
        stem = stems[job]
        return max(min(free), ends[stem] if stem is not None else 0.0)

    waiting = list(range(len(seconds)))
    while waiting:
        first = min((job for job in waiting if stems[job] is None or stems[job] in ends), key=start)
        ends[first] = start(first) + seconds[first]
        free[free.index(min(free))] = ends[first]
        waiting.remove(first)
    return max(ends.values(), default=0.0)


_PEAK_TERAFLOPS = {
    r"GB[23]00": 2500,
    r"B[23]00": 2250,
    r"(H100|H200).*NVL": 835,
    r"H100.*PCIe": 756,
    r"(H100|H200|H800|GH200)": 989,
    r"H20": 148,
    r"(A100|A800)": 312,
    r"L40S": 362,
    r"L40": 181,
    r"L4": 121,
    r"RTX 5090": 209.5,
    r"RTX 4090": 165.2,
    r"RTX 3090": 71,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s with fp32 accumulation by the vendor's data sheet (never the 2:4-sparse number).

    `device_name` is what `torch.cuda.get_device_name()` returns; None for a device that is not in the table.
    """
    for pattern, teraflops in _PEAK_TERAFLOPS.items():
        if re.search(rf"\b{pattern}\b", device_name):
            return teraflops * 1e12
    return None
