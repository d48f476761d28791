"""Gradients of the hidden states and of the q, k and v weights, what the architectures share. It is the
second launch of the QKV backward.

With dq, dk, dv the gradients of the three projections, [B, heads, S, D], each times what it was multiplied
with:

    dgrad   grad_hidden[b, s, c] = sum over (t, h, d) of dt[b, h, s, d] * Wt[h*D + d, c]
    wgrad   grad_Wt[h*D + d, c]  = sum over (b, s)    of dt[b, h, s, d] * hidden[b, s, c]

Both are tiles of one persistent grid, wgrad first: its sums are the longer ones where there is more than one
round (kernels/common/filled_schedule.py). Every operand is read by TMA as it lies in memory. A block of A is
128 rows: 128 positions of one batch entry in dgrad, 128 of the D elements of one head (M is the contiguous
mode) in wgrad. Blocks never cross a batch entry or a head, so that TMA fills what lies past S with zeros and
clips it on the way out, and dv needs no copy. B is hidden or W, N contiguous. K walks over the heads of q, k
and v in dgrad, over the batch's positions in wgrad.

The launch also finishes the norm-weight gradients from the partial sums of norm_backward.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_gemma.jit.signature import Signature, TensorArg
from cute_gemma.kernels.common.filled_schedule import plan_filled
from cute_gemma.kernels.common.gemm import BLOCK_K, EARLY, LATE, WARP, Workspace
from cute_gemma.kernels.common.norm_backward import chunk_rows
from cute_gemma.kernels.common.schedule import Section, TileSchedule, plan, select, small_quotient

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
    """What the TMA warp fetches, one TmaPartition each: grads[kind][side], weights[side] and hidden. hidden
    and the weights are inputs of the whole backward, so they are early operands. rank: of the CTA among those
    that compute a unit."""

    grads: tuple
    weights: tuple
    hidden: Any
    rank: Any
    seq: Any


def gradient_sections(batch, seq, hidden: int, columns: int, tuning) -> tuple[Section, Section]:
    """(wgrad, dgrad). columns: of the three projections' outputs side by side."""
    n_tiles = cute.ceil_div(hidden, tuning.tile_n)
    blocks = batch * cute.ceil_div(seq, BLOCK_M)
    return (
        Section(cute.ceil_div(columns, tuning.unit_rows), n_tiles, batch * cute.ceil_div(seq, BLOCK_K)),
        Section(cute.ceil_div(blocks, tuning.unit_rows // BLOCK_M), n_tiles, columns // BLOCK_K),
    )


class QkvGradientsBase:
    """grad_q, grad_k, grad_value [B, heads, S, D], hidden_states [B, S, C], weights [heads*D, C] and the norm
    partials [norm.ctas, D] -> grad_hidden_states [B, S, C], three weight gradients [heads*D, C], two
    norm-weight gradients [D] in float32.

    To be mixed with an architecture's PersistentGemm in a frozen dataclass with fields hidden (C, a multiple
    of 8), heads, kv_heads, head_dim (128 or 256), tuning, and norm: the tuning of the NormBackward that wrote
    the partials.
    """

    operand_majors = (("mn", "mn"), ("k", "mn"))
    early_stages = 2

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

    def schedule(self, sections: tuple) -> TileSchedule:
        """Who computes what of wgrad and dgrad."""
        tuning = self.tuning
        if tuning.stream_k:
            return plan(sections, tuning.workers, tuning.group_m, True)
        return plan_filled(*sections, tuning.workers, tuning.group_m)

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
        columns = sum(self.side_heads) * self.head_dim
        schedule = self.schedule(gradient_sections(batch, seq, self.hidden, columns, self.tuning))
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
            tuple(tuple(partition_block(t, kind) for t in tma.grads[kind]) for kind in (WGRAD, DGRAD)),
            tuple(partition_b(t, DGRAD) for t in tma.weights),
            partition_b(tma.hidden, WGRAD),
            rank,
            tma.seq,
        )

    @cute.jit
    def fetch_blocks(self, stages, loads, unit, span, state, parts: cutlass.Constexpr):
        """See GemmBase. Whose rows a k block's operands are is settled outside the loops over k blocks: in
        them, it takes the TMA warp longer than a 128x128 tile's products take."""
        if unit.section == WGRAD:
            block = unit.m * self.unit_blocks + loads.rank * self.blocks_per_cta
            if cutlass.const_expr(self.blocks_per_cta > 1):
                state = self.fetch_wgrad(stages, loads, unit, span, state, (parts, None), block)
            else:
                for side in cutlass.range_constexpr(3):
                    first, last = self.side_range(side, BLOCK_M)
                    if block >= first and block < last:
                        state = self.fetch_wgrad(stages, loads, unit, span, state, (parts, side), block)
        else:
            for side in cutlass.range_constexpr(3):
                state = self.fetch_dgrad(stages, loads, unit, span, state, (parts, side))
        return state

    @cute.jit
    def fetch_wgrad(self, stages, loads, unit, span, state, what: cutlass.Constexpr, block):
        """K blocks are those of S of one batch entry after the other. what: (parts, side of all blocks of A,
        or None if each may have its own). block: the first of them."""
        parts, only = what
        blocks = cute.ceil_div(loads.seq, BLOCK_K)
        entry = batch_entry(span[0], blocks)
        place = Int32(span[0] - entry * blocks)
        for _ in cutlass.range(span[0], span[1], unroll=1):
            barrier = self.open_stage(stages, state, parts)
            if cutlass.const_expr(EARLY in parts):
                loads.hidden.load(state.index, barrier, unit.n, place, entry)
            if cutlass.const_expr(LATE in parts):
                for number in cutlass.range_constexpr(self.blocks_per_cta):
                    target = state.index * self.blocks_per_cta + number, barrier
                    if cutlass.const_expr(only is not None):
                        self.load_head(loads, only, block, (place, entry), target)
                    else:
                        for side in cutlass.range_constexpr(3):
                            first, last = self.side_range(side, BLOCK_M)
                            if block + number >= first and block + number < last:
                                self.load_head(loads, side, block + number, (place, entry), target)
            state.advance()
            place += 1
            if place == blocks:
                place, entry = Int32(0), entry + 1
        return state

    def load_head(self, loads, side: int, block, position, target):
        """A's block of a wgrad tile: BLOCK_M of the elements of a head."""
        number, per_head = block - self.side_range(side, BLOCK_M)[0], self.head_dim // BLOCK_M
        layer = position[1] * self.side_heads[side] + number // per_head
        loads.grads[WGRAD][side].load(*target, number % per_head, position[0], layer)

    @cute.jit
    def fetch_dgrad(self, stages, loads, unit, span, state, what: cutlass.Constexpr):
        """K blocks are those of the heads of q, k and v. what: (parts, the side to fetch)."""
        parts, side = what
        first, last = self.side_range(side, BLOCK_K)
        per_head, blocks = self.head_dim // BLOCK_K, cute.ceil_div(loads.seq, BLOCK_M)
        block = unit.m * self.unit_blocks + loads.rank * self.blocks_per_cta
        entries = [batch_entry(block + i, blocks) for i in range(self.blocks_per_cta)]
        positions = [(block + i - entry * blocks, entry) for i, entry in enumerate(entries)]
        for k in cutlass.range(cutlass.max(span[0], first), cutlass.min(span[1], last), unroll=1):
            barrier = self.open_stage(stages, state, parts)
            if cutlass.const_expr(EARLY in parts):
                loads.weights[side].load(state.index, barrier, unit.n, k - first)
            if cutlass.const_expr(LATE in parts):
                head, column = (k - first) // per_head, (k - first) % per_head
                for number in cutlass.range_constexpr(self.blocks_per_cta):
                    place, entry = positions[number]
                    target = state.index * self.blocks_per_cta + number, barrier
                    layer = entry * self.side_heads[side] + head
                    loads.grads[DGRAD][side].load(*target, place, column, layer)
            state.advance()
        return state

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


def batch_entry(block, blocks):
    """The batch entry of a block of positions, `blocks` of which make an entry. More than small_quotient can divide fit
    in a GPU's memory only with one an entry, which needs no division."""
    return select(blocks == 1, block, small_quotient(block, blocks))


def two_sum(a, b):
    """(s, e): s = a + b rounded and e what the rounding lost, exactly (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def transposed(tensor):
    """[..., R, C] row-major as (C, R, ...): B of a GEMM that sums over R."""
    order = [1, 0] if cute.rank(tensor) == 2 else [2, 1, 0]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))
