"""Rows of a bf16 matrix from wgmma accumulators through shared memory by TMA, one warp by itself.

A warp owns a few boxes of 16 rows x 64 bf16 columns. Its threads hold fragments of 8x8 elements as the tensor
core left them (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"), which stmatrix puts in rows; the
128-byte swizzle keeps the 8 rows of a fragment out of each other's banks. A box travels as one TMA copy,
which clips what lies beyond the tensor. No other warp is involved, so warp barriers are all the
synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.utils import LayoutEnum

BOX_ROWS = 16
BOX_COLUMNS = 64
BOX_BYTES = BOX_ROWS * BOX_COLUMNS * 2
FRAGMENT = 8  # rows and columns of a fragment
SIXTEENS = BOX_COLUMNS // 16  # 16x16 blocks of a box: what one stmatrix writes


def box_layout(count: int):
    """Shared layout of `count` boxes, (BOX_ROWS, BOX_COLUMNS, count)."""
    return sm90.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, (BOX_ROWS, BOX_COLUMNS), count)


def box_tma(op, tensor):
    """(atom, coordinate tensor) that moves single boxes of a row-major (M, N) bf16 tensor."""
    layout = cute.select(box_layout(1), mode=[0, 1])
    # With dynamic extents: a static one of up to a box would give box coordinates stride 0, so that the boxes
    # beyond the tensor, which TMA clips, would fall on the first one.
    extents = tuple(Int32(extent) for extent in tensor.shape)
    tensor = cute.make_tensor(tensor.iterator, cute.make_layout(extents, stride=tensor.stride))
    info = cpasync.make_tiled_tma_atom(op, tensor, layout, (BOX_ROWS, BOX_COLUMNS))
    return info[0], info[1]


@dataclass(frozen=True)
class WarpBoxes:
    """`count` boxes from `first` on of `shared` (BOX_ROWS, BOX_COLUMNS, box), owned by the calling warp."""

    shared: Any
    first: Any
    count: cutlass.Constexpr[int]

    def fill(self, blocks: list) -> None:
        """Fill boxes, ready to be sent. blocks[SIXTEENS * i + n]: columns [16 n, 16 n + 16) of box i, see
        `write`."""
        self.reclaim()
        for number, fragments in enumerate(blocks):
            self.write(*divmod(number, SIXTEENS), fragments)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def send(self, tma, targets: list) -> None:
        """Store box i to `targets[i]` = (row, column, ...) in boxes of the output, all as one bulk group."""
        shared, tiles = self._partition(tma)
        with cute.arch.elect_one():
            for box, target in enumerate(targets):
                cute.copy(tma.atom, shared[None, self.first + box], tiles[(None, *target)])
            cute.arch.cp_async_bulk_commit_group()

    def reclaim(self) -> None:
        """Make the boxes writable again: wait until earlier stores have read them."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

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

    def finish(self) -> None:
        """Wait until every store has reached memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    def _partition(self, tma):
        tiles = cute.local_tile(tma.tensor, (BOX_ROWS, BOX_COLUMNS), (None,) * cute.rank(tma.tensor))
        return cpasync.tma_partition(
            tma.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.shared, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )


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
