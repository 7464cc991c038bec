"""Selections of any model as the Dataset that `open_selections` gives: every metric and figure works on them.

Three roads: arrays (`from_arrays`), what `record` saw (`from_record`), and a file (`from_file`), `.npz` or
`.safetensors`, whose keys are the arguments of `from_arrays`:

    blocks        block ids (layer, document, proxy, query, slot), with a step axis in front if there are several
                  records; or an array a layer, `blocks.0`, `blocks.5`, named for the layer and without that axis
    block_size    keys in a block; like all single numbers, in the metadata of a safetensors file if you like
    and, where they are known, score, mass, teacher, teacher_mass (as blocks, also an array a layer), tokens, steps,
    documents, top_k_blocks, num_local_blocks, num_sink_blocks, query_stride, context_length, unused, tokenizer

One document a row, blocks counted from its start. What cannot be a selection is refused: a block of the future, a block
twice in a row, a forced block left out.
"""

from __future__ import annotations

import difflib
import inspect
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msa_kernels import block_scores
from torch import Tensor

from msa_lab.imported_blocks import DIMS, Array, Grid, as_array, canonical, refuse_not_finite, stacked
from msa_lab.selections import Seen
from msa_lab.teacher import at_blocks, block_mass, top_blocks
from msa_lab.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    import xarray as xr

SUFFIXES = (".npz", ".safetensors")
"""Files that `from_file` reads."""
Layers = Array | Mapping[int, Array]
"""All layers in one array, or an array a layer."""


def from_arrays(
    blocks: Layers,
    *,
    block_size: int,
    top_k_blocks: int | None = None,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
    query_stride: int = 1,
    context_length: int | None = None,
    unused: int | None = None,
    score: Layers | None = None,
    mass: Layers | None = None,
    teacher: Layers | None = None,
    teacher_mass: Layers | None = None,
    tokens: Array | None = None,
    tokenizer: str | None = None,
    steps: Sequence[int] | None = None,
    documents: Sequence[str] | None = None,
) -> xr.Dataset:
    """A selection Dataset from plain arrays.

    Args:
        blocks: Whole numbers ([step,] layer, document, proxy, query, slot), in any order within a row; or a mapping
            from layer number to ([step,] document, proxy, query, slot).
        block_size: Keys in a block.
        top_k_blocks: Blocks that a query may read, forced ones included; the number of slots if not given.
        num_local_blocks: Newest blocks that are forced; 1 is the own block, 0 forces none.
        num_sink_blocks: Oldest blocks that are forced.
        query_stride: There is a row for every query_stride-th query, from 0 on.
        context_length: Tokens of a document; queries x query_stride if not given.
        unused: The id in slots without a block; negative ids and the number of blocks mean this in any case.
        score: The proxy's score of each block in `blocks`, of the same shape.
        mass: The share of the dense attention of the proxy's heads on each, of the same shape.
        teacher: The blocks that these heads would choose themselves, of the same shape; without it, whatever compares
            with them is not defined.
        teacher_mass: As `mass`, of the teacher's blocks.
        tokens: (document, token) ids.
        tokenizer: "bytes" if the tokens are bytes of UTF-8, so that they can be shown as text.
        steps: Optimizer step of each record, ascending; 0, 1, ... if not given.
        documents: A name for each document.

    Raises:
        ValueError: Shapes that do not fit; ids that are no whole numbers, lie in the future or stand twice in a row;
            forced blocks left out; scores that are not finite; an empty document; proxies of unlike budgets.
    """
    ids, layers = stacked("blocks", blocks)
    length = ids.shape[-2] * query_stride if context_length is None else context_length
    top_k = ids.shape[-1] if top_k_blocks is None else top_k_blocks
    grid = Grid(block_size, top_k, num_local_blocks, num_sink_blocks, query_stride, length, unused)
    if len(grid.own) != ids.shape[-2]:
        rule = f"with query_stride={query_stride} it has {len(grid.own)} rows, and blocks has {ids.shape[-2]}"
        raise ValueError(f"context_length={length}: {rule}; try {ids.shape[-2] * query_stride}")
    extra = {"score": score, "mass": mass, "teacher": teacher, "teacher_mass": teacher_mass}
    given = {name: _like(name, value, ids.shape, layers) for name, value in extra.items() if value is not None}
    if "teacher_mass" in given and "teacher" not in given:
        raise ValueError("teacher_mass: needs the blocks that it belongs to; give teacher too")
    held = {"selected": canonical("blocks", ids, layers, grid)}
    if "teacher" in given:
        held["teacher"] = canonical("teacher", given["teacher"], layers, grid)
    data = {name: part.ids for name, part in held.items()}
    for name in [name for name in ("score", "mass", "teacher_mass") if name in given]:
        of = held["teacher" if name == "teacher_mass" else "selected"]
        data[name] = of.follow(given[name])
        refuse_not_finite(name, data[name], of.ids, layers, grid)
    made = _dataset(data, layers, grid, tokens, steps, documents)
    return made if tokenizer is None else made.assign_attrs(tokenizer=_spelt(tokenizer, made))


