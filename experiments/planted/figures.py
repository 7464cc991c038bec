"""The page of figures: tidy tables in, one Figure out of each function. No pyplot, as in `msa_analysis.figures`."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from msa_analysis.figures import FAINT, INK, NULL, STYLE
from populations import BLOCK, BLOCKS, FIRST
from proof import COVERAGE, REJECTION

GOOD, BAD = sns.color_palette("colorblind")[0], sns.color_palette("colorblind")[3]
SCALARS = (
    "recency",
    "excess_recency",
    "sink_share",
    "never_selected",
    "mutual_information",
    "mutual_information_excess",
    "mutual_information_heads",
    "eta_squared",
    "eta_squared_excess",
    "eta_squared_heads",
    "group_information_excess",
    "kappa",
    "positional",
    "content",
    "fixed_choice",
    "churn",
    "stability",
    "block_recall",
    "captured_mass",
    "coverage",
    "coverage_over_random",
    "coverage_over_window",
)
"""What is drawn by name; profiles and rates by distance are in the tables."""


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = np.atleast_2d(figure.subplots(rows, columns, squeeze=False))
    return figure, axes


def planted(rates: Mapping[str, np.ndarray]) -> Figure:
    """What was planted: how often each proxy chose each block (key) in each query block, over documents that have it.

    `rates`: (proxy, query block, key block) by scenario, in documents of full length.
    """
    columns = 6
    rows = -(-sum(len(rate) for rate in rates.values()) // columns)
    figure, axes = _figure(rows, columns, 9, 1.55 * rows + 0.5)
    panels = [(name, p, rate) for name, each in rates.items() for p, rate in enumerate(each)]
    possible = np.arange(BLOCKS) < np.arange(FIRST, BLOCKS)[:, None]
    colours = mpl.colormaps["mako"].with_extremes(bad="#e9ebee")
    image = None
    for axis, (name, p, rate) in zip(axes.flat, panels, strict=False):
        shown = np.ma.masked_where(~possible, rate[FIRST:])
        image = axis.imshow(shown, cmap=colours, vmin=0, vmax=1, aspect="auto", extent=(0, BLOCKS, BLOCKS, FIRST))
        axis.set_title(f"{name}\nproxy {p}", fontsize=6.5)
        axis.tick_params(labelsize=6)
        axis.grid(visible=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    if image is not None:
        bar = figure.colorbar(image, ax=axes, shrink=0.5, aspect=30)
        bar.set_label("share of queries that chose the block (grey: not possible)", fontsize=7)
    figure.supxlabel(f"key block ({BLOCK} tokens each)", fontsize=8)
    figure.supylabel("query block", fontsize=8)
    return figure


def recovery(bias: pd.DataFrame) -> Figure:
    """Mean estimate against the planted value, a panel a metric: the diagonal is right. Bars: 95 % of single runs."""
    names = [name for name in SCALARS if name in set(bias["metric"])]
    figure, axes = _figure(-(-len(names) // 5), 5, 9, 1.75 * -(-len(names) // 5))
    for axis, name in zip(axes.flat, names, strict=False):
        part = bias[bias["metric"] == name]
        ends = np.array([part["truth"].min(), part["truth"].max()])
        reach = max(float(ends[1] - ends[0]), 2 * float(part["spread"].fillna(0).max()), 1e-3)
        line = ends.mean() + reach * np.array([-0.62, 0.62])
        axis.plot(line, line, color=NULL, lw=0.8, ls="--")
        for right, colour in ((True, GOOD), (False, BAD)):
            some = part[part["unbiased"] == right]
            spread = 1.96 * some["spread"].fillna(0)
            axis.errorbar(some["truth"], some["mean"], spread, fmt="o", ms=3, lw=0.7, color=colour)
        axis.set_title(name.replace("_", " "), fontsize=7)
        axis.tick_params(labelsize=6)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.supxlabel("planted value (a point a population)", fontsize=8)
    figure.supylabel("estimate from 60 documents", fontsize=8)
    return figure


def coverage(cover: pd.DataFrame) -> Figure:
    """Share of 95 % intervals that hold the planted value: a row a metric, a point a population."""
    part = cover[~cover["exact"] & (cover["defined"] >= cover["runs"] / 10)]
    part = part.assign(family=part["metric"].str.replace(r"\[.*", "", regex=True))
    order = part.groupby("family")["coverage"].min().sort_values().index
    figure, axes = _figure(1, 1, 7.5, 0.19 * len(order) + 0.9)
    axis = axes[0, 0]
    axis.axvspan(*COVERAGE, color=FAINT, alpha=0.2, lw=0)
    axis.axvline(0.95, color=NULL, lw=0.8, ls="--")
    place = {name: i for i, name in enumerate(order)}
    for outside, colour in ((False, GOOD), (True, BAD)):
        some = part[part["outside"] == outside]
        axis.plot(some["coverage"], some["family"].map(place), "o", ms=3, alpha=0.5, mew=0, color=colour)
    axis.set_yticks(range(len(order)), [name.replace("_", " ") for name in order], fontsize=7)
    axis.set_xlabel("coverage of nominal 95 % intervals (band: 92 to 99 %; red: shown to be outside)", fontsize=8)
    axis.set_ylim(-0.8, len(order) - 0.2)
    return figure


def rejections(null: pd.DataFrame) -> Figure:
    """How often a null that holds is rejected at 5 %, with the 95 % interval of the simulation; band: what is asked."""
    part = null.sort_values(["metric", "scenario"]).reset_index(drop=True)
    figure, axes = _figure(1, 1, 7.5, 0.17 * len(part) + 0.9)
    axis = axes[0, 0]
    axis.axvspan(*REJECTION, color=FAINT, alpha=0.2, lw=0)
    axis.axvline(0.05, color=NULL, lw=0.8, ls="--")
    for outside, colour in ((False, GOOD), (True, BAD)):
        some = part[part["outside"] == outside]
        error = np.abs(some[["low", "high"]].to_numpy().T - some["rejected"].to_numpy())
        axis.errorbar(some["rejected"], some.index, xerr=error, fmt="o", ms=3, lw=0.8, color=colour)
    labels = [f"{row.metric.replace('_', ' ')} ({row.test}): {row.scenario}" for row in part.itertuples()]
    axis.set_yticks(range(len(part)), labels, fontsize=6)
    axis.set_xlabel("share of null runs rejected at 5 % (band: 3 to 7 %; one-sided: half of both)", fontsize=8)
    return figure


def few_documents(documents: pd.DataFrame) -> Figure:
    """Coverage, and half width over the planted value, by the number of documents."""
    names = [name for name in SCALARS if name in set(documents["metric"])]
    figure, axes = _figure(1, 2, 9, 3.4)
    colours = sns.color_palette("husl", len(names))
    axes[0, 0].axhspan(*COVERAGE, color=FAINT, alpha=0.2, lw=0)
    for name, colour in zip(names, colours, strict=True):
        part = documents[(documents["metric"] == name) & (documents["defined_share"] > 0.5)].sort_values("documents")
        axes[0, 0].plot(part["documents"], part["coverage"], ".-", lw=1, color=colour)
        share = part["half"] / part["truth"].abs()
        axes[0, 1].plot(part["documents"], share, ".-", lw=1, color=colour, label=name.replace("_", " "))
    axes[0, 0].set(xscale="log", xlabel="documents", ylabel="coverage of 95 % intervals", ylim=(0.6, 1.01))
    axes[0, 1].set(xscale="log", yscale="log", xlabel="documents", ylabel="half width / |planted value|")
    for axis in axes.flat:
        ticks = sorted(documents["documents"].unique())
        axis.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7)
        axis.minorticks_off()
    figure.legend(loc="outside right center", fontsize=6)
    return figure


def power(table: pd.DataFrame) -> Figure:
    """How often a strength is found: by documents in one run (permutation test), by seeds (t-test over runs)."""
    figure, axes = _figure(1, 2, 9, 3.0)
    text = {"size": 7}
    kinds = (("documents of one run", table[table["seeds"] == 1]), ("seeds", table[table["seeds"] > 1]))
    for axis, (label, part) in zip(axes.flat, kinds, strict=True):
        if label == "seeds":
            part = part[part["documents"] == part["documents"].max()]
        column = "documents" if label != "seeds" else "seeds"
        grid = part.pivot_table(index="bits", columns=column, values="power", dropna=False)
        grid.index = [f"{bits:.4f}" for bits in grid.index]
        sns.heatmap(grid, ax=axis, vmin=0, vmax=1, cmap="mako_r", annot=True, fmt=".2f", annot_kws=text, cbar=False)
        axis.grid(visible=False)
        axis.set(xlabel=label, ylabel="planted strength, bits")
        axis.tick_params(labelsize=7)
    axes[0, 0].set_title("found by the permutation test of one run", fontsize=8, color=INK)
    most = int(table["documents"].max())
    axes[0, 1].set_title(f"found by the t-test over seeds ({most} documents each)", fontsize=8, color=INK)
    return figure
