"""What all kernels that go over a selection need, made once for whoever follows; and its forward pass.

The grid of blocks, the selection turned round for windows of queries (`index.py`), and which slots of a query hold
blocks. A training step makes it in its forward pass and keeps it for the backward one.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from jaxtyping import Float32 as Scalars
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute.attend import Problem, Window, attend, room
from msa_kernels.cute.index import Index, Rows, build
from msa_kernels.cute.layout import make_layout
from msa_kernels.cute.merge import merge
from msa_kernels.cute.windows import Sizes, forward_window


class Work(NamedTuple):
    """A selection made ready, and the tensors of the attention over it."""

    problem: Problem
    index: Index
    window: int
    """Tokens of a window, the last one has fewer; a multiple of `windows.TILE`."""

    @property
    def sizes(self) -> Sizes:
        """In numbers."""
        batch, selections, sequence, slots = self.problem.blocks.shape
        return Sizes(batch * sequence, selections, slots, len(self.problem.starts), self.problem.block_size)

    @property
    def tokens(self) -> int:
        """Of the largest window."""
        return min(self.window, len(self.problem.first))

    def passes(self, windows: int = 1) -> Iterator[Window]:
        """The windows, or spans of so many of them, in their order."""
        total, step = len(self.problem.first), self.window * windows
        return (Window(begin // self.window, begin, min(begin + step, total)) for begin in range(0, total, step))


def prepare(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head dim"] | None,
    blocks: Ids[Tensor, "batch selection sequence slot"],
    cu_seqlens: Ids[Tensor, "offsets"] | None,
    block_size: int,
    window: int,
) -> tuple[Work, Rows]:
    """Grid, index and rows of a selection."""
    grid = make_layout(cu_seqlens, q.shape[0], q.shape[1], block_size, q.device)
    blocks = blocks.contiguous()
    problem = Problem(flat(q), flat(k), None if v is None else flat(v), blocks, block_size, *grid)
    index, rows = build(blocks, *grid[:2], window, block_size=block_size)
    return Work(problem, index, window), rows


def flat(x: Float[Tensor, "batch sequence head dim"]) -> Float[Tensor, "token head dim"]:
    """Contiguous, as kernels take it."""
    return x.contiguous().flatten(0, 1)


def kept(work: Work, rows: Rows) -> list[Tensor]:
    """What `resume` needs."""
    problem, index = work.problem, work.index
    return [problem.first, problem.starts, problem.ends, *index[:3], *rows[:2]]


def resume(
    q: Float[Tensor, "batch sequence head dim"],
    k: Float[Tensor, "batch sequence kv_head dim"],
    v: Float[Tensor, "batch sequence kv_head dim"],
    blocks: Ids[Tensor, "batch selection sequence slot"],
    block_size: int,
    window: int,
    kept: list[Tensor],
) -> tuple[Work, Rows]:
    """The work that a forward pass has made ready, with a counter of tasks of its own."""
    *grid, edges, tasks, task_ptr, own_slot, counts = kept
    problem = Problem(flat(q), flat(k), flat(v), blocks.contiguous(), block_size, *grid)
    claims = torch.zeros(len(task_ptr) - 1, dtype=torch.int32, device=q.device)
    return Work(problem, Index(edges, tasks, task_ptr, claims), window), Rows(own_slot, counts, None)


def attention(
    work: Work,
    problem: Problem,
    out: Float[Tensor, "token head dim"] | None,
    lse: Scalars[Tensor, "token head"],
) -> None:
    """Write output, if there are values, and log-sum-exps of a problem over the work's selection.

    As many windows at a time as there is room for: other than gradients, results do not depend on the windows.
    """
    heads, dim = problem.q.shape[1:]
    line_bytes = 4 + (0 if problem.v is None else dim * problem.q.element_size())
    windows = max(forward_window(work.sizes, heads, line_bytes) // work.window, 1)
    spans = list(work.passes(windows))
    partial = room(problem, spans[0].end)
    for span in spans:
        attend(problem, work.index, partial, span, -(-(span.end - span.begin) // work.window))
        merge(problem, work.index, partial, span, out, lse)
