"""Writes the page: figures as PNG and SVG, and tables.md, whose every number comes from the tables beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import figures
import numpy as np
import pandas as pd
from msa_analysis.figures import save
from populations import Population
from proof import COVERAGE, REJECTION
from scenarios import SCENARIOS

Tables = Mapping[str, pd.DataFrame]


def draw_page(tables: Tables, rates: Mapping[str, np.ndarray], folder: Path) -> None:
    """Every figure, for the screen and for paper."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "planted": figures.planted(rates),
        "recovery": figures.recovery(tables["bias"]),
        "coverage": figures.coverage(tables["coverage"]),
        "rejections": figures.rejections(tables["null"]),
        "few_documents": figures.few_documents(tables["documents"]),
        "power": figures.power(tables["power"]),
    }
    for name, figure in drawn.items():
        for kind in ("png", "svg"):
            save(figure, folder / f"{name}.{kind}", kind=kind, dpi=110)


def write_page(tables: Tables, target: Path, commands: Sequence[str]) -> None:
    """The short tables, and first of all what is not as it should be."""
    made = ", then ".join(f"`python experiments/planted/{command}`" for command in commands)
    parts = [
        f"# Planted answers: tables\n\nMade by {made}; not to be edited.",
        _verdict(tables),
        _metrics(tables),
        _nulls(tables["null"]),
        _few(tables["documents"]),
        _power(tables["power"]),
        _populations(),
    ]
    target.write_text("\n\n".join(parts) + "\n")


def _verdict(tables: Tables) -> str:
    bias, cover, null = tables["bias"], tables["coverage"], tables["null"]
    often = cover["defined"] >= cover["runs"] / 10
    measured = cover[~cover["exact"] & often]
    low, high = (f"{100 * bound:.0f}" for bound in COVERAGE)
    least, most = (f"{100 * bound:.0f}" for bound in REJECTION)
    lines = [
        "## Verdict",
        f"- Bias: {int(bias['unbiased'].sum())} of {len(bias)} numbers (a metric in a population) within 10 % of the"
        " truth, or of half the interval where the truth is smaller.",
        f"- Coverage: {int(measured['inside'].sum())} of {len(measured)} within {low} to {high} %; "
        f"{int(measured['outside'].sum())} outside by more than the simulation's own three standard errors."
        f" {int(cover['exact'].sum())} more are exact in every run.",
        f"- Nulls: {int(null['inside'].sum())} of {len(null)} rejected in {least} to {most} % of runs"
        f" (one-sided: half); {int(null['outside'].sum())} outside by more than three standard errors.",
    ]
    wrong = bias[~bias["unbiased"]].merge(cover[["scenario", "metric", "coverage"]], on=["scenario", "metric"])
    text = "\n".join(lines)
    if len(wrong):
        columns = ["scenario", "metric", "truth", "mean", "relative_bias", "coverage"]
        text += "\n\nBias beyond the bound:\n\n" + _markdown(wrong[columns])
    outside = measured[measured["outside"]]
    if rare := int((~cover["exact"] & ~often).sum()):
        text += (
            f"\n\n{rare} more have an interval in less than a tenth of the runs: too few documents have a hit there."
        )
    if len(outside):
        columns = ["scenario", "metric", "truth", "coverage", "too_high", "too_low", "defined"]
        text += "\n\nCoverage shown to be outside the bounds:\n\n" + _markdown(outside[columns])
    beyond = null[null["outside"]]
    if len(beyond):
        text += "\n\nRejection shown to be outside the bounds:\n\n" + _markdown(beyond[_NULL])
    return text


_NULL = ["metric", "scenario", "test", "rejected", "low", "high", "null_runs"]


