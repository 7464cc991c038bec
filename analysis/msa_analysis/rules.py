"""Rules that choose blocks in place of a model's proxies, for interventions.

Every rule keeps the number of slots and the forced blocks of the selection that it replaces, and never names a block of
the future.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from msa_kernels import Selection, block_scores, random_selection, row_keys, select_from_scores
from torch import Tensor

from msa_lab.selections import Seen
from msa_lab.teacher import block_mass

QUERIES = 4096
"""Queries of a row whose scores of all blocks are held at one time."""
DRAW = 1
"""The seed of random blocks: not that of a model's own random layers, which would repeat their draw."""


@dataclass(frozen=True)
class Choice:
    """One module's own choice, and what another may be made from."""

    path: str
    """The module whose output it is."""
    place: int
    """The module's number in the model, so that layers draw differently."""
    seen: Seen
    """The choice, the proxies' queries and keys, and, for rules that need them, q and k of the main heads."""
    documents: Int64[Tensor, " batch"]
    """A number per row that random blocks are drawn from."""
    other: Int32[Tensor, "batch proxy query slot"] | None
    """The blocks that another document's queries chose at the same positions."""
    num_local_blocks: int
    num_sink_blocks: int
    backend: str | None
    """Kernel path; None for the one that `msa_kernels.select_path` finds."""


class Rule(NamedTuple):
    """A way to choose: a name, the function, and what it cannot do without."""

    name: str
    choose: Callable[[Choice], Selection]
    needs: Literal["", "proxies", "heads", "another document"] = ""
    """proxies: several proxies with queries and keys. heads: q and k of the main heads."""


def find_rule(name: str) -> Rule:
    """A rule by its name.

    own: the model's own choice; changes nothing.
    shift1, shift2, ...: proxy r gets what proxy r + 1, r + 2, ... (modulo their number) chose in the same forward.
    shared: one choice for all proxies: the top blocks of the mean over proxies of the scaled block maxima.
    shared_z: the same after each proxy's maxima are given mean 0 and deviation 1 over the query's visible blocks.
    recency: the most recent blocks. sink_recency: the same with one free slot for block 0.
    random: uniform among the visible blocks, drawn from (layer, document, proxy, query).
    other_document: what the unchanged model chose at the same positions of another document.
    teacher: the group's own top blocks from dense attention on the same weights and the same input.

    Raises:
        ValueError: There is no such rule.
    """
    if name in _RULES:
        return _RULES[name]
    by = name.removeprefix("shift")
    if by != name and by.isdecimal() and int(by) > 0:
        return Rule(name, lambda choice: _shifted(choice, int(by)), "proxies")
    raise ValueError(f"rules: {name!r} is none; use {', '.join(_RULES)}, shift1 or shift2")


def _shifted(choice: Choice, by: int) -> Selection:
    selection = choice.seen.selection
    proxies = selection.blocks.shape[1]
    if by >= proxies:
        rule = f"each of {proxies} proxies can get that of 1 to {proxies - 1} further on"
        raise ValueError(f"rules: shift{by}: {rule}; use shift1")
    return selection._replace(blocks=selection.blocks.roll(-by, 1))


def _shared(choice: Choice) -> Selection:
    return _ranked(choice, lambda queries: _maxima(choice, queries).mean(1, keepdim=True))


def _shared_z(choice: Choice) -> Selection:
    def scores(queries: tuple[int, int]) -> Tensor:
        maxima = _maxima(choice, queries)
        visible = maxima > -torch.inf
        count = visible.sum(-1, keepdim=True).clamp(min=1)
        centred = maxima - torch.where(visible, maxima, 0).sum(-1, keepdim=True) / count
        deviation = (torch.where(visible, centred, 0).square().sum(-1, keepdim=True) / count).sqrt()
        # Where all scores are equal there is no preference: 0, not 0 / 0.
        return (centred / deviation.clamp(min=1e-12)).mean(1, keepdim=True)

    return _ranked(choice, scores)


