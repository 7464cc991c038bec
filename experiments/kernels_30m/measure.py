"""Does a model that trains on the kernels do what the reference says, and how fast is it?

    python experiments/kernels_30m/measure.py agree    gradients at steps 0, 100 and 300 against fp64, for each length
    python experiments/kernels_30m/measure.py curve    300 steps against the reference and its own rounding
    python experiments/kernels_30m/measure.py speed    tokens/s of MSA, dense and flex, for each length
    python experiments/kernels_30m/measure.py together tokens/s of one MSA run, and of three at once on one GPU

Needs a CUDA GPU and `msa-lab prepare --data.max_bytes 200000000 --bpe 8192`.

`agree` trains on the kernels, stops at each of these steps and takes one row of the next batch. The kernels' selections
of that row are given to three computations of loss and gradients from the same weights: the kernels in bf16, the
reference in bf16, the reference in fp64. A tensor's error is its distance to fp64 in the L2 norm, relative. The choices
themselves are compared with those that the reference makes in fp32 from the same proxies.
Speeds are of deterministic mode, a run's default; `speed --free` measures without it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from agreement import choices, compare
from study import LENGTHS, runs
from torch import Tensor

from msa_lab.config import RunConfig
from msa_lab.config_io import to_dict
from msa_lab.data import open_data
from msa_lab.evaluate import autocast
from msa_lab.learner import Learner, Part, Parts, schedule
from msa_lab.train import make_deterministic

STEPS = (0, 100, 300)
Report = Iterator[tuple[str, dict[str, Any]]]
"""Of one thing after the other: its name and what was found."""


def on_gpu(part: Part) -> Part:
    offsets = None if part.cu_seqlens is None else part.cu_seqlens.cuda()
    return Part(part.inputs.cuda(), part.targets.cuda(), offsets, part.draw.cuda(), part.weight)


class Training:
    """A model, its optimizer and its data, a step at a time: what `msa-lab train` does, within one process."""

    def __init__(self, config: RunConfig, path: str, cache: str, *, compiled: bool = True) -> None:
        train = replace(config.train, compile=compiled)
        self.config, self.step = replace(config, train=train), 0
        self.learner = Learner(to_dict(self.config), path).cuda()
        self.optimizer = self.learner.configure_optimizers()
        self.parts = iter(Parts(open_data(config.data, cache), self.config, 0, 0, 1))

    def advance(self) -> Tensor:
        """One step; gives the loss and the KL, still on the device."""
        train, part = self.config.train, on_gpu(next(self.parts))
        for group in self.optimizer.param_groups:
            proxy = group["role"] == "proxy"
            group["lr"] = (train.proxy_lr if proxy else train.lr) * schedule(train, self.step)
        with autocast(torch.device("cuda"), "bf16"):
            ce, kl = self.learner.losses(part, self.step >= train.sparse_step)
        loss = ce if kl is None else ce + train.kl_weight * kl.mean(1).sum()
        loss.backward()
        for role, limit in (("base", train.clip), ("proxy", train.proxy_clip)):
            groups = [group["params"] for group in self.optimizer.param_groups if group["role"] == role]
            if groups:
                torch.nn.utils.clip_grad_norm_([p for group in groups for p in group], limit or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return torch.stack([ce.detach(), ce.new_zeros(()) if kl is None else kl.detach().mean(1).sum()])


def agree(lengths: list[int], cache: str) -> Report:
    """For each length and step: errors against fp64."""
    for config in (c for c in runs(max(STEPS), cache, tuple(lengths)) if c.model.attention == "msa"):
        training = Training(config, "cute", cache)
        one_row = replace(config, train=replace(config.train, batch_size=1, compile=False))
        for stop in STEPS:
            while training.step < stop:
                training.advance()
            part = on_gpu(next(iter(Parts(open_data(config.data, cache), one_row, stop, 0, 1))))
            for sparse in (False, True):
                phase = "sparse" if sparse else "warm-up"
                found = compare(copy.deepcopy(training.learner.model), config, part, sparse=sparse)
                yield f"{config.arm}, step {stop}, {phase}", found
            yield f"{config.arm}, step {stop}, choices", choices(training.learner.model, config, part)


def curve(lengths: list[int], cache: str, steps: int) -> Report:
    """Loss and KL of every step: the kernels, the reference, and the reference from weights rounded once to bf16."""
    for config in (c for c in runs(steps, cache, tuple(lengths)) if c.model.attention == "msa"):
        config = replace(config, train=replace(config.train, batch_size=1))
        lines = {}
        for name, path in (("kernels", "cute"), ("reference", "reference"), ("reference, rounded", "reference")):
            training = Training(config, path, cache, compiled=path == "cute")
            if "rounded" in name:
                for parameter in training.learner.model.parameters():
                    parameter.data = parameter.data.bfloat16().float()
            lines[name] = torch.stack([training.advance() for _ in range(steps)]).double().cpu()
        gap = (lines["kernels"] - lines["reference"]).abs().mean(0).tolist()
        own = (lines["reference, rounded"] - lines["reference"]).abs().mean(0).tolist()
        yield (
            config.arm,
            {
                "mean_gap_of_loss_and_kl": gap,
                "gap_between_references": own,
                "curves": {name: line.tolist() for name, line in lines.items()},
            },
        )


def rates(training: Training, steps: int) -> dict[str, Any]:
    """tokens/s, median and 10th to 90th percentile of runs of ten steps, after twenty to warm up; peak memory."""
    config, found = training.config, []
    for turn in range(2 + steps // 10):
        if turn == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            training.advance()
        torch.cuda.synchronize()
        found.append(10 * config.train.batch_size * config.data.context_length / (time.perf_counter() - began))
    least, *_, most = statistics.quantiles(found[2:], n=10)
    return {
        "tokens_per_second": statistics.median(found[2:]),
        "10% to 90%": [least, most],
        "peak_memory_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def speed(lengths: list[int], cache: str, steps: int) -> Report:
    """Dense, and MSA on each path and in each phase."""
    # What all others are compared with comes first.
    for config in sorted(runs(steps, cache, tuple(lengths)), key=lambda config: config.model.attention != "dense"):
        if config.model.attention == "dense":
            kinds = [("", "cute", True)]
        else:
            kinds = [
                (f", {path}, {'sparse' if sparse else 'warm-up'}", path, sparse)
                for path in ("cute", "flex")
                for sparse in (True, False)
            ]
        for kind, path, sparse in kinds:
            # What an earlier one compiled counts towards a limit of this process, and is held until it is collected.
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
            train = replace(config.train, proxy_warmup_steps=0 if sparse else config.train.steps)
            yield config.arm + kind, rates(Training(replace(config, train=train), path, cache), steps)


def one_of(config: RunConfig, cache: str, steps: int, gate: Barrier) -> float:
    """Warm up, wait for the others, and say how fast the steps were that all took at once."""
    make_deterministic(config.train.deterministic)
    training = Training(config, "cute", cache)
    for _ in range(10):
        training.advance()
    torch.cuda.synchronize()
    gate.wait(600)
    return float(rates(training, steps)["tokens_per_second"])


def together(lengths: list[int], cache: str, steps: int, most: int = 3) -> Report:
    """Total tokens/s of the sparse phase, of one process and of several that share the GPU."""
    spawn = get_context("spawn")
    for config in (c for c in runs(steps, cache, tuple(lengths)) if c.model.attention == "msa"):
        sparse = replace(config, train=replace(config.train, proxy_warmup_steps=0))
        for number in (1, most):
            with spawn.Manager() as manager, ProcessPoolExecutor(number, spawn) as pool:
                gate = manager.Barrier(number)
                waiting = [pool.submit(one_of, sparse, cache, steps, gate) for _ in range(number)]
                found = [one.result() for one in waiting]
            yield f"{config.arm}, {number} at once", {"tokens_per_second": found, "total": sum(found)}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("agree", "curve", "speed", "together"))
    parser.add_argument("--length", type=int, nargs="+", default=list(LENGTHS), help="tokens a row (%(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="curve: 300; speed, together: 100")
    parser.add_argument("--free", action="store_true", help="speed: without deterministic mode")
    parser.add_argument("--cache", default="data", help="folder of prepared corpora")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where the tables go")
    args = parser.parse_args()
    if args.free and args.what != "speed":
        parser.error(f"--free: is for speed, not for {args.what}")
    if not torch.cuda.is_available():
        sys.exit("measure.py: needs a CUDA GPU")
    if args.what == "speed":
        make_deterministic(not args.free)
    found = {
        "agree": lambda: agree(args.length, args.cache),
        "curve": lambda: curve(args.length, args.cache, args.steps or 300),
        "speed": lambda: speed(args.length, args.cache, args.steps or 100),
        "together": lambda: together(args.length, args.cache, args.steps or 100),
    }[args.what]()
    report: dict[str, object] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    report["command"] = " ".join(["python experiments/kernels_30m/measure.py", *sys.argv[1:]])
    args.out.mkdir(parents=True, exist_ok=True)
    some = [] if args.length == list(LENGTHS) else [str(length) for length in args.length]
    path = args.out / ("_".join([args.what, *["free"] * args.free, *some]) + ".json")
    for name, one in found:
        print(name, {key: value for key, value in one.items() if key != "curves"}, flush=True)
        report[name] = one
        # At once: what comes later may be cut off.
        path.write_text(json.dumps(report, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
