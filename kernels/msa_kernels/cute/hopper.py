"""What the tensor-core kernels share: layouts of operands in shared memory, products, and 16-byte stores.

A warpgroup (128 threads) multiplies 64 rows at a time (`wgmma`). Its accumulator: thread t of the warpgroup holds rows
`t // 32 * 16 + t % 32 // 4` and 8 more, and of each 8 columns the two from `t % 4 * 2`; element x of the flat fragment
is row x // 2 % 2, column x // 4 * 8 + t % 4 * 2 + x % 2. The same order is that of an operand A in registers.
"""

import functools

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.experimental import primitives
from cutlass.utils import LayoutEnum, hopper_helpers

ROWS = 64
"""Rows of a warpgroup's product."""
WARPGROUP = 128
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
"""Of two consumer warpgroups and one that loads: (40 + 2 x 232) x 128 registers are all that an SM has."""
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def operand_layout(dtype: type[cutlass.Numeric], rows: int, columns: int, stages: int) -> cute.ComposedLayout:
    """(rows, columns, stages) in the 128-byte swizzle: within a stage, halves of 64 columns, each rows x 64."""
    kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def product_of(dtype: type[cutlass.Numeric], columns: int) -> cute.TiledMma:
    """64 rows times `columns`, both operands in shared memory with the summed dimension contiguous."""
    major = OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(dtype, dtype, major, major, Float32, (1, 1, 1), (ROWS, columns))


def weighted_sum_of(dtype: type[cutlass.Numeric], columns: int) -> cute.TiledMma:
    """64 rows of weights in registers times values in shared memory, whose rows are summed over."""
    return hopper_helpers.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        (1, 1, 1),
        (ROWS, columns),
        warpgroup.OperandSource.RMEM,
    )


@cute.jit
def multiply(mma: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """Start accumulator = a b as one group of asynchronous instructions."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, k != 0)
        cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()


@dsl_user_op
def store_16_bytes(pointer: cute.Pointer, words, condition: Boolean = True, *, loc=None, ip=None) -> None:
    """Four 32-bit words to a 16-byte aligned place in global memory, if the condition holds."""
    llvm.inline_asm(
        None,
        [
            pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            *(Int32(w).ir_value(loc=loc, ip=ip) for w in (*words, condition)),
        ],
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }",
        "l,r,r,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def load_16_bytes(pointer: cute.Pointer, *, loc=None, ip=None) -> tuple[Int32, Int32, Int32, Int32]:
    """Four 32-bit words that are read once, from a 16-byte aligned place in global memory."""
    words = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * 4),
        [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Int32(llvm.extractvalue(T.i32(), words, [i], loc=loc, ip=ip)) for i in range(4))


# Branches between the start of a product and its end make the compiler wait for it at once: predicates instead.


@dsl_user_op
def arrive_if(condition: Boolean, bar: cute.Pointer, *, loc=None, ip=None) -> None:
    """Arrive on an mbarrier, without a branch."""
    llvm.inline_asm(
        None,
        [bar.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), Int32(condition).ir_value(loc=loc, ip=ip)],
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared.b64 _, [$0]; }",
        "r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def store_if(condition: Boolean, pointer: cute.Pointer, value: Float32, *, loc=None, ip=None) -> None:
    """Store one fp32 in global memory, without a branch."""
    llvm.inline_asm(
        None,
        [
            pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            Float32(value).ir_value(loc=loc, ip=ip),
            Int32(condition).ir_value(loc=loc, ip=ip),
        ],
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }",
        "l,f,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def pack_halves(low: Float32, high: Float32, kind: str, *, loc=None, ip=None) -> Int32:
    """Two fp32 rounded to bf16 or fp16 in one word."""
    name = {"bfloat16": "bf16x2", "float16": "f16x2"}[kind]
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
            f"cvt.rn.{name}.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


@dsl_user_op
def unpack_halves(word: Int32, kind: str, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """The two numbers in a word of bf16 or fp16, the lower first."""
    text = {
        "bfloat16": "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
        "float16": "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
    }[kind]
    pair = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 2),
        [Int32(word).ir_value(loc=loc, ip=ip)],
        text,
        "=f,=f,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), pair, [i], loc=loc, ip=ip)) for i in range(2))


@cute.jit
def transpose_quad(words: tuple, lane: Int32) -> tuple:
    """Word i of lane j of four neighbours goes to lane i as its word j."""
    a, b, c, d = words
    odd, upper = lane % 2 == 1, lane % 4 >= 2
    got = cute.arch.shuffle_sync_bfly(a if odd else b, offset=1)
    a, b = (got if odd else a), (b if odd else got)
    got = cute.arch.shuffle_sync_bfly(c if odd else d, offset=1)
    c, d = (got if odd else c), (d if odd else got)
    got = cute.arch.shuffle_sync_bfly(a if upper else c, offset=2)
    a, c = (got if upper else a), (c if upper else got)
    got = cute.arch.shuffle_sync_bfly(b if upper else d, offset=2)
    b, d = (got if upper else b), (d if upper else got)
    return a, b, c, d


def block_loads(
    keys: cute.Tensor, layout: cute.ComposedLayout, shape: tuple[int, int]
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA of blocks of rows, `shape`, of a (token, head, dim) tensor into buffers of a layout."""
    by_head = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=[0, 2, 1]))
    buffer = cute.select(layout, mode=[0, 1])
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), by_head, buffer, shape)


