"""Time selection, sparse attention and a whole training step, stage by stage and as a whole, against dense attention.

Everything is timed in one process, one call of each in turn, so that what the GPU does in the course of time (clocks,
temperature) strikes all alike: median, least and most of `--repeats` rounds by CUDA events, after `--warmup` rounds
that pay for compilation. "forward" is `select_blocks` and `sparse_attention` together; "step" is `msa_attention` with
the KL, its value included, and all gradients; "dense step" is dense attention with its gradients, and "warm-up step"
adds the proxies' KL over all tokens and its gradients. These times begin on an idle GPU and so contain what the host
takes to launch; "device" is the median (on disk also the least and the most) where the GPU first waits until all is
launched, as in a training that keeps it busy. The stages are timed in that way too; one that is called several times
(windows) is summed. Stages of a step's KL and backward are parts of these two. The selection that is attended to is
either

    selected by proxies   what `select_blocks` chose from random inputs: neighbouring queries agree by chance alone
    overlap               a planted one: of its neighbour's blocks, a query keeps each with probability `--keep`

Dense attention is cuDNN's, through PyTorch, and FlashAttention-4's where `flash_attn.cute` is installed. Peak memory is
above the inputs; launches are kernels that the profiler saw in one call. Nothing is asserted. Examples:

    python kernels/benchmarks/bench_gpu.py
    python kernels/benchmarks/bench_gpu.py --sequence 16384 --only step "dense step" --profile
"""

import argparse
import contextlib
import datetime
import functools
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from bench_ops import show_profile
from msa_kernels import Selection, dense_attention, dense_proxy_kl, msa_attention, select_blocks, sparse_attention
from msa_kernels.cute import by_flex
from msa_kernels.dispatch import PATHS
from stages import HEAD_START, STAGES, stage_times
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

OPERATIONS = ("forward", "step", "warm-up step", "select_blocks", "sparse_attention", "dense", "dense step")
PEERS = {"forward": "dense", "step": "dense step", "warm-up step": "dense step"}
"""What an operation is compared with."""
VERSIONS = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "flash-attn-4", "quack-kernels", "triton")
SAMPLE = 4096
"""Queries at the end of the sequence whose agreement with their neighbours is reported."""

