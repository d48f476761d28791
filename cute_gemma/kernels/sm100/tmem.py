"""Accumulators in tensor memory as an epilogue reads them: one thread a row.

With the 32x32b shape of tcgen05.ld, warp w of a warpgroup reaches TMEM lanes 32 w .. 32 w + 31 and thread t
of it receives lane t, register i being column i (PTX ISA, "tcgen05.ld", shape .32x32b). An accumulator of 128
rows has row r in lane r, whether one CTA computes it or a pair (each CTA then holds its 128 of the 256 rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

LANE_STRIDE = 1 << 16  # a TMEM address is lane << 16 | column (PTX ISA, "Tensor Memory Addressing")
CHUNK = 32  # columns a tcgen05.ld or .st moves


@dataclass(frozen=True)
class AccumulatorRows:
    """The calling thread's row of one accumulator, in chunks of 32 fp32 columns; made by `accumulator_rows`.

    Values travel as 32-bit words. As fp32 the compiler would pair them up right after the load, ahead of the
    wait that makes them valid (PTX ISA, "tcgen05.wait": registers of a tcgen05.ld are not to be touched
    before).

    source, target: that row as tcgen05.ld and .st address it, (..., chunk).
    """

    load: Any
    store: Any
    source: Any
    target: Any
    chunks: cutlass.Constexpr[int]

    def read(self, chunk):
        """Columns [32 chunk, 32 chunk + 32), the bits of 32 fp32 values as an Int32 register tensor."""
        registers = cute.make_rmem_tensor(_row_shape(self.load), Int32)
        cute.copy(self.load, self.source[None, None, None, chunk], registers)
        cute.arch.fence_view_async_tmem_load()
        return cute.make_tensor(registers.iterator, cute.make_layout(CHUNK))

    def write(self, chunk, values) -> None:
        """Put 32 such words back; `written` orders them before later reads."""
        registers = cute.make_tensor(values.iterator, cute.make_layout(_row_shape(self.load)))
        cute.copy(self.store, registers, self.target[None, None, None, chunk])

    def written(self) -> None:
        """Wait for this thread's writes."""
        cute.arch.fence_view_async_tmem_store()


def accumulator_rows(address, columns: int, slot) -> AccumulatorRows:
    """Rows of accumulator `slot` of the accumulators of `columns` columns each that start at `address`."""
    thread = cute.arch.thread_idx()[0] % 128
    words = cute.recast_ptr(address, dtype=Int32)
    layout = cute.make_layout((128, columns, 2), stride=(LANE_STRIDE, 1, columns))
    chunks = cute.flat_divide(cute.make_tensor(words, layout), (128, CHUNK))  # (128, CHUNK, 1, N/CHUNK, 2)
    one = chunks[None, None, 0, 0, 0]
    load = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(CHUNK)), Int32), one
    )
    store = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(CHUNK)), Int32), one
    )
    source = load.get_slice(thread).partition_S(chunks)[None, None, None, 0, None, slot]
    target = store.get_slice(thread).partition_D(chunks)[None, None, None, 0, None, slot]
    return AccumulatorRows(load, store, source, target, columns // CHUNK)


def _row_shape(load):
    """What a thread holds of 128 x CHUNK elements, in the shape the copy atoms want: its row."""
    return load.get_slice(0).partition_D(cute.make_identity_tensor((128, CHUNK))).shape


@dsl_user_op
def fence_after_sync(*, loc=None, ip=None) -> None:
    """tcgen05.fence::after_thread_sync: later tcgen05 operations follow what a barrier wait has ordered."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_before_sync(*, loc=None, ip=None) -> None:
    """tcgen05.fence::before_thread_sync: earlier tcgen05 operations precede what an arrive publishes."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)