def _spelt(tokenizer: str, made: xr.Dataset) -> str:
    if tokenizer != "bytes" or "tokens" not in made or made["tokens"].max() > ByteTokenizer.mark:
        rule = f"must be 'bytes', with tokens of 0 to {ByteTokenizer.mark} (the document mark)"
        raise ValueError(f"tokenizer={tokenizer!r}: {rule}; leave it out to see tokens as numbers")
    return tokenizer


def _like(name: str, value: Layers, shape: tuple[int, ...], layers: list[int]) -> np.ndarray:
    array, held = stacked(name, value)
    if array.shape != shape or held != layers:
        raise ValueError(
            f"{name} has shape {array.shape} and layers {held}: must be as blocks, {shape} and layers {layers}"
        )
    return array


def _dataset(
    data: Mapping[str, np.ndarray],
    layers: list[int],
    grid: Grid,
    tokens: Array | None,
    steps: Sequence[int] | None,
    documents: Sequence[str] | None,
) -> xr.Dataset:
    import xarray as xr

    records, _, count, proxies = data["selected"].shape[:4]
    at = [int(step) for step in (range(records) if steps is None else steps)]
    names = [f"document {i}" for i in range(count)] if documents is None else [str(name) for name in documents]
    if len(at) != records or sorted(set(at)) != at:
        raise ValueError(f"steps={at}: must be {records} ascending whole numbers, one a record")
    if len(names) != count:
        raise ValueError(f"documents: {len(names)} names for {count} documents; give one each, or none")
    variables: dict[str, Any] = {name: (DIMS, array) for name, array in data.items()}
    if tokens is not None:
        text = as_array(tokens)
        if text.shape != (count, grid.context_length):
            raise ValueError(f"tokens has shape {text.shape}: must be {(count, grid.context_length)}")
        variables["tokens"] = (("document", "token"), text.astype(np.uint32))
    coords = {
        "step": ("step", np.asarray(at, np.int64)),
        "phase": ("step", np.full(records, "sparse")),
        "layer": ("layer", layers),
        "document": ("document", np.array(names, dtype=object)),
        "proxy": ("proxy", np.arange(proxies)),
        "query": ("query", np.arange(0, grid.context_length, grid.query_stride)),
    }
    attrs = {name: value for name, value in vars(grid).items() if name not in ("unused", "own")}
    return xr.Dataset(variables, coords, attrs | {"num_proxies": proxies})


def from_record(
    seen: Mapping[str, Seen] | Sequence[Mapping[str, Seen]],
    *,
    tokens: Array | None = None,
    documents: Sequence[str] | None = None,
    **rules: Any,
) -> xr.Dataset:
    """A selection Dataset of what `record` saw, `from_record(seen)`, or several batches: a copy `dict(seen)` of each.

    Layers are numbered in order of execution; the attribute `modules` has their paths. Scores are there for modules
    whose q_proxy and k_proxy were seen, the teacher and masses where q and k were (see `msa_lab.selections`), if for
    all. `rules`: top_k_blocks, num_local_blocks, num_sink_blocks, unused, as in `from_arrays`.

    Raises:
        ValueError: Nothing was seen; batches with unlike modules; packed documents; unlike block sizes; or what
            `from_arrays` refuses.
    """
    batches = [seen] if isinstance(seen, Mapping) else list(seen)
    modules = list(batches[0]) if batches else []
    if not modules:
        raise ValueError("seen: holds no selection; call the model inside `with record(model) as seen:` before this")
    sizes = {path: choice.selection.block_size for batch in batches for path, choice in batch.items()}
    if any(list(batch) != modules for batch in batches) or len(set(sizes.values())) > 1:
        raise ValueError(f"seen: needs the same modules in every batch, all of one block size; it has {sizes}")
    packed = [path for batch in batches for path, choice in batch.items() if choice.selection.cu_seqlens is not None]
    if packed:
        raise ValueError(f"{packed[0]}: has several documents in a row; record with one document a row, no cu_seqlens")
    found = [[_fields(batch[path], rules) for path in modules] for batch in batches]
    shared = set.intersection(*(set(layer) for batch in found for layer in batch))
    values: dict[str, Any] = {
        name: {i: torch.cat([batch[i][name] for batch in found]) for i in range(len(modules))} for name in shared
    }
    made = from_arrays(**values, block_size=sizes[modules[0]], tokens=tokens, documents=documents, **rules)
    return made.assign_attrs(modules=modules)


