"""What one layer of one record adds up to, by document: the arithmetic behind `tally`.

All sums are over query rows, so they are taken piece by piece and memory stays small. Where a number depends only on
a block and on the query's own block, slots are first counted by these two, and the rest is a small matrix product.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from msa_analysis.choices import NUM_POSITIONS, NUM_SHARES, Rows, by_slot, log2_bin, share_bin
from msa_analysis.pair_sums import found, kept, pairs

PIECE = 2**18
"""Slots that are handled at one time: little memory, and little overhead."""


class Layer(NamedTuple):
    """One layer of one record, as in the log; what the log lacks is None."""

    selected: Int[np.ndarray, "document proxy query slot"]
    teacher: Int[np.ndarray, "document proxy query slot"] | None = None
    mass: Float[np.ndarray, "document proxy query slot"] | None = None
    teacher_mass: Float[np.ndarray, "document proxy query slot"] | None = None
    newest_mass: Float[np.ndarray, "document proxy query_block distance"] | None = None
    before: Int[np.ndarray, "document proxy query slot"] | None = None
    """`selected` of the record before."""


def layer_sums(layer: Layer, rows: Rows) -> dict[str, np.ndarray]:
    """Every sum that `tally` describes, without the dimensions step and layer."""
    documents, proxies, _, slots = layer.selected.shape
    total: dict[str, np.ndarray] = {}
    for piece in rows.parts(PIECE // max(documents * proxies * slots, 1)):
        for name, value in _piece_sums(layer, piece).items():
            total[name] = total[name] + value if name in total else value
    if not total:
        shapes = _piece_sums(layer, rows.stand_in())
        total = {name: np.zeros_like(value) for name, value in shapes.items()}
    return total | _never_selected(total.pop("by_block"), total.pop("log_missed"), total.pop("valid_rows"), rows)


def _piece_sums(layer: Layer, rows: Rows) -> dict[str, np.ndarray]:
    chosen = by_slot(layer.selected, rows)
    own = spread(chosen, rows)
    by_block = own.pop("by_block")
    if layer.teacher is None:
        wanted, teacher = None, {name: np.zeros_like(value) for name, value in own.items()}
    else:
        wanted = by_slot(layer.teacher, rows)
        teacher = spread(wanted, rows)
    sums = {name: np.stack([own[name], teacher[name]]) for name in own}
    sums |= {"by_block": by_block, **_choosable(chosen, rows)}
    sums |= _fidelity(chosen, wanted, rows)
    sums |= _masses(layer, chosen, wanted, rows)
    sums |= pairs(chosen, rows)
    before = None if layer.before is None else by_slot(layer.before, rows)
    return sums | kept(chosen, before, rows)


def spread(ids: Int[np.ndarray, "*lead slot row"], rows: Rows) -> dict[str, np.ndarray]:
    """How far back the chosen blocks lie, and how often each was chosen."""
    lead, grid, none = ids.shape[:-2], rows.grid, rows.num_blocks + 1
    owns = len(rows.blocks[0])
    # Column 0 takes the slots without a block.
    place = _lead(lead) * (owns * none) + (rows.own_place * none + 1 + ids)
    counts = np.bincount(place.ravel(), minlength=int(np.prod(lead)) * owns * none)
    counts = counts.reshape(-1, owns, none)[:, :, 1:].astype(float)
    log = np.log2(np.maximum(grid.distance, 1))
    bins = log2_bin(grid.distance)[..., None] == np.arange(rows.num_bins)
    shares = share_bin(grid.x)[..., None] == np.arange(NUM_SHARES)
    single = np.stack([np.ones_like(log), 1.0 - grid.x, grid.distance >= 1, log, log * log], -1)
    features = np.concatenate([single, bins, shares], -1)
    sums = counts.reshape(len(counts), -1) @ features.reshape(-1, features.shape[-1])
    per_own = counts.sum(-1)
    uniform = [per_own @ np.einsum("ob,obn->on", grid.chance, part.astype(float)) for part in (bins, shares)]
    names = ("slots", "closeness", "log_slots", "log_distance", "log_distance2")
    result = {name: sums[:, i] for i, name in enumerate(names)}
    result |= {"bins": sums[:, 5 : 5 + rows.num_bins], "shares": sums[:, 5 + rows.num_bins :]}
    result |= {"uniform_bins": uniform[0], "uniform_shares": uniform[1]}
    result |= {"first_block": counts[:, :, 0].sum(-1), "chance_first_block": per_own @ grid.chance[:, 0]}
    result |= {"rows": (ids >= 0).any(-2).sum(-1).reshape(-1), "by_block": counts.sum(1)}
    return {name: value.reshape(*lead, *value.shape[1:]) for name, value in result.items()}


def _choosable(chosen: Int[np.ndarray, "document proxy slot row"], rows: Rows) -> dict[str, np.ndarray]:
    """How many rows choose, and the log of the chance that a uniform choice of theirs would miss a block."""
    lead, slots = chosen.shape[:2], (chosen >= 0).sum(-2)
    shape = (*lead, rows.num_blocks)
    missed, valid = np.zeros(shape), np.zeros(shape)
    missed[..., rows.blocks[0]] = rows.by_own(np.log1p(-slots / np.maximum(rows.eligible, slots + 1e-9)))
    valid[..., rows.blocks[0]] = rows.by_own(slots > 0)
    return {
        "log_missed": missed,
        "valid_rows": valid,
    }


def _never_selected(
    by_block: Float[np.ndarray, "document proxy block"],
    log_missed: Float[np.ndarray, "document proxy own"],
    valid_rows: Float[np.ndarray, "document proxy own"],
    rows: Rows,
) -> dict[str, np.ndarray]:
    """A block can be chosen by the queries whose own block lies at least `nearest` further on."""

    def later(by_own: np.ndarray) -> np.ndarray:
        after = np.flip(np.flip(by_own, -1).cumsum(-1), -1)
        return np.concatenate([after[..., rows.nearest :], np.zeros_like(after[..., : rows.nearest])], -1)

    possible = later(valid_rows) > 0
    possible[..., : rows.num_sink_blocks] = False
    return {
        "choosable": possible.sum(-1).astype(float),
        "never": (possible & (by_block == 0)).sum(-1).astype(float),
        "chance_never": np.where(possible, np.exp(later(log_missed)), 0.0).sum(-1),
    }


def _fidelity(chosen: np.ndarray, wanted: np.ndarray | None, rows: Rows) -> dict[str, np.ndarray]:
    """Each wanted block is hit with probability (slots the proxy chose) / (eligible blocks) under uniform choice."""
    if wanted is None:
        return _constant(0.0, COUNTS, COUNTS, chosen, rows)
    used, hit, rate = _wanted(chosen, wanted, rows)
    count = used.sum(-2)
    sums = _by_bin(wanted, {"wanted": used, "hits": hit, "chance_hits": rate[..., None, :] * used}, rows)
    return sums | _by_position({"wanted": count, "hits": hit.sum(-2), "chance_hits": rate * count}, rows)


def _masses(layer: Layer, chosen: np.ndarray, wanted: np.ndarray | None, rows: Rows) -> dict[str, np.ndarray]:
    """Dense attention on learned slots, on the teacher's, and what uniform choice and the newest blocks would hold."""
    lead = chosen.shape[:2]
    teacher, taken, most = layer.teacher, layer.mass, layer.teacher_mass
    if teacher is None or wanted is None or taken is None or most is None:
        return _constant(np.nan, MASSES, MASSES_BY_BIN, chosen, rows)
    used, hit, rate = _wanted(chosen, wanted, rows)
    slots, counts = (chosen >= 0).sum(-2), used.any(-2)
    mass, best = (value[..., rows.index, :].swapaxes(-1, -2).astype(np.float32) for value in (taken, most))
    forced = (teacher[..., rows.index, :].swapaxes(-1, -2) >= 0) & (wanted < 0)
    eligible = 1 - np.where(forced, best, 0).sum(-2)
    best = np.where(used, best, 0)
    newest = rows.own - wanted < rows.nearest + slots[..., None, :]
    chance = best * rate[..., None, :].astype(np.float32)
    held = {"best": best, "reached": best * hit, "chance_reached": chance, "newest_reached": best * newest}
    by_row = {name: value.sum(-2) for name, value in held.items()}
    by_row |= {"mass_rows": counts, "captured": np.where(chosen >= 0, mass, 0).sum(-2) * counts}
    by_row |= {"chance_captured": rate * eligible * counts}
    window = np.full((*lead, len(rows.blocks[0])), np.nan)
    if layer.newest_mass is not None:
        window = _newest_captured(layer.newest_mass, slots * counts, rows)
    sums = _by_bin(wanted, held, rows) | _by_position(by_row, rows)
    return sums | {"newest_captured_by_position": rows.by_position(window)}


