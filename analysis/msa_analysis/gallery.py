"""The figures of a set of runs, each with its caption and the numbers it was drawn from."""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from msa_analysis import figures, heatmaps, quality, specialization
from msa_analysis.canvas import KINDS, save, sized
from msa_analysis.evidence import Evidence, Selected, collect
from msa_analysis.specialization import RUN
from msa_analysis.verdict import Verdict, judge
from msa_lab.runs import Run


class Picture(NamedTuple):
    """A figure, what it shows, and its data in tidy form; `vector` says that svg suits it."""

    name: str
    title: str
    caption: str
    figure: Figure
    data: pd.DataFrame
    vector: bool = True


def pictures(evidence: Evidence, verdict: Verdict) -> Iterator[Picture]:
    """Every figure that these runs can give; arms are compared only where the verdict allows it."""
    switches = sorted({run.config.train.sparse_step for run in evidence.runs if str(run.path) in evidence.selected})
    colours = figures.palette(evidence.table["arm"])
    shown = _one_per_arm(evidence)
    # Maps of several arms are compared by eye, so they share a scale. A map is made twice: all at once may not fit.
    several = len(shown) > 1
    vmax = max(heatmaps.highest(heatmaps.selection_rate(one.data)) for one in shown) if several else None
    for selected in shown:
        yield _heatmap(selected, vmax)
        yield _profile(selected)
        yield _by_distance(selected)
        if selected.data.sizes["proxy"] > 1:
            yield _position_or_content(selected)
    if evidence.selected:
        data = evidence.dynamics()
        text = "Mean over layers at every record; bands are 95 % intervals over the probe documents of one model."
        drawn = figures.training_dynamics(data, colours=colours, switches=switches)
        yield Picture("dynamics", "Since when: selection over training", text, drawn, data)
    metrics = evidence.metrics()
    if len(metrics) and metrics["name"].str.startswith("train/kl/layer").any():
        text = (
            "KL from each proxy to its teacher, mean over proxies; the first seed of each arm. Arms with different "
            "numbers of proxies are not comparable: their teachers differ."
        )
        data = metrics[metrics["name"].str.startswith("train/kl")]
        data = data[data["seed"] == data.groupby("arm")["seed"].transform("min")]
        yield Picture(
            "kl", "How well proxies imitate their heads", text, figures.kl_curves(data, switches=switches), data
        )
    if len(metrics):
        data = metrics[metrics["name"].str.fullmatch("train/ce|validation/(warmup/)?(loss|bits_per_byte)")]
        bigram = float(evidence.table["bigram_bits_per_byte"].astype(float).mean())
        drawn = figures.loss_curves(data, bigram=bigram, colours=colours, switches=switches)
        text = "A line a run. A stem is the dense beginning that forks share."
        yield Picture("loss", "Loss over training", text, drawn, data)
    if not verdict.undertrained:
        data = evidence.table[evidence.table["role"] == "arm"]
        drawn = figures.quality_against_cost(data, quality.arms(data), colours=colours)
        text = "Dots are runs; bars are 95 % t intervals over seeds, drawn where there are at least two."
        yield Picture("quality", "Quality against what it cost", text, drawn, data)
        if quality.reference_arm(evidence.table) and data["arm"].nunique() > 1:  # pyright: ignore[reportAttributeAccessIssue]
            data = quality.compare(evidence.runs)
            drawn = figures.paired_differences(data, colours=colours)
            text = "Bars are 95 % intervals over what the label names; below zero is better than the dense arm."
            yield Picture("differences", "Paired differences", text, drawn, data)


