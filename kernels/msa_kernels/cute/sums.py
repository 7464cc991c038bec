"""What gradients are made of besides tensor-core products: sums of parts in a fixed order, and what prepares them.

The backward kernels write parts: of a query's gradient one for each block that it read, in the slot where the block
stands in its list; of a block's gradients one for each item of work (`draw`). The sums here add a query's parts slot by
slot, and a block's by unit and then item by item, whichever came first: the result is the same every time, and no
memory needs to be cleared. All of it is limited by how fast memory is read: 16 bytes a thread, several on their way.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from msa_kernels.cute import hopper
from msa_kernels.cute.streams import block_of

THREADS = 256
ROUNDS = 4
"""Rows of `Deltas` that a thread has on their way."""
BATCH = 8
"""Parts that a thread has on their way, of one tensor; of two, half as many each."""
TYPES = {**hopper.DTYPES, "float32": Float32}


@dsl_user_op
def load_if(condition: Boolean, pointer: cute.Pointer, *, loc=None, ip=None) -> tuple[Int32, Int32, Int32, Int32]:
    """Four 32-bit words that are read once, from a 16-byte aligned place in global memory; zeros if not `condition`."""
    words = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * 4),
        [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), Int32(condition).ir_value(loc=loc, ip=ip)],
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r",
        # It must not be moved above the branch that makes its address a right one.
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Int32(llvm.extractvalue(T.i32(), words, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def store_8_bytes(pointer: cute.Pointer, words: tuple, *, loc=None, ip=None) -> None:
    """Two 32-bit words to an 8-byte aligned place in global memory."""
    llvm.inline_asm(
        None,
        [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), *(Int32(w).ir_value(loc=loc, ip=ip) for w in words)],
        "st.global.v2.b32 [$0], {$1, $2};",
        "l,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def bits_of(value: Float32, *, loc=None, ip=None) -> Int32:
    """The 32 bits of an fp32."""
    return Int32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_of(word: Int32, *, loc=None, ip=None) -> Float32:
    """The fp32 of 32 bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(word).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@cute.jit
def numbers_of(words: tuple, kind: cutlass.Constexpr) -> tuple:
    """The fp32 values of four words: four, or eight of a half type."""
    values = []
    for w in cutlass.range_constexpr(4):
        if cutlass.const_expr(kind == "float32"):
            values.append(float_of(words[w]))
        else:
            values.extend(hopper.unpack_halves(words[w], kind))
    return tuple(values)


@cute.jit
def store_numbers(pointer: cute.Pointer, values: tuple, kind: cutlass.Constexpr):
    """Four or eight neighbouring numbers, rounded to `kind`."""
    number = len(values)
    if cutlass.const_expr(kind == "float32"):
        for x in cutlass.range_constexpr(0, number, 4):
            hopper.store_16_bytes(pointer + x, tuple(bits_of(value) for value in values[x : x + 4]))
    elif cutlass.const_expr(number == 8):
        hopper.store_16_bytes(pointer, _packed(values, kind))
    else:
        store_8_bytes(pointer, _packed(values, kind))


def _packed(values: tuple, kind: str) -> tuple:
    return tuple(hopper.pack_halves(values[x], values[x + 1], kind) for x in range(0, len(values), 2))


@cute.jit
def share_of_one(queries: cute.Tensor, selection: Int32) -> Float32:
    """What each of a selection's queries counts in their mean, those without blocks left out."""
    return Float32(1.0) / Float32(cutlass.max(queries[selection], 1))


