"""Gradients of the hidden states and of the q, k and v weights, what the architectures share. It is the
second launch of the QKV backward.

With dq, dk, dv the gradients of the three projections, [B, heads, S, D], each times what it was multiplied
with:

    dgrad   grad_hidden[b, s, c] = sum over (t, h, d) of dt[b, h, s, d] * Wt[h*D + d, c]
    wgrad   grad_Wt[h*D + d, c]  = sum over (b, s)    of dt[b, h, s, d] * hidden[b, s, c]

Both are tiles of one persistent grid, wgrad first: its sums are the longer ones where there is more than one
round. Every operand is read by TMA as it lies in memory. A block of A is 128 rows: 128 positions of one batch
entry in dgrad, 128 of the D elements of one head (M is the contiguous mode) in wgrad. Blocks never cross a
batch entry or a head, so that TMA fills what lies past S with zeros and clips it on the way out, and dv needs
no copy. B is hidden or W, N contiguous. K walks over the heads of q, k and v in dgrad, over the batch's
positions in wgrad.

The launch also finishes the norm-weight gradients from the partial sums of norm_backward.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_gemma.jit.signature import Signature, TensorArg
from cute_gemma.kernels.common.filled_schedule import plan_filled
from cute_gemma.kernels.common.gemm import BLOCK_K, WARP, Workspace
from cute_gemma.kernels.common.norm_backward import chunk_rows
from cute_gemma.kernels.common.schedule import Section, plan

WGRAD, DGRAD = 0, 1  # kinds of tile, and the numbers of their sections
BLOCK_M = 128  # rows of a block of A
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
        per_cta = self.kernel.blocks_per_cta
        for number in cutlass.range_constexpr(per_cta):
            block = unit.m * self.kernel.unit_blocks + self.rank * per_cta + number
            target = stage * per_cta + number, barrier
            if unit.section == WGRAD:
                blocks = cute.ceil_div(self.seq, BLOCK_K)
                self.load(WGRAD, block, BLOCK_M, (k % blocks, k // blocks), target)
            else:
                blocks = cute.ceil_div(self.seq, BLOCK_M)
                self.load(DGRAD, k, BLOCK_K, (block % blocks, block // blocks), target)

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


class QkvGradientsBase:
    """grad_q, grad_k, grad_value [B, heads, S, D], hidden_states [B, S, C], weights [heads*D, C] and the norm
    partials [norm.ctas, D] -> grad_hidden_states [B, S, C], three weight gradients [heads*D, C], two
    norm-weight gradients [D] in float32.

    To be mixed with an architecture's PersistentGemm in a frozen dataclass with fields hidden (C, a multiple
    of 8), heads, kv_heads, head_dim (128 or 256), tuning, and norm: the tuning of the NormBackward that wrote
    the partials.
    """

    operand_majors = (("mn", "mn"), ("k", "mn"))

    def __post_init__(self) -> None:
        if self.hidden < 8 or self.hidden % 8:
            raise ValueError(f"hidden: got {self.hidden}, want a positive multiple of 8")
        if self.head_dim not in (128, 256):
            raise ValueError(f"head_dim: got {self.head_dim}, want 128 or 256")

    @property
    def unit_blocks(self) -> int:
        """Blocks of A in a unit of the schedule."""
        return self.tuning.unit_rows // BLOCK_M

    @property
    def blocks_per_cta(self) -> int:
        """Those that one CTA fetches."""
        return self.unit_blocks // self.tuning.cluster

    @property
    def side_heads(self) -> tuple[int, int, int]:
        return (self.heads, self.kv_heads, self.kv_heads)

    def side_range(self, side: int, width: int) -> tuple[int, int]:
        """Blocks [first, last) of `width` elements that q, k or v takes of all heads side by side. v's has no
        end.

        The last blocks of a unit may not exist; loads for them give rows that nobody stores.
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
        n_tiles = cute.ceil_div(self.hidden, self.tuning.tile_n)
        columns = sum(self.side_heads) * self.head_dim
        wgrad = Section(
            cute.ceil_div(columns, self.tuning.unit_rows), n_tiles, batch * cute.ceil_div(seq, BLOCK_K))
        dgrad = Section(
            cute.ceil_div(batch * cute.ceil_div(seq, BLOCK_M), self.unit_blocks), n_tiles, columns // BLOCK_K)
        if cutlass.const_expr(self.tuning.stream_k):
            schedule = plan((wgrad, dgrad), self.tuning.workers, self.tuning.group_m, True)
        else:
            schedule = plan_filled(wgrad, dgrad, self.tuning.workers, self.tuning.group_m)
        workspace = Workspace(*arguments[14:16]) if cutlass.const_expr(self.tuning.stream_k) else None
        self.launch(tma, schedule, workspace, arguments[-1])

    def operand_a(self, grad, kind: int):
        """[B, heads, S, D] as A of a kind of tile: (D, S, heads*B) in wgrad, (S, D, heads*B) in dgrad."""
        batch, heads, seq, dim = grad.shape
        stride = (dim, 1, cutlass.Int64(seq) * dim)
        shape = (seq, dim, batch * heads)
        if kind == WGRAD:
            shape, stride = (dim, seq, shape[2]), (1, dim, stride[2])
        return cute.make_tensor(grad.iterator, cute.make_layout(shape, stride=stride))

    def gradient_loads(self, tma, partition_block, partition_b, rank) -> GradientLoads:
        """What `loads` returns; the partitions are functions of (TMA tensor, kind)."""
        return GradientLoads(
            self,
            tuple(tuple(partition_block(t, kind) for t in tma.grads[kind]) for kind in (WGRAD, DGRAD)),
            tuple(partition_b(t, DGRAD) for t in tma.weights),
            partition_b(tma.hidden, WGRAD),
            rank,
            tma.seq,
        )

    @cute.jit
    def fold_partials(self, tma, warp, warps: cutlass.Constexpr):
        """grad_norm[d] = sum of partials[:, d] over the CTAs of a side, in an order that depends on nothing
        else.

        For warp number `warp` of the `warps` of a CTA that do this. A warp takes FOLD_COLUMNS columns; its
        lanes hold every fourth row of them and are added up by shuffles. What each addition loses is kept and
        added at the end: hundreds of partial sums cost no more accuracy than one.
        """
        chunk = chunk_rows(
            tma.batch * self.heads * tma.seq, tma.batch * self.kv_heads * tma.seq, self.norm)
        rows_q = cute.ceil_div(tma.batch * self.heads * tma.seq, chunk)
        rows_k = cute.ceil_div(tma.batch * self.kv_heads * tma.seq, chunk)
        lane = cute.arch.lane_idx()
        groups = self.head_dim // FOLD_COLUMNS
        first = cute.arch.block_idx()[0] * warps + warp
        for group in cutlass.range(first, 2 * groups, cute.arch.grid_dim()[0] * warps, unroll=1):
            for side in cutlass.range_constexpr(2):
                if group // groups == side:
                    begin, end = (0, rows_q) if cutlass.const_expr(side == 0) else (rows_q, rows_q + rows_k)
                    column = group % groups * FOLD_COLUMNS + lane % FOLD_COLUMNS
                    total, error = Float32(0.0), Float32(0.0)
                    start = begin + lane // FOLD_COLUMNS
                    for row in cutlass.range(start, end, WARP // FOLD_COLUMNS, unroll=8):
                        total, lost = two_sum(total, tma.partials[row, column])
                        error += lost
                    for distance in (16, 8):
                        total, lost = two_sum(total, cute.arch.shuffle_sync_bfly(total, distance))
                        error += cute.arch.shuffle_sync_bfly(error, distance) + lost
                    if lane < FOLD_COLUMNS:
                        tma.grad_norms[side][column] = total + error


def two_sum(a, b):
    """(s, e): s = a + b rounded and e what the rounding lost, exactly (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def transposed(tensor):
    """[..., R, C] row-major as (C, R, ...): B of a GEMM that sums over R."""
    order = [1, 0] if cute.rank(tensor) == 2 else [2, 1, 0]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))
