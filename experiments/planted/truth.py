"""What every metric is in a population of documents, in closed form: sums over blocks and Gauss-Hermite quadrature over
the documents' effects. Nothing here is shared with the estimators (`msa_analysis`): formulas are written out again.

The probability that a draw of two without replacement, with weights w (sum 1), holds block j is
w_j + sum over i != j of w_i w_j / (1 - w_i) (successive sampling).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from populations import BLOCK, BLOCKS, FIRST, NEWEST, SLOTS, STRIDE, Population
from scipy.special import roots_jacobi

NODES = 21
OWNS = np.arange(FIRST, BLOCKS)
DISTANCE = OWNS[:, None] - np.arange(BLOCKS)
VISIBLE = DISTANCE >= 1
BIN = np.where(VISIBLE, np.floor(np.log2(np.maximum(DISTANCE, 1))) + 1, 0).astype(int)
"""0: not eligible; 1: distance 1; 2: [2, 3]; 3: [4 .. 7]; ..."""
NUM_BINS = int(np.log2(BLOCKS - 1)) + 2
X = np.where(VISIBLE, (DISTANCE - 1) / (OWNS[:, None] - 1), 0.0)
PARTS = 8
CHANCE = SLOTS / OWNS
"""Probability that a uniform choice holds a given block, by own block."""


def inclusion(lean: Float[np.ndarray, "*lead"]) -> Float[np.ndarray, "*lead own block"]:
    """Probability that each block is among the SLOTS = 2 drawn."""
    lean = np.asarray(lean, dtype=float)[..., None, None]
    place = (np.arange(BLOCKS) / (OWNS[:, None] - 1)) - 0.5
    sure = abs(lean) >= NEWEST / 2
    weight = np.where(VISIBLE, np.exp(np.where(sure, 0, lean) * place), 0)
    weight = weight / weight.sum(-1, keepdims=True)
    odds = weight / (1 - weight)
    drawn = weight * (1 + odds.sum(-1, keepdims=True) - odds)
    edge = np.where(lean > 0, DISTANCE <= SLOTS, np.arange(BLOCKS) < SLOTS) & VISIBLE
    return np.where(sure, edge, drawn)


class Truth:
    """Expectations over documents and rows; `rows` weights documents and their rows."""

    def __init__(self, population: Population) -> None:
        self.of = population
        node, weight = np.polynomial.hermite_e.hermegauss(NODES)
        self.node, self.weight = node, weight / weight.sum()
        self.lengths = np.array(population.lengths)
        self.rows = (self.lengths[:, None] > OWNS) / len(self.lengths)
        """Share of documents that have rows of an own block and a length: (length, own)."""
        a, b = population.copy or (0.0, 1.0)  # the moments of the Beta distribution
        self.rate = population.copies * a / (a + b)
        self.rate2 = np.outer(population.copies, population.copies) * a * (a + 1) / ((a + b) * (a + b + 1))
        """By proxy, and by two proxies."""
        self.given = {name: self._given(leans) for name, leans in self._leans().items()}
        self.source = self._source()
        self.heavy = population.heavy[0] / sum(population.heavy) if population.heavy else np.nan

    def _leans(self) -> dict[str, tuple[float, ...]]:
        teacher = self.of.lean if self.of.teacher is None else self.of.teacher
        named = {"proxy": self.of.lean, "teacher": teacher, "head": self.of.heads, "first": self.of.first or ()}
        return named | {"before": self.of.course[-2] if self.of.first else ()}

    def _given(self, leans: tuple[float, ...]) -> Float[np.ndarray, "label common own_effect length own block"]:
        """Inclusion of each label's own draw, given a document's length and effects."""
        effect = self.of.common * self.node[:, None, None] + self.of.own * self.node[:, None]
        longer, place = np.unique(self.of.longer(self.lengths.astype(float)), return_inverse=True)
        given = [inclusion(lean + effect + longer)[:, :, place] for lean in leans]
        return np.stack(given) if leans else np.empty(0)

    def _source(self) -> Float[np.ndarray, "own block"]:
        if self.of.source == "place":
            return np.isin(DISTANCE, STRIDE * np.arange(1, SLOTS + 1)).astype(float)
        return VISIBLE * CHANCE[:, None]

    def marginal(self, name: str) -> Float[np.ndarray, "label length own block"]:
        """Inclusion in the label's selection, over documents of a length."""
        mean = np.einsum("u,v,puvlob->plob", self.weight, self.weight, self.given[name])
        if name in ("head", "teacher"):
            return mean
        copied = self.marginal("teacher") if self.of.source == "teacher" else self.source
        rate = self.rate[:, None, None, None]
        return rate * copied + (1 - rate) * mean

    def table(self, name: str, group: np.ndarray, count: int) -> Float[np.ndarray, "label group"]:
        """Expected learned slots a document by a grouping of (own, block)."""
        slots = np.einsum("lo,plob->pob", self.rows, self.marginal(name))
        return np.stack([(slots * (group == g)).sum((1, 2)) for g in range(count)], -1)

    def mean_of(self, name: str, value: np.ndarray) -> Float[np.ndarray, " label"]:
        """Mean of a function of (own, block) over learned slots."""
        slots = np.einsum("lo,plob->pob", self.rows, self.marginal(name))
        return (slots * value).sum((1, 2)) / slots.sum((1, 2))

    def pair(self, p: int, q: int) -> Float[np.ndarray, "length own"]:
        """Expected number of blocks that two proxies share in a row of one document."""
        first, second = (np.einsum("v,uvlob->ulob", self.weight, self.given["proxy"][i]) for i in (p, q))
        return self._shared(first, second, self.weight, (p, q))

    def heads_share(self, i: int, j: int) -> Float[np.ndarray, "length own"]:
        """The same of two heads' own top blocks."""
        first, second = (np.einsum("v,uvlob->ulob", self.weight, self.given["head"][k]) for k in (i, j))
        return np.einsum("u,ulob,ulob->lo", self.weight, first, second)

    def kept(self, p: int) -> Float[np.ndarray, "length own"]:
        """Expected number of blocks of the earlier record that a proxy chooses again in the same row."""
        first, second = (self.given[name][p].reshape(-1, *self.rows.shape, BLOCKS) for name in ("before", "proxy"))
        return self._shared(first, second, np.outer(self.weight, self.weight).ravel(), (p, p))

    def _shared(
        self, first: np.ndarray, second: np.ndarray, weight: np.ndarray, of: tuple[int, int]
    ) -> Float[np.ndarray, "length own"]:
        """Both copy one source, one of them does, or none, given an effect of these weights."""
        if self.of.source == "teacher":
            raise ValueError("source='teacher': proxies and records share no source; try 'document'")
        apart = np.einsum("u,ulob,ulob->lo", weight, first, second)
        met = [np.einsum("u,ulob,ob->lo", weight, own, self.source) for own in (second, first)]
        both, (one, other) = self.rate2[of], self.rate[list(of)]
        alone = (one - both) * met[0] + (other - both) * met[1]
        return both * SLOTS + alone + (1 - one - other + both) * apart

    def elsewhere(self, p: int, q: int, earlier: str = "proxy") -> Float[np.ndarray, " own"]:
        """Shared blocks with the second proxy in another document that has the row too."""
        has = self.rows.sum(0)
        first, second = (
            np.einsum("lo,lob->ob", self.rows / np.where(has > 0, has, 1), self.marginal(name)[i])
            for name, i in (("proxy", p), (earlier, q))
        )
        return (first * second).sum(-1)

    def hits(self) -> Float[np.ndarray, "proxy own block"]:
        """Expected hits a document by the teacher's block."""
        both = np.einsum("u,v,puvlob,puvlob->plob", *[self.weight] * 2, self.given["teacher"], self.given["proxy"])
        wanted = self.marginal("teacher")
        copied = wanted if self.of.source == "teacher" else wanted * self.source
        rate = self.rate[:, None, None, None]
        return np.einsum("lo,plob->pob", self.rows, rate * copied + (1 - rate) * both)

    def missed(self) -> Float[np.ndarray, " proxy"]:
        """Expected share of the blocks of a document, the last aside, that none of its rows holds."""
        copied, weight = self._rates()
        last = self.lengths - 1
        never = np.zeros(len(self.of.lean))
        for c, w in zip(copied, weight, strict=True):
            rate = c * self.of.copies[:, None, None, None, None, None]
            holds = rate * self.source + (1 - rate) * self.given["proxy"]
            for i, length in enumerate(self.lengths):
                rows = (length > OWNS)[:, None] & VISIBLE
                missed = np.where(rows, 1 - holds[:, :, :, i], 1.0).prod(-2) ** BLOCK
                count = missed[..., : last[i]].sum(-1)
                never += w / len(last) * np.einsum("u,v,puv->p", self.weight, self.weight, count)
        return never / last.mean()

    def _rates(self) -> tuple[np.ndarray, np.ndarray]:
        """Nodes and weights of the document's probability to copy."""
        if self.of.copy is None or self.of.copy[1] == 0:
            return np.array([0.0 if self.of.copy is None else 1.0]), np.ones(1)
        a, b = self.of.copy
        node, weight = roots_jacobi(NODES, b - 1, a - 1)
        return (1 + node) / 2, weight / weight.sum()
