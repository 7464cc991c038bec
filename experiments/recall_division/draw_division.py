"""The figures of this study."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msa_analysis.figures import FAINT, NULL, STYLE, palette

TITLES = {
    "mutual_information_excess": "I(proxy; distance) over\nuntrained proxies, bits",
    "cost_shared": "cost of one shared selection,\nnats a question",
    "kappa": "overlap of two proxies, kappa",
}


def draw(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Figures by name."""
    with mpl.rc_context(STYLE):
        return {
            "endpoints": endpoints(tables["numbers"]),
            "agreement": _agreement(tables["by_distance"]),
            "profiles": profiles(tables["matched"]),
        }


def endpoints(numbers: pd.DataFrame) -> Figure:
    """One dot a run, with its interval over documents."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    arms = list(dict.fromkeys(numbers["arm"]))
    colours = palette(arms)
    for axis, (metric, title) in zip(figure.subplots(1, len(TITLES)), TITLES.items(), strict=True):
        for place, arm in enumerate(arms):
            part = numbers[(numbers["metric"] == metric) & (numbers["arm"] == arm)].sort_values("seed")
            x = place + np.linspace(-0.25, 0.25, max(len(part), 2))[: len(part)]
            error = np.abs(part[["low", "high"]].to_numpy(float).T - part["value"].to_numpy(float))
            axis.errorbar(x, part["value"], np.nan_to_num(error), fmt="o", ms=4, color=colours[arm], lw=1)
        axis.axhline(0, color=NULL, lw=1, ls="--")
        axis.set(xticks=range(len(arms)), xticklabels=arms, xlim=(-0.6, len(arms) - 0.4), title=title)
    return figure


def _agreement(by_distance: pd.DataFrame) -> Figure:
    """Accuracy and recall by distance, then one against the other: a line a run."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    colours = palette(by_distance["arm"])
    axes: list[Axes] = list(figure.subplots(1, 3))
    labels = by_distance.drop_duplicates("bin").set_index("bin")["distance"].sort_index()
    for arm, part in by_distance.groupby("arm", sort=False):
        for _, run in part.groupby("seed"):
            axes[0].plot(run["bin"], run["recall"], "-o", ms=3, lw=1, color=colours[str(arm)])
            axes[1].plot(run["bin"], run["accuracy"], "-o", ms=3, lw=1, color=colours[str(arm)])
            axes[2].plot(run["recall"], run["accuracy"], "o", ms=3, color=colours[str(arm)])
        mean = part.groupby("bin")[["recall_null", "reader"]].mean()
        for axis, name in zip(axes, mean, strict=False):
            axis.plot(mean.index, mean[name], "--", lw=1, color=colours[str(arm)], alpha=0.6)
        axes[0].plot([], [], color=colours[str(arm)], label=arm)
    for axis, title in zip(axes, ("recall of the source block", "accuracy", "accuracy against recall"), strict=True):
        axis.set(title=title, ylim=(0, 1.03))
    for axis, dashes in zip(axes[:2], ("dashed: chance", "dashed: best reader without keys"), strict=True):
        axis.set(xticks=labels.index, xticklabels=labels, xlabel=f"distance, blocks\n({dashes})")
    axes[2].set(xlim=(0, 1.03), xlabel="recall")
    axes[0].legend(loc="lower left", fontsize=8)
    return figure


def profiles(matched: pd.DataFrame) -> Figure:
    """Where each proxy looks, proxies matched across seeds: mean over seeds and its interval, and uniform choice."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    profile = matched[matched["metric"] == "distance_profile"]
    arms = list(dict.fromkeys(profile["arm"]))
    for axis, arm in zip(figure.subplots(1, len(arms), sharey=True, squeeze=False)[0], arms, strict=True):
        part = profile[profile["arm"] == arm]
        shades = mpl.colormaps["viridis"](np.linspace(0.1, 0.85, part["proxy"].nunique()))
        for colour, (proxy, line) in zip(shades, part.groupby("proxy"), strict=True):
            axis.plot(line["bin"], line["value"], "-o", ms=3, color=colour, label=f"proxy {proxy}")
            axis.fill_between(line["bin"], line["low"], line["high"], color=colour, alpha=0.15, lw=0)
        chance = part.groupby("bin")["null"].mean()
        axis.plot(chance.index, chance, "--", color=FAINT, label="uniform choice")
        ticks = part.drop_duplicates("bin").set_index("bin")["distance"].sort_index()
        axis.set(title=arm, xticks=ticks.index, xticklabels=ticks, xlabel="distance, blocks")
        axis.set_ylim(bottom=0)
    figure.axes[0].set_ylabel("share of learned slots")
    figure.axes[0].legend(fontsize=8, loc="upper left")
    return figure
