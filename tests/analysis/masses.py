"""Dense attention of known mass, put into a planted log, and the fidelity metrics worked out from it row by row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xarray as xr

Shape = Callable[[np.ndarray], np.ndarray]
"""Unnormalised mass of a block by its distance."""


def with_masses(log: xr.Dataset, shape: Shape, *, noise: float = 0.5, seed: int = 0) -> tuple[xr.Dataset, np.ndarray]:
    """The log with mass, teacher, teacher_mass and newest_mass of one random dense attention; and that attention.

    Attention is (layer, document, proxy, query, block), the same at every record.
    """
    rng = np.random.default_rng(seed)
    size, top_k, local = (int(log.attrs[name]) for name in ("block_size", "top_k_blocks", "num_local_blocks"))
    lead = tuple(log.sizes[name] for name in ("layer", "document", "proxy"))
    own = log["query"].values // size
    blocks = int(own.max()) + 1
    distance = own[:, None] - np.arange(blocks)
    weight = shape(np.maximum(distance, 0)) * np.exp(noise * rng.normal(size=(*lead, len(own), blocks)))
    attention = np.where(distance >= 0, weight, 0)
    attention /= attention.sum(-1, keepdims=True)
    forced = (distance >= 0) & (distance < local)
    rank = np.where(forced, 2 + distance * -0.1, attention)
    best = np.argsort(-np.where(distance >= 0, rank, -1), -1, kind="stable")[..., :top_k]
    best = np.where(np.take_along_axis(np.broadcast_to(distance, attention.shape), best, -1) >= 0, best, blocks)
    best = np.sort(best, -1)
    teacher = np.where(best == blocks, -1, best).astype(np.int16)
    newest = own[:, None] - np.arange(top_k)

    def at(ids: np.ndarray) -> np.ndarray:
        return np.where(ids >= 0, np.take_along_axis(attention, np.maximum(ids, 0), -1), np.nan).astype(np.float32)

    by_row = np.nan_to_num(at(np.broadcast_to(newest, (*lead, *newest.shape)).astype(int)))
    means = np.stack([by_row[..., own == block, :].mean(-2) for block in range(blocks)], -2)
    dims, steps = log["selected"].dims, log.sizes["step"]

    def every(values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(values, (steps, *values.shape))

    mass = np.stack([at(ids.astype(int)) for ids in log["selected"].transpose(*dims).values])
    made = log.assign(
        mass=(dims, mass),
        teacher=(dims, every(teacher)),
        teacher_mass=(dims, every(at(teacher.astype(int)))),
        newest_mass=((*dims[:4], "query_block", "distance"), every(means)),
    )
    return made, attention


def by_hand(log: xr.Dataset, attention: np.ndarray, step: int, layer: int, proxy: int) -> dict[str, float]:
    """Captured masses and coverage of one proxy over the unsaturated rows, by loops."""
    size, top_k = int(log.attrs["block_size"]), int(log.attrs["top_k_blocks"])
    held = {"own": 0.0, "best": 0.0, "newest": 0.0, "random": 0.0, "rows": 0.0}
    for document in range(log.sizes["document"]):
        for query in log["query"].values:
            own = int(query) // size
            if own + 1 < 4 * top_k:
                continue
            mass = attention[layer, document, proxy, query]
            chosen = set(log["selected"].values[step, layer, document, proxy, query].tolist()) - {-1, own}
            held["own"] += sum(mass[b] for b in chosen)
            held["best"] += np.sort(mass[:own])[-len(chosen) :].sum()
            held["newest"] += mass[own - len(chosen) : own].sum()
            held["random"] += mass[:own].mean() * len(chosen)
            held["rows"] += 1
    result = {f"mass_{name}": value / held["rows"] for name, value in held.items() if name != "rows"}
    return result | {f"coverage_{name}": held[name] / held["best"] for name in ("own", "newest", "random")}
