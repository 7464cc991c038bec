"""What was measured, in plain words for a terminal: layer by proxy, layer by layer, and what is not defined and why."""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from msa_analysis.analyze import Measured, Skipped, seeds
from msa_analysis.logs import cautions
from msa_analysis.wording import UNDEFINED, interval, missing, number

LEVEL = 0.05
"""Corrected p-values below it, and 95 % intervals, are called a difference."""
HEADLINE = (
    *("recency", "excess_recency", "block_recall", "coverage_over_window", "mutual_information"),
    *("mutual_information_excess", "mutual_information_share", "kappa", "positional", "content"),
)
"""Metrics that are listed where they are not defined, and over seeds."""
LEGEND = """\
recency: 1 always the newest blocks, 0 always the oldest; minus its heads': less that of its heads' own favourite blocks
leans: recency is not 0.5, corrected over layers and proxies
its heads' blocks: those that the heads of this proxy attend to most when they may read everything
proxies differ: bits by which one can tell the proxy from how far back it looks; untrained: less the first record's
alike: 0 as two uniform choices, 1 the same blocks; by position: what another document at the same place gives
(a to b): 95 % interval over documents, of this one model; p: from relabelled proxies, corrected over layers"""


def describe(measured: Sequence[Measured], skipped: Sequence[Skipped]) -> str:
    """The summary that `msa-lab analyze` prints."""
    parts = ["\n".join(_one(item)) for item in measured]
    over = seeds(measured)
    if len(over):
        parts.append("\n".join(_over_seeds(over)))
    parts.append(LEGEND)
    lines = [f"do not compare: {text}" for text in cautions([(item.source.label, item.data) for item in measured])]
    reasons: dict[str, list[str]] = {}
    for source, reason in skipped:
        reasons.setdefault(reason, []).append(source.label)
    lines += [f"not measured: {', '.join(labels)}: {reason}" for reason, labels in reasons.items()]
    return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])])


def _one(item: Measured) -> Iterator[str]:
    data, sums = item.data, item.sums
    size, top_k = int(data.attrs["block_size"]), int(data.attrs["top_k_blocks"])
    yield f"{item.source.label} ({item.source.path})"
    layers = ", ".join(str(layer) for layer in data["layer"].values)
    records = f"record of step {item.last}, the last of {data.sizes['step']}"
    yield f"{records}; {data.sizes['document']} documents; layers {layers}; {data.sizes['proxy']} proxies"
    share = f"{sums.attrs['row_share']:.0%} of the queries see {4 * top_k} blocks or more, and only they count"
    yield f"a query reads {top_k} blocks of {size} tokens; {share}"
    yield from _empty_documents(item)
    yield ""
    yield from _aligned(list(_proxies(item)))
    yield ""
    yield from _aligned(list(_layers(item)))
    yield from _undefined(item)


def _empty_documents(item: Measured) -> Iterator[str]:
    held = item.sums["slots"].sel(source="proxy")
    held = held.sum([dim for dim in held.dims if dim != "document"])
    empty = [str(name) for name, slots in zip(held["document"].values, held.values, strict=True) if not slots]
    if 0 < len(empty) < held.size:
        yield f"documents without any choice, which count in no number: {', '.join(empty)}"


def _proxies(item: Measured) -> Iterator[dict[str, str]]:
    recency, recall, tables = item.tables["recency"], item.tables["block_recall"], item.tables
    for layer in item.data["layer"].values:
        for proxy in item.data["proxy"].values:
            at = {"step": item.last, "layer": layer, "proxy": proxy}
            where = _row(recency, metric="recency", **at)
            found = _row(recall, metric="block_recall", **at)
            yield {
                "layer": str(layer),
                "proxy": str(proxy),
                "recency (uniform 0.5)": _cell(where),
                "minus its heads'": _cell(_row(recency, metric="excess_recency", **at), sign=True),
                "finds its heads' blocks": _cell(found),
                "by chance": UNDEFINED if missing(found["value"]) else number(found["null"]),
                "in words": _leaning(_row(tables["proxies"], metric="recency", **at))
                + _alarm(tables["collapse"], layer, proxy),
            }


def _leaning(row: pd.Series) -> str:
    if missing(row["low"]) or missing(row["q_value"]):
        return UNDEFINED
    if not row["q_value"] < LEVEL:
        return "no lean shown"
    return "leans near" if row["value"] > row["null"] else "leans far"


