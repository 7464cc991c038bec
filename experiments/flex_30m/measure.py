"""Measures training on this machine's GPUs and writes the numbers beside the study.

    python experiments/flex_30m/measure.py reproduce   the same run in two processes with cold compile caches: equal?
    python experiments/flex_30m/measure.py train       both models to their end, each killed once on the way
    python experiments/flex_30m/measure.py speed       tokens/s and memory, with and without deterministic mode
    python experiments/flex_30m/measure.py kernels     the MSA model for 200 sparse steps on each path, evaluated

With two GPUs the arms run side by side, one each, so that neither disturbs the other's timing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from study import runs

from msa_lab.config import RunConfig
from msa_lab.config_io import to_dict
from msa_lab.runs import Run


def launch(
    config: RunConfig, root: Path, gpu: int, caches: Path | None = None, kernels: str | None = None
) -> subprocess.Popen:
    """Start `msa-lab train` on one GPU, with compile caches of its own and on a kernel path where given."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"{config.arm}-{config.seed}.yaml"
    path.write_text(yaml.safe_dump(to_dict(config)))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    if caches is not None:
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    if kernels is not None:
        environment["MSA_KERNELS"] = kernels
    command = [sys.executable, "-m", "msa_lab.cli", "train", "--config", str(path), "--root", str(root)]
    log = (root / f"{config.arm}-{config.seed}.log").open("a")
    return subprocess.Popen([*command, "--wandb", "disabled"], env=environment, stdout=log, stderr=subprocess.STDOUT)


def finish(config: RunConfig, root: Path, gpu: int, caches: Path | None = None, kernels: str | None = None) -> Run:
    """Train to the end; an error shows the log's end."""
    if launch(config, root, gpu, caches, kernels).wait():
        print((root / f"{config.arm}-{config.seed}.log").read_text()[-3000:], flush=True)
        raise SystemExit(f"{config.arm}: failed")
    return Run.of(config, root)


def side_by_side(jobs: list, at_once: int) -> list:
    """What the jobs return, run so many at a time; the first error is raised when all have ended."""
    with ThreadPoolExecutor(at_once) as pool:
        return [done.result() for done in [pool.submit(job) for job in jobs]]


def short(config: RunConfig, steps: int, **train: object) -> RunConfig:
    """The config for a few steps with the switch to sparse half way."""
    changed = replace(
        config.train, steps=steps, proxy_warmup_steps=steps // 2, warmup_steps=5, **({"log_every": 10} | train)
    )
    return replace(config, train=changed, selections=replace(config.selections, records=0))


def reproduce(out: Path, steps: int) -> None:
    """Every logged number of two processes with cold caches, compared for equality."""
    gpus, report = torch.cuda.device_count(), {}
    folder = Path(tempfile.mkdtemp())
    configs = [short(config, steps, log_every=1) for config in runs()]

    def one(k: int, config: RunConfig) -> Run:
        return finish(config, folder / f"{k}", k % gpus, folder / f"cache-{config.arm}-{k}")

    jobs = [lambda k=k, c=c: one(k, c) for c in configs for k in (0, 1)]
    ended = side_by_side(jobs, len(jobs))
    pairs = {config.arm: ended[2 * i : 2 * i + 2] for i, config in enumerate(configs)}
    for arm, (first, second) in pairs.items():
        names = ["tokens_per_second", "mfu"]
        a, b = (r.metrics[~r.metrics.name.isin(names)].reset_index(drop=True) for r in (first, second))
        report[arm] = {
            "steps": steps,
            "numbers_compared": len(a),
            "identical": bool(a.equals(b)),
            "largest_difference": float((a.value - b.value).abs().max()),
        }
    write(out / "reproduce.json", report)


def speeds(run: Run, after: int) -> dict[str, float | str]:
    """tokens/s of the logged intervals after a step, and peak memory."""
    table = run.metrics
    seen = table[(table.name == "tokens_per_second") & (table.step > after)].value
    quantiles = {f"tokens_per_second_{q}%": float(seen.quantile(q / 100)) for q in (10, 50, 90)}
    result = run.result
    return quantiles | {"peak_memory_gib": (result["peak_memory_bytes"] or 0) / 2**30, "path": result["path"]}


