"""What loads for the kernels that go over key blocks and gather the queries that read them: backward.py and kl.py.

Work comes in items. A remote one is a task of the index (a key block before its queries' own, and its edges) for one
unit of heads; an own one is a key block with the queries inside it, for one unit, and comes after all remote ones: they
are small and fill what is left. Items of a window are numbered: remote ones (task - first task) x sharing + unit's
number among the `sharing` that have one selection; then own ones (block - the window's first block) x units + unit.

One warp draws items from a counter and announces each in shared memory as INFO numbers; others read them there.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from msa_kernels.cute.attend import SLOT_BITS, ask_if_near

BEGIN, END, UNIT, OWN, ITEM, START, LENGTH, ZERO = range(8)
"""Of an item: its edges, from `BEGIN` to before `END`, or its queries' tokens if it is an own one; no work is left if
they are equal. Then its unit, whether it is an own one (1 or 0), its number, its block's first token and number of
tokens, and a 0 that the compiler cannot know."""
INFO = 8
"""Numbers that announce an item."""


def boxes(rows: cute.Tensor, group: int) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA of `group` heads of a token, 64 columns of each, of a contiguous (token, head, dim) tensor."""
    count, dim = rows.shape[0] * rows.shape[1], rows.shape[2]
    layout = cute.make_layout((count, dim), stride=(dim, 1))
    box = cute.make_layout((group, 64), stride=(64, 1))
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(),
        cute.make_tensor(rows.iterator, layout),
        cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box),
        (group, 64),
    )


def ring(number: Int32, stages: int) -> tuple[Int32, Int32]:
    """Buffer and phase of a ring's use of this number, from 0 on; `stages` is a power of two."""
    return number & (stages - 1), (number >> (stages.bit_length() - 1)) & 1


@cute.jit
def block_of(first: cute.Tensor, starts: cute.Tensor, token: Int32, block_size: cutlass.Constexpr) -> Int32:
    """The global id of a token's own block."""
    oldest = first[token]
    return oldest + (token - starts[oldest]) // block_size


@cute.jit
def draw(
    index: tuple,
    numbers: tuple,
    units: cutlass.Constexpr,
    sharing: cutlass.Constexpr,
    block_size: cutlass.Constexpr,
) -> tuple:
    """The next item of a window, the INFO numbers of it; by a whole warp.

    `index`: edges, tasks, task_ptr, claims, first, starts, ends; `numbers`: window, its first token and its end. A
    thread block must draw until no work is left, and then no more: the last one to see that makes the counter ready
    for the next pass over the index.
    """
    _, tasks, task_ptr, claims, first, starts, ends = index
    window, begin, end = numbers
    oldest = task_ptr[window]
    remote = (task_ptr[window + 1] - oldest) * sharing
    low = block_of(first, starts, begin, block_size)
    total = remote + (block_of(first, starts, end - 1, block_size) + 1 - low) * units
    item, looking = Int32(0), Int32(1)
    here, stop, unit, own, block = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    while looking > 0:
        looking = Int32(0)
        if cute.arch.lane_idx() == 0:
            item = cute.arch.atomic_add(claims.iterator + window, Int32(1))
        item = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(item, 0))
        here, stop = Int32(0), Int32(0)
        if item < remote:
            task = oldest + item // sharing
            block, unit = tasks[task, 0], tasks[task, 1] * sharing + item % sharing
            here, stop = tasks[task, 2], tasks[task, 3]
        elif item < total:
            own = Int32(1)
            block, unit = low + (item - remote) // units, (item - remote) % units
            here, stop = cutlass.max(starts[block], begin), cutlass.min(ends[block], end)
            # Ids that no document uses have no tokens.
            looking = Int32(here >= stop)
        elif item == total + cute.arch.grid_dim()[0] - 1:
            claims[window] = 0
    return here, stop, unit, own, item, starts[block], ends[block] - starts[block], Int32(0)


@cute.jit
def announce(info: cute.Pointer, stage: Int32, bar: cute.Pointer, item: tuple):
    """Write an item to a place of the ring `info`; by one thread, which also arrives, so that its writes are known."""
    place = info + stage * INFO
    for i in cutlass.range_constexpr(INFO):
        place[i] = item[i]
    cute.arch.mbarrier_arrive(bar)


@cute.jit
def read(info: cute.Pointer, stage: Int32) -> tuple:
    """The item of a place."""
    place = info + stage * INFO
    return place[0], place[1], place[2], place[3], place[4], place[5], place[6], place[7]


@cute.jit
def edge_at(edges: cute.Tensor, item: tuple, at: Int32) -> Int32:
    """Query and slot, as the index has them, of an item's edge or query `at`, of its last one if it lies behind.

    An own item's queries get slot 0.
    """
    place = cutlass.max(cutlass.min(at, item[END] - 1), 0)
    edge = place << SLOT_BITS
    if item[OWN] == 0:
        edge = edges[place]
    return edge


@cute.jit
def gather(
    load: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    edges: cute.Tensor,
    item: tuple,
    unit: Int32,
    shape: cutlass.Constexpr,
    base: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    near: cute.Pointer | None,
) -> Int32:
    """One warp: an item's queries, tile after tile, into a ring; gives the number of its tiles.

    `shape`: queries of a tile, `group` rows of each, units of a token (heads / group), and stages of the ring (a power
    of two); `target` is (queries x group, dim, stages) in the layout of `hopper.operand_layout`, `load` and `source`
    are those of `boxes` with that group, and `base` counts the tiles of earlier items. The warp arrives once a tile at
    its barrier of `full`, from which the bytes are taken, too, and once an item at `near`, if there is such a barrier.
    """
    queries, group, units, stages = shape
    lane = cute.arch.lane_idx()
    panels = cute.size(target, mode=[1]) // 64
    to, what = cpasync.tma_partition(
        load,
        0,
        cute.make_layout(1),
        cute.group_modes(cute.flat_divide(target, (group, 64)), 0, 2),
        cute.group_modes(cute.local_tile(source, (group, 64), (None, None)), 0, 2),
    )
    tiles, chunks = cute.ceil_div(item[END] - item[BEGIN], queries), range(0, queries, 32)
    coming = [edge_at(edges, item, item[BEGIN] + chunk + lane) for chunk in chunks]
    for j in cutlass.range(tiles, unroll=1):
        stage, phase = ring(base + j, stages)
        # Loaded while this tile is: what a load takes would otherwise be waited for with every tile.
        following = [edge_at(edges, item, item[BEGIN] + (j + 1) * queries + chunk + lane) for chunk in chunks]
        if cutlass.const_expr(near is not None):
            ask_if_near(near, j, tiles)
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, queries * group * panels * 64 * 2)
        for chunk in cutlass.range_constexpr(len(coming)):
            for i in cutlass.range(min(queries, 32), unroll=4):
                query = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(coming[chunk], i) >> SLOT_BITS)
                for h in cutlass.range_constexpr(panels):
                    cute.copy(
                        load,
                        what[None, query * units + unit, h],
                        to[None, chunk * 32 + i, h, stage],
                        tma_bar_ptr=full + stage,
                    )
        coming = following
    return tiles
