"""Planted selection logs: documents are drawn from a population whose every metric is known before it is measured.

In a row with `own` earlier blocks a proxy reads its own block and SLOTS others. It draws them without replacement with
weights exp(lean x place), place from -1/2 (oldest) to +1/2 (newest); or, with the document's probability, it copies
them from a source. Rows of a document are not independent: the lean and the probability are the document's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

BLOCK, BLOCKS, SLOTS = 2, 24, 2
"""Tokens a block; blocks of a full document; learned slots a row."""
STEP = 100
"""Training steps from record to record."""
OWN_MASS = 0.3
"""Dense attention on the own block."""
TOP_K = SLOTS + 1
FIRST = 4 * TOP_K - 1
"""The first own block whose rows count: they see 4 x TOP_K blocks."""
STRIDE = 4
"""The place that proxies copy: distances STRIDE, 2 STRIDE, ..."""
DIVERGENCE = (0.2, 0.25)
"""Between the heads of a group, and of heads grouped at random: means over documents."""
ENTROPY = 0.6
"""Of the dense attention by block, as a share of its most: mean over documents."""
NEWEST, OLDEST = 1e4, -1e4
"""Leans that leave nothing to chance."""
UNEQUAL = (13, 14, 16, 18, 21, 24)
"""Lengths of documents, in blocks, each as frequent: the shortest has 4 rows that count, the longest 26."""


@dataclass(frozen=True, kw_only=True)
class Population:
    """What documents are drawn from. Leans are one a proxy."""

    lean: tuple[float, ...] = (0.0, 0.0)
    """Above 0: towards the newest blocks."""
    common: float = 0.0
    """Standard deviation, over documents, of a lean that all proxies of a document share."""
    own: float = 0.0
    """Standard deviation, over documents, of each proxy's own lean."""
    first: tuple[float, ...] | None = None
    """Leans at earlier records of the same documents (their effects stay); None: there are none."""
    records: tuple[int, int] = (1, 1)
    """How many records have `first`, and how many then have `lean`."""
    teacher: tuple[float, ...] | None = None
    """Leans of the teacher's own top blocks, with the document's effects on the proxy; None: as the proxies."""
    heads: tuple[float, ...] = ()
    """Leans of single heads; each has an effect of its own a document, as the proxies have."""
    copy: tuple[float, float] | None = None
    """Beta parameters of the document's probability that a proxy's row is copied (second 0: always); None: never."""
    copiers: tuple[int, ...] | None = None
    """Proxies that copy; None: all."""
    source: str = "document"
    """What is copied. `document`: uniform draws, a row, shared by the proxies; `place`: distances STRIDE, 2 STRIDE,
    alike in every document; `teacher`: the proxy's teacher's row."""
    heavy: tuple[float, float] | None = (4.0, 2.0)
    """Beta parameters of the document's share of dense attention, own block aside, that lies on the teacher's blocks
    in equal parts; the other blocks have the rest in equal parts. None: no attention is recorded."""
    lengths: tuple[int, ...] = (BLOCKS,)
    """Blocks of a document, each as frequent."""
    trend: float = 0.0
    """Lean that the longest documents have over the shortest (half of it above, half below none)."""
    seeds: float = 0.0
    """Standard deviation, over runs, of the factor (mean 1) on `lean`: training differs by seed."""

    @property
    def copies(self) -> Float[np.ndarray, " proxy"]:
        """1 for proxies that copy, 0 for the others."""
        proxies = np.arange(len(self.lean))
        return np.isin(proxies, proxies if self.copiers is None else self.copiers).astype(float)

    @property
    def course(self) -> list[tuple[float, ...]]:
        """Leans at each record."""
        first = [] if self.first is None else [self.first] * self.records[0]
        return [*first, *[self.lean] * self.records[1]]

    def longer(self, length: np.ndarray) -> np.ndarray:
        """Lean of documents of a length over the middle."""
        span = max(self.lengths) - min(self.lengths)
        return self.trend * ((length - min(self.lengths)) / span - 0.5) if span else 0.0 * length