def speed(out: Path, steps: int) -> None:
    """tokens/s of the second half and peak memory, deterministic and not, one arm a GPU."""
    gpus, report = torch.cuda.device_count(), {}
    folder = Path(tempfile.mkdtemp())

    def both(i: int, config: RunConfig) -> None:
        for on in (True, False):
            run = finish(short(config, steps, deterministic=on), folder / str(on), i % gpus)
            report[f"{config.arm}, {'' if on else 'not '}deterministic"] = speeds(run, steps // 2 + 20)

    side_by_side([lambda i=i, c=c: both(i, c) for i, c in enumerate(runs())], gpus)
    write(out / "speed.json", report)


def kernels(out: Path, steps: int) -> None:
    """The MSA model from one seed on each path: 20 warm-up steps, then sparse ones; speed, losses, evaluation."""
    config = runs()[0]
    train = replace(config.train, steps=steps + 20, proxy_warmup_steps=20, warmup_steps=20, log_every=10)
    config = replace(config, train=replace(train, validate_every=100), selections=replace(config.selections, records=4))
    folder, report = Path(tempfile.mkdtemp()), {}
    for path in ("flex", "cute"):
        run = finish(config, folder / path, 0, kernels=path)
        table = run.metrics
        losses = {
            f"{name} at step {step}": float(table[(table.name == name) & (table.step == step)].value.iloc[0])
            for name in ("train/ce", "train/kl")
            for step in (20, 30, 100, steps + 20)
        }
        report[path] = speeds(run, 60) | {"bits_per_byte": run.result["bits_per_byte"]} | losses
        (out / f"environment_{path}.json").write_text((run.path / "environment.json").read_text())
    write(out / "kernels.json", report)


def train(out: Path, root: Path, steps: int) -> None:
    """Both arms to the end; each is killed (SIGKILL) once when it is at least a third through, and resumed."""
    gpus, report = torch.cuda.device_count(), {}

    def killed_once(i: int, config: RunConfig) -> None:
        run, process = Run.of(config, root), launch(config, root, i % gpus)
        while process.poll() is None and (run.metrics.empty or run.metrics.step.max() < steps // 3):
            time.sleep(1)
        at = int(run.metrics.step.max()) if not run.metrics.empty else 0
        process.kill()
        process.wait()
        finish(config, root, i % gpus)
        table, result = run.metrics, run.result
        logged, every = table[table.name == "train/ce"].step.tolist(), config.train.log_every
        speeds = table[table.name == "tokens_per_second"].set_index("step").value
        keep = ("steps", "tokens", "wall_seconds", "parameters", "bits_per_byte", "bigram_bits_per_byte")
        report[config.arm] = {name: result[name] for name in (*keep, "validation_loss", "flops_per_token", "path")} | {
            "killed_at_step": at,
            "logged_steps_missing": len(set(range(every, steps + 1, every)) - set(logged)),
            "logged_steps_twice": len(logged) - len(set(logged)),
            "tokens_per_second_warmup": float(speeds[speeds.index <= config.train.sparse_step].median()),
            "tokens_per_second_sparse": float(speeds[speeds.index > config.train.sparse_step + 40].median()),
            "peak_memory_gib": (result["peak_memory_bytes"] or 0) / 2**30,
            "selection_log_mb": sum(f.stat().st_size for f in run.path.rglob("selections.zarr/**/*") if f.is_file())
            / 1e6,
        }
        names = ["train/ce", "train/kl", "validation/bits_per_byte", "tokens_per_second"]
        table[table.name.isin(names)].to_csv(out / f"curve_{config.arm}.csv", index=False)
        (out / f"environment_{config.arm}.json").write_text((run.path / "environment.json").read_text())

    side_by_side([lambda i=i, c=c: killed_once(i, c) for i, c in enumerate(runs(steps))], gpus)
    ratio = report["msa"]["tokens_per_second_sparse"] / report["dense"]["tokens_per_second_sparse"]
    write(out / "train.json", {**report, "msa_over_dense_tokens_per_second": ratio})


def write(path: Path, report: dict) -> None:
    """Store a table with what it was measured on, and show it."""
    where = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "command": " ".join(sys.argv)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**where, **report}, indent=2) + "\n")
    print(path.read_text(), flush=True)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("reproduce", "speed", "kernels", "train"))
    parser.add_argument(
        "--steps", type=int, default=0, help="steps a run (reproduce: 40, speed: 200, kernels: 200, train: 4000)"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where the tables go")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where `train` keeps its runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "reproduce":
        reproduce(args.out, args.steps or 40)
    elif args.what == "speed":
        speed(args.out, args.steps or 200)
    elif args.what == "kernels":
        kernels(args.out, args.steps or 200)
    else:
        train(args.out, args.root, args.steps or 4000)


if __name__ == "__main__":
    main()
