"""The figures of this study."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import pandas as pd
from draw_division import endpoints, profiles
from matplotlib.figure import Figure
from msa_analysis.figures import STYLE, palette

LABELS = {"own": "its own", "shared": "one shared", "recency": "the newest", "random": "random"}


def draw(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Figures by name."""
    with mpl.rc_context(STYLE):
        return {
            "endpoints": endpoints(tables["numbers"]),
            "agreement": agreement(tables["by_distance"]),
            "profiles": profiles(tables["matched"]),
        }


def agreement(by_distance: pd.DataFrame) -> Figure:
    """Probability of the right answer against the recall of its source: a dot a run, distance and selection."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    arms, colours = list(dict.fromkeys(by_distance["arm"])), palette(LABELS)
    for axis, arm in zip(figure.subplots(1, len(arms), sharey=True, squeeze=False)[0], arms, strict=True):
        part = by_distance[by_distance["arm"] == arm]
        for condition, dots in part.groupby("condition", sort=False):
            colour, label = colours[str(condition)], LABELS[str(condition)]
            axis.plot(dots["recall"], dots["probability"], "o", ms=3, alpha=0.6, color=colour, label=label)
        axis.set(title=arm, xlim=(-0.03, 1.03), xlabel="recall of the source block")
    figure.axes[0].set_ylabel("probability of the right answer")
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=8, title="selection", title_fontsize=8)
    return figure