def _metrics(tables: Tables) -> str:
    """A row a metric, over populations (and over its bins)."""
    both = tables["bias"].merge(tables["coverage"].drop(columns="truth"), on=["scenario", "metric"])
    both["family"] = both["metric"].str.replace(r"\[.*", "", regex=True)
    both["off"] = np.where(
        both["truth"].abs() >= both["half"], both["relative_bias"].abs(), both["bias_in_halves"].abs()
    )
    chancy = both["coverage"].where(~both["exact"])
    table = (
        both.assign(chancy=chancy)
        .groupby("family", sort=False)
        .agg(
            numbers=("metric", "size"),
            least=("truth", "min"),
            most=("truth", "max"),
            largest_bias=("off", "max"),
            lowest_coverage=("chancy", "min"),
            mean_coverage=("chancy", "mean"),
            highest_coverage=("chancy", "max"),
        )
    )
    note = (
        "`numbers`: populations, times bins where there are any. `least`, `most`: the planted values. `largest_bias`:"
        " over the truth, or over half the interval where the truth is smaller. Coverage: of populations in"
        " which chance plays a part."
    )
    return f"## Every metric\n\n{note}\n\n" + _markdown(table.reset_index().rename(columns={"family": "metric"}))


def _nulls(null: pd.DataFrame) -> str:
    note = (
        "A null that holds should be rejected in 5 % of the runs (what is one-sided: in half as many), by the one test"
        " that `test` names; `low`, `high`:"
        " 95 % interval of the simulation, whose own standard error is 0.7 points in 1,000 runs."
    )
    return f"## Nulls\n\n{note}\n\n" + _markdown(null.sort_values(["metric", "scenario"])[_NULL])


def _few(documents: pd.DataFrame) -> str:
    part = documents[documents["metric"].isin(figures.SCALARS)]
    text = '## Few documents\n\nCoverage of the 95 % intervals in "near and far"; empty: not defined.\n\n'
    text += _markdown(
        part.pivot_table(index="metric", columns="documents", values="coverage", sort=False).reset_index()
    )
    p_value = part[part["metric"] == "mutual_information"].set_index("documents")["p_value_share"]
    first = p_value[p_value > 0].index.min()
    return text + f"\n\nThe permutation test of two proxies is defined from {first} documents on."


def _power(power: pd.DataFrame) -> str:
    one, more = power[power["seeds"] == 1], power[power["seeds"] > 1]
    runs = one.pivot_table(index="bits", columns="documents", values="power")
    runs.columns = [f"{count} documents" for count in runs.columns]
    seeds = more.pivot_table(index="bits", columns=["seeds", "documents"], values="power")
    seeds.columns = [f"{count} seeds, {documents} documents" for count, documents in seeds.columns]
    return (
        "## Power\n\nShare of runs in which a planted strength (bits of mutual information, two proxies) is found at"
        " 5 %: by the permutation test of one run.\n\n"
        + _markdown(runs.reset_index())
        + "\n\nBy a t-test over seeds, where the strength itself differs from seed to seed (standard deviation: half"
        " of it).\n\n" + _markdown(seeds.reset_index())
    )


def _populations() -> str:
    rows = pd.DataFrame([(name, s.planted, _changed(s.population)) for name, s in SCENARIOS.items()])
    return "## Populations\n\n" + _markdown(rows.set_axis(["population", "planted", "drawn from"], axis=1))


def _changed(population: Population) -> str:
    """The fields that are not the default."""
    default = Population()
    held = {field.name: getattr(population, field.name) for field in fields(population)}
    return ", ".join(f"{name} {value}" for name, value in held.items() if value != getattr(default, name))


def _markdown(table: pd.DataFrame) -> str:
    def cell(value: object) -> str:
        if isinstance(value, float):
            return "" if np.isnan(value) else f"{value:.4g}" if abs(value) > 5e-10 else "0"
        return str(value)

    head = " | ".join(str(column).replace("_", " ") for column in table.columns)
    rule = " | ".join("---" for _ in table.columns)
    rows = (" | ".join(cell(value) for value in row) for row in table.itertuples(index=False))
    return "\n".join(f"| {line} |" for line in (head, rule, *rows))
