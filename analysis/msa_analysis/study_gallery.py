"""The figures of a study over seeds: which its tables can give, each with what it shows."""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from msa_analysis import figures, quality, study_figures, study_tables
from msa_analysis.quality import metric_of
from msa_analysis.study_results import Results
from msa_lab.study import SeededStudy

DRAWN = ("mutual_information_excess", "content", "excess_recency", "coverage_over_window")
"""Metrics of `specialization.dynamics` that are drawn over training."""


def pairs_of(study: SeededStudy) -> list[tuple[str, str]]:
    """What is compared: every arm with its reference, then the contrasts."""
    return [(arm, base) for arm, base in study.reference.items() if arm != base] + list(study.contrasts)


class Picture(NamedTuple):
    """A figure's name, what it shows, and how it is drawn."""

    name: str
    title: str
    draw: Callable[[], Figure]


def pictures(study: SeededStudy, results: Results) -> Iterator[Picture]:
    """All that these results can give."""
    runs, pairs = results.table("runs"), pairs_of(study)
    if not len(runs):
        return
    told: dict[str, Any] = {"colours": figures.palette([*study.arms, *runs["arm"]])}
    metric = metric_of(runs)
    found, seeds = study_tables.differences(results, pairs, margin=study.margin), study_tables.by_seed(results, pairs)
    if len(found):
        limits = {"margin": study.margin, "metric": metric}
        draw = partial(study_figures.differences, found, seeds, **limits, **told)
        yield Picture("differences", "Differences in quality", draw)
    arms = runs[runs["arm"].isin(study.arms)].assign(role="arm")
    if len(arms):
        draw = partial(figures.quality_against_cost, arms, quality.arms(arms), **told)
        yield Picture("quality", "Quality against parameters, FLOPs and training time", draw)
    tables = {
        "costs": (study_tables.costs(results), study_figures.costs, "Cost of other selections, all layers at once"),
        "layers": (study_tables.costs(results, ("layer",)), study_figures.layers, "Cost of another one in one layer"),
        "training": (
            study_tables.specialization(results, DRAWN, over="training"),
            study_figures.training,
            "Specialization over training",
        ),
        "answers": (study_tables.answers(results), study_figures.answers, "Right answers by distance"),
    }
    for name, (table, draw, title) in tables.items():
        of_arms = table[table["arm"].isin(study.arms)]
        if of_arms["value"].notna().any():
            yield Picture(name, title, partial(draw, of_arms, **told))
    power = study_tables.power(results, pairs)
    if len(power) and power["sd"].notna().any():
        draw = partial(study_figures.power, power, study_tables.COUNTS, metric=metric)
        yield Picture("power", "What a number of seeds can find", draw)
    curve = results.table("curve")
    if len(curve):
        lines = curve.assign(run=curve["arm"] + " " + curve["seed"].astype(str))
        yield Picture("loss", "Loss over training, a line a run", partial(figures.loss_curves, lines, **told))
