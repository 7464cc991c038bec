"""Small kernels that the compiler and its check are tried on: sound ones, and each kind that must be refused."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.utils import LayoutEnum, hopper_helpers

THREADS = 128


@dataclass(frozen=True)
class Scale:
    """y = factor x."""

    factor: int

    def fakes(self) -> tuple:
        x, y = (make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),)) for _ in range(2))
        return x, y, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x, y, stream):
        self.kernel(x, y).launch(
            grid=(cute.ceil_div(cute.size(x), THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x, y):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < cute.size(x):
            y[i] = x[i] * self.factor


@dataclass(frozen=True)
class Crowded:
    """1024 threads that each keep so many values at a time; then a launch whose shared memory the call decides."""

    values: int

    def fakes(self) -> tuple:
        x, y = (make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),)) for _ in range(2))
        return x, y, cutlass.Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x, y, size: cutlass.Int32, stream):
        self.crowd(x, y).launch(grid=(1, 1, 1), block=(1024, 1, 1), stream=stream)
        self.turn(x, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, smem=size)

    @cute.kernel
    def crowd(self, x, y):
        thread = cute.arch.thread_idx()[0]
        kept = cute.make_rmem_tensor(cute.make_layout(self.values), cutlass.Float32)
        for i in cutlass.range_constexpr(self.values):
            kept[i] = x[i * 1024 + thread]
        for i in cutlass.range_constexpr(self.values):
            y[i * 1024 + thread] = kept[self.values - 1 - i] * kept[i * 7 % self.values]

    @cute.kernel
    def turn(self, x, y):
        thread = cute.arch.thread_idx()[0]
        shared = cute.make_tensor(cute.arch.get_dyn_smem(cutlass.Float32), cute.make_layout(THREADS))
        shared[thread] = x[thread]
        cute.arch.sync_threads()
        y[thread] = shared[THREADS - 1 - thread]


@dataclass(frozen=True)
class Product:
    """One 64 x 64 x 64 product of bf16; `broken` touches its result between two instructions of it."""

    broken: bool

    def fakes(self) -> tuple:
        def matrix(dtype):
            return make_fake_compact_tensor(dtype, (cute.sym_int(), 64), stride_order=(1, 0), assumed_align=16)

        a, b, c = matrix(cutlass.BFloat16), matrix(cutlass.BFloat16), matrix(cutlass.Float32)
        return a, b, c, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, a, b, c, stream):
        self.kernel(a, b, c).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, a, b, c):
        thread = cute.arch.thread_idx()[0]
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, cutlass.BFloat16, 64)
        atom = warpgroup.make_smem_layout_atom(kind, cutlass.BFloat16)
        layout = cute.tile_to_shape(atom, (64, 64), order=(0, 1))
        memory = cutlass.memory.SmemAllocator()
        left = memory.allocate_tensor(cutlass.BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        right = memory.allocate_tensor(cutlass.BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        for i in cutlass.range_constexpr(64 * 64 // THREADS):
            row, column = (i * THREADS + thread) // 64, thread % 64
            left[row, column] = a[row, column]
            right[row, column] = b[row, column]
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        major = OperandMajorMode.K
        mma = hopper_helpers.make_trivial_tiled_mma(
            cutlass.BFloat16, cutlass.BFloat16, major, major, cutlass.Float32, (1, 1, 1), (64, 64)
        )
        part = mma.get_slice(thread)
        rows = mma.make_fragment_A(part.partition_A(left))
        columns = mma.make_fragment_B(part.partition_B(right))
        product = cute.make_rmem_tensor(mma.partition_shape_C((64, 64)), cutlass.Float32)
        step = cute.make_mma_atom(mma.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            step.set(warpgroup.Field.ACCUMULATE, k != 0)
            cute.gemm(step, product, rows[None, None, k], columns[None, None, k], product)
            if cutlass.const_expr(self.broken):
                product[0] = product[0] * 2.0
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(product)):
            c[thread, i] = product[i]