def draw(population: Population, *, runs: int, documents: int, rng: np.random.Generator) -> xr.Dataset:
    """A selection log in which every layer is a run of its own: `runs` layers of `documents` documents."""
    proxies, size = len(population.lean), (runs, documents)
    length = rng.choice(population.lengths, size)
    shared = population.longer(length) + population.common * rng.normal(size=size)
    effect = shared[..., None] + population.own * rng.normal(size=(*size, proxies))
    rate, heavy = _share(population.copy, size, rng), _share(population.heavy, size, rng)
    factor = 1 + population.seeds * rng.normal(size=(runs, 1, 1))
    source = _chosen(np.zeros((*size, 1)), rng)
    selected, wanted = [], []
    for leans in population.course:
        teacher = leans if population.teacher is None else population.teacher
        wanted.append(_chosen(np.asarray(teacher) + effect, rng))
        own = _chosen(np.asarray(leans) * factor + effect, rng)
        copied = {"document": source, "place": _strided(), "teacher": wanted[-1]}[population.source]
        taken = rng.random((*size, proxies, BLOCKS * BLOCK)) < (rate[..., None] * population.copies)[..., None]
        selected.append(np.where(taken[..., None], copied, own))
    held = {"selected": _cut(np.stack(selected), length), "teacher": _cut(np.stack(wanted), length)}
    if population.heavy:
        held |= _masses(held["selected"], held["teacher"], heavy)
    if population.heads:
        own = shared[..., None] + population.own * rng.normal(size=(*size, len(population.heads)))
        held["head_teacher"] = _cut(_chosen(np.asarray(population.heads) + own, rng), length)
        held |= _divergence(held["selected"].shape[:1] + size, proxies, rng)
        held["entropy"] = _entropy(held["selected"].shape[:1] + size, proxies, rng)
    return _log(held)


