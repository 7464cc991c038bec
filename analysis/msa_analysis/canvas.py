"""What all figures share: colours, sizes for screen and paper, panels, one legend, and saving.

    with sized("column"):
        figure = figures.distance_profiles(profile, block_size=16)
        save(figure, "profile.pdf", kind="pdf")

Figures are made without pyplot: none is registered anywhere, so none can be left open, and no display is needed.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, FAINT, NULL = "#22262b", "#8a9099", "#6b7078"
STYLE: dict[Any, Any] = {
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "figure.dpi": 100,
    "font.size": 10,
    "grid.color": "#e6e8eb",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}
Colours = dict[str, tuple[float, float, float]]
KINDS = ("png", "svg", "pdf")


class Size(NamedTuple):
    """Width of a figure in inches, and its letters in points."""

    width: float
    letters: float


SIZES = {"screen": Size(10.0, 10.0), "paper": Size(7.0, 8.0), "column": Size(3.4, 8.0)}
"""For a screen, where a figure may be narrower or wider; for both columns of a paper, and for one: exactly so wide."""
_chosen: ContextVar[str] = ContextVar("size", default="screen")


@contextmanager
def sized(name: str) -> Iterator[None]:
    """What is drawn and saved inside has a size of SIZES; no letter on paper is smaller than 7 points.

    Raises:
        ValueError: SIZES has no such name.
    """
    if name not in SIZES:
        raise ValueError(f"size={name!r}: must be one of {', '.join(SIZES)}")
    token = _chosen.set(name)
    plain: dict[Any, Any] = {"font.size": letters()}
    if on_paper():
        plain |= {"axes.titlesize": "medium", "legend.fontsize": small(), "lines.linewidth": 1.2}
    try:
        with mpl.rc_context(plain):
            yield
    finally:
        _chosen.reset(token)


def on_paper() -> bool:
    """Whether a figure must keep to the width of a page."""
    return _chosen.get() != "screen"


def page_width() -> float:
    """In inches."""
    return SIZES[_chosen.get()].width


def letters() -> float:
    """Points of the text."""
    return SIZES[_chosen.get()].letters


def small() -> float:
    """Points of the smaller text."""
    return max(7.0, letters() * 0.833)


def say_undefined(axis: Axes, reason: str) -> None:
    """In the middle of a panel without a number: why."""
    words = lines(f"not defined: {reason.removeprefix('not defined: ')}", panel_width(axis), size=letters() * 1.2)
    axis.text(0.5, 0.5, words, ha="center", va="center", transform=axis.transAxes)


def name_x(axis: Axes, text: str) -> None:
    """Label the x axis of a panel whose long row names leave it narrow: on paper the label may begin below them."""
    axis.set_xlabel(lines(text, panel_width(axis), size=letters()), loc="right" if on_paper() else "center")


def lines(text: str, inches: float | None = None, *, size: float | None = None) -> str:
    """The text in lines that fit into so many inches, by default the page's width."""
    letter = 0.55 * (size or small()) / 72  # inches, on average
    return textwrap.fill(text, max(8, int((inches or page_width()) / letter)), break_long_words=False)


def panel_width(axis: Axes) -> float:
    """Of a panel with its labels, in inches; a little less than its share of the figure."""
    spec, figure = axis.get_subplotspec(), axis.get_figure(root=True)
    assert spec is not None
    assert figure is not None
    return 0.9 * figure.get_figwidth() / spec.get_gridspec().ncols


def palette(arms: Iterable[str]) -> Colours:
    """A colour for each arm, by its place in alphabetical order, so that all figures of a study agree."""
    names = sorted(set(arms))
    colours = sns.color_palette("colorblind" if len(names) <= 10 else "husl", max(len(names), 1))
    return dict(zip(names, colours, strict=False))


def save(figure: Figure, target: str | Path | io.BytesIO, *, kind: str = "png", dpi: int = 200) -> None:
    """Write the figure as png, svg or pdf; the same figure gives the same bytes."""
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with mpl.rc_context({"svg.hashsalt": "msa", "pdf.fonttype": 42}):
        figure.savefig(target, format=kind, dpi=dpi, metadata=dates.get(kind))


def grid(
    count: int,
    *,
    columns: int = 4,
    height: float = 2.6,
    width: float | None = None,
    least: float = 2.2,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, its rows so many inches high.

    `width` is that on a screen. On paper there are fewer columns than asked for where panels would be narrower than
    `least` inches.
    """
    columns = max(1, min(columns, count, int(page_width() // least) if on_paper() else columns))
    rows = -(-max(count, 1) // columns)
    screen = width or max(10.0 if columns > 1 else 6.0, 2.6 * columns)
    figure, grid = panels(rows, columns, (page_width() if on_paper() else screen, height * rows + 0.7), sharey=sharey)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    for axis in axes[:count]:
        if on_paper():
            axis.tick_params(labelsize=small())
    return figure, axes[:count]


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure of `size` inches and its axes (rows, columns), in STYLE; the options are those of `Figure.subplots`."""
    with mpl.rc_context(STYLE), mpl.rc_context({"font.size": letters()}):
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def finish(figure: Figure, axes: list[Axes], title: str = "") -> Figure:
    """One legend for all panels, below them, and a title."""
    entries: dict[str, Artist] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        letter = mpl.rcParams["font.size"] / 72
        across = int(figure.get_figwidth() / ((0.55 * max(map(len, entries)) + 4.5) * letter))
        columns = max(1, min(5, across, len(entries)))
        handles = list(entries.values())
        figure.legend(handles, list(entries), loc="outside lower center", ncols=columns, frameon=False)
    if title:
        figure.suptitle(lines(title, size=12), x=0.01, ha="left", fontsize="large")
    return figure