def _maxima(choice: Choice, queries: tuple[int, int]) -> Float[Tensor, "batch proxy query block"]:
    seen = choice.seen
    if seen.q_proxy is None or seen.k_proxy is None:
        raise ValueError(f"{choice.path}: shows no q_proxy and k_proxy, which shared choices are made from")
    return block_scores(
        seen.q_proxy,
        seen.k_proxy,
        block_size=seen.selection.block_size,
        cu_seqlens=seen.selection.cu_seqlens,
        queries=queries,
        backend=choice.backend,
    )


def _recency(choice: Choice, *, sink: bool = False) -> Selection:
    blocks = choice.seen.selection.blocks
    count = -(-blocks.shape[2] // choice.seen.selection.block_size)
    newest = torch.arange(count, dtype=torch.float32, device=blocks.device)
    if sink:
        newest[0] = torch.inf
    return _ranked(choice, lambda queries: newest.expand(len(blocks), 1, queries[1] - queries[0], count))


def _random(choice: Choice) -> Selection:
    selection = choice.seen.selection
    batch, proxies, sequence, slots = selection.blocks.shape
    return random_selection(
        batch,
        sequence,
        proxies,
        top_k_blocks=slots,
        block_size=selection.block_size,
        keys=row_keys(DRAW, 0, choice.place, choice.documents),
        cu_seqlens=selection.cu_seqlens,
        num_local_blocks=choice.num_local_blocks,
        num_sink_blocks=choice.num_sink_blocks,
    )


def _other_document(choice: Choice) -> Selection:
    selection = choice.seen.selection
    if choice.other is None:
        raise ValueError(
            f"{choice.path}: no blocks of another document were given; give them as other={{path: blocks}}"
        )
    if selection.cu_seqlens is not None:
        raise ValueError(f"{choice.path}: rows hold several documents; other_document needs one document a row")
    return selection._replace(blocks=choice.other.to(selection.blocks))


def _teacher(choice: Choice) -> Selection:
    seen = choice.seen
    return _ranked(choice, lambda queries: group_mass(seen, queries))


def group_mass(seen: Seen, queries: tuple[int, int]) -> Float[Tensor, "batch proxy query block"]:
    """The share of the dense attention of each proxy's heads that falls on each block (`msa_lab.teacher.block_mass`).

    Raises:
        ValueError: The heads are not known.
    """
    if seen.q is None or seen.k is None:
        raise ValueError("a module with a selection has no `core` beside it that is called with q and k")
    return block_mass(
        seen.q,
        seen.k,
        block_size=seen.selection.block_size,
        num_groups=seen.selection.blocks.shape[1],
        cu_seqlens=seen.selection.cu_seqlens,
        queries=queries,
    )


def query_ranges(sequence: int) -> list[tuple[int, int]]:
    """Ranges that cover the row, so that memory stays linear in it."""
    return [(start, min(start + QUERIES, sequence)) for start in range(0, sequence, QUERIES)]


def _ranked(choice: Choice, scores: Callable[[tuple[int, int]], Tensor]) -> Selection:
    """The top blocks of scores (batch, proxy or 1, query, block) under the model's own rules and budget."""
    selection = choice.seen.selection
    batch, proxies, sequence, slots = selection.blocks.shape
    parts = [
        select_from_scores(
            scores(queries),
            top_k_blocks=slots,
            block_size=selection.block_size,
            cu_seqlens=selection.cu_seqlens,
            num_local_blocks=choice.num_local_blocks,
            num_sink_blocks=choice.num_sink_blocks,
            queries=queries,
            sequence=sequence,
        ).blocks
        for queries in query_ranges(sequence)
    ]
    blocks = torch.cat(parts, 2).expand(batch, proxies, sequence, slots)
    return selection._replace(blocks=blocks.contiguous())


_RULES = {
    rule.name: rule
    for rule in (
        Rule("own", lambda choice: choice.seen.selection),
        Rule("shared", _shared, "proxies"),
        Rule("shared_z", _shared_z, "proxies"),
        Rule("recency", _recency),
        Rule("sink_recency", lambda choice: _recency(choice, sink=True)),
        Rule("random", _random),
        Rule("other_document", _other_document, "another document"),
        Rule("teacher", _teacher, "heads"),
    )
}
