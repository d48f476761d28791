"""Boxes of a row-major bf16 matrix in shared memory, moved by TMA, each warp by itself.

A warp owns a few boxes of some rows x 64 columns, swizzled by 128 bytes. A box travels as one TMA copy, which
clips what lies beyond the tensor (loads read zeros there). No other warp is involved, so warp barriers are all
the synchronisation. How a warp's threads fill a box is the architecture's.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.typing import BFloat16, Int32
from cutlass.tensor_utils import LayoutEnum

BOX_COLUMNS = 64


def box_layout(rows: int, count: int):
    """Shared layout of `count` boxes, (rows, BOX_COLUMNS, count)."""
    return sm90_utils.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, (rows, BOX_COLUMNS), count)


def box_tma(op, tensor, rows: int):
    """(atom, coordinate tensor) that moves single boxes of a row-major (M, N) bf16 tensor."""
    layout = cute.select(box_layout(rows, 1), mode=[0, 1])
    # With dynamic extents: a static one of up to a box would give box coordinates stride 0, so that the boxes
    # beyond the tensor, which TMA clips, would fall on the first one.
    extents = tuple(Int32(extent) for extent in tensor.shape)
    tensor = cute.make_tensor(tensor.iterator, cute.make_layout(extents, stride=tensor.stride))
    info = cpasync.make_tiled_tma_atom(op, tensor, layout, (rows, BOX_COLUMNS))
    return info[0], info[1]


@dataclass(frozen=True)
class BoxesOfWarp:
    """The boxes from `first` on of `shared` (rows, BOX_COLUMNS, box), owned by the calling warp."""

    shared: Any
    first: Any
    rows: ClassVar[int]

    def reclaim(self) -> None:
        """Make the boxes writable again: wait until earlier stores have read them."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    def publish(self) -> None:
        """Make what the warp's threads wrote visible to its next `store`."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

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
        tiles = cute.local_tile(tma.tensor, (self.rows, BOX_COLUMNS), (None,) * cute.rank(tma.tensor))
        return cpasync.tma_partition(
            tma.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.shared, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
