"""What a trained model's selections are worth: its weights stay, its selections are replaced, the change is measured.

The primary endpoint for "does it matter that proxies specialize" is the cost of `shared`: one choice made from the mean
score of all proxies, in place of each proxy's own. Another proxy's choice (`shift`) measures mismatch, not value;
`recency`, `random` and `other_document` give the scale. A swapped model had no chance to adapt: an arm that was trained
with one shared proxy belongs beside it.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
from torch import Tensor, nn

from msa_analysis.changes import Intervention, tally_changes
from msa_analysis.costs import COLUMNS, change_table, cost_table
from msa_analysis.rules import Rule, find_rule
from msa_lab.batch import Batch
from msa_lab.config import RunConfig
from msa_lab.data import Data, open_data
from msa_lab.evaluate import autocast, load_model
from msa_lab.runs import Run
from msa_lab.tasks import Recall

__all__ = ["RULES", "change_table", "cost_table", "intervene"]

RULES = ("shared", "shared_z", "shift", "recency", "sink_recency", "random", "other_document", "teacher")
"""What is put in place of the proxies' own selections unless told otherwise; `shift` stands for shift1, shift2, ...,
that is, every other proxy's. Their meaning: `rules.find_rule`."""


def intervene(
    run: Run,
    rules: Sequence[str] = RULES,
    *,
    documents: int = 32,
    layers: Literal["all", "each", "both"] = "both",
    proxies: Literal["all", "each"] = "all",
    cache: str | Path = "data",
    device: str | None = None,
    backend: str | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """The change in loss, bits per byte and accuracy when a finished run's selections are replaced.

    Columns as `change_table`, with rule, layer and proxy (missing: all) instead of intervention. Rules act on the
    layers that have proxies, or, where none has, on all that have a selection; layers that share a choice follow the
    layer that makes it (for `teacher` each by its own heads). Positive is worse for loss and bits per
    byte. What cannot be defined (one proxy's shared choice, say) is a row without numbers, whose `reason` says why.

    Args:
        run: A finished run; its corpus must be in `cache`, or be what this machine would make.
        rules: Names that `rules.find_rule` knows, or "shift" for every other proxy's.
        documents: Validation rows to measure on, from the first on: the same for every run of a corpus. Intervals are
            over them; rows cut from one file make them too narrow.
        layers: all: every layer at once. each: one layer at a time. both.
        proxies: each: also replace the selection of one proxy at a time.
        cache: Folder of token files.
        device: Where to compute; a GPU if there is one.
        backend: Kernel path; None for the one that `msa_kernels.select_path` finds.
        progress: Show a bar; by default on a terminal.

    Raises:
        ValueError: The run is not finished, has dense layers only, or its corpus is another one here; an unknown rule;
            too many documents.
    """
    config = run.config
    _ = run.result  # refuses a run that is not finished
    targets = _targets(config, proxies)
    wanted = _rules(rules, config)
    for name, value, possible in (("layers", layers, ("all", "each", "both")), ("proxies", proxies, ("all", "each"))):
        if value not in possible:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(possible)}")
    data = open_data(dataclasses.replace(config.data, expected_hash=run.environment["corpus"]["hash"]), cache)
    if not 1 <= documents <= data.num_validation_rows:
        rule = f"must be 1 to {data.num_validation_rows}, the validation rows that there are"
        raise ValueError(f"documents={documents}: {rule}; try {min(32, data.num_validation_rows)}")
    undefined = {rule.name: _undefined(rule, config, documents) for rule in wanted}
    places = [
        (layer, proxy)
        for layer in (*((None,) if layers != "each" else ()), *(targets if layers != "all" else ()))
        for proxy in (None, *(range(config.model.num_proxies) if proxies == "each" else ()))
    ]
    keys = [(rule, layer, proxy) for rule in wanted for layer, proxy in places]
    made = [
        Intervention(r, _paths(r, targets if layer is None else [layer], config), proxy)
        for r, layer, proxy in keys
        if not undefined[r.name]
    ]
    parts = []
    if made:
        model = load_model(run, device=device or ("cuda" if torch.cuda.is_available() else "cpu"), backend=backend)
        parts = [part for _, part in _measured(model, config, data, documents, made, progress).groupby("intervention")]
    frames, measured = [], iter(parts)
    numbers = dict.fromkeys(("value", "low", "high", "baseline", "share"), float)
    for rule, layer, proxy in keys:
        reason = undefined[rule.name]
        part = _nothing(data, reason) if reason else next(measured).drop(columns="intervention")
        part.insert(0, "rule", rule.name)
        part.insert(1, "layer", pd.NA if layer is None else layer)
        part.insert(2, "proxy", pd.NA if proxy is None else proxy)
        frames.append(part.astype({"layer": "Int64", "proxy": "Int64", "bin": "Int64", "distance": object} | numbers))
    return pd.concat(frames, ignore_index=True)