def write_figures(
    runs: Evidence | Sequence[Run] | str | Path,
    folder: str | Path,
    *,
    size: str = "screen",
    kinds: Sequence[str] = ("png", "svg"),
) -> list[Path]:
    """Each figure as files of these kinds and the numbers behind it as CSV: readable without any tracking service.

        write_figures("runs/demo", "figures", size="column", kinds=["pdf"])

    Figures and tables that an earlier call left in `folder` are removed. Returns the files written.

    Args:
        runs: Runs, or a folder of them.
        folder: Where the files go; it is made.
        size: "screen", "paper" (as wide as both columns of a paper, 7 inches) or "column" (3.4 inches; `canvas.SIZES`).
        kinds: Of "png", "svg" and "pdf"; in the last two all but the cells of maps is vectors.

    Raises:
        ValueError: There is no such size or kind, or no finished run.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kinds: {kind!r} must be one of {', '.join(KINDS)}")
    folder, evidence = Path(folder), collect(runs)
    written, tables = [], {"runs": evidence.table, "specialization": evidence.specialization()}
    with sized(size):
        folder.mkdir(parents=True, exist_ok=True)
        for old in (old for kind in (*KINDS, "csv") for old in folder.glob(f"*.{kind}")):
            old.unlink()
        for picture in pictures(evidence, judge(evidence)):
            for kind in kinds:
                written.append(folder / f"{picture.name}.{kind}")
                save(picture.figure, written[-1], kind=kind)
            tables[picture.name] = picture.data
    for name, data in tables.items():
        written.append(folder / f"{name}.csv")
        data.to_csv(written[-1], index=False)
    return written


def _one_per_arm(evidence: Evidence) -> list[Selected]:
    """The first seed of every arm that has a log: pictures are examples, the tables hold all seeds."""
    rows = evidence.table[evidence.table["run"].isin(list(evidence.selected))]
    firsts = rows.sort_values("seed").drop_duplicates("arm").sort_index()
    return [evidence.selected[path] for path in firsts["run"]]


def _heatmap(selected: Selected, vmax: float | None) -> Picture:
    rate = heatmaps.selection_rate(selected.data)
    size = int(selected.data.attrs["block_size"])
    drawn = heatmaps.selection_heatmap(rate, block_size=size, vmax=vmax)
    text = (
        "Share of a query block's queries that read each key block, over all probe documents, at the last record. "
        "The diagonal is the own block, which is forced; the first queries see few blocks and read them all. Grey: the "
        "future, which cannot be chosen."
    )
    cells = rate.to_dataframe().reset_index().dropna(subset="selection_rate")
    return Picture(
        f"selection-rate-{_slug(selected.label)}", f"What is read: {selected.label}", text, drawn, cells, vector=False
    )


def _profile(selected: Selected) -> Picture:
    last = selected.sums.isel(step=[-1])
    data = specialization.distance_profile(last)
    drawn = figures.distance_profiles(data, block_size=int(selected.data.attrs["block_size"]))
    text = (
        "Share of freely chosen blocks by distance. Dashed: uniform choice among what was visible. Dotted: the blocks "
        "that the heads themselves would choose. Bars: 95 % over documents."
    )
    name = f"distance-{_slug(selected.label)}"
    return Picture(name, f"How far back: {selected.label}", text, drawn, data.replace({np.inf: np.nan}))


def _by_distance(selected: Selected) -> Picture:
    last = selected.sums.isel(step=[-1])
    parts = (specialization.recall_by_distance, specialization.coverage_by_distance)
    data = pd.concat([part(last, pool=pool) for part in parts for pool in (("proxy",), RUN)], ignore_index=True)
    data = data[data["metric"].isin(figures.BY_DISTANCE)]
    drawn = figures.choice_by_distance(data, block_size=int(selected.data.attrs["block_size"]))
    text = (
        "Of the blocks that the heads themselves would choose so far back: the share that the proxy chose too, and the "
        "share of the attention on them. Dashed: uniform choice. Bars: 95 % over documents."
    )
    return Picture(f"found-{_slug(selected.label)}", f"What is found: {selected.label}", text, drawn, data)


def _position_or_content(selected: Selected) -> Picture:
    data = selected.dynamics
    data = data[(data["step"] == data["step"].max()) & data["metric"].isin(["positional", "content"])]
    text = (
        "Overlap of proxies beyond chance (kappa), in two parts: what another document at the same place gives too, "
        "and what needs the same text. A dot a layer, with its number; bars: 95 % over documents; 0 is chance."
    )
    drawn = figures.position_or_content(data)
    return Picture(f"alike-{_slug(selected.label)}", f"Why alike: {selected.label}", text, drawn, data)


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label)
