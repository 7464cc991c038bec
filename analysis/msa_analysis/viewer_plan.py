"""How much of a selection log a page can hold: what is thinned out, in which order, until it fits."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

TILES = 512
"""Most cells along a side of a stored map."""
CHUNK_OVERHEAD = 100
"""Bytes of markup and padding around one piece of data."""


@dataclass(frozen=True)
class Size:
    """What a log holds; `maps` is layers x proxies, `text_bytes` of the largest document with its token lengths."""

    steps: int
    documents: int
    queries: int
    blocks: int
    maps: int
    slots: int
    slot_bytes: int
    text_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a page holds of it: records, documents, queries of each document, cells along a side of a map."""

    steps: int
    documents: int
    queries: int
    tiles: int


def plan_page(size: Size, max_bytes: float) -> Plan:
    """The fullest plan of at most `max_bytes` of `page_bytes`; the smallest one where none fits.

    Queries are thinned first, then records, documents and maps, in turns, each to a floor that keeps it useful.
    """
    held = Plan(size.steps, size.documents, size.queries, min(size.blocks, TILES))
    for name, floor in _ladder(size.blocks):
        if page_bytes(size, held) <= max_bytes:
            return held
        high = getattr(held, name)
        low = min(floor, high)
        fitting = bisect_right(range(low, high + 1), max_bytes, key=lambda n: page_bytes(size, _with(held, name, n)))
        held = _with(held, name, low + max(0, fitting - 1))
    return held


def page_bytes(size: Size, plan: Plan) -> int:
    """Bytes that a log takes in the page, as base64."""
    one_map = plan.tiles * (plan.tiles + 1)
    one_document = plan.queries * size.slots * size.slot_bytes
    raw = plan.steps * size.maps * (one_map + plan.documents * one_document) + plan.documents * size.text_bytes
    chunks = plan.steps * (1 + plan.documents) + 2 * plan.documents
    return -(-raw * 4 // 3) + CHUNK_OVERHEAD * chunks + 16 * plan.queries


def _ladder(blocks: int) -> list[tuple[str, int]]:
    return [
        ("queries", 8 * blocks),
        ("steps", 24),
        ("queries", 4 * blocks),
        ("steps", 12),
        ("documents", 4),
        ("queries", blocks),
        ("tiles", 128),
        ("steps", 8),
        ("documents", 2),
        ("tiles", 64),
        ("queries", 64),
        ("steps", 4),
        ("documents", 1),
        ("steps", 2),
        ("tiles", 32),
    ]


def _with(plan: Plan, name: str, value: int) -> Plan:
    return replace(plan, **{name: value})