def _constant(value: float, by_position: Names, by_bin: Names, chosen: np.ndarray, rows: Rows) -> dict[str, np.ndarray]:
    """The same number in every sum of these names."""
    lead = chosen.shape[:2]
    sums = {f"{name}_by_position": np.full((*lead, NUM_POSITIONS), value) for name in by_position}
    return sums | {name: np.full((*lead, rows.num_bins), value) for name in by_bin}


Names = tuple[str, ...]
COUNTS = ("wanted", "hits", "chance_hits")
MASSES = ("best", "reached", "chance_reached", "newest_reached", "mass_rows", "captured", "chance_captured")
MASSES += ("newest_captured",)
MASSES_BY_BIN = MASSES[:4]


def _wanted(chosen: np.ndarray, wanted: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which of the teacher's blocks count, which of them the proxy chose, and the chance to choose any one."""
    # A row in which the proxy chose nothing is no miss: it does not count.
    slots = (chosen >= 0).sum(-2)
    return (wanted >= 0) & (slots > 0)[..., None, :], found(wanted, chosen), slots / np.maximum(rows.eligible, 1)


def _newest_captured(newest_mass: np.ndarray, slots: np.ndarray, rows: Rows) -> Float[np.ndarray, "document proxy own"]:
    """Mass of as many newest eligible blocks as the proxy chose, by own block: mean over its recorded queries."""
    own = rows.blocks[0]
    total = held = np.zeros(slots.shape[:2] + own.shape)
    for distance in range(rows.nearest, rows.nearest + int(slots.max(initial=0))):
        eligible = own - distance >= rows.num_sink_blocks
        held = held + newest_mass[:, :, own, distance].astype(float) * eligible
        total = total + held * rows.by_own(slots == distance - rows.nearest + 1)
    return total


def _by_bin(ids: np.ndarray, weights: dict[str, np.ndarray], rows: Rows) -> dict[str, np.ndarray]:
    """Sums of the weights of blocks by their log2 distance; the weight of an empty slot is 0."""
    bins = log2_bin(np.arange(rows.num_blocks + 1))[rows.own - ids]
    lead, count = ids.shape[:2], rows.num_bins
    place = (_lead(lead) * count + np.minimum(bins, count - 1)).ravel()
    size = int(np.prod(lead)) * count
    return {
        name: np.bincount(place, weights=value.ravel(), minlength=size).reshape(*lead, count)
        for name, value in weights.items()
    }


def _by_position(values: dict[str, np.ndarray], rows: Rows) -> dict[str, np.ndarray]:
    return {f"{name}_by_position": rows.by_position(rows.by_own(value)) for name, value in values.items()}


def _lead(lead: tuple[int, ...]) -> np.ndarray:
    """The number of each (document, proxy), to be broadcast over rows and slots."""
    return np.arange(int(np.prod(lead))).reshape(*lead, 1, 1)
