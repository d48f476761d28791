"""Rows of a bf16 matrix through shared memory: boxes of 32 rows, see kernels/common/boxes.py.

Thread t works on row t, 16 bytes at a time; the 128-byte swizzle keeps the 32 rows of such an access out of
each other's banks.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass.cute.typing import Int32

from cute_gemma.kernels.common.boxes import BOX_COLUMNS, BoxesOfWarp

BOX_ROWS = 32
BOX_BYTES = BOX_ROWS * BOX_COLUMNS * 2
PAIRS = 4  # bf16 pairs in the 16 bytes a thread moves at a time
VECTORS = BOX_COLUMNS // (2 * PAIRS)  # such moves in a box row


@dataclass(frozen=True)
class WarpBoxes(BoxesOfWarp):
    """Boxes of BOX_ROWS rows."""

    rows = BOX_ROWS

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

    def fill(self, pairs: list) -> None:
        """Put a row's pairs into as many boxes as they take, ready for `store`."""
        self.reclaim()
        for at in range(0, len(pairs), PAIRS):
            box, vector = divmod(at // PAIRS, VECTORS)
            self.write(box, vector, pairs[at : at + PAIRS])
        self.publish()
