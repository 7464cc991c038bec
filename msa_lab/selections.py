"""What the proxies choose: watch it in any model, and describe what was recorded of it while training.

A model's choices are watched from outside, by forward hooks. Nothing has to be registered: a module counts as soon as
its output is a `msa_kernels.Selection`. To have a module of your own recorded in full, name the arguments of its
forward `q_proxy` and `k_proxy`, and put beside it, under the name `core`, a module whose forward has arguments `q` and
`k`: the main heads after norm and position encoding. Where a name is missing, that field of `Seen` is None.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from msa_kernels import Selection
from torch import Tensor, nn

from msa_lab.selection_store import SelectionStore, open_selections

__all__ = [
    "Enough",
    "Seen",
    "SelectionStore",
    "never_selected",
    "open_selections",
    "record",
    "record_steps",
    "selection_rate",
]


@dataclass(frozen=True)
class Seen:
    """One choice and what it was made from, detached: (batch, sequence, heads, dim) each, on the model's device."""

    selection: Selection
    q_proxy: Tensor | None
    k_proxy: Tensor | None
    q: Tensor | None
    k: Tensor | None


class Enough(Exception):  # noqa: N818  (no error: it ends a forward)
    """All that was to be seen of a forward has been: the rest of it is not computed."""


@contextmanager
def record(model: nn.Module, *, until: str = "") -> Iterator[Mapping[str, Seen]]:
    """Watch every selection that a forward of `model` makes.

        with record(model) as seen:
            model(tokens)
        seen["layers.0.attention.select"].selection.blocks

    The mapping goes from module path to `Seen`, in order of execution, and holds the latest whole forward of `model`;
    what a layer recomputes in the backward (activation checkpointing) is not part of it. A module that chooses twice in
    one forward appears as `path` and `path#2`. A hook that replaces a selection is seen through, whenever it was added.
    Only handles made here are removed.

    Args:
        model: What chooses.
        until: Path of a module. A forward ends there, before that module runs, with `Enough`, which the caller catches;
            its arguments are seen. A forward that never gets there runs to its end.

    Raises:
        ValueError: `model` or a part of it is compiled, so that hooks would not fire. `torch.compile(model)` leaves
            `model` itself as it was: record and call that one.
    """
    _refuse_compiled(model)
    seen: dict[str, Seen] = {}
    handles: list[Any] = []
    chosen: list[tuple[str, Selection, Tensor | None, Tensor | None]] = []
    attended: dict[str, list[tuple[Tensor | None, Tensor | None]]] = defaultdict(list)

    def watch(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: object) -> None:
        if isinstance(output, Selection):
            selection = output._replace(blocks=output.blocks.detach())
            chosen.append((path, selection, *_arguments(module, args, kwargs, "q_proxy", "k_proxy")))
        elif path.rpartition(".")[2] == "core":
            attended[path].append(_arguments(module, args, kwargs, "q", "k"))

    def last(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        watch(path, module, args, kwargs, None)
        finish()
        raise Enough

    def start(*_: object) -> None:
        # Hooks live for one forward: they come after all others, and a recomputation in the backward meets none.
        stop()
        for path, module in model.named_modules():
            if path and path == until:
                handles.append(module.register_forward_pre_hook(partial(last, path), with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(partial(watch, path), with_kwargs=True))
        handles.append(model.register_forward_hook(finish))

    def finish(*_: object) -> None:
        seen.clear()
        seen.update(_paired(chosen, attended))
        stop()

    def stop() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        chosen.clear()
        attended.clear()

    entry = model.register_forward_pre_hook(start)
    try:
        yield seen
    finally:
        entry.remove()
        stop()


def _paired(
    chosen: list[tuple[str, Selection, Tensor | None, Tensor | None]],
    attended: Mapping[str, list[tuple[Tensor | None, Tensor | None]]],
) -> Iterator[tuple[str, Seen]]:
    """Each selection with the heads that its sibling `core` got in the same turn."""
    total, turn = Counter(path for path, *_ in chosen), Counter[str]()
    for path, selection, q_proxy, k_proxy in chosen:
        parent = path.rpartition(".")[0]
        cores = attended.get(f"{parent}.core" if parent else "core", [])
        q, k = cores[turn[path]] if len(cores) == total[path] else (None, None)
        turn[path] += 1
        yield (path if turn[path] == 1 else f"{path}#{turn[path]}"), Seen(selection, q_proxy, k_proxy, q, k)


def _arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any], *names: str) -> tuple:
    """The tensors that `module` was called with under these names; None for a name it does not have."""
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    values = [given.get(name) for name in names]
    return tuple(value.detach() if isinstance(value, Tensor) else None for value in values)


