"""One self-contained page about a set of runs, and the small table that goes to the terminal.

    write_report("runs/demo", Path("report.html"))

Everything comes from run folders; the page loads nothing from the network and escapes what it shows.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from msa_analysis import figures, quality
from msa_analysis.definitions import DEFINITIONS
from msa_analysis.evidence import Evidence, collect, over_seeds
from msa_analysis.gallery import Picture, pictures
from msa_analysis.logs import cautions
from msa_analysis.verdict import Verdict, judge
from msa_analysis.wording import UNDEFINED, duration, interval, missing, number, quantity
from msa_lab.config_io import to_dict
from msa_lab.runs import Run, write_atomically

HEADLINE = ("recency", "excess_recency", "block_recall", "mutual_information")
"""Metrics of the terminal's table."""


def write_report(runs: Evidence | Sequence[Run] | str | Path, out: str | Path) -> Path:
    """Write the page for these runs, or for all finished runs below a folder; returns `out`.

    Raises:
        ValueError: There is no finished run, or arms to be compared differ in corpus, rows or tokens.
    """
    evidence = collect(runs)
    verdict = judge(evidence)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.globals.update(
        number=number, interval=interval, quantity=quantity, duration=duration, missing=missing, undefined=UNDEFINED
    )
    page = environment.get_template("report.html.j2").render(_context(evidence, verdict))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return out


def summary_table(runs: Evidence | Sequence[Run] | str | Path) -> pd.DataFrame:
    """Quality for a terminal: a row an arm, ready-made text; differences only where the models were trained enough."""
    evidence = collect(runs)
    verdict = judge(evidence)
    differences = _differences(evidence, verdict)
    reference = quality.reference_arm(evidence.table) or "dense"
    rows = []
    for row in quality.arms(evidence.table).to_dict("records"):
        name = "bits per byte" if row["metric"] == "bits_per_byte" else "validation loss"
        shown = {
            "arm": row["arm"] + (" (stem)" if row["role"] == "stem" else ""),
            "seeds": str(row["seeds"]),
            name: number(row["value"]),
            # In bits per byte: beside a loss in nats it would be read as one.
            "bigram": "" if missing(row["bigram"]) or row["metric"] != "bits_per_byte" else number(row["bigram"]),
            f"minus {reference}": _cell(differences.get(row["arm"]), "difference", sign=True, absent=""),
            "parameters": quantity(row["parameters"]),
            "tokens/s": quantity(row["tokens_per_second"]),
        }
        rows.append(shown)
    return pd.DataFrame(rows)


def selection_table(runs: Evidence | Sequence[Run] | str | Path) -> pd.DataFrame:
    """What the proxies choose, for a terminal: a row a measure and arm, mean over layers, with its null."""
    metrics = over_seeds(collect(runs).specialization())
    rows = []
    for row in metrics[metrics["metric"].isin(HEADLINE)].to_dict("records"):
        null = UNDEFINED if missing(row["null"]) else number(row["null"])
        rows.append(
            {"arm": row["arm"], "measure": row["metric"].replace("_", " "), "value": _cell(row, "value"), "null": null}
        )
    return pd.DataFrame(rows)


def _cell(row: dict[str, Any] | None, key: str, *, sign: bool = False, absent: str = UNDEFINED) -> str:
    if row is None:
        return absent
    span = interval(row["low"], row["high"], sign=sign)
    return number(row[key], sign=sign) + (f" ({span})" if span else "")


def _context(evidence: Evidence, verdict: Verdict) -> dict[str, Any]:
    table = evidence.table
    metrics = over_seeds(evidence.specialization())
    arms = quality.arms(table).to_dict("records")
    return {
        "title": ", ".join(dict.fromkeys(table["study"])),
        "arms": arms,
        "metric": quality.metric_of(table),
        "reference": quality.reference_arm(table),
        "bigram": table["bigram_bits_per_byte"].astype(float).mean(),
        "differences": _differences(evidence, verdict),
        "verdict": verdict,
        "runs": table.to_dict("records"),
        "colours": {arm: _hex(colour) for arm, colour in figures.palette(table["arm"]).items()},
        "definitions": DEFINITIONS,
        "metrics": {key: row for row in metrics.to_dict("records") for key in [(row["arm"], row["metric"])]},
        "selecting": list(dict.fromkeys(metrics["arm"])),
        "layers": _by_layer(evidence),
        "accuracy": _accuracy(evidence),
        "pictures": [_inline(picture) for picture in pictures(evidence, verdict)],
        "settings": _settings(evidence),
        "corpora": _corpora(evidence),
        "machines": _machines(evidence),
        "limits": _limits(evidence, arms),
        "left_out": evidence.left_out,
    }


def _differences(evidence: Evidence, verdict: Verdict) -> dict[str, dict[str, Any]]:
    """By arm; empty where nothing may be compared or there is no dense arm to compare with."""
    if verdict.undertrained or quality.reference_arm(evidence.table) is None:
        return {}
    return {row["arm"]: row for row in quality.compare(evidence.runs).to_dict("records")}


