"""One self-contained page on which one clicks through what the proxies of one or several runs chose.

    write_viewer(find("runs/demo"), Path("viewer.html"))

Layers x proxies, one map with a slider through training, and one query with its blocks in the document's text. The page
loads nothing from the network; its data are quantised arrays that are decoded when they are looked at.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import xarray as xr

from msa_analysis.viewer_data import Log, described, document_key, pieces
from msa_analysis.viewer_plan import Plan, page_bytes, plan_page
from msa_analysis.viewer_text import speak_numbers, speak_with, speaker
from msa_lab.runs import Run, whole
from msa_lab.selections import open_selections
from msa_lab.tokenizer import ByteTokenizer

MARK = "<!-- data -->"
SHELL_BYTES = 150_000
"""Room for the page around its data."""


def write_viewer(runs: Sequence[Run | xr.Dataset], out: Path, *, max_mb: float = 50) -> Path:
    """Write the page for the selection logs of these runs; returns `out`.

    Args:
        runs: Runs with a selection log, or logs as `open_selections` gives them, in the order to be shown. Runs of
            different probe documents are shown, and the page says why their queries are not set side by side.
        out: The page; its folder is made.
        max_mb: Most megabytes (10^6 bytes). Queries, records, documents and map cells are thinned out to fit, evenly
            over the runs; the page says to what.

    Raises:
        ValueError: No run, a run without a selection log or without a whole record, or too few megabytes.
        OSError: The disk refused; a page that lay there before is kept.
    """
    return write_page([opened(run, i) for i, run in enumerate(runs)], out, max_mb=max_mb)


def opened(run: Run | xr.Dataset, place: int) -> Log:
    """The log of a run, with its label and the words of its tokens.

    Raises:
        ValueError: There is none, or it holds no whole record.
    """
    if isinstance(run, xr.Dataset):
        spoken = speak_with(ByteTokenizer()) if run.attrs.get("tokenizer") == "bytes" else speak_numbers
        log = Log(str(run.attrs.get("label", f"selections {place + 1}")), run, spoken)
    else:
        data, config = open_selections(run), run.config
        kinds = tuple(config.model.attention_kinds[layer] for layer in data["layer"].values)
        log = Log(f"{config.study}/{config.arm}, seed {config.seed}", data, speaker(run), kinds)
    if not log.data.sizes["step"]:
        where = log.label if isinstance(run, xr.Dataset) else run.path
        raise ValueError(f"{where}: its selection log holds no whole record yet; train on, or leave this run out")
    return log


def write_page(logs: Sequence[Log], out: Path, *, max_mb: float = 50, notice: str = "") -> Path:
    """Write the page for opened logs; `notice` is a sentence to stand on it."""
    if not logs:
        raise ValueError("runs=[]: nothing to show; name a run with a selection log, such as runs/STUDY/ARM-HASH/seed0")
    plans = _plans(logs, max_mb)
    texts: dict[str, tuple[str, bytes, bytes]] = {}
    runs = [described(log, plan, _collect(log, plan, texts)) for log, plan in zip(logs, plans, strict=True)]
    _tell_apart(runs)
    page = {"runs": runs, "documents": [name for name, *_ in texts.values()], "notice": notice, "maxMb": max_mb}
    head, tail = _shell(page).split(MARK)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out) as file:
        file.write(head.encode())
        for name, raw in _all_pieces(logs, plans, texts):
            file.write(f'<script type="text/plain" id="{name}">'.encode())
            file.write(base64.b64encode(raw))
            file.write(b"</script>\n")
        file.write(tail.encode())
    return out


def _plans(logs: Sequence[Log], max_mb: float) -> list[Plan]:
    """What the page holds of each log; the room is divided evenly."""
    sizes = [log.size() for log in logs]
    plans = [plan_page(size, (max_mb * 1e6 - SHELL_BYTES) / len(logs)) for size in sizes]
    least = max(page_bytes(size, plan) for size, plan in zip(sizes, plans, strict=True)) * len(logs) + SHELL_BYTES
    if not least <= max_mb * 1e6:
        fix = math.ceil(least / 1e5) / 10
        count = "this log" if len(logs) == 1 else f"these {len(logs)} logs"
        raise ValueError(f"max_mb={max_mb:g}: the smallest page of {count} is larger; try {fix:g}")
    return plans


def _collect(log: Log, plan: Plan, texts: dict[str, tuple[str, bytes, bytes]]) -> list[int]:
    """Add the log's documents to the page's texts, each once; their places there."""
    places = []
    for document, name in enumerate(log.data["document"].values[: plan.documents]):
        text, lengths = log.text(document)
        key = document_key(str(name), text, lengths)
        texts.setdefault(key, (str(name), text, lengths.astype("<u2").tobytes()))
        places.append(list(texts).index(key))
    return places


def _tell_apart(runs: list[dict[str, Any]]) -> None:
    """Number labels that several runs share: arms of one name that differ in their settings."""
    labels = [run["label"] for run in runs]
    for place, run in enumerate(runs):
        if labels.count(run["label"]) > 1:
            run["label"] += f" ({labels[: place + 1].count(run['label'])})"


def _all_pieces(
    logs: Sequence[Log], plans: Sequence[Plan], texts: dict[str, tuple[str, bytes, bytes]]
) -> Iterator[tuple[str, bytes]]:
    for place, (_, text, lengths) in enumerate(texts.values()):
        yield f"t{place}", text
        yield f"l{place}", lengths
    for run, (log, plan) in enumerate(zip(logs, plans, strict=True)):
        for name, raw in pieces(log, plan):
            yield f"r{run}{name}", raw


def _shell(page: dict[str, Any]) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    # Inside a script element only "<" could end it.
    plain = json.dumps(page, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    title = ", ".join(run["label"] for run in page["runs"])
    return environment.get_template("viewer.html.j2").render(title=title, page=plain, mark=MARK)