def _refuse_compiled(model: nn.Module) -> None:
    for path, module in model.named_modules():
        in_place = getattr(module, "_compiled_call_impl", None) is not None
        if in_place or hasattr(module, "_orig_mod"):
            name = f"model.{path}" if path else "model"
            raise ValueError(
                f"{name}: is compiled, so that nothing could be recorded; compile with `fast = torch.compile(model)` "
                "and record and call the original `model`"
            )


def record_steps(first: int, last: int, records: int) -> list[int]:
    """Optimizer steps at which a run records: `first`, `last` and evenly between, each once, ascending.

    Fewer than `records` where there are not as many steps. None for `records=0`.

    Raises:
        ValueError: `records=1` (the start and the end are always recorded), or `last` before `first`.
    """
    if records < 0 or records == 1:
        raise ValueError(f"records={records}: must be 0, or at least 2: the start and the end; try 40")
    if last < first:
        raise ValueError(f"last={last}: must not come before first={first}; try {first}")
    parts, span = max(records - 1, 1), last - first
    return sorted({first + (2 * i * span + parts) // (2 * parts) for i in range(records)})


def selection_rate(
    selected: Int[np.ndarray, "*axes query slot"],
    query: Int[np.ndarray, " query"],
    *,
    block_size: int,
    num_blocks: int,
) -> Float[np.ndarray, "*axes query_block key_block"]:
    """Share of a query block's recorded queries that selected each key block (the paper's selection maps).

    Leading axes (layer, document, proxy) are kept. NaN where no query could select: key blocks after the query block,
    and query blocks without a recorded query.
    """
    axes = selected.shape[:-2]
    own = query // block_size
    rows = np.arange(int(np.prod(axes))).reshape(*axes, 1, 1)
    cell = (rows * num_blocks + own[:, None]) * num_blocks + selected
    hits = np.bincount(cell[selected >= 0], minlength=rows.size * num_blocks**2)
    rate = hits.reshape(*axes, num_blocks, num_blocks).astype(float)
    queries = np.bincount(own, minlength=num_blocks).astype(float)
    possible = np.tri(num_blocks, dtype=bool) & (queries > 0)[:, None]
    return np.where(possible, rate / np.maximum(queries, 1)[:, None], np.nan)


def never_selected(
    selected: Int[np.ndarray, "*axes query slot"],
    query: Int[np.ndarray, " query"],
    *,
    block_size: int,
    num_local_blocks: int,
    num_sink_blocks: int,
) -> Int[np.ndarray, "*axes"]:
    """How many blocks no query has chosen although some could: forced slots are no choice and do not count.

    A number that rises while training is a proxy that collapses onto few blocks.
    """
    axes, own = selected.shape[:-2], query // block_size
    newest = int(own.max()) - num_local_blocks
    candidates = max(0, newest - num_sink_blocks + 1)
    learned = (selected >= num_sink_blocks) & (selected <= own[:, None] - num_local_blocks)
    rows = np.arange(int(np.prod(axes))).reshape(*axes, 1, 1)
    cell = rows * (newest + 1) + selected
    hits = np.bincount(cell[learned], minlength=rows.size * max(newest + 1, 0))
    chosen = (hits.reshape(*axes, max(newest + 1, 0)) > 0).sum(-1)
    return candidates - chosen
