"""Gradients of the hidden states and of the q, k and v weights for sm_100a: see kernels/common/qkv_grads.py.

The MMA takes operands whose M or N is the contiguous mode as they lie (PTX ISA, "tcgen05.mma", transpose bits
of the instruction descriptor), so wgrad transposes nothing. Each CTA of a pair fetches its own block of A,
wherever that lies: the pair's two blocks may belong to different heads, matrices or batch entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cute_gemma.kernels.common.filled_schedule import makespan
from cute_gemma.kernels.common.gemm import TmaTensor
from cute_gemma.kernels.common.norm_backward import NormBackwardTuning
from cute_gemma.kernels.common.qkv_grads import (
    BLOCK_M,
    DGRAD,
    WGRAD,
    GradientLoads,
    QkvGradientsBase,
    batch_entry,
)
from cute_gemma.kernels.sm100.boxes import BOX_COLUMNS, BOX_ROWS
from cute_gemma.kernels.sm100.gemm import EPILOGUE_WARPS, PersistentGemm
from cute_gemma.kernels.sm100.tuning import BLOCK_K, EPILOGUE_CYCLES, SM_COUNT, GemmTuning, block_cycles


@dataclass(frozen=True)
class QkvGradients(QkvGradientsBase, PersistentGemm):
    """See QkvGradientsBase. tuning: see `default_tuning`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tuning: GemmTuning = field(default_factory=GemmTuning)
    norm: NormBackwardTuning = NormBackwardTuning()

    operand_majors = QkvGradientsBase.operand_majors
    clusters = True

    # ---- operands ------------------------------------------------------------------------------------------

    def block_mma(self, kind: int):
        """The one-CTA MMA whose A tile is what each CTA of a pair holds of the pair's."""
        major = OperandMajorMode.MN if self.operand_majors[kind][0] == "mn" else OperandMajorMode.K
        tile = (BLOCK_M, self.tuning.tile_n)
        return sm100.make_trivial_tiled_mma(
            BFloat16, BFloat16, major, OperandMajorMode.MN, Float32, tcgen05.CtaGroup.ONE, tile
        )

    def tma_block(self, tensor, kind: int) -> TmaTensor:
        """Load descriptor of A, block by block."""
        mma, tiler = self.block_mma(kind), (BLOCK_M, self.tuning.tile_n, BLOCK_K)
        layout = cute.slice_(sm100.make_smem_layout_a(mma, tiler, BFloat16, 1), (None, None, None, 0))
        op = sm100.cluster_shape_to_tma_atom_A((self.tuning.ctas, 1), self.tiled_mmas()[kind].thr_id)
        info = cute.nvgpu.make_tiled_tma_atom_A(op, tensor, layout, tiler, mma, (1, 1, 1, 1))
        return TmaTensor(*info)

    def partition_block(self, tma: TmaTensor, kind: int, shared):
        """A's blocks, indexed (block of M, k block, head of a batch entry)."""
        tiles = cute.local_tile(tma.tensor, (BLOCK_M, BLOCK_K), (None, None, None))
        return self._partition(tma.atom, shared, self.block_mma(kind).get_slice(0).partition_A(tiles))

    def loads(self, tma, mmas, operands, rank) -> GradientLoads:
        return self.gradient_loads(
            tma,
            lambda tensor, kind: self.partition_block(tensor, kind, operands[kind][0]),
            lambda tensor, kind: self.partition_b(tensor, mmas[kind], operands[kind][1], rank),
            rank,
        )

    # ---- epilogue ------------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, accumulators, address, io, workspace, place):
        """The norm-weight gradients first: by the time the first accumulator is full they are done."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.fold_partials(io[0], warp, EPILOGUE_WARPS)
        PersistentGemm.consume(self, accumulators, address, io, workspace, place)

    @cute.jit
    def epilogue(self, pairs, unit, index, io, row):
        """Store the row, as many boxes at a time as the warp has, to the matrix that its block belongs to."""
        tma, _, boxes = io
        block = unit.m * self.unit_blocks + row // BLOCK_M
        box = row % BLOCK_M // BOX_ROWS
        per_tile = self.tuning.tile_n // BOX_COLUMNS
        for first in cutlass.range_constexpr(0, per_tile, self.boxes):
            count = min(self.boxes, per_tile - first)
            columns = [unit.n * per_tile + first + i for i in range(count)]
            boxes.fill(pairs[first * BOX_COLUMNS // 2 : (first + count) * BOX_COLUMNS // 2])
            if unit.section == WGRAD:
                for side in cutlass.range_constexpr(3):
                    begin, end = self.side_range(side, BLOCK_M)
                    if block >= begin and block < end:
                        box_row = (block - begin) * (BLOCK_M // BOX_ROWS) + box
                        boxes.store(tma.grad_weights[side], [(box_row, column) for column in columns])
            else:
                blocks = cute.ceil_div(tma.seq, BLOCK_M)
                entry = batch_entry(block, blocks)
                box_row = (block - entry * blocks) * (BLOCK_M // BOX_ROWS) + box
                boxes.store(tma.grad_hidden, [(box_row, column, entry) for column in columns])


# (tile_m, tile_n, cluster_m) of the tunings to choose from.
_SHAPES = ((128, 64, 1), (128, 128, 1), (256, 128, 1), (256, 128, 2), (256, 256, 1), (256, 256, 2))


@lru_cache(maxsize=1024)
def default_tuning(
    batch: int, seq: int, hidden: int, heads: int, head_dim: int, sm_count: int = SM_COUNT
) -> GemmTuning:
    """The tuning whose schedule ends first by the cycle counts of tuning.py; heads: H + 2 KV."""
    blocks = {WGRAD: -(-heads * head_dim // BLOCK_M), DGRAD: batch * -(-seq // BLOCK_M)}
    depth = {WGRAD: batch * -(-seq // BLOCK_K), DGRAD: heads * head_dim // BLOCK_K}

    def cycles(tuning: GemmTuning) -> float:
        tiles = {kind: -(-blocks[kind] // tuning.cluster) * -(-hidden // tuning.tile_n) for kind in blocks}
        # The epilogue of all but the last tile runs beside the next tile's products.
        block, epilogue = block_cycles(tuning), EPILOGUE_CYCLES * tuning.tile_n
        costs = {kind: max(depth[kind] * block, epilogue) for kind in blocks}
        wgrad, dgrad = ((tiles[kind], costs[kind]) for kind in (WGRAD, DGRAD))
        return makespan(wgrad, dgrad, tuning.workers) + epilogue

    candidates = [GemmTuning(m, n, cluster_m=cluster, sm_count=sm_count) for m, n, cluster in _SHAPES]
    # Clusters are for many rows: a cluster with nothing to do in one CTA keeps its multiprocessor all the
    # same.
    return min((t for t in candidates if t.cluster <= min(blocks.values()) or t.cluster == 1), key=cycles)

