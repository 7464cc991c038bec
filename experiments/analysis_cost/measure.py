"""Measures what analysing a large selection log takes, and writes the numbers beside this file.

    python experiments/analysis_cost/measure.py all     2 GB over all variables: blocks, scores, teachers, masses
    python experiments/analysis_cost/measure.py ids     2 GB of chosen blocks alone, and as much again of their scores

A log of random choices is made first. `msa-lab analyze` and the viewer's page each run in a process of their own, whose
seconds and peak memory the operating system tells. Beside them stands the load of the machine: seconds on the wall say
what a user waits, those of the processor also say something where others work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from msa_lab.config import DataConfig, ModelConfig, RunConfig, SelectionConfig
from msa_lab.selections import SelectionStore

DOCUMENTS = {"all": 8, "ids": 40}
"""Probe documents that make 2 GB of one record in 48: of all variables, and of chosen blocks."""
ANALYZE = "from msa_lab.cli import main; raise SystemExit(main())"
VIEWER = """
import sys
from pathlib import Path
from msa_analysis.viewer import write_viewer
from msa_lab.selections import open_selections
write_viewer([open_selections(Path(sys.argv[1]))], Path(sys.argv[2]))
"""


def configuration(kind: str, records: int, documents: int) -> RunConfig:
    """8 layers of 4 proxies, 4,096 tokens in blocks of 128 of which 4 are read."""
    model = {"attention": "msa", "num_layers": 8, "num_query_heads": 8, "num_proxies": 4, "top_k_blocks": 4}
    wanted = SelectionConfig(records=records, documents=documents, teacher=kind == "all")
    return RunConfig(
        model=ModelConfig(block_size=128, **model),
        data=DataConfig(context_length=4096),
        selections=wanted,
    )


def draw(rng: np.random.Generator, config: RunConfig, *lead: int) -> np.ndarray:
    """(*lead, query, slot) int16: the own block and earlier ones, all different, ascending, with -1 last."""
    size, top_k, context = config.model.block_size, config.model.top_k_blocks, config.data.context_length
    ids = np.full((*lead, context, top_k), -1, np.int16)
    for own in range(-(-context // size)):
        rows, free = slice(own * size, min((own + 1) * size, context)), min(top_k - 1, own)
        shape = (*lead, rows.stop - rows.start, free)
        places = np.sort(rng.integers(0, own - free + 1, shape, dtype=np.int16), -1)
        ids[..., rows, :free] = places + np.arange(free, dtype=np.int16)
        ids[..., rows, free] = own
    return ids


def random_mass(rng: np.random.Generator, ids: np.ndarray) -> np.ndarray:
    """Shares of attention for chosen blocks; NaN in empty slots."""
    return np.where(ids < 0, np.nan, rng.random(ids.shape, np.float32) / ids.shape[-1]).astype(np.float16)


def make_log(path: Path, kind: str, config: RunConfig) -> dict[str, Any]:
    """Write a log of random choices; what it holds."""
    rng, model, wanted = np.random.default_rng(0), config.model, config.selections
    lead = (model.num_layers, wanted.documents, model.num_proxies)
    blocks = -(-config.data.context_length // model.block_size)
    tokens = rng.integers(97, 122, (wanted.documents, config.data.context_length)).astype(np.uint32)
    store = SelectionStore.create(path, config, [f"package/module_{i}.py" for i in range(wanted.documents)], tokens)
    for record in range(wanted.records):
        ids = draw(rng, config, *lead)
        values = {"selected": ids, "score": random_mass(rng, ids)}
        if kind == "all":
            teacher = draw(rng, config, *lead)
            values |= {"teacher": teacher, "mass": random_mass(rng, ids), "teacher_mass": random_mass(rng, teacher)}
            values["newest_mass"] = rng.random((*lead, blocks, model.top_k_blocks)) / model.top_k_blocks
            values |= {name: rng.random((*lead, blocks)) for name in ("divergence", "entropy")}
        store.append(10 * record, "sparse" if record > 1 else "warmup", values)
    if kind == "all":
        heads = draw(rng, config, *lead[:2], model.num_query_heads)
        drawn = rng.random(store.arrays["regrouped_divergence"].shape)
        last = {"head_teacher": heads, "head_teacher_mass": random_mass(rng, heads), "regrouped_divergence": drawn}
        store.write_heads(10 * (wanted.records - 1), last)
    sizes = {name: array.nbytes for name, array in store.arrays.items()}
    return {
        "records": wanted.records,
        "layers": model.num_layers,
        "documents": wanted.documents,
        "proxies": model.num_proxies,
        "queries": config.data.context_length,
        "slots": model.top_k_blocks,
        "gigabytes_of_chosen_blocks": sizes["selected"] / 1e9,
        "gigabytes": sum(sizes.values()) / 1e9,
        "gigabytes_on_disk": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e9,
    }


def timed(code: str, *arguments: str) -> dict[str, float]:
    """Run Python in a process of its own; what it took, and the load when it began and when it ended."""
    load, start = os.getloadavg()[0], time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{arguments}: ended with {os.waitstatus_to_exitcode(status)}; see its message above")
    return {
        "wall_seconds": wall,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak_gibibytes": used.ru_maxrss / 2**20,  # Linux tells kibibytes
        "load_average_before": load,
        "load_average_after": os.getloadavg()[0],
    }


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=DOCUMENTS)
    parser.add_argument("--records", type=int, default=48, help="records of the log; 48 make 2 GB")
    parser.add_argument("--scratch", type=Path, help="folder with room for 3 GB; by default that for temporary files")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where the numbers go")
    args = parser.parse_args()
    config = configuration(args.kind, args.records, DOCUMENTS[args.kind])
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        log, page = Path(folder) / "log.zarr", Path(folder) / "viewer.html"
        held = make_log(log, args.kind, config)
        analysis = timed(ANALYZE, "analyze", str(log), "--out", str(Path(folder) / "tables"))
        viewer = timed(VIEWER, str(log), str(page))
        viewer["megabytes"] = page.stat().st_size / 1e6
    report = {
        "command": f"python experiments/analysis_cost/measure.py {args.kind} --records {args.records}",
        "machine": f"{platform.machine()} CPU",
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("numpy", "pandas", "scipy", "xarray", "zarr")},
        "log": held,
        "analyze": analysis,
        "viewer": viewer,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.kind}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
