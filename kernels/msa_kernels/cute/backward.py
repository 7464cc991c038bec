"""Gradients of attention to selected blocks: one partial dq per query, head and block, one partial dk and dv per item.

Blocks are outermost, as in `attend.py`, and a query's own block is an item as the others are (`streams.py`), with its
causal mask. An item's keys and values are loaded once; the queries that read them and the outputs' gradients are
gathered, `group` heads each, into tiles of 64 rows. With p the weights and ds = p (do v - delta) / sqrt(dim), where
delta is the sum of out x do over a row, a tile adds p do to dv and ds q to dk, which stay in registers over the whole
item, and its ds k is the dq of its edges. Nothing is added in memory: the parts have places of their own, and the sums
over them (`sums.py`) have a fixed order.

Four warps load: one gathers queries, one the outputs' gradients, one fetches keys and values of the items that it
draws, one each row's log-sum-exp, delta and place of its dq. Two warpgroups compute, each the scores of half of the
block's keys, transposed: then the weights are operands of the sums over rows as they are, in registers. Only ds goes
through shared memory, as dq sums over all keys; of dq each warpgroup makes half of the columns.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers
from jaxtyping import Float
from jaxtyping import Float32 as Scalars
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute import hopper, streams
from msa_kernels.cute.attend import SLOT_BITS, Heads, Problem, Window
from msa_kernels.cute.compile import load
from msa_kernels.cute.index import Index
from msa_kernels.cute.streams import BEGIN, END, INFO, ITEM, LENGTH, OWN, START, UNIT

QUERY_STAGES = 4
GRADIENT_STAGES = 2
"""Of the outputs' gradients, and of ds."""
KEY_STAGES = 2
"""Of keys, and of announced items; values have one buffer."""
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240
CONSUMERS = 2 * hopper.WARPGROUP
Q_FULL, Q_EMPTY, O_FULL, O_EMPTY, DS_FULL, K_FULL, K_EMPTY, KNOWN, V_FULL, V_EMPTY, NEAR = range(11)
"""Barriers: of queries, of the outputs' gradients, of ds, of keys, of announced items, of values, and of an item that
is nearly gathered."""
STAGES = (*[QUERY_STAGES] * 2, *[GRADIENT_STAGES] * 3, *[KEY_STAGES] * 3, 1, 1, 1)
"""How many there are of each."""
SCORES, SLOPES, DQ, DK, DV, P, WEIGHTS, DS = range(8)
"""Registers: scores, do v, the three gradients, p in fp32, and p and ds as operands."""


def backward(
    problem: Problem,
    index: Index,
    window: Window,
    dout: Float[Tensor, "token head dim"],
    lse: Scalars[Tensor, "token head"],
    delta: Scalars[Tensor, "token head"],
    own_slot: Ids[Tensor, "batch selection query"],
    dq_parts: Float[Tensor, "line dim"],
    dk_parts: Scalars[Tensor, "item block_size dim"],
    dv_parts: Scalars[Tensor, "item block_size dim"],
) -> None:
    """Write the parts of a window's gradients.

    `dq_parts` has the lines and the order of `attend.Partial`'s results, scaled as dq is; the own block's part is at
    the slot that `own_slot` says (-1: not selected, no part), and slots that hold no block are not written. `dk_parts`
    and `dv_parts` are numbered as `streams.py` numbers items; own items without queries in the window are not written,
    and rows behind a block's end are zeros. `lse` is natural, and `delta` the sum of output x its gradient. The
    window's lines must be fewer than 2^31.
    """
    q, k, v, blocks = problem[:4]
    kernel = Backward(*problem.facts)
    grid = problem.first, problem.starts, problem.ends
    parts, processors = (dq_parts, dk_parts, dv_parts), hopper.processors(q.device)
    load(kernel)(q, k, v, dout, lse, delta, own_slot, *index, *grid, *parts, *window, blocks.shape[3], processors)


