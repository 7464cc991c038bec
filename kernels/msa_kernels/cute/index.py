"""The reverse index of a selection: for each window of queries, proxy and block, the queries that read the block.

Only *remote* edges are in it, selected blocks before the query's own. An edge is one number, `token * EDGE_SLOTS +
slot`: which query, and where in its list the block stands. Edges lie row by row, a row being (window, proxy, global
block), and by token within a row. Counting, two scans and a scatter build it: what atomics decide is only ever a count
or a set of bits, never an order, so that the result is the same every time.

Who counts the edges of a query also finds where its own block stands in its list: the rows that sums go by.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute.compile import load
from msa_kernels.cute.layout import compact, row_alignment
from msa_kernels.cute.windows import TILE, most_tasks, task_length

EDGE_SLOTS = 32
"""Slots that an edge has room for."""
SHARED_BYTES = 232448
"""Shared memory that a thread block may have (sm_90)."""
MOST_BLOCKS = (SHARED_BYTES - 2 * TILE * 4) // 8
"""Global blocks that the scatter has a counter and a word of bits for."""
MOST_TOKENS = 2**31 // EDGE_SLOTS
MOST_ROWS = 2**28
"""Offsets into the tasks, of which each row may have one more than its edges fill, stay below 2^31."""
SCAN_THREADS = 1024
SCAN_ITEMS = 4
SCAN_ROWS = SCAN_THREADS * SCAN_ITEMS
SUBTILE = 32
"""Queries whose edges are scattered together: the bits of a word."""
BATCH = 8
"""Tiles whose counts a thread has in flight."""


class Index(NamedTuple):
    """Edges of row r are `tasks`' `begin` to `end`; window w has the tasks `task_ptr[w]` to `task_ptr[w + 1]`."""

    edges: Ids[Tensor, "edge"]
    """`token * EDGE_SLOTS + slot`, in the order of the rows; what is behind the last one is not written."""
    tasks: Ids[Tensor, "task 4"]
    """Global block, proxy, begin and end of a piece of a row, not empty; behind the last task nothing is written."""
    task_ptr: Ids[Tensor, "windows+1"]
    claims: Ids[Tensor, "window"]
    """Zeros, for whoever counts the tasks of a window that are taken."""


class Rows(NamedTuple):
    """Which of a query's slots hold parts."""

    own_slot: Ids[Tensor, "batch selection query"]
    """The slot of the query's own block, or -1."""
    counts: Ids[Tensor, "batch selection query"]
    """How many slots, from the first on."""
    queries: Ids[Tensor, "selection"] | None
    """How many queries have any: what a mean over queries divides by. None in a backward pass."""


def build(
    blocks: Ids[Tensor, "batch proxy query slot"],
    first: Ids[Tensor, "token"],
    starts: Ids[Tensor, "global_block"],
    window: int,
    *,
    block_size: int,
) -> tuple[Index, Rows]:
    """The remote edges of a selection, for windows of `window` tokens, and its rows; nothing waits for the device.

    `blocks` is contiguous and the ids of a query differ; `first` and `starts` are those of `make_layout`. ValueError
    for a window that is no multiple of TILE, for more than 32 slots and for what is too large to count.
    """
    batch, num_proxies, sequence, slots = blocks.shape
    total, size = batch * sequence, len(starts)
    windows, tiles = -(-total // max(window, 1)), -(-total // TILE)
    rows = windows * num_proxies * size
    _check(total, num_proxies, slots, size, window, rows, block_size)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=blocks.device)

    edges = total * num_proxies * slots
    index = Index(empty(edges), empty(most_tasks(edges, rows), 4), empty(windows + 1), empty(windows))
    found = Rows(empty(*blocks.shape[:3]), empty(*blocks.shape[:3]), empty(num_proxies))
    scratch = empty(tiles, num_proxies, size), empty(tiles, num_proxies), empty(rows)
    kernel = ReverseIndex(slots, num_proxies, block_size)
    load(kernel)(blocks, first, starts, *scratch, *index, *found, window, task_length(edges))
    return index, found


