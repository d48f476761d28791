"""Output projection for sm_100a: see kernels/common/out_proj.py for what it computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import cutlass
import cutlass.cute as cute

from cute_gemma.kernels.common.out_proj import OutputLoads, OutputProjectionBase
from cute_gemma.kernels.sm100.boxes import BOX_COLUMNS, BOX_ROWS
from cute_gemma.kernels.sm100.gemm import PersistentGemm
from cute_gemma.kernels.sm100.tuning import SM_COUNT, GemmTuning, choose_tuning


def default_tuning(rows: int, hidden: int, features: int, sm_count: int = SM_COUNT) -> GemmTuning:
    """The tuning for M = `rows`; sizes as in `OutputProjection`."""
    return choose_tuning(rows, (hidden,), features, (64, 128, 256), sm_count)


@dataclass(frozen=True)
class OutputProjection(OutputProjectionBase, PersistentGemm):
    """features: H*D, the inner size; hidden: C. tuning: see `default_tuning`."""

    hidden: int
    features: int
    tuning: GemmTuning = field(default_factory=GemmTuning)
    clusters = True

    def loads(self, tma, mmas, operands, rank) -> OutputLoads:
        attn = self.partition_a(tma.attn, mmas[0], operands[0][0], rank)
        weight = self.partition_b(tma.weight, mmas[0], operands[0][1], rank)
        return OutputLoads(attn, weight, self, rank)

    @cute.jit
    def epilogue(self, pairs, unit, index, io, row):
        """Store the row, as many boxes at a time as the warp has."""
        tma, _, boxes = io
        box_row = (unit.m * self.tuning.unit_rows + row) // BOX_ROWS
        per_tile = self.tuning.tile_n // BOX_COLUMNS
        for first in cutlass.range_constexpr(0, per_tile, self.boxes):
            count = min(self.boxes, per_tile - first)
            boxes.fill(pairs[first * BOX_COLUMNS // 2 : (first + count) * BOX_COLUMNS // 2])
            boxes.store(tma.out, [(box_row, unit.n * per_tile + first + box) for box in range(count)])
