"""Rows of a bf16 matrix through shared memory by TMA, one warp by itself.

A warp owns a few boxes of 32 rows x 64 bf16 columns. Thread t works on row t, 16 bytes at a time; the
128-byte swizzle keeps the 32 rows of such an access out of each other's banks. A box travels as one TMA copy,
which clips what lies beyond the tensor (loads read zeros there). No other warp is involved, so warp barriers
are all the synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

BOX_ROWS = 32
BOX_COLUMNS = 64
BOX_BYTES = BOX_ROWS * BOX_COLUMNS * 2
PAIRS = 4  # bf16 pairs in the 16 bytes a thread moves at a time
VECTORS = BOX_COLUMNS // (2 * PAIRS)  # such moves in a box row


def box_layout(count: int):
    """Shared layout of `count` boxes, (BOX_ROWS, BOX_COLUMNS, count)."""
    return sm100.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, (BOX_ROWS, BOX_COLUMNS), count)


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
    """The boxes from `first` on of `shared` (BOX_ROWS, BOX_COLUMNS, box), owned by the calling warp."""

    shared: Any
    first: Any

    def address(self, box: int, vector: int):
        """Where the calling thread's 8 elements number `vector` of a box are.

        The 128-byte swizzle exclusive-ors bits 4-6 of an address with its bits 7-9, here the row modulo 8.
        Written out, so that a thread needs one register and one instruction for any of its addresses.
        """
        lane = cute.arch.lane_idx()
        row = cute.recast_ptr(self.shared.iterator, dtype=Int32).toint() + self.first * BOX_BYTES + lane * 128
        return ((row + lane % 8 * 16) ^ (vector * 16)) + box * BOX_BYTES

    def read(self, box: int, vector: int) -> list:
        """The calling thread's 8 elements number `vector` of a box, as 4 pairs."""
        return self._vector(box, vector).load()

    def write(self, box: int, vector: int, values: list) -> None:
        """Overwrite those elements with 4 pairs."""
        pairs = cute.make_rmem_tensor(PAIRS, Int32)
        for index, value in enumerate(values):
            pairs[index] = value
        self._vector(box, vector).store(pairs.load())

    def _vector(self, box: int, vector: int):
        pointer = cute.make_ptr(Int32, self.address(box, vector), cute.AddressSpace.smem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(PAIRS))

    def reclaim(self) -> None:
        """Make the boxes writable again: wait until earlier stores have read them."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    def publish(self) -> None:
        """Make what the warp's threads wrote visible to its next `store`."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def fill(self, pairs: list) -> None:
        """Put a row's pairs into as many boxes as they take, ready for `store`."""
        self.reclaim()
        for at in range(0, len(pairs), PAIRS):
            box, vector = divmod(at // PAIRS, VECTORS)
            self.write(box, vector, pairs[at : at + PAIRS])
        self.publish()

    def store(self, tma, targets) -> None:
        """Store box i to `targets[i]` = (row, column, ...) in boxes of the output, all as one bulk group."""
        shared, tiles = self._partition(tma)
        with cute.arch.elect_one():
            for box, target in enumerate(targets):
                cute.copy(tma.atom, shared[None, self.first + box], tiles[(None, *target)])
            cute.arch.cp_async_bulk_commit_group()

    def load(self, tma, sources, first_box: int, barrier) -> None:
        """Fetch `sources[i]` = (row, column) into box `first_box` + i, counted by `barrier`."""
        shared, tiles = self._partition(tma)
        for box, (row, column) in enumerate(sources, start=first_box):
            cute.copy(tma.atom, tiles[None, row, column], shared[None, self.first + box], tma_bar_ptr=barrier)

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
