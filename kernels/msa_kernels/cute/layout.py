"""The block grid of packed documents as the kernels see it: global block ids that need no prefix sum.

Document d of `cu_seqlens` has the global ids from `cu_seqlens[d] // block_size + d`; ids that no document uses are
empty. So a token's blocks are found from its document alone, and their number is known on the host.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute.compile import load
from msa_kernels.cute.windows import number_of_ids

THREADS = 256


def make_layout(
    cu_seqlens: Ids[Tensor, "offsets"] | None, batch: int, sequence: int, block_size: int, device: torch.device
) -> tuple[Ids[Tensor, "token"], Ids[Tensor, "block"], Ids[Tensor, "block"]]:
    """`first` global block id of each of `batch * sequence` tokens' document; `starts` and `ends` of each global block.

    A block is the tokens from its start up to, not including, its end; an empty one has start == end. There are
    `tokens // block_size` and one a document. Without `cu_seqlens` each row of the batch is a document.
    """
    total, documents = batch * sequence, batch if cu_seqlens is None else len(cu_seqlens) - 1
    blocks = number_of_ids(total, documents, block_size)
    first = torch.empty(total, dtype=torch.int32, device=device)
    starts, ends = (torch.empty(blocks, dtype=torch.int32, device=device) for _ in range(2))
    load(Layout(block_size, cu_seqlens is not None))(cu_seqlens, first, starts, ends, documents, sequence)
    return first, starts, ends


def compact(kind: type[cutlass.Numeric], *shape: int | cute.SymInt, align: int = 4) -> cute.Tensor:
    """A row-major tensor to compile with; `align` in bytes."""
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=align)


def row_alignment(slots: int) -> int:
    """Bytes that every list of `slots` block ids is aligned to, wherever a contiguous tensor of them begins."""
    return 16 if slots % 4 == 0 else 4


@dataclass(frozen=True)
class Layout:
    """One thread a token and a block, which look for their document among the offsets, if there are any."""

    block_size: int
    with_offsets: bool

    def fakes(self) -> tuple:
        offsets, tokens, blocks = cute.sym_int(), cute.sym_int(), cute.sym_int()
        return (
            compact(Int32, offsets) if self.with_offsets else None,
            compact(Int32, tokens),
            compact(Int32, blocks),
            compact(Int32, blocks),
            Int32(0),
            Int32(0),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        offsets: cute.Tensor | None,
        first: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        documents: Int32,
        sequence: Int32,
        stream: CUstream,
    ):
        places = cutlass.max(first.shape[0], starts.shape[0])
        self.kernel(offsets, first, starts, ends, documents, sequence).launch(
            grid=(cute.ceil_div(places, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        offsets: cute.Tensor | None,
        first: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        documents: Int32,
        sequence: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        place = tile * THREADS + thread
        if place < first.shape[0]:
            document = self.newest(offsets, documents, sequence, place, False)
            first[place] = self.offset(offsets, sequence, document) // self.block_size + document
        if place < starts.shape[0]:
            document = self.newest(offsets, documents, sequence, place, True)
            begin = self.offset(offsets, sequence, document)
            end = self.offset(offsets, sequence, document + 1)
            start = begin + (place - begin // self.block_size - document) * self.block_size
            starts[place] = cutlass.min(start, end)
            ends[place] = cutlass.min(start + self.block_size, end)

    @cute.jit
    def offset(self, offsets: cute.Tensor | None, sequence: Int32, document: Int32) -> Int32:
        """The first token of a document."""
        at = document * sequence
        if cutlass.const_expr(self.with_offsets):
            at = offsets[document]  # pyright: ignore[reportOptionalSubscript]
        return at

    @cute.jit
    def newest(
        self,
        offsets: cute.Tensor | None,
        documents: Int32,
        sequence: Int32,
        place: Int32,
        by_block: cutlass.Constexpr,
    ) -> Int32:
        """The last document whose first token, or first block, is not after `place`: never an empty one of a token."""
        low = Int32(0)
        high = Int32(documents)
        while high - low > 1:
            middle = (low + high) // 2
            at = self.offset(offsets, sequence, middle)
            if cutlass.const_expr(by_block):
                at = at // self.block_size + middle
            if at <= place:
                low = middle
            else:
                high = middle
        return low


def variants() -> list[Layout]:
    """Every variant that the package supports."""
    return [Layout(block_size, with_offsets) for block_size in (64, 128) for with_offsets in (True, False)]