def _hex(colour: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def _inline(picture: Picture) -> dict[str, Any]:
    """The figure as a data URI: vector where the figure is lines, pixels where it is a map."""
    buffer, kind = io.BytesIO(), "svg" if picture.vector else "png"
    figures.save(picture.figure, buffer, kind=kind, dpi=150)
    mime = "image/svg+xml" if picture.vector else "image/png"
    uri = f"data:{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    width = round(96 * picture.figure.get_figwidth())
    return {"name": picture.name, "title": picture.title, "caption": picture.caption, "uri": uri, "width": width}


def _by_layer(evidence: Evidence) -> list[dict[str, Any]]:
    """A row a run and layer, with the metrics as columns."""
    frame = evidence.specialization()
    if frame.empty:
        return []
    rows = []
    for (arm, seed, layer), part in frame[frame["layer"].notna()].groupby(["arm", "seed", "layer"], sort=True):
        cells = {row["metric"]: row for row in part.to_dict("records")}
        rows.append({"arm": arm, "seed": seed, "layer": int(layer), "cells": cells})
    return rows


def _accuracy(evidence: Evidence) -> dict[str, Any]:
    """Right answers by the distance of what they depend on, a row a distance; empty for corpora."""
    found = {}
    for run in evidence.runs:
        by_distance = run.result.get("accuracy_by_distance")
        if by_distance:
            found[evidence.labels[str(run.path)]] = {int(key): value for key, value in by_distance.items()}
    return {"runs": found, "distances": sorted({key for held in found.values() for key in held})}


def _settings(evidence: Evidence) -> dict[str, Any]:
    """Config values: those that differ between arms, and those that all share."""
    flat = {}
    for run in evidence.runs:
        arm = evidence.table.set_index("run").loc[str(run.path), "arm"]
        flat.setdefault(arm, _flatten(to_dict(run.config)))
    keys = [key for key in next(iter(flat.values())) if key not in ("study", "arm", "seed")]
    different = [key for key in keys if len({repr(values.get(key)) for values in flat.values()}) > 1]
    shared = {key: next(iter(flat.values()))[key] for key in keys if key not in different}
    return {"arms": list(flat), "values": flat, "different": different, "shared": shared}


def _flatten(plain: dict[str, Any], at: str = "") -> dict[str, Any]:
    result = {}
    for key, value in plain.items():
        result |= _flatten(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
    return result


def _corpora(evidence: Evidence) -> list[dict[str, Any]]:
    """Each corpus once: its hash and the plain facts of its manifest."""
    found = {}
    for run in evidence.runs:
        corpus = run.environment.get("corpus") or {}
        counted = {key: len(value) if isinstance(value, list | dict) else value for key, value in corpus.items()}
        # A path on the machine that trained says nothing here.
        facts = {k: v for k, v in counted.items() if k != "hash" and not Path(str(v)).is_absolute()}
        found.setdefault(run.result["corpus_hash"], {"source": run.config.data.source, **facts})
    return [{"hash": key, "facts": facts} for key, facts in found.items()]


def _machines(evidence: Evidence) -> list[str]:
    """Device and versions of each kind of machine that took part."""
    lines = []
    for run in evidence.runs:
        held = run.environment
        packages = ", ".join(f"{name} {version}" for name, version in (held.get("packages") or {}).items())
        lines.append(f"{held.get('device', 'unknown device')}; Python {held.get('python', '?')}; {packages}")
    return list(dict.fromkeys(lines))


def _limits(evidence: Evidence, arms: list[dict[str, Any]]) -> list[str]:
    """What these runs cannot say, and which controls are missing."""
    trained = [row for row in arms if row["role"] == "arm"]
    kinds = {row["kinds"] for row in trained}
    lines = [
        f"{row['arm']}: not sparse. Its block budget covers {row['density']:.0%} of all pairs, so it is dense in all "
        "but name."
        for row in trained
        if row["hides_sparsity"]
    ]
    if max((row["seeds"] for row in trained), default=0) < 2:
        lines.append("One seed: intervals speak of these very models, not of the method.")
    controls = {"dense": "dense attention", "window": "a recency window", "random": "random blocks"}
    absent = [name for kind, name in controls.items() if kind not in kinds]
    shared = any(row["proxies"] == 1 for row in trained)
    absent += [] if shared else ["one proxy shared by all heads"]
    if absent:
        lines.append(f"Arms not run: {', '.join(absent)}.")
    lines += [f"No selections measured: {evidence.labels[run]}: {why}." for run, why in evidence.unmeasured.items()]
    logs = [(selected.label, selected.data) for selected in evidence.selected.values()]
    lines += [f"Selections of these runs cannot be compared: {text}." for text in cautions(logs)]
    lines.append(
        "Nothing here tests what specialization is worth: that takes interventions, one shared selection in place of "
        "each proxy's own. A report neither runs nor reads them: `msa-lab intervene` does, for one run."
    )
    return lines
