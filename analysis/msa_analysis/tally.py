"""Per-document sums of a selection log: small, additive over documents, and all that the metrics need.

Leaving one document out, or permuting proxies within documents, is then arithmetic on tables of a few kilobytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from msa_analysis.choices import Rows, counting_rows, distances, learned_slots, log2_bin, share_bin

PAIRED = ("shared_other", "slots_other")
"""Sums over pairs of two documents, booked at both: half of their sum is the total."""


def tally(dataset: xr.Dataset, *, min_visible: int | None = None) -> xr.Dataset:
    """Sums over the learned slots of the counting rows, by step, layer, document and proxy.

    With a `source` dimension (the proxy's choice; the teacher's own top blocks): `slots`, `closeness` (sum of
    1 - x), `log_slots`, `log_distance`, `log_distance2` (slots with distance >= 1, sum of log2 distance and of its
    square), `bins` and `shares` (counts by log2 distance and by x), `uniform_bins` and `uniform_shares` (their
    expectation if the same number of slots were chosen uniformly).
    By log2 bin of the teacher's block: `hits` (teacher's blocks that the proxy chose), `chance_hits` (their exact
    expectation under uniform choice).
    By pair of proxies (`proxy`, `other`): `shared`, `chance_shared`, `shared_other` and `slots_other` (the other
    proxy taken in another document at the same query position).
    `head_bins`: as `bins`, for the single heads' own top blocks at the last record.
    """
    rows = counting_rows(dataset, min_visible=min_visible)
    steps = [_one_step(dataset.isel(step=i), rows) for i in range(dataset.sizes["step"])]
    result = xr.concat(steps, "step").drop_vars(["step", "phase"], errors="ignore")
    names = ("step", "phase", "layer", "document", "proxy")
    result = result.assign_coords({name: dataset.coords[name] for name in names if name in dataset.coords})
    result = result.assign_coords(other=result["proxy"].values, source=["proxy", "teacher"])
    if "head_teacher" in dataset:
        heads = dataset["head_teacher"].transpose("layer", "document", "head", "query", "slot").values
        ids = learned_slots(heads[..., rows.index, :], rows)
        result["head_bins"] = (("layer", "document", "head", "bin"), _spread(ids, rows)["bins"])
    wanted = ("block_size", "top_k_blocks", "num_local_blocks", "num_sink_blocks", "first_step")
    result.attrs = {name: dataset.attrs[name] for name in wanted if name in dataset.attrs}
    result.attrs["row_share"] = rows.share
    return result


def _one_step(record: xr.Dataset, rows: Rows) -> xr.Dataset:
    names = [name for name in ("selected", "teacher") if name in record]
    record = record[names].transpose("layer", "document", "proxy", "query", "slot").load()
    layers = [_one_layer(record.isel(layer=i), rows) for i in range(record.sizes["layer"])]
    return xr.concat(layers, "layer")


def _one_layer(record: xr.Dataset, rows: Rows) -> xr.Dataset:
    chosen = learned_slots(record["selected"].values[..., rows.index, :], rows)
    wanted = np.full_like(chosen, -1)
    if "teacher" in record:
        wanted = learned_slots(record["teacher"].values[..., rows.index, :], rows)
    base = ("document", "proxy")
    both = [_spread(chosen, rows), _spread(wanted, rows)]
    extra = {"bins": "bin", "uniform_bins": "bin", "shares": "part", "uniform_shares": "part"}
    sums: dict[str, Any] = {
        name: (("source", *base, *([extra[name]] if name in extra else [])), np.stack([s[name] for s in both]))
        for name in both[0]
    }
    sums |= {name: ((*base, "bin"), value) for name, value in _fidelity(chosen, wanted, rows).items()}
    sums |= {name: ((*base, "other"), value) for name, value in _pairs(chosen, rows).items()}
    return xr.Dataset(sums)


def _spread(ids: Int[np.ndarray, "*lead row slot"], rows: Rows) -> dict[str, np.ndarray]:
    """How far back the chosen blocks lie: sums over rows and slots."""
    distance, used = distances(ids, rows.own)
    per_row = used.sum(-1)
    far = used & (distance >= 1)
    log = np.log2(np.maximum(np.arange(rows.own.max(initial=0) + 1), 1))[distance]
    x = np.where(used, rows.position(distance), 1.0)
    return {
        "slots": per_row.sum(-1).astype(float),
        "closeness": (1.0 - x).sum((-2, -1)),
        "log_slots": far.sum((-2, -1)).astype(float),
        "log_distance": log.sum((-2, -1)),
        "log_distance2": (log * log).sum((-2, -1)),
        "bins": _histogram(log2_bin(distance), used, rows.num_bins),
        "shares": _histogram(share_bin(x), used, rows.uniform_share.shape[1]),
        "uniform_bins": per_row @ rows.uniform,
        "uniform_shares": per_row @ rows.uniform_share,
    }


def _histogram(
    bins: Int[np.ndarray, "*lead row slot"], weight: np.ndarray, count: int
) -> Float[np.ndarray, "*lead bin"]:
    lead = bins.shape[:-2]
    size = int(np.prod(lead))
    place = np.arange(size).reshape(*lead, 1, 1) * count + bins
    total = np.bincount(place.ravel(), weights=weight.ravel(), minlength=size * count)
    return total.reshape(*lead, count)


def found(ids: Int[np.ndarray, "... slot"], among: Int[np.ndarray, "... other_slot"]) -> Bool[np.ndarray, "... slot"]:
    """Which ids (never a -1) also stand in the same row of `among`."""
    hit = np.zeros(np.broadcast_shapes(ids.shape[:-1], among.shape[:-1]) + ids.shape[-1:], dtype=bool)
    for slot in range(among.shape[-1]):
        hit |= ids == among[..., slot : slot + 1]
    return hit & (ids >= 0)


def _fidelity(chosen: np.ndarray, wanted: np.ndarray, rows: Rows) -> dict[str, np.ndarray]:
    """Each wanted block is hit with probability (slots the proxy chose) / (eligible blocks) under uniform choice."""
    distance, used = distances(wanted, rows.own)
    # A row in which the proxy chose nothing is no miss: it does not count.
    used &= (chosen >= 0).any(-1, keepdims=True)
    bins = log2_bin(distance)
    rate = (chosen >= 0).sum(-1) / np.maximum(rows.eligible, 1)
    expected = np.broadcast_to(rate[..., None], used.shape) * used
    return {
        "wanted": _histogram(bins, used, rows.num_bins),
        "hits": _histogram(bins, found(wanted, chosen), rows.num_bins),
        "chance_hits": _histogram(bins, expected, rows.num_bins),
    }


def _pairs(chosen: Int[np.ndarray, "document proxy row slot"], rows: Rows) -> dict[str, np.ndarray]:
    """Blocks that two proxies share in the same row, of the same document and of every other one."""
    documents, proxies, count, _ = chosen.shape
    shared = np.stack([found(chosen, chosen[:, [q]]).sum((-2, -1)) for q in range(proxies)], -1)
    slots = (chosen >= 0).sum(-1)
    valid = slots > 0
    blocks = int(rows.own.max(initial=0)) + 1
    place = np.arange(count)[:, None] * blocks + chosen
    everywhere = np.empty((documents, proxies, proxies))
    for q in range(proxies):
        used = chosen[:, q] >= 0
        popular = np.bincount(place[:, q][used], minlength=count * blocks)
        everywhere[..., q] = np.where(chosen >= 0, popular[np.maximum(place, 0)], 0).sum((-2, -1))
    row = everywhere - shared
    # Ordered pairs (p, q): document d holds p and another one holds q, or the other way round; both involve d.
    mine = np.einsum("dpr,dqr->dpq", slots, valid.sum(0)[None] - valid)
    theirs = np.einsum("dpr,dqr->dpq", slots.sum(0)[None] - slots, valid)
    return {
        "shared": shared.astype(float),
        "chance_shared": np.einsum("dpr,dqr,r->dpq", slots, slots, 1.0 / np.maximum(rows.eligible, 1)),
        "shared_other": row + row.transpose(0, 2, 1),
        "slots_other": (mine + theirs).astype(float),
    }


def totals(sums: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """The sums of all documents, and of all but each one (dimension `document`)."""
    whole = sums.sum("document")
    for name in PAIRED:
        if name in whole:
            whole[name] = whole[name] / 2
    return whole, whole - sums