def _targets(config: RunConfig, proxies: str) -> list[int]:
    """The layers that choose."""
    chosen = list(config.model.proxy_layers)
    others = [i for i, kind in enumerate(config.model.attention_kinds) if kind != "dense"]
    if not others:
        rule = "has dense layers only, so that there is no selection to replace"
        raise ValueError(f"model.attention={config.model.attention!r}: the run {rule}; give a run with msa layers")
    if not chosen and proxies == "each":
        raise ValueError("proxies='each': the run has no proxies to replace one at a time; use proxies='all'")
    return chosen or others


def _paths(rule: Rule, layers: Sequence[int], config: RunConfig) -> tuple[str, ...]:
    """What chooses in the layers. A rule that acts behind the choice, where heads are known, must also act in each
    layer that shares it."""
    kinds, acting = config.model.attention_kinds, list(layers)
    for layer in layers if rule.needs == "heads" else ():
        behind = itertools.takewhile(lambda i: kinds[i] == "shared", range(layer + 1, len(kinds)))
        acting += behind
    return tuple(f"layers.{layer}.attention.select" for layer in sorted(acting))


def _rules(names: Sequence[str], config: RunConfig) -> list[Rule]:
    """The rules by name, each once, with `shift` spelled out."""
    others = config.model.num_proxies - 1 if config.model.proxy_layers else 0
    spelled: list[str] = []
    for name in names:
        spelled += [f"shift{by}" for by in range(1, max(others, 1) + 1)] if name == "shift" else [name]
    found = {name: find_rule(name) for name in spelled}
    for name in found:
        if name.startswith("shift") and 0 < others < int(name.removeprefix("shift")):
            raise ValueError(f"rules: {name}: the run has {others + 1} proxies; use shift1 to shift{others}")
    if not found:
        raise ValueError(f"rules: none is given; use one of {', '.join(RULES)}")
    return list(found.values())


def _undefined(rule: Rule, config: RunConfig, documents: int) -> str:
    """Why the rule means nothing in this run, or nothing at all."""
    model, data = config.model, config.data
    if model.num_local_blocks + model.num_sink_blocks >= model.top_k_blocks:
        return f"all top_k_blocks={model.top_k_blocks} slots are forced: there is no choice to replace"
    if -(-data.context_length // model.block_size) <= model.top_k_blocks:
        return f"no query sees more than top_k_blocks={model.top_k_blocks} blocks: there is no choice to replace"
    if rule.needs == "proxies" and not model.proxy_layers:
        return "the run has no proxies"
    if rule.needs == "proxies" and model.num_proxies == 1:
        return "the run has one proxy: there is no other to share with or to take from"
    if rule.needs == "another document" and documents == 1:
        return "one document: there is no other"
    if rule.needs == "another document" and data.document_mask:
        return "rows hold several documents, whose positions differ"
    return ""


def _measured(
    model: nn.Module,
    config: RunConfig,
    data: Data,
    documents: int,
    interventions: Sequence[Intervention],
    progress: bool | None,
) -> pd.DataFrame:
    size = min(config.train.batch_size // config.train.accumulate, documents)
    batches = [data.validation(index, size) for index in range(-(-documents // size))]
    batches[-1] = _first(batches[-1], documents - size * (len(batches) - 1))
    forwards = len(batches) * (1 + len(interventions)) + any(i.rule.needs == "another document" for i in interventions)

    def forward(model: nn.Module, batch: Batch, numbers: Tensor) -> Tensor:
        with autocast(batch.inputs.device, config.train.precision):
            return model(batch.inputs, batch.cu_seqlens, draw=numbers).logits

    with _bar(forwards, progress) as done:
        sums = tally_changes(
            model,
            batches,
            interventions,
            block_size=config.model.block_size,
            num_local_blocks=config.model.num_local_blocks,
            num_sink_blocks=config.model.num_sink_blocks,
            bytes_per_token=data.bytes_per_token,
            forward=forward,
            done=done,
        )
    return change_table(sums)


def _first(batch: Batch, rows: int) -> Batch:
    inputs, targets, offsets, distance = batch
    kept = None if offsets is None else offsets.clamp(max=rows * inputs.shape[1])
    return Batch(inputs[:rows], targets[:rows], kept, None if distance is None else distance[:rows])


@contextmanager
def _bar(total: int, live: bool | None) -> Iterator[Callable[[], None]]:
    if not (sys.stdout.isatty() if live is None else live):
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("forwards"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bars:
        task = bars.add_task("", total=total)
        yield lambda: bars.advance(task)


def _nothing(data: Data, reason: str) -> pd.DataFrame:
    """Rows that say why there is no number."""
    text, planted = data.bytes_per_token is not None, isinstance(data, Recall)
    quantities = ["loss", *(["bits_per_byte"] if text else []), *(["accuracy"] if planted else [])]
    row = {"distance_of": "", "documents": 0, "reason": f"not defined: {reason}"}
    return pd.DataFrame([{"quantity": quantity, **row} for quantity in quantities], columns=list(COLUMNS))