def _check(total: int, num_proxies: int, slots: int, size: int, window: int, rows: int, block_size: int) -> None:
    if window < TILE or window % TILE:
        raise ValueError(f"window={window} must be a multiple of {TILE}, such as {max(TILE, window // TILE * TILE)}")
    if slots > EDGE_SLOTS:
        raise ValueError(
            f"top_k_blocks={slots} must be at most {EDGE_SLOTS} here; use {EDGE_SLOTS} or MSA_KERNELS=flex"
        )
    if size > MOST_BLOCKS:
        raise ValueError(
            f"{total} tokens have up to {size} blocks, tokens / block_size={block_size} and one a document; it must be "
            f"at most {MOST_BLOCKS}: give fewer tokens or documents at a time, or use MSA_KERNELS=flex"
        )
    if total >= MOST_TOKENS or total * num_proxies * slots >= 2**31:
        raise ValueError(
            f"batch x sequence={total} must be below {MOST_TOKENS}, and times num_proxies={num_proxies} x "
            f"top_k_blocks={slots} below {2**31}; give fewer rows of the batch at a time, such as 1"
        )
    counts = -(-total // TILE) * num_proxies * size
    if counts >= 2**31:
        raise ValueError(
            f"{total} tokens, num_proxies={num_proxies} and {size} blocks make {counts} counts, one for {TILE} "
            f"tokens, a proxy and a block; it must be below {2**31}: give fewer rows of the batch at a time, or use "
            "MSA_KERNELS=flex"
        )
    if rows >= MOST_ROWS:
        raise ValueError(
            f"window={window} makes {rows} rows of windows, proxies and blocks; it must make fewer than {MOST_ROWS}: "
            f"use {-(-total // TILE) * TILE}"
        )


@dataclass(frozen=True)
class ReverseIndex:
    """Static facts: what a variant is compiled for."""

    slots: int
    num_proxies: int
    block_size: int

    @property
    def scatter_threads(self) -> int:
        """One an edge of a subtile, and enough of them for the loops over blocks."""
        return max(SUBTILE * self.slots, 256)

    def fakes(self) -> tuple:
        """blocks, first, starts, counts, users, offsets, the index, the rows, window, edges of a task."""
        batch, sequence, size, tiles = (cute.sym_int() for _ in range(4))
        return (
            compact(Int32, batch, self.num_proxies, sequence, self.slots, align=row_alignment(self.slots)),
            compact(Int32, cute.sym_int()),
            compact(Int32, size),
            compact(Int32, tiles, self.num_proxies, size),
            compact(Int32, tiles, self.num_proxies),
            compact(Int32, cute.sym_int()),
            compact(Int32, cute.sym_int()),
            compact(Int32, cute.sym_int(), 4, align=16),
            compact(Int32, cute.sym_int()),
            compact(Int32, cute.sym_int()),
            compact(Int32, batch, self.num_proxies, sequence),
            compact(Int32, batch, self.num_proxies, sequence),
            compact(Int32, self.num_proxies),
            Int32(0),
            Int32(0),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        blocks: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        counts: cute.Tensor,
        users: cute.Tensor,
        offsets: cute.Tensor,
        edges: cute.Tensor,
        tasks: cute.Tensor,
        task_ptr: cute.Tensor,
        claims: cute.Tensor,
        own_slot: cute.Tensor,
        used: cute.Tensor,
        queries: cute.Tensor,
        window: Int32,
        task: Int32,
        stream: CUstream,
    ):
        tiles, size, rows = counts.shape[0], starts.shape[0], offsets.shape[0]
        self.count(blocks, first, starts, counts, users, own_slot, used).launch(
            grid=(tiles, self.num_proxies, 1), block=(TILE, 1, 1), smem=(size + 1) * 4, stream=stream
        )
        self.scan_tiles(counts, offsets, users, queries, window // TILE).launch(
            grid=(cute.ceil_div(rows, 128) + 1, 1, 1), block=(128, 1, 1), stream=stream
        )
        self.scan_rows(offsets, tasks, task_ptr, claims, (size, task)).launch(
            grid=(1, 1, 1), block=(SCAN_THREADS, 1, 1), stream=stream
        )
        self.scatter(blocks, first, starts, counts, offsets, edges, window // TILE).launch(
            grid=(tiles, self.num_proxies, 1),
            block=(self.scatter_threads, 1, 1),
            smem=size * 8 + 2 * TILE * 4,
            stream=stream,
        )

    @cute.jit
    def at(self, blocks: cute.Tensor, token: Int32, proxy: Int32) -> cute.Tensor:
        """The list of a token's query."""
        sequence = blocks.shape[2]
        batch = token // sequence
        return blocks[batch, proxy, token - batch * sequence, None]

    @cute.kernel
    def count(
        self,
        blocks: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        counts: cute.Tensor,
        users: cute.Tensor,
        own_slot: cute.Tensor,
        used: cute.Tensor,
    ):
        """Edges of a tile of queries, by block; each query's row, and how many of the tile use a slot."""
        thread, _, _ = cute.arch.thread_idx()
        tile, proxy, _ = cute.arch.block_idx()
        counters = cute.arch.get_dyn_smem(Int32)
        size = starts.shape[0]
        # The last counter is that of queries.
        for block in cutlass.range(thread, size + 1, TILE, unroll=1):
            (counters + block).store(Int32(0))
        cute.arch.sync_threads()
        token = tile * TILE + thread
        if token < first.shape[0]:
            ids = cute.make_rmem_tensor(self.slots, Int32)
            cute.autovec_copy(self.at(blocks, token, proxy), ids)
            oldest = first[token]
            own = (token - starts[oldest]) // self.block_size
            earlier, chosen = Int32(0), Int32(0)
            for slot in cutlass.range_constexpr(self.slots):
                if (ids[slot] >= 0) & (ids[slot] < own):
                    cute.arch.atomic_add(counters + (oldest + ids[slot]), Int32(1))
                    earlier += 1
                chosen |= Int32(ids[slot] == own)
            batch = token // blocks.shape[2]
            query = token - batch * blocks.shape[2]
            own_slot[batch, proxy, query] = earlier if chosen != 0 else Int32(-1)
            used[batch, proxy, query] = earlier + chosen
            if earlier + chosen > 0:
                cute.arch.atomic_add(counters + size, Int32(1))
        cute.arch.sync_threads()
        for block in cutlass.range(thread, size, TILE, unroll=1):
            counts[tile, proxy, block] = (counters + block).load()
        if thread == 0:
            users[tile, proxy] = (counters + size).load()

    @cute.kernel
    def scan_tiles(
        self, counts: cute.Tensor, offsets: cute.Tensor, users: cute.Tensor, queries: cute.Tensor, tiles: Int32
    ):
        """Counts become what earlier tiles of the window have; `offsets`, the edges of each row.

        The last thread block, which has no rows, adds up the queries instead.
        """
        thread, _, _ = cute.arch.thread_idx()
        part, _, _ = cute.arch.block_idx()
        if part == cute.arch.grid_dim()[0] - 1:
            self.add_up(users, queries, thread)
        row = part * 128 + thread
        if row < offsets.shape[0]:
            width = self.num_proxies * counts.shape[2]
            window = row // width
            place = row - window * width
            tile = window * tiles
            end = cutlass.min(tile + tiles, counts.shape[0])
            total = Int32(0)
            while tile < end:
                column = counts.iterator + (Int64(tile) * width + place)
                values = cute.make_rmem_tensor(BATCH, Int32)
                for i in cutlass.range_constexpr(BATCH):
                    values[i] = Int32(0)
                    if tile + i < end:
                        values[i] = (column + i * Int64(width)).load()
                for i in cutlass.range_constexpr(BATCH):
                    if tile + i < end:
                        (column + i * Int64(width)).store(total)
                    total += values[i]
                tile += BATCH
            offsets[row] = total

    @cute.jit
    def add_up(self, users: cute.Tensor, queries: cute.Tensor, thread: Int32):
        """The sum of each proxy's column, by a warp."""
        lane = thread % 32
        for proxy in cutlass.range(thread // 32, self.num_proxies, 4, unroll=1):
            total = Int32(0)
            for tile in cutlass.range(lane, users.shape[0], 32, unroll=4):
                total += users[tile, proxy]
            total = cute.arch.warp_redux_sync(total, "add")
            if lane == 0:
                queries[proxy] = total

    @cute.kernel
    def scan_rows(
        self, offsets: cute.Tensor, tasks: cute.Tensor, task_ptr: cute.Tensor, claims: cute.Tensor, numbers: tuple
    ):
        """Edges of rows become where each row begins; the tasks. One thread block, a chunk of rows after the other."""
        size, task = numbers
        thread, _, _ = cute.arch.thread_idx()
        memory = cutlass.memory.SmemAllocator()
        edge_begin = memory.allocate_array(Int32, SCAN_ROWS + 1)
        task_begin = memory.allocate_array(Int32, SCAN_ROWS + 1)
        sums = memory.allocate_array(Int32, 2 * 32)
        rows, windows = offsets.shape[0], claims.shape[0]
        for window in cutlass.range(thread, windows, SCAN_THREADS, unroll=1):
            claims[window] = 0
        edges_before, tasks_before, base = Int32(0), Int32(0), Int32(0)
        while base < rows:
            begin = base + thread * SCAN_ITEMS
            lengths = cute.make_rmem_tensor(SCAN_ITEMS, Int32)
            pieces = cute.make_rmem_tensor(SCAN_ITEMS, Int32)
            edge_sum, task_sum = Int32(0), Int32(0)
            for i in cutlass.range_constexpr(SCAN_ITEMS):
                lengths[i] = Int32(0)
                if begin + i < rows:
                    lengths[i] = offsets[begin + i]
                pieces[i] = (lengths[i] + task - 1) // task
                edge_sum += lengths[i]
                task_sum += pieces[i]
            edge_at, edge_end = self.scan(edge_sum, sums, thread)
            task_at, task_end = self.scan(task_sum, sums + 32, thread)
            edge_at += edges_before
            task_at += tasks_before
            for i in cutlass.range_constexpr(SCAN_ITEMS):
                (edge_begin + (thread * SCAN_ITEMS + i)).store(edge_at)
                (task_begin + (thread * SCAN_ITEMS + i)).store(task_at)
                if begin + i < rows:
                    offsets[begin + i] = edge_at
                edge_at += lengths[i]
                task_at += pieces[i]
            edges_before += edge_end
            if thread == 0:
                (edge_begin + SCAN_ROWS).store(edges_before)
            cute.arch.sync_threads()
            self.write_tasks(edge_begin, task_begin, tasks, base, tasks_before, task_end, size, task, thread)
            for window in cutlass.range(thread, windows, SCAN_THREADS, unroll=1):
                row = window * (self.num_proxies * size) - base
                if (row >= 0) & (row < SCAN_ROWS):
                    task_ptr[window] = (task_begin + row).load()
            # The barriers in the next chunk's scans come before its writes to what is read above.
            tasks_before += task_end
            base += SCAN_ROWS
        if thread == 0:
            task_ptr[windows] = tasks_before

    @cute.jit
    def scan(self, value: Int32, sums: cute.Pointer, thread: Int32):
        """The sum of the values of earlier threads, and that of all."""
        lane, warp = thread % 32, thread // 32
        inclusive = value
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(inclusive, 1 << i)
            inclusive += other if lane >= 1 << i else Int32(0)
        if lane == 31:
            (sums + warp).store(inclusive)
        cute.arch.sync_threads()
        total = (sums + lane).load()
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(total, 1 << i)
            total += other if lane >= 1 << i else Int32(0)
        before = cute.arch.shuffle_sync(total, (warp + 31) % 32)
        before = before if warp > 0 else Int32(0)
        return before + inclusive - value, cute.arch.shuffle_sync(total, 31)

    @cute.jit
    def write_tasks(
        self,
        edge_begin: cute.Pointer,
        task_begin: cute.Pointer,
        tasks: cute.Tensor,
        base: Int32,
        before: Int32,
        number: Int32,
        size: Int32,
        length: Int32,
        thread: Int32,
    ):
        """The tasks of a chunk of rows, a thread each however they are spread over the rows."""
        for i in cutlass.range(thread, number, SCAN_THREADS, unroll=1):
            task = before + i
            low = Int32(0)
            high = Int32(SCAN_ROWS)
            while high - low > 1:
                middle = (low + high) // 2
                if (task_begin + middle).load() <= task:
                    low = middle
                else:
                    high = middle
            begin = (edge_begin + low).load() + (task - (task_begin + low).load()) * length
            end = cutlass.min(begin + length, (edge_begin + (low + 1)).load())
            row = base + low
            line = row // size
            values = cute.make_rmem_tensor(4, Int32)
            values[0] = row - line * size
            values[1] = line % self.num_proxies
            values[2] = begin
            values[3] = end
            cute.autovec_copy(values, tasks[task, None])

    @cute.kernel
    def scatter(
        self,
        blocks: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        counts: cute.Tensor,
        offsets: cute.Tensor,
        edges: cute.Tensor,
        tiles: Int32,
    ):
        """Edges of a tile to their places, some queries at a time, ranked by the bits of those that have the block."""
        thread, _, _ = cute.arch.thread_idx()
        tile, proxy, _ = cute.arch.block_idx()
        total, size = first.shape[0], starts.shape[0]
        oldest = cute.arch.get_dyn_smem(Int32)
        remote = oldest + TILE
        places = oldest + 2 * TILE
        words = places + size
        self.lay_out(first, starts, oldest, remote, tile, thread)
        rows = offsets.iterator + Int64(tile // tiles * self.num_proxies + proxy) * size
        for block in cutlass.range(thread, size, self.scatter_threads, unroll=1):
            (places + block).store((rows + block).load() + counts[tile, proxy, block])
            (words + block).store(Int32(0))
        cute.arch.sync_threads()
        query, slot = thread // self.slots, thread % self.slots
        bit = Int32(1) << (query % SUBTILE)
        following = self.at(blocks, cutlass.min(tile * TILE + query, total - 1), proxy)[slot]
        base = Int32(0)
        while base < TILE:
            block = following
            token = tile * TILE + base + query
            following = self.at(blocks, cutlass.min(token + SUBTILE, total - 1), proxy)[slot]
            at = (base + query) % TILE
            has = (query < SUBTILE) & (block >= 0) & (block < (remote + at).load())
            block += (oldest + at).load()
            if has:
                cute.arch.atomic_or(words + block, bit)
            cute.arch.sync_threads()
            word = Int32(0)
            place = Int32(0)
            if has:
                word = (words + block).load()
                place = (places + block).load()
                edges[place + cute.arch.popc(word & (bit - 1))] = token * EDGE_SLOTS + slot
            cute.arch.sync_threads()
            # The first query of a block makes room for the next ones.
            if has & ((word & (bit - 1)) == 0):
                (places + block).store(place + cute.arch.popc(word))
                (words + block).store(Int32(0))
            cute.arch.sync_threads()
            base += SUBTILE

    @cute.jit
    def lay_out(
        self,
        first: cute.Tensor,
        starts: cute.Tensor,
        oldest: cute.Pointer,
        remote: cute.Pointer,
        tile: Int32,
        thread: Int32,
    ):
        """For each query of a tile: its document's first block, and how many of its document's blocks are remote."""
        total = first.shape[0]
        for query in cutlass.range(thread, TILE, self.scatter_threads, unroll=1):
            token = cutlass.min(tile * TILE + query, total - 1)
            block = first[token]
            (oldest + query).store(block)
            own = (token - starts[block]) // self.block_size
            (remote + query).store(own if tile * TILE + query < total else Int32(0))


def variants() -> list[ReverseIndex]:
    """Representatives of every kind of variant: any number of slots up to 32 and of proxies will do."""
    return [
        ReverseIndex(slots, proxies, block_size)
        for slots, proxies, block_size in (
            (16, 4, 128),
            (16, 4, 64),
            (32, 4, 128),
            (8, 2, 128),
            (5, 1, 128),
            (1, 16, 64),
        )
    ]
