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
from msa_analysis.evidence import Evidence, Selected, collect
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
    for selected in _one_per_arm(evidence):
        yield _heatmap(selected)
        yield _profile(selected)
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
        data = metrics[metrics["name"].isin(["train/ce", "validation/loss", "validation/bits_per_byte"])]
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


def write_figures(runs: Evidence | Sequence[Run] | str | Path, folder: str | Path) -> list[Path]:
    """Each figure as PNG and the numbers behind it as CSV, into `folder`: readable without any tracking service.

    Figures and tables that an earlier call left there are removed. Returns the files written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.png"), *folder.glob("*.csv")]:
        old.unlink()
    evidence = collect(runs)
    written = []
    tables = {"runs": evidence.table, "specialization": evidence.specialization()}
    for picture in pictures(evidence, judge(evidence)):
        path = folder / f"{picture.name}.png"
        figures.save(picture.figure, path)
        written.append(path)
        tables[picture.name] = picture.data
    for name, data in tables.items():
        path = folder / f"{name}.csv"
        data.to_csv(path, index=False)
        written.append(path)
    return written


def _one_per_arm(evidence: Evidence) -> list[Selected]:
    """The first seed of every arm that has a log: pictures are examples, the tables hold all seeds."""
    rows = evidence.table[evidence.table["run"].isin(list(evidence.selected))]
    firsts = rows.sort_values("seed").drop_duplicates("arm").sort_index()
    return [evidence.selected[path] for path in firsts["run"]]


def _heatmap(selected: Selected) -> Picture:
    rate = heatmaps.selection_rate(selected.data)
    size = int(selected.data.attrs["block_size"])
    drawn = heatmaps.selection_heatmap(rate, block_size=size)
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


def _slug(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label)
