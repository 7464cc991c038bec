"""What a selection log holds: its variables with their shapes, and its attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from msa_lab.config import RunConfig
from msa_lab.config_io import config_hash
from msa_lab.environment import code_version

PHASES = ("warmup", "sparse")
DIMS = ("step", "layer", "document", "proxy", "query", "slot")
BLOCK_DIMS = ("step", "layer", "document", "proxy", "query_block")
"""Dimensions of means over the recorded queries of a block; more may follow."""
HEAD_DIMS = ("layer", "document", "head", "query", "slot")
REGROUPINGS = 16
"""Random groupings of heads with which the real ones are compared."""
LARGEST_CHUNK = 2**31
"""Bytes that the compressor takes at once."""


class Variable(NamedTuple):
    """An array of the log."""

    dtype: str
    fill: float
    dims: tuple[str, ...]
    shape: tuple[int, ...]


def dims(array: zarr.Array) -> tuple[str | None, ...]:
    """The names of an array's dimensions."""
    return tuple(getattr(array.metadata, "dimension_names", None) or ())


def per_record(array: zarr.Array) -> bool:
    """Whether an array has a chunk a record."""
    return array.ndim > 1 and dims(array)[:1] == ("step",)


def num_blocks(attrs: Mapping[str, Any]) -> int:
    """Blocks of the context, the last one perhaps cut short."""
    return -(-attrs["context_length"] // attrs["block_size"])


def attributes(config: RunConfig, documents: Sequence[str]) -> dict[str, Any]:
    """Attributes of the log of a run.

    Raises:
        ValueError: More blocks than int16 can number.
    """
    model = config.model
    attrs: dict[str, Any] = {
        "block_size": model.block_size,
        "top_k_blocks": model.top_k_blocks,
        "num_local_blocks": model.num_local_blocks,
        "num_sink_blocks": model.num_sink_blocks,
        "num_query_heads": model.num_query_heads,
        "num_proxies": model.num_proxies,
        "context_length": config.data.context_length,
        "query_stride": config.selections.query_stride,
        "layers": [i for i, kind in enumerate(model.attention_kinds) if kind != "dense"],
        "documents": list(documents),
        "tokenizer": _tokenizer(config),
        "first_step": config.train.fork_step,
        "config_hash": config_hash(config),
        "code_version": code_version(),
    }
    if num_blocks(attrs) > np.iinfo(np.int16).max + 1:
        raise ValueError(
            f"model.block_size={model.block_size}: makes {num_blocks(attrs)} blocks of {config.data.context_length} "
            f"tokens, and the log numbers at most 32768; try {-(-config.data.context_length // 32768)}"
        )
    return attrs


def make(path: Path, config: RunConfig, documents: Sequence[str], tokens: np.ndarray) -> None:
    """The empty log of a run.

    Raises:
        ValueError: More blocks than int16 can number, or a record too large for one chunk.
    """
    attrs = attributes(config, documents)
    wanted = _variables(config, attrs, tokens)
    arrays = {}
    group = zarr.create_group(path, attributes=attrs)
    for name, (dtype, fill, dims_, size) in wanted.items():
        arrays[name] = group.create_array(
            name,
            shape=size,
            chunks=(1, *size[1:]) if dims_[:1] == ("step",) and len(dims_) > 1 else size,
            dtype=dtype,
            fill_value=fill,
            dimension_names=dims_,
            # A fifth of zstd's time for a tenth more room: training waits for this.
            compressors=[BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle"), Crc32cCodec()],
            attributes={"flag_values": [0, 1], "flag_meanings": " ".join(PHASES)} if name == "phase" else {},
        )
    arrays["tokens"][:] = tokens.astype(np.uint32)


def _variables(config: RunConfig, attrs: Mapping[str, Any], tokens: np.ndarray) -> dict[str, Variable]:
    model, wanted = config.model, config.selections
    queries = len(range(0, config.data.context_length, wanted.query_stride))
    per_block = (wanted.records, len(attrs["layers"]), len(attrs["documents"]), model.num_proxies, num_blocks(attrs))
    shape = (*per_block[:4], queries, model.top_k_blocks)
    heads = (*shape[1:3], model.num_query_heads, *shape[4:])
    if (largest := 2 * int(np.prod(heads))) >= LARGEST_CHUNK:
        stride = wanted.query_stride * (largest // LARGEST_CHUNK + 1)
        raise ValueError(f"selections.query_stride={wanted.query_stride}: a record has {largest} bytes; try {stride}")
    made = {
        "selected": Variable("int16", -1, DIMS, shape),
        "score": Variable("float16", np.nan, DIMS, shape),
        "step": Variable("int64", -1, ("step",), shape[:1]),
        "phase": Variable("uint8", 0, ("step",), shape[:1]),
        "tokens": Variable("uint32", 0, ("document", "token"), tokens.shape),
    }
    if wanted.teacher:
        newest, drawn = (*per_block, model.top_k_blocks), (*heads[:2], REGROUPINGS, per_block[-1])
        made |= dict.fromkeys(("mass", "teacher_mass"), Variable("float16", np.nan, DIMS, shape))
        made |= {
            "teacher": Variable("int16", -1, DIMS, shape),
            "newest_mass": Variable("float16", np.nan, (*BLOCK_DIMS, "distance"), newest),
            "divergence": Variable("float32", np.nan, BLOCK_DIMS, per_block),
            "entropy": Variable("float32", np.nan, BLOCK_DIMS, per_block),
            "head_teacher": Variable("int16", -1, HEAD_DIMS, heads),
            "head_teacher_mass": Variable("float16", np.nan, HEAD_DIMS, heads),
            "regrouped_divergence": Variable(
                "float32", np.nan, ("layer", "document", "regrouping", "query_block"), drawn
            ),
            "head_step": Variable("int64", -1, (), ()),
        }
    return made


def _tokenizer(config: RunConfig) -> str:
    words = "bytes" if config.data.tokenizer == "bytes" else "tokenizer.json"
    return "recall" if config.data.source == "recall" else words
