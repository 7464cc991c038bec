"""What each number means, in words for a reader of the report; the formulas are in `specialization`'s docstrings."""

from __future__ import annotations

from typing import NamedTuple


class Definition(NamedTuple):
    """A metric as it is named in tables, its name for readers, its meaning and its null."""

    metric: str
    name: str
    meaning: str
    null: str


DEFINITIONS = [
    Definition(
        "recency",
        "Recency index",
        "Where a proxy's chosen blocks lie between the nearest (1) and the farthest (0) block it could have chosen.",
        "0.5 exactly: every visible block equally likely.",
    ),
    Definition(
        "excess_recency",
        "Excess recency",
        "The proxy's recency index minus that of its teacher: the blocks that its own heads attend to most.",
        "0: the proxy likes the near no more than its heads do.",
    ),
    Definition(
        "block_recall",
        "Block recall",
        "Share of the teacher's blocks that the proxy chose too. The teacher comes from dense attention on the same "
        "weights; in a model trained sparse it is a diagnostic, not a ceiling.",
        "The share a uniform choice of as many blocks would hit, computed row by row.",
    ),
    Definition(
        "mutual_information",
        "Specialization strength",
        "Mutual information, in bits, between which proxy chose and how far back (log2 distance): how well one can "
        "tell the proxy from the distance. Corrected for bias; at most log2 of the number of proxies.",
        "0. The p-value comes from relabelling proxies within documents, whole documents at a time.",
    ),
    Definition(
        "mutual_information_excess",
        "… beyond untrained proxies",
        "The same minus that of the untrained proxies at the first record: random weights differ a little too.",
        "0: training made the proxies no more different.",
    ),
    Definition(
        "mutual_information_heads",
        "… of single heads",
        "The same for each attention head's own top blocks. Proxies can specialize only as far as their heads differ.",
        "0.",
    ),
    Definition(
        "eta_squared",
        "Variance between proxies",
        "Share of the variance of log2 distance that lies between proxies, corrected for bias.",
        "0.",
    ),
    Definition(
        "overlap",
        "Overlap",
        "Share of its chosen blocks that a proxy has in common with another proxy at the same query.",
        "The overlap of two uniform choices.",
    ),
    Definition(
        "kappa",
        "Overlap beyond chance (kappa)",
        "Overlap rescaled so that chance is 0 and identical choices are 1. The sum of the two parts below.",
        "0.",
    ),
    Definition(
        "positional",
        "… by position",
        "The part that remains when the other proxy reads another document at the same position: both look equally "
        "far back, whatever the text.",
        "0.",
    ),
    Definition(
        "content",
        "… by content",
        "The part that needs the same document: both react to what is written there.",
        "0.",
    ),
]
NAMES = {definition.metric: definition.name for definition in DEFINITIONS}
