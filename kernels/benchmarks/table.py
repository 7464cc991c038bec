"""Turn files of `bench_gpu.py` into the tables of a README, each stage beside the least time it could take.

    cd kernels/benchmarks/results && python ../table.py h200.json h200_warmup.json h200_forward.json --into README.md

The least time ("floor") of a stage is the larger of its multiply-adds over what a matrix product reaches on that GPU
and its bytes, each read and written once, over what a copy reaches (`--tflops`, `--tbytes`: an H200's, measured).
Only products and bytes that the method cannot do without are counted: whole blocks, no padding, no second read.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

MARK = "<!-- tables -->"


class Sizes(NamedTuple):
    """What decides the work of a forward, of a row of the batch."""

    sequence: int
    heads: int
    kv_heads: int
    proxies: int
    proxy_kv_heads: int
    dim: int
    proxy_dim: int
    block_size: int
    top_k_blocks: int

    @property
    def edges(self) -> int:
        """(query, proxy, block) with the block before the query's own, one slot being the own block's."""
        whole, rest = divmod(self.sequence, self.block_size)
        most = self.top_k_blocks - 1
        rows = sum(min(most, own) for own in range(whole)) * self.block_size + min(most, whole) * rest
        return rows * self.proxies


def work(sizes: Sizes) -> dict[str, tuple[float, float]]:
    """Floating-point operations and bytes of each stage of the forward."""
    s, group = sizes, sizes.heads // sizes.proxies
    blocks = -(-s.sequence // s.block_size)
    scores = s.proxies * s.sequence * blocks / 2 * 4
    ids = s.proxies * s.sequence * s.top_k_blocks * 4
    heads, keys = s.sequence * s.heads * s.dim * 2, s.sequence * s.kv_heads * s.dim * 2 * 2
    partial = s.edges * group * (s.dim * 2 + 4)
    own_pairs = s.sequence * s.block_size / 2 * s.heads
    return {
        "score": (s.proxies * s.proxy_dim * float(s.sequence) ** 2, scores),
        "top-k": (0.0, scores + ids),
        "index": (0.0, 2 * ids + s.edges * 4),
        "attend": (4.0 * s.dim * s.block_size * s.edges * group, partial + heads + keys),
        "merge": (4.0 * s.dim * own_pairs, partial + 2 * heads + keys + ids),
    }


def floors(sizes: Sizes, flops: float, rate: float) -> dict[str, tuple[float, str]]:
    """Milliseconds of each stage at the least, and whether products or bytes decide."""
    found = {}
    for stage, (operations, size) in work(sizes).items():
        products, memory = operations / flops * 1e3, size / rate * 1e3
        found[stage] = max(products, memory), "products" if products > memory else "bytes"
    return found


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def length(sequence: int) -> str:
    return f"{sequence // 1024}K" if sequence % 1024 == 0 else f"{sequence}"


def by_length(result: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    """Rows by sequence and operation."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in sorted(result["rows"], key=lambda row: row["sequence"]):
        found.setdefault(row["sequence"], {})[row["operation"]] = row
    return found


def spread(row: dict[str, Any], kind: str) -> str:
    """Median, and in brackets least and most where they were kept."""
    median = row["device_ms" if kind else "median_ms"]
    least, most = (row.get(f"{kind}{end}_ms") for end in ("least", "most"))
    return f"{median:.3f}" if least is None or most is None else f"{median:.3f} ({least:.3f} to {most:.3f})"


def wholes(result: dict[str, Any], operation: str, dense: str) -> str:
    """An operation against the dense ones of the same file: on a busy GPU, and from an idle one."""
    lines = []
    peers = [f"{dense}, FlashAttention-4", f"{dense}, cuDNN"]
    for sequence, rows in by_length(result).items():
        kinds = [name for name in rows if name.startswith(f"{operation},") and ": " not in name]
        if not kinds or any("failed" in rows[name] for name in kinds):
            continue
        best = next((rows[name] for name in peers if "device_ms" in rows.get(name, {})), None)
        cells = [spread(rows[name], "device_") if "device_ms" in rows.get(name, {}) else "-" for name in peers]
        for name in kinds:
            row = rows[name]
            ratio = ["-", "-"]
            if best is not None:
                ratio = [f"**{best[key] / row[key]:.2f}x**" for key in ("device_ms", "median_ms")]
            line = [length(sequence), name.split(", ")[1], spread(row, "device_"), *cells, *ratio, spread(row, "")]
            lines.append([*line, f"{row['peak_mib']:.0f}", f"{row['launches']}"])
    head = ["S", "selection", "ms, GPU busy (range)", "FA4", "cuDNN", "FA4 / ours", "from idle", "ms from idle (range)"]
    return markdown([*head, "peak MiB", "launches"], lines)


def stages(result: dict[str, Any], flops: float, rate: float) -> str:
    """Each stage of the forward on the proxies' own selection, and how many floors it takes."""
    settings, lines = result["settings"], []
    for sequence, rows in by_length(result).items():
        sizes = Sizes(sequence, **{name: settings[name] for name in Sizes._fields[1:]})
        least = floors(sizes, flops, rate)
        cells = []
        for stage, (floor, _) in least.items():
            row = rows.get(f"forward, selected by proxies: {stage}")
            cells.append(f"{row['median_ms']:.3f} ({row['median_ms'] / floor:.1f})" if row else "-")
        total, whole = sum(floor for floor, _ in least.values()), rows.get("forward, selected by proxies", {})
        ours = whole.get("device_ms")
        cells.append(f"{ours:.3f} ({ours / total:.1f})" if ours else "-")
        if ours:
            lines.append([length(sequence), *cells])
    kinds = floors(Sizes(16384, **{name: settings[name] for name in Sizes._fields[1:]}), flops, rate)
    return markdown(["S", *(f"{stage} [{kind}]" for stage, (_, kind) in kinds.items()), "forward"], lines)


def tables(files: Iterable[Path], tflops: float, tbytes: float) -> str:
    """All tables; each operation is that of the last file that has it, beside what else was measured there."""
    found = [json.loads(file.read_text()) for file in files]
    heads = {
        "forward": "Forward (selection, index, attention):",
        "step": "Step (forward, value of the KL, all gradients) against a dense step:",
        "warm-up step": "Warm-up step (dense attention, the KL over all tokens, all gradients) against a dense step:",
    }
    last = {
        operation: one
        for one in found
        for operation in heads
        if any(row["operation"].startswith(f"{operation},") for row in one["rows"])
    }
    parts = []
    for operation in (one for one in heads if one in last):
        dense = "dense" if operation == "forward" else "dense step"
        parts += [heads[operation], wholes(last[operation], operation, dense)]
    if "forward" in last:
        parts.append("Stages of the forward in ms, in brackets how many times their floor:")
        parts.append(stages(last["forward"], tflops * 1e12, tbytes * 1e12))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="+", help="with the same sizes")
    parser.add_argument("--tflops", type=float, default=790, help="of a matrix product (default: %(default)s)")
    parser.add_argument("--tbytes", type=float, default=4.3, help="TB/s of a copy (default: %(default)s)")
    parser.add_argument("--into", type=Path, metavar="README", help=f"put them there, behind the line {MARK}")
    options = parser.parse_args()
    text = tables(options.file, options.tflops, options.tbytes)
    if options.into is None:
        print(text)
    else:
        before, mark, _ = options.into.read_text().partition(MARK)
        if not mark:
            parser.error(f"--into {options.into}: has no line {MARK}; add one at its end")
        options.into.write_text(f"{before}{MARK}\n\n{text}\n")


if __name__ == "__main__":
    main()
