"""The best blocks of each row of scores: `msa_kernels.selection.select_from_scores` for scores laid out by block.

A thread has one row, a query and a proxy, and walks over the blocks between the forced ones, so that neighbours read
neighbouring scores. Forced blocks never compete: where they overlap or reach past the document's blocks, there is
nothing between them. The others are kept in order of their scores; a later block must be strictly better to go before
an earlier one, which settles ties, and no NaN and no -inf is better than anything.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives
from jaxtyping import Float32 as Scores
from jaxtyping import Int32 as Ids
from torch import Tensor

from msa_kernels.cute.compile import load
from msa_kernels.cute.layout import compact, row_alignment

THREADS = 128
CHUNK = 32
"""Scores that a thread has in flight, one bit each in the word that says which of them may be chosen."""
MOST_SLOTS = 32
NONE = 2**31 - 1
"""A slot without a block: after every id."""


def choose(
    scores: Scores[Tensor, "block row"],
    first: Ids[Tensor, "token"],
    starts: Ids[Tensor, "global_block"],
    blocks: Ids[Tensor, "batch proxy query slot"],
    begin: int,
    end: int,
    *,
    block_size: int,
    num_local_blocks: int = 1,
    num_sink_blocks: int = 0,
) -> None:
    """Write the selection of tokens `begin` to `end` (of batch x query) into `blocks`.

    `scores[b, (token - begin) * num_proxies + proxy]` is that of block b of the token's document; more rows than the
    range has are left alone. `first` and `starts` are those of `make_layout`. ValueError above 32 slots.
    """
    _, num_proxies, _, slots = blocks.shape
    if slots > MOST_SLOTS:
        raise ValueError(
            f"top_k_blocks={slots} must be at most {MOST_SLOTS} here; use {MOST_SLOTS} or MSA_KERNELS=flex"
        )
    if begin < end:
        rule = TopK(slots, num_proxies, block_size, num_local_blocks, num_sink_blocks)
        load(rule)(scores, first, starts, blocks, begin, end)


@dataclass(frozen=True)
class TopK:
    """Static facts: what a variant is compiled for."""

    slots: int
    num_proxies: int
    block_size: int
    num_local_blocks: int
    num_sink_blocks: int

    @property
    def learned(self) -> int:
        """Slots that the scores decide."""
        return self.slots - self.num_local_blocks - self.num_sink_blocks

    def fakes(self) -> tuple:
        batch, sequence = cute.sym_int(), cute.sym_int()
        return (
            compact(Float32, cute.sym_int(), cute.sym_int()),
            compact(Int32, cute.sym_int()),
            compact(Int32, cute.sym_int()),
            compact(Int32, batch, self.num_proxies, sequence, self.slots, align=row_alignment(self.slots)),
            Int32(0),
            Int32(0),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        blocks: cute.Tensor,
        begin: Int32,
        end: Int32,
        stream: CUstream,
    ):
        tiles = cute.ceil_div((end - begin) * self.num_proxies, THREADS)
        self.kernel(scores, first, starts, blocks, begin, end).launch(
            grid=(tiles, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        scores: cute.Tensor,
        first: cute.Tensor,
        starts: cute.Tensor,
        blocks: cute.Tensor,
        begin: Int32,
        end: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        memory = cutlass.memory.SmemAllocator()
        chunk = memory.allocate_array(Float32, 2 * CHUNK * THREADS) + thread
        row = tile * THREADS + thread
        if row < (end - begin) * self.num_proxies:
            token = begin + row // self.num_proxies
            oldest = first[token]
            own = (token - starts[oldest]) // self.block_size
            ids = self.forced(own)
            if cutlass.const_expr(self.learned > 0):
                self.learn(scores, ids, chunk, row, own)
            self.sort(ids)
            sequence = blocks.shape[2]
            batch = token // sequence
            proxy = row % self.num_proxies
            query = token - batch * sequence
            self.write(ids, blocks, (Int64(batch) * self.num_proxies + proxy) * sequence + query)

    @cute.jit
    def forced(self, own: Int32) -> cute.Tensor:
        """Slots with the oldest and the newest blocks; the rest without a block."""
        ids = cute.make_rmem_tensor(self.slots, Int32)
        ids.fill(NONE)
        for j in cutlass.range_constexpr(self.num_sink_blocks):
            ids[j] = j if j <= own else NONE
        for j in cutlass.range_constexpr(self.num_local_blocks):
            block = own - j
            ids[self.num_sink_blocks + j] = block if block >= self.num_sink_blocks else NONE
        return ids

    @cute.jit
    def learn(self, scores: cute.Tensor, ids: cute.Tensor, chunk: cute.Pointer, row: Int32, own: Int32):
        """Fill the last `learned` slots with the best of the blocks that are not forced, best first."""
        best = cute.make_rmem_tensor(self.learned, Float32)
        best.fill(-Float32.inf)
        base = Int32(self.num_sink_blocks)
        last = own - self.num_local_blocks
        stage = Int32(0)
        self.fetch(scores, chunk, row, base, last)
        while base <= last:
            following = stage ^ (CHUNK * THREADS)
            self.fetch(scores, chunk + following, row, base + CHUNK, last)
            cute.arch.cp_async_wait_group(1)
            passing = Uint32(0)
            for j in cutlass.range_constexpr(CHUNK):
                score = (chunk + (stage + j * THREADS)).load()
                passing |= Uint32(1 << (CHUNK - 1 - j)) if score > best[self.learned - 1] else Uint32(0)
            beyond = base + (CHUNK - 1) - last
            if beyond > 0:
                passing &= Uint32(0xFFFFFFFF) << Uint32(beyond)
            # Few scores pass once the slots are full, at different places in different rows of a warp: taking each
            # row's next one together costs as many turns as the row with the most has, not as many as there are places.
            while passing != Uint32(0):
                j = Int32(cute.arch.clz(passing))
                passing &= Uint32(0x7FFFFFFF) >> Uint32(j)
                self.insert(best, ids, (chunk + (stage + j * THREADS)).load(), base + j)
            base += CHUNK
            stage = following
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def fetch(self, scores: cute.Tensor, chunk: cute.Pointer, row: Int32, base: Int32, last: Int32):
        """Start reading a chunk of the row's scores; past the last one, that again."""
        if base <= last:
            for j in cutlass.range_constexpr(CHUNK):
                source = scores.iterator + (Int64(cutlass.min(base + j, last)) * scores.shape[1] + row)
                primitives.cp_async_shared_global(chunk + j * THREADS, source, 4, primitives.LoadCacheModifier.CA)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def insert(self, best: cute.Tensor, ids: cute.Tensor, score: Float32, block: Int32):
        """Put a block behind those that are as good or better; the last one falls out."""
        forced = self.slots - self.learned
        above = [score > best[j] for j in range(self.learned)]
        for i in cutlass.range_constexpr(self.learned):
            j = self.learned - 1 - i
            kept, kept_id = best[j], ids[forced + j]
            moved, moved_id = score, block
            if cutlass.const_expr(j > 0):
                moved = best[j - 1] if above[j - 1] else score
                moved_id = ids[forced + j - 1] if above[j - 1] else block
            best[j] = moved if above[j] else kept
            ids[forced + j] = moved_id if above[j] else kept_id

    @cute.jit
    def sort(self, ids: cute.Tensor):
        """Ascending, by a network."""
        for low, high in comparators(self.slots):
            a, b = ids[low], ids[high]
            ids[low], ids[high] = cutlass.min(a, b), cutlass.max(a, b)

    @cute.jit
    def write(self, ids: cute.Tensor, blocks: cute.Tensor, at: Int64):
        for j in cutlass.range_constexpr(self.slots):
            ids[j] = ids[j] if ids[j] != NONE else -1
        target = cute.make_ptr(
            Int32,
            (blocks.iterator + at * self.slots).toint(),
            cute.AddressSpace.gmem,
            assumed_align=row_alignment(self.slots),
        )
        cute.autovec_copy(ids, cute.make_tensor(target, cute.make_layout(self.slots)))


def comparators(count: int) -> list[tuple[int, int]]:
    """Pairs whose ordering, one after the other, sorts `count` values (Batcher's merge exchange)."""
    pairs = []
    p = top = 1 << max(count - 1, 1).bit_length() - 1
    while p > 0:
        q, r, distance = top, 0, p
        while True:
            pairs += [(i, i + distance) for i in range(count - distance) if i & p == r]
            if q == p:
                break
            distance, q, r = q - p, q // 2, p
        p //= 2
    return pairs


def variants() -> list[TopK]:
    """Representatives of every kind of variant: any number of slots up to 32, proxies and forced blocks will do."""
    return [
        TopK(slots, proxies, block_size, local, sink)
        for slots, proxies, block_size, local, sink in (
            (16, 4, 128, 1, 0),
            (16, 4, 64, 1, 1),
            (32, 4, 128, 1, 0),
            (8, 2, 128, 1, 0),
            (5, 1, 128, 2, 1),
            (4, 16, 64, 0, 0),
            (1, 1, 128, 1, 0),
        )
    ]
