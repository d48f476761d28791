"""Small kernels with which the launcher, the caches and the inspection are tested."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_gemma.jit import ScalarArg, TensorArg


@dataclass(frozen=True)
class RowScale:
    """y[m, j] = x[m, j] * factor + bias[j] for 8 columns; y may have any row stride."""

    threads: int = 64

    def signature(self):
        return (
            TensorArg("x", "f32", ("m", 8)),
            TensorArg("bias", "f32", (8,)),
            TensorArg("y", "f32", ("m", 8), strides=("ld", 1)),
            ScalarArg("factor", "f32"),
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, bias: cute.Tensor, y: cute.Tensor, factor: Float32):
        row = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        if row < x.shape[0]:
            for j in cutlass.range_constexpr(8):
                y[row, j] = x[row, j] * factor + bias[j]

    @cute.jit
    def __call__(
        self, x: cute.Tensor, bias: cute.Tensor, y: cute.Tensor, factor: Float32, stream: cuda.CUstream
    ):
        grid = (cute.ceil_div(x.shape[0], self.threads), 1, 1)
        self.kernel(x, bias, y, factor).launch(
            grid=grid, block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )


@dataclass(frozen=True)
class Batched:
    """y = x + offset on [B, S, 16] bf16, with the batch stride passed to the kernel; out[0] = wide."""

    def signature(self):
        return (
            TensorArg("x", "bf16", ("b", "s", 16)),
            TensorArg("y", "bf16", ("b", "s", 16)),
            TensorArg("out", "i32", (4,)),
            ScalarArg("offset", "i32"),
            ScalarArg("wide", "i64"),
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, offset: Int32, wide: Int64):
        column = cute.arch.thread_idx()[0]
        s, b, _ = cute.arch.block_idx()
        y[b, s, column] = (x[b, s, column].to(Float32) + Float32(offset)).to(cutlass.BFloat16)
        out[0] = Int32(wide >> 32)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        y: cute.Tensor,
        out: cute.Tensor,
        offset: Int32,
        wide: Int64,
        stream: cuda.CUstream,
    ):
        grid = (x.shape[1], x.shape[0], 1)
        self.kernel(x, y, out, offset, wide).launch(grid=grid, block=(16, 1, 1), stream=stream)


@dataclass(frozen=True)
class Reverse:
    """y[i] = x[n - 1 - i] within each block of 128, through dynamic shared memory."""

    def signature(self):
        return (TensorArg("x", "f32", ("n",)), TensorArg("y", "f32", ("n",)))

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        staged = SmemAllocator().allocate_tensor(Float32, cute.make_layout(128), 16)
        thread = cute.arch.thread_idx()[0]
        first = cute.arch.block_idx()[0] * 128
        count = cutlass.min(x.shape[0] - first, 128)
        if thread < count:
            staged[thread] = x[first + thread]
        cute.arch.sync_threads()
        if thread < count:
            y[first + thread] = staged[count - 1 - thread]

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(
            grid=(cute.ceil_div(x.shape[0], 128), 1, 1), block=(128, 1, 1), stream=stream
        )


@dataclass(frozen=True)
class LocalMemory:
    """Indexes registers dynamically, which the compiler can only do in local memory."""

    def signature(self):
        return (TensorArg("x", "f32", (64,)), TensorArg("y", "f32", (64,)), ScalarArg("pick", "i32"))

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, pick: Int32):
        values = cute.make_rmem_tensor(64, Float32)
        for i in cutlass.range_constexpr(64):
            values[i] = x[i] * x[63 - i]
        for i in cutlass.range(pick, unroll=1):
            values[(i * pick) & 63] = cute.math.exp2(values[(i + pick) & 63], fastmath=True)
        y[cute.arch.thread_idx()[0]] = values[pick & 63]

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, pick: Int32, stream: cuda.CUstream):
        self.kernel(x, y, pick).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