@cute.jit
def load_block(
    load: cute.CopyAtom,
    source: cute.Tensor,
    target: cute.Tensor,
    shape: cutlass.Constexpr,
    start: Int32,
    head: Int32,
    stage: Int32,
    bar: cute.Pointer,
):
    """Start the TMA of a block's rows, from token `start`; called by a whole warp."""
    block = cute.local_tile(cute.domain_offset((start, 0), source[None, None, head]), shape, (0, 0))
    to, what = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(block, 0, 2)
    )
    cute.copy(load, what, to[None, stage], tma_bar_ptr=bar)


@cute.jit
def copy_rows(
    target: cute.Tensor,
    buffer: Int32,
    source: cute.Tensor,
    dim: int,
    rows: int,
    threads: int,
    thread: Int32,
    group: int,
    query: Int32,
    last: Int32,
    head: Int32,
):
    """Start copying `rows` rows of (token, head, dim) into buffers of 64 rows, swizzled as `operand_layout` has them.

    Row r is query `query + r // group` and head `head + r % group`; queries past the last are copies of it.
    """
    chunks = dim // 8
    plain = cute.recast_ptr(target.iterator, cute.make_swizzle(0, 4, 3))
    for turn in cutlass.range_constexpr(rows * chunks // threads):
        at = turn * threads + thread
        row, chunk = at // chunks, at % chunks
        place_from = Int64(cutlass.min(query + row // group, last)) * source.shape[1] + head + row % group
        inside = row % ROWS
        to = (buffer + row // ROWS) * (ROWS * dim) + chunk // 8 * (ROWS * 64)
        to += inside * 64 + ((chunk % 8) ^ (inside % 8)) * 8
        primitives.cp_async_shared_global(
            plain + to, source.iterator + place_from * dim + chunk * 8, 16, primitives.LoadCacheModifier.CG
        )
    cute.arch.cp_async_commit_group()


def allocate(memory: cutlass.memory.SmemAllocator, kind: str, layout: cute.ComposedLayout) -> cute.Tensor:
    """A shared-memory tensor of a layout."""
    return memory.allocate_tensor(DTYPES[kind], layout.outer, byte_alignment=1024, swizzle=layout.inner)


def chunk_place(line: Int64, group: int, dim: int, chunk: int, lane: Int32) -> Int64:
    """Where in single blocks' results a lane's 16 bytes of a line stand, its chunk of eight columns.

    Word w of chunk c holds columns `c * 32 + w * 8 + lane % 4 * 2` and the next one: an accumulator's order. Lines of
    two neighbouring heads, which neighbouring quads hold, alternate, so that together they fill whole lines of the
    cache. What belongs to another slot of the same query is `group * dim` further a slot.
    """
    if group % 2:
        return line * dim + (chunk * 4 + lane % 4) * 8
    return (line >> 1) * (2 * dim) + chunk * 64 + (line & 1) * 32 + lane % 4 * 8


def row_of(thread: Int32) -> Int32:
    """The first of the two rows of a warpgroup's tile that a thread holds; the other is 8 further."""
    return thread % WARPGROUP // 32 * 16 + thread % 32 // 4


def place(stage: Int32, stages: int) -> tuple[Int32, Int32]:
    """Buffer and phase of the n-th use of a ring; `stages` is a power of two."""
    return stage % stages, (stage // stages) & 1


@cute.jit
def softmax(scores: cute.Tensor, scale: float, words: cute.Tensor | None, kind: str):
    """Weights 2^(scale score - top) of the thread's two rows, rounded in pairs into `words`; their tops and sums.

    The top is scale times the row's maximum; a row of nothing but -inf has top 0 and sum 0. The scores stay as they
    are: writing over a product's accumulator makes the compiler wait for every other product first.
    """
    tops = [scores[0], scores[2]]
    for x in cutlass.range_constexpr(cute.size(scores)):
        tops[x // 2 % 2] = cute.arch.fmax(tops[x // 2 % 2], scores[x])
    sums = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(2):
        for offset in cutlass.range_constexpr(1, 3):
            tops[j] = cute.arch.fmax(tops[j], cute.arch.shuffle_sync_bfly(tops[j], offset=offset))
        tops[j] = Float32(0.0) if tops[j] == -Float32.inf else tops[j] * scale
    for x in cutlass.range_constexpr(cute.size(scores) // 2):
        j = x % 2
        pair = [cute.math.exp2(scores[2 * x + i] * scale - tops[j], fastmath=True) for i in range(2)]
        sums[j] += pair[0] + pair[1]
        if cutlass.const_expr(words is not None):
            words[x] = pack_halves(pair[0], pair[1], kind)  # pyright: ignore[reportOptionalSubscript]
    for j in cutlass.range_constexpr(2):
        for offset in cutlass.range_constexpr(1, 3):
            sums[j] += cute.arch.shuffle_sync_bfly(sums[j], offset=offset)
    return (tops[0], tops[1]), (sums[0], sums[1])


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def fake(dtype: type[cutlass.Numeric], shape: tuple, align: int = 16) -> cute.Tensor:
    """A row-major tensor to compile with."""
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def fake_stream():
    """The current stream of the caller's framework."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


@cute.jit
def accumulate(mma: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """Start accumulator += a b as one group of asynchronous instructions."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for k in cutlass.range_constexpr(cute.size(b, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, True)
        cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()


@dsl_user_op
def store_matrices(address: Int32, words, *, loc=None, ip=None) -> None:
    """Four 8 x 8 matrices of 16-bit numbers, spread over a warp as accumulators are, to shared memory (`stmatrix`).

    Lane l's address is that of row l % 8 of matrix l // 8, 16 bytes.
    """
    llvm.inline_asm(
        None,
        [Int32(address).ir_value(loc=loc, ip=ip)] + [Int32(word).ir_value(loc=loc, ip=ip) for word in words],
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        "r,r,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def load_pair(pointer: cute.Pointer, *, loc=None, ip=None) -> tuple[Float32, Float32]:
    """Two neighbouring fp32 from an 8-byte aligned place in shared memory."""
    pair = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 2),
        [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "ld.shared.v2.f32 {$0, $1}, [$2];",
        "=f,=f,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), pair, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def store_floats(pointer: cute.Pointer, values, *, loc=None, ip=None) -> None:
    """Four fp32 to a 16-byte aligned place in global memory."""
    llvm.inline_asm(
        None,
        [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
        + [Float32(value).ir_value(loc=loc, ip=ip) for value in values],
        "st.global.v4.f32 [$0], {$1, $2, $3, $4};",
        "l,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def store_pair(pointer: cute.Pointer, first: Float32, second: Float32, *, loc=None, ip=None) -> None:
    """Two neighbouring fp32 to an 8-byte aligned place in global memory."""
    llvm.inline_asm(
        None,
        [
            pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
            Float32(first).ir_value(loc=loc, ip=ip),
            Float32(second).ir_value(loc=loc, ip=ip),
        ],
        "st.global.v2.f32 [$0], {$1, $2};",
        "l,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
