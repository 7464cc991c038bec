"""A selection log as pieces of the viewer's page: maps, slots of single queries, text; each a run of plain numbers.

Block ids are uint8 or uint16 with the largest value for "no block"; scores and masses are the log's own float16, bit
for bit; rates are uint16 steps of 1/65534, 65535 where no query was recorded. All little-endian, lower triangles of
maps row by row, slots in the order (layer, proxy, query, slot).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from msa_analysis.viewer_plan import Plan, Size
from msa_analysis.viewer_text import Speak
from msa_lab.selections import selection_rate

DIMS = ("layer", "document", "proxy", "query", "slot")
FIELDS = ("score", "mass", "teacher_mass", "selected", "teacher")
"""Two-byte variables first, so that all of them are aligned."""
LEVELS = 65534


@dataclass(frozen=True)
class Log:
    """A selection log, what to call it, and how its tokens read."""

    label: str
    data: xr.Dataset
    speak: Speak
    kinds: tuple[str, ...] = ()
    """Kind of attention of each recorded layer."""

    @property
    def blocks(self) -> int:
        """Blocks of a document."""
        return -(-int(self.data.attrs["context_length"]) // int(self.data.attrs["block_size"]))

    @property
    def id_type(self) -> str:
        """NumPy name of the type that holds a block id or "none"."""
        return "<u1" if self.blocks < 256 else "<u2"

    @property
    def fields(self) -> list[str]:
        """Variables that the log has."""
        return [name for name in FIELDS if name in self.data]

    def id_bytes(self, name: str) -> int:
        """Bytes of a block id where `name` holds ids, 0 where it holds 16-bit numbers."""
        return np.dtype(self.id_type).itemsize if name in ("selected", "teacher") else 0

    def size(self) -> Size:
        """What the log holds, for `plan_page`."""
        sizes = self.data.sizes
        texts = [len(text) + 2 * len(lengths) for text, lengths in map(self.text, range(sizes["document"]))]
        return Size(
            steps=sizes["step"],
            documents=sizes["document"],
            queries=sizes["query"],
            blocks=self.blocks,
            maps=sizes["layer"] * sizes["proxy"],
            slots=sizes["slot"],
            slot_bytes=sum(self.id_bytes(name) or 2 for name in self.fields),
            text_bytes=max(texts),
        )

    def text(self, document: int) -> tuple[bytes, Int[np.ndarray, " token"]]:
        """Text of a document in UTF-8 and bytes per token."""
        if "tokens" not in self.data:
            return b"", np.zeros(int(self.data.attrs["context_length"]), np.int64)
        return self.speak(self.data["tokens"].isel(document=document).values)


def document_key(name: str, text: bytes, lengths: Int[np.ndarray, " token"]) -> str:
    """Equal for documents of one name that read alike, token by token."""
    return hashlib.sha256(name.encode() + b"\0" + text + lengths.astype("<u2").tobytes()).hexdigest()[:16]


def picked_steps(log: Log, plan: Plan) -> Int[np.ndarray, " step"]:
    """Indices of the stored records: the first, the last and evenly between."""
    return np.linspace(0, log.data.sizes["step"] - 1, plan.steps).round().astype(int)


def picked_queries(log: Log, plan: Plan) -> Int[np.ndarray, " query"]:
    """Indices of the stored queries, evenly over the document."""
    return (2 * np.arange(plan.queries) + 1) * log.data.sizes["query"] // (2 * plan.queries)


def merged(log: Log, plan: Plan) -> tuple[int, int]:
    """Blocks along a side of a map's cell, and cells along a side of a map."""
    blocks = -(-log.blocks // plan.tiles)
    return blocks, -(-log.blocks // blocks)


def pieces(log: Log, plan: Plan) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every map and slot, one record in memory at a time: `m<step>`, `d<step>-<document>`."""
    queries = picked_queries(log, plan)
    for place, step in enumerate(picked_steps(log, plan)):
        kept = [bytearray() for _ in range(plan.documents)]
        for name in log.fields:
            record = log.data[name].isel(step=step).transpose(*DIMS).values
            if name == "selected":
                yield f"m{place}", _maps(log, plan, record)
            for document, held in enumerate(kept):
                held += _packed(record[:, document][:, :, queries], name, log.id_type)
        for document, held in enumerate(kept):
            yield f"d{place}-{document}", bytes(held)


def _packed(values: np.ndarray, name: str, id_type: str) -> bytes:
    if name not in ("selected", "teacher"):
        return values.astype("<f2").tobytes()
    # In two's complement the id -1 is the unsigned type's largest value.
    return values.astype(np.int64).astype(id_type).tobytes()


def _maps(log: Log, plan: Plan, record: Int[np.ndarray, "layer document proxy query slot"]) -> bytes:
    query, size = log.data["query"].values, int(log.data.attrs["block_size"])
    tiles = merged(log, plan)
    # One document at a time: a layer's choices as 64-bit cells would take more memory than the record.
    rates = [sum(tile_rate(part, query, size, tiles) for part in layer) / len(layer) for layer in record]
    lower = np.tril_indices(tiles[1])
    steps = np.nan_to_num(np.stack(rates)[..., lower[0], lower[1]] * LEVELS, nan=LEVELS + 1)
    return steps.round().astype("<u2").tobytes()


def tile_rate(
    selected: Int[np.ndarray, "*axes query slot"],
    query: Int[np.ndarray, " query"],
    block_size: int,
    tiles: tuple[int, int],
) -> Float[np.ndarray, "*axes tile tile"]:
    """Share of the pairs (query, visible block) of a tile that were selected; tiles are (blocks a side, tiles a side).

    With one block a side this is `selection_rate`. NaN where no query could select.
    """
    side, count = tiles
    hits = selection_rate(selected // side, query, block_size=block_size * side, num_blocks=count)
    own = query // block_size
    rows = np.bincount(own // side, minlength=count)
    seen = np.bincount(own // side, weights=own % side + 1, minlength=count) / np.maximum(rows, 1)
    visible = np.where(np.eye(count, dtype=bool), seen[:, None], side)
    return hits / np.maximum(visible, 1)


def described(log: Log, plan: Plan, documents: list[int]) -> dict[str, Any]:
    """What the page must know to read the pieces; `documents` are places in the page's list of texts."""
    data, attrs = log.data, log.data.attrs
    steps, (side, tiles) = picked_steps(log, plan), merged(log, plan)
    phases = data["phase"].values[steps].tolist() if "phase" in data.coords else [""] * len(steps)
    return {
        "label": log.label,
        "layers": [int(layer) for layer in data["layer"].values],
        "kinds": list(log.kinds),
        "proxies": data.sizes["proxy"],
        "slots": data.sizes["slot"],
        "block": int(attrs["block_size"]),
        "blocks": log.blocks,
        "context": int(attrs["context_length"]),
        "budget": int(attrs["top_k_blocks"]),
        "local": int(attrs.get("num_local_blocks", 0)),
        "sink": int(attrs.get("num_sink_blocks", 0)),
        "steps": data["step"].values[steps].tolist(),
        "phases": phases,
        "queries": data["query"].values[picked_queries(log, plan)].tolist(),
        "documents": documents,
        "fields": [
            [name, np.dtype(log.id_type).itemsize if name in ("selected", "teacher") else 0] for name in log.fields
        ],
        "side": side,
        "tiles": tiles,
        "log": {name: data.sizes[name] for name in ("step", "document", "query")},
    }
