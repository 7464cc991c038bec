"""Figures of a study over seeds; each takes a table of `study_tables`. Bars and bands are 95 % t intervals over seeds.

What is worse points right or up. Zero is the arm that is compared with, or the unchanged model.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from msa_analysis.canvas import FAINT, INK, NULL, Colours, finish, grid, name_x, palette

UNITS = {"bits_per_byte": "bits per byte", "validation_loss": "nats per token"}
LINEAR = 1e-3
"""Costs below this are drawn on a linear scale, larger ones on a logarithmic one."""


def differences(found: pd.DataFrame, seeds: pd.DataFrame, *, margin: float, metric: str, colours: Colours) -> Figure:
    """Each pair of arms: a dot a seed, and the mean with its interval. Takes `differences` and `by_seed`."""
    figure, axis = _single(0.9 + 0.36 * len(found))
    for place, row in enumerate(found.itertuples()):
        own = seeds[(seeds["arm"] == row.arm) & (seeds["reference"] == row.reference)]
        axis.scatter(own["value"], np.full(len(own), place + 0.18), s=12, color=FAINT, lw=0, zorder=2)
        _bar(axis, row.value, place, row, colours[row.arm], across=True)
    labels = [f"{row.arm} \N{MINUS SIGN} {row.reference}" for row in found.itertuples()]
    axis.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.5, -0.5))
    axis.axvline(0, ls="--", color=NULL, lw=1.2, label="no difference")
    axis.axvline(margin, ls=":", color=INK, lw=1.2, label=f"margin of {margin:g}")
    axis.scatter([], [], s=12, color=FAINT, label="a seed")
    name_x(axis, f"{UNITS[metric]} (left is better for the first)")
    return finish(figure, [axis], "")


def costs(found: pd.DataFrame, *, colours: Colours) -> Figure:
    """Change of loss under each rule, all layers at once, by arm. Takes `costs(results)`."""
    rules, arms = (list(dict.fromkeys(found[name])) for name in ("rule", "arm"))
    figure, axis = _single(1.0 + 0.14 * len(rules) * max(2, len(arms)))
    for place, arm in zip(_beside(len(arms)), arms, strict=True):
        part = found[(found["arm"] == arm) & found["value"].notna()]
        for number, row in enumerate(part.itertuples()):
            label = arm if not number else "_"
            _bar(axis, row.value, rules.index(row.rule) + place, row, colours[arm], across=True, label=label)
    axis.axvline(0, ls="--", color=NULL, lw=1.2)
    axis.set(yticks=range(len(rules)), yticklabels=[rule.replace("_", " ") for rule in rules])
    axis.set(ylim=(len(rules) - 0.5, -0.5))
    name_x(axis, "change of loss, nats per token (0: own selections)")
    axis.set_xscale("symlog", linthresh=LINEAR)
    return finish(figure, [axis], "")


def layers(found: pd.DataFrame, *, colours: Colours) -> Figure:
    """Change of loss when one layer is replaced, a panel a rule. Takes `costs(results, ("layer",))`."""
    rules, numbers = list(dict.fromkeys(found["rule"])), sorted(found["layer"].unique())
    figure, axes = grid(len(rules), columns=len(rules), height=3.0, sharey=True)
    for axis, rule in zip(axes, rules, strict=True):
        part = found[(found["rule"] == rule) & found["value"].notna()]
        arms = list(dict.fromkeys(part["arm"]))
        for place, arm in zip(_beside(len(arms)), arms, strict=True):
            for number, row in enumerate(part[part["arm"] == arm].itertuples()):
                _bar(axis, row.layer + place, row.value, row, colours[arm], label="_" if number else arm)
        axis.axhline(0, ls="--", color=NULL, lw=1.2)
        axis.set(
            title=rule.replace("_", " "), xlabel="the one layer replaced", xticks=numbers[:: 1 + len(numbers) // 13]
        )
        axis.set_yscale("symlog", linthresh=LINEAR)
    axes[0].set_ylabel("change of loss, nats per token")
    return finish(figure, axes, "")


def training(found: pd.DataFrame, *, colours: Colours) -> Figure:
    """Metrics over training, mean over layers, a panel a metric. Takes `specialization(..., over="training")`."""
    whole = found[found["layer"].isna()]
    metrics = list(dict.fromkeys(whole["metric"]))
    figure, axes = grid(len(metrics), columns=2, height=2.5)
    for axis, metric in zip(axes, metrics, strict=True):
        for arm, line in whole[whole["metric"] == metric].groupby("arm", sort=False):
            line = line.sort_values("step")
            axis.plot(line["step"], line["value"], marker=".", color=colours[arm], label=arm)
            axis.fill_between(line["step"], line["low"], line["high"], color=colours[arm], alpha=0.15, lw=0)
            axis.plot(line["step"], line["null"], ls="--", lw=0.9, color=colours[arm])
        axis.set(title=metric.replace("_", " "), xlabel="optimizer step")
    axes[0].plot([], [], ls="--", lw=0.9, color=NULL, label="null")
    return finish(figure, axes, "")


def answers(found: pd.DataFrame, *, colours: Colours) -> Figure:
    """Share of right answers by the distance of the answer. Takes `answers(results)`."""
    asked = found[found["bin"] >= 0]
    bins = asked.drop_duplicates("bin").sort_values("bin")
    places = {bin_: place for place, bin_ in enumerate(bins["bin"])}
    figure, axis = _single(3.6)
    for arm, line in asked.groupby("arm", sort=False):
        x = [places[bin_] for bin_ in line["bin"]]
        axis.plot(x, line["value"], marker=".", color=colours[arm], label=arm)
        axis.fill_between(x, line["low"], line["high"], color=colours[arm], alpha=0.15, lw=0)
    axis.set(xticks=range(len(places)), xticklabels=list(bins["distance"]), ylim=(0, None))
    axis.set(xlabel="distance of the answer, blocks", ylabel="share of right answers")
    return finish(figure, [axis], "")


def power(found: pd.DataFrame, counts: tuple[int, ...], *, metric: str) -> Figure:
    """The least difference that so many seeds find, a line a pair. Takes `power`."""
    figure, axis = _single(3.6)
    names = [f"{row.arm} \N{MINUS SIGN} {row.reference}" for row in found.itertuples()]
    for name, row in zip(names, found.to_dict("records"), strict=True):
        line = [row[f"seeds_{count}"] for count in counts]
        if np.isfinite(line).all():
            axis.plot(counts, line, marker=".", color=palette(names)[name], label=name)
    axis.set(xticks=counts, xlabel="seeds", ylabel=f"least difference found\n(4 of 5 times), {UNITS[metric]}")
    axis.set_yscale("log")
    return finish(figure, [axis], "")


def _single(height: float) -> tuple[Figure, Axes]:
    figure, (axis,) = grid(1, width=9.0, height=height)  # room for five long names in the legend
    return figure, axis


def _beside(count: int) -> Iterator[float]:
    """Places around a tick for so many arms."""
    return iter(np.linspace(-0.3, 0.3, count) if count > 1 else [0.0] * count)


def _bar(
    axis: Axes, x: float, y: float, row: object, colour: object, *, across: bool = False, label: str = "_"
) -> None:
    """A dot, and its interval where there is one."""
    known = np.isfinite(row.low)
    bar = [[row.value - row.low], [row.high - row.value]] if known else None
    error = {"xerr" if across else "yerr": bar}
    axis.errorbar(x, y, fmt="o", ms=4.5, capsize=2.5, lw=1.2, color=colour, label=label, zorder=3, **error)