def _alarm(collapse: pd.DataFrame, layer: int, proxy: int) -> str:
    rows = collapse[(collapse["layer"] == layer) & (collapse["proxy"] == proxy) & (collapse["metric"] == "collapse")]
    rows = rows[rows["step"] == rows["step"].max()] if len(rows) else rows
    return "; COLLAPSED" if (rows["value"] == 1).any() else ""


def _layers(item: Measured) -> Iterator[dict[str, str]]:
    table = item.tables["summary"]
    for layer in [*item.data["layer"].values, None]:
        rows = table[table["layer"].isna()] if layer is None else table[table["layer"] == layer]

        def cell(metric: str, rows: pd.DataFrame = rows, *, sign: bool = False, short: bool = True) -> str:
            row = _row(rows, metric=metric)
            return number(row["value"], sign=sign) if short else _cell(row, sign=sign)

        strength = _row(rows, metric="mutual_information")
        level = strength["p_value"] if layer is None else strength["q_value"]
        yield {
            "layer": "mean" if layer is None else str(layer),
            "proxies differ, bits": cell("mutual_information", short=False),
            "p": "" if layer is None else number(level),
            "beyond untrained": cell("mutual_information_excess", sign=True),
            "of heads'": cell("mutual_information_share"),
            "alike (kappa)": cell("kappa", sign=True),
            "by position": cell("positional", sign=True),
            "by content": cell("content", sign=True),
            "in words": _division(strength, level, rows),
        }


def _division(strength: pd.Series, level: float, rows: pd.DataFrame) -> str:
    if missing(strength["value"]) or missing(level):
        return UNDEFINED
    if not (level < LEVEL and strength["low"] > 0):
        return "no division shown"
    beyond, since = (_row(rows, metric=name) for name in ("mutual_information_excess", "emergence"))
    if missing(beyond["low"]):
        return "divide the distances"
    if not beyond["low"] > 0:
        return "divide them as untrained ones do"
    return "divide the distances" if missing(since["value"]) else f"divide them since step {since['value']:.0f}"


def _undefined(item: Measured) -> Iterator[str]:
    """Each headline number that is not defined, once, with its reason."""
    table = item.tables["summary"]
    absent = table[table["value"].isna() & table["metric"].isin(HEADLINE)]
    for (metric, reason), rows in absent.groupby(["metric", "reason"], sort=False):
        layers = sorted(int(layer) for layer in rows["layer"].dropna())  # pyright: ignore[reportAttributeAccessIssue]
        every = len(layers) == item.data.sizes["layer"] or not layers
        where = "" if every else f" in layer {', '.join(map(str, layers))}"
        yield f"not defined: {str(metric).replace('_', ' ')}{where}: {reason or 'no reason was given'}"
    level = _row(table[table["layer"].isna()], metric="mutual_information")
    if missing(level["p_value"]) and not missing(level["value"]):
        yield "not defined: p of the mutual information: too few documents for as many labellings as 0.05 needs"


def _over_seeds(table: pd.DataFrame) -> Iterator[str]:
    for arm, part in table.groupby("arm", sort=False):
        refused = part[part["metric"] == "all"]
        if len(refused):
            yield f"{arm}: means over seeds are not defined: {refused['reason'].iloc[0]}"  # pyright: ignore[reportAttributeAccessIssue]
            continue
        whole = part[part["layer"].isna() & part["metric"].isin(HEADLINE)]
        whole = whole[whole["proxy"].isna()] if "proxy" in whole else whole  # pyright: ignore[reportAttributeAccessIssue]
        yield f"{arm}: means over {int(whole['seeds'].max())} seeds, all layers (95 % intervals over seeds)"
        rows = [
            {"measure": str(row["metric"]).replace("_", " "), "value": _cell(row), "": str(row["reason"])}
            for _, row in whole.iterrows()  # pyright: ignore[reportAttributeAccessIssue]
        ]
        yield from _aligned(rows)


def _row(frame: pd.DataFrame, **labels: object) -> pd.Series:
    """The one row with these labels; an empty one of NaN where there is none."""
    keep = pd.Series(True, index=frame.index)
    for name, value in labels.items():
        keep &= frame[name] == value
    rows = frame[keep]
    return rows.iloc[0] if len(rows) else pd.Series(dict.fromkeys([*frame.columns, "p_value", "q_value"], float("nan")))


def _cell(row: pd.Series, *, sign: bool = False) -> str:
    span = interval(row["low"], row["high"], sign=sign)
    return number(row["value"], sign=sign) + (f" ({span})" if span else "")


def _aligned(rows: list[dict[str, str]]) -> Iterator[str]:
    """Columns as wide as what they hold, flush left."""
    if not rows:
        return
    lines = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
