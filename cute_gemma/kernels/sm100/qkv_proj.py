"""QKV projection with QK norm and RoPE for sm_100a: see kernels/common/qkv_proj.py for what it computes.

Epilogue: a thread owns a row of one or two whole heads, so the mean of squares and the pairs (d, d + D/2)
stay within a thread. cos and sin of a warp's 32 rows are fetched by TMA while the tile is being multiplied, as
many columns as four boxes hold (64 of each half of a head, a *step*); the rotated values take their place and
leave by TMA again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cute_gemma.kernels.common import bf16, norm_rope
from cute_gemma.kernels.common.qkv_proj import K, Q, QKVLoads, QKVProjectionBase, V
from cute_gemma.kernels.sm100.boxes import BOX_BYTES, BOX_COLUMNS, BOX_ROWS, PAIRS, VECTORS
from cute_gemma.kernels.sm100.gemm import EPILOGUE_WARPS, PersistentGemm
from cute_gemma.kernels.sm100.tuning import SM_COUNT, GemmTuning, choose_tuning

ROPE_BOXES = 4  # cos and sin, each a box of the low and one of the high half of a head


@dataclass(frozen=True)
class Scratch:
    """Shared memory of the epilogue: (1 + w) in fp32, (D, 2); one barrier for each warp and step."""

    weights: Any
    barriers: Any


def default_tuning(
    rows: int, hidden: int, heads: int, kv_heads: int, head_dim: int = 128, sm_count: int = SM_COUNT
) -> GemmTuning:
    """The tuning for M = `rows`; sizes as in `QKVProjection`."""
    columns = tuple(count * head_dim for count in (heads, kv_heads, kv_heads))
    return choose_tuning(rows, columns, hidden, (128, 256) if head_dim == 128 else (256,), sm_count)


@dataclass(frozen=True)
class QKVProjection(QKVProjectionBase, PersistentGemm):
    """See QKVProjectionBase. tuning: see `default_tuning`; tile_n a multiple of head_dim (default: one head)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    eps: float = 1e-6
    qk_norm: bool = True
    save_for_backward: bool = False
    tuning: GemmTuning | None = None
    clusters = True

    def __post_init__(self) -> None:
        if self.tuning is None:
            object.__setattr__(self, "tuning", GemmTuning(tile_n=self.head_dim))
        self.check()

    @property
    def boxes(self) -> int:
        return ROPE_BOXES

    @property
    def steps(self) -> int:
        """Steps in which cos and sin of a head are used."""
        return self.head_dim // (2 * BOX_COLUMNS)

    @property
    def scratch_bytes(self) -> int:
        return 2 * self.head_dim * 4 + EPILOGUE_WARPS * self.steps * 8

    def make_scratch(self, smem) -> Scratch:
        return Scratch(
            smem.allocate_tensor(Float32, cute.make_layout((self.head_dim, 2)), 16),
            smem.allocate_array(Int64, EPILOGUE_WARPS * self.steps),
        )

    @cute.jit
    def prepare_epilogue(self, tma, scratch) -> None:
        """Fill the scratch; the barrier after it is the one that publishes the TMEM address."""
        thread = cute.arch.thread_idx()[0]
        if cutlass.const_expr(self.qk_norm):
            for part in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(0, self.head_dim, 128):
                    weight = tma.norms[part][thread + column].to(Float32)
                    scratch.weights[thread + column, part] = weight + 1.0
        if thread < EPILOGUE_WARPS * self.steps:
            cute.arch.mbarrier_init(scratch.barriers + thread, 1)
        cute.arch.mbarrier_init_fence()

    def table(self, tensor):
        return self.tma_rows(tensor)

    def loads(self, tma, mmas, operands, rank) -> QKVLoads:
        x = self.partition_a(tma.x, mmas[0], operands[0][0], rank)
        weights = tuple(self.partition_b(weight, mmas[0], operands[0][1], rank) for weight in tma.weights)
        return QKVLoads(x, weights, self, rank)

    def barrier(self, scratch, step: int):
        """This warp's barrier for a step. It completes once a unit: its phase is the unit index's parity."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return scratch.barriers + warp * self.steps + step

    @cute.jit
    def fetch(self, step: int, wanted, io, row):
        """Fetch cos and sin of a step for the 32 rows at `row`, or just complete the barrier's phase."""
        tma, scratch, boxes = io
        barrier = self.barrier(scratch, step)
        if wanted:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, ROPE_BOXES * BOX_BYTES)
            sources = [(row // BOX_ROWS, step), (row // BOX_ROWS, step + self.steps)]
            boxes.load(tma.cos, sources, 0, barrier)
            boxes.load(tma.sin, sources, 2, barrier)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def prefetch(self, unit, index, io, row) -> None:
        part, _ = self.place(unit)
        first_row = unit.m * self.tuning.unit_rows + row
        io[2].reclaim()
        self.fetch(0, part != V, io, first_row)

    @cute.jit
    def skip(self, unit, index, io, row) -> None:
        for step in cutlass.range_constexpr(1, self.steps):
            self.fetch(step, cutlass.Boolean(False), io, row)
        cute.arch.mbarrier_wait(self.barrier(io[1], 0), index % 2)

    @cute.jit
    def epilogue(self, pairs, unit, index, io, row):
        """v leaves as it is; heads of q and k are normalised, rotated step by step, and leave."""
        tma, scratch, boxes = io
        part, tile = self.place(unit)
        first_row = unit.m * self.tuning.unit_rows + row
        box_row, box_column = first_row // BOX_ROWS, tile * (self.tuning.tile_n // BOX_COLUMNS)
        cute.arch.mbarrier_wait(self.barrier(scratch, 0), index % 2)
        if part == V:
            for step in cutlass.range_constexpr(1, self.steps):
                self.fetch(step, cutlass.Boolean(False), io, first_row)
            count = self.tuning.tile_n // BOX_COLUMNS
            for vector in cutlass.range_constexpr(count * VECTORS):
                boxes.write(vector // VECTORS, vector % VECTORS, pairs[vector * PAIRS : (vector + 1) * PAIRS])
            boxes.publish()
            boxes.store(tma.outputs[V], [(box_row, box_column + box) for box in range(count)])
        else:
            size = self.head_dim // 2
            heads = [pairs[first : first + size] for first in range(0, len(pairs), size)]
            inverses = [norm_rope.inverse_rms(head, self.eps) if self.qk_norm else None for head in heads]
            saved_rows = [None] * len(heads)
            if cutlass.const_expr(self.save_for_backward):
                first_head = tile * len(heads)
                saved_rows = [
                    self.saved_row(tma.saved, part, first_row + cute.arch.lane_idx(), first_head + h)
                    for h in range(len(heads))
                ]
                for saved_row, inverse in zip(saved_rows, inverses):
                    saved_row.save_rstd(inverse)
            for step in cutlass.range_constexpr(self.steps):
                if cutlass.const_expr(step > 0):
                    boxes.reclaim()
                    self.fetch(step, cutlass.Boolean(True), io, first_row)
                    cute.arch.mbarrier_wait(self.barrier(scratch, step), index % 2)
                for vector in cutlass.range_constexpr(VECTORS):
                    self.rotate_vector(
                        tuple(zip(heads, inverses, saved_rows)), (step, vector, part), scratch, boxes
                    )
                boxes.publish()
                targets = [
                    (box_row, box_column + head * 2 * self.steps + step + half * self.steps)
                    for head in range(len(heads))
                    for half in range(2)
                ]
                if part == Q:
                    boxes.store(tma.outputs[Q], targets)
                else:
                    boxes.store(tma.outputs[K], targets)

    def rotate_vector(self, heads, at, scratch, boxes) -> None:
        """8 columns of each half of every head of the row: norm, RoPE, into the boxes cos and sin came from.

        heads: (pairs, inverse rms, SavedRow) each; at = (step, vector within the step, q or k).
        """
        step, vector, part = at
        cos = boxes.read(0, vector), boxes.read(1, vector)
        sin = boxes.read(2, vector), boxes.read(3, vector)
        low = step * BOX_COLUMNS // 2 + vector * PAIRS
        columns = low, low + self.head_dim // 4
        weights = [self.read_weights(scratch, part, column) for column in columns] if self.qk_norm else None
        for head, (row, inverse, saved_row) in enumerate(heads):
            halves = [row[column : column + PAIRS] for column in columns]
            if self.qk_norm:
                normed = [[norm_rope.normalise(pair, inverse) for pair in half] for half in halves]
                if self.save_for_backward:
                    cute.arch.sync_warp()  # keeps the compiler from starting on later vectors, which spills
                    for column, half in zip(columns, normed):
                        saved_row.save_normed(column, [bf16.pack(*pair) for pair in half])
                halves = [
                    [norm_rope.scale(pair, weight) for pair, weight in zip(half, scale)]
                    for half, scale in zip(normed, weights)
                ]
            rotated = [
                norm_rope.rotate(halves[0][i], halves[1][i], (cos[0][i], cos[1][i]), (sin[0][i], sin[1][i]))
                for i in range(PAIRS)
            ]
            boxes.write(2 * head, vector, [low for low, _ in rotated])
            boxes.write(2 * head + 1, vector, [high for _, high in rotated])

    def read_weights(self, scratch, part, column):
        """(1 + w) of the 8 columns from pair `column` on, as PAIRS fp32 pairs."""
        values = cute.make_rmem_tensor(2 * PAIRS, Float32)
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
        cute.copy(
            atom, cute.local_tile(scratch.weights[None, part], (2 * PAIRS,), (column // PAIRS,)), values
        )
        return [(values[2 * i], values[2 * i + 1]) for i in range(PAIRS)]
