"""The true value of every metric in a population: definitions written out again, from expectations (`truth`) alone.

Nothing here is shared with the estimators of `msa_analysis`.
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Float
from populations import BLOCKS, DIVERGENCE, OWN_MASS, SLOTS, Population
from truth import BIN, CHANCE, DISTANCE, NUM_BINS, OWNS, PARTS, VISIBLE, Truth, X


def information(table: Float[np.ndarray, "label bin"]) -> float:
    """Mutual information of a joint distribution, in bits: H(bin) - H(bin | label)."""
    joint = table / table.sum()

    def entropy(of: np.ndarray) -> float:
        return float(-(of[of > 0] * np.log2(of[of > 0])).sum())

    return entropy(joint.sum(0)) + entropy(joint.sum(1)) - entropy(joint)


def truths(population: Population) -> dict[str, float]:
    """Metric (with its bin, part, position or proxy in brackets) and true value, mean over proxies (or pairs)."""
    t = Truth(population)
    return _places(t) | _sink(t) | _strength(t) | _recall(t) | _mass(t) | _overlap(t) | _kept(t) | _heads(t)


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
    far = np.log2(np.maximum(DISTANCE, 1))
    mean, square = t.mean_of("proxy", far), t.mean_of("proxy", far**2)
    total = square.mean() - mean.mean() ** 2  # proxies have as many slots each
    return found | {"eta_squared": float(mean.var() / total) if total > 1e-9 else np.nan}


def _recall(t: Truth) -> dict[str, float]:
    hits, wanted = t.hits(), np.einsum("lo,plob->pob", t.rows, t.marginal("teacher"))
    chance = wanted * CHANCE[:, None]
    rate = [each.sum((1, 2)) / wanted.sum((1, 2)) for each in (hits, chance)]
    found = {"block_recall": float(rate[0].mean()), "recall_excess": float((rate[0] - rate[1]).mean())}
    for b in range(1, NUM_BINS):
        held = (wanted * (b == BIN)).sum((1, 2))
        if (held > 1e-9).all():
            found[f"recall_by_distance[{b}]"] = float(((hits * (b == BIN)).sum((1, 2)) / held).mean())
    for i in range(PARTS):
        rows = i == OWNS * PARTS // BLOCKS
        if (wanted[:, rows].sum((1, 2)) > 1e-9).all():
            rate = hits[:, rows].sum((1, 2)) / wanted[:, rows].sum((1, 2))
            found[f"recall_by_position[{i}]"] = float(rate.mean())
    return found


def _overlap(t: Truth) -> dict[str, float]:
    """Means over pairs. `kappa` is over all rows; `positional` and `content` over rows that two documents have."""
    if t.of.source == "teacher" or len(t.of.lean) < 2:
        return {}
    here = t.rows.sum(0)
    there, has = here**2, np.where(here > 0, here, 1)
    rows = []
    for p in range(len(t.of.lean)):
        for q in range(p + 1, len(t.of.lean)):
            same = (t.rows * t.pair(p, q)).sum(0) / has
            kappa, positional = _kappa(same, here), _kappa(t.elsewhere(p, q), there)
            rows.append(
                ((here * same).sum() / (SLOTS * here.sum()), kappa, positional, _kappa(same, there) - positional)
            )
    return dict(zip(("overlap", "kappa", "positional", "content"), np.mean(rows, 0).tolist(), strict=True))


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
    here, free, h = t.rows.sum(0), 1 - OWN_MASS, t.heavy
    wanted = np.einsum("lo,plob->pob", t.rows, t.marginal("teacher"))
    newest = wanted * (DISTANCE <= SLOTS)
    rest = (1 - h) / (OWNS - SLOTS)

    def held(on: np.ndarray) -> float:
        """Mean mass a row on SLOTS blocks of which `on` (own block) are the teacher's, mean over proxies."""
        mass = free * (h / SLOTS * on + rest * (SLOTS * here - on))
        return float(mass.sum(-1).mean() / here.sum())

    own, best, window = held(t.hits().sum(-1)), free * h, held(newest.sum(-1))
    random = float((here * CHANCE).sum() / here.sum()) * free
    found = {"captured_mass": own, "captured_mass_teacher": best, "captured_mass_window": window}
    return found | _coverage("", own / best, random / best, window / best) | _reached(t, wanted, newest)


