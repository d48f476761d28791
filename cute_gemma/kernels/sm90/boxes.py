"""Rows of a bf16 matrix from wgmma accumulators through shared memory: boxes of 16 rows, see
kernels/common/boxes.py.

A warp's threads hold fragments of 8x8 elements as the tensor core left them (PTX ISA, "Register Fragments for
wgmma.mma_async.m64nNk16"), which stmatrix puts in rows; the 128-byte swizzle keeps the 8 rows of a fragment out
of each other's banks.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.typing import Int32
from cutlass.cutlass_dsl import dsl_user_op

from cute_gemma.kernels.common.boxes import BOX_COLUMNS, BoxesOfWarp

BOX_ROWS = 16
BOX_BYTES = BOX_ROWS * BOX_COLUMNS * 2
FRAGMENT = 8  # rows and columns of a fragment
SIXTEENS = BOX_COLUMNS // 16  # 16x16 blocks of a box: what one stmatrix writes


@dataclass(frozen=True)
class WarpBoxes(BoxesOfWarp):
    """`count` boxes of BOX_ROWS rows."""

    rows = BOX_ROWS
    count: cutlass.Constexpr[int]

    def fill(self, blocks: list) -> None:
        """Fill boxes, ready for `store`. blocks[SIXTEENS * i + n]: columns [16 n, 16 n + 16) of box i, see
        `write`."""
        self.reclaim()
        for number, fragments in enumerate(blocks):
            self.write(*divmod(number, SIXTEENS), fragments)
        self.publish()

    def write(self, box: int, sixteen: int, fragments: list) -> None:
        """Columns [16 sixteen, 16 sixteen + 16) of a box: the fragments of rows 0-7 and of rows 8-15 of its
        left half, then of its right half, each a bf16 pair a thread.

        Thread l gives the address of row l % 16, left half for l < 16. The 128-byte swizzle exclusive-ors
        bits 4-6 of an address with its bits 7-9, here the row modulo 8.
        """
        lane = cute.arch.lane_idx()
        row = (
            cute.recast_ptr(self.shared.iterator, dtype=Int32).toint()
            + self.first * BOX_BYTES
            + lane % 16 * 128
        )
        column = (lane % 8 * 16) ^ (lane // 16 * 16)
        store_matrix(((row + column) ^ (sixteen * 32)) + box * BOX_BYTES, fragments)


@dsl_user_op
def store_matrix(address, fragments: list, *, loc=None, ip=None) -> None:
    """stmatrix of four 8x8 fragments; thread l gives the shared address of row l % 8 of fragment l // 8."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    nvvm.stmatrix(
        pointer.to_llvm_ptr(loc=loc, ip=ip),
        [Int32(fragment).ir_value(loc=loc, ip=ip) for fragment in fragments],
        layout=nvvm.MMALayout.row,
        loc=loc,
        ip=ip,
    )
