"""The true value of every metric in a population: definitions written out again, from expectations (`truth`) alone.

Nothing here is shared with the estimators of `msa_analysis`.
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Float
from populations import BLOCKS, DIVERGENCE, ENTROPY, OWN_MASS, SLOTS, STEP, Population
from truth import BIN, CHANCE, DISTANCE, NUM_BINS, OWNS, PARTS, VISIBLE, Truth, X

TINY = 1e-9
"""What rounding may leave of 0."""


def information(table: Float[np.ndarray, "label bin"]) -> float:
    """Mutual information of a joint distribution, in bits: H(bin) - H(bin | label)."""
    joint = table / table.sum()

    def entropy(of: np.ndarray) -> float:
        return float(-(of[of > 0] * np.log2(of[of > 0])).sum())

    return entropy(joint.sum(0)) + entropy(joint.sum(1)) - entropy(joint)


def truths(population: Population) -> dict[str, float]:
    """Metric (with its bin, part, position or proxy in brackets) and true value, mean over proxies (or pairs)."""
    t = Truth(population)
    return _since(t) | _places(t) | _sink(t) | _strength(t) | _recall(t) | _mass(t) | _alike(t) | _heads(t)


def _places(t: Truth) -> dict[str, float]:
    found = {}
    for name, suffix in (("proxy", ""), ("teacher", "_teacher")):
        bins, parts = t.table(name, BIN, NUM_BINS), t.table(name, np.where(VISIBLE, _part(X), -1), PARTS)
        bins, parts = ((table / table.sum(1, keepdims=True)).mean(0).tolist() for table in (bins, parts))
        found |= {f"distance_profile{suffix}[{b}]": share for b, share in enumerate(bins) if b}
        found |= {f"position_profile{suffix}[{i}]": share for i, share in enumerate(parts)}
    own, teacher = (float(t.mean_of(name, 1 - X).mean()) for name in ("proxy", "teacher"))
    return found | {"recency": own, "recency_teacher": teacher, "excess_recency": own - teacher}


def _part(x: np.ndarray) -> np.ndarray:
    return np.minimum(np.floor(x * PARTS + 1e-9), PARTS - 1).astype(int)


def _strength(t: Truth) -> dict[str, float]:
    table = t.table("proxy", BIN, NUM_BINS)
    own, share = information(table), table / table.sum(1, keepdims=True)
    found = {"mutual_information": own, "mutual_information_teacher": information(t.table("teacher", BIN, NUM_BINS))}
    for p, mine in enumerate(share):
        used = mine > 0
        found[f"proxy_information[{p}]"] = float((mine[used] * np.log2(mine[used] / share.mean(0)[used])).sum())
    if t.of.first:
        found["mutual_information_excess"] = own - information(t.table("first", BIN, NUM_BINS))
    found |= {"eta_squared": _between(t, "proxy"), "eta_squared_teacher": _between(t, "teacher")}
    if t.of.first:
        found["eta_squared_excess"] = found["eta_squared"] - _between(t, "first")
    return found


def _between(t: Truth, name: str) -> float:
    """Between-label share of the variance of log2 distance; labels have as many slots each."""
    far = np.log2(np.maximum(DISTANCE, 1))
    mean, square = t.mean_of(name, far), t.mean_of(name, far**2)
    total = square.mean() - mean.mean() ** 2
    return float(mean.var() / total) if total > TINY else np.nan


def _since(t: Truth) -> dict[str, float]:
    """`emergence` of what grows after `first`; only where there is more than one record at which chance could err."""
    if t.of.records[0] < 2:
        return {}
    grown = [name for name, value in _strength(t).items() if name.endswith("_excess") and value > TINY]
    return {f"emergence[{name}]": float(STEP * t.of.records[0]) for name in grown}


def _recall(t: Truth) -> dict[str, float]:
    hits, wanted = t.hits(), np.einsum("lo,plob->pob", t.rows, t.marginal("teacher"))
    chance = wanted * CHANCE[:, None]
    rate = [each.sum((1, 2)) / wanted.sum((1, 2)) for each in (hits, chance)]
    found = {"block_recall": float(rate[0].mean()), "recall_excess": float((rate[0] - rate[1]).mean())}
    for b in range(1, NUM_BINS):
        held = (wanted * (b == BIN)).sum()
        if held > TINY:
            found[f"recall_by_distance[{b}]"] = float((hits * (b == BIN)).sum() / held)
    for i in range(PARTS):
        rows = i == OWNS * PARTS // BLOCKS
        if wanted[:, rows].sum() > TINY:
            found[f"recall_by_position[{i}]"] = float(hits[:, rows].sum() / wanted[:, rows].sum())
    return found


def _alike(t: Truth) -> dict[str, float]:
    """Of two proxies, of one with itself, and the alarm that rests on both; not where each follows its teacher."""
    if t.of.source == "teacher":
        return {}
    there, proxies = t.rows.sum(0) ** 2, len(t.of.lean)
    fixed = np.array([_kappa(t.elsewhere(p, p), there) for p in range(proxies)])
    found, twins = {"fixed_choice": float(fixed.mean())}, np.zeros(proxies)
    if pairs := _pairs(t):
        names = ("overlap", "kappa", "positional", "content")
        found |= dict(zip(names, np.mean(list(pairs.values()), 0).tolist(), strict=True))
        others = [sorted(pairs[both][1] for both in pairs if p in both) for p in range(proxies)]
        twins = np.array([kappas[-1] for kappas in others])
        # Of pairs that are about as much alike the largest estimate is too large: no twin is planted there.
        found |= {f"twin[{p}]": k[-1] for p, k in enumerate(others) if len(k) < 2 or k[-1] - k[-2] > CLEAR}
    return found | _kept(t) | _alarm(t, fixed, twins)


def _alarm(t: Truth, fixed: np.ndarray, twins: np.ndarray) -> dict[str, float]:
    """`collapse` by proxy, where no rule is so close to its threshold that chance would decide."""
    least = max(UNUSED, float(Truth(Population(lengths=t.of.lengths)).missed()[0]))
    beyond = np.maximum.reduce([fixed - SAME, twins - SAME, t.missed() - least])
    return {f"collapse[{p}]": float(by > 0) for p, by in enumerate(beyond) if abs(by) > CLEAR}


SAME, UNUSED, CLEAR = 0.9, 0.5, 0.05
"""Thresholds of the alarm, and how far from them a true value is clear."""


def _pairs(t: Truth) -> dict[tuple[int, int], tuple[float, float, float, float]]:
    """overlap, kappa (over all rows), positional, content (over rows that two documents have)."""
    here = t.rows.sum(0)
    there, has = here**2, np.where(here > 0, here, 1)
    found = {}
    for p, q in itertools.combinations(range(len(t.of.lean)), 2):
        same = (t.rows * t.pair(p, q)).sum(0) / has
        share, positional = float((here * same).sum() / (SLOTS * here.sum())), _kappa(t.elsewhere(p, q), there)
        found[p, q] = (share, _kappa(same, here), positional, _kappa(same, there) - positional)
    return found


def _kappa(shared: Float[np.ndarray, " own"], weight: Float[np.ndarray, " own"]) -> float:
    """(o - e)/(1 - e) of the shared blocks in rows of these weights."""
    chance = (weight * CHANCE).sum() / weight.sum()
    return ((weight * shared).sum() / (SLOTS * weight.sum()) - chance) / (1 - chance)


def _sink(t: Truth) -> dict[str, float]:
    first = (VISIBLE & (np.arange(BLOCKS) == 0)).astype(float)
    own, teacher = (SLOTS * float(t.mean_of(name, first).mean()) for name in ("proxy", "teacher"))
    here = t.rows.sum(0)
    excess = own - float((here * CHANCE).sum() / here.sum())
    found = {"sink_share": own, "sink_share_teacher": teacher, "sink_excess": excess}
    return found | {"never_selected": float(t.missed().mean())} if t.of.source != "teacher" else found


def _mass(t: Truth) -> dict[str, float]:
    """The teacher's blocks hold `heavy` of what the own block leaves, in equal parts; the others share the rest."""
    wanted = np.einsum("lo,plob->pob", t.rows, t.marginal("teacher"))
    hits, newest = t.hits(), wanted * (DISTANCE <= SLOTS)
    found = _reached(t, wanted, hits, newest)
    places = {"": np.ones(len(OWNS), bool)}
    places |= {f"_by_position[{i}]": i == OWNS * PARTS // BLOCKS for i in range(PARTS)}
    for suffix, rows in places.items():
        if (here := t.rows.sum(0) * rows).sum() > 0:
            found |= _held(suffix, here, hits.sum(-1) * rows, newest.sum(-1) * rows, t.heavy)
    return found


def _held(suffix: str, here: np.ndarray, hits: np.ndarray, newest: np.ndarray, heavy: float) -> dict[str, float]:
    """In rows of these weights (by own block), with as many of the teacher's blocks hit, by proxy and own block."""
    free = 1 - OWN_MASS

    def mass(on: np.ndarray) -> float:
        """Mean mass a row on SLOTS blocks of which `on` are the teacher's, mean over proxies."""
        each = free * (heavy / SLOTS * on + (1 - heavy) / (OWNS - SLOTS) * (SLOTS * here - on))
        return float(each.sum(-1).mean() / here.sum())

    own, best, window = mass(hits), free * heavy, mass(newest)
    random = float((here * CHANCE).sum() / here.sum()) * free
    found = {"captured_mass": own, "captured_mass_teacher": best, "captured_mass_window": window}
    found = {name + suffix: value for name, value in found.items()}
    return found | _coverage(suffix, own / best, random / best, window / best)


def _coverage(suffix: str, own: float, random: float, window: float) -> dict[str, float]:
    return {
        f"coverage{suffix}": own,
        f"coverage_window{suffix}": window,
        f"coverage_over_random{suffix}": (own - random) / (1 - random),
        f"coverage_over_window{suffix}": (own - window) / (1 - window) if window < 1 - TINY else np.nan,
    }


def _reached(t: Truth, wanted: np.ndarray, hits: np.ndarray, newest: np.ndarray) -> dict[str, float]:
    """By the distance of the teacher's block: all its blocks hold as much, so that mass is a number of blocks."""
    each = (1 - OWN_MASS) * t.heavy / SLOTS / t.rows.sum()
    found = {}
    for b in range(1, NUM_BINS):
        sums = [(of * (b == BIN)).sum() for of in (wanted, hits, wanted * CHANCE[:, None], newest)]
        found[f"captured_mass_by_distance[{b}]"] = each * sums[1] / len(wanted)
        if sums[0] > TINY:
            found |= _coverage(f"_by_distance[{b}]", *(float(s / sums[0]) for s in sums[1:]))
            del found[f"coverage_window_by_distance[{b}]"]
    return found


def _kept(t: Truth) -> dict[str, float]:
    """Of a proxy against its earlier self, over rows that two documents have."""
    if t.of.first is None:
        return {}
    here, proxies = t.rows.sum(0), range(len(t.of.lean))
    there, has = here**2, np.where(here > 0, here, 1)
    same = [(t.rows * t.kept(p)).sum(0) / has for p in proxies]
    other = [t.elsewhere(p, p, "before") for p in proxies]
    again = [[float((there * each).sum() / (SLOTS * there.sum())) for each in kind] for kind in (same, other)]
    rescaled = [(s - o) / (1 - o) if o < 1 - TINY else np.nan for s, o in zip(*again, strict=True)]
    return {"churn": 1 - float(np.mean(again[0])), "stability": float(np.mean(rescaled))}


def _heads(t: Truth) -> dict[str, float]:
    """Of the heads' own top blocks, in adjacent groups; a regrouping has each set of heads as often as any other."""
    heads, groups = len(t.of.heads), len(t.of.lean)
    if not heads:
        return {}
    table, here = t.table("head", BIN, NUM_BINS), t.rows.sum(0)
    variance = _between(t, "head")
    has = np.where(here > 0, here, 1)
    shared = {pair: (t.rows * t.heads_share(*pair)).sum(0) / has for pair in itertools.combinations(range(heads), 2)}
    size, own = heads // groups, information(table)
    kappa = {pair: _kappa(each, here) for pair, each in shared.items()}
    within = [value for (i, j), value in kappa.items() if i // size == j // size]
    found = {
        "mutual_information_heads": own,
        "mutual_information_share": information(t.table("proxy", BIN, NUM_BINS)) / own if own > TINY else np.nan,
        "eta_squared_heads": variance,
        "eta_squared_share": _between(t, "proxy") / variance if variance > TINY else np.nan,
        "overlap_heads": float(np.mean([(here * each).sum() / (SLOTS * here.sum()) for each in shared.values()])),
        "kappa_heads": float(np.mean(list(kappa.values()))),
        "teacher_entropy": ENTROPY * float((here * np.log(1 + OWNS)).sum() / here.sum()),
        "group_divergence": DIVERGENCE[0],
        "group_divergence_excess": DIVERGENCE[0] - DIVERGENCE[1],
    }
    if groups != 2:
        return found
    sets = [list(chosen) for chosen in itertools.combinations(range(heads), size)]
    random = np.mean([information(np.stack([table[s].sum(0), np.delete(table, s, 0).sum(0)])) for s in sets])
    real = information(table.reshape(2, size, -1).sum(1))
    return found | {"group_information_excess": real - float(random), "kappa_within_groups": float(np.mean(within))}
