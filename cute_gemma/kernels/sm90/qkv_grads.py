"""Gradients of the hidden states and of the q, k and v weights for sm_90a: see kernels/common/qkv_grads.py.

wgmma reads bf16 operands whose M or N is the contiguous mode as they lie (PTX ISA, "Strides" of the matrix
descriptor and imm-trans-a, -b), so wgrad transposes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Int32
from cutlass.cute.nvgpu import cpasync

from cute_gemma.kernels.common.filled_schedule import FilledSchedule, plan_filled, plan_shared_filled
from cute_gemma.kernels.common.gemm import BLOCK_K, TmaTensor
from cute_gemma.kernels.common.norm_backward import NormBackwardTuning
from cute_gemma.kernels.common.qkv_grads import (
    BLOCK_M,
    DGRAD,
    WGRAD,
    QkvGradientsBase,
    batch_entry,
    gradient_sections,
)
from cute_gemma.kernels.common.schedule import TileSchedule
from cute_gemma.kernels.sm90.boxes import BOX_COLUMNS, BOX_ROWS
from cute_gemma.kernels.sm90.gemm import PersistentGemm, major_layout
from cute_gemma.kernels.sm90.tuning import EPILOGUE_CYCLES, SHARE_CYCLES, SM_COUNT, GemmTuning, block_cycles

MULTICAST = 0.97  # of a k block's cycles are left with it, measured on an H200
NORM_TUNING = NormBackwardTuning(warps=8, unroll=4, ctas=2 * SM_COUNT)


@dataclass(frozen=True)
class QkvGradients(QkvGradientsBase, PersistentGemm):
    """See QkvGradientsBase. tuning: see `default_tuning`; ValueError for one that leaves too few registers."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tuning: GemmTuning = field(default_factory=GemmTuning)
    norm: NormBackwardTuning = NORM_TUNING

    operand_majors = QkvGradientsBase.operand_majors

    def __post_init__(self) -> None:
        super().__post_init__()
        tall = self.tuning.tile_m == 256 and (self.tuning.tile_n == 64 or self.tuning.cluster_m > 1)
        if self.tuning.stream_k and tall:  # registers would not suffice
            raise ValueError(
                f"tuning: got stream_k with {self.tuning.tile_m} x {self.tuning.tile_n} tiles and cluster_m "
                f"{self.tuning.cluster_m}, expected tile_m 128, or tile_n 128 and cluster_m 1"
            )

    @property
    def defers(self) -> bool:
        """Where registers suffice: dgrad has many short tiles."""
        return self.words <= 64

    @property
    def boxes(self) -> int:
        """A whole strip where stages leave room."""
        return min(4, self.tuning.tile_n // BOX_COLUMNS) if self.tuning.stage_bytes <= 32768 else 2

    @property
    def blocks_per_cta(self) -> int:
        return self.tuning.tile_m // BLOCK_M

    def schedule(self, sections: tuple) -> TileSchedule:
        if self.tuning.stream_k:
            return super().schedule(sections)
        return plan_gradients(sections, self.tuning)

    def block_layout(self, kind: int, blocks: int):
        """Shared layout of blocks of A; a stage holds `blocks_per_cta` of them, one after the other."""
        return sm90.make_smem_layout_a(
            major_layout(self.operand_majors[kind][0]),
            (BLOCK_M, self.tuning.tile_n, BLOCK_K),
            BFloat16,
            blocks,
        )

    def tma_block(self, tensor, kind: int) -> TmaTensor:
        """Load descriptor of A, block by block."""
        layout = cute.select(self.block_layout(kind, 1), mode=[0, 1])
        info = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, (BLOCK_M, BLOCK_K)
        )
        return TmaTensor(info[0], info[1])

    def partition_block(self, tma: TmaTensor, kind: int, shared):
        """A's blocks, indexed (block of M, k block, head of a batch entry)."""
        layout = self.block_layout(kind, self.stage_count * self.blocks_per_cta)
        blocks = cute.make_tensor(cute.recast_ptr(shared.iterator, layout.inner, BFloat16), layout.outer)
        return self._partition(tma, blocks, (BLOCK_M, BLOCK_K))

    def loads(self, tma, operands, rank):
        if self.tuning.share > 1:
            rank = Int32(0)  # the CTAs of the cluster compute the same rows
        return self.gradient_loads(
            tma,
            lambda tensor, kind: self.partition_block(tensor, kind, operands[kind][0]),
            lambda tensor, kind: self.partition_b(tensor, operands[kind][1], rank),
            rank,
        )

    @cute.jit
    def assist(self, tma, unit, warp, warps: cutlass.Constexpr):
        """The norm-weight gradients."""
        cute.arch.griddepcontrol_wait()
        self.fold_partials(tma, warp, warps)

    def epilogue(self, strip, unit, io, ready):
        """Store the strip to the matrix that its block belongs to."""
        tma, _, boxes = io
        block = unit.m * self.unit_blocks + strip.row // BLOCK_M
        box = strip.row % BLOCK_M // BOX_ROWS
        first = unit.n * (self.tuning.tile_n // BOX_COLUMNS)
        strip.store(boxes, first, lambda columns: self.send(tma, boxes, (unit.section, block, box), columns))

    @cute.jit
    def send(self, tma, boxes, place, columns):
        section, block, box = place
        if section == WGRAD:
            for side in cutlass.range_constexpr(3):
                begin, end = self.side_range(side, BLOCK_M)
                if block >= begin and block < end:
                    row = (block - begin) * (BLOCK_M // BOX_ROWS) + box
                    boxes.store(tma.grad_weights[side], [(row, column) for column in columns])
        else:
            blocks = cute.ceil_div(tma.seq, BLOCK_M)
            entry = batch_entry(block, blocks)
            row = (block - entry * blocks) * (BLOCK_M // BOX_ROWS) + box
            boxes.store(tma.grad_hidden, [(row, column, entry) for column in columns])


def plan_gradients(sections: tuple, tuning: GemmTuning) -> FilledSchedule:
    """The schedule of (wgrad, dgrad) without stream-K."""
    if tuning.share == 1:
        return plan_filled(*sections, tuning.workers, tuning.group_m)
    return plan_shared_filled(*sections, tuning.clusters, tuning.share, tuning.group_m)


def busiest_cycles(tuning: GemmTuning, sections: tuple) -> float:
    """Cycles of the worker that has the most to do, on the host and without stream-K."""
    schedule, block = plan_gradients(sections, tuning), block_cycles(tuning)
    if tuning.cluster_m > 1:
        block *= MULTICAST
    wgrad, dgrad = (section.k_blocks * block + EPILOGUE_CYCLES * tuning.tile_n for section in sections)
    depth = sections[DGRAD].k_blocks
    saved = (depth - ceil(depth / tuning.share)) * block - SHARE_CYCLES  # by sharing a tile

    def cycles(worker: int) -> float:
        count, long = schedule.unit_count(worker), schedule.first_section_count(worker)
        shared = tuning.share > 1 and count > 0 and schedule.unit(worker, count - 1).pieces > 1
        return long * wgrad + (count - long) * dgrad - (saved if shared else 0)

    return max(cycles(worker) for worker in range(schedule.workers))


@lru_cache(maxsize=1024)
def default_tuning(
    batch: int, seq: int, hidden: int, heads: int, head_dim: int, sm_count: int = SM_COUNT
) -> GemmTuning:
    """heads: H + 2 KV. Measured on an H200: wider and taller tiles and stream-K lose; clusters that share B
    gain 2 to 5 %; narrow tiles pay while about half of the multiprocessors would have none of the others.
    Clusters share the tiles of the last round instead where that ends first by the count of cycles."""
    tuning = GemmTuning(sm_count=sm_count)
    blocks = ceil(heads * head_dim / BLOCK_M) + batch * ceil(seq / BLOCK_M)
    few = 9 * blocks * ceil(hidden / tuning.tile_n) <= 5 * sm_count
    candidates = [replace(tuning, tile_n=64) if few else replace(tuning, cluster_m=min(2, sm_count))]
    if sm_count > 1:
        candidates.append(replace(tuning, tile_n=candidates[0].tile_n, share=2))
    sizes = batch, seq, hidden, heads * head_dim
    return min(candidates, key=lambda tuning: busiest_cycles(tuning, gradient_sections(*sizes, tuning)))
