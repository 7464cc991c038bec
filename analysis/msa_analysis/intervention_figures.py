"""Figures of what other selections cost; each takes the table of `intervene.intervene`.

What is worse points up or right in loss and bits per byte, and down or left in accuracy. Zero is the unchanged model.
What is not defined says so in its place.
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
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from msa_analysis.canvas import (
    INK,
    NULL,
    finish,
    grid,
    lines,
    name_x,
    on_paper,
    page_width,
    palette,
    panel_width,
    say_undefined,
    small,
)

UNITS = {"loss": "loss, nats per token", "bits_per_byte": "bits per byte", "accuracy": "accuracy"}
ABSENT = "#c3cbd6"
"""Colour of cells without a number."""


def cost_per_rule(frame: pd.DataFrame, *, title: str = "") -> Figure:
    """The change under each rule, all layers at once, with its 95 % interval over documents: a panel a quantity."""
    whole = _overall(frame)
    whole = whole[whole["layer"].isna()]
    _refuse_empty(whole, "all layers at once", 'layers="both"')
    rules, quantities = _order(whole), [name for name in UNITS if (whole["quantity"] == name).any()]
    colours = palette(rules)
    size = {"width": 1.2 + 4.2 * len(quantities), "height": 0.5 + 0.36 * len(rules)}
    figure, axes = grid(len(quantities), least=3.0, sharey=True, **size)
    for axis, quantity in zip(axes, quantities, strict=True):
        part = whole[whole["quantity"] == quantity].set_index("rule").loc[rules]
        for place, row in enumerate(part.itertuples()):
            _bar(axis, place, row, colours[row.Index])
        axis.axvline(0, ls="--", lw=1.2, color=NULL)
        known = part["documents"].max()
        axis.set(yticks=range(len(rules)), yticklabels=[_words(rule) for rule in rules], ylim=(len(rules) - 0.5, -0.5))
        name_x(axis, f"change in {UNITS[quantity]} (0: own selections)")
        axis.set_title(f"{known} documents", fontsize=small())
        axis.xaxis.set_major_locator(MaxNLocator(5))
    return finish(figure, [], title)


def cost_per_layer(frame: pd.DataFrame, *, quantity: str = "loss", title: str = "") -> Figure:
    """The change when one layer is replaced, rule by layer, on a scale that is linear near 0 and logarithmic beyond.

    A cell's number is bold where its 95 % interval excludes 0 (of one layer alone: not corrected for their number).
    On paper, where numbers would not fit, such a cell has a dot.
    """
    part = _overall(frame)
    part = part[part["layer"].notna() & (part["quantity"] == quantity)]
    _refuse_empty(part, f"single layers in {quantity}", 'layers="both"')
    rules, layers = _order(part), sorted(part["layer"].unique())
    value = part.pivot(index="rule", columns="layer", values="value").loc[rules, layers].astype(float)
    bold = part.assign(sure=(part["low"] > 0) | (part["high"] < 0)).pivot(index="rule", columns="layer", values="sure")
    top = float(np.nanmax(np.abs(value.values), initial=0.0)) or 1e-6
    colours = sns.color_palette("vlag", as_cmap=True).with_extremes(bad=ABSENT)
    figure, (axis,) = grid(1, width=2.8 + 0.95 * len(layers), height=0.8 + 0.42 * len(rules))
    axis.grid(visible=False)
    crowded = on_paper() and (page_width() - 2.0) / len(layers) < 0.5
    norm = SymLogNorm(linthresh=max(top / 100, 1e-9), vmin=-top, vmax=top)
    image = axis.imshow(np.ma.masked_invalid(value.values), cmap=colours, norm=norm, aspect="auto")
    for i, j in np.ndindex(*value.shape):
        number = value.values[i, j]
        text = f"{number:+.4f}".replace("-", "\N{MINUS SIGN}") if np.isfinite(number) else "not defined"
        weight = "bold" if bool(bold.loc[rules[i], layers[j]]) else "normal"
        if crowded:
            text = "\N{BLACK CIRCLE}" if weight == "bold" else ""
        red, green, blue, _ = image.cmap(norm(number)) if np.isfinite(number) else (1.0, 1.0, 1.0, 1.0)
        ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else INK
        axis.text(j, i, text, ha="center", va="center", fontsize=small(), color=ink, weight=weight)
    ticks = range(0, len(layers), 1 + len(layers) // 13)
    axis.set(xticks=ticks, xticklabels=[layers[i] for i in ticks], yticks=range(len(rules)))
    axis.set(yticklabels=[_words(rule) for rule in rules], xlabel="the one layer replaced")
    ticks = [sign * top * part for sign, part in ((-1, 1), (-1, 0.1), (0, 0), (1, 0.1), (1, 1))]
    beside = {"location": "bottom", "aspect": 40} if on_paper() else {}
    bar = figure.colorbar(image, ax=axis, label=f"change in {UNITS[quantity]}", ticks=ticks, format="%.1g", **beside)
    bar.ax.minorticks_off()
    return finish(figure, [], title)


def cost_by_distance(
    frame: pd.DataFrame,
    *,
    block_size: int,
    quantity: str = "loss",
    rules: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """The change by distance, all layers at once, a panel a rule, with 95 % intervals over documents.

    The distance is that of the dependency where the task knows it, else that of the best block that the query lost;
    tokens that lost nothing come first. Bars behind: the share of tokens at each distance.
    """
    part = frame[frame["bin"].notna() & frame["layer"].isna() & frame["proxy"].isna() & (frame["quantity"] == quantity)]
    part = part if rules is None else part[part["rule"].isin(rules)]
    _refuse_empty(part, f"distances in {quantity}", 'layers="both"')
    names, colours = _order(part), palette(_order(_overall(frame)))
    bins = part.drop_duplicates("bin").sort_values("bin")
    figure, axes = grid(len(names), width=max(6.0, 3.0 * min(4, len(names))), height=2.7, least=1.6, sharey=True)
    for axis, rule in zip(axes, names, strict=True):
        line = part[part["rule"] == rule].set_index("bin").reindex(bins["bin"]).reset_index()
        x = np.arange(len(bins))
        axis.bar(x, line["share"].astype(float), transform=axis.get_xaxis_transform(), color="#e3e6ea", zorder=0)
        for place, row in enumerate(line.itertuples()):
            _bar(axis, place, row, colours[rule], upright=True)
        if line["value"].isna().all():
            say_undefined(axis, line["reason"].dropna().iloc[0])
        axis.axhline(0, ls="--", lw=1.2, color=NULL)
        axis.set(title=_words(rule), xticks=x)
        axis.set_xticklabels(bins["distance"], fontsize=small(), rotation=30, ha="right", rotation_mode="anchor")
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(f"change in\n{UNITS[quantity]}", fontsize=small())
    what = "dependency" if (part["distance_of"] == "dependency").all() else "best lost block"
    label = lines(f"distance of the {what}, blocks of {block_size} tokens (grey: share of tokens)")
    figure.supxlabel(label, fontsize=small())
    return finish(figure, [], title)


def _bar(axis: Axes, place: int, row: object, colour: object, *, upright: bool = False) -> None:
    """A dot with its interval, or the reason why there is none."""
    value, low, high, reason = row.value, row.low, row.high, row.reason
    if not np.isfinite(value):
        if isinstance(reason, str) and not upright:
            words = lines(reason, 0.6 * panel_width(axis))
            axis.text(0.02, place, words, transform=axis.get_yaxis_transform(), va="center", fontsize=small())
        return
    bar = [[value - low], [high - value]] if np.isfinite(low) else None
    style = {"fmt": "o", "ms": 5, "capsize": 3, "color": colour}
    if upright:
        axis.errorbar(place, value, yerr=bar, **style)
    else:
        axis.errorbar(value, place, xerr=bar, **style)


def _overall(frame: pd.DataFrame) -> pd.DataFrame:
    """All tokens, all proxies at once."""
    return frame[frame["bin"].isna() & frame["proxy"].isna()]


def _order(part: pd.DataFrame) -> list[str]:
    """Rules in the order of the table."""
    return list(dict.fromkeys(part["rule"]))


def _words(rule: str) -> str:
    """A rule's name for readers."""
    if rule.startswith("shift"):
        return f"proxy {rule.removeprefix('shift')} further on"
    names = {"shared_z": "shared (z-scored)", "sink_recency": "sink + recency", "other_document": "another document"}
    return names.get(rule, rule)


def _refuse_empty(part: pd.DataFrame, what: str, fix: str) -> None:
    if part.empty:
        raise ValueError(f"frame: holds no rows for {what}; make it with intervene(run, {fix})")