def _coverage(suffix: str, own: float, random: float, window: float) -> dict[str, float]:
    return {
        f"coverage{suffix}": own,
        f"coverage_window{suffix}": window,
        f"coverage_over_random{suffix}": (own - random) / (1 - random),
        f"coverage_over_window{suffix}": (own - window) / (1 - window) if window < 1 - 1e-9 else np.nan,
    }


def _reached(t: Truth, wanted: np.ndarray, newest: np.ndarray) -> dict[str, float]:
    """By the distance of the teacher's block: all its blocks hold as much, so that mass is a number of blocks."""
    each = (1 - OWN_MASS) * t.heavy / SLOTS / t.rows.sum()
    found = {}
    for b in range(1, NUM_BINS):
        sums = [(of * (b == BIN)).sum() for of in (wanted, t.hits(), wanted * CHANCE[:, None], newest)]
        found[f"captured_mass_by_distance[{b}]"] = each * sums[1] / len(wanted)
        if sums[0] > 1e-9:
            found |= _coverage(f"_by_distance[{b}]", *(float(s / sums[0]) for s in sums[1:]))
            del found[f"coverage_window_by_distance[{b}]"]
    return found


def _kept(t: Truth) -> dict[str, float]:
    """Of a proxy against its earlier self, and against itself elsewhere: over rows that two documents have."""
    if t.of.source == "teacher":
        return {}
    here, proxies = t.rows.sum(0), range(len(t.of.lean))
    there, has = here**2, np.where(here > 0, here, 1)
    found = {"fixed_choice": float(np.mean([_kappa(t.elsewhere(p, p), there) for p in proxies]))}
    if t.of.first is None:
        return found
    same = [(t.rows * t.kept(p)).sum(0) / has for p in proxies]
    other = [t.elsewhere(p, p, "first") for p in proxies]
    again = [[float((there * each).sum() / (SLOTS * there.sum())) for each in kind] for kind in (same, other)]
    found["churn"] = 1 - float(np.mean(again[0]))
    rescaled = [(s - o) / (1 - o) if o < 1 - 1e-9 else np.nan for s, o in zip(*again, strict=True)]
    return found | {"stability": float(np.mean(rescaled))}


def _heads(t: Truth) -> dict[str, float]:
    """Of the heads' own top blocks, in adjacent groups; a regrouping has each set of heads as often as any other."""
    heads, groups = len(t.of.heads), len(t.of.lean)
    if not heads:
        return {}
    table, here = t.table("head", BIN, NUM_BINS), t.rows.sum(0)
    has = np.where(here > 0, here, 1)
    shared = {pair: (t.rows * t.heads_share(*pair)).sum(0) / has for pair in itertools.combinations(range(heads), 2)}
    size, own = heads // groups, information(table)
    kappa = {pair: _kappa(each, here) for pair, each in shared.items()}
    within = [value for (i, j), value in kappa.items() if i // size == j // size]
    found = {
        "mutual_information_heads": own,
        "mutual_information_share": information(t.table("proxy", BIN, NUM_BINS)) / own if own > 1e-9 else np.nan,
        "overlap_heads": float(np.mean([(here * each).sum() / (SLOTS * here.sum()) for each in shared.values()])),
        "kappa_heads": float(np.mean(list(kappa.values()))),
        "group_divergence": DIVERGENCE[0],
        "group_divergence_excess": DIVERGENCE[0] - DIVERGENCE[1],
    }
    if groups != 2:
        return found
    sets = [list(chosen) for chosen in itertools.combinations(range(heads), size)]
    random = np.mean([information(np.stack([table[s].sum(0), np.delete(table, s, 0).sum(0)])) for s in sets])
    real = information(table.reshape(2, size, -1).sum(1))
    return found | {"group_information_excess": real - float(random), "kappa_within_groups": float(np.mean(within))}