@dataclass(frozen=True)
class Backward(Heads):
    """What a variant is compiled for; its blocks have 128 tokens."""

    @property
    def scale(self) -> float:
        """Of the scores."""
        return 1 / math.sqrt(self.dim)

    @property
    def early_scale(self) -> float:
        """How much of the scale is in ds already: it is cheaper there, but would take small numbers from fp16."""
        return self.scale if self.dtype == "bfloat16" else 1.0

    @property
    def late_scale(self) -> float:
        """The rest of it."""
        return self.scale / self.early_scale

    def fakes(self) -> tuple:
        """q, k, v, dout, lse, delta, own_slot, index, grid, parts, window, begin, end, slots, thread blocks."""
        dtype, tokens, items = hopper.DTYPES[self.dtype], cute.sym_int(), cute.sym_int()
        heads = hopper.fake(dtype, (tokens, self.num_heads, self.dim))
        keys = hopper.fake(dtype, (tokens, self.num_kv_heads, self.dim))
        rows = hopper.fake(Float32, (tokens, self.num_heads), 4)
        parts = hopper.fake(Float32, (items, self.block_size, self.dim))
        blocks = cute.sym_int()
        return (
            heads,
            keys,
            keys,
            heads,
            rows,
            rows,
            hopper.fake(Int32, (cute.sym_int(), self.num_selections, cute.sym_int()), 4),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (cute.sym_int(), 4)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (tokens,)),
            hopper.fake(Int32, (blocks,)),
            hopper.fake(Int32, (blocks,)),
            hopper.fake(dtype, (cute.sym_int64(), self.dim)),
            parts,
            parts,
            *(Int32(0) for _ in range(5)),
            hopper.fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        own_slot: cute.Tensor,
        edges: cute.Tensor,
        tasks: cute.Tensor,
        task_ptr: cute.Tensor,
        claims: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        dq_parts: cute.Tensor,
        dk_parts: cute.Tensor,
        dv_parts: cute.Tensor,
        window: Int32,
        begin: Int32,
        end: Int32,
        slots: Int32,
        blocks: Int32,
        stream: CUstream,
    ):
        layouts = self.layouts()
        block = (self.block_size, self.dim)
        load_q, t_q = streams.boxes(q, self.group)
        load_o, t_o = streams.boxes(dout, self.group)
        load_k, t_k = hopper.block_loads(k, layouts[0], block)
        load_v, t_v = hopper.block_loads(v, layouts[0], block)
        load_n, t_n = load_k, t_k
        if cutlass.const_expr(self.dim == 64):
            load_n, t_n = hopper.block_loads(k, layouts[4], block)
        self.kernel(
            (load_q, load_o, load_k, load_v, load_n),
            (t_q, t_o, t_k, t_v, t_n),
            (edges, tasks, task_ptr, claims, first, starts, ends),
            (lse, delta, own_slot),
            (dq_parts, dk_parts, dv_parts),
            (window, begin, end, slots),
            self.products(),
            layouts,
        ).launch(grid=(blocks, 1, 1), block=(3 * hopper.WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=1)

    def layouts(self) -> tuple:
        """Of keys, values, queries, gradients, ds (keys x rows), and the keys as dq's product reads them.

        A warpgroup reads half of their columns, which is less than the 64 of a swizzle's line if there are 64: that
        needs a copy of its own.
        """
        dtype = hopper.DTYPES[self.dtype]
        keys = hopper.operand_layout(dtype, self.block_size, self.dim, KEY_STAGES)
        halves = keys
        if self.dim == 64:
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, dtype)
            halves = cute.tile_to_shape(atom, (self.block_size, self.dim, KEY_STAGES), order=(0, 1, 2))
        return (
            keys,
            hopper.operand_layout(dtype, self.block_size, self.dim, 1),
            hopper.operand_layout(dtype, hopper.ROWS, self.dim, QUERY_STAGES),
            hopper.operand_layout(dtype, hopper.ROWS, self.dim, GRADIENT_STAGES),
            halves,
            hopper.operand_layout(dtype, self.block_size, hopper.ROWS, GRADIENT_STAGES),
        )

    def products(self) -> tuple:
        """Keys x rows (scores and do v), sums over rows (dk and dv), and sums over keys (dq)."""
        dtype, plain, other = hopper.DTYPES[self.dtype], OperandMajorMode.K, OperandMajorMode.MN
        make = hopper_helpers.make_trivial_tiled_mma
        return (
            make(dtype, dtype, plain, plain, Float32, (2, 1, 1), (hopper.ROWS, hopper.ROWS)),
            hopper.weighted_sum_of(dtype, self.dim),
            make(dtype, dtype, other, other, Float32, (1, 2, 1), (hopper.ROWS, self.dim // 2)),
        )

    @cute.kernel
    def kernel(
        self,
        loads: tuple,
        sources: tuple,
        index: tuple,
        rows: tuple,
        parts: tuple,
        numbers: tuple,
        products: tuple,
        layouts: tuple,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        bars = self.barriers(memory.allocate_array(Int64, sum(STAGES)))
        info = memory.allocate_array(Int32, INFO * KEY_STAGES)
        # A row's log-sum-exp (base 2), the line of its dq, and delta.
        facts = (
            memory.allocate_array(Float32, hopper.ROWS * QUERY_STAGES),
            memory.allocate_array(Int32, hopper.ROWS * QUERY_STAGES),
            memory.allocate_array(Float32, hopper.ROWS * GRADIENT_STAGES),
        )
        s_k, s_v, s_q, s_o = (hopper.allocate(memory, self.dtype, layout) for layout in layouts[:4])
        s_n = s_k
        if cutlass.const_expr(self.dim == 64):
            s_n = hopper.allocate(memory, self.dtype, layouts[4])
        s_d = hopper.allocate(memory, self.dtype, layouts[5])
        if thread == 0:
            self.initialise(bars)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp >= 8:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 8:
                ring = bars[Q_FULL], bars[Q_EMPTY], bars[NEAR]
                self.gather(loads[0], sources[0], index[0], s_q, QUERY_STAGES, ring, bars, info)
            elif warp == 9:
                ring = bars[O_FULL], bars[O_EMPTY], None
                self.gather(loads[1], sources[1], index[0], s_o, GRADIENT_STAGES, ring, bars, info)
            elif warp == 10:
                self.draw(loads, sources, index, (s_k, s_v, s_n), bars, info, numbers[:3])
            else:
                self.describe(index[0], rows, facts, bars, info, numbers)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.compute(parts, products, (s_q, s_o, s_k, s_v, s_n, s_d), facts, bars, info, thread)

    @cute.jit
    def barriers(self, bars: cute.Pointer) -> tuple:
        """The first of each kind."""
        return tuple(bars + sum(STAGES[:i]) for i in range(len(STAGES)))

    @cute.jit
    def initialise(self, bars: tuple):
        """Arrivals: a full tile has its gather's and those of `describe`'s lanes; warps of readers free buffers."""
        readers = CONSUMERS // 32
        # An item's place is also read by three of the warps that load.
        arrivals = (33, readers, 33, readers, readers, 1, readers + 3, 1, 1, readers, 1)
        for i in cutlass.range_constexpr(len(STAGES)):
            for stage in cutlass.range_constexpr(STAGES[i]):
                cute.arch.mbarrier_init(bars[i] + stage, arrivals[i])

    @cute.jit
    def draw(
        self,
        loads: tuple,
        sources: tuple,
        index: tuple,
        targets: tuple,
        bars: tuple,
        info: cute.Pointer,
        numbers: tuple,
    ):
        """One warp: draw items until none is left; announce each, and load its keys and values."""
        full, empty, known, values_full, values_empty, near = bars[K_FULL:]
        s_k, s_v, s_n = targets
        shape, size = (self.block_size, self.dim), self.block_size * self.dim * 2
        n, more = Int32(0), Int32(1)
        while more > 0:
            stage, phase = streams.ring(n, KEY_STAGES)
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            cute.arch.mbarrier_wait(near, (n & 1) ^ 1)
            sharing = self.units // self.num_selections
            item = streams.draw(index, numbers, self.units, sharing, self.block_size)
            more = Int32(item[BEGIN] < item[END])
            with cute.arch.elect_one():
                streams.announce(info, stage, known + stage, item)
            if more > 0:
                start = cute.arch.make_warp_uniform(item[START])
                head = cute.arch.make_warp_uniform(item[UNIT] // (self.units // self.num_kv_heads))
                with cute.arch.elect_one():
                    both = size * (2 if self.dim == 64 else 1)
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, both)
                hopper.load_block(loads[2], sources[2], s_k, shape, start, head, stage, full + stage)
                if cutlass.const_expr(self.dim == 64):
                    hopper.load_block(loads[4], sources[4], s_n, shape, start, head, stage, full + stage)
                cute.arch.mbarrier_wait(values_empty, (n & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(values_full, size)
                hopper.load_block(loads[3], sources[3], s_v, shape, start, head, 0, values_full)
            n += 1

    @cute.jit
    def gather(
        self,
        load: cute.CopyAtom,
        source: cute.Tensor,
        edges: cute.Tensor,
        target: cute.Tensor,
        stages: cutlass.Constexpr,
        ring: tuple,
        bars: tuple,
        info: cute.Pointer,
    ):
        """One warp: the rows of every item's tiles, of queries or of gradients; `ring`: full, empty, and near."""
        n, base, more = Int32(0), Int32(0), Int32(1)
        while more > 0:
            stage, phase = streams.ring(n, KEY_STAGES)
            cute.arch.mbarrier_wait(bars[KNOWN] + stage, phase)
            item = streams.read(info, stage)
            more = Int32(item[BEGIN] < item[END])
            shape = self.queries, self.group, self.units, stages
            base += streams.gather(load, source, target, edges, item, item[UNIT], shape, base, *ring)
            self.free(bars[K_EMPTY] + stage)
            n += 1

    @cute.jit
    def free(self, bar: cute.Pointer):
        """A warp has read what the barrier guards."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bar)

    @cute.jit
    def describe(self, edges: cute.Tensor, rows: tuple, facts: tuple, bars: tuple, info: cute.Pointer, numbers: tuple):
        """One warp: each row's log-sum-exp, place of its dq, and delta."""
        lane = cute.arch.lane_idx()
        n, base, more = Int32(0), Int32(0), Int32(1)
        while more > 0:
            stage, phase = streams.ring(n, KEY_STAGES)
            cute.arch.mbarrier_wait(bars[KNOWN] + stage, phase)
            item = streams.read(info, stage)
            more = Int32(item[BEGIN] < item[END])
            tiles = cute.ceil_div(item[END] - item[BEGIN], self.queries)
            places = item[BEGIN] + lane // self.group, item[BEGIN] + (lane + 32) // self.group
            coming = [streams.edge_at(edges, item, place) for place in places]
            for j in cutlass.range(tiles, unroll=1):
                first = self.describe_row(rows, item, coming[0], places[0] + j * self.queries, lane, numbers)
                second = self.describe_row(rows, item, coming[1], places[1] + j * self.queries, lane, numbers)
                coming = [streams.edge_at(edges, item, place + (j + 1) * self.queries) for place in places]
                to, turn = streams.ring(base + j, QUERY_STAGES)
                cute.arch.mbarrier_wait(bars[Q_EMPTY] + to, turn ^ 1)
                at = to * hopper.ROWS + lane
                for row, (total, line, _) in ((0, first), (32, second)):
                    (facts[0] + (at + row)).store(total)
                    (facts[1] + (at + row)).store(line)
                cute.arch.mbarrier_arrive(bars[Q_FULL] + to)
                to, turn = streams.ring(base + j, GRADIENT_STAGES)
                cute.arch.mbarrier_wait(bars[O_EMPTY] + to, turn ^ 1)
                at = to * hopper.ROWS + lane
                for row, (_, _, slope) in ((0, first), (32, second)):
                    (facts[2] + (at + row)).store(slope)
                cute.arch.mbarrier_arrive(bars[O_FULL] + to)
            base += tiles
            self.free(bars[K_EMPTY] + stage)
            n += 1

    @cute.jit
    def describe_row(self, rows: tuple, item: tuple, edge: Int32, at: Int32, lane: Int32, numbers: tuple):
        """Log-sum-exp, line and delta of a head of edge `at`; +inf and -1 for rows that must count for nothing.

        Those lie behind the last edge, or their query did not select its own block.
        """
        lse, delta, own_slot = rows
        _, begin, _, slots = numbers
        query, slot = edge >> SLOT_BITS, edge & ((1 << SLOT_BITS) - 1)
        if item[OWN] != 0:
            sequence = own_slot.shape[2]
            selection = item[UNIT] // (self.units // self.num_selections)
            place = (query // sequence * self.num_selections + selection) * Int64(sequence) + query % sequence
            slot = (own_slot.iterator + place).load()
        counts = (at < item[END]) & (slot >= 0)
        head = Int64(query) * self.num_heads + item[UNIT] * self.group + lane % self.group
        total = (lse.iterator + head).load() * math.log2(math.e)
        line = (((query - begin) * self.units + item[UNIT]) * slots + slot) * self.group + lane % self.group
        slope = (delta.iterator + head).load() * self.early_scale
        return total if counts else Float32.inf, line if counts else Int32(-1), slope

    @cute.jit
    def compute(
        self,
        parts: tuple,
        products: tuple,
        tensors: tuple,
        facts: tuple,
        bars: tuple,
        info: cute.Pointer,
        thread: Int32,
    ):
        """One of two warpgroups: its half of every item's keys."""
        which = cute.arch.make_warp_uniform(thread // hopper.WARPGROUP)
        operands = self.operands(products, tensors, which)
        values = self.registers(products)
        n, base, more = Int32(0), Int32(0), Int32(1)
        while more > 0:
            stage, phase = streams.ring(n, KEY_STAGES)
            cute.arch.mbarrier_wait(bars[KNOWN] + stage, phase)
            item = streams.read(info, stage)
            more = Int32(item[BEGIN] < item[END])
            uniform = cute.arch.make_warp_uniform
            tiles = uniform(cute.ceil_div(item[END] - item[BEGIN], self.queries))
            own = uniform(item[OWN]), uniform(item[START] - item[BEGIN] + base * self.queries)
            if more > 0:
                cute.arch.mbarrier_wait(bars[K_FULL] + stage, phase)
                if item[LENGTH] < self.block_size:
                    cute.arch.mbarrier_wait(bars[V_FULL], n & 1)
                    self.clear_rows(tensors, item[LENGTH], stage, thread)
                job = parts[0], products, operands, values, tensors[5], facts, bars
                self.run(job, (own, base, tiles, stage, n & 1), thread)
                # Read once more, as no register can be spared for it meanwhile.
                number = streams.read(info, stage)[ITEM]
                self.free(bars[K_EMPTY] + stage)
                self.flush(values[DK], parts[1], number, which, self.late_scale, thread)
                self.flush(values[DV], parts[2], number, which, 1.0, thread)
            base += tiles
            n += 1

    @cute.jit
    def operands(self, products: tuple, tensors: tuple, which: Int32) -> tuple:
        """Keys, values, queries, gradients; the last two with rows summed over; ds, and keys summed over."""
        scores, sums, keys = products
        s_q, s_o, s_k, s_v, s_n, s_d = tensors
        group = which * hopper.WARPGROUP
        part, part_sums, part_keys = scores.get_slice(group), sums.get_slice(0), keys.get_slice(group)
        t_q, t_o, t_n, t_d = (
            cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2])) for s in (s_q, s_o, s_n, s_d)
        )
        return (
            scores.make_fragment_A(part.partition_A(s_k)),
            scores.make_fragment_A(part.partition_A(s_v)),
            scores.make_fragment_B(part.partition_B(s_q)),
            scores.make_fragment_B(part.partition_B(s_o)),
            sums.make_fragment_B(part_sums.partition_B(t_q)),
            sums.make_fragment_B(part_sums.partition_B(t_o)),
            keys.make_fragment_A(part_keys.partition_A(t_d)),
            keys.make_fragment_B(part_keys.partition_B(t_n)),
        )

    @cute.jit
    def registers(self, products: tuple) -> tuple:
        """In the order of SCORES to DS."""
        scores, sums, keys = products
        tile = scores.partition_shape_C((self.block_size, hopper.ROWS))
        half = sums.partition_shape_C((hopper.ROWS, self.dim))
        rounded = sums.partition_shape_A((hopper.ROWS, hopper.ROWS))
        return (
            cute.make_rmem_tensor(tile, Float32),
            cute.make_rmem_tensor(tile, Float32),
            cute.make_rmem_tensor(keys.partition_shape_C((hopper.ROWS, self.dim)), Float32),
            cute.make_rmem_tensor(half, Float32),
            cute.make_rmem_tensor(half, Float32),
            cute.make_rmem_tensor(hopper.ROWS * hopper.ROWS // hopper.WARPGROUP, Float32),
            sums.make_fragment_A(rounded),
            sums.make_fragment_A(rounded),
        )

    @cute.jit
    def run(self, job: tuple, work: tuple, thread: Int32):
        """All tiles of an item: the scores of one while dq and dk of the last are summed, do v while dv is."""
        dq_parts, products, operands, values, _, facts, bars = job
        own, base, tiles, stage, _ = work
        lane = cute.arch.lane_idx()
        values[DK].fill(0.0)
        values[DV].fill(0.0)
        self.first_tile(job, work, thread)
        for j in cutlass.range(1, tiles, unroll=1):
            tile = base + j
            self.start(products, operands, values, tile, SCORES, stage)
            # The last tile's sum for dv.
            warpgroup.wait_group(1)
            hopper.arrive_if(lane == 0, bars[O_EMPTY] + ((tile - 1) & (GRADIENT_STAGES - 1)))
            self.start_sums(products, operands, values, bars, tile - 1, stage)
            warpgroup.wait_group(2)
            self.weigh(values, facts[0], own, tile, thread)
            warpgroup.wait_group(1)
            self.store(values[DQ], dq_parts, facts[1], tile - 1, thread)
            self.await_rows(bars[O_FULL], tile, GRADIENT_STAGES)
            self.start(products, operands, values, tile, SLOPES, 0)
            # The last tile's sum for dk, whose ds need not be kept any longer.
            warpgroup.wait_group(1)
            hopper.arrive_if(lane == 0, bars[Q_EMPTY] + ((tile - 1) & (QUERY_STAGES - 1)))
            self.add_values(products, operands, values, tile)
            warpgroup.wait_group(1)
            self.slope(job, tile, thread)
            self.await_rows(bars[Q_FULL], base + cutlass.min(j + 1, tiles - 1), QUERY_STAGES)
            # With 128 columns there are no registers to have a product begin here and end in the next turn.
            if cutlass.const_expr(self.dim == 128):
                warpgroup.wait_group(0)
        hopper.arrive_if(lane == 0, bars[V_EMPTY])
        tile = base + tiles - 1
        self.start_sums(products, operands, values, bars, tile, stage)
        warpgroup.wait_group(1)
        hopper.arrive_if(lane == 0, bars[O_EMPTY] + (tile & (GRADIENT_STAGES - 1)))
        self.store(values[DQ], dq_parts, facts[1], tile, thread)
        warpgroup.wait_group(0)
        hopper.arrive_if(lane == 0, bars[Q_EMPTY] + (tile & (QUERY_STAGES - 1)))

    @cute.jit
    def first_tile(self, job: tuple, work: tuple, thread: Int32):
        """What the first tile has to itself: nothing was started before it."""
        _, products, operands, values, _, facts, bars = job
        own, base, tiles, stage, turn = work
        self.await_rows(bars[Q_FULL], base, QUERY_STAGES)
        self.start(products, operands, values, base, SCORES, stage)
        cute.arch.mbarrier_wait(bars[V_FULL], turn)
        self.await_rows(bars[O_FULL], base, GRADIENT_STAGES)
        self.start(products, operands, values, base, SLOPES, 0)
        warpgroup.wait_group(1)
        self.weigh(values, facts[0], own, base, thread)
        self.add_values(products, operands, values, base)
        warpgroup.wait_group(1)
        self.slope(job, base, thread)
        self.await_rows(bars[Q_FULL], base + cutlass.min(tiles - 1, 1), QUERY_STAGES)
        warpgroup.wait_group(0)

    @cute.jit
    def await_rows(self, full: cute.Pointer, tile: Int32, stages: cutlass.Constexpr):
        """Wait for the rows of a tile."""
        stage, phase = streams.ring(tile, stages)
        cute.arch.mbarrier_wait(full + stage, phase)

    @cute.jit
    def start(
        self,
        products: tuple,
        operands: tuple,
        values: tuple,
        tile: Int32,
        which: cutlass.Constexpr,
        stage: Int32,
    ):
        """Start the product of a tile's rows with keys (SCORES) or values (SLOPES)."""
        stages = QUERY_STAGES if which == SCORES else GRADIENT_STAGES
        a, b = operands[which], operands[2 + which]
        buffer = tile & (stages - 1)
        hopper.multiply(products[0], values[which], a[None, None, None, stage], b[None, None, None, buffer])

    @cute.jit
    def add_values(self, products: tuple, operands: tuple, values: tuple, tile: Int32):
        """Round a tile's weights and start its addition to dv."""
        words = cute.recast_tensor(values[WEIGHTS], Int32)
        for x in cutlass.range_constexpr(cute.size(words)):
            words[x] = hopper.pack_halves(values[P][2 * x], values[P][2 * x + 1], self.dtype)
        rows = operands[5][None, None, None, tile & (GRADIENT_STAGES - 1)]
        hopper.accumulate(products[1], values[DV], values[WEIGHTS], rows)

    @cute.jit
    def start_sums(self, products: tuple, operands: tuple, values: tuple, bars: tuple, tile: Int32, stage: Int32):
        """Start dq of a tile, when both warpgroups' ds is there, and its addition to dk."""
        by_query, spread, by_key = operands[4], operands[6], operands[7]
        buffer, phase = streams.ring(tile, GRADIENT_STAGES)
        cute.arch.mbarrier_wait(bars[DS_FULL] + buffer, phase)
        hopper.multiply(products[2], values[DQ], spread[None, None, None, buffer], by_key[None, None, None, stage])
        hopper.accumulate(products[1], values[DK], values[DS], by_query[None, None, None, tile & (QUERY_STAGES - 1)])

    @cute.jit
    def weigh(self, values: tuple, lse: cute.Pointer, own: tuple, tile: Int32, thread: Int32):
        """Weights of a tile's rows; none for keys after a query in its own block."""
        scores, p = values[SCORES], values[P]
        column = thread % 4 * 2
        line = lse + ((tile & (QUERY_STAGES - 1)) * hopper.ROWS + column)
        factor = self.scale * math.log2(math.e)
        # Also the branch without which the compiler would end all products before the exponentials.
        if own[0] == 0:
            for n in cutlass.range_constexpr(hopper.ROWS // 8):
                totals = hopper.load_pair(line + n * 8)
                for x in cutlass.range_constexpr(4 * n, 4 * n + 4):
                    p[x] = cute.math.exp2(scores[x] * factor - totals[x % 2], fastmath=True)
        else:
            key = thread // hopper.WARPGROUP * hopper.ROWS + hopper.row_of(thread)
            ahead = (own[1] - tile * self.queries + key) * self.group - column
            for n in cutlass.range_constexpr(hopper.ROWS // 8):
                totals = hopper.load_pair(line + n * 8)
                for x in cutlass.range_constexpr(4 * n, 4 * n + 4):
                    # Row column + 8 n + x % 2 of the tile is before key + 8 (x // 2 % 2), times `group`.
                    hidden = ahead + (x // 2 % 2 * 8 * self.group) > n * 8 + x % 2
                    value = cute.math.exp2(scores[x] * factor - totals[x % 2], fastmath=True)
                    p[x] = Float32(0.0) if hidden else value

    @cute.jit
    def slope(self, job: tuple, tile: Int32, thread: Int32):
        """ds of a tile, rounded, for this warpgroup's registers and for both in shared memory."""
        _, _, _, values, s_d, facts, bars = job
        slopes, p = values[SLOPES], values[P]
        words = cute.recast_tensor(values[DS], Int32)
        buffer = tile & (GRADIENT_STAGES - 1)
        line = facts[2] + (buffer * hopper.ROWS + thread % 4 * 2)
        for n in cutlass.range_constexpr(hopper.ROWS // 8):
            deltas = hopper.load_pair(line + n * 8)
            for j in cutlass.range_constexpr(2):
                x = 4 * n + 2 * j
                ds = [p[x + i] * (slopes[x + i] * self.early_scale - deltas[i]) for i in range(2)]
                words[x // 2] = hopper.pack_halves(ds[0], ds[1], self.dtype)
        # Lane l gives the address of row l % 8 (a key) of matrix l // 8: of 8 rows of keys and 8 columns of the tile.
        lane = thread % 32
        key = thread // 32 * 16 + lane // 8 % 2 * 8 + lane % 8
        plain = cute.recast_ptr(s_d.iterator, cute.make_swizzle(0, 4, 3))
        chunk = (lane // 16) ^ (lane % 8)
        to = (plain + (buffer * (self.block_size * hopper.ROWS) + key * hopper.ROWS + chunk * 8)).toint()
        for n in cutlass.range_constexpr(0, hopper.ROWS // 8, 2):
            # The swizzle of chunk n + lane // 16 of the row.
            hopper.store_matrices(to ^ (n * 16), [words[2 * n + i] for i in range(4)])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        hopper.arrive_if(lane == 0, bars[DS_FULL] + buffer)

    @cute.jit
    def store(self, dq: cute.Tensor, dq_parts: cute.Tensor, lines: cute.Pointer, tile: Int32, thread: Int32):
        """This warpgroup's columns of a tile's dq, in the order of `hopper.chunk_place`."""
        lane, chunks = thread % 32, self.dim // 64
        for j in cutlass.range_constexpr(2):
            line = (lines + ((tile & (QUERY_STAGES - 1)) * hopper.ROWS + hopper.row_of(thread) + 8 * j)).load()
            first = thread // hopper.WARPGROUP * chunks
            for c in cutlass.range_constexpr(chunks):
                words = []
                for n in cutlass.range_constexpr(4 * c, 4 * c + 4):
                    pair = [dq[4 * n + 2 * j + i] for i in range(2)]
                    if cutlass.const_expr(self.late_scale != 1.0):
                        pair = [value * self.late_scale for value in pair]
                    words.append(hopper.pack_halves(pair[0], pair[1], self.dtype))
                place = hopper.chunk_place(Int64(line), self.group, self.dim, first + c, lane)
                hopper.store_16_bytes(dq_parts.iterator + place, words, line >= 0)

    @cute.jit
    def flush(
        self,
        sums: cute.Tensor,
        parts: cute.Tensor,
        item: Int32,
        which: Int32,
        factor: cutlass.Constexpr,
        thread: Int32,
    ):
        """An item's dk or dv, this warpgroup's keys.

        Of 16 columns, lanes of even number take the lower half of a neighbour, those of odd number the upper half.
        """
        lane = thread % 4
        odd = lane % 2 == 1
        for j in cutlass.range_constexpr(2):
            key = which * hopper.ROWS + hopper.row_of(thread) + 8 * j
            column = lane * 2 + (6 if odd else 0)
            to = parts.iterator + ((Int64(item) * self.block_size + key) * self.dim + column)
            for m in cutlass.range_constexpr(self.dim // 16):
                low = [sums[8 * m + 2 * j + i] * factor for i in range(2)]
                high = [sums[8 * m + 4 + 2 * j + i] * factor for i in range(2)]
                got = [cute.arch.shuffle_sync_bfly(low[i] if odd else high[i], offset=1) for i in range(2)]
                first = [got[i] if odd else low[i] for i in range(2)]
                second = [high[i] if odd else got[i] for i in range(2)]
                hopper.store_floats(to + m * 16, first + second)

    @cute.jit
    def clear_rows(self, tensors: tuple, length: Int32, stage: Int32, thread: Int32):
        """Zeros for keys and values after the document's end, which belong to others: 0 x NaN would be NaN."""
        line, panels = 32, self.dim // 64
        for tensor, buffer in ((tensors[2], stage), (tensors[3], Int32(0))):
            plain = cute.recast_ptr(tensor.iterator, cute.make_swizzle(0, 4, 3), dtype=Int32)
            words = self.block_size * panels * line
            for x in cutlass.range(thread, words, CONSUMERS, unroll=1):
                if x // line % self.block_size >= length:
                    (plain + (buffer * words + x)).store(Int32(0))
        if cutlass.const_expr(self.dim == 64):
            plain = cute.recast_ptr(tensors[4].iterator, cute.make_swizzle(0, 4, 3), dtype=Int32)
            words = self.block_size * line
            for x in cutlass.range(thread, words, CONSUMERS, unroll=1):
                if x // 16 % self.block_size >= length:
                    (plain + (stage * words + x)).store(Int32(0))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)


def variants() -> list[Backward]:
    """Every variant that the package is tested with."""
    shapes = [(16, 2, 4), (8, 2, 4), (4, 2, 4), (16, 1, 1), (16, 2, 2), (4, 4, 4), (16, 4, 2)]
    return [Backward(dtype, dim, 128, *shape) for dtype in hopper.DTYPES for dim in (64, 128) for shape in shapes]
