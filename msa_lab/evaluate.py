"""Quality on fixed validation rows: bits per byte, and accuracy by dependency distance where the task knows it."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional as F

from msa_lab.config import RunConfig
from msa_lab.data import open_data
from msa_lab.model import Transformer
from msa_lab.runs import Run

if TYPE_CHECKING:
    from msa_lab.data import Data


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """The run's precision for a forward outside the Trainer."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


@torch.no_grad()
def score(model: Transformer, data: Data, config: RunConfig, batches: int, *, sparse: bool = True) -> dict[str, Any]:
    """Score the first `batches` batches of validation rows, the same for every arm and seed.

    Args:
        model: The model; its mode is restored afterwards.
        data: Where the rows come from.
        config: Batch size, precision and block size.
        batches: Batches to score; rows that do not exist are not made up.
        sparse: False in the warm-up phase.

    Returns:
        `validation_loss` (nats per scored token), `bits_per_byte` (None without a byte count), `rows` (each
        with its own `bits_per_byte`, `bytes` and `loss`) and `accuracy_by_distance` (None where the task has no
        distances).
    """
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    size = config.train.batch_size // config.train.accumulate
    rows: list[dict[str, Any]] = []
    hits: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    lengths = None if data.bytes_per_token is None else torch.as_tensor(data.bytes_per_token, device=device)
    wanted = min(batches * config.train.batch_size, data.num_validation_rows)
    for index in range(math.ceil(wanted / size)):
        batch = data.validation(index, size)
        keep = min(size, wanted - index * size)
        inputs, targets = batch.inputs.to(device), batch.targets.to(device)
        offsets = None if batch.cu_seqlens is None else batch.cu_seqlens.to(device)
        draw = torch.arange(index * size, index * size + len(inputs), device=device)
        with autocast(device, config.train.precision):
            logits = model(inputs, offsets, sparse=sparse, draw=draw).logits.float()
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
        nats = nats.view_as(targets).double()
        for row in range(min(keep, len(inputs))):
            scored = targets[row] >= 0
            entry = {"id": f"row{index * size + row}", "tokens": int(scored.sum()), "nats": float(nats[row].sum())}
            if lengths is not None:
                entry["bytes"] = float(lengths[targets[row][scored]].sum())
            rows.append(entry)
        if batch.distance is not None:
            _count_hits(hits, logits.argmax(-1) == targets, batch.distance.to(device), config.model.block_size)
    model.train(was_training)
    return _summary(rows, hits)


def _count_hits(hits: dict[int, list[int]], right: torch.Tensor, distance: torch.Tensor, block_size: int) -> None:
    """Add up right answers by the distance of what they depend on: own block minus the source's block."""
    asked = distance >= 0
    position = torch.arange(distance.shape[1], device=distance.device).expand_as(distance)
    apart = position // block_size - (position - distance) // block_size
    for blocks, ok in zip(apart[asked].tolist(), right[asked].tolist(), strict=True):
        hits[blocks][0] += int(ok)
        hits[blocks][1] += 1


def _summary(rows: list[dict[str, Any]], hits: dict[int, list[int]]) -> dict[str, Any]:
    nats, tokens = sum(row["nats"] for row in rows), sum(row["tokens"] for row in rows)
    size = sum(row["bytes"] for row in rows if "bytes" in row)
    for row in rows:
        row["loss"] = row["nats"] / max(1, row["tokens"])
        if row.get("bytes"):
            row["bits_per_byte"] = row["nats"] / math.log(2) / row["bytes"]
    return {
        "validation_loss": nats / max(1, tokens),
        "bits_per_byte": nats / math.log(2) / size if size else None,
        "rows": rows,
        "accuracy_by_distance": {
            str(blocks): {"accuracy": right / asked, "questions": asked}
            for blocks, (right, asked) in sorted(hits.items())
        }
        or None,
    }


def load_model(run: Run, *, device: str | torch.device = "cpu", backend: str | None = None) -> Transformer:
    """A finished run's model in eval mode, with its own attention, through the kernel path it was trained on.

    Args:
        run: The run.
        device: Where to put it.
        backend: Another kernel path than the one that `msa_kernels.select_path` finds.
    """
    path = run.path / "model.safetensors"
    if not path.exists():
        raise ValueError(f"{run.path}: no model.safetensors; finish the run with `msa-lab train` or `sweep`")
    model = Transformer(run.config.model, backend)
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path}: cannot be loaded ({error}); remove the run's folder and train it again") from None
    return model.to(device).eval()


def evaluate(
    run: Run, *, batches: int | None = None, device: str | None = None, cache: str | Path = "data"
) -> dict[str, Any]:
    """Score a finished run again with its own attention, in full or on the first `batches` batches.

    The result's `attention` names the kinds of attention it was scored with; a number from another kind than the
    run was trained with would not be comparable and is not offered here.
    """
    if batches is not None and batches < 1:
        raise ValueError(f"batches={batches}: must be at least 1; leave it out for as many as in training")
    config = run.config
    data = open_data(config.data, cache)
    if data.hash != run.environment["corpus"]["hash"]:
        raise ValueError(
            f"{run.path}: trained on corpus {run.environment['corpus']['hash']}, but this machine's is {data.hash}; "
            "evaluate where it was trained, or carry the corpus' cache folder over"
        )
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(run, device=place)
    result = score(model, data, config, batches or config.train.validation_batches)
    return {"run": str(run.path), "attention": list(config.model.attention_kinds), **result}
