"""The KL of the proxies to their heads' attention, on the selected blocks, and its gradients to the proxies.

For a query and a proxy, P is the mean of its heads' softmaxes and p the softmax of the proxy's own scores, both over
the selected tokens; their log-sum-exps are known before, so that a key block's share is made without the others:

    value  sum over keys of P log(P / p)          gradient to the proxy's scores  p - P

Blocks are outermost, as in `attend.py`: an item (`streams.py`) is a key block and queries that chose it, or the
queries inside it with their causal mask, for one proxy. Keys are the rows of every product, queries its columns: the
two warpgroups share the keys, and a thread holds the same keys of all columns. In the heads' scores a query has a
column for each head; a sum over neighbouring columns and lanes of a quad makes the mean, and the proxy's queries lie
in the order in which that sum arrives (`query_of`), so that no thread needs another's numbers.

The scores' gradient goes from registers into the keys' gradient, which stays in registers for all queries of the item,
and through shared memory, where the warpgroups meet once a tile, into the queries'. Both products of a tile run while
the next tile's exponentials are made.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.experimental import primitives
from cutlass.utils import hopper_helpers
from jaxtyping import Float
from jaxtyping import Float32 as Scalars
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute import hopper, streams
from msa_kernels.cute.attend import SLOT_BITS, Problem, Window, ask_if_near
from msa_kernels.cute.compile import load
from msa_kernels.cute.index import Index

BLOCK = 128
"""Keys of a block: 64 for each warpgroup."""
ITEM_STAGES = 2
"""Of items, and of the proxies' keys."""
CONSUMERS = 2 * hopper.WARPGROUP
EXCHANGE = 1
"""The barrier at which the two warpgroups meet."""
SCORE_SCALE = {"bfloat16": 1.0, "float16": 1024.0}
"""Keeps p - P, at most 1, clear of fp16's smallest numbers."""
PART_SCALE = {"bfloat16": 1.0, "float16": 16.0}
"""The same for the queries' gradients: what their parts are multiplied by."""
FAR = 1 << 20
"""More than any key's place in a block."""
NEVER = -1e30
"""Logarithm of the probability of a hidden key: finite, because it is multiplied by zero."""
LEAST = 2.0**-126
"""Smaller probabilities count as zero, and their logarithm is asked for all the same."""


def proxy_kl(
    problem: Problem,
    q_proxy: Float[Tensor, "token proxy proxy_dim"],
    k_proxy: Float[Tensor, "token proxy_kv_head proxy_dim"],
    index: Index,
    window: Window,
    lse: Scalars[Tensor, "token head"],
    lse_proxy: Scalars[Tensor, "token proxy"],
    own_slot: Ids[Tensor, "batch selection query"],
    dq_parts: Float[Tensor, "line proxy_dim"] | None,
    dk_parts: Scalars[Tensor, "item key proxy_dim"] | None,
    values: Scalars[Tensor, "item"] | None,
) -> None:
    """Write what the items of a window have: sums of the KL in nats, and parts of its gradients, without any scale.

    Items are those of `streams.draw` with a unit for each proxy. `lse` and `lse_proxy` are natural logarithms over the
    whole selection, `own_slot` the place of a query's own block in it or -1. A query's gradient by one block is line
    ((query - begin) * proxies + proxy) * slots + slot, times `PART_SCALE`, its columns in the order of
    `ProxyKL.store`. Items without queries are not written. ValueError for blocks that are not of 128 tokens.
    """
    if problem.block_size != BLOCK:
        raise ValueError(
            f"block_size={problem.block_size} must be {BLOCK} for the cute KL; use {BLOCK} or MSA_KERNELS=flex"
        )
    q, k, _, blocks, *_ = problem
    dtype, dim, _, heads, kv_heads, selections = problem.facts
    proxies, proxy_dim = q_proxy.shape[1:]
    proxy = proxy_dim, proxies, k_proxy.shape[1]
    kernel = ProxyKL(dtype, dim, heads, kv_heads, selections, *proxy, values is not None, dq_parts is not None)
    processors = hopper.processors(q.device)
    tensors = q, k, q_proxy, k_proxy, lse, lse_proxy, own_slot
    grid = problem.first, problem.starts, problem.ends
    load(kernel)(*tensors, *index, *grid, dq_parts, dk_parts, values, *window, blocks.shape[3], processors)


# Small operations on shared and global memory that must not become branches or be cut into smaller ones.


@dsl_user_op
def load_words(pointer: cute.Pointer, *, loc=None, ip=None) -> tuple[Int32, Int32]:
    """Two neighbouring words of shared memory."""
    words = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * 2),
        [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "ld.shared.v2.b32 {$0, $1}, [$2];",
        "=r,=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Int32(llvm.extractvalue(T.i32(), words, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def own_register(word: Int32, *, loc=None, ip=None) -> Int32:
    """A copy that is made here and nowhere else.

    The compiler does not know that a product reads its operand's registers until it is waited for: a plain copy behind
    the wait may become no copy, and what is copied be written over the operand.
    """
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(word).ir_value(loc=loc, ip=ip)],
            "mov.b32 $0, $1;",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def store_word_if(condition: Boolean, pointer: cute.Pointer, word: Int32, *, loc=None, ip=None) -> None:
    """Store one word in global memory, without a branch."""
    llvm.inline_asm(
        None,
        [
            pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            Int32(word).ir_value(loc=loc, ip=ip),
            Int32(condition).ir_value(loc=loc, ip=ip),
        ],
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1; }",
        "l,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def store_pair(pointer: cute.Pointer, low: Float32, high: Float32, *, loc=None, ip=None) -> None:
    """Store two neighbouring fp32 in global memory, 8-byte aligned."""
    llvm.inline_asm(
        None,
        [
            pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            *(Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high)),
        ],
        "st.global.v2.f32 [$0], {$1, $2};",
        "l,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dataclass(frozen=True)
