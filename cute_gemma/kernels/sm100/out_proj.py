"""Output projection for sm_100a: out[m, c] = bf16(sum_k attn[m, k] * wo[c, k]).

Shapes: attn [M, H*D], wo [C, H*D], out [M, C], all bf16, row-major. Any M >= 1; C and H*D divisible by 8 (TMA
needs rows of a multiple of 16 bytes). Tiles at the edges are clipped by TMA.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute

from cute_gemma.jit.signature import TensorArg
from cute_gemma.kernels.common.schedule import Section, plan
from cute_gemma.kernels.sm100.boxes import BOX_COLUMNS, BOX_ROWS
from cute_gemma.kernels.sm100.gemm import PersistentGemm, Workspace
from cute_gemma.kernels.sm100.tuning import BLOCK_K, SM_COUNT, GemmTuning, choose_tuning


@dataclass(frozen=True)
class OutputTma:
    """TMA tensors of the kernel."""

    attn: Any
    weight: Any
    out: Any


@dataclass(frozen=True)
class OutputLoads:
    """Weights do not depend on the attention kernel, its output does. m_tile: see `PersistentGemm.m_tile`."""

    attn: Any
    weight: Any
    m_tile: Any

    def early(self, unit, k, stage, barrier):
        self.weight.load(stage, barrier, unit.n, k)

    def late(self, unit, k, stage, barrier):
        self.attn.load(stage, barrier, self.m_tile(unit), k)


def default_tuning(rows: int, hidden: int, features: int, sm_count: int = SM_COUNT) -> GemmTuning:
    """The tuning for M = `rows`; sizes as in `OutputProjection`."""
    return choose_tuning(rows, (hidden,), features, (64, 128, 256), sm_count)


@dataclass(frozen=True)
class OutputProjection(PersistentGemm):
    """features: H*D, the inner size; hidden: C. tuning: see `default_tuning`."""

    hidden: int
    features: int
    tuning: GemmTuning = field(default_factory=GemmTuning)
    clusters = True

    def __post_init__(self) -> None:
        for name in ("hidden", "features"):
            value = getattr(self, name)
            if value < 8 or value % 8:
                raise ValueError(f"{name}: {value}, expected a positive multiple of 8")

    def signature(self) -> tuple:
        args = (
            TensorArg("attn", "bf16", ("m", self.features)),
            TensorArg("o_proj_weight", "bf16", (self.hidden, self.features)),
            TensorArg("out", "bf16", ("m", self.hidden)),
        )
        return args + self.workspace_signature()

    @cute.jit
    def __call__(self, attn: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, *rest):
        """Host entry; rest = (partials, counters, stream) with stream-K, else (stream,)."""
        tma = OutputTma(self.tma_a(attn), self.tma_b(weight), self.tma_store(out))
        section = Section(
            cute.ceil_div(attn.shape[0], self.tuning.unit_rows),
            cute.ceil_div(self.hidden, self.tuning.tile_n),
            cute.ceil_div(self.features, BLOCK_K),
        )
        schedule = plan((section,), self.tuning.workers, self.tuning.group_m, self.tuning.stream_k)
        workspace = Workspace(*rest[:2]) if cutlass.const_expr(self.tuning.stream_k) else None
        self.launch(tma, schedule, workspace, rest[-1])

    def loads(self, tma, mmas, operands, rank) -> OutputLoads:
        return OutputLoads(
            self.partition_a(tma.attn, mmas[0], operands[0][0], rank),
            self.partition_b(tma.weight, mmas[0], operands[0][1], rank),
            self.m_tile(rank),
        )

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