Call = Callable[[], object]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [2**power for power in range(11, 20)]
    parser.add_argument(
        "--sequence", type=int, nargs="+", default=lengths, metavar="S", help="lengths (default: 2K, 4K ... 512K)"
    )
    sizes = {"batch": 1, "heads": 16, "kv-heads": 2, "proxies": 4, "proxy-kv-heads": 1, "dim": 128, "proxy-dim": 128}
    for name, default in (sizes | {"block-size": 128, "top-k-blocks": 16}).items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="default: %(default)s")
    parser.add_argument("--path", choices=PATHS, default="cute", help="default: %(default)s; stages are cute's alone")
    parser.add_argument("--keep", type=float, default=0.95, metavar="P", help="of the overlap (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="rounds before (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="rounds measured (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, metavar="WHAT", help=", ".join(OPERATIONS))
    parser.add_argument("--profile", action="store_true", help="also show the longest kernels of each operation")
    default = Path("runs/bench_gpu.json")
    parser.add_argument("--json", type=Path, default=default, metavar="FILE", help="measurements (%(default)s)")
    return parser.parse_args()


def planted(
    batch: int, num_proxies: int, sequence: int, slots: int, block_size: int, keep: float, device: str
) -> Selection:
    """The own block and random earlier ones, of which each query keeps its predecessor's with probability `keep`.

    Slot i holds a block from i, i + slots - 1, i + 2 (slots - 1) and so on, so that no two slots can hold the same.
    """
    generator = torch.Generator(device).manual_seed(0)
    query = torch.arange(sequence, device=device)[:, None]
    own, slot = query // block_size, torch.arange(slots - 1, device=device)
    choices = (own - slot + slots - 2).clamp(min=0) // max(slots - 1, 1)
    shape = batch, num_proxies, sequence, slots - 1
    drawn = (torch.rand(shape, device=device, generator=generator) * choices).long().minimum(choices - 1)
    first = (choices == 1) & (query % block_size == 0)
    fresh = (torch.rand(shape, device=device, generator=generator) >= keep) | first
    since = torch.where(fresh, query, 0).cummax(2).values
    ids = slot + (slots - 1) * drawn.gather(2, since)
    ids = torch.where(choices > 0, ids, sequence)
    blocks = torch.cat([ids, own.expand(batch, num_proxies, -1, -1)], 3).sort(3).values
    return Selection(torch.where(blocks == sequence, -1, blocks).int(), block_size)


def agreement(selection: Selection) -> float:
    """Share of the earlier blocks of a query that its neighbour of the same block selects too."""
    last = selection.blocks[:, :, -SAMPLE:]
    own = torch.arange(selection.blocks.shape[2], device=last.device)[-SAMPLE:, None] // selection.block_size
    earlier = (last[:, :, 1:] >= 0) & (last[:, :, 1:] < own[1:]) & (own[1:] == own[:-1])
    same = (last[:, :, 1:, :, None] == last[:, :, :-1, None, :]).any(4)
    return (same & earlier).sum().item() / max(earlier.sum().item(), 1)


class Inputs(NamedTuple):
    """Random tensors of one length, and what flows back into the output and the KLs."""

    q_proxy: Tensor
    k_proxy: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    weights: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Those that learn, proxies first."""
        return tuple(x.detach().requires_grad_() for x in self[:5])


def inputs(options: argparse.Namespace, sequence: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(0)

    def tensor(heads: int, dim: int) -> Tensor:
        shape = options.batch, sequence, heads, dim
        return torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, options.dtype))

    proxies = (tensor(heads, options.proxy_dim) for heads in (options.proxies, options.proxy_kv_heads))
    main = (tensor(heads, options.dim) for heads in (options.heads, options.kv_heads, options.kv_heads))
    return Inputs(*proxies, *main, tensor(options.heads, options.dim), torch.ones(options.proxies, device="cuda"))


def dense_operations(given: Inputs, path: str) -> dict[str, Call]:
    """Dense attention by each library that is here, alone, with its gradients, and the warm-up on it."""
    leaves = given.leaves

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    kinds: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"cuDNN": cudnn}
    with contextlib.suppress(ImportError):
        from flash_attn.cute.interface import flash_attn_func

        def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = flash_attn_func(q, k, v, causal=True)
            return found[0] if isinstance(found, tuple) else found

        kinds["FlashAttention-4"] = flash

    @torch.enable_grad()
    def step(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> object:
        return torch.autograd.grad(attention(*leaves[2:]), leaves[2:], given.upstream)

    @torch.enable_grad()
    def warm_up() -> object:
        out, lse = dense_attention(*leaves[2:], backend=path)
        assert lse is not None
        kl = dense_proxy_kl(*leaves[:4], lse, backend=path)
        return torch.autograd.grad((out, kl), leaves, (given.upstream, given.weights))

    calls: dict[str, Call] = {"warm-up step, all tokens": warm_up}
    for name, attention in kinds.items():
        calls[f"dense, {name}"] = functools.partial(attention, *given[2:5])
        calls[f"dense step, {name}"] = functools.partial(step, attention)
    return calls


def operations(options: argparse.Namespace, sequence: int) -> tuple[dict[str, Call], dict[str, float]]:
    """What to time, by name, and the agreement of neighbours in each selection."""
    given = inputs(options, sequence)
    leaves = given.leaves
    rule = {"top_k_blocks": options.top_k_blocks, "block_size": options.block_size, "backend": options.path}

    def select() -> Selection:
        return select_blocks(given.q_proxy, given.k_proxy, **rule)

    def attend(selection: Selection) -> object:
        return sparse_attention(given.q, given.k, given.v, selection, backend=options.path)

    chosen = select()
    sizes = options.batch, options.proxies, sequence, options.top_k_blocks, options.block_size
    overlap = planted(*sizes, options.keep, "cuda")

    def forward_overlap() -> object:
        select()
        return attend(overlap)

    @torch.enable_grad()
    def step(selection: Selection | None = None) -> object:
        # Where it is given, it still is selected as if it were not.
        own = select()
        found = msa_attention(*leaves, selection=selection or own, backend=options.path)
        return torch.autograd.grad((found.out, found.kl), leaves, (given.upstream, given.weights))

    calls: dict[str, Call] = {
        "forward, selected by proxies": lambda: attend(select()),
        "forward, overlap": forward_overlap,
        "step, selected by proxies": step,
        "step, overlap": lambda: step(overlap),
        "select_blocks": select,
        "sparse_attention, selected by proxies": lambda: attend(chosen),
        "sparse_attention, overlap": lambda: attend(overlap),
        **dense_operations(given, options.path),
    }
    if options.only:
        calls = {name: call for name, call in calls.items() if name.split(",")[0] in options.only}
    return calls, {"proxies": agreement(chosen), "overlap": agreement(overlap)}


def whole_time(call: Call, head_start: int = 0) -> float:
    """Milliseconds of a call on a GPU that is idle, or that has `head_start` clock ticks to wait."""
    torch.cuda.synchronize()
    if head_start:
        torch.cuda._sleep(head_start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def cost(call: Call) -> dict[str, float]:
    """Peak of memory above what is held already, in MiB, and kernels launched by one warmed-up call."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type.name == "CUDA"]
    copies = sum(event.count for event in events if event.key.startswith(("Memcpy", "Memset")))
    return {"peak_mib": peak, "launches": sum(event.count for event in events) - copies, "copies": copies}


def measure(calls: dict[str, Call], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each call, and behind some one for each of its stages; a call that fails says why."""
    rows: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {}
    launched: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in list(calls.items()):
        try:
            for _ in range(options.warmup):
                call()
            rows[name] = cost(call)
        except (RuntimeError, ValueError) as error:  # out of memory, or what does not take this size
            rows[name] = {"failed": str(error).strip().splitlines()[0]}
            del calls[name]
            torch.cuda.empty_cache()
    with_stages = STAGES if by_flex(options.block_size) is None else ("forward",)
    staged = [name for name in calls if options.path == "cute" and name.split(",")[0] in with_stages]
    for _ in range(options.repeats):
        for name, call in calls.items():
            times.setdefault(name, []).append(whole_time(call))
            launched[name].append(whole_time(call, HEAD_START))
        for name in staged:
            for stage, spent in stage_times(name.split(",")[0], calls[name]).items():
                times.setdefault(f"{name}: {stage}", []).append(spent)
    for name, found in times.items():
        spread = {"median_ms": statistics.median(found), "least_ms": min(found), "most_ms": max(found)}
        busy = launched.get(name, found)
        device = {"device_ms": statistics.median(busy), "device_least_ms": min(busy), "device_most_ms": max(busy)}
        rows[name] = spread | device | rows.get(name, {})
    wholes = [name for name in rows if ": " not in name]
    order = [name for whole in wholes for name in rows if name == whole or name.startswith(f"{whole}: ")]
    return [{"operation": name, **rows[name]} for name in order]


def show(sequence: int, rows: list[dict[str, Any]]) -> None:
    """Print the rows; the last column compares with what FlashAttention-4 takes for its peer, or else cuDNN."""
    medians = {row["operation"]: row["median_ms"] for row in rows if "median_ms" in row}
    for row in rows:
        whole, _, stage = row["operation"].partition(": ")
        line = f"{sequence:8d}  {'    ' + stage if stage else whole:40}"
        if "failed" in row:
            line += f"failed: {row['failed'][:100]}"
        else:
            line += "".join(f"{row[key]:10.3f}" for key in ("median_ms", "least_ms", "most_ms", "device_ms"))
        if "launches" in row:
            line += f"{row['peak_mib']:10.0f}{row['launches']:10d}"
            peer = PEERS.get(whole.split(",")[0])
            dense = medians.get(f"{peer}, FlashAttention-4", medians.get(f"{peer}, cuDNN"))
            line += f"{dense / row['median_ms']:9.2f}x" if dense else ""
        print(line, flush=True)


def code() -> str:
    """The commit of this checkout, with a + where files differ from it; empty outside of one."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    with contextlib.suppress(OSError):
        return subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, check=False).stdout.strip()
    return ""


def environment(written: Path) -> dict[str, Any]:
    """Device, versions, date, code, and the command without the folder that it writes to."""
    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        versions["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        **versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "code": code(),
        "command": " ".join(["python", *(word.replace(str(written), written.name) for word in sys.argv)]),
    }


@torch.no_grad()
def main() -> None:
    options = arguments()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu.py: needs a CUDA GPU; bench_ops.py also runs on a CPU")
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    result: dict[str, Any] = {
        "environment": environment(options.json),
        "settings": settings,
        "rows": [],
        "agreement": [],
    }
    print(", ".join(f"{key} {value}" for key, value in result["environment"].items() if key != "command"))
    columns = ("median ms", "least", "most", "device", "peak MiB", "launches", "x dense")
    heads = "".join(f"{name:>10}" for name in columns)
    print(f"{'sequence':>8}  {'operation':40}{heads}", flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for sequence in options.sequence:
        try:
            calls, agreed = operations(options, sequence)
        except (torch.cuda.OutOfMemoryError, ValueError) as error:
            print(f"{sequence:8d}  left out: {str(error).splitlines()[0]}", flush=True)
            continue
        rows = measure(calls, options)
        show(sequence, rows)
        if options.profile:
            for name, call in calls.items():
                print(f"{'':10}{name}")
                show_profile(call, "cuda")
        result["rows"] += [{"sequence": sequence, **row} for row in rows]
        result["agreement"].append({"sequence": sequence, **agreed})
        # After each length, so that a run that is cut off keeps what it measured.
        options.json.write_text(json.dumps(result, indent=2) + "\n")
        del calls
        torch.cuda.empty_cache()
    if not result["rows"]:
        sys.exit("bench_gpu.py: nothing could be measured")


if __name__ == "__main__":
    main()
