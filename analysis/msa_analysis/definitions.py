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
        "sink_share",
        "First block",
        "Share of queries that chose the first block of their document, where attention sinks would be.",
        "The share a uniform choice of as many blocks would have, computed row by row.",
    ),
    Definition(
        "never_selected",
        "Blocks never chosen",
        "Share of a document's blocks that some query could have chosen and none did.",
        "What uniform choice would leave, every query by itself. Real queries are alike: mind the course, not the "
        "level.",
    ),
    Definition(
        "block_recall",
        "Block recall",
        "Share of the teacher's blocks that the proxy chose too. The teacher comes from dense attention on the same "
        "weights; in a model trained sparse it is a diagnostic, not a ceiling.",
        "The share a uniform choice of as many blocks would hit, computed row by row.",
    ),
    Definition(
        "captured_mass",
        "Captured attention",
        "Share of the heads' dense attention, on the same weights, that lies on the freely chosen blocks.",
        "What as many uniformly chosen blocks would hold.",
    ),
    Definition(
        "coverage_over_random",
        "Coverage beyond chance",
        "Captured attention as a share of the most that as many blocks hold (a ratio of means), rescaled so that "
        "uniform choice is 0 and the teacher's own blocks are 1.",
        "0.",
    ),
    Definition(
        "coverage_over_window",
        "Coverage beyond recency",
        "The same, rescaled so that the newest blocks are 0: what routing finds that a window of the same budget does "
        "not. Negative where the window is better.",
        "0.",
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
        "mutual_information_share",
        "… as a share of the heads'",
        "The proxies' specialization strength over that of the single heads.",
        "None. Not defined where the heads themselves do not differ.",
    ),
    Definition(
        "emergence",
        "… since training step",
        "The first record from which the strength beyond untrained proxies stays above 0, interval and all, to the "
        "end. Beside it the record before: it happened between the two.",
        "Not defined where the last record is not above 0; by chance it is in about 1 of 40 models.",
    ),
    Definition(
        "eta_squared",
        "Variance between proxies",
        "Share of the variance of log2 distance that lies between proxies, corrected for bias: the specialization "
        "strength without bins.",
        "0. The p-value comes from relabelling proxies within documents, whole documents at a time.",
    ),
    Definition(
        "eta_squared_excess",
        "… beyond untrained proxies",
        "The same minus that of the untrained proxies at the first record.",
        "0: training made the proxies no more different.",
    ),
    Definition(
        "eta_squared_heads",
        "… of single heads",
        "The same between the attention heads, of each head's own top blocks.",
        "0.",
    ),
    Definition(
        "eta_squared_share",
        "… as a share of the heads'",
        "The proxies' share of variance over that of the single heads.",
        "None. Not defined where the heads themselves do not differ.",
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
    Definition(
        "fixed_choice",
        "Fixed choice",
        "How alike one proxy chooses at the same position of two documents, on the scale of kappa: at 1 it heeds the "
        "position alone, whatever is written.",
        "0.",
    ),
    Definition(
        "churn",
        "Churn",
        "Share of its chosen blocks that a proxy had not chosen at the record before.",
        "The same against other documents' choices of that record: what changes even if only the position matters.",
    ),
    Definition(
        "stability",
        "Stability",
        "Churn rescaled: 0 where the earlier choice says no more than another document's, 1 where nothing changed.",
        "0.",
    ),
    Definition(
        "collapse",
        "Collapse alarm",
        "Share of proxies whose choice is fixed or another proxy's (that kappa lies above 0.9, interval and all), or "
        "that leave more than half of the blocks unused and more than chance would.",
        "None: the rule holds it.",
    ),
    Definition(
        "kappa_within_groups",
        "Heads of one proxy alike",
        "Overlap beyond chance (kappa) of the single heads' own top blocks, over pairs of heads that share a proxy.",
        "The same over all pairs of heads: what random groups would have.",
    ),
    Definition(
        "group_information",
        "Groups of heads apart",
        "Mutual information, in bits, between the group that a head belongs to and how far back its own top blocks "
        "lie.",
        "The mean over random groups of the same heads.",
    ),
    Definition(
        "teacher_entropy",
        "Spread of attention",
        "Entropy, in nats, of the dense attention by block of the heads that share a proxy. It falls as heads sharpen.",
        "Attention spread evenly over all visible blocks, which is its most.",
    ),
    Definition(
        "group_divergence",
        "Heads of one proxy disagree",
        "Jensen-Shannon divergence, in nats, of the dense attention by block of the heads that share a proxy: what no "
        "choice of one proxy can serve.",
        "The mean over random groups of the same heads.",
    ),
]
NAMES = {definition.metric: definition.name for definition in DEFINITIONS}
