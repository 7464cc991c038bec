"""Selection logs of three records with random values. Imported by children that are killed: without torch."""

import numpy as np

from msa_lab.config import DataConfig, ModelConfig, RunConfig, SelectionConfig
from msa_lab.selection_store import SelectionStore

TOKENS = np.arange(2 * 40).reshape(2, 40) % 257
IDS = ("one.py", "two.py")


def config(records=6, **changes):
    model = {"num_layers": 3, "attention": ("msa", "dense", "msa"), "block_size": 8, "top_k_blocks": 3}
    recorded = {"records": records, "documents": 2, "query_stride": 4, **changes.pop("selections", {})}
    return RunConfig(
        model=ModelConfig(**{**model, **changes.pop("model", {})}),
        data=DataConfig(**{"context_length": 40, **changes.pop("data", {})}),
        selections=SelectionConfig(**recorded),
    )


def values(seed=0):
    rng, shape = np.random.default_rng(seed), (2, 2, 2, 10, 3)
    blocks = {name: np.sort(rng.integers(0, 5, shape, dtype=np.int32)) for name in ("selected", "teacher")}
    shares = {name: rng.random(shape, np.float32) for name in ("score", "mass", "teacher_mass")}
    blocks["selected"][..., 0, 2], shares["score"][..., 0, 2] = -1, np.nan
    return blocks | shares


def written(path, steps=(0, 5, 9)):
    store = SelectionStore.create(path, config(), IDS, TOKENS)
    for step in steps:
        store.append(step, "warmup" if step < 5 else "sparse", values(step))
    return store
