"""A user's own text through a run's model: what its proxies choose there, on the viewer's page."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from msa_analysis.viewer import write_page
from msa_analysis.viewer_data import FIELDS, Log
from msa_analysis.viewer_text import run_tokenizer, speak_with
from msa_lab.evaluate import autocast, load_model
from msa_lab.recorder import observe
from msa_lab.runs import Run


def inspect_text(
    run: Run, text: str, out: Path, *, name: str = "your text", max_mb: float = 50, device: str | None = None
) -> Path:
    """Write the viewer's page for one text, read by the run's model at its last weights; returns `out`.

    Args:
        run: A finished run with a layer that selects.
        text: What the model reads, from its start; what does not fit into the context is cut off, with a warning and a
            line on the page.
        out: The page.
        name: What the page calls the text.
        max_mb: See `write_viewer`.
        device: Where to compute; a GPU if there is one.

    Raises:
        ValueError: The text is empty, the run has no weights, only dense layers, or was trained on the recall task.
    """
    config, model = run.config, run.config.model
    if not text.strip():
        raise ValueError(f"text: {name} is empty; give some text, a few hundred words show most")
    if config.data.source == "recall":
        raise ValueError(f"{run.path}: was trained on recall, whose tokens are no text; name a run on text or python")
    layers = [i for i, kind in enumerate(model.attention_kinds) if kind != "dense"]
    if not layers:
        raise ValueError(f"{run.path}: all its layers are dense, nothing is selected; name a run with msa layers")
    tokenizer = run_tokenizer(run)
    whole = tokenizer.encode([text.encode()])[0].astype(np.int64)
    tokens, notice = whole[: config.data.context_length], ""
    if len(tokens) < len(whole):
        notice = f"{name} has {len(whole):,} tokens; the model's context holds the first {len(tokens):,}"
        warnings.warn(f"{notice}; the rest was cut off", stacklevel=2)
        notice += " and the rest was cut off."
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network = load_model(run, device=place)
    every = replace(config, selections=replace(config.selections, query_stride=1, teacher=True))
    with autocast(place, config.train.precision):
        found = observe(network, torch.from_numpy(tokens)[None], every)
    data = _dataset(found, tokens, name, layers, run)
    kinds = tuple(model.attention_kinds[layer] for layer in layers)
    log = Log(f"{config.study}/{config.arm}, seed {config.seed}", data, speak_with(tokenizer), kinds)
    return write_page([log], out, max_mb=max_mb, notice=notice)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, as it is.

    Raises:
        ValueError: It is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start})"
        raise ValueError(f"{path}: {rule}; save it as UTF-8, for example with `iconv -t UTF-8`") from None


def _dataset(found: dict[str, np.ndarray], tokens: np.ndarray, name: str, layers: list[int], run: Run) -> xr.Dataset:
    """One record of one document, as `open_selections` would give it."""
    model, train = run.config.model, run.config.train
    dims = ("step", "layer", "document", "proxy", "query", "slot")
    shown = {key: (dims, found[key][None]) for key in FIELDS if key in found}
    return xr.Dataset(
        shown | {"tokens": (("document", "token"), tokens[None])},
        coords={
            "step": [train.last_step],
            "phase": ("step", ["sparse"]),
            "layer": layers,
            "document": np.array([name], dtype=object),
            "proxy": np.arange(model.num_proxies),
            "query": np.arange(len(tokens)),
        },
        attrs={
            "block_size": model.block_size,
            "top_k_blocks": model.top_k_blocks,
            "num_local_blocks": model.num_local_blocks,
            "num_sink_blocks": model.num_sink_blocks,
            "context_length": len(tokens),
        },
    )