@dataclass(frozen=True)
class Deltas:
    """The sum of out x upstream over each row: what a softmax's gradient subtracts."""

    dtype: str
    dim: int

    def fakes(self) -> tuple:
        """out, upstream, delta."""
        rows = cute.sym_int64()
        halves = hopper.fake(hopper.DTYPES[self.dtype], (rows, self.dim))
        return halves, halves, hopper.fake(Float32, (rows,)), hopper.fake_stream()

    @cute.jit
    def __call__(self, out: cute.Tensor, upstream: cute.Tensor, delta: cute.Tensor, stream: CUstream):
        rows = THREADS * 8 // self.dim * ROUNDS
        grid = cute.ceil_div(Int64(delta.shape[0]), rows)
        self.kernel(out, upstream, delta).launch(grid=(Int32(grid), 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor, upstream: cute.Tensor, delta: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        lanes = self.dim // 8
        a, b, rows = [], [], []
        last = Int64(delta.shape[0]) - 1
        for i in cutlass.range_constexpr(ROUNDS):
            rows.append((Int64(tile) * ROUNDS + i) * (THREADS // lanes) + thread // lanes)
            at = cutlass.min(rows[i], last) * self.dim + thread % lanes * 8
            a.append(hopper.load_16_bytes(out.iterator + at))
            b.append(hopper.load_16_bytes(upstream.iterator + at))
        for i in cutlass.range_constexpr(ROUNDS):
            total = Float32(0.0)
            left, right = numbers_of(a[i], self.dtype), numbers_of(b[i], self.dtype)
            for x in cutlass.range_constexpr(8):
                total += left[x] * right[x]
            for step in cutlass.range_constexpr(lanes.bit_length() - 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
            at = cutlass.min(rows[i], last)
            hopper.store_if((thread % lanes == 0) & (rows[i] <= last), delta.iterator + at, total)


@dataclass(frozen=True)
class SumQueries:
    """Gradients of queries: the parts in their first slots, in order.

    Parts lie at line ((query * units + unit) * slots + slot) * group + head, counted from the window's first query;
    their columns in one of two orders that warpgroups write. `eights=False` is that of `hopper.chunk_place`: 16 bytes
    of lane l of a quad hold the columns 2 l and 2 l + 1 of four 8-column blocks, and if `group` is even, the quads of
    two heads alternate. `eights=True`: the q-th 16 bytes are four columns from 16 (q // 2) + 4 (q % 2) on, each before
    the one that lies 8 further.
    """

    dtype: str
    """Of the parts."""
    result: str
    """Of the gradients."""
    dim: int
    group: int
    units: int
    num_selections: int
    mean: bool
    """Whether they are divided by the number of queries that have blocks."""
    eights: bool

    @property
    def threads(self) -> int:
        """Of a query and unit: 16 bytes of a part each."""
        return self.group * self.dim // 8

    def fakes(self) -> tuple:
        """Parts, counts, queries, gradients, scale, begin, end, slots."""
        return (
            hopper.fake(hopper.DTYPES[self.dtype], (cute.sym_int64(), self.dim)),
            hopper.fake(Int32, (cute.sym_int(), self.num_selections, cute.sym_int())),
            hopper.fake(Int32, (self.num_selections,)) if self.mean else None,
            hopper.fake(TYPES[self.result], (cute.sym_int(), self.units * self.group, self.dim)),
            Float32(0.0),
            Int32(0),
            Int32(0),
            Int32(0),
            hopper.fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,
        counts: cute.Tensor,
        queries: cute.Tensor | None,
        gradients: cute.Tensor,
        scale: Float32,
        begin: Int32,
        end: Int32,
        slots: Int32,
        stream: CUstream,
    ):
        self.kernel(parts, counts, queries, gradients, scale, begin, end, slots).launch(
            grid=(self.tiles(begin, end), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            # Without this the compiler saves registers and lets loads wait for one another.
            min_blocks_per_mp=1,
        )

    def tiles(self, begin: Int32, end: Int32) -> Int32:
        """Thread blocks of a window."""
        return Int32(cute.ceil_div(Int64(end - begin) * (self.units * self.threads), THREADS))

    @cute.kernel
    def kernel(
        self,
        parts: cute.Tensor,
        counts: cute.Tensor,
        queries: cute.Tensor | None,
        gradients: cute.Tensor,
        scale: Float32,
        begin: Int32,
        end: Int32,
        slots: Int32,
    ):
        tile, _, _ = cute.arch.block_idx()
        self.add(tile, parts, counts, queries, gradients, scale, begin, end, slots)

    @cute.jit
    def add(
        self,
        tile: Int32,
        parts: cute.Tensor,
        counts: cute.Tensor,
        queries: cute.Tensor | None,
        gradients: cute.Tensor,
        scale: Float32,
        begin: Int32,
        end: Int32,
        slots: Int32,
    ):
        """What a thread block does."""
        thread, _, _ = cute.arch.thread_idx()
        place = Int64(tile) * THREADS + thread
        line = place // self.threads
        inside = Int32(place - line * self.threads)
        query, unit = Int32(line) // self.units, Int32(line) % self.units
        # Whole warps work on, because lanes exchange what they hold; those behind the last query have no parts.
        valid = begin + query < end
        token = cutlass.min(begin + query, end - 1)
        batch = token // counts.shape[2]
        selection = unit // (self.units // self.num_selections)
        count = counts[batch, selection, token - batch * counts.shape[2]]
        count = count if valid else Int32(0)
        width = self.group * self.dim
        source = parts.iterator + (line * slots * width + inside * 8)
        sums = cute.make_rmem_tensor(8, Float32)
        sums.fill(0.0)
        for base in cutlass.range(0, count, BATCH, unroll=1):
            words = [load_if(base + i < count, source + Int64(base + i) * width) for i in range(BATCH)]
            for i in cutlass.range_constexpr(BATCH):
                values = numbers_of(words[i], self.dtype)
                for x in cutlass.range_constexpr(8):
                    sums[x] += values[x]
        factor = scale
        if cutlass.const_expr(self.mean):
            factor *= share_of_one(queries, selection)
        target = gradients.iterator + (Int64(token) * self.units + unit) * width
        self.store(target, tuple(sums[x] * factor for x in range(8)), inside, valid)

    @cute.jit
    def store(self, target: cute.Pointer, values: tuple, inside: Int32, valid: Boolean):
        """The thread's eight columns to their places among those of a query and unit."""
        if cutlass.const_expr(self.eights):
            head, chunk = inside // (self.dim // 8), inside % (self.dim // 8)
            target = target + (head * self.dim + chunk // 2 * 16 + chunk % 2 * 4)
            if valid:
                store_numbers(target, values[0::2], self.result)
                store_numbers(target + 8, values[1::2], self.result)
        else:
            lane = cute.arch.lane_idx()
            even = hopper.transpose_quad(values[0::2], lane)
            odd = hopper.transpose_quad(values[1::2], lane)
            head, chunk = inside // (self.dim // 8), inside % (self.dim // 8)
            if cutlass.const_expr(self.group % 2 == 0):
                head, chunk = (
                    inside // (self.dim // 4) * 2 + inside // 4 % 2,
                    inside % (self.dim // 4) // 8 * 4 + lane % 4,
                )
            if valid:
                numbers = tuple(one for pair in zip(even, odd, strict=True) for one in pair)
                store_numbers(target + (head * self.dim + chunk * 8), numbers, self.result)


@cute.jit
def first_task(tasks: cute.Tensor, low: Int32, high: Int32, row: Int32, size: Int32) -> Int32:
    """The first of the tasks from `low` up to `high` that is not of a row before `row` (selection x size + block).

    By a whole warp, 32 places at a time: the tasks lie row by row.
    """
    lane = cute.arch.lane_idx()
    while low < high:
        step = (high - low + 31) // 32
        at = low + lane * step
        there = cutlass.min(at, high - 1)
        before = (at < high) & (tasks[there, 1] * size + tasks[there, 0] < row)
        count = cute.arch.popc(cute.arch.vote_ballot_sync(before))
        high = cutlass.min(low + count * step, high)
        if count > 0:
            low += (count - 1) * step + 1
    return low


@dataclass(frozen=True)
class SumKeys:
    """Gradients of keys (and of values): the parts of all items of work on a block, of a window of queries.

    A part is (block_size, dim) in fp32. What a head has of several windows is kept in fp32 and rounded after the last.
    """

    dtype: str
    """Of the gradients."""
    dim: int
    block_size: int
    units: int
    num_selections: int
    heads: int
    """Of the gradients: each sums over units / heads units."""
    tensors: int
    """2 for keys and values, which have the same items; 1 for keys."""
    mean: bool
    """Whether they are divided by the number of queries that have blocks."""

    @property
    def rows(self) -> int:
        """Of a thread block."""
        return THREADS * 4 // self.dim

    @property
    def slices(self) -> int:
        """Thread blocks of a block and head."""
        return self.block_size // self.rows

    @property
    def members(self) -> int:
        """Units of a head."""
        return self.units // self.heads

    @property
    def sharing(self) -> int:
        """Units of a selection."""
        return self.units // self.num_selections

    def fakes(self) -> tuple:
        """Parts, tasks, task_ptr, first, starts, ends, queries, earlier windows, gradients, scale, numbers."""
        ids, tokens = cute.sym_int(), cute.sym_int()

        def each(dtype: type[cutlass.Numeric], *shape: int | cute.SymInt) -> tuple:
            one = hopper.fake(dtype, shape)
            return one, one if self.tensors == 2 else None

        return (
            *each(Float32, cute.sym_int(), self.block_size, self.dim),
            hopper.fake(Int32, (cute.sym_int(), 4)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (tokens,)),
            hopper.fake(Int32, (ids,)),
            hopper.fake(Int32, (ids,)),
            hopper.fake(Int32, (self.num_selections,)) if self.mean else None,
            *each(Float32, cute.sym_int(), self.heads, self.dim),
            *each(TYPES[self.dtype], tokens, self.heads, self.dim),
            Float32(0.0),
            Int32(0),
            Int32(0),
            Int32(0),
            hopper.fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,
        more_parts: cute.Tensor | None,
        tasks: cute.Tensor,
        task_ptr: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        queries: cute.Tensor | None,
        kept: cute.Tensor,
        more_kept: cute.Tensor | None,
        gradients: cute.Tensor,
        more_gradients: cute.Tensor | None,
        scale: Float32,
        window: Int32,
        begin: Int32,
        end: Int32,
        stream: CUstream,
    ):
        self.kernel(
            (parts, more_parts),
            (tasks, task_ptr, first, starts, ends),
            queries,
            (kept, more_kept),
            (gradients, more_gradients),
            scale,
            (window, begin, end),
        ).launch(
            grid=(starts.shape[0] * self.slices, self.heads, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        parts: tuple,
        index: tuple,
        queries: cute.Tensor | None,
        kept: tuple,
        gradients: tuple,
        scale: Float32,
        numbers: tuple,
    ):
        place, head, _ = cute.arch.block_idx()
        self.add(place, head, parts, index, queries, kept, gradients, scale, numbers)

    @cute.jit
    def add(
        self,
        place: Int32,
        head: Int32,
        parts: tuple,
        index: tuple,
        queries: cute.Tensor | None,
        kept: tuple,
        gradients: tuple,
        scale: Float32,
        numbers: tuple,
    ):
        """What a thread block does."""
        thread, _, _ = cute.arch.thread_idx()
        block, row = place // self.slices, place % self.slices * self.rows + thread * 4 // self.dim
        memory = cutlass.memory.SmemAllocator()
        runs = memory.allocate_array(Int32, 2 * self.members)
        _, _, first, starts, ends = index
        _, begin, end = numbers
        start, stop = starts[block], ends[block]
        # Queries see no keys behind them: those of later windows have no parts yet.
        if (start + place % self.slices * self.rows < stop) & (start < end):
            self.look_up(index, numbers, runs, block, head)
            cute.arch.sync_threads()
            column = thread * 4 % self.dim
            at = (Int64(start + row) * self.heads + head) * self.dim + column
            sums = [cute.make_rmem_tensor(4, Float32) for _ in range(self.tensors)]
            fresh = start >= begin
            for i in cutlass.range_constexpr(self.tensors):
                words = load_if((not fresh) & (row < stop - start), kept[i].iterator + at)
                for x in cutlass.range_constexpr(4):
                    sums[i][x] = float_of(words[x])
            self.add_items(parts, index, numbers, runs, sums, (block, head, row * self.dim + column))
            self.store(kept, gradients, queries, scale, sums, (head, at, row < stop - start, end == first.shape[0]))

    @cute.jit
    def look_up(self, index: tuple, numbers: tuple, runs: cute.Pointer, block: Int32, head: Int32):
        """The first task and the one behind the last of each of the head's units, a warp each."""
        tasks, task_ptr, _, starts, _ = index
        window = numbers[0]
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(cute.arch.make_warp_uniform(thread // 32), 2 * self.members, THREADS // 32, unroll=1):
            row = (head * self.members + i // 2) // self.sharing * starts.shape[0] + block + i % 2
            at = first_task(tasks, task_ptr[window], task_ptr[window + 1], row, starts.shape[0])
            if thread % 32 == 0:
                (runs + i).store(at)

    @cute.jit
    def add_items(self, parts: tuple, index: tuple, numbers: tuple, runs: cute.Pointer, sums: list, place: tuple):
        """Add the parts of a head's units in their order; of each unit the remote items' first."""
        _, task_ptr, first, starts, ends = index
        window, begin, end = numbers
        block, head, inside = place
        batch = BATCH // self.tensors
        zero = task_ptr[window]
        own = (task_ptr[window + 1] - zero) * self.sharing
        own += (block - block_of(first, starts, begin, self.block_size)) * self.units
        with_own = Int32((starts[block] < end) & (ends[block] > begin))
        for member in cutlass.range(self.members, unroll=1):
            unit = head * self.members + member
            tasks = (runs + 2 * member).load()
            number = (runs + (2 * member + 1)).load() - tasks
            base = (tasks - zero) * self.sharing + unit % self.sharing
            count = number + with_own
            for t in cutlass.range(0, count, batch, unroll=1):
                words = []
                for i in cutlass.range_constexpr(batch):
                    item = base + (t + i) * self.sharing
                    item = item if t + i < number else own + unit
                    at = Int64(item) * (self.block_size * self.dim) + inside
                    words.append([load_if(t + i < count, part.iterator + at) for part in parts[: self.tensors]])
                for i in cutlass.range_constexpr(batch):
                    for j in cutlass.range_constexpr(self.tensors):
                        for x in cutlass.range_constexpr(4):
                            sums[j][x] += float_of(words[i][j][x])

    @cute.jit
    def store(
        self,
        kept: tuple,
        gradients: tuple,
        queries: cute.Tensor | None,
        scale: Float32,
        sums: list,
        place: tuple,
    ):
        """After the last window the gradients, before it what is to be added to."""
        head, at, valid, last = place
        for i in cutlass.range_constexpr(self.tensors):
            values = tuple(sums[i][x] for x in range(4))
            if last:
                # Values, the second tensor, are not scaled.
                factor = scale if cutlass.const_expr(i == 0) else Float32(1.0)
                if cutlass.const_expr(self.mean):
                    factor *= share_of_one(queries, head * self.members // self.sharing)
                values = tuple(value * factor for value in values)
                if valid:
                    store_numbers(gradients[i].iterator + at, values, self.dtype)
            elif valid:
                store_numbers(kept[i].iterator + at, values, "float32")


@dataclass(frozen=True)
class SumValues:
    """The mean over queries of what each proxy's items add up to, window after window; one thread block a proxy."""

    block_size: int
    num_proxies: int
    num_selections: int

    def fakes(self) -> tuple:
        """Parts, tasks, task_ptr, first, starts, ends, queries, values, window, begin, end."""
        ids = cute.sym_int()
        return (
            hopper.fake(Float32, (cute.sym_int(),)),
            hopper.fake(Int32, (cute.sym_int(), 4)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (ids,)),
            hopper.fake(Int32, (ids,)),
            hopper.fake(Int32, (self.num_selections,)),
            hopper.fake(Float32, (self.num_proxies,)),
            Int32(0),
            Int32(0),
            Int32(0),
            hopper.fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,
        tasks: cute.Tensor,
        task_ptr: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        queries: cute.Tensor,
        values: cute.Tensor,
        window: Int32,
        begin: Int32,
        end: Int32,
        stream: CUstream,
    ):
        index = tasks, task_ptr, first, starts, ends
        self.kernel(parts, index, queries, values, (window, begin, end)).launch(
            grid=(self.num_proxies, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, parts: cute.Tensor, index: tuple, queries: cute.Tensor, values: cute.Tensor, numbers: tuple):
        proxy, _, _ = cute.arch.block_idx()
        self.add(proxy, parts, index, queries, values, numbers)

    @cute.jit
    def add(
        self,
        proxy: Int32,
        parts: cute.Tensor,
        index: tuple,
        queries: cute.Tensor,
        values: cute.Tensor,
        numbers: tuple,
    ):
        """What a thread block does."""
        thread, _, _ = cute.arch.thread_idx()
        tasks, task_ptr, first, starts, ends = index
        window, begin, end = numbers
        memory = cutlass.memory.SmemAllocator()
        sums = memory.allocate_array(Float32, THREADS // 32)
        sharing, size = self.num_proxies // self.num_selections, starts.shape[0]
        zero, behind = task_ptr[window], task_ptr[window + 1]
        row = proxy // sharing * size
        low, high = first_task(tasks, zero, behind, row, size), first_task(tasks, zero, behind, row + size, size)
        total = Float32(0.0)
        for task in cutlass.range(low + thread, high, THREADS, unroll=4):
            total += parts[(task - zero) * sharing + proxy % sharing]
        oldest = block_of(first, starts, begin, self.block_size)
        own = (behind - zero) * sharing - oldest * self.num_proxies + proxy
        newest = block_of(first, starts, end - 1, self.block_size)
        for block in cutlass.range(oldest + thread, newest + 1, THREADS, unroll=1):
            if cutlass.max(starts[block], begin) < cutlass.min(ends[block], end):
                total += parts[own + block * self.num_proxies]
        for step in cutlass.range_constexpr(5):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        if thread % 32 == 0:
            (sums + thread // 32).store(total)
        cute.arch.sync_threads()
        if thread == 0:
            total = Float32(0.0)
            for i in cutlass.range_constexpr(THREADS // 32):
                total += (sums + i).load()
            if begin > 0:
                total += values[proxy]
            if end == first.shape[0]:
                total *= share_of_one(queries, proxy // sharing)
            values[proxy] = total


@dataclass(frozen=True)
class SumProxies:
    """What a window adds to the KL and its gradients: `SumValues`, `SumKeys` and `SumQueries` in one launch.

    Thread blocks start in the order of their numbers: first those that run longest, one a proxy for the values; then
    those of keys, the oldest block's first, which most queries can read; then those of queries. Registers are those of
    the two latter launches, so that as many threads read at a time.
    """

    dtype: str
    """Of the parts of queries; all others are fp32, and so are the gradients."""
    dim: int
    block_size: int
    num_proxies: int
    num_selections: int

    @property
    def of_values(self) -> SumValues:
        return SumValues(self.block_size, self.num_proxies, self.num_selections)

    @property
    def of_keys(self) -> SumKeys:
        units = self.num_proxies, self.num_selections, self.num_proxies
        return SumKeys("float32", self.dim, self.block_size, *units, 1, True)

    @property
    def of_queries(self) -> SumQueries:
        return SumQueries(self.dtype, "float32", self.dim, 1, self.num_proxies, self.num_selections, True, True)

    def fakes(self) -> tuple:
        """Parts of values, keys and queries, index, counts, queries, results, earlier windows, scales, numbers."""
        ids, tokens = cute.sym_int(), cute.sym_int()
        gradients = hopper.fake(Float32, (tokens, self.num_proxies, self.dim))
        return (
            hopper.fake(Float32, (cute.sym_int(),)),
            hopper.fake(Float32, (cute.sym_int(), self.block_size, self.dim)),
            hopper.fake(hopper.DTYPES[self.dtype], (cute.sym_int64(), self.dim)),
            hopper.fake(Int32, (cute.sym_int(), 4)),
            hopper.fake(Int32, (cute.sym_int(),)),
            hopper.fake(Int32, (tokens,)),
            hopper.fake(Int32, (ids,)),
            hopper.fake(Int32, (ids,)),
            hopper.fake(Int32, (cute.sym_int(), self.num_selections, cute.sym_int())),
            hopper.fake(Int32, (self.num_selections,)),
            hopper.fake(Float32, (self.num_proxies,)),
            gradients,
            gradients,
            hopper.fake(Float32, (cute.sym_int(), self.num_proxies, self.dim)),
            *(Float32(0.0),) * 2,
            *(Int32(0),) * 4,
            hopper.fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        value_parts: cute.Tensor,
        dk_parts: cute.Tensor,
        dq_parts: cute.Tensor,
        tasks: cute.Tensor,
        task_ptr: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        counts: cute.Tensor,
        queries: cute.Tensor,
        values: cute.Tensor,
        dk: cute.Tensor,
        dq: cute.Tensor,
        kept: cute.Tensor,
        of_keys: Float32,
        of_queries: Float32,
        window: Int32,
        begin: Int32,
        end: Int32,
        slots: Int32,
        stream: CUstream,
    ):
        keys = starts.shape[0] * self.of_keys.slices * self.num_proxies
        parts, index = (value_parts, dk_parts, dq_parts), (tasks, task_ptr, first, starts, ends)
        rows, results, scales = (counts, queries), (values, dk, dq, kept), (of_keys, of_queries)
        self.kernel(parts, index, rows, results, scales, (window, begin, end, slots, keys)).launch(
            grid=(self.num_proxies + keys + self.of_queries.tiles(begin, end), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, parts: tuple, index: tuple, rows: tuple, results: tuple, scales: tuple, numbers: tuple):
        tile, _, _ = cute.arch.block_idx()
        value_parts, dk_parts, dq_parts = parts
        counts, queries = rows
        values, dk, dq, kept = results
        window, begin, end, slots, keys = numbers
        if tile < self.num_proxies:
            self.of_values.add(tile, value_parts, index, queries, values, (window, begin, end))
        elif tile < self.num_proxies + keys:
            place, head = (tile - self.num_proxies) // self.num_proxies, tile % self.num_proxies
            given = (dk_parts,), index, queries, (kept,), (dk,), scales[0], (window, begin, end)
            self.of_keys.add(place, head, *given)
        else:
            tile -= self.num_proxies + keys
            self.of_queries.add(tile, dq_parts, counts, queries, dq, scales[1], begin, end, slots)


@dataclass(frozen=True)
class Scale:
    """Gradients of proxies, in fp32, times their upstream scalars, and rounded: those of queries, and those of keys.

    Those of keys are summed over the proxies that share a head of keys, in their order, before they are rounded.
    """

    dtype: str
    """Of the results."""
    dim: int
    num_proxies: int
    heads: int
    """Of keys."""

    def fakes(self) -> tuple:
        """Gradients of queries and of keys, upstream, the results of both."""
        tokens = cute.sym_int()
        gradients = hopper.fake(Float32, (tokens, self.num_proxies, self.dim))
        return (
            gradients,
            gradients,
            hopper.fake(Float32, (self.num_proxies,), 4),
            hopper.fake(TYPES[self.dtype], (tokens, self.num_proxies, self.dim)),
            hopper.fake(TYPES[self.dtype], (tokens, self.heads, self.dim)),
            hopper.fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        dq: cute.Tensor,
        dk: cute.Tensor,
        upstream: cute.Tensor,
        to_queries: cute.Tensor,
        to_keys: cute.Tensor,
        stream: CUstream,
    ):
        places = Int64(to_keys.shape[0]) * (self.heads * self.dim // 4)
        self.kernel(dq, dk, upstream, to_queries, to_keys).launch(
            grid=(Int32(cute.ceil_div(places, THREADS)), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, dq: cute.Tensor, dk: cute.Tensor, upstream: cute.Tensor, to_queries: cute.Tensor, to_keys: cute.Tensor
    ):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        place = Int64(tile) * THREADS + thread
        # A thread has four columns of a head of keys, and of all proxies that share it.
        line = place * 4 // self.dim
        members = self.num_proxies // self.heads
        if line < Int64(to_keys.shape[0]) * self.heads:
            column = Int32(place * 4 - line * self.dim)
            proxy = Int32(line % self.heads) * members
            at = line * (members * self.dim) + column
            of_queries, of_keys = (
                [hopper.load_16_bytes(x.iterator + (at + i * self.dim)) for i in range(members)] for x in (dq, dk)
            )
            zeros = (Float32(0.0),) * 4
            sums = zeros
            for i in cutlass.range_constexpr(members):
                factor = upstream[proxy + i]
                one = add_product(zeros, of_queries[i], factor)
                store_numbers(to_queries.iterator + (at + i * self.dim), one, self.dtype)
                sums = add_product(sums, of_keys[i], factor)
            store_numbers(to_keys.iterator + place * 4, sums, self.dtype)


def add_product(sums: tuple, words: tuple, factor: Float32) -> tuple:
    """Four sums, each with an fp32 times the factor added."""
    return tuple(total + float_of(word) * factor for total, word in zip(sums, words, strict=True))


def variants() -> list[Deltas | SumQueries | SumKeys | SumValues | SumProxies | Scale]:
    """Every kind of variant that the package is tested with."""
    shapes = [(16, 2, 4), (8, 2, 4), (4, 2, 4), (16, 1, 1), (16, 2, 2), (4, 4, 4), (16, 4, 2)]
    found: list = []
    for dtype in hopper.DTYPES:
        for dim in (64, 128):
            found.append(Deltas(dtype, dim))
            for heads, kv_heads, selections in shapes:
                units = max(kv_heads, selections)
                found.append(SumQueries(dtype, dtype, dim, heads // units, units, selections, False, False))
                found.append(SumKeys(dtype, dim, 128, units, selections, kv_heads, 2, False))
            for proxies, selections in ((4, 4), (4, 1), (1, 1)):
                found.append(SumQueries(dtype, "float32", dim, 1, proxies, selections, True, True))
                found.append(SumKeys("float32", dim, 128, proxies, selections, proxies, 1, True))
                found.append(SumProxies(dtype, dim, 128, proxies, selections))
                found += [SumValues(128, proxies, selections), Scale(dtype, dim, proxies, 1)]
    return list(dict.fromkeys(found))
