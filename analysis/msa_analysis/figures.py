"""One function a figure: tidy data in, matplotlib Figure out.

Figures are made without pyplot: none is registered anywhere, so none can be left open, and no display is needed.
Distances and positions are in blocks, with tokens on a second axis or in the label. An arm has one colour everywhere.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator

from msa_analysis.canvas import (
    FAINT,
    INK,
    NULL,
    Colours,
    finish,
    grid,
    lines,
    name_x,
    on_paper,
    palette,
    panel_width,
    say_undefined,
    small,
)
from msa_analysis.canvas import STYLE as STYLE
from msa_analysis.canvas import save as save

DYNAMICS = {
    "recency": ("recency index", "0.5: uniform choice"),
    "block_recall": ("block recall", "chance"),
    "mutual_information": ("I(proxy; distance), bits", "0: no division of labour"),
    "kappa": ("overlap of proxies, kappa", "0: chance"),
}
"""Metric, axis label, meaning of its null."""
BY_DISTANCE = {
    "recall_by_distance": "share of the teacher's blocks chosen",
    "coverage_by_distance": "share of their attention covered",
}
"""Metric, and what a panel of it is called."""


def distance_profiles(profile: pd.DataFrame, *, block_size: int, title: str = "") -> Figure:
    """Where each proxy looks, a panel a layer: share of learned slots by log2 distance, with its null and teacher.

    Takes `specialization.distance_profile` of one run; the last record is drawn.
    """
    last = profile[(profile["step"] == profile["step"].max()) & (profile["null"] > 0)]
    layers = sorted(last["layer"].unique())
    figure, axes = grid(len(layers), height=2.9, sharey=True)
    proxies = sorted(last["proxy"].unique())
    colours = sns.color_palette("flare", len(proxies))
    for axis, layer in zip(axes, layers, strict=True):
        part = last[(last["layer"] == layer) & (last["metric"] == "distance_profile")]
        labels = list(part.drop_duplicates("bin").sort_values("bin")["distance"])
        for proxy, colour in zip(proxies, colours, strict=True):
            line = part[part["proxy"] == proxy].sort_values("bin")
            _with_interval(axis, np.arange(len(line)), line, colour, f"proxy {proxy}")
        teacher = last[(last["layer"] == layer) & (last["metric"] == "distance_profile_teacher")]
        wanted = teacher.groupby("bin")["value"].mean()
        axis.plot(np.arange(len(wanted)), wanted, ":", color=INK, label="teacher (mean of groups)")
        uniform = part.groupby("bin")["null"].mean()
        axis.plot(np.arange(len(uniform)), uniform, "--", color=NULL, label="null: uniform choice")
        axis.set(title=f"layer {layer}")
        _distances(axis, labels, f"blocks back ({block_size} tokens each)")
    if axes:
        axes[0].set(ylabel="share of learned slots", ylim=(0, None))
    return finish(figure, axes, title)


def training_dynamics(
    dynamics: pd.DataFrame, *, colours: Colours | None = None, switches: Sequence[int] = (), title: str = ""
) -> Figure:
    """Recency, recall, mutual information and overlap against the step: a line a run, the band its interval.

    Takes `Evidence.dynamics()`; the mean over layers is drawn, with its null dashed and the switch to sparse attention
    as a vertical line.
    """
    whole = dynamics[dynamics["layer"].isna()]
    colours = colours or palette(whole["arm"])
    figure, axes = grid(len(DYNAMICS), columns=2, height=2.6)
    for axis, (metric, (label, meaning)) in zip(axes, DYNAMICS.items(), strict=True):
        part = whole[whole["metric"] == metric]
        _lines(axis, part, colours, marker=".")
        for (arm, _), line in part.sort_values("step").groupby(["arm", "run"]):
            axis.fill_between(line["step"], line["low"], line["high"], color=colours[arm], alpha=0.15, lw=0)
        null = part.groupby("step")["null"].mean()
        axis.plot(null.index, null, "--", color=NULL, lw=1.2, label="null")
        _say_if_undefined(axis, part)
        _mark(axis, switches)
        title_ = lines(f"{label} (dashed: {meaning})", panel_width(axis), size=12)
        axis.set(title=title_, xlabel="optimizer step", ylabel="")
    return finish(figure, axes, title)


def choice_by_distance(frame: pd.DataFrame, *, block_size: int, title: str = "") -> Figure:
    """What proxies find of what their heads want, by how far back it lies: recall and coverage, with their nulls.

    Takes `specialization.recall_by_distance` and `coverage_by_distance` of one run, of layers (pool=("proxy",)) and of
    the run (pool=RUN), one above the other; the last record is drawn. Thin lines are layers; the thick one is the run,
    with its 95 % interval over documents. The null is uniform choice of as many blocks.
    """
    last = frame[frame["step"] == frame["step"].max()]
    figure, axes = grid(len(BY_DISTANCE), columns=2, height=2.9, sharey=True)
    for axis, (metric, label) in zip(axes, BY_DISTANCE.items(), strict=True):
        part = last[last["metric"] == metric].sort_values("bin")
        part = part[part.groupby("bin")["value"].transform("count") > 0] if part["value"].notna().any() else part
        bins = part.drop_duplicates("bin").set_index("bin")["distance"]
        layers = sorted(part["layer"].dropna().unique())
        for layer, colour in zip(layers, sns.color_palette("crest", len(layers)), strict=True):
            line = part[part["layer"] == layer].set_index("bin").reindex(bins.index)
            axis.plot(np.arange(len(line)), line["value"], color=colour, lw=0.9, label=f"layer {layer:.0f}")
        whole = part[part["layer"].isna()].set_index("bin").reindex(bins.index)
        _with_interval(axis, np.arange(len(whole)), whole, INK, "all layers")
        axis.plot(np.arange(len(whole)), whole["null"], "--", color=NULL, label="null: uniform choice")
        _say_if_undefined(axis, part)
        axis.set(title=label)
        _distances(axis, list(bins), f"blocks back ({block_size} tokens each)")
    axes[0].set(ylim=(0, None))
    return finish(figure, axes, title)


def position_or_content(dynamics: pd.DataFrame, *, title: str = "") -> Figure:
    """Why proxies choose alike, a dot a layer: the part of kappa that is position against the part that is content.

    Takes `specialization.dynamics` of one run; the last record is drawn, with 95 % intervals over documents. Dashed:
    the nulls, 0 for both. Dotted: as much of one as of the other.
    """
    last = dynamics[(dynamics["step"] == dynamics["step"].max()) & dynamics["layer"].notna()]
    parts = [last[last["metric"] == name].set_index("layer").sort_index() for name in ("positional", "content")]
    figure, (axis,) = grid(1, height=4.0)
    colours = sns.color_palette("crest", len(parts[0]))
    for (layer, across), colour in zip(parts[0].iterrows(), colours, strict=True):
        up = parts[1].loc[layer]
        bars = [[[row["value"] - row["low"]], [row["high"] - row["value"]]] for row in (across, up)]
        place = (across["value"], up["value"])
        axis.errorbar(*place, xerr=bars[0], yerr=bars[1], fmt="o", ms=5, capsize=2, color=colour, elinewidth=1)
        axis.annotate(f"{layer:.0f}", place, (4, 4), textcoords="offset points", fontsize=small())
    _say_if_undefined(axis, parts[0])
    for draw in (axis.axvline, axis.axhline):
        draw(0, ls="--", color=NULL, lw=1.2, label="null: chance" if draw == axis.axhline else "_")
    axis.axline((0, 0), slope=1, ls=":", color=FAINT, lw=1, label="equal parts")
    axis.margins(0.15)
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set(xlabel="alike by position (part of kappa)", ylabel="alike by content (part of kappa)")
    return finish(figure, [axis], title)


def kl_curves(metrics: pd.DataFrame, *, switches: Sequence[int] = (), title: str = "") -> Figure:
    """KL of the proxies to their teacher, a panel a run and a line a layer, nats (mean over proxies and queries).

    Takes `Evidence.metrics()`. Values of different numbers of proxies, and before and after the switch, are not
    comparable: the teacher is another one.
    """
    part = metrics[metrics["name"].str.fullmatch(r"train/kl/layer\d+")]
    runs = list(part.groupby(["arm", "seed"], sort=True))
    figure, axes = grid(len(runs), columns=2, height=2.6, sharey=True)
    for axis, ((arm, seed), run) in zip(axes, runs, strict=True):
        layers = sorted(run["name"].unique(), key=lambda name: int(name.removeprefix("train/kl/layer")))
        for name, colour in zip(layers, sns.color_palette("crest", len(layers)), strict=True):
            line = run[run["name"] == name].sort_values("step")
            axis.plot(line["step"], line["value"], color=colour, label=name.removeprefix("train/kl/"), lw=1.2)
        _mark(axis, switches)
        axis.set(title=f"{arm}, seed {seed}", xlabel="optimizer step", yscale="log")
        for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("KL, nats (log scale)")
    return finish(figure, axes, title)


def loss_curves(
    metrics: pd.DataFrame,
    *,
    bigram: float = np.nan,
    colours: Colours | None = None,
    switches: Sequence[int] = (),
    title: str = "",
) -> Figure:
    """Training cross-entropy and validation quality against the step, a line a run, coloured by arm.

    Takes `Evidence.metrics()`; the corpus' bigram table is drawn where its bits per byte are given. Validation of the
    warm-up phase, in which a model with proxies attends densely, is a line of its own, dotted.
    """
    scored, unit = "validation/bits_per_byte", "bits per byte"
    if not (metrics["name"] == scored).any():
        scored, unit = "validation/loss", "nats per token"
    colours = colours or palette(metrics["arm"])
    figure, axes = grid(2, columns=2, height=3.2)
    panels = (("train/ce", "training cross-entropy", "nats per token", ""), (scored, "validation", unit, "."))
    for axis, (name, title_, label, marker) in zip(axes, panels, strict=True):
        _lines(axis, metrics[metrics["name"] == name], colours, marker=marker)
        _mark(axis, switches)
        axis.set(title=title_, xlabel="optimizer step", ylabel=label)
    warmup = metrics[metrics["name"] == scored.replace("validation/", "validation/warmup/")]
    if len(warmup):
        _lines(axes[1], warmup, colours, marker=".", linestyle=":")
        axes[1].set(title="validation (dotted: dense attention, in the warm-up)")
    if np.isfinite(bigram) and unit == "bits per byte":
        axes[1].axhline(bigram, ls="--", color=NULL, label="bigram table")
    return finish(figure, axes, title)


def quality_against_cost(
    table: pd.DataFrame, arms: pd.DataFrame, *, colours: Colours | None = None, title: str = ""
) -> Figure:
    """Quality against parameters, FLOPs and wall-clock: a dot a run, the bar its arm's t interval over seeds.

    Takes `quality.table` and `quality.arms`. FLOPs by this project's formula (causal attention counted as half, the
    proxies' scoring included). No bar with one seed. The bigram table, far off the arms, stands in the label.
    """
    metric = arms["metric"].iloc[0]
    label = "bits per byte" if metric == "bits_per_byte" else "validation loss, nats per token"
    colours = colours or palette(table["arm"])
    costs = {"parameters": "parameters", "flops_total": "training FLOPs", "wall_seconds": "training time, s"}
    figure, axes = grid(len(costs), columns=3, height=3.2, sharey=True)
    for axis, (cost, name) in zip(axes, costs.items(), strict=True):
        for row in arms.itertuples():
            runs = table[table["arm"] == row.arm]
            axis.scatter(runs[cost], runs[metric], color=colours[row.arm], s=16, alpha=0.5, lw=0)
            bar = [[row.value - row.low], [row.high - row.value]] if np.isfinite(row.low) else None
            axis.errorbar(
                getattr(row, cost), row.value, yerr=bar, fmt="o", ms=6, capsize=3, color=colours[row.arm], label=row.arm
            )
        axis.set_xlabel(name)
        axis.margins(x=0.2, y=0.2)
        axis.xaxis.set_major_locator(MaxNLocator(2 if on_paper() else 4))  # 27.5348 M is long
        axis.xaxis.set_major_formatter(EngFormatter(sep=" "))
    bigram = arms["bigram"].mean()
    shown = f"\nbigram table: {bigram:.3f}" if metric == "bits_per_byte" and np.isfinite(bigram) else ""
    axes[0].set_ylabel(f"{label} (lower is better){shown}")
    return finish(figure, axes, title)


def paired_differences(comparison: pd.DataFrame, *, colours: Colours | None = None, title: str = "") -> Figure:
    """Each arm minus the reference arm with its 95 % interval; takes `quality.compare`. Zero is the reference."""
    reference, metric = comparison["reference"].iloc[0], comparison["metric"].iloc[0]
    colours = colours or palette([reference, *comparison["arm"]])
    figure, (axis,) = grid(1, height=0.5 + 0.4 * len(comparison))
    for place, row in enumerate(comparison.itertuples()):
        bar = [[row.difference - row.low], [row.high - row.difference]] if np.isfinite(row.low) else None
        axis.errorbar(row.difference, place, xerr=bar, fmt="o", capsize=3, color=colours[row.arm])
    labels = [f"{row.arm} ({row.n} {row.over})" for row in comparison.itertuples()]
    axis.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.5))
    axis.axvline(0, ls="--", color=NULL, lw=1.2, label=f"null: as {reference}")
    unit = "bits per byte" if metric == "bits_per_byte" else "nats per token"
    name_x(axis, f"{unit} minus {reference} (negative is better)")
    axis.xaxis.set_major_locator(MaxNLocator(5))
    return finish(figure, [axis], title)


def _distances(axis: Axes, labels: Sequence[str], name: str) -> None:
    """Bins of distance along the x axis."""
    axis.set_xticks(np.arange(len(labels)))
    tilted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if on_paper() else {}
    axis.set_xticklabels(labels, fontsize=small(), **tilted)
    axis.set_xlabel(name, fontsize=small())


def _say_if_undefined(axis: Axes, part: pd.DataFrame) -> None:
    if not np.isfinite(part["value"].to_numpy(float)).any():
        say_undefined(axis, part["reason"].iloc[0] if len(part) else "not recorded")


def _with_interval(axis: Axes, x: np.ndarray, line: pd.DataFrame, colour: object, label: str) -> None:
    bars = np.stack([line["value"] - line["low"], line["high"] - line["value"]])
    axis.errorbar(x, line["value"], yerr=bars, color=colour, label=label, marker=".", capsize=2, elinewidth=1)


def _lines(axis: Axes, frame: pd.DataFrame, colours: dict, *, marker: str, linestyle: str = "-") -> None:
    """A line a run in the colour of its arm."""
    style = {"hue": "arm", "palette": colours, "units": "run", "estimator": None, "marker": marker or None}
    sns.lineplot(frame, x="step", y="value", ax=axis, markeredgewidth=0, linestyle=linestyle, **style)
    if legend := axis.get_legend():
        legend.remove()


def _mark(axis: Axes, switches: Sequence[int]) -> None:
    """The step at which attention becomes sparse."""
    for step in sorted(set(switches)):
        axis.axvline(step, color=FAINT, lw=1, ls=":", label="switch to sparse" if step == min(switches) else "_")
