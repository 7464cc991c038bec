"""The page of a study over seeds, and its figures, from the small tables of its seeds alone.

    write_study("experiments/proxies")  # results.md and figures/, beside study.py

No run, no corpus and no GPU is needed. What was to be run and was not is named first.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from msa_analysis import figures, study_figures, study_tables
from msa_analysis.quality import metric_of
from msa_analysis.reduction import METRICS
from msa_analysis.study_gallery import pairs_of, pictures
from msa_analysis.study_results import Results, load, not_run
from msa_analysis.wording import UNDEFINED, chance, duration, interval, number, quantity
from msa_lab.runs import write_atomically
from msa_lab.study import SeededStudy, read_study

PAGE, FIGURES, RESULTS = "results.md", "figures", "results"
DIGITS = 4


def is_study(folder: str | Path) -> bool:
    """Whether a folder holds a study's tables rather than runs."""
    return any(Path(folder, RESULTS).glob("seed*"))


def write_study(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page and figures of a study that has tables into `out`, its own folder by default; returns the page.

    Raises:
        ValueError: It is no study over seeds, or has no tables, or they do not fit together.
    """
    study, results = read_tables(folder)
    out = Path(out or study.folder)
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    for old in (out / FIGURES).glob("*.png"):
        old.unlink()
    for picture in pictures(study, results.only(study.seeds, study.arms)):
        figures.save(picture.draw(), out / FIGURES / f"{picture.name}.png", dpi=110)
    write_atomically(out / PAGE, page(study, results))
    return out / PAGE


def read_tables(folder: str | Path) -> tuple[SeededStudy, Results]:
    """A study and what its seeds left.

    Raises:
        ValueError: It is no study over seeds, or has no tables, or they do not fit together.
    """
    study = read_study(folder)
    results = load(study.folder / RESULTS)
    if not results.about:
        name = study.folder.name
        raise ValueError(
            f"{study.folder / RESULTS}: holds no seed; make one by `python experiments/run_seed.py {name} --seed 0`"
        )
    return study, results


def page(study: SeededStudy, results: Results) -> str:
    """The page as Markdown; its figures are named in it."""
    counted = results.only(study.seeds, study.arms)
    drawn = [f"![{picture.title}]({FIGURES}/{picture.name}.png)" for picture in pictures(study, counted)]
    return "\n\n".join([*_parts(study, results, counted), "## Figures", *drawn]) + "\n"


def _parts(study: SeededStudy, results: Results, counted: Results) -> Iterator[str]:
    """The page without its figures."""
    pairs = pairs_of(study)
    yield f"# Results of {study.folder.name}"
    yield "Made by `msa-lab report` from `results/`; not to be edited. " + _legend()
    if any(held.get("tiny") for held in results.about):
        yield "**A rehearsal with a tiny model: every part was run, and no number here is a result.**"
    yield from _what_ran(study, results, counted)
    runs = counted.table("runs")
    if not len(runs):
        return
    yield f"## Quality, {study_figures.UNITS[metric_of(runs)]}"
    yield _quality(study_tables.quality(counted))
    found = study_tables.differences(counted, pairs, margin=study.margin)
    if len(found):
        yield f"Differences, paired by seed. The margin named in advance is {study.margin:g}."
        yield _differences(found)
    twins = study_tables.twins(counted, study.twice)
    if len(twins):
        yield "## The same arm twice"
        yield _twins(twins)
    power = study_tables.power(counted, pairs)
    if len(power) and power["sd"].notna().any():
        yield "## Power"
        yield "The least difference that a paired t test over so many seeds finds four times of five (p < 0.05)."
        yield _power(power)
    yield from _choices(counted)


def _legend() -> str:
    return (
        "Intervals are 95 %, Student's t over seeds, and need three. p is of a two-sided t test over seeds against 0, "
        "q is p corrected for the number of rows of its table (of a layer table: for the layers of an arm), by "
        "Benjamini and Hochberg."
    )


def _what_ran(study: SeededStudy, results: Results, counted: Results) -> Iterator[str]:
    yield "## What was run"
    rows = []
    for held in results.about:
        minutes = duration(sum(held["seconds"].values()))
        corpus = (held.get("corpus") or {}).get("hash", "")
        what = (held["seed"], held.get("device", ""), held.get("path", ""), held.get("code", ""), corpus, minutes)
        rows.append([*map(str, what), f"`{held['command']}`"])
    yield _table(("seed", "device", "kernels", "code", "corpus", "time", "command"), rows)
    if further := sorted(set(results.seeds) - set(study.seeds)):
        yield f"Seeds that are no part of the study, in no number below: {', '.join(map(str, further))}."
    absent = not_run(counted, study.arms, study.seeds)
    arms, seeds = len(study.arms), len(study.seeds)
    yield f"{arms * seeds - len(absent)} of {arms * seeds} runs ({arms} arms, {seeds} seeds) have numbers."
    if len(absent):
        parts = absent.groupby(["arm", "reason"], sort=False)["seed"].agg(lambda held: ", ".join(map(str, held)))
        yield "Not in any number below:"
        yield _table(("arm", "seeds", "reason"), [[arm, held, reason] for (arm, reason), held in parts.items()])


def _quality(frame: pd.DataFrame) -> str:
    rows = [
        [
            row.arm,
            str(row.seeds),
            _value(row),
            number(row.sd, DIGITS) if row.seeds > 1 else "",
            f"{row.parameters:,.0f}",
            f"{row.proxies:.0f}",
            quantity(row.flops_total),
            duration(row.wall_seconds),
            quantity(row.tokens_per_second),
        ]
        for row in frame.itertuples()
    ]
    names = ("arm", "seeds", "quality (95 %)", "SD over seeds", "parameters", "proxies", "FLOPs", "time", "tokens/s")
    return _table(names, rows)


def _differences(frame: pd.DataFrame) -> str:
    rows = [
        [
            f"{row.arm} \N{MINUS SIGN} {row.reference}",
            str(row.seeds),
            _value(row, sign=True),
            *(number(row.sd, DIGITS), chance(row.p), chance(row.q), row.verdict or UNDEFINED),
        ]
        for row in frame.itertuples()
    ]
    return _table(("arms", "seeds", "difference (95 %)", "SD", "p", "q", "verdict"), rows)


def _twins(frame: pd.DataFrame) -> str:
    rows = [
        [
            f"{row.arm}, {row.again}",
            str(row.seed),
            *("equal" if same else "differ" for same in (row.weights, row.losses)),
            number(row.difference, DIGITS, sign=True),
        ]
        for row in frame.itertuples()
    ]
    return _table(("arms", "seed", "weights, bit for bit", "logged losses", "difference in quality"), rows)


def _power(frame: pd.DataFrame) -> str:
    counts = study_tables.COUNTS
    rows = [
        [
            f"{row['arm']} \N{MINUS SIGN} {row['reference']}",
            str(row["seeds"]),
            _value({"value": row["sd"], "low": row["sd_low"], "high": row["sd_high"]}),
            *(number(row[name], DIGITS) for name in ("row_error", *(f"seeds_{count}" for count in counts))),
        ]
        for row in frame.to_dict("records")
    ]
    names = ("arms", "seeds", "SD of differences (95 %)", "of it over rows", *(f"{count} seeds" for count in counts))
    return _table(names, rows)


def _choices(results: Results) -> Iterator[str]:
    costs = study_tables.costs(results)
    if len(costs):
        yield "## What it is worth that each proxy has its own selection"
        yield "Cost of one shared selection, nats per token, all layers at once; q over arms. Recency is for scale."
        yield _worth(study_tables.worth(results))
        yield "## Cost of other selections"
        yield "Change of loss, nats per token, all layers at once."
        yield _grid(costs, "rule")
        by_layer = study_tables.costs(results, ("layer",))
        for rule, part in by_layer.groupby("rule", sort=False):
            yield f"`{rule}` in one layer at a time (bold: q < 0.05 over the layers of an arm)."
            yield _grid(part.sort_values("layer"), "layer")
        by_distance = study_tables.costs(results, ("bin", "distance"))
        part = by_distance[by_distance["rule"] == "shared"].sort_values("bin")
        if len(part):
            yield "`shared` in all layers, by distance in blocks: of what an answer depends on, else of the lost block."
            yield _grid(part, "distance")
    end = study_tables.specialization(results, METRICS)
    end = end[end["layer"].isna()]
    if len(end):
        yield "## Specialization at the end"
        yield "Mean over layers, and in brackets the null."
        yield _grid(end, "metric", with_null=True)
    answers = study_tables.answers(results)
    if len(answers):
        yield "## Right answers by distance of the answer, blocks"
        yield _grid(answers, "distance")


def _worth(frame: pd.DataFrame) -> str:
    rows = [
        [
            row.arm,
            str(row.seeds),
            _value(row, sign=True),
            *(chance(row.p), chance(row.q), number(row.recency, DIGITS, sign=True)),
        ]
        for row in frame.itertuples()
    ]
    return _table(("arm", "seeds", "cost (95 %)", "p", "q", "recency"), rows)


def _grid(frame: pd.DataFrame, down: str, *, with_null: bool = False) -> str:
    """A row a value of `down`, a column an arm."""
    arms = list(dict.fromkeys(frame["arm"]))
    cells = {(row[down], row["arm"]): row for row in frame.to_dict("records")}
    rows = []
    for name in dict.fromkeys(frame[down]):
        row = [f"{name:.0f}" if isinstance(name, float) else str(name).replace("_", " ")]
        for arm in arms:
            held = cells.get((name, arm))
            text = "" if held is None else _value(held, sign=not with_null and "rule" in frame)
            if held is not None and held.get("q", np.nan) < 0.05:
                text = f"**{text}**"
            row.append(text + (f" [{number(held['null'], 3)}]" if with_null and held is not None else ""))
        rows.append(row)
    return _table((down, *arms), rows)


def _value(row: Any, *, sign: bool = False) -> str:
    """`value (low to high)`, without the interval where there is none."""
    value, low, high = (row[name] if isinstance(row, dict) else getattr(row, name) for name in ("value", "low", "high"))
    span = interval(low, high, DIGITS, sign=sign)
    return number(value, DIGITS, sign=sign) + (f" ({span})" if span else "")


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
