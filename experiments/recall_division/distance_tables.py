"""What is measured in one run of this study, as tidy tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from msa_analysis.intervene import intervene
from msa_analysis.replacement import replaced
from msa_analysis.specialization import mutual_information, overlap
from msa_analysis.tally import tally
from run_tables import NUMBERS

from msa_lab.batch import Batch
from msa_lab.data import open_data
from msa_lab.evaluate import load_model
from msa_lab.runs import Run
from msa_lab.selections import open_selections

RULES = ("shared", "shift", "recency", "random")
CONDITIONS = ("own", "shared", "recency", "random")
"""Selections under which answers are compared with the recall of their source."""
FIRST_BLOCK = 10
"""From here on questions see every distance of every arm, so that the rows are the same in all arms."""


class Measured(NamedTuple):
    """The tables of one run, and the sums of its log."""

    numbers: pd.DataFrame
    """A row a metric of the whole run, with its interval over documents."""
    by_distance: pd.DataFrame
    """`answers` under each of CONDITIONS."""
    costs: pd.DataFrame
    """`msa_analysis.intervene`, all layers at once."""
    sums: xr.Dataset
    """Of the rows that ask."""


def measure(run: Run, *, cache: str | Path, documents: int) -> Measured:
    """All tables of a finished run; interventions and answers on that many validation rows."""
    log, batch = open_selections(run), open_data(run.config.data, cache).validation(0, documents)
    sums = tally(asking(log, batch))
    costs = intervene(run, RULES, documents=documents, layers="all", cache=cache, progress=False)
    information, everywhere = (mutual_information(part, pool=("layer",), permutations=0) for part in (sums, tally(log)))
    everywhere = everywhere.assign(metric=everywhere["metric"] + "_all_rows")
    found = [information, everywhere, overlap(sums, pool=("layer", "proxy", "other"))]
    end = pd.concat([part[part["step"] == sums["step"].values[-1]] for part in found])
    whole = costs[costs["bin"].isna() & (costs["quantity"] == "loss")]
    priced = whole.assign(metric="cost_" + whole["rule"], null=0.0)
    numbers = pd.concat([end[NUMBERS], priced[NUMBERS]], ignore_index=True)
    return Measured(numbers, answers(run, batch, CONDITIONS), costs, sums)


def asking(log: xr.Dataset, batch: Batch) -> xr.Dataset:
    """The log at the positions at which every document asks, from FIRST_BLOCK on.

    Elsewhere nothing is to be found, and what is chosen is anything.
    """
    query = log["query"].values
    asks = (batch.targets.numpy() >= 0).all(0)[query]
    return log.isel(query=np.flatnonzero(asks & (query >= FIRST_BLOCK * log.attrs["block_size"])))


@torch.no_grad()
def answers(run: Run, batch: Batch, conditions: Sequence[str]) -> pd.DataFrame:
    """Columns condition, distance (blocks), questions, probability, recall: a row a selection rule and distance.

    `probability` is what the model gives to the right answer, the accuracy of one who answers as often as it is
    likely; `recall` is the share of (question, proxy) whose selection under the rule holds the block of the answer.
    """
    model, size = load_model(run), run.config.model.block_size
    row, query = np.nonzero(batch.targets.numpy() >= 0)
    assert batch.distance is not None  # the task plants dependencies
    source = (query - batch.distance.numpy()[row, query]) // size
    frames = []
    for condition in conditions:
        with replaced(model, condition, documents=torch.arange(len(batch.inputs))) as put:
            logits = model(batch.inputs, draw=torch.arange(len(batch.inputs))).logits
        (selection,) = put.values()
        right = logits.softmax(-1)[row, query, batch.targets[row, query]]
        held = held_by(selection.blocks[row, :, query].numpy(), source)
        frame = pd.DataFrame({"distance": query // size - source, "probability": right.numpy(), "recall": held})
        mean = frame.groupby("distance").agg(
            questions=("recall", "size"), probability=("probability", "mean"), recall=("recall", "mean")
        )
        frames.append(mean.reset_index().assign(condition=condition))
    return pd.concat(frames, ignore_index=True)


def held_by(
    blocks: Int[np.ndarray, "question proxy slot"], source: Int[np.ndarray, " question"]
) -> Float[np.ndarray, " question"]:
    """The share of the proxies whose selection holds the source block."""
    return (blocks == source[:, None, None]).any(-1).mean(-1)
