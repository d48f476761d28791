"""Gradients of the hidden states and of the q, k and v weights, the second launch of the QKV backward.

With dq, dk, dv the gradients of the three projections, [B, heads, S, D], each times what it was multiplied
with:

    dgrad   grad_hidden[b, s, c] = sum over (t, h, d) of dt[b, h, s, d] * Wt[h*D + d, c]
    wgrad   grad_Wt[h*D + d, c]  = sum over (b, s)    of dt[b, h, s, d] * hidden[b, s, c]

Both are tiles of one persistent grid, wgrad first: its sums are the longer ones where there is more than one
round. Every operand is read by TMA as it lies in memory. A block of A is 128 rows owned by one CTA: 128
positions of one batch entry in dgrad, 128 of the D elements of one head (M is the contiguous mode) in wgrad.
Blocks never cross a batch entry or a head, so that TMA fills what lies past S with zeros and clips it on the
way out, and dv needs no copy. B is hidden or W, N contiguous. K walks over the heads of q, k and v in dgrad,
over the batch's positions in wgrad.

The launch also finishes the norm-weight gradients from the partial sums of norm_backward.py.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cute_gemma.jit.signature import Signature, TensorArg
from cute_gemma.kernels.common.filled_schedule import plan_filled
from cute_gemma.kernels.common.schedule import Section, plan
from cute_gemma.kernels.sm100.boxes import BOX_COLUMNS, BOX_ROWS
from cute_gemma.kernels.sm100.gemm import EPILOGUE_WARPS, WARP, PersistentGemm, TmaTensor, Workspace
from cute_gemma.kernels.sm100.norm_backward import NormBackwardTuning, chunk_rows
from cute_gemma.kernels.sm100.tuning import BLOCK_K, EPILOGUE_CYCLES, SM_COUNT, GemmTuning, block_cycles

WGRAD, DGRAD = 0, 1  # kinds of tile, and the numbers of their sections
BLOCK_M = 128  # rows of A a CTA owns
FOLD_COLUMNS = 8  # columns a warp folds: 32 bytes, one sector, of every partial sum


@dataclass(frozen=True)
class GradientTma:
    """What the device reads. grads: (WGRAD, DGRAD), each the TMA tensors of dq, dk, dv; the others in that
    order."""

    grads: tuple
    weights: tuple
    hidden: Any
    grad_weights: tuple
    grad_hidden: Any
    partials: Any
    grad_norms: tuple
    batch: Any
    seq: Any


@dataclass(frozen=True)
class GradientLoads:
    """Fetches k blocks. hidden and the weights are inputs of the whole backward, so they are early
    operands."""

    kernel: Any
    grads: tuple
    weights: tuple
    hidden: Any
    rank: Any
    seq: Any

    @cute.jit
    def early(self, unit, k, stage, barrier):
        if unit.section == WGRAD:
            blocks = cute.ceil_div(self.seq, BLOCK_K)
            self.hidden.load(stage, barrier, unit.n, k % blocks, k // blocks)
        else:
            for side in cutlass.range_constexpr(3):
                first, last = self.kernel.side_range(side, BLOCK_K)
                if k >= first and k < last:
                    self.weights[side].load(stage, barrier, unit.n, k - first)

    @cute.jit
    def late(self, unit, k, stage, barrier):
        block = unit.m * self.kernel.tuning.cluster + self.rank
        if unit.section == WGRAD:
            blocks = cute.ceil_div(self.seq, BLOCK_K)
            self.load(WGRAD, block, BLOCK_M, (k % blocks, k // blocks), (stage, barrier))
        else:
            blocks = cute.ceil_div(self.seq, BLOCK_M)
            self.load(DGRAD, k, BLOCK_K, (block % blocks, block // blocks), (stage, barrier))

    @cute.jit
    def load(self, kind: cutlass.Constexpr, index, width: cutlass.Constexpr, place, target):
        """Block `index` of `width` elements of the heads laid side by side, at place = (block of S, batch
        entry)."""
        for side in cutlass.range_constexpr(3):
            first, last = self.kernel.side_range(side, width)
            if index >= first and index < last:
                per_head = self.kernel.head_dim // width
                head, column = (index - first) // per_head, (index - first) % per_head
                layer = place[1] * self.kernel.side_heads[side] + head
                tile = (column, place[0]) if cutlass.const_expr(kind == WGRAD) else (place[0], column)
                self.grads[kind][side].load(*target, *tile, layer)


@dataclass(frozen=True)
class QkvGradients(PersistentGemm):
    """grad_q, grad_k, grad_value [B, heads, S, D], hidden_states [B, S, C], weights [heads*D, C] and the norm
    partials [norm.ctas, D] -> grad_hidden_states [B, S, C], three weight gradients [heads*D, C], two
    norm-weight gradients [D] in float32.

    hidden: C, a multiple of 8; head_dim: 128 or 256; norm: the tuning of the NormBackward that wrote the
    partials.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    tuning: GemmTuning = field(default_factory=GemmTuning)
    norm: NormBackwardTuning = NormBackwardTuning()

    operand_majors = (("mn", "mn"), ("k", "mn"))
    clusters = True

    def __post_init__(self) -> None:
        if self.hidden < 8 or self.hidden % 8:
            raise ValueError(f"hidden: got {self.hidden}, want a positive multiple of 8")
        if self.head_dim not in (128, 256):
            raise ValueError(f"head_dim: got {self.head_dim}, want 128 or 256")

    @property
    def side_heads(self) -> tuple[int, int, int]:
        return (self.heads, self.kv_heads, self.kv_heads)

    def side_range(self, side: int, width: int) -> tuple[int, int]:
        """Blocks [first, last) of `width` elements that q, k or v takes of all heads side by side. v's has no
        end.

        With a pair of CTAs the last block of M may not exist; its loads give rows that nobody stores.
        """
        first = sum(self.side_heads[:side]) * self.head_dim // width
        last = first + self.side_heads[side] * self.head_dim // width
        return first, last if side < 2 else 1 << 30

    def signature(self) -> Signature:
        def grad(name: str, heads: int) -> TensorArg:
            return TensorArg(name, "bf16", ("batch", heads, "seq", self.head_dim))

        def weight(name: str, heads: int) -> TensorArg:
            return TensorArg(name, "bf16", (heads * self.head_dim, self.hidden))

        rows = ("batch", "seq", self.hidden)
        sides = tuple(zip("qkv", self.side_heads, strict=True))
        return (
            *(grad(name, heads) for name, heads in zip(("grad_q", "grad_k", "grad_value"), self.side_heads)),
            TensorArg("hidden_states", "bf16", rows),
            *(weight(f"{name}_weight", heads) for name, heads in sides),
            TensorArg("norm_partials", "f32", (self.norm.ctas, self.head_dim)),
            TensorArg("grad_hidden_states", "bf16", rows),
            *(weight(f"grad_{name}_weight", heads) for name, heads in sides),
            *(TensorArg(f"grad_{name}_norm_weight", "f32", (self.head_dim,), align=4) for name in "qk"),
            *self.workspace_signature(),
        )

    @cute.jit
    def __call__(self, *arguments):
        """Host entry; the arguments of `signature` and the stream."""
        grads, hidden, weights = arguments[0:3], arguments[3], arguments[4:7]
        partials, grad_hidden, grad_weights, grad_norms = (
            arguments[7], arguments[8], arguments[9:12], arguments[12:14])
        batch, seq = hidden.shape[0], hidden.shape[1]
        tma = GradientTma(
            grads=tuple(
                tuple(self.tma_block(self.operand_a(t, kind), kind) for t in grads)
                for kind in (WGRAD, DGRAD)),
            weights=tuple(self.tma_b(transposed(t), DGRAD) for t in weights),
            hidden=self.tma_b(transposed(hidden), WGRAD),
            grad_weights=tuple(self.tma_store(t) for t in grad_weights),
            grad_hidden=self.tma_store(cute.make_tensor(
                grad_hidden.iterator, cute.select(grad_hidden.layout, mode=[1, 2, 0]))),
            partials=partials,
            grad_norms=grad_norms,
            batch=batch,
            seq=seq,
        )
        ctas, n_tiles = self.tuning.cluster, cute.ceil_div(self.hidden, self.tuning.tile_n)
        columns = sum(self.side_heads) * self.head_dim
        wgrad = Section(cute.ceil_div(columns, BLOCK_M * ctas), n_tiles, batch * cute.ceil_div(seq, BLOCK_K))
        dgrad = Section(cute.ceil_div(batch * cute.ceil_div(seq, BLOCK_M), ctas), n_tiles, columns // BLOCK_K)
        if cutlass.const_expr(self.tuning.stream_k):
            schedule = plan((wgrad, dgrad), self.tuning.workers, self.tuning.group_m, True)
        else:
            schedule = plan_filled(wgrad, dgrad, self.tuning.workers, self.tuning.group_m)
        workspace = Workspace(*arguments[14:16]) if cutlass.const_expr(self.tuning.stream_k) else None
        self.launch(tma, schedule, workspace, arguments[-1])

    # ---- operands ------------------------------------------------------------------------------------------

    def operand_a(self, grad, kind: int):
        """[B, heads, S, D] as A of a kind of tile: (D, S, heads*B) in wgrad, (S, D, heads*B) in dgrad."""
        batch, heads, seq, dim = grad.shape
        stride = (dim, 1, cutlass.Int64(seq) * dim)
        shape = (seq, dim, batch * heads)
        if kind == WGRAD:
            shape, stride = (dim, seq, shape[2]), (1, dim, stride[2])
        return cute.make_tensor(grad.iterator, cute.make_layout(shape, stride=stride))

    def block_mma(self, kind: int):
        """The one-CTA MMA whose A tile is what each CTA of a pair holds of the pair's."""
        major = OperandMajorMode.MN if self.operand_majors[kind][0] == "mn" else OperandMajorMode.K
        return sm100.make_trivial_tiled_mma(
            BFloat16, BFloat16, major, OperandMajorMode.MN, Float32, tcgen05.CtaGroup.ONE,
            (BLOCK_M, self.tuning.tile_n))

    def tma_block(self, tensor, kind: int) -> TmaTensor:
        """Load descriptor of A for blocks of BLOCK_M rows."""
        mma, tiler = self.block_mma(kind), (BLOCK_M, self.tuning.tile_n, BLOCK_K)
        layout = sm100.make_smem_layout_a(mma, tiler, BFloat16, 1)
        op = sm100.cluster_shape_to_tma_atom_A((self.tuning.ctas, 1), self.tiled_mmas()[kind].thr_id)
        return TmaTensor(*cute.nvgpu.make_tiled_tma_atom_A(
            op, tensor, cute.slice_(layout, (None, None, None, 0)), tiler, mma, (1, 1, 1, 1)))

    def partition_block(self, tma: TmaTensor, kind: int, shared):
        """A's blocks, indexed (block of M, k block, head of a batch entry)."""
        tiles = cute.local_tile(tma.tensor, (BLOCK_M, BLOCK_K), (None, None, None))
        return self._partition(tma.atom, shared, self.block_mma(kind).get_slice(0).partition_A(tiles))

    def loads(self, tma, mmas, operands, rank) -> GradientLoads:
        return GradientLoads(
            self,
            tuple(
                tuple(self.partition_block(t, kind, operands[kind][0]) for t in tma.grads[kind])
                for kind in (WGRAD, DGRAD)),
            tuple(self.partition_b(t, mmas[DGRAD], operands[DGRAD][1], rank) for t in tma.weights),
            self.partition_b(tma.hidden, mmas[WGRAD], operands[WGRAD][1], rank),
            rank,
            tma.seq,
        )

    # ---- epilogue ------------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, accumulators, address, io, workspace, place):
        """The norm-weight gradients first: by the time the first accumulator is full they are done."""
        cute.arch.griddepcontrol_wait()
        self.fold_partials(io[0])
        PersistentGemm.consume(self, accumulators, address, io, workspace, place)

    @cute.jit
    def fold_partials(self, tma):
        """grad_norm[d] = sum of partials[:, d] over the CTAs of a side, in an order that depends on nothing
        else.

        A warp takes FOLD_COLUMNS columns; its lanes hold every fourth row of them and are added up by
        shuffles. What each addition loses is kept and added at the end: hundreds of partial sums cost no more
        accuracy than one.
        """
        chunk = chunk_rows(
            tma.batch * self.heads * tma.seq, tma.batch * self.kv_heads * tma.seq, self.norm)
        rows_q = cute.ceil_div(tma.batch * self.heads * tma.seq, chunk)
        rows_k = cute.ceil_div(tma.batch * self.kv_heads * tma.seq, chunk)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        groups = self.head_dim // FOLD_COLUMNS
        first = cute.arch.block_idx()[0] * EPILOGUE_WARPS + warp
        for group in cutlass.range(first, 2 * groups, cute.arch.grid_dim()[0] * EPILOGUE_WARPS, unroll=1):
            for side in cutlass.range_constexpr(2):
                if group // groups == side:
                    begin, end = (0, rows_q) if cutlass.const_expr(side == 0) else (rows_q, rows_q + rows_k)
                    column = group % groups * FOLD_COLUMNS + lane % FOLD_COLUMNS
                    total, error = Float32(0.0), Float32(0.0)
                    start = begin + lane // FOLD_COLUMNS
                    for row in cutlass.range(start, end, WARP // FOLD_COLUMNS, unroll=8):
                        total, lost = two_sum(total, tma.partials[row, column])
                        error += lost
                    cute.arch.sync_warp()
                    for distance in (16, 8):
                        total, lost = two_sum(total, cute.arch.shuffle_sync_bfly(total, distance))
                        error += cute.arch.shuffle_sync_bfly(error, distance) + lost
                    if lane < FOLD_COLUMNS:
                        tma.grad_norms[side][column] = total + error

    @cute.jit
    def epilogue(self, pairs, unit, index, io, row):
        """Store the row, as many boxes at a time as the warp has, to the matrix that its block belongs to."""
        tma, _, boxes = io
        block = unit.m * self.tuning.cluster + row // BLOCK_M
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
                box_row = block % blocks * (BLOCK_M // BOX_ROWS) + box
                boxes.store(tma.grad_hidden, [(box_row, column, block // blocks) for column in columns])


def two_sum(a, b):
    """(s, e): s = a + b rounded and e what the rounding lost, exactly (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def transposed(tensor):
    """[..., R, C] row-major as (C, R, ...): B of a GEMM that sums over R."""
    order = [1, 0] if cute.rank(tensor) == 2 else [2, 1, 0]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))


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
        block, epilogue = block_cycles(tuning), EPILOGUE_CYCLES * tuning.tile_n
        costs = {kind: depth[kind] * block + epilogue for kind in blocks}
        return _end(tiles, costs, tuning.workers)

    candidates = [GemmTuning(m, n, cluster_m=cluster, sm_count=sm_count) for m, n, cluster in _SHAPES]
    # Clusters are for many rows: a cluster with nothing to do in one CTA keeps its multiprocessor all the
    # same.
    return min((t for t in candidates if t.cluster <= min(blocks.values()) or t.cluster == 1), key=cycles)


def _end(tiles: dict[int, int], costs: dict[int, float], workers: int) -> float:
    """When the last of `workers` is done if the tiles of both kinds are dealt out, wgrad first, to whoever is
    free."""
    if sum(tiles.values()) > 8 * workers:
        return sum(tiles[kind] * costs[kind] for kind in tiles) / workers + max(costs.values()) / 2
    ends = [0.0] * workers
    for kind in (WGRAD, DGRAD):
        for _ in range(tiles[kind]):
            heapq.heapreplace(ends, ends[0] + costs[kind])
    return max(ends)
