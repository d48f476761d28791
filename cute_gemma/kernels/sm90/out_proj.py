"""Output projection for sm_90a: see kernels/common/out_proj.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_gemma.kernels.common.out_proj import OutputProjectionBase
from cute_gemma.kernels.sm90.boxes import BOX_COLUMNS, BOX_ROWS
from cute_gemma.kernels.sm90.gemm import PersistentGemm
from cute_gemma.kernels.sm90.tuning import SM_COUNT, GemmTuning, choose_tuning

_SHAPES = ((128, 256), (128, 192), (128, 128), (128, 64))  # (tile_m, tile_n) to choose from


def default_tuning(rows: int, hidden: int, features: int, sm_count: int = SM_COUNT) -> GemmTuning:
    """The tuning for M = `rows`; sizes as in `OutputProjection`."""
    return choose_tuning(rows, (hidden,), features, _SHAPES, sm_count)


@dataclass(frozen=True)
class OutputProjection(OutputProjectionBase, PersistentGemm):
    """features: H*D, the inner size; hidden: C. tuning: see `default_tuning`."""

    hidden: int
    features: int
    tuning: GemmTuning = field(default_factory=GemmTuning)
    b_evict_first = True

    @property
    def boxes(self) -> int:
        """As many as leave (128, 64) tiles eight stages and (128, 128) ones five: with six these took 25.2 us
        instead of 20.7 at M = 586 on an H200."""
        if self.tuning.tile_n == BOX_COLUMNS:
            return 1
        return 4 if self.tuning.stage_bytes <= 32768 else 2

    def epilogue(self, strip, unit, io, ready):
        box_row = (unit.m * self.tuning.unit_rows + strip.row) // BOX_ROWS
        tma, _, boxes = io
        first = unit.n * (self.tuning.tile_n // BOX_COLUMNS)
        strip.store(
            boxes, first, lambda columns: boxes.store(tma.out, [(box_row, column) for column in columns])
        )