def _share(beta: tuple[float, float] | None, size: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if beta is None or beta[1] == 0:
        return np.full(size, 0.0 if beta is None else 1.0)
    return rng.beta(*beta, size=size)


def _chosen(lean: Float[np.ndarray, "run document proxy"], rng: np.random.Generator) -> Int[np.ndarray, ...]:
    """Ids (run, document, proxy, query, SLOTS), drawn in rows that count; -1 elsewhere."""
    ids = np.full((*lean.shape, BLOCKS * BLOCK, SLOTS), -1, dtype=np.int16)
    for own in range(FIRST, BLOCKS):
        place = np.linspace(-0.5, 0.5, own, dtype=np.float32)
        noise = np.maximum(rng.standard_exponential((*lean.shape, BLOCK, own), dtype=np.float32), np.float32(1e-30))
        # The largest lean plus Gumbel noise is drawn with weights exp(lean), the next of the others likewise.
        taste = lean[..., None, None].astype(np.float32) * place - np.log(noise)
        for slot in range(SLOTS):
            best = taste.argmax(-1)
            ids[..., own * BLOCK : (own + 1) * BLOCK, slot] = best
            np.put_along_axis(taste, best[..., None], -np.inf, -1)
    return ids


def _strided() -> Int[np.ndarray, "query slot"]:
    own = np.arange(BLOCKS * BLOCK)[:, None] // BLOCK
    return np.where(own >= FIRST, own - STRIDE * np.arange(1, SLOTS + 1), -1).astype(np.int16)


def _cut(ids: np.ndarray, length: Int[np.ndarray, "run document"]) -> np.ndarray:
    """With the own block in every row that the document has, ascending, and -1 in the others."""
    own = np.arange(BLOCKS * BLOCK, dtype=np.int16) // BLOCK
    lead = ids.shape[:-1]
    full = np.concatenate([np.where(ids < 0, np.int16(BLOCKS), ids), np.broadcast_to(own[:, None], (*lead, 1))], -1)
    full = np.sort(full, -1)
    there = own < length[..., None]  # (run, document, query)
    return np.where(there[:, :, None, :, None] & (full < BLOCKS), full, np.int16(-1))


def _masses(
    selected: np.ndarray, teacher: np.ndarray, heavy: Float[np.ndarray, "run document"]
) -> dict[str, np.ndarray]:
    """Dense attention on the selected and the teacher's blocks, and its mean by query block and block."""
    own = np.arange(BLOCKS * BLOCK)[:, None] // BLOCK
    share = heavy[..., None, None, None]
    on, off = (1 - OWN_MASS) * share / SLOTS, (1 - OWN_MASS) * (1 - share) / np.maximum(own - SLOTS, 1)

    def at(ids: np.ndarray) -> np.ndarray:
        wanted = (ids[..., None] == teacher[..., None, :]).any(-1)
        mass = np.where(ids == own, OWN_MASS, np.where(wanted, on, off))
        return np.where(ids >= 0, mass, 0).astype(np.float32)

    newest = _newest(teacher, on, off[..., ::BLOCK, :])
    return {"mass": at(selected), "teacher_mass": at(teacher), "newest_mass": newest}


def _newest(teacher: np.ndarray, on: np.ndarray, off: np.ndarray) -> Float[np.ndarray, "... query_block distance"]:
    """Dense attention on the block at each distance, mean over the queries of a block; 0 behind the document's end."""
    block = np.arange(BLOCKS)[:, None] - np.arange(TOP_K, dtype=np.int16)
    queries = [teacher[..., i::BLOCK, :] for i in range(BLOCK)]
    wanted = np.mean([(row[..., None] == block[:, None]).any(-2) for row in queries], 0)
    mass = np.where(np.arange(TOP_K) == 0, OWN_MASS, wanted * on + (1 - wanted) * off)
    there = (queries[0] >= 0).any(-1, keepdims=True) & (block >= 0)
    return np.where(there, mass, 0).astype(np.float32)


def _divergence(lead: tuple[int, ...], proxies: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Between heads, by query block: some documents have more of it, in every group."""
    document = rng.gamma(4, 1 / 4, lead[1:])[..., None, None]
    real, random = (
        rng.gamma(4, mean / 4, (*lead[1:], count, BLOCKS))
        for mean, count in ((DIVERGENCE[0], proxies), (DIVERGENCE[1], 8))
    )
    return {
        "divergence": np.broadcast_to(document * real, (*lead, proxies, BLOCKS)),
        "regrouped_divergence": document * random,
    }


def _entropy(lead: tuple[int, ...], proxies: int, rng: np.random.Generator) -> np.ndarray:
    """Of the dense attention, by query block: more in some documents, and in rows that see more blocks."""
    share = ENTROPY * rng.gamma(4, 1 / 4, (*lead[1:], 1, 1)) * rng.gamma(4, 1 / 4, (*lead[1:], proxies, 1))
    return np.broadcast_to(share * np.log(1 + np.arange(BLOCKS)), (*lead, proxies, BLOCKS))


def _log(held: dict[str, np.ndarray]) -> xr.Dataset:
    lead = ("step", "layer", "document", "proxy")
    dims = dict.fromkeys(("selected", "teacher", "mass", "teacher_mass"), (*lead, "query", "slot"))
    dims |= {"newest_mass": (*lead, "query_block", "distance"), "head_teacher": (*lead[1:3], "head", "query", "slot")}
    dims |= {
        "divergence": (*lead, "query_block"),
        "entropy": (*lead, "query_block"),
        "regrouped_divergence": (*lead[1:3], "regrouping", "query_block"),
    }
    steps, runs, documents, proxies = held["selected"].shape[:4]
    return xr.Dataset(
        {name: (dims[name], values) for name, values in held.items()},
        coords={
            "step": STEP * np.arange(steps),
            "layer": np.arange(runs),
            "document": np.arange(documents),
            "proxy": np.arange(proxies),
            "query": np.arange(BLOCKS * BLOCK),
        },
        attrs={
            "block_size": BLOCK,
            "top_k_blocks": TOP_K,
            "num_local_blocks": 1,
            "num_sink_blocks": 0,
            "num_query_heads": held["head_teacher"].shape[2] if "head_teacher" in held else proxies,
        },
    )
