"""Attention to the selected blocks before the query's own: one partial result per query, head and block.

Blocks are outermost. A task is a key block and up to 512 of the queries that chose it (`index.py`): its keys and values
are loaded once, its queries gathered, `group` heads each, into tiles of 64 rows. These blocks are whole and lie before
their queries, so that nothing is masked, and a softmax over one block needs no running maximum. A partial result is
normalised and rounded; with its log-sum-exp `merge.py` weighs it against the others.

Three warps load: two gather queries, one fetches keys and values of the next task, which it draws from a counter. Two
warpgroups compute, each the tiles of one parity, so that a buffer of queries always has the same reader.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from jaxtyping import Float
from jaxtyping import Float32 as Scalars
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute import hopper
from msa_kernels.cute.compile import load
from msa_kernels.cute.index import Index

QUERY_STAGES = 4
KEY_STAGES = 2
LEAD = 4
"""Tiles of an item that are still to be gathered when the next one is drawn: time enough to draw it and to load its
keys. Drawn any sooner, it would wait for a busy thread block while others have run out of work."""
SLOT_BITS = 5
"""Of an edge: query x 32 + slot."""


@cute.jit
def ask_if_near(near: cute.Pointer, tile: Int32, tiles: Int32):
    """Before a tile is gathered: arrive at the barrier `near` if it is the tile at which the next item is drawn."""
    if tile == cutlass.max(tiles - LEAD, 0):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(near)


class Problem(NamedTuple):
    """One attention over a selection, its tokens flattened."""

    q: Float[Tensor, "token head dim"]
    k: Float[Tensor, "token kv_head dim"]
    v: Float[Tensor, "token kv_head dim"] | None
    """None where only log-sum-exps are wanted."""
    blocks: Ids[Tensor, "batch selection query slot"]
    block_size: int
    first: Ids[Tensor, "token"]
    starts: Ids[Tensor, "global_block"]
    ends: Ids[Tensor, "global_block"]
    """These three are those of `layout.make_layout`."""

    @property
    def facts(self) -> tuple[str, int, int, int, int, int]:
        """The static facts that all kernels of the problem share, in the order of their fields."""
        dtype = str(self.q.dtype).removeprefix("torch.")
        return dtype, self.q.shape[2], self.block_size, self.q.shape[1], self.k.shape[1], self.blocks.shape[1]


class Window(NamedTuple):
    """Tokens that are computed together."""

    number: int
    begin: int
    end: int


class Partial(NamedTuple):
    """Results of single blocks, of a window of queries: line ((query * units + unit) * slots + slot) * group + head."""

    out: Float[Tensor, "line dim"] | None
    """Normalised, in the order of `hopper.chunk_place`; None without values."""
    lse: Scalars[Tensor, "line"]
    """To the base 2. Slots that hold no earlier block are not written."""


def room(problem: Problem, tokens: int) -> Partial:
    """Memory for the results of a window of so many tokens; the next window overwrites them."""
    lines = tokens * problem.q.shape[1] * problem.blocks.shape[3]
    out = None if problem.v is None else problem.q.new_empty(lines, problem.q.shape[2])
    return Partial(out, torch.empty(lines, dtype=torch.float32, device=problem.q.device))


def attend(problem: Problem, index: Index, partial: Partial, window: Window, windows: int = 1) -> None:
    """Write the results of a window's blocks; `window` may be a span of so many `windows` of the index.

    `index` is that of `index.build`, whose tasks of this window are drawn: `merge.merge` must follow, which makes them
    ready again.
    """
    q, k, v, blocks = problem[:4]
    kernel = Attend(*problem.facts, v is not None)
    edges, tasks, task_ptr, claims = index
    numbers = window.number, window.number + windows - 1, window.begin, blocks.shape[3], hopper.processors(q.device)
    load(kernel)(q, k, v, edges, tasks, task_ptr, claims, problem.starts, *partial, *numbers)


@dataclass(frozen=True)
class Heads:
    """Static facts of an attention over selections: what `Attend` and `Merge` share."""

    dtype: str
    dim: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    num_selections: int

    @property
    def units(self) -> int:
        """Sets of heads that share both selection and keys."""
        return max(self.num_selections, self.num_kv_heads)

    @property
    def group(self) -> int:
        """Heads of a unit."""
        return self.num_heads // self.units

    @property
    def queries(self) -> int:
        """Of a tile."""
        return hopper.ROWS // self.group


@dataclass(frozen=True)
class Attend(Heads):
    """What a variant is compiled for. `with_values=False` gives only the log-sum-exps."""

    with_values: bool = True

    def fakes(self) -> tuple:
        """q, k, v, edges, tasks, task_ptr, claims, starts, partial, lse, and numbers in the order of `__call__`."""
        dtype, tokens = hopper.DTYPES[self.dtype], cute.sym_int()
        keys = hopper.fake(dtype, (tokens, self.num_kv_heads, self.dim))
        return (
            hopper.fake(dtype, (tokens, self.num_heads, self.dim)),
            keys,
            keys if self.with_values else None,
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (cute.sym_int(), 4)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(dtype, (cute.sym_int64(), self.dim)) if self.with_values else None,
            hopper.fake(Float32, (cute.sym_int64(),)),
            *(Int32(0) for _ in range(5)),
            hopper.fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor | None,
        edges: cute.Tensor,
        tasks: cute.Tensor,
        task_ptr: cute.Tensor,
        claims: cute.Tensor,
        starts: cute.Tensor,
        partial: cute.Tensor | None,
        lse: cute.Tensor,
        window: Int32,
        last_window: Int32,
        begin: Int32,
        slots: Int32,
        blocks: Int32,
        stream: CUstream,
    ):
        dtype = hopper.DTYPES[self.dtype]
        layout_q = hopper.operand_layout(dtype, hopper.ROWS, self.dim, QUERY_STAGES)
        layout_k = hopper.operand_layout(dtype, self.block_size, self.dim, KEY_STAGES)
        box = cute.make_layout((self.group, 64), stride=(64, 1))
        rows = cute.make_layout((q.shape[0] * self.num_heads, self.dim), stride=(self.dim, 1))
        load_q, t_q = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(q.iterator, rows),
            cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box),
            (self.group, 64),
        )
        load_k, t_k = hopper.block_loads(k, layout_k, (self.block_size, self.dim))
        load_v, t_v = None, None
        if cutlass.const_expr(self.with_values):
            load_v, t_v = hopper.block_loads(v, layout_k, (self.block_size, self.dim))
        self.kernel(
            (load_q, load_k, load_v),
            (t_q, t_k, t_v),
            (edges, tasks, task_ptr, claims, starts),
            (partial, lse),
            (window, last_window, begin, slots),
            (hopper.product_of(dtype, self.block_size), hopper.weighted_sum_of(dtype, self.dim)),
            (layout_q, layout_k),
        ).launch(grid=(blocks, 1, 1), block=(3 * hopper.WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        loads: tuple,
        sources: tuple,
        index: tuple,
        results: tuple,
        numbers: tuple,
        products: tuple,
        layouts: tuple,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        # Queries: full and empty; keys: full, empty, and the task known; the task nearly gathered.
        bars = memory.allocate_array(Int64, 2 * QUERY_STAGES)
        key_bars = memory.allocate_array(Int64, 3 * KEY_STAGES + 1)
        info = memory.allocate_array(Int32, 4 * KEY_STAGES)
        layout_q, layout_k = layouts
        s_q = hopper.allocate(memory, self.dtype, layout_q)
        s_k = hopper.allocate(memory, self.dtype, layout_k)
        s_v = s_k
        if cutlass.const_expr(self.with_values):
            s_v = hopper.allocate(memory, self.dtype, layout_k)
        if thread == 0:
            for i in cutlass.range_constexpr(QUERY_STAGES):
                cute.arch.mbarrier_init(bars + i, 2)
                cute.arch.mbarrier_init(bars + QUERY_STAGES + i, hopper.WARPGROUP // 32)
            for i in cutlass.range_constexpr(KEY_STAGES):
                cute.arch.mbarrier_init(key_bars + i, 1)
                cute.arch.mbarrier_init(key_bars + KEY_STAGES + i, 2 * hopper.WARPGROUP // 32 + 2)
                cute.arch.mbarrier_init(key_bars + 2 * KEY_STAGES + i, 1)
            cute.arch.mbarrier_init(key_bars + 3 * KEY_STAGES, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp >= 8:
            cute.arch.setmaxregister_decrease(hopper.PRODUCER_REGISTERS)
            if warp == 10:
                self.draw(loads, sources, index, s_k, s_v, key_bars, info, numbers[:2])
            elif warp < 10:
                self.gather(loads[0], sources[0], index[0], s_q, bars, key_bars, info, warp - 8)
        else:
            cute.arch.setmaxregister_increase(hopper.CONSUMER_REGISTERS)
            self.compute(index[0], results, numbers[2:], products, (s_q, s_k, s_v), bars, key_bars, info, thread)

    @cute.jit
    def draw(
        self,
        loads: tuple,
        sources: tuple,
        index: tuple,
        s_k: cute.Tensor,
        s_v: cute.Tensor,
        bars: cute.Pointer,
        info: cute.Pointer,
        windows: tuple,
    ):
        """One warp: draw tasks until none is left; announce each, and load its keys and values."""
        window, last = windows
        _, tasks, task_ptr, claims, starts = index
        lane = cute.arch.lane_idx()
        first = task_ptr[window]
        sharing = self.units // self.num_selections
        total = (task_ptr[last + 1] - first) * sharing
        shape = (self.block_size, self.dim)
        n, more = Int32(0), Int32(1)
        while more > 0:
            stage, phase = hopper.place(n, KEY_STAGES)
            cute.arch.mbarrier_wait(bars + KEY_STAGES + stage, phase ^ 1)
            cute.arch.mbarrier_wait(bars + 3 * KEY_STAGES, (n & 1) ^ 1)
            item = Int32(0)
            if lane == 0:
                item = cute.arch.atomic_add(claims.iterator + window, Int32(1))
            item = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(item, 0))
            if item < total:
                task = first + item // sharing
                unit = tasks[task, 1] * sharing + item % sharing
                start = cute.arch.make_warp_uniform(starts[tasks[task, 0]])
                head = cute.arch.make_warp_uniform(unit // (self.units // self.num_kv_heads))
                if lane == 0:
                    self.announce(info, bars, stage, tasks[task, 2], tasks[task, 3], unit)
                    size = self.block_size * self.dim * 2 * (2 if self.with_values else 1)
                    cute.arch.mbarrier_arrive_and_expect_tx(bars + stage, size)
                cute.arch.sync_warp()
                hopper.load_block(loads[1], sources[1], s_k, shape, start, head, stage, bars + stage)
                if cutlass.const_expr(self.with_values):
                    hopper.load_block(loads[2], sources[2], s_v, shape, start, head, stage, bars + stage)
            else:
                if lane == 0:
                    self.announce(info, bars, stage, Int32(0), Int32(0), Int32(0))
                    cute.arch.mbarrier_arrive(bars + stage)
                more = Int32(0)
            n += 1

    @cute.jit
    def announce(self, info: cute.Pointer, bars: cute.Pointer, stage: Int32, begin: Int32, end: Int32, unit: Int32):
        """The next task, none if it has no edges. The thread that writes also arrives, which makes its writes known."""
        place = info + stage * 4
        place[0] = begin
        place[1] = end
        place[2] = unit
        place[3] = 0
        cute.arch.mbarrier_arrive(bars + 2 * KEY_STAGES + stage)

    @cute.jit
    def gather(
        self,
        load: cute.CopyAtom,
        source: cute.Tensor,
        edges: cute.Tensor,
        s_q: cute.Tensor,
        bars: cute.Pointer,
        key_bars: cute.Pointer,
        info: cute.Pointer,
        which: Int32,
    ):
        """One of two warps: its half of each tile's queries, `group` rows each."""
        lane = cute.arch.lane_idx()
        half = self.queries // 2
        size = hopper.ROWS * self.dim
        boxes = cute.group_modes(cute.flat_divide(s_q, (self.group, 64)), 0, 2)
        rows = cute.group_modes(cute.local_tile(source, (self.group, 64), (None, None)), 0, 2)
        to, what = cpasync.tma_partition(load, 0, cute.make_layout(1), boxes, rows)
        n, base, count = Int32(0), Int32(0), Int32(1)
        while count > 0:
            key_stage, key_phase = hopper.place(n, KEY_STAGES)
            cute.arch.mbarrier_wait(key_bars + 2 * KEY_STAGES + key_stage, key_phase)
            place = info + key_stage * 4
            first, last, unit = place[0], place[1] - 1, place[2]
            count = last + 1 - first
            tiles = cute.ceil_div(count, self.queries)
            # The lanes hold the edges of `group` tiles, and have those of as many more on their way.
            at = first + lane // half * self.queries + which * half + lane % half
            following = edges[cutlass.max(cutlass.min(at, last), 0)]
            edge = following
            for j in cutlass.range(tiles, unroll=1):
                stage, phase = hopper.place(base + j, QUERY_STAGES)
                if j & (self.group - 1) == 0:
                    edge = following
                    following = edges[cutlass.min(at + (j + self.group) * self.queries, last)]
                if which == 0:
                    ask_if_near(key_bars + 3 * KEY_STAGES, j, tiles)
                cute.arch.mbarrier_wait(bars + QUERY_STAGES + stage, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars + stage, size)
                for i in cutlass.range_constexpr(half):
                    held = cute.arch.shuffle_sync(edge, (j & (self.group - 1)) * half + i)
                    box, row = which * half + i, cute.arch.make_warp_uniform(held >> SLOT_BITS) * self.units + unit
                    for h in cutlass.range_constexpr(self.dim // 64):
                        cute.copy(load, what[None, row, h], to[None, box, h, stage], tma_bar_ptr=bars + stage)
            cute.arch.sync_warp()
            if count > 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(key_bars + KEY_STAGES + key_stage)
            base += tiles
            n += 1

    @cute.jit
    def compute(
        self,
        edges: cute.Tensor,
        results: tuple,
        numbers: tuple,
        products: tuple,
        tensors: tuple,
        bars: cute.Pointer,
        key_bars: cute.Pointer,
        info: cute.Pointer,
        thread: Int32,
    ):
        """One of two warpgroups: the tiles of its parity."""
        mma, mma_values = products
        s_q, s_k, s_v = tensors
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
        n, base, count = Int32(0), Int32(0), Int32(1)
        while count > 0:
            stage, phase = hopper.place(n, KEY_STAGES)
            cute.arch.mbarrier_wait(key_bars + stage, phase)
            place = info + stage * 4
            task = place[0], place[1] - 1, place[2], place[3]
            count = task[1] + 1 - task[0]
            tiles = cute.ceil_div(count, self.queries)
            # Tile j of the task is tile base + j of all: mine are those of my parity.
            tile = which ^ (base & 1)
            if tile < tiles:
                keys = b[None, None, None, stage], values[None, None, None, stage]
                self.run(
                    edges, results, numbers, products, scores, out, weights, a, keys, task, base, tile, tiles, bars
                )
            if count > 0:
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(key_bars + KEY_STAGES + stage)
            base += tiles
            n += 1

    @cute.jit
    def run(
        self,
        edges: cute.Tensor,
        results: tuple,
        numbers: tuple,
        products: tuple,
        scores: cute.Tensor,
        out: cute.Tensor,
        weights: cute.Tensor,
        a: cute.Tensor,
        keys: tuple,
        task: tuple,
        base: Int32,
        tile: Int32,
        tiles: Int32,
        bars: cute.Pointer,
    ):
        """Every second tile of a task from `tile` on: the scores of one while the weights of the last are used."""
        mma, mma_values = products
        partial, lse = results
        words = cute.recast_tensor(weights, Int32)
        following_words = cute.make_rmem_tensor(words.shape, Int32)
        at = self.rows_of(self.edges_of(edges, task, tile), task, numbers)
        # Loaded long before they are used, as the first thing that is waited for in every turn of the loop.
        coming = self.edges_of(edges, task, tile + 2)
        self.score(mma, scores, a, keys[0], base + tile, bars)
        warpgroup.wait_group(0)
        self.release(bars, base + tile)
        inverse = self.softmax(scores, words, lse, at)
        for later in cutlass.range(tile + 2, tiles, 2, unroll=1):
            following = self.rows_of(coming, task, numbers)
            coming = self.edges_of(edges, task, later + 2)
            self.score(mma, scores, a, keys[0], base + later, bars)
            if cutlass.const_expr(self.with_values):
                hopper.multiply(mma_values, out, weights, keys[1])
            warpgroup.wait_group(int(self.with_values))
            self.release(bars, base + later)
            next_inverse = inverse
            # Always so, which the compiler cannot know: without a branch it would end the weighted sum first.
            if task[3] == 0:
                next_inverse = self.softmax(scores, following_words, lse, following)
            if cutlass.const_expr(self.with_values):
                warpgroup.wait_group(0)
                self.store(out, partial, at, inverse)
                for x in cutlass.range_constexpr(cute.size(words)):
                    words[x] = following_words[x]
            at, inverse = following, next_inverse
        if cutlass.const_expr(self.with_values):
            hopper.multiply(mma_values, out, weights, keys[1])
            warpgroup.wait_group(0)
            self.store(out, partial, at, inverse)

    @cute.jit
    def edges_of(self, edges: cute.Tensor, task: tuple, tile: Int32):
        """Those of the thread's two rows of a tile; a tile that is not full repeats its last edge."""
        first, last, _, _ = task
        thread, _, _ = cute.arch.thread_idx()
        at = first + tile * self.queries
        own, other = hopper.row_of(thread) // self.group, (hopper.row_of(thread) + 8) // self.group
        return edges[cutlass.min(at + own, last)], edges[cutlass.min(at + other, last)]

    @cute.jit
    def rows_of(self, pair: tuple, task: tuple, numbers: tuple):
        """Where the results of two rows go, given their edges."""
        begin, slots = numbers
        thread, _, _ = cute.arch.thread_idx()
        places = []
        for j in cutlass.range_constexpr(2):
            head = (hopper.row_of(thread) + 8 * j) % self.group
            query = Int64((pair[j] >> SLOT_BITS) - begin) * self.units + task[2]
            places.append((query * slots + (pair[j] & ((1 << SLOT_BITS) - 1))) * self.group + head)
        return places[0], places[1]

    @cute.jit
    def score(
        self,
        mma: cute.TiledMma,
        scores: cute.Tensor,
        a: cute.Tensor,
        keys: cute.Tensor,
        tile: Int32,
        bars: cute.Pointer,
    ):
        """Wait for the queries of a tile and start their product with the keys."""
        stage, phase = hopper.place(tile, QUERY_STAGES)
        cute.arch.mbarrier_wait(bars + stage, phase)
        hopper.multiply(mma, scores, a[None, None, None, stage], keys)

    @cute.jit
    def release(self, bars: cute.Pointer, tile: Int32):
        """The queries of a tile have been read."""
        hopper.arrive_if(cute.arch.lane_idx() == 0, bars + QUERY_STAGES + tile % QUERY_STAGES)

    @cute.jit
    def softmax(self, scores: cute.Tensor, words: cute.Tensor, lse: cute.Tensor, at: tuple):
        """Scores to weights, not normalised; stores the log-sum-exps (base 2) and gives 1 / their sums."""
        lane = cute.arch.lane_idx()
        into = words if cutlass.const_expr(self.with_values) else None
        tops, sums = hopper.softmax(scores, math.log2(math.e) / math.sqrt(self.dim), into, self.dtype)
        inverse = []
        for j in cutlass.range_constexpr(2):
            total = tops[j] + cute.math.log2(sums[j], fastmath=True)
            hopper.store_if(lane % 4 == 0, lse.iterator + at[j], total)
            inverse.append(cute.arch.rcp_approx(sums[j]))
        return inverse[0], inverse[1]

    @cute.jit
    def store(self, out: cute.Tensor, partial: cute.Tensor, at: tuple, inverse: tuple):
        """The normalised result, in the order that `merge.py` reads."""
        lane = cute.arch.lane_idx()
        for j in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.dim // 32):
                words = [
                    hopper.pack_halves(out[4 * n + 2 * j] * inverse[j], out[4 * n + 2 * j + 1] * inverse[j], self.dtype)
                    for n in range(4 * c, 4 * c + 4)
                ]
                place = hopper.chunk_place(at[j], self.group, self.dim, c, lane)
                hopper.store_16_bytes(partial.iterator + place, words)


def variants() -> list[Attend]:
    """Every kind of variant: attention, and without values the proxies' log-sum-exps, for the KL's blocks of 128."""
    shapes = [(16, 2, 4), (8, 2, 4), (4, 2, 4), (16, 1, 1), (16, 2, 2), (4, 4, 4), (16, 4, 2)]
    of_proxies = [(4, 1, 4), (4, 2, 4), (4, 4, 4), (4, 1, 1), (1, 1, 1)]
    types = [(dtype, dim) for dtype in hopper.DTYPES for dim in (64, 128)]
    return [Attend(*one, block_size, *shape, True) for one in types for block_size in (64, 128) for shape in shapes] + [
        Attend(*one, 128, *shape, False) for one in types for shape in of_proxies
    ]