class ProxyKL:
    """Static facts: what a variant is compiled for."""

    dtype: str
    dim: int
    num_heads: int
    num_kv_heads: int
    num_selections: int
    proxy_dim: int
    num_proxies: int
    num_proxy_kv_heads: int
    with_value: bool = True
    with_gradients: bool = True
    dense: bool = False
    """Every block up to the query instead of a selection."""

    @property
    def span(self) -> int:
        """KV heads that the heads of one proxy read: their scores are made one after the other."""
        return max(self.num_kv_heads // self.num_proxies, 1)

    @property
    def group(self) -> int:
        """Heads of a proxy that share a KV head."""
        return self.num_heads // self.num_proxies // self.span

    @property
    def rows(self) -> int:
        """Columns of the heads' scores in a tile, `group` of them a query."""
        if self.span > 1:
            return {1: 32, 16: 128}.get(self.group, 64)
        return 64 if self.group <= 2 else 128

    @property
    def width(self) -> int:
        """Columns of one product: a tile has one or two."""
        return min(self.rows, hopper.ROWS)

    @property
    def queries(self) -> int:
        """Of a tile."""
        return self.rows // self.group

    @property
    def columns(self) -> int:
        """Of the proxy's scores in a tile: its queries, or the least that can be summed over."""
        return max(self.queries, 16)

    @property
    def query_stages(self) -> int:
        """Buffers of the heads' queries, a tile each (with the keys, if the heads read several)."""
        return 4 if self.span == 1 and self.group == 2 else 2

    @property
    def proxy_stages(self) -> int:
        """Buffers of the proxy's queries: a tile's are needed until the next tile's scores have been made."""
        return 2 if self.queries == 64 else 4

    def query_of(self, column: Int32) -> Int32:
        """Which of a tile's queries a column of the proxy's scores holds; those past the last hold none."""
        inside = column % 8
        i, lane = inside % 2, inside // 2
        if self.group == 1:
            return column
        if self.group == 4:
            return column - inside + 4 * i + 2 * (lane % 2) + lane // 2
        return column - inside + 4 * i + lane

    def fakes(self) -> tuple:
        """In the order of `__call__`."""
        dtype, tokens, blocks = hopper.DTYPES[self.dtype], cute.sym_int(), cute.sym_int()
        selected = (
            hopper.fake(Int32, (cute.sym_int(), self.num_selections, cute.sym_int()), 4),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (cute.sym_int(), 4)),
            hopper.fake(Int32, (cute.sym_int(),)),
        )
        return (
            hopper.fake(dtype, (tokens, self.num_heads, self.dim)),
            hopper.fake(dtype, (tokens, self.num_kv_heads, self.dim)),
            hopper.fake(dtype, (tokens, self.num_proxies, self.proxy_dim)),
            hopper.fake(dtype, (tokens, self.num_proxy_kv_heads, self.proxy_dim)),
            hopper.fake(Float32, (tokens, self.num_heads)),
            hopper.fake(Float32, (tokens, self.num_proxies)),
            *((None,) * 4 if self.dense else selected),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (tokens,)),
            hopper.fake(Int32, (blocks,)),
            hopper.fake(Int32, (blocks,)),
            hopper.fake(dtype, (cute.sym_int64(), self.proxy_dim)) if self.with_gradients else None,
            hopper.fake(Float32, (cute.sym_int(), BLOCK, self.proxy_dim)) if self.with_gradients else None,
            hopper.fake(Float32, (cute.sym_int(),)) if self.with_value else None,
            Int32(0),
            Int32(0),
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
        q_proxy: cute.Tensor,
        k_proxy: cute.Tensor,
        lse: cute.Tensor,
        lse_proxy: cute.Tensor,
        own_slot: cute.Tensor | None,
        edges: cute.Tensor | None,
        tasks: cute.Tensor | None,
        task_ptr: cute.Tensor | None,
        claims: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        dq_parts: cute.Tensor | None,
        dk_parts: cute.Tensor | None,
        values: cute.Tensor | None,
        window: Int32,
        begin: Int32,
        end: Int32,
        slots: Int32,
        blocks: Int32,
        stream: CUstream,
    ):
        dtype = hopper.DTYPES[self.dtype]
        halves = self.rows // self.width
        layouts = (
            hopper.operand_layout(dtype, self.width, self.dim, self.query_stages * halves),
            hopper.operand_layout(dtype, BLOCK, self.dim, self.query_stages if self.span > 1 else 1),
            hopper.operand_layout(dtype, self.columns, self.proxy_dim, self.proxy_stages),
            hopper.operand_layout(dtype, BLOCK, self.proxy_dim, ITEM_STAGES),
            hopper.operand_layout(dtype, self.columns, BLOCK, 2),
        )
        load_q, t_q = streams.boxes(q, self.group)
        load_qp, t_qp = streams.boxes(q_proxy, 1)
        load_k, t_k = hopper.block_loads(k, layouts[1], (BLOCK, self.dim))
        load_kp, t_kp = hopper.block_loads(k_proxy, layouts[3], (BLOCK, self.proxy_dim))
        self.kernel(
            (load_q, load_k, load_qp, load_kp),
            (t_q, t_k, t_qp, t_kp),
            (lse, lse_proxy, own_slot),
            (edges, tasks, task_ptr, claims, first, starts, ends),
            (dq_parts, dk_parts, values),
            (window, begin, end, slots),
            self.products(dtype),
            layouts,
        ).launch(grid=(blocks, 1, 1), block=(3 * hopper.WARPGROUP, 1, 1), stream=stream, min_blocks_per_mp=1)

    def products(self, dtype: type[cutlass.Numeric]) -> tuple:
        """Keys times queries, of the heads and of the proxy; gradients of the proxy's keys and, transposed, queries."""
        row, column = OperandMajorMode.K, OperandMajorMode.MN
        both = (2, 1, 1)
        make = hopper_helpers.make_trivial_tiled_mma
        return (
            make(dtype, dtype, row, row, Float32, both, (hopper.ROWS, self.width)),
            make(dtype, dtype, row, row, Float32, both, (hopper.ROWS, self.columns)),
            hopper.weighted_sum_of(dtype, self.proxy_dim),
            # 64 columns of the gradient are too few to share: both warpgroups make all of them.
            make(
                dtype, dtype, column, row, Float32, (self.proxy_dim // hopper.ROWS, 1, 1), (hopper.ROWS, self.columns)
            ),
        )

    @cute.kernel
    def kernel(
        self,
        loads: tuple,
        sources: tuple,
        scalars: tuple,
        index: tuple,
        results: tuple,
        numbers: tuple,
        products: tuple,
        layouts: tuple,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator()
        # Each ring's full barriers and its empty ones; items: known, done, and the proxies' keys there; of the heads'
        # keys: full, empty, and that the item is nearly gathered.
        q_bars = memory.allocate_array(Int64, 2 * self.query_stages)
        qp_bars = memory.allocate_array(Int64, 2 * self.proxy_stages)
        bars = memory.allocate_array(Int64, 3 * ITEM_STAGES)
        k_bars = memory.allocate_array(Int64, 3)
        info = memory.allocate_array(Int32, streams.INFO * ITEM_STAGES)
        sums = memory.allocate_array(Float32, 2 * CONSUMERS // 32)
        lses = memory.allocate_array(Float32, self.proxy_stages * self.rows * self.span)
        notes = memory.allocate_array(Int32, self.proxy_stages * 3 * self.columns)
        s_q, s_k, s_qp, s_kp, s_ds = (hopper.allocate(memory, self.dtype, layout) for layout in layouts)
        if thread == 0:
            self.prepare(q_bars, qp_bars, bars, k_bars)
        cute.arch.sync_threads()
        if warp >= 8:
            cute.arch.setmaxregister_decrease(hopper.PRODUCER_REGISTERS)
            if warp == 8:
                self.draw(loads, sources, index, (s_k, s_kp), bars, k_bars, info, numbers)
            elif warp == 9:
                self.gather(loads, sources, index, (s_q, s_k), q_bars, bars, k_bars + 2, info)
            elif warp == 10:
                self.gather_proxy(loads[2], sources[2], index[0], s_qp, qp_bars, bars, info)
            else:
                self.note(scalars, index, (lses, notes), numbers, qp_bars, bars, info)
        else:
            cute.arch.setmaxregister_increase(hopper.CONSUMER_REGISTERS)
            tensors = s_q, s_k, s_qp, s_kp, s_ds
            rings = q_bars, qp_bars, bars, k_bars
            self.compute(results, products, tensors, (lses, notes, sums), rings, info, thread)

    @cute.jit
    def prepare(self, q_bars: cute.Pointer, qp_bars: cute.Pointer, bars: cute.Pointer, k_bars: cute.Pointer):
        """Set up the barriers: one thread of a loading warp arrives, all of `note`, or one of each computing warp."""
        readers = CONSUMERS // 32
        for i in cutlass.range_constexpr(self.query_stages):
            cute.arch.mbarrier_init(q_bars + i, 1)
            cute.arch.mbarrier_init(q_bars + self.query_stages + i, readers)
        for i in cutlass.range_constexpr(self.proxy_stages):
            cute.arch.mbarrier_init(qp_bars + i, 1 + 32)
            cute.arch.mbarrier_init(qp_bars + self.proxy_stages + i, readers)
        for i in cutlass.range_constexpr(ITEM_STAGES):
            cute.arch.mbarrier_init(bars + i, 1)
            cute.arch.mbarrier_init(bars + ITEM_STAGES + i, readers + 3)
            cute.arch.mbarrier_init(bars + 2 * ITEM_STAGES + i, 1)
        cute.arch.mbarrier_init(k_bars, 1)
        cute.arch.mbarrier_init(k_bars + 1, readers)
        cute.arch.mbarrier_init(k_bars + 2, 1)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def draw(
        self,
        loads: tuple,
        sources: tuple,
        index: tuple,
        tensors: tuple,
        bars: cute.Pointer,
        k_bars: cute.Pointer,
        info: cute.Pointer,
        numbers: tuple,
    ):
        """One warp: draw items until none is left; announce each, and load its keys."""
        s_k, s_kp = tensors
        units = self.num_proxies, self.num_proxies // self.num_selections, BLOCK
        n, more = Int32(0), Int32(1)
        while more > 0:
            stage, phase = hopper.place(n, ITEM_STAGES)
            cute.arch.mbarrier_wait(bars + ITEM_STAGES + stage, phase ^ 1)
            cute.arch.mbarrier_wait(k_bars + 2, (n & 1) ^ 1)
            item = self.draw_any(index, numbers) if self.dense else streams.draw(index, numbers[:3], *units)
            more = item[streams.END] - item[streams.BEGIN]
            start = cute.arch.make_warp_uniform(item[streams.START])
            proxy = cute.arch.make_warp_uniform(item[streams.UNIT])
            if cute.arch.lane_idx() == 0:
                streams.announce(info, stage, bars + stage, item)
            cute.arch.sync_warp()
            if more > 0:
                there = bars + 2 * ITEM_STAGES + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(there, BLOCK * self.proxy_dim * 2)
                head = proxy // (self.num_proxies // self.num_proxy_kv_heads)
                shape = (BLOCK, self.proxy_dim)
                hopper.load_block(loads[3], sources[3], s_kp, shape, start, head, stage, there)
                if cutlass.const_expr(self.span == 1):
                    cute.arch.mbarrier_wait(k_bars + 1, (n & 1) ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(k_bars, BLOCK * self.dim * 2)
                    head = proxy // (self.num_proxies // self.num_kv_heads)
                    hopper.load_block(loads[1], sources[1], s_k, (BLOCK, self.dim), start, head, 0, k_bars)
            n += 1

    @cute.jit
    def draw_any(self, index: tuple, numbers: tuple) -> tuple:
        """`streams.draw` without a selection: a block and all of the window's queries that see it, for one proxy.

        They are numbered alike in every window: block, from the first one on, x proxies + proxy.
        """
        _, _, _, claims, first, starts, ends = index
        window, begin, end, _ = numbers
        low = first[begin]
        total = (streams.block_of(first, starts, end - 1, BLOCK) + 1 - low) * self.num_proxies
        drawn, looking = Int32(0), Int32(1)
        here, stop, block = Int32(0), Int32(0), low
        while looking > 0:
            looking = Int32(0)
            if cute.arch.lane_idx() == 0:
                drawn = cute.arch.atomic_add(claims.iterator + window, Int32(1))
            drawn = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(drawn, 0))
            here, stop = Int32(0), Int32(0)
            if drawn < total:
                block = low + drawn // self.num_proxies
                here, stop = cutlass.max(starts[block], begin), end
                # Ids that no document uses have no tokens.
                looking = Int32(starts[block] >= ends[block])
            elif drawn == total + cute.arch.grid_dim()[0] - 1:
                claims[window] = 0
        if stop > here:
            stop = self.end_of(first, here, stop)
        proxy = drawn % self.num_proxies
        number = (block - first[0]) * self.num_proxies + proxy
        return here, stop, proxy, Int32(1), number, starts[block], ends[block] - starts[block], Int32(0)

    @cute.jit
    def end_of(self, first: cute.Tensor, token: Int32, end: Int32) -> Int32:
        """The first token of another document than that of `token`, if that comes before the end."""
        low, high = token, end
        if first[end - 1] == first[token]:
            low = end - 1
        while high - low > 1:
            middle = (low + high) // 2
            if first[middle] == first[token]:
                low = middle
            else:
                high = middle
        return high

    @cute.jit
    def gather(
        self,
        loads: tuple,
        sources: tuple,
        index: tuple,
        tensors: tuple,
        q_bars: cute.Pointer,
        bars: cute.Pointer,
        near: cute.Pointer,
        info: cute.Pointer,
    ):
        """One warp: the queries of each tile for each of the proxy's KV heads, with its keys if there are several."""
        s_q, s_k = tensors
        lane = cute.arch.lane_idx()
        to, what = self.pieces(loads[0], sources[0], s_q, self.group)
        n, base, count = Int32(0), Int32(0), Int32(1)
        while count > 0:
            item_stage, item_phase = hopper.place(n, ITEM_STAGES)
            cute.arch.mbarrier_wait(bars + item_stage, item_phase)
            item = streams.read(info, item_stage)
            count = item[streams.END] - item[streams.BEGIN]
            tiles = cute.ceil_div(count, self.queries)
            if tiles > 0:
                # A tile's edges are asked for before the last one's queries are.
                following = self.edges_of(index[0], item, 0, lane, False)
                for j in cutlass.range(tiles, unroll=1):
                    edge = following
                    following = self.edges_of(index[0], item, j + 1, lane, False)
                    ask_if_near(near, j, tiles)
                    for s in cutlass.range(self.span, unroll=1):
                        turn = (base + j) * self.span + s
                        stage, phase = hopper.place(turn, self.query_stages)
                        cute.arch.mbarrier_wait(q_bars + self.query_stages + stage, phase ^ 1)
                        size = self.rows * self.dim * 2 + (BLOCK * self.dim * 2 if self.span > 1 else 0)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(q_bars + stage, size)
                        unit = item[streams.UNIT] * self.span + s
                        if cutlass.const_expr(self.span > 1):
                            start = cute.arch.make_warp_uniform(item[streams.START])
                            shape, head = (BLOCK, self.dim), cute.arch.make_warp_uniform(unit)
                            hopper.load_block(loads[1], sources[1], s_k, shape, start, head, stage, q_bars + stage)
                        self.boxes(loads[0], to, what, edge, unit, stage, q_bars + stage)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars + ITEM_STAGES + item_stage)
            base += tiles
            n += 1

    @cute.jit
    def boxes(
        self,
        load: cute.CopyAtom,
        to: cute.Tensor,
        what: cute.Tensor,
        edge: tuple,
        unit: Int32,
        stage: Int32,
        bar: cute.Pointer,
    ):
        """Ask for the heads' rows of the queries of a tile."""
        halves = self.rows // self.width
        most = self.queries // halves
        for half in cutlass.range_constexpr(halves):
            for chunk in cutlass.range_constexpr(cute.ceil_div(most, 32)):
                at = half * most + chunk * 32
                for i in cutlass.range(min(most, 32), unroll=4):
                    query = cute.arch.shuffle_sync(edge[at // 32], at % 32 + i) >> SLOT_BITS
                    place = cute.arch.make_warp_uniform(query * (self.num_proxies * self.span) + unit)
                    for h in cutlass.range_constexpr(self.dim // 64):
                        target = to[None, chunk * 32 + i, h, stage * halves + half]
                        cute.copy(load, what[None, place, h], target, tma_bar_ptr=bar)

    @cute.jit
    def pieces(self, load: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, group: cutlass.Constexpr):
        """A ring of buffers and the rows of a tensor, cut into boxes of `group` rows and 64 columns."""
        return cpasync.tma_partition(
            load,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.flat_divide(target, (group, 64)), 0, 2),
            cute.group_modes(cute.local_tile(source, (group, 64), (None, None)), 0, 2),
        )

    @cute.jit
    def edges_of(self, edges: cute.Tensor | None, item: tuple, tile: Int32, lane: Int32, by_column: cutlass.Constexpr):
        """A tile's edges, one of 32 a lane: by query, or by column of the proxy's scores."""
        found = []
        for chunk in cutlass.range_constexpr(cute.ceil_div(self.columns if by_column else self.queries, 32)):
            at = chunk * 32 + lane
            if cutlass.const_expr(by_column):
                at = self.query_of(at)
            at += item[streams.BEGIN] + tile * self.queries
            if cutlass.const_expr(self.dense):
                found.append(cutlass.min(at, item[streams.END] - 1) << SLOT_BITS)
            else:
                found.append(streams.edge_at(edges, item, at))
        return tuple(found)

    @cute.jit
    def gather_proxy(
        self,
        load: cute.CopyAtom,
        source: cute.Tensor,
        edges: cute.Tensor,
        s_qp: cute.Tensor,
        qp_bars: cute.Pointer,
        bars: cute.Pointer,
        info: cute.Pointer,
    ):
        """One warp: the proxy's queries of each tile, in the order of its columns."""
        lane = cute.arch.lane_idx()
        to, what = self.pieces(load, source, s_qp, 1)
        n, base, count = Int32(0), Int32(0), Int32(1)
        while count > 0:
            item_stage, item_phase = hopper.place(n, ITEM_STAGES)
            cute.arch.mbarrier_wait(bars + item_stage, item_phase)
            item = streams.read(info, item_stage)
            count = item[streams.END] - item[streams.BEGIN]
            tiles = cute.ceil_div(count, self.queries)
            if tiles > 0:
                following = self.edges_of(edges, item, 0, lane, True)
                for j in cutlass.range(tiles, unroll=1):
                    edge = following
                    following = self.edges_of(edges, item, j + 1, lane, True)
                    stage, phase = hopper.place(base + j, self.proxy_stages)
                    cute.arch.mbarrier_wait(qp_bars + self.proxy_stages + stage, phase ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(qp_bars + stage, self.columns * self.proxy_dim * 2)
                    for chunk in cutlass.range_constexpr(cute.ceil_div(self.columns, 32)):
                        for i in cutlass.range(min(self.columns, 32), unroll=4):
                            query = cute.arch.shuffle_sync(edge[chunk], i) >> SLOT_BITS
                            place = query * self.num_proxies + item[streams.UNIT]
                            place = cute.arch.make_warp_uniform(place)
                            for h in cutlass.range_constexpr(self.proxy_dim // 64):
                                target = to[None, chunk * 32 + i, h, stage]
                                cute.copy(load, what[None, place, h], target, tma_bar_ptr=qp_bars + stage)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars + ITEM_STAGES + item_stage)
            base += tiles
            n += 1

    @cute.jit
    def note(
        self,
        scalars: tuple,
        index: tuple,
        places: tuple,
        numbers: tuple,
        qp_bars: cute.Pointer,
        bars: cute.Pointer,
        info: cute.Pointer,
    ):
        """One warp: the log-sum-exps of each tile, and for each column the last key it sees and its line of results."""
        lane = cute.arch.lane_idx()
        n, base, count = Int32(0), Int32(0), Int32(1)
        while count > 0:
            item_stage, item_phase = hopper.place(n, ITEM_STAGES)
            cute.arch.mbarrier_wait(bars + item_stage, item_phase)
            item = streams.read(info, item_stage)
            count = item[streams.END] - item[streams.BEGIN]
            tiles = cute.ceil_div(count, self.queries)
            if tiles > 0:
                own = Int32(0)
                if cutlass.const_expr(self.dense):
                    first, starts = index[4:6]
                    start = item[streams.START]
                    own = (start - starts[first[start]]) // BLOCK
                following = self.edges_of(index[0], item, 0, lane, False)
                for j in cutlass.range(tiles, unroll=1):
                    edge = following
                    following = self.edges_of(index[0], item, j + 1, lane, False)
                    stage, phase = hopper.place(base + j, self.proxy_stages)
                    cute.arch.mbarrier_wait(qp_bars + self.proxy_stages + stage, phase ^ 1)
                    heads = places[0] + stage * (self.rows * self.span)
                    self.note_heads(scalars[0], heads, edge, item[streams.UNIT], lane)
                    columns = places[1] + stage * (3 * self.columns)
                    self.note_columns(scalars, columns, edge, item, own, count - j * self.queries, numbers, lane)
                    cute.arch.mbarrier_arrive(qp_bars + stage)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars + ITEM_STAGES + item_stage)
            base += tiles
            n += 1

    @cute.jit
    def edge_of(self, edge: tuple, chunk: cutlass.Constexpr, query: Int32) -> Int32:
        """The edge of one of a tile's queries, each lane's own: the lane's number in `chunk`, if there are several."""
        if cutlass.const_expr(self.group == 1):
            return edge[chunk]
        return cute.arch.shuffle_sync(edge[0], query % 32)

    @cute.jit
    def note_heads(self, lse: cute.Tensor, heads: cute.Pointer, edge: tuple, proxy: Int32, lane: Int32):
        """-log2 of each head's sum, and of the number of heads, in the order of the columns of their scores."""
        many = self.num_heads // self.num_proxies
        for s in cutlass.range_constexpr(self.span):
            for chunk in cutlass.range_constexpr(self.rows // 32):
                row = chunk * 32 + lane
                query = self.edge_of(edge, chunk, row // self.group) >> SLOT_BITS
                head = proxy * many + s * self.group + row % self.group
                value = (lse.iterator + (Int64(query) * self.num_heads + head)).load()
                (heads + (s * self.rows + row)).store(value * -math.log2(math.e) - math.log2(many))

    @cute.jit
    def note_columns(
        self,
        scalars: tuple,
        columns: cute.Pointer,
        edge: tuple,
        item: tuple,
        own: Int32,
        left: Int32,
        numbers: tuple,
        lane: Int32,
    ):
        """-log2 of the proxy's sum; the last key of the block that the query sees, -1 without query; the line or -1.

        `own` is the slot of an own item's queries, if there is no selection.
        """
        _, lse_proxy, own_slot = scalars
        _, begin, _, slots = numbers
        proxy = item[streams.UNIT]
        for chunk in cutlass.range_constexpr(cute.ceil_div(self.columns, 32)):
            column = chunk * 32 + lane
            inside = self.query_of(column)
            found = self.edge_of(edge, chunk, inside)
            query, slot = found >> SLOT_BITS, found & ((1 << SLOT_BITS) - 1)
            limit = Int32(FAR)
            if cutlass.const_expr(self.dense):
                slot, limit = own, query - item[streams.START]
            elif item[streams.OWN] > 0:
                sequence = own_slot.shape[2]
                selection = proxy // (self.num_proxies // self.num_selections)
                row = Int64(query // sequence * self.num_selections + selection) * sequence + query % sequence
                slot = (own_slot.iterator + row).load()
                limit = query - item[streams.START]
            there = (inside < self.queries) & (inside < left) & (slot >= 0)
            line = ((query - begin) * self.num_proxies + proxy) * slots + slot
            value = (lse_proxy.iterator + (Int64(query) * self.num_proxies + proxy)).load()
            if column < self.columns:
                words = cute.recast_ptr(columns, dtype=Float32)
                (words + column).store(value * -math.log2(math.e))
                (columns + (self.columns + column)).store(limit if there else Int32(-1))
                (columns + (2 * self.columns + column)).store(line if there else Int32(-1))

    @cute.jit
    def compute(
        self,
        results: tuple,
        products: tuple,
        tensors: tuple,
        places: tuple,
        rings: tuple,
        info: cute.Pointer,
        thread: Int32,
    ):
        """The two warpgroups: every tile of every item, each for half of the block's keys."""
        s_kp = tensors[3]
        bars, k_bars = rings[2:]
        which = cute.arch.make_warp_uniform(thread // hopper.WARPGROUP)
        operands = self.operands(products, tensors, which)
        n, base, count = Int32(0), Int32(0), Int32(1)
        while count > 0:
            stage, phase = hopper.place(n, ITEM_STAGES)
            cute.arch.mbarrier_wait(bars + stage, phase)
            item = streams.read(info, stage)
            count = item[streams.END] - item[streams.BEGIN]
            tiles = cute.ceil_div(count, self.queries)
            if tiles > 0:
                cute.arch.mbarrier_wait(bars + 2 * ITEM_STAGES + stage, phase)
                if cutlass.const_expr(self.span == 1):
                    cute.arch.mbarrier_wait(k_bars, n & 1)
                if item[streams.LENGTH] < BLOCK:
                    self.clear_rows(s_kp, stage, item[streams.LENGTH], thread)
                value = cute.make_rmem_tensor(1, Float32)
                value[0] = Float32(0.0)
                work = item, base, tiles, stage, n
                self.run(results, products, operands, tensors[4], places, rings, work, value, which)
                if cutlass.const_expr(self.with_value):
                    self.store_value(results[2], places[2] + (n & 1) * (CONSUMERS // 32), value[0], item, thread)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars + ITEM_STAGES + stage)
            base += tiles
            n += 1

    @cute.jit
    def operands(self, products: tuple, tensors: tuple, which: Int32) -> tuple:
        """What a warpgroup multiplies: (a, b) of each product; the third one's a are registers."""
        s_q, s_k, s_qp, s_kp, s_ds = tensors
        heads, proxy, keys, queries = products
        part = heads.get_slice(which * hopper.WARPGROUP)
        first = heads.make_fragment_A(part.partition_A(s_k)), heads.make_fragment_B(part.partition_B(s_q))
        part = proxy.get_slice(which * hopper.WARPGROUP)
        second = proxy.make_fragment_A(part.partition_A(s_kp)), proxy.make_fragment_B(part.partition_B(s_qp))
        transposed = cute.make_tensor(s_qp.iterator, cute.select(s_qp.layout, mode=[1, 0, 2]))
        part = keys.get_slice(0)
        third = (
            keys.make_fragment_A(keys.partition_shape_A((hopper.ROWS, self.columns))),
            keys.make_fragment_B(part.partition_B(transposed)),
        )
        transposed = cute.make_tensor(s_kp.iterator, cute.select(s_kp.layout, mode=[1, 0, 2]))
        part = queries.get_slice(which * hopper.WARPGROUP if self.proxy_dim > hopper.ROWS else 0)
        fourth = queries.make_fragment_A(part.partition_A(transposed)), queries.make_fragment_B(part.partition_B(s_ds))
        return first, second, third, fourth

    @cute.jit
    def clear_rows(self, s_kp: cute.Tensor, stage: Int32, length: Int32, thread: Int32):
        """Zeros for the proxies' keys after the document's end, which belong to others: 0 x NaN would be NaN."""
        plain = cute.recast_ptr(s_kp.iterator, cute.make_swizzle(0, 4, 3), dtype=Int32)
        line = 32
        lines = BLOCK * (self.proxy_dim // 64)
        for x in cutlass.range(thread, lines * line, CONSUMERS, unroll=1):
            if x // line % BLOCK >= length:
                (plain + (stage * (lines * line) + x)).store(Int32(0))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=CONSUMERS)

    @cute.jit
    def run(
        self,
        results: tuple,
        products: tuple,
        operands: tuple,
        s_ds: cute.Tensor,
        places: tuple,
        rings: tuple,
        work: tuple,
        value: cute.Tensor,
        which: Int32,
    ):
        """The tiles of an item: the scores of one while the gradients by the last are multiplied out."""
        item, base, tiles = work[:3]
        heads, proxy, keys, queries = products
        shape = heads.partition_shape_C((2 * hopper.ROWS, self.width))
        scores = tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(self.rows // self.width))
        student = cute.make_rmem_tensor(proxy.partition_shape_C((2 * hopper.ROWS, self.columns)), Float32)
        dk = cute.make_rmem_tensor(keys.partition_shape_C((hopper.ROWS, self.proxy_dim)), Float32)
        dq = cute.make_rmem_tensor(queries.partition_shape_C((self.proxy_dim, self.columns)), Float32)
        teacher = cute.make_rmem_tensor(self.columns // 8 * 4, Float32)
        words = cute.recast_tensor(operands[2][0], Int32)
        following = cute.make_rmem_tensor(words.shape, Int32)
        self.begin_keys(dk, results[1], item[streams.ITEM], which)
        self.clear(teacher)
        outcome = student, teacher, value, s_ds, places, which
        self.score(products, operands, scores, student, rings, work, base)
        self.judge(products, operands, scores, following, outcome, rings, work, base, 0)
        for turn in cutlass.range(base + 1, base + tiles, unroll=1):
            if cutlass.const_expr(self.with_gradients):
                self.move(following, words)
            self.score(products, operands, scores, student, rings, work, turn)
            if cutlass.const_expr(self.with_gradients):
                self.differentiate(products, operands, dk, dq, work, turn - 1)
            self.judge(
                products, operands, scores, following, outcome, rings, work, turn, 2 if self.with_gradients else 0
            )
            warpgroup.wait_group(0)
            if cutlass.const_expr(self.with_gradients):
                self.store(dq, results[0], places[1], turn - 1, which)
            self.release_proxy(rings, turn - 1)
        last = base + tiles - 1
        if cutlass.const_expr(self.with_gradients):
            self.move(following, words)
            self.differentiate(products, operands, dk, dq, work, last)
            warpgroup.wait_group(0)
            self.store(dq, results[0], places[1], last, which)
            self.store_keys(dk, results[1], item[streams.ITEM], which)
        self.release_proxy(rings, last)

    @cute.jit
    def clear(self, fragment: cute.Tensor):
        for x in cutlass.range_constexpr(cute.size(fragment)):
            fragment[x] = Float32(0.0)

    @cute.jit
    def move(self, source: cute.Tensor, target: cute.Tensor):
        for x in cutlass.range_constexpr(cute.size(target)):
            target[x] = own_register(source[x])

    @cute.jit
    def score(
        self,
        products: tuple,
        operands: tuple,
        scores: tuple,
        student: cute.Tensor,
        rings: tuple,
        work: tuple,
        turn: Int32,
    ):
        """Wait for a tile's queries and start their products with the keys: the heads', then the proxy's."""
        q_bars, qp_bars = rings[:2]
        (heads_a, heads_b), (proxy_a, proxy_b) = operands[:2]
        proxy_stage, phase = hopper.place(turn, self.proxy_stages)
        cute.arch.mbarrier_wait(qp_bars + proxy_stage, phase)
        if cutlass.const_expr(self.span == 1):
            stage, phase = hopper.place(turn, self.query_stages)
            cute.arch.mbarrier_wait(q_bars + stage, phase)
            halves = len(scores)
            for half in cutlass.range_constexpr(halves):
                b = heads_b[None, None, None, stage * halves + half]
                hopper.multiply(products[0], scores[half], heads_a[None, None, None, 0], b)
        a = proxy_a[None, None, None, work[3]]
        hopper.multiply(products[1], student, a, proxy_b[None, None, None, proxy_stage])

    @cute.jit
    def judge(
        self,
        products: tuple,
        operands: tuple,
        scores: tuple,
        words: cute.Tensor,
        outcome: tuple,
        rings: tuple,
        work: tuple,
        turn: Int32,
        running: cutlass.Constexpr,
    ):
        """A tile's scores become value and gradient to the proxy's scores; `running`: products started since."""
        item = work[0]
        student, teacher, value, s_ds, places, which = outcome
        halves = len(scores)
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.span > 1):
            self.judge_spans(products, operands, scores, words, outcome, rings, turn)
        for half in cutlass.range_constexpr(halves if self.span == 1 else 0):
            warpgroup.wait_group(running + (halves - half if half + 1 < halves else 0))
            if cutlass.const_expr(half + 1 == halves):
                stage = turn % self.query_stages
                hopper.arrive_if(lane == 0, rings[0] + self.query_stages + stage)
                done = (lane == 0) & (turn + 1 == work[1] + work[2])
                hopper.arrive_if(done, rings[3] + 1)
            # Always so, which the compiler cannot know: without a branch it would end the other products first.
            if item[streams.ZERO] == 0:
                self.weigh(scores[half], teacher, places[0], turn % self.proxy_stages * self.rows, half)
                if cutlass.const_expr(half + 1 == halves):
                    self.differ(student, teacher, words, value, s_ds, places[1], turn, which)

    @cute.jit
    def weigh(
        self, scores: cute.Tensor, teacher: cute.Tensor, lses: cute.Pointer, offset: Int32, half: cutlass.Constexpr
    ):
        """Add the mean over heads of the probabilities of `width` columns, into the columns of the proxy's scores."""
        lane = cute.arch.lane_idx()
        scale = math.log2(math.e) / math.sqrt(self.dim)
        blocks = self.width // 8
        sums = [[], []]
        for n in cutlass.range_constexpr(blocks):
            less = hopper.load_pair(lses + (offset + (half * self.width + 8 * n) + lane % 4 * 2))
            for j in cutlass.range_constexpr(2):
                pair = [cute.math.exp2(scores[4 * n + 2 * j + i] * scale + less[i], fastmath=True) for i in range(2)]
                if cutlass.const_expr(self.group == 1):
                    for i in cutlass.range_constexpr(2):
                        self.put(teacher, half * 4 * blocks + 4 * n + 2 * j + i, pair[i])
                else:
                    sums[j].append(pair[0] + pair[1])
        if cutlass.const_expr(self.group > 1):
            for j in cutlass.range_constexpr(2):
                means = self.gather_heads(sums[j], lane)
                for m in cutlass.range_constexpr(len(means)):
                    k = half * len(means) + m
                    self.put(teacher, k // 2 * 4 + 2 * j + k % 2, means[m])

    @cute.jit
    def judge_spans(
        self,
        products: tuple,
        operands: tuple,
        scores: tuple,
        words: cute.Tensor,
        outcome: tuple,
        rings: tuple,
        turn: Int32,
    ):
        """The same where a proxy's heads read several KV heads, one after the other, with keys of their own."""
        student, teacher, value, s_ds, places, which = outcome
        heads_a, heads_b = operands[0]
        halves = len(scores)
        warpgroup.wait_group(0)
        self.clear(teacher)
        for s in cutlass.range(self.span, unroll=1):
            stage, phase = hopper.place(turn * self.span + s, self.query_stages)
            cute.arch.mbarrier_wait(rings[0] + stage, phase)
            for half in cutlass.range_constexpr(halves):
                b = heads_b[None, None, None, stage * halves + half]
                hopper.multiply(products[0], scores[half], heads_a[None, None, None, stage], b)
            warpgroup.wait_group(0)
            hopper.arrive_if(cute.arch.lane_idx() == 0, rings[0] + self.query_stages + stage)
            offset = (turn % self.proxy_stages * self.span + s) * self.rows
            for half in cutlass.range_constexpr(halves):
                self.weigh(scores[half], teacher, places[0], offset, half)
        self.differ(student, teacher, words, value, s_ds, places[1], turn, which)

    @cute.jit
    def put(self, teacher: cute.Tensor, x: cutlass.Constexpr, mean: Float32):
        """With one KV head it is the whole mean."""
        teacher[x] = mean if cutlass.const_expr(self.span == 1) else teacher[x] + mean

    @cute.jit
    def gather_heads(self, values: list, lane: Int32) -> list:
        """Sums of two columns of each 8, of one row, to sums over the columns of a query, as `query_of` has them."""
        if cutlass.const_expr(self.group == 16):
            values = [values[2 * u] + values[2 * u + 1] for u in range(len(values) // 2)]
        for bit in cutlass.range_constexpr(1, 3):
            if cutlass.const_expr(self.group >= 2 << bit):
                mine = lane & bit != 0
                halved = []
                for u in cutlass.range_constexpr(len(values) // 2):
                    low, high = values[2 * u], values[2 * u + 1]
                    got = cute.arch.shuffle_sync_bfly(low if mine else high, offset=bit)
                    halved.append((high if mine else low) + got)
                values = halved
        return values

    @cute.jit
    def differ(
        self,
        student: cute.Tensor,
        teacher: cute.Tensor,
        words: cute.Tensor,
        value: cute.Tensor,
        s_ds: cute.Tensor,
        notes: cute.Pointer,
        turn: Int32,
        which: Int32,
    ):
        """p - P of a tile, rounded, for the products; adds to the thread's part of the value."""
        thread, _, _ = cute.arch.thread_idx()
        scale = math.log2(math.e) / math.sqrt(self.proxy_dim)
        key = which * hopper.ROWS + hopper.row_of(thread)
        notes += turn % self.proxy_stages * (3 * self.columns)
        less = cute.recast_ptr(notes, dtype=Float32)
        for n in cutlass.range_constexpr(self.columns // 8):
            at = 8 * n + thread % 4 * 2
            sums = hopper.load_pair(less + at)
            limits = load_words(notes + (self.columns + at))
            for j in cutlass.range_constexpr(2):
                pair = []
                for i in cutlass.range_constexpr(2):
                    x = 4 * n + 2 * j + i
                    hidden = key + 8 * j > limits[i]
                    log = Float32(NEVER) if hidden else student[x] * scale + sums[i]
                    mean = Float32(0.0) if hidden else teacher[x]
                    if cutlass.const_expr(self.with_value):
                        known = cute.math.log2(cute.arch.fmax(mean, Float32(LEAST)), fastmath=True)
                        value[0] += mean * (known - log)
                    pair.append((cute.math.exp2(log, fastmath=True) - mean) * SCORE_SCALE[self.dtype])
                words[2 * n + j] = hopper.pack_halves(pair[0], pair[1], self.dtype)
        if cutlass.const_expr(self.with_gradients):
            self.spread(words, s_ds, turn, which)

    @cute.jit
    def spread(self, words: cute.Tensor, s_ds: cute.Tensor, turn: Int32, which: Int32):
        """The gradient to a tile's scores where both warpgroups read it: a row for each column, keys along it."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        plain = cute.recast_ptr(s_ds.iterator, cute.make_swizzle(0, 4, 3))
        panel = plain + ((turn & 1) * 2 + which) * (self.columns * 64)
        # Lane l gives the address of row l % 8 of matrix l // 8: two of these are the keys of a warp.
        chunk = (thread % hopper.WARPGROUP // 32 * 2 + lane // 8 % 2) ^ (lane % 8)
        target = panel + ((lane // 16 * 8 + lane % 8) * 64 + chunk * 8)
        for n in cutlass.range_constexpr(0, self.columns // 8, 2):
            four = [words[2 * n + w] for w in range(4)]
            primitives.stmatrix(target + n * 8 * 64, four, primitives.MMALayout.COL)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def differentiate(
        self, products: tuple, operands: tuple, dk: cute.Tensor, dq: cute.Tensor, work: tuple, turn: Int32
    ):
        """Start the products of a tile's gradient with its queries, added to the keys', and with the keys."""
        (keys_a, keys_b), (queries_a, queries_b) = operands[2:]
        stage = turn % self.proxy_stages
        hopper.accumulate(products[2], dk, keys_a, keys_b[None, None, None, stage])
        # Both warpgroups have written their keys' part; and have read what the next tile's will replace.
        cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=CONSUMERS)
        a, b = queries_a[None, None, None, work[3]], queries_b[None, None, None, turn & 1]
        hopper.multiply(products[3], dq, a, b)

    @cute.jit
    def store(self, dq: cute.Tensor, parts: cute.Tensor, notes: cute.Pointer, turn: Int32, which: Int32):
        """A tile's gradients to the queries, transposed: a thread has columns d and d + 8, which share a word.

        Word v of a line holds columns v // 8 * 16 + v % 8 and 8 more.
        """
        thread, _, _ = cute.arch.thread_idx()
        factor = PART_SCALE[self.dtype] / SCORE_SCALE[self.dtype]
        notes += turn % self.proxy_stages * (3 * self.columns) + 2 * self.columns
        word = thread % hopper.WARPGROUP // 32 * 8 + thread % 32 // 4
        shared = self.proxy_dim > hopper.ROWS
        place = parts.iterator + 2 * (word + (which * (hopper.ROWS // 2) if shared else 0))
        for n in cutlass.range_constexpr(self.columns // 8):
            lines = load_words(notes + (8 * n + thread % 4 * 2))
            for i in cutlass.range_constexpr(2):
                both = hopper.pack_halves(dq[4 * n + i] * factor, dq[4 * n + 2 + i] * factor, self.dtype)
                valid = lines[i] >= 0
                if cutlass.const_expr(not shared):
                    valid = valid & (which == n % 2)
                store_word_if(valid, place + Int64(lines[i]) * self.proxy_dim, both)

    @cute.jit
    def release_proxy(self, rings: tuple, turn: Int32):
        """What is known of a tile's queries has been read."""
        cute.arch.sync_warp()
        bar = rings[1] + self.proxy_stages + turn % self.proxy_stages
        hopper.arrive_if(cute.arch.lane_idx() == 0, bar)

    @cute.jit
    def store_keys(self, dk: cute.Tensor, parts: cute.Tensor, item: Int32, which: Int32):
        """An item's gradient to its keys."""
        thread, _, _ = cute.arch.thread_idx()
        factor = 1.0 / SCORE_SCALE[self.dtype]
        row = which * hopper.ROWS + hopper.row_of(thread)
        for j in cutlass.range_constexpr(2):
            line = parts.iterator + (Int64(item) * BLOCK + row + 8 * j) * self.proxy_dim + thread % 4 * 2
            for n in cutlass.range_constexpr(self.proxy_dim // 8):
                x = 4 * n + 2 * j
                store_pair(line + 8 * n, dk[x] * factor, dk[x + 1] * factor)

    @cute.jit
    def begin_keys(self, dk: cute.Tensor, parts: cute.Tensor, item: Int32, which: Int32):
        """Nothing, or what earlier windows gave: without a selection a block has the same item in each."""
        thread, _, _ = cute.arch.thread_idx()
        row = which * hopper.ROWS + hopper.row_of(thread)
        for j in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(self.proxy_dim // 8):
                for i in cutlass.range_constexpr(2):
                    x = 4 * n + 2 * j + i
                    dk[x] = Float32(0.0)
                    if cutlass.const_expr(self.dense and self.with_gradients):
                        column = thread % 4 * 2 + 8 * n + i
                        at = (Int64(item) * BLOCK + row + 8 * j) * self.proxy_dim + column
                        dk[x] = (parts.iterator + at).load() * SCORE_SCALE[self.dtype]

    @cute.jit
    def store_value(self, values: cute.Tensor, sums: cute.Pointer, value: Float32, item: tuple, thread: Int32):
        """The sum over an item; `sums` of the last item may still be read, so that they alternate."""
        for i in cutlass.range_constexpr(5):
            value += cute.arch.shuffle_sync_bfly(value, offset=1 << i)
        if thread % 32 == 0:
            (sums + thread // 32).store(value)
        cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=CONSUMERS)
        if thread == 0:
            total = Float32(0.0)
            for i in cutlass.range_constexpr(CONSUMERS // 32):
                total += (sums + i).load()
            total *= math.log(2)
            if cutlass.const_expr(self.dense):
                total += values[item[streams.ITEM]]
            values[item[streams.ITEM]] = total


def variants() -> list[ProxyKL]:
    """Every variant that the package is tested with."""
    shapes = [(16, 2, 4, 4, 1), (16, 2, 1, 4, 4), (8, 2, 4, 4, 2), (4, 2, 4, 4, 1), (16, 1, 1, 1, 1), (16, 2, 2, 2, 1)]
    wide = [(16, 2, 1, 1, 1), (16, 4, 2, 2, 1), (8, 4, 1, 1, 1), (32, 2, 1, 1, 1), (4, 4, 1, 1, 1)]
    made = [
        ProxyKL(dtype, dim, *shape[:3], proxy_dim, *shape[3:])
        for dtype in hopper.DTYPES
        for dim in (64, 128)
        for proxy_dim in (64, 128)
        for shape in shapes + (wide if dim == proxy_dim else [])
    ]
    flags = [(True, False), (False, True), (True, True, True), (True, False, True)]
    made += [ProxyKL("bfloat16", 128, 16, 2, 4, 128, 4, 1, *some) for some in flags]
    return [*made, ProxyKL("float16", 128, 16, 2, 1, 128, 1, 1, dense=True)]
