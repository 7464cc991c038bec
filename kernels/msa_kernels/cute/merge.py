"""The own block of every query, with its causal mask, and the sum of all blocks' results weighted by their shares.

A thread block takes a key block and the heads of a unit: the queries of that block are those whose own block it is.
Two warpgroups take turns with tiles of 64 rows. A row without any selected block gives zero, and -inf as log-sum-exp.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from jaxtyping import Float
from jaxtyping import Float32 as Scalars
from torch import Tensor

from msa_kernels.cute import hopper
from msa_kernels.cute.attend import Heads, Partial, Problem, Window
from msa_kernels.cute.compile import load
from msa_kernels.cute.index import Index

BUFFERS = 2
"""Of queries, for each warpgroup."""
MOST_SLOTS = (4, 8, 16, 32)
"""A variant serves up to so many slots of a selection."""


def merge(
    problem: Problem,
    index: Index,
    partial: Partial,
    window: Window,
    out: Float[Tensor, "token head dim"] | None,
    lse: Scalars[Tensor, "token head"],
) -> None:
    """Write `out` and `lse` (natural logarithm) of the tokens of a window, after `attend.attend`."""
    q, k, v, blocks = problem[:4]
    kernel = Merge(*problem.facts, next(most for most in MOST_SLOTS if most >= blocks.shape[3]), v is not None)
    grid = problem.first, problem.starts, problem.ends
    load(kernel)(q, k, v, blocks, *grid, index.claims, *partial, out, lse, *window)


@dataclass(frozen=True)
class Merge(Heads):
    """What a variant is compiled for. `with_values=False` gives only the log-sum-exps."""

    most_slots: int
    """Bounds the slots of a selection: one of MOST_SLOTS."""
    with_values: bool = True

    def fakes(self) -> tuple:
        """q, k, v, blocks, first, starts, ends, claims, partial, its lse, out, lse, window, begin, end."""
        dtype, tokens, batch = hopper.DTYPES[self.dtype], cute.sym_int(), cute.sym_int()
        keys = hopper.fake(dtype, (tokens, self.num_kv_heads, self.dim))
        heads = hopper.fake(dtype, (tokens, self.num_heads, self.dim))
        ids = cute.sym_int()
        return (
            heads,
            keys,
            keys if self.with_values else None,
            hopper.fake(Int32, (batch, self.num_selections, cute.sym_int(), cute.sym_int()), 4),
            hopper.fake(Int32, (tokens,)),
            hopper.fake(Int32, (ids,)),
            hopper.fake(Int32, (ids,)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(dtype, (cute.sym_int64(), self.dim)) if self.with_values else None,
            hopper.fake(Float32, (cute.sym_int64(),)),
            heads if self.with_values else None,
            hopper.fake(Float32, (tokens, self.num_heads)),
            Int32(0),
            Int32(0),
            Int32(0),
            hopper.fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor | None,
        blocks: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        claims: cute.Tensor,
        partial: cute.Tensor | None,
        partial_lse: cute.Tensor,
        out: cute.Tensor | None,
        lse: cute.Tensor,
        window: Int32,
        begin: Int32,
        end: Int32,
        stream: CUstream,
    ):
        dtype = hopper.DTYPES[self.dtype]
        layout_q = hopper.operand_layout(dtype, hopper.ROWS, self.dim, 2 * BUFFERS)
        layout_k = hopper.operand_layout(dtype, self.block_size, self.dim, 1)
        load_k, t_k = hopper.block_loads(k, layout_k, (self.block_size, self.dim))
        load_v, t_v = None, None
        if cutlass.const_expr(self.with_values):
            load_v, t_v = hopper.block_loads(v, layout_k, (self.block_size, self.dim))
        self.kernel(
            q,
            (load_k, load_v),
            (t_k, t_v),
            (blocks, first, starts, ends, claims),
            (partial, partial_lse),
            (out, lse),
            (window, begin, end),
            (hopper.product_of(dtype, self.block_size), hopper.weighted_sum_of(dtype, self.dim)),
            (layout_q, layout_k),
        ).launch(
            grid=(starts.shape[0], self.units, 1),
            block=(2 * hopper.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        loads: tuple,
        sources: tuple,
        index: tuple,
        partials: tuple,
        results: tuple,
        numbers: tuple,
        products: tuple,
        layouts: tuple,
    ):
        blocks, first, starts, ends, claims = index
        window, begin, end = numbers
        thread, _, _ = cute.arch.thread_idx()
        block, unit, _ = cute.arch.block_idx()
        memory = cutlass.memory.SmemAllocator()
        bar = memory.allocate_array(Int64, 1)
        layout_q, layout_k = layouts
        s_q = hopper.allocate(memory, self.dtype, layout_q)
        s_k = hopper.allocate(memory, self.dtype, layout_k)
        s_v = s_k
        if cutlass.const_expr(self.with_values):
            s_v = hopper.allocate(memory, self.dtype, layout_k)
        if (block == 0) & (unit == 0) & (thread == 0):
            # All tasks of the window have been drawn: ready for the next pass over the same index.
            claims[window] = 0
        start, stop = starts[block], ends[block]
        # The queries of this block that belong to the window.
        query, last = cutlass.max(start, begin), cutlass.min(stop, end) - 1
        if query <= last:
            if thread == 0:
                cute.arch.mbarrier_init(bar, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            if cute.arch.make_warp_uniform(thread // 32) == 0:
                shape, head = (self.block_size, self.dim), unit // (self.units // self.num_kv_heads)
                with cute.arch.elect_one():
                    size = self.block_size * self.dim * 2 * (2 if self.with_values else 1)
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
                hopper.load_block(loads[0], sources[0], s_k, shape, start, head, 0, bar)
                if cutlass.const_expr(self.with_values):
                    hopper.load_block(loads[1], sources[1], s_v, shape, start, head, 0, bar)
            work = query, last, unit, start, stop - start, block - first[start], begin
            self.compute(q, blocks, partials, results, products, (s_q, s_k, s_v), bar, work)

    @cute.jit
    def compute(
        self,
        q: cute.Tensor,
        blocks: cute.Tensor,
        partials: tuple,
        results: tuple,
        products: tuple,
        tensors: tuple,
        bar: cute.Pointer,
        work: tuple,
    ):
        """One of two warpgroups: every second tile of 64 rows.

        `work`: first and last query, unit, their own block's first token, length and id, and where the window begins.
        """
        mma, mma_values = products
        s_q, s_k, s_v = tensors
        query, last, unit, start, length = work[:5]
        thread, _, _ = cute.arch.thread_idx()
        which = cute.arch.make_warp_uniform(thread // hopper.WARPGROUP)
        inside = thread % hopper.WARPGROUP
        part = mma.get_slice(inside)
        a = mma.make_fragment_A(part.partition_A(s_q))
        b = mma.make_fragment_B(part.partition_B(s_k))
        scores = cute.make_rmem_tensor(mma.partition_shape_C((hopper.ROWS, self.block_size)), Float32)
        transposed = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, mode=[1, 0, 2]))
        values = mma_values.make_fragment_B(mma_values.get_slice(inside).partition_B(transposed))
        out = cute.make_rmem_tensor(mma_values.partition_shape_C((hopper.ROWS, self.dim)), Float32)
        weights = mma_values.make_fragment_A(mma_values.partition_shape_A((hopper.ROWS, self.block_size)))
        words = cute.recast_tensor(weights, Int32)
        self.fetch(q, s_q, which, 0, query + which * self.queries, last, unit, inside)
        cute.arch.mbarrier_wait(bar, 0)
        if cutlass.const_expr(self.with_values):
            self.clear_rows(s_v, length, thread)
        for tile in cutlass.range(which, cute.ceil_div(last + 1 - query, self.queries), 2, unroll=1):
            buffer = tile // 2 % BUFFERS
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            # Also says that the other buffer has been read.
            cute.arch.barrier(barrier_id=1 + which, number_of_threads=hopper.WARPGROUP)
            here = query + tile * self.queries
            self.fetch(q, s_q, which, 1 - buffer, here + 2 * self.queries, last, unit, inside)
            hopper.multiply(mma, scores, a[None, None, None, which * BUFFERS + buffer], b[None, None, None, 0])
            warpgroup.wait_group(0)
            self.hide_later(scores, here - start, thread)
            into = words if cutlass.const_expr(self.with_values) else None
            tops, sums = hopper.softmax(scores, math.log2(math.e) / math.sqrt(self.dim), into, self.dtype)
            if cutlass.const_expr(self.with_values):
                hopper.multiply(mma_values, out, weights, values[None, None, None, 0])
                warpgroup.wait_group(0)
            self.finish(blocks, partials, results, out, tops, sums, here, work)
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def fetch(
        self,
        q: cute.Tensor,
        s_q: cute.Tensor,
        which: Int32,
        buffer: Int32,
        query: Int32,
        last: Int32,
        unit: Int32,
        inside: Int32,
    ):
        """Start copying a tile's queries; past the last they are copies of it."""
        hopper.copy_rows(
            s_q, which * BUFFERS + buffer, q, self.dim, hopper.ROWS, hopper.WARPGROUP, inside, self.group, query, last,
            unit * self.group,
        )  # fmt: skip

    @cute.jit
    def clear_rows(self, s_v: cute.Tensor, length: Int32, thread: Int32):
        """Zeros for the values after the document's end, which belong to others: 0 x NaN would be NaN."""
        if length < self.block_size:
            plain = cute.recast_ptr(s_v.iterator, cute.make_swizzle(0, 4, 3), dtype=Int32)
            line = 32
            lines = self.block_size * (self.dim // 64)
            for x in cutlass.range(thread, lines * line, 2 * hopper.WARPGROUP, unroll=1):
                if x // line % self.block_size >= length:
                    (plain + x).store(Int32(0))
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()

    @cute.jit
    def hide_later(self, scores: cute.Tensor, offset: Int32, thread: Int32):
        """-inf in place of the scores of keys after the row's query; `offset`: of the tile's first, in the block."""
        row = hopper.row_of(thread)
        for x in cutlass.range_constexpr(cute.size(scores)):
            key = x // 4 * 8 + thread % 4 * 2 + x % 2
            if key > offset + (row + x // 2 % 2 * 8) // self.group:
                scores[x] = -Float32.inf

    @cute.jit
    def finish(
        self,
        blocks: cute.Tensor,
        partials: tuple,
        results: tuple,
        out: cute.Tensor,
        tops: tuple,
        sums: tuple,
        here: Int32,
        work: tuple,
    ):
        """Add the earlier blocks' results to the tile's own and store the sum."""
        _, last, unit, _, _, own, begin = work
        target, lse = results
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        counts, totals, lines, places, valid = [], [], [], [], []
        for j in cutlass.range_constexpr(2):
            row = hopper.row_of(thread) + 8 * j
            query = cutlass.min(here + row // self.group, last)
            count, chosen = self.count(blocks, query, unit, own, lane)
            line = ((Int64(query) - begin) * self.units + unit) * blocks.shape[3] * self.group + row % self.group
            mine = tops[j] + cute.math.log2(sums[j], fastmath=True)
            mine = mine if chosen else -Float32.inf
            total = self.total(partials[1], line, count, mine, lane)
            # Nothing selected: any finite number will do in its place, as no weight is used.
            base = total if total != -Float32.inf else Float32(0.0)
            if cutlass.const_expr(self.with_values):
                self.rescale(out, j, cute.math.exp2(tops[j] - base, fastmath=True), chosen)
            counts.append(count)
            totals.append(base)
            lines.append(line)
            places.append(Int64(query) * self.num_heads + unit * self.group + row % self.group)
            valid.append(here + row // self.group <= last)
            hopper.store_if(valid[j] & (lane % 4 == 0), lse.iterator + places[j], total * math.log(2))
        if cutlass.const_expr(self.with_values):
            self.add(out, partials[0], partials[1], lines, counts, totals, lane)
            for j in cutlass.range_constexpr(2):
                self.store(out, target.iterator + places[j] * self.dim, j, valid[j], lane)

    @cute.jit
    def rescale(self, out: cute.Tensor, j: cutlass.Constexpr, factor: Float32, chosen: Boolean):
        """Weigh a row of the own block's result; without that block it is zero, whatever it was."""
        for n in cutlass.range_constexpr(cute.size(out) // 4):
            for i in cutlass.range_constexpr(2):
                x = 4 * n + 2 * j + i
                out[x] = out[x] * factor if chosen else Float32(0.0)

    @cute.jit
    def count(self, blocks: cute.Tensor, query: Int32, unit: Int32, own: Int32, lane: Int32):
        """How many blocks before its own a query selected, and whether it selected its own; a quad shares the work."""
        sequence, slots = blocks.shape[2], blocks.shape[3]
        selection = unit // (self.units // self.num_selections)
        at = (Int64(query // sequence) * self.num_selections + selection) * sequence + query % sequence
        line = blocks.iterator + at * slots
        ids = [(line + cutlass.min(lane % 4 + 4 * c, slots - 1)).load() for c in range(self.most_slots // 4)]
        count, chosen = Int32(0), Int32(0)
        for c in cutlass.range_constexpr(self.most_slots // 4):
            there = lane % 4 + 4 * c < slots
            count += Int32(there & (ids[c] >= 0) & (ids[c] < own))
            chosen |= Int32(there & (ids[c] == own))
        for offset in cutlass.range_constexpr(1, 3):
            count += cute.arch.shuffle_sync_bfly(count, offset=offset)
            chosen |= cute.arch.shuffle_sync_bfly(chosen, offset=offset)
        return count, chosen != 0

    @cute.jit
    def total(self, partial_lse: cute.Tensor, line: Int64, count: Int32, mine: Float32, lane: Int32) -> Float32:
        """Log-sum-exp, base 2, over the own block and `count` earlier ones."""
        earlier = []
        for c in cutlass.range_constexpr(self.most_slots // 4):
            # Past the count a slot's memory holds anything.
            slot = cutlass.max(cutlass.min(lane % 4 + 4 * c, count - 1), 0)
            value = (partial_lse.iterator + (line + slot * self.group)).load()
            earlier.append(value if lane % 4 + 4 * c < count else -Float32.inf)
        top = mine
        for c in cutlass.range_constexpr(self.most_slots // 4):
            top = cute.arch.fmax(top, earlier[c])
        for offset in cutlass.range_constexpr(1, 3):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
        base = top if top != -Float32.inf else Float32(0.0)
        rest = Float32(0.0)
        for c in cutlass.range_constexpr(self.most_slots // 4):
            rest += cute.math.exp2(earlier[c] - base, fastmath=True)
        for offset in cutlass.range_constexpr(1, 3):
            rest += cute.arch.shuffle_sync_bfly(rest, offset=offset)
        return base + cute.math.log2(rest + cute.math.exp2(mine - base, fastmath=True), fastmath=True)

    @cute.jit
    def add(
        self,
        out: cute.Tensor,
        partial: cute.Tensor,
        partial_lse: cute.Tensor,
        lines: list,
        counts: list,
        totals: list,
        lane: Int32,
    ):
        """Add the weighted results of the earlier blocks, in the order of their slots."""
        most = cutlass.max(counts[0], counts[1])
        for offset in cutlass.range_constexpr(5):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << offset))
        for chunk in cutlass.range(0, most, 4, unroll=1):
            for j in cutlass.range_constexpr(2):
                # Each lane of a quad makes the weight of one slot. Past the count a slot's memory holds anything.
                slot = cutlass.max(cutlass.min(chunk + lane % 4, counts[j] - 1), 0)
                share = (partial_lse.iterator + (lines[j] + slot * self.group)).load()
                weight = cute.math.exp2(share - totals[j], fastmath=True)
                weight = weight if chunk + lane % 4 < counts[j] else Float32(0.0)
                for i in cutlass.range_constexpr(4):
                    factor = cute.arch.shuffle_sync(weight, lane // 4 * 4 + i)
                    inside = chunk + i < counts[j]
                    slot = cutlass.max(cutlass.min(chunk + i, counts[j] - 1), 0)
                    results = partial.iterator + Int64(slot) * (self.group * self.dim)
                    self.add_line(out, results, lines[j], j, factor, inside, lane)

    @cute.jit
    def add_line(
        self,
        out: cute.Tensor,
        slot: cute.Pointer,
        line: Int64,
        j: cutlass.Constexpr,
        factor: Float32,
        inside: Boolean,
        lane: Int32,
    ):
        """One block's result of one row: `line` is that of the first slot, `slot` where the block's slot begins."""
        for c in cutlass.range_constexpr(self.dim // 32):
            words = hopper.load_16_bytes(slot + hopper.chunk_place(line, self.group, self.dim, c, lane))
            for w in cutlass.range_constexpr(4):
                word = words[w] if inside else Int32(0)
                low, high = hopper.unpack_halves(word, self.dtype)
                x = 4 * (4 * c + w) + 2 * j
                out[x] += factor * low
                out[x + 1] += factor * high

    @cute.jit
    def store(self, out: cute.Tensor, line: cute.Pointer, j: cutlass.Constexpr, valid: Boolean, lane: Int32):
        """Round a row and store it, 16 neighbouring bytes a lane."""
        for c in cutlass.range_constexpr(self.dim // 32):
            words = []
            for w in cutlass.range_constexpr(4):
                x = 4 * (4 * c + w) + 2 * j
                words.append(hopper.pack_halves(out[x], out[x + 1], self.dtype))
            words = hopper.transpose_quad(tuple(words), lane)
            hopper.store_16_bytes(line + (c * 4 + lane % 4) * 8, words, valid)


def variants() -> list[Merge]:
    """As in `attend.py`, with the numbers of slots spread over them."""
    shapes = [(16, 2, 4, 16), (8, 2, 4, 4), (4, 2, 4, 4), (16, 1, 1, 16), (16, 2, 2, 32), (4, 4, 4, 8), (16, 4, 2, 8)]
    of_proxies = [(4, 1, 4, 16), (4, 2, 4, 4), (4, 4, 4, 8), (4, 1, 1, 32), (1, 1, 1, 16)]
    types = [(dtype, dim) for dtype in hopper.DTYPES for dim in (64, 128)]
    return [Merge(*one, block_size, *shape, True) for one in types for block_size in (64, 128) for shape in shapes] + [
        Merge(*one, 128, *shape, False) for one in types for shape in of_proxies
    ]
