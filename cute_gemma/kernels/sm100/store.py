"""Output rows through shared memory to global memory by TMA, one warp by itself.

A warp owns a few boxes of 32 rows x 64 bf16 columns. Thread t writes row t, 16 bytes at a time; the 128-byte swizzle
keeps the 32 rows of such a write out of each other's banks. A box leaves as one TMA store, which clips what lies
beyond the tensor. No other warp is involved, so a warp barrier is all the synchronisation there is.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16
from cutlass.cute.nvgpu import cpasync

BOX_ROWS = 32
BOX_COLUMNS = 64
VECTOR = 8  # bf16 elements in 16 bytes


class RowStore:
    """The boxes [first, first + count) of `boxes` (BOX_ROWS, BOX_COLUMNS, box), owned by the calling warp."""

    def __init__(self, boxes, first, count: int):
        self._boxes = boxes
        self._first = first
        self.count = count
        self._row = cute.arch.lane_idx()
        self._atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=128)

    def begin(self) -> None:
        """Make the boxes writable again: wait until earlier stores have read them."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    def write(self, box: int, column: int, values) -> None:
        """Put 8 bf16 register values at `column` of the calling thread's row of a box."""
        row = self._boxes[self._row, None, self._first + box]
        cute.copy(self._atom, values, cute.local_tile(row, (VECTOR,), (column // VECTOR,)))

    def commit(self, tma, targets) -> None:
        """Store box i to `targets[i]` = (row, column, ...) box coordinates of the output, as one bulk group."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        tiles = cute.local_tile(tma.tensor, (BOX_ROWS, BOX_COLUMNS), (None,) * cute.rank(tma.tensor))
        shared, tiles = cpasync.tma_partition(
            tma.atom, 0, cute.make_layout(1), cute.group_modes(self._boxes, 0, 2), cute.group_modes(tiles, 0, 2))
        for box, target in enumerate(targets):
            cute.copy(tma.atom, shared[None, self._first + box], tiles[(None, *target)])
        cute.arch.cp_async_bulk_commit_group()

    @staticmethod
    def finish() -> None:
        """Wait until every store has reached memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
