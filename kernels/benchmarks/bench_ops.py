"""Time the operations of msa_kernels on the device at hand and write what was measured.

Each time is the median of `--repeats` after `--warmup` calls (which pay for compilation): CUDA events on a GPU, the
wall clock on a CPU. "+ bwd" is forward and backward together. Inputs are random, the worst case for a selection:
neighbouring queries agree on few blocks. Nothing is asserted. Example, the shape of a 30M-parameter model, and then
what its KL spends its time on:

    python kernels/benchmarks/bench_ops.py --sequence 4096 --batch 8 --heads 8 --kv-heads 2 --proxies 4 --dim 64 \\
        --top-k-blocks 4 --deterministic --json ops.json
    python kernels/benchmarks/bench_ops.py --batch 8 --deterministic --only proxy_kl dense_proxy_kl --profile
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msa_kernels import dense_attention, dense_proxy_kl, proxy_kl, select_blocks, select_path, sparse_attention
from msa_kernels.dispatch import PATHS
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

KERNELS_SHOWN = 12


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", choices=PATHS, help="reference, flex or cute; default: what the package would choose")
    parser.add_argument("--sequence", type=int, nargs="+", default=[4096], metavar="S", help="lengths (default: 4096)")
    for name, default in (("batch", 1), ("heads", 8), ("kv-heads", 2), ("proxies", 4), ("proxy-kv-heads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    parser.add_argument("--dim", type=int, default=64, metavar="D", help="of main and proxy heads (default: 64)")
    parser.add_argument("--block-size", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--top-k-blocks", type=int, default=4, metavar="K", help="default: 4")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, float32 on a CPU"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="calls before (default: 3)")
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="calls measured (default: 10)")
    parser.add_argument("--deterministic", action="store_true", help="measure as training runs: repeatable bit for bit")
    parser.add_argument("--only", nargs="+", metavar="OP", help="operations by name, such as sparse_attention")
    parser.add_argument(
        "--profile", action="store_true", help="also say whether device or host binds, and the longest kernels"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements here")
    return parser.parse_args()


def operations(options: argparse.Namespace, sequence: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """What to time, by name."""
    generator = torch.Generator(options.device).manual_seed(0)

    def tensor(heads: int) -> Tensor:
        shape = options.batch, sequence, heads, options.dim
        random = torch.randn(shape, device=options.device, generator=generator)
        return random.to(dtype).requires_grad_()

    q_proxy, k_proxy = proxies = tensor(options.proxies), tensor(options.proxy_kv_heads)
    q, k, v = main = tensor(options.heads), tensor(options.kv_heads), tensor(options.kv_heads)
    path = {"backend": options.path}
    rule = {"top_k_blocks": options.top_k_blocks, "block_size": options.block_size}
    with torch.no_grad():
        selection = select_blocks(q_proxy, k_proxy, **rule, **path)
        lse = sparse_attention(q, k, v, selection, **path)[1]
        dense_lse = dense_attention(q, k, v, **path)[1]
        assert dense_lse is not None
    upstream = torch.randn_like(q)

    def backward(compute: Callable[[], Tensor], leaves: tuple[Tensor, ...], gradient: Tensor | None = None) -> object:
        out = compute()
        return torch.autograd.grad(out, leaves, torch.ones_like(out) if gradient is None else gradient)

    def sparse() -> Tensor:
        return sparse_attention(q, k, v, selection, **path)[0]

    def dense() -> Tensor:
        return dense_attention(q, k, v, return_lse=False, **path)[0]

    def divergence() -> Tensor:
        return proxy_kl(q_proxy, k_proxy, q, k, lse, selection, **path)

    def dense_divergence() -> Tensor:
        return dense_proxy_kl(q_proxy, k_proxy, q, k, dense_lse, **path)

    return {
        "select_blocks": lambda: select_blocks(q_proxy, k_proxy, **rule, **path),
        "sparse_attention": torch.no_grad()(sparse),
        "sparse_attention + bwd": lambda: backward(sparse, main, upstream),
        "proxy_kl": torch.no_grad()(divergence),
        "proxy_kl + bwd": lambda: backward(divergence, proxies),
        "dense_attention": torch.no_grad()(dense),
        "dense_attention + bwd": lambda: backward(dense, main, upstream),
        "dense_proxy_kl + bwd": lambda: backward(dense_divergence, proxies),
    }


def measure(call: Callable[[], object], device: str, warmup: int, repeats: int) -> dict[str, float]:
    """Milliseconds (median, least, most) and the peak of memory above the inputs, in MiB."""
    cuda = torch.device(device).type == "cuda"
    for _ in range(warmup):
        call()
    before = 0
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        if cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
    found = {"median_ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times)}
    if cuda:
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found


def show_profile(call: Callable[[], object], device: str) -> None:
    """Print one warmed-up call's time on the device, its time until the host is done, and the longest kernels."""
    cuda = torch.device(device).type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    wait()
    began = time.perf_counter()
    call()
    host = (time.perf_counter() - began) * 1e3
    wait()
    total = (time.perf_counter() - began) * 1e3
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        call()
        wait()
    spent = [
        ((event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3, event.count, event.key)
        for event in profiler.key_averages()
        if event.device_type.name == ("CUDA" if cuda else "CPU")
    ]
    busy, launched = sum(row[0] for row in spent), sum(row[1] for row in spent)
    print(f"{'':10}device busy {busy:.3f} ms in {launched} pieces; host {host:.3f} ms; both {total:.3f} ms", flush=True)
    for milliseconds, count, name in sorted(spent, reverse=True)[:KERNELS_SHOWN]:
        print(f"{'':10}{milliseconds:10.3f} ms {count:6d} x  {name[:100]}", flush=True)


def make_deterministic() -> None:
    """As training does: everything that repeats bit for bit, and no filling of memory that is about to be written."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    import torch._inductor.config as inductor

    inductor.deterministic = True


def main() -> None:
    options = arguments()
    cuda = torch.device(options.device).type == "cuda"
    dtype = getattr(torch, options.dtype or ("bfloat16" if cuda else "float32"))
    try:
        if options.deterministic:
            make_deterministic()
        path, reason = select_path(
            device_type=torch.device(options.device).type,
            dtype=dtype,
            head_dim=options.dim,
            proxy_dim=options.dim,
            block_size=options.block_size,
            backend=options.path,
        )
        device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
        print(f"{path} ({reason}) on {device}, torch {torch.__version__}, {dtype}", flush=True)
        heads = "".join(f"{name:>10}" for name in ("median ms", "least", "most", "peak MiB"))
        print(f"{'sequence':>8}  {'operation':24}{heads}", flush=True)
        rows = []
        for sequence in options.sequence:
            calls = operations(options, sequence, dtype)
            known = sorted({name.split()[0] for name in calls})
            unknown = sorted(set(options.only or ()) - set(known))
            if unknown:
                raise ValueError(f"--only {' '.join(unknown)}: no such operation; there are {', '.join(known)}")
            for name, call in calls.items():
                if options.only and name.split()[0] not in options.only:
                    continue
                found = measure(call, options.device, options.warmup, options.repeats)
                rows.append({"sequence": sequence, "operation": name, **found})
                times = "".join(f"{found[key]:10.3f}" for key in ("median_ms", "least_ms", "most_ms"))
                print(f"{sequence:8d}  {name:24}{times}{found.get('peak_mib', float('nan')):10.0f}", flush=True)
                if options.profile:
                    show_profile(call, options.device)
    except ValueError as error:
        sys.exit(f"bench_ops.py: {error}")
    if options.json:
        environment = {
            "device": device,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "path": path,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", *sys.argv]),
        }
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        settings["dtype"] = str(dtype).removeprefix("torch.")
        options.json.write_text(json.dumps({"environment": environment, "settings": settings, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
