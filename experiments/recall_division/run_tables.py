"""What is measured in one run of this study, as tidy tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float, Int
from msa_analysis.choices import bin_label, log2_bin
from msa_analysis.intervene import intervene
from msa_analysis.specialization import mutual_information, overlap, recall_by_distance
from msa_analysis.tally import tally

from msa_lab.batch import Batch
from msa_lab.config import RunConfig
from msa_lab.data import Data, open_data
from msa_lab.runs import Run
from msa_lab.selections import open_selections

RULES = ("shared", "shift", "recency", "random")
NUMBERS = ["metric", "value", "low", "high", "null", "reason"]


class Measured(NamedTuple):
    """The tables of one run, and the sums of its log."""

    numbers: pd.DataFrame
    """A row a metric of the whole run, with its interval over documents."""
    by_distance: pd.DataFrame
    """A row a log2 bin of distance: accuracy, questions, recall, recall_null, reader."""
    costs: pd.DataFrame
    """`msa_analysis.intervene`, all layers at once."""
    sums: xr.Dataset


def measure(run: Run, *, cache: str | Path, documents: int) -> Measured:
    """All tables of a finished run; interventions on that many validation rows."""
    log, data = open_selections(run), open_data(run.config.data, cache)
    sums = tally(log)
    costs = intervene(run, RULES, documents=documents, layers="all", cache=cache, progress=False)
    found = [mutual_information(sums, pool=("layer",), permutations=0), overlap(sums, pool=("layer", "proxy", "other"))]
    end = pd.concat([part[part["step"] == sums["step"].values[-1]] for part in found])
    whole = costs[costs["bin"].isna() & (costs["quantity"] == "loss")]
    priced = whole.assign(metric="cost_" + whole["rule"], null=0.0)
    numbers = pd.concat([end[NUMBERS], priced[NUMBERS]], ignore_index=True)
    return Measured(numbers, _by_distance(run, log, data), costs, sums)


def _by_distance(run: Run, log: xr.Dataset, data: Data) -> pd.DataFrame:
    config = run.config
    size = config.model.block_size
    batch = data.validation(0, log.sizes["document"])
    least = config.model.top_k_blocks + 1
    asked = tally(asked_only(log.isel(step=[-1]), batch, size), min_visible=least)
    recall = recall_by_distance(asked, pool=("layer", "proxy")).set_index("bin")
    rows = min(config.train.validation_batches * config.train.batch_size, data.num_validation_rows)
    reader = keyless_reader(data.validation(0, rows), config)
    accuracy = accuracy_by_bin(run.result["accuracy_by_distance"])
    frame = accuracy.join(recall[["value", "null"]].rename(columns={"value": "recall", "null": "recall_null"}))
    frame["reader"] = reader.groupby("bin")["right"].mean()
    frame.insert(0, "distance", [bin_label(int(bin_)) for bin_ in frame.index])
    return frame.reset_index()


def accuracy_by_bin(by_distance: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """Accuracy and number of questions by log2 bin, from `result.json`'s table by distance in blocks."""
    rows = [
        {
            "bin": int(log2_bin(int(blocks))),
            "questions": part["questions"],
            "right": part["accuracy"] * part["questions"],
        }
        for blocks, part in by_distance.items()
    ]
    total = pd.DataFrame(rows).groupby("bin").sum()
    return pd.DataFrame({"accuracy": total["right"] / total["questions"], "questions": total["questions"].astype(int)})


def asked_only(log: xr.Dataset, batch: Batch, block_size: int) -> xr.Dataset:
    """The log at questions alone, with the block of the true source in the place of the teacher's.

    Elsewhere both are empty, so that `recall_by_distance` is the recall of the source by its distance.
    """
    if batch.distance is None:
        raise ValueError("batch.distance=None: the task plants no dependencies; use source=recall")
    distance, query = batch.distance.numpy(), log["query"].values
    distance = distance[:, query]
    source = xr.DataArray(np.where(distance >= 0, (query - distance) // block_size, -1), dims=("document", "query"))
    selected = log["selected"].where(source >= 0, -1)
    wanted = source.where(log["slot"] == 0, -1).broadcast_like(selected)
    kept = {"selected": selected, "teacher": wanted}
    kept = {
        name: values.transpose(*log["selected"].dims).astype(log["selected"].dtype) for name, values in kept.items()
    }
    return xr.Dataset(kept, coords=log["selected"].coords, attrs=log.attrs)


def keyless_reader(batch: Batch, config: RunConfig) -> pd.DataFrame:
    """Columns bin and right (a share, where values tie): the best guess at each question without comparing keys.

    The reader sees all earlier blocks, knows how distances are distributed, and answers with the likeliest value
    from where its pairs stand: p(distance) / (blocks - distance), for the question's block is uniform over those that
    leave room. It does not use that a pair which an earlier question asked for is no longer an answer.
    """
    task, length = config.data.recall, config.data.context_length
    blocks = length // task.block_size
    prior = distance_prior(task.near_fraction, task.near_blocks, blocks)
    weight = np.concatenate([[0.0], prior[1:] / (blocks - np.arange(1, blocks))])
    tokens, targets = batch.inputs.numpy(), batch.targets.numpy()
    apart = _blocks_apart(batch, task.block_size)
    rows = []
    for row, query in zip(*np.nonzero(targets >= 0), strict=True):
        earlier = tokens[row, :query]
        held = np.flatnonzero((earlier >= task.num_keys) & (earlier < 2 * task.num_keys))
        back = query // task.block_size - held // task.block_size
        score = np.bincount(earlier[held], weights=weight[back], minlength=2 * task.num_keys)
        best = np.flatnonzero(np.isclose(score, score.max()))
        rows.append((int(log2_bin(apart[row, query])), (targets[row, query] in best) / len(best)))
    return pd.DataFrame(rows, columns=["bin", "right"])


def distance_prior(near_fraction: float, near_blocks: int, blocks: int) -> Float[np.ndarray, " distance"]:
    """Probability that a question's answer lies 0, 1, ... blocks back: uniform up to near_blocks, then log-uniform."""
    distance = np.arange(1, blocks)
    near, far = distance <= near_blocks, np.where(distance > near_blocks, 1 / distance, 0)
    prior = near_fraction * near / near_blocks
    return np.concatenate([[0.0], prior + (1 - near_fraction) * far / max(far.sum(), 1e-12)])


def _blocks_apart(batch: Batch, block_size: int) -> Int[np.ndarray, "row token"]:
    assert batch.distance is not None  # asked_only has looked
    position = np.arange(batch.distance.shape[1])
    return position // block_size - (position - batch.distance.numpy()) // block_size
