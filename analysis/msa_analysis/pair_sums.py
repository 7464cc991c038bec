"""Blocks that two choices share in the same row: of the same document, and of every other one."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from msa_analysis.choices import Rows

PAIRED = ("shared_here", "shared_other", "slots_other", "chance_other", "kept_here", "kept_other", "kept_slots")
"""Sums over ordered pairs of two documents, booked at both: half of their sum is the total.

The first document's choice is held against the same document's (`_here`) and against the second one's (`_other`), in
the rows that both have: documents of unequal length must not be compared over different rows.
"""
NEXT = {"shared_other": "shared_next", "slots_other": "slots_next", "chance_other": "chance_next"}
"""What each document and the next one (the first, after the last) add to such a sum."""

Ids = Int[np.ndarray, "document proxy slot row"]


def found(
    ids: Int[np.ndarray, "... slot row"], among: Int[np.ndarray, "... other_slot row"]
) -> Bool[np.ndarray, "... slot row"]:
    """Which ids (never a -1) also stand in the same row of `among`."""
    hit = np.zeros(np.broadcast_shapes(ids.shape[:-2], among.shape[:-2]) + ids.shape[-2:], dtype=bool)
    for slot in range(among.shape[-2]):
        hit |= ids == among[..., slot : slot + 1, :]
    return hit & (ids >= 0)


def pairs(chosen: Ids, rows: Rows, *, elsewhere: bool = True) -> dict[str, np.ndarray]:
    """Shared blocks of every pair of proxies (proxy, other), with their expectation under uniform choice."""
    proxies, eligible = chosen.shape[1], np.maximum(rows.eligible, 1)
    slots = (chosen >= 0).sum(-2)
    same = np.zeros((len(chosen), proxies, proxies, slots.shape[-1]))
    for q in range(proxies):
        same[:, q, q] = slots[:, q]
        same[:, :q, q] = same[:, q, :q] = found(chosen[:, :q], chosen[:, [q]]).sum(-2)
    shared = same.sum(-1)
    sums = {"shared": shared, "chance_shared": np.einsum("dpr,dqr->dpq", slots / eligible, slots)}
    if not elsewhere:
        return sums
    valid = (slots > 0).astype(float)
    # Document d holds p and another one holds q, or the other way round.
    row = _everywhere(chosen, _popular(chosen, rows), rows) - shared
    return sums | {
        "shared_here": _both(same, valid[:, None]).sum(-1),
        "shared_other": row + row.transpose(0, 2, 1),
        "slots_other": _crossed(slots, valid),
        "chance_other": _crossed(slots / eligible, slots),
        **_next(chosen, slots, rows),
    }


def _next(chosen: Ids, slots: np.ndarray, rows: Rows) -> dict[str, np.ndarray]:
    """Of NEXT, by document."""
    after, eligible = np.roll(chosen, -1, 0), np.maximum(rows.eligible, 1)
    row = np.stack([found(chosen, after[:, [q]]).sum((-2, -1)) for q in range(chosen.shape[1])], -1).astype(float)

    def both(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return first @ np.roll(second, -1, 0).swapaxes(1, 2) + np.roll(first, -1, 0) @ second.swapaxes(1, 2)

    return {
        "shared_next": row + row.transpose(0, 2, 1),
        "slots_next": both(slots.astype(float), (slots > 0).astype(float)),
        "chance_next": both(slots / eligible, slots.astype(float)),
    }


def kept(chosen: Ids, before: Ids | None, rows: Rows) -> dict[str, np.ndarray]:
    """Blocks that a proxy had chosen in the record before: of the same document, and of others; NaN without one."""
    if before is None:
        return {name: np.full(chosen.shape[:2], np.nan) for name in ("kept_here", "kept_other", "kept_slots")}
    slots, earlier = (chosen >= 0).sum(-2), (before >= 0).sum(-2)
    same = found(chosen, before).sum(-2)
    other = _of_itself(chosen, _popular(before, rows), rows) + _of_itself(before, _popular(chosen, rows), rows)
    other -= 2 * same.sum(-1)
    was = (earlier > 0).astype(float)
    return {
        "kept_here": _both(same, was).sum(-1),
        "kept_other": other,
        "kept_slots": _both(slots, was).sum(-1),
    }


def _both(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Row by row: first of document d times second of every other, and the other way round."""
    return first * (second.sum(0) - second) + (first.sum(0) - first) * second


def _crossed(first: np.ndarray, second: np.ndarray) -> Float[np.ndarray, "document proxy other"]:
    """`_both` for every pair of proxies, first of one and second of the other, summed over rows."""
    own = np.einsum("dpr,dqr->dpq", first, second)
    mine, theirs = np.einsum("dpr,qr->dpq", first, second.sum(0)), np.einsum("pr,dqr->dpq", first.sum(0), second)
    return mine + theirs - 2 * own


def _place(ids: Ids, rows: Rows) -> Int[np.ndarray, "document proxy slot*row"]:
    """A number for every row and block; 0 of each row is no block."""
    place = (np.arange(ids.shape[-1]) * (rows.num_blocks + 1) + 1) + ids
    return place.reshape(*ids.shape[:2], -1)


def _popular(ids: Ids, rows: Rows) -> Float[np.ndarray, "place proxy"]:
    """In how many documents each proxy chose each block, by row."""
    proxies, none = ids.shape[1], rows.num_blocks + 1
    place = _place(ids, rows) * proxies + np.arange(proxies)[:, None]
    counts = np.bincount(place.ravel(), minlength=ids.shape[-1] * none * proxies).reshape(-1, proxies)
    counts[::none] = 0
    return counts.astype(np.float32)


def _everywhere(ids: Ids, popular: np.ndarray, rows: Rows) -> Float[np.ndarray, "document proxy other"]:
    """Blocks of each document that are shared with all documents, its own included."""
    # Whole numbers below 2**24, as a piece of a layer gives, add up exactly in float32.
    held = popular.take(_place(ids, rows), 0)
    return (np.ones(held.shape[2], np.float32) @ held).astype(float)


def _of_itself(ids: Ids, popular: np.ndarray, rows: Rows) -> Float[np.ndarray, "document proxy"]:
    """`_everywhere` of each proxy with itself."""
    proxies = ids.shape[1]
    return popular.take(_place(ids, rows) * proxies + np.arange(proxies)[:, None]).sum(-1).astype(float)
