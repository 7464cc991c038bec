"""Per-document sums of a selection log: small, additive over documents, and all that the metrics need.

Leaving one document out, or permuting proxies within documents, is then arithmetic on tables of a few kilobytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xarray as xr

from msa_analysis.choices import Rows, by_slot, counting_rows
from msa_analysis.information import MOMENTS
from msa_analysis.pair_sums import NEXT, PAIRED, pairs
from msa_analysis.sums import COUNTS, MASSES, MASSES_BY_BIN, PIECE, Layer, layer_sums, spread

THREADS = min(4, os.cpu_count() or 1)
"""Layers at a time: each holds memory of its own."""
SLOTS = ("layer", "document", "proxy", "query", "slot")
PER_SLOT = ("selected", "teacher", "mass", "teacher_mass")
_OWN = ("document", "proxy")
_BOTH, _HEAD, _BIN, _POSITION = ("source", *_OWN), ("document", "head"), (*_OWN, "bin"), (*_OWN, "position")
_PAIR, _HEADS = (*_OWN, "other"), (*_HEAD, "other_head")
_FIRST = (
    "slots",
    "closeness",
    *MOMENTS,
    "first_block",
    "chance_first_block",
    "rows",
)
DIMS = (
    dict.fromkeys(_FIRST, _BOTH)
    | dict.fromkeys(("bins", "uniform_bins"), (*_BOTH, "bin"))
    | dict.fromkeys(("shares", "uniform_shares"), (*_BOTH, "part"))
    | dict.fromkeys(("choosable", "never", "chance_never"), _OWN)
    | dict.fromkeys(("kept_here", "kept_other", "kept_slots", "divergence", "entropy", "log_visible", "all_rows"), _OWN)
    | dict.fromkeys((*COUNTS, *MASSES_BY_BIN), _BIN)
    | {f"{name}_by_position": _POSITION for name in (*COUNTS, *MASSES)}
    | dict.fromkeys(("shared", "chance_shared", "shared_here", *NEXT, *NEXT.values()), _PAIR)
    | {f"head_{name}": _HEAD for name in ("slots", *MOMENTS)}
    | {"head_bins": (*_HEAD, "bin"), "head_shared": _HEADS, "head_chance_shared": _HEADS}
)
"""Dimensions of every sum, after step and layer."""


def tally(
    dataset: xr.Dataset, *, min_visible: int | None = None, progress: Callable[[int], None] = lambda done: None
) -> xr.Dataset:
    """Sums over the learned slots of the counting rows, by step, layer, document and proxy.

    With a `source` dimension (the proxy's choice; the teacher's own top blocks): `slots`, `closeness` (sum of
    1 - x), `log_slots`, `log_distance`, `log_distance2` (slots with distance >= 1, sum of log2 distance and of its
    square), `bins` and `shares` (counts by log2 distance and by x), `uniform_bins` and `uniform_shares` (their
    expectation if the same number of slots were chosen uniformly), `first_block` (slots that hold block 0) and
    `chance_first_block` (its expectation), `rows` (with a learned slot). `choosable`, `never`, `chance_never` (blocks
    that a query could choose, that none chose, and how many a uniform choice would leave).
    By log2 bin of the teacher's block, and by the query's place in the context (`..._by_position`), over rows in which
    the proxy chose: `wanted` (teacher's blocks), `hits` (those that the proxy chose), `chance_hits` (their exact
    expectation under uniform choice); in dense attention: `best` (on the teacher's blocks), `reached` (on those of them
    that the proxy chose), `chance_reached`, `newest_reached` (that uniform choice, the newest blocks would hold). By
    position only: `mass_rows`, `captured` (on the proxy's blocks), `chance_captured`, `newest_captured`.
    By pair of proxies (`proxy`, `other`): `shared`, `chance_shared` (by both, of `slots`); over ordered pairs of two
    documents, in rows that both have: `shared_here`, `shared_other` (with the other proxy in the same, in the second
    document), of `slots_other`, `chance_other`; what a document and the next one add to these: `shared_next`,
    `slots_next`, `chance_next`. Likewise with the record before: `kept_here`, `kept_other` (chosen by the same proxy
    then, in the same, in the second document), of `kept_slots`.
    Over all counting rows (`all_rows`): `divergence` between the heads of a group, `entropy` of their mean dense mass,
    `log_visible` (its most: log of the visible blocks). Of the last record: `head_bins`, `head_slots`,
    `head_log_slots`, `head_log_distance`, `head_log_distance2` (as those above, for the single heads' own top blocks),
    `head_shared`, `head_chance_shared`, and by random `regrouping` `regrouped_divergence`.

    Raises:
        ValueError: The log holds no record or no query, or min_visible does not exceed top_k_blocks.
    """
    if not dataset.sizes["step"]:
        raise ValueError("step=[]: the log holds no record; train until the first one, or take another run")
    rows = counting_rows(dataset, min_visible=min_visible)
    sums, before = [], None
    for i in range(dataset.sizes["step"]):
        record = _load(dataset.isel(step=i))
        sums.append(_one_step(record, before, rows))
        before = record["selected"]
        progress(i + 1)
    names = ("step", "phase", "layer", "document", "proxy")
    stacked = {name: np.stack([step[name] for step in sums]) for name in sums[0]}
    result = xr.Dataset({name: (("step", "layer", *DIMS[name]), value) for name, value in stacked.items()})
    result = result.assign_coords({name: dataset.coords[name] for name in names if name in dataset.coords})
    result = result.assign_coords(other=result["proxy"].values, source=["proxy", "teacher"])
    result = result.assign(_heads(dataset, rows))
    wanted = ("block_size", "top_k_blocks", "num_local_blocks", "num_sink_blocks", "num_query_heads", "first_step")
    result.attrs = {name: dataset.attrs[name] for name in wanted if name in dataset.attrs}
    result.attrs |= {"row_share": rows.share, "num_blocks": rows.num_blocks}
    return result


def _load(record: xr.Dataset) -> dict[str, np.ndarray]:
    """The variables of one record that are there, each with the layer first."""
    dims = dict.fromkeys(PER_SLOT, SLOTS)
    dims |= {"newest_mass": (*SLOTS[:3], "query_block", "distance")}
    dims |= dict.fromkeys(("divergence", "entropy"), (*SLOTS[:3], "query_block"))
    return {name: record[name].transpose(*dims[name]).values for name in dims if name in record}


def _one_step(record: dict[str, np.ndarray], before: np.ndarray | None, rows: Rows) -> dict[str, np.ndarray]:
    """The sums of every layer; layers are shared among processors, as numpy lets go of the interpreter."""

    def of_layer(i: int) -> dict[str, np.ndarray]:
        fields = {name: values[i] for name, values in record.items() if name in Layer._fields}
        return layer_sums(Layer(**fields, before=None if before is None else before[i]), rows)

    with ThreadPoolExecutor(THREADS) as pool:
        layers = list(pool.map(of_layer, range(len(record["selected"]))))
    sums = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    absent = np.full((*record["selected"].shape[:3], rows.num_blocks), np.nan)
    visible = np.broadcast_to(np.log(np.arange(rows.num_blocks) + 1), absent.shape)
    sums |= {name: _over_rows(record.get(name, absent), rows) for name in ("divergence", "entropy")}
    sums |= {"log_visible": _over_rows(visible, rows), "all_rows": _over_rows(np.ones_like(absent), rows)}
    return sums


def _over_rows(by_block: np.ndarray, rows: Rows) -> np.ndarray:
    """Sum over the counting rows of what is known by query block."""
    own, counts = np.unique(rows.own, return_counts=True)
    return by_block[..., own].astype(float) @ counts


def _heads(dataset: xr.Dataset, rows: Rows) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Of the last record: the heads' own top blocks, and groups of heads drawn at random."""
    result = {}
    if "head_teacher" in dataset:
        heads = dataset["head_teacher"].transpose("layer", "document", "head", "query", "slot").values
        found = [_head_sums(heads[i], rows) for i in range(len(heads))]
        for name in found[0]:
            result[name] = (("layer", *DIMS[name]), np.stack([layer[name] for layer in found]))
    if "regrouped_divergence" in dataset:
        drawn = dataset["regrouped_divergence"].transpose("layer", "document", "regrouping", "query_block").values
        result["regrouped_divergence"] = (("layer", "document", "regrouping"), _over_rows(drawn, rows))
    return result


def _head_sums(heads: np.ndarray, rows: Rows) -> dict[str, np.ndarray]:
    total: dict[str, np.ndarray] = {}
    documents, count, _, slots = heads.shape
    for piece in rows.parts(PIECE // max(documents * count * slots, 1)):
        ids = by_slot(heads, piece)
        shared = pairs(ids, piece, elsewhere=False)
        far = spread(ids, piece)
        part = {name: far[name] for name in ("bins", "slots", *MOMENTS)} | shared
        for name, value in part.items():
            total[f"head_{name}"] = total.get(f"head_{name}", 0) + value
    return total


def totals(sums: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """The sums of all documents, and of all but each one (dimension `document`)."""
    sums = sums.drop_vars(NEXT.values(), errors="ignore")
    whole = sums.sum("document", skipna=False)
    for name in PAIRED:
        if name in whole:
            whole[name] = whole[name] / 2
    return whole, whole - sums


def without_two(sums: xr.Dataset, without: xr.Dataset) -> xr.Dataset:
    """The sums of all documents but each one and the next (dimension `document`), as far as these are known."""
    names = [name for name in without if name in NEXT or name not in PAIRED]
    left = without[names] - sums[names].roll(document=-1)
    return left.assign({name: left[name] + sums[of] for name, of in NEXT.items() if name in left})