def _fields(choice: Seen, rules: Mapping[str, Any]) -> dict[str, Tensor]:
    """What can be known of one layer's choice: (document, proxy, query, slot) each."""
    blocks, size = choice.selection.blocks, choice.selection.block_size
    top_k = rules.get("top_k_blocks") or blocks.shape[-1]
    slots = max(top_k, blocks.shape[-1])
    blocks = torch.nn.functional.pad(blocks, (0, slots - blocks.shape[-1]), value=-1)
    fields = {"blocks": blocks}
    if choice.q_proxy is not None and choice.k_proxy is not None:
        scores = block_scores(choice.q_proxy, choice.k_proxy, block_size=size, backend="reference")
        fields["score"] = at_blocks(scores, blocks)
    if choice.q is not None and choice.k is not None:
        mass = block_mass(choice.q, choice.k, block_size=size, num_groups=blocks.shape[1])
        forced = {name: rules[name] for name in ("num_local_blocks", "num_sink_blocks") if name in rules}
        teacher = top_blocks(mass, top_k_blocks=top_k, block_size=size, **forced).blocks
        teacher = torch.nn.functional.pad(teacher, (0, slots - top_k), value=-1)
        fields |= {"mass": at_blocks(mass, blocks), "teacher": teacher, "teacher_mass": at_blocks(mass, teacher)}
    return fields


def from_file(path: str | Path) -> xr.Dataset:
    """A selection Dataset from a `.npz` or `.safetensors` file; the module's head names its keys.

    Raises:
        ValueError: No such file, not of these kinds, a key unknown or missing, or what `from_arrays` refuses; it names
            the file.
        OSError: The file cannot be read.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES or not path.is_file():
        raise ValueError(f"{path}: must be an existing file that ends in {' or '.join(SUFFIXES)}")
    try:
        return from_arrays(**_arguments(_read(path))).assign_attrs(label=path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    """Everything in the file by its key."""
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                return dict(file)
        except (zipfile.BadZipFile, EOFError, AttributeError, TypeError) as error:
            raise ValueError(f"is no .npz file ({error})") from None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            told = {key: value for key, value in (file.metadata() or {}).items() if key != "format"}
            return told | {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"is no .safetensors file ({error})") from None


def _arguments(held: Mapping[str, Any]) -> dict[str, Any]:
    """The file's keys as arguments of `from_arrays`."""
    known = dict(inspect.signature(from_arrays).parameters)
    by_layer = {"blocks", "score", "mass", "teacher", "teacher_mass"}
    result: dict[str, Any] = {}
    for key, value in held.items():
        name, dot, layer = key.partition(".")
        if name not in known or (dot and not (name in by_layer and layer.isdecimal())):
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{key}: unknown key; did you mean {nearest}?")
        if dot:
            if not isinstance(result.setdefault(name, {}), dict):
                raise ValueError(f"{key}: stands beside {name}; give one array, or one a layer")
            result[name][int(layer)] = value
        elif name in result:
            raise ValueError(f"{name}: stands beside {name}.0 or the like; give one array, or one a layer")
        else:
            result[name] = value if name in by_layer | {"tokens", "steps", "documents"} else _single(name, value)
    for name in ("blocks", "block_size"):
        if name not in result:
            raise ValueError(f"has no {name}; its keys are {', '.join(held) or 'none'}; add it")
    return result


def _single(name: str, value: Any) -> int | str:
    """A single whole number, stored as an array or, in metadata, as text; or a word."""
    if name == "tokenizer":
        return str(value)
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    array = as_array(value) if not isinstance(value, str) else np.array([])
    if array.size != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}={value if isinstance(value, str) else array.tolist()}: must be one whole number")
    return int(array.reshape(()))
