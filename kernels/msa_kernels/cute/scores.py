"""Block scores: the largest scaled dot product of each query of a proxy with the visible keys of each block.

A thread block holds 256 rows, queries x proxies that share a key head, and walks over their key blocks, which a
loading warp brings in by TMA; where there are fewer tiles of rows than multiprocessors, several thread blocks share a
tile's key blocks. Only the maximum of a block is kept (no exponentials). Rows of several documents may meet in one
thread block: a row takes what lies between its document's first block and its own.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from jaxtyping import Float
from jaxtyping import Float32 as Scalars
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute import hopper
from msa_kernels.cute.compile import load

TILES = 4
"""Tiles of 64 rows in a thread block, two a warpgroup."""
STAGES = 4


def score(
    q_proxy: Float[Tensor, "batch sequence proxy proxy_dim"],
    k_proxy: Float[Tensor, "batch sequence proxy_kv_head proxy_dim"],
    first: Ids[Tensor, "token"],
    starts: Ids[Tensor, "global_block"],
    begin: int,
    end: int,
    *,
    block_size: int,
    blocks: int,
) -> Scalars[Tensor, "block row"]:
    """Scores of tokens `begin` to `end` (of batch x sequence): row (token - begin) * num_proxies + proxy.

    `first` and `starts` are those of `layout.make_layout`, `blocks` at least the blocks of the longest document up to
    `end`. NaN where any visible score of a block is; what lies outside first to own block is not written. ValueError
    for more than 256 proxies a key head.
    """
    proxies, dim = q_proxy.shape[2:]
    heads = k_proxy.shape[2]
    if proxies // heads > TILES * hopper.ROWS:
        most = TILES * hopper.ROWS
        raise ValueError(
            f"{proxies} proxies share {heads} key heads; at most {most} may share one, or MSA_KERNELS=flex"
        )
    scores = torch.empty(blocks, (end - begin) * proxies, dtype=torch.float32, device=q_proxy.device)
    kernel = Scores(str(q_proxy.dtype).removeprefix("torch."), dim, block_size, proxies, heads)
    tiles = -(-(end - begin) // kernel.queries) * heads
    # Enough of them that the last query tiles, which see most blocks, do not outlast the rest.
    parts = -(-15 * hopper.processors(q_proxy.device) // (8 * tiles))
    load(kernel)(q_proxy.flatten(0, 1), k_proxy.flatten(0, 1), first, starts, scores, begin, end, parts)
    return scores


@dataclass(frozen=True)
class Scores:
    """Static facts: what a variant is compiled for."""

    dtype: str
    proxy_dim: int
    block_size: int
    num_proxies: int
    num_proxy_kv_heads: int

    @property
    def group(self) -> int:
        """Proxies that share a key head."""
        return self.num_proxies // self.num_proxy_kv_heads

    @property
    def queries(self) -> int:
        """Of a thread block."""
        return TILES * hopper.ROWS // self.group

    def fakes(self) -> tuple:
        """q_proxy (token, proxy, dim), k_proxy (token, head, dim), first, starts, scores (block, row), begin, end."""
        dtype, tokens = hopper.DTYPES[self.dtype], cute.sym_int()
        return (
            hopper.fake(dtype, (tokens, self.num_proxies, self.proxy_dim)),
            hopper.fake(dtype, (tokens, self.num_proxy_kv_heads, self.proxy_dim)),
            hopper.fake(Int32, (tokens,)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Float32, (cute.sym_int(), cute.sym_int64())),
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
        first: cute.Tensor,
        starts: cute.Tensor,
        scores: cute.Tensor,
        begin: Int32,
        end: Int32,
        parts: Int32,
        stream: CUstream,
    ):
        dtype = hopper.DTYPES[self.dtype]
        layout_q = hopper.operand_layout(dtype, hopper.ROWS, self.proxy_dim, TILES)
        layout_k = hopper.operand_layout(dtype, self.block_size, self.proxy_dim, STAGES)
        load, keys = hopper.block_loads(k, layout_k, (self.block_size, self.proxy_dim))
        tiles = cute.ceil_div(end - begin, self.queries)
        mma = hopper.product_of(dtype, self.block_size)
        layouts = layout_q, layout_k
        self.kernel(q, load, keys, first, starts, scores, begin, end, parts, mma, layouts).launch(
            grid=(tiles * self.num_proxy_kv_heads * parts, 1, 1),
            block=(3 * hopper.WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        load: cute.CopyAtom,
        keys: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        scores: cute.Tensor,
        begin: Int32,
        end: Int32,
        parts: Int32,
        mma: cute.TiledMma,
        layouts: tuple,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place, _, _ = cute.arch.block_idx()
        places, _, _ = cute.arch.grid_dim()
        part, place, places = place % parts, place // parts, places // parts
        head, tile = place % self.num_proxy_kv_heads, (places - 1 - place) // self.num_proxy_kv_heads
        # Late queries see most blocks: the longest work starts first.
        token = begin + tile * self.queries
        last = cutlass.min(token + self.queries, end) - 1
        memory = cutlass.memory.SmemAllocator()
        # Buffers of keys: full and empty.
        bars = memory.allocate_array(Int64, 2 * STAGES)
        s_q, s_k = (hopper.allocate(memory, self.dtype, layout) for layout in layouts)
        if warp == 0:
            self.initialise(bars)
        cute.arch.sync_threads()
        oldest = first[token]
        count = self.own(first, starts, last) - oldest + 1
        # This thread block's part of the blocks that the tile sees; none if there are fewer blocks than parts.
        share = cute.ceil_div(count, parts)
        oldest, count = oldest + part * share, cutlass.min(share, count - part * share)
        if warp >= 8:
            cute.arch.setmaxregister_decrease(hopper.PRODUCER_REGISTERS)
            if warp == 8:
                self.produce(load, keys, starts, s_k, bars, head, oldest, count)
        else:
            cute.arch.setmaxregister_increase(hopper.CONSUMER_REGISTERS)
            rows, threads = TILES * hopper.ROWS, 2 * hopper.WARPGROUP
            proxy = head * self.group
            hopper.copy_rows(s_q, 0, q, self.proxy_dim, rows, threads, thread, self.group, token, last, proxy)
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=threads)
            self.consume(first, starts, scores, mma, s_q, s_k, bars, (token, last, begin, proxy, oldest, count))

    @cute.jit
    def initialise(self, bars: cute.Pointer):
        """By one warp: buffers are filled by one arrival, and free when every warp has read them."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(bars + i, 1)
                cute.arch.mbarrier_init(bars + STAGES + i, 2 * hopper.WARPGROUP // 32)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def own(self, first: cute.Tensor, starts: cute.Tensor, token: Int32) -> Int32:
        """The global id of a token's own block."""
        oldest = first[token]
        return oldest + (token - starts[oldest]) // self.block_size

    @cute.jit
    def produce(
        self,
        load: cute.CopyAtom,
        keys: cute.Tensor,
        starts: cute.Tensor,
        s_k: cute.Tensor,
        bars: cute.Pointer,
        head: Int32,
        oldest: Int32,
        count: Int32,
    ):
        """One warp: a block of keys into each buffer that is free."""
        shape = (self.block_size, self.proxy_dim)
        size = self.block_size * self.proxy_dim * 2
        for i in cutlass.range(count, unroll=1):
            stage, phase = hopper.place(i, STAGES)
            start = starts[oldest + i]
            cute.arch.mbarrier_wait(bars + STAGES + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars + stage, size)
            hopper.load_block(load, keys, s_k, shape, start, head, stage, bars + stage)

    @cute.jit
    def consume(
        self,
        first: cute.Tensor,
        starts: cute.Tensor,
        scores: cute.Tensor,
        mma: cute.TiledMma,
        s_q: cute.Tensor,
        s_k: cute.Tensor,
        bars: cute.Pointer,
        work: tuple,
    ):
        """One of two warpgroups: maxima of two tiles of 64 rows for each block."""
        token, last, begin, proxy, oldest, count = work
        thread, _, _ = cute.arch.thread_idx()
        which = cute.arch.make_warp_uniform(thread // hopper.WARPGROUP)
        part, lane = mma.get_slice(thread % hopper.WARPGROUP), thread % 32
        a = mma.make_fragment_A(part.partition_A(s_q))
        b = mma.make_fragment_B(part.partition_B(s_k))
        shape = mma.partition_shape_C((hopper.ROWS, self.block_size))
        accumulators = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        base = which * 2 * hopper.ROWS + hopper.row_of(thread)
        # A quad's lanes hold the same four rows: lane j writes the maximum of the j-th.
        row = base + lane % 4 // 2 * hopper.ROWS + lane % 2 * 8
        query = cutlass.min(token + row // self.group, last)
        row_first, row_own = first[query], self.own(first, starts, query)
        place = Int64(query - begin) * self.num_proxies + proxy + row % self.group
        own = self.own(first, starts, token)
        for i in cutlass.range(count, unroll=1):
            stage, phase = hopper.place(i, STAGES)
            cute.arch.mbarrier_wait(bars + stage, phase)
            for m in cutlass.range_constexpr(2):
                hopper.multiply(mma, accumulators[m], a[None, None, None, which * 2 + m], b[None, None, None, stage])
            warpgroup.wait_group(1)
            block = oldest + i
            low = Float32(0.0)
            if block >= own:
                # Only here may a row's own block be, with keys that the row must not see.
                warpgroup.wait_group(0)
                for m in cutlass.range_constexpr(2):
                    self.hide_later(accumulators[m], starts[block], token, base + m * hopper.ROWS, lane)
                low = self.maximum(accumulators[0], lane)
            else:
                # In a branch, or the compiler would end the second product before it.
                low = self.maximum(accumulators[0], lane)
            warpgroup.wait_group(0)
            hopper.arrive_if(lane == 0, bars + STAGES + stage)
            high = self.maximum(accumulators[1], lane)
            best = (high if lane % 4 >= 2 else low) * (1.0 / math.sqrt(self.proxy_dim))
            line = scores.iterator + (Int64(block - row_first) * scores.shape[1] + place)
            seen = (token + row // self.group <= last) & (block >= row_first) & (block <= row_own)
            hopper.store_if(seen, line, best)

    @cute.jit
    def hide_later(self, accumulator: cute.Tensor, start: Int32, token: Int32, row: Int32, lane: Int32):
        """-inf in place of the scores of keys after the row's query."""
        for x in cutlass.range_constexpr(cute.size(accumulator)):
            key = start + x // 4 * 8 + lane % 4 * 2 + x % 2
            if key > token + (row + x // 2 % 2 * 8) // self.group:
                accumulator[x] = -Float32.inf

    @cute.jit
    def maximum(self, accumulator: cute.Tensor, lane: Int32):
        """The largest entry of a row of the quad, NaN if it has one: the first row in even lanes, else the second."""
        best = [accumulator[0], accumulator[2]]
        for x in cutlass.range_constexpr(cute.size(accumulator)):
            best[x // 2 % 2] = cute.arch.fmax(best[x // 2 % 2], accumulator[x], nan=True)
        # A neighbour's half of my row for my half of its row.
        odd = lane % 2 == 1
        other = cute.arch.shuffle_sync_bfly(best[0] if odd else best[1], offset=1)
        mine = cute.arch.fmax(best[1] if odd else best[0], other, nan=True)
        return cute.arch.fmax(mine, cute.arch.shuffle_sync_bfly(mine, offset=2), nan=True)


def variants() -> list[Scores]:
    """Every variant that the package supports."""
    return [
        Scores(dtype, dim, block_size, proxies, heads)
        for dtype in hopper.DTYPES
        for dim in (64, 128)
        for block_size in (64, 128)
        for proxies, heads in ((4, 1), (4, 2), (4, 4), (1, 1), (16, 1))
    ]
