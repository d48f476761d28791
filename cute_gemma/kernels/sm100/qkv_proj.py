"""QKV projection with QK norm and RoPE for sm_100a, one launch.

    q = rope(norm(x wq^T, q_norm)), k = rope(norm(x wk^T, k_norm)), v = x wv^T

Shapes, all bf16 and row-major: x [M, C]; wq [H*D, C]; wk, wv [KV*D, C]; q_norm, k_norm [D]; cos, sin [M, D];
q [M, H*D]; k, v [M, KV*D]. Any M >= 1, C divisible by 8, D 128 or 256. The maths and its roundings are those
of kernels/common/norm_rope.py, applied to projections rounded to bf16; each row of each head is normalised by
itself.

The columns of q, k and v are one row of output tiles: the tile's number picks the weight and its TMA
descriptor, so nothing is concatenated. A tile is one or two whole heads wide, and a thread owns a row of it,
so the mean of squares and the pairs (d, d + D/2) stay within a thread. Edges, and a last tile that is not
full of heads, are clipped by TMA.

Epilogue: cos and sin of a warp's 32 rows are fetched by TMA while the tile is being multiplied, as many
columns as four boxes hold (64 of each half of a head, a *step*); the rotated values take their place and
leave by TMA again.

With `save_for_backward` the kernel also writes what the backward needs, row by row because 128 rows may cross
a batch: q_rstd [B, H, S, 1], k_rstd [B, KV, S, 1] in fp32 and q_normed [B, H, S, D], k_normed [B, KV, S, D] =
bf16(t * rstd).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_gemma.jit.signature import TensorArg
from cute_gemma.kernels.common import bf16, norm_rope
from cute_gemma.kernels.common.schedule import Section, plan, select
from cute_gemma.kernels.sm100.boxes import BOX_BYTES, BOX_COLUMNS, BOX_ROWS, PAIRS, VECTORS
from cute_gemma.kernels.sm100.gemm import EPILOGUE_WARPS, PersistentGemm, Workspace
from cute_gemma.kernels.sm100.tuning import BLOCK_K, SM_COUNT, GemmTuning, choose_tuning

Q, K, V = 0, 1, 2
ROPE_BOXES = 4  # cos and sin, each a box of the low and one of the high half of a head


@dataclass(frozen=True)
class QKVTma:
    """What the device reads and writes. Triples are in order q, k, v, pairs in order q, k.

    norms: the two norm weights, () without qk_norm. saved: None, or a `Saved`.
    """

    x: Any
    weights: tuple
    outputs: tuple
    norms: tuple
    cos: Any
    sin: Any
    saved: Any


@dataclass(frozen=True)
class Saved:
    """For the backward, in order q, k: normed [B, heads, S, D], rstd [B, heads, S, 1]; rows: B * S."""

    normed: tuple
    rstd: tuple
    rows: Any


@dataclass(frozen=True)
class SavedRow:
    """Where the calling thread saves its row of one head: byte addresses, and whether there is such a row."""

    normed: Any
    rstd: Any
    valid: Any

    @cute.jit
    def save_rstd(self, value) -> None:
        if self.valid:
            pointer = cute.make_ptr(Float32, self.rstd, cute.AddressSpace.gmem, assumed_align=4)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = value

    @cute.jit
    def save_normed(self, column: int, pairs: list) -> None:
        """Write the 8 elements from pair `column` on."""
        if self.valid:
            values = cute.make_rmem_tensor(PAIRS, Int32)
            for index in cutlass.range_constexpr(PAIRS):
                values[index] = pairs[index]
            pointer = cute.make_ptr(Int32, self.normed + 4 * column, cute.AddressSpace.gmem, assumed_align=16)
            cute.make_tensor(pointer, cute.make_layout(PAIRS)).store(values.load())


@dataclass(frozen=True)
class Scratch:
    """Shared memory of the epilogue: (1 + w) in fp32, (D, 2); one barrier for each warp and step."""

    weights: Any
    barriers: Any


@dataclass(frozen=True)
class QKVLoads:
    """Weights do not depend on the preceding kernel, x does.

    tiles: column tiles of q and of k, which come before those of v. m_tile: see `PersistentGemm.m_tile`.
    """

    x: Any
    weights: tuple
    tiles: tuple
    m_tile: Any

    @cute.jit
    def early(self, unit, k, stage, barrier):
        q_tiles, k_tiles = self.tiles
        if unit.n < q_tiles:
            self.weights[Q].load(stage, barrier, unit.n, k)
        elif unit.n < q_tiles + k_tiles:
            self.weights[K].load(stage, barrier, unit.n - q_tiles, k)
        else:
            self.weights[V].load(stage, barrier, unit.n - q_tiles - k_tiles, k)

    def late(self, unit, k, stage, barrier):
        self.x.load(stage, barrier, self.m_tile(unit), k)


def default_tuning(
    rows: int, hidden: int, heads: int, kv_heads: int, head_dim: int = 128, sm_count: int = SM_COUNT
) -> GemmTuning:
    """The tuning for M = `rows`; sizes as in `QKVProjection`."""
    columns = tuple(count * head_dim for count in (heads, kv_heads, kv_heads))
    return choose_tuning(rows, columns, hidden, (128, 256) if head_dim == 128 else (256,), sm_count)


@dataclass(frozen=True)
class QKVProjection(PersistentGemm):
    """hidden: C; heads: H; kv_heads: KV; head_dim: D. qk_norm: normalise q and k before RoPE.

    save_for_backward: also write rstd and normed of q and k (needs qk_norm). tuning: see `default_tuning`;
    its tile_n is a multiple of head_dim, as the default, one CTA and one head a tile, has it. Raises
    ValueError for sizes it does not support.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    eps: float = 1e-6
    qk_norm: bool = True
    save_for_backward: bool = False
    tuning: GemmTuning | None = None

    def __post_init__(self) -> None:
        if self.tuning is None:
            object.__setattr__(self, "tuning", GemmTuning(tile_n=self.head_dim))
        if self.hidden < 8 or self.hidden % 8:
            raise ValueError(f"hidden: {self.hidden}, expected a positive multiple of 8")
        if self.head_dim not in (128, 256):
            raise ValueError(f"head_dim: {self.head_dim}, expected 128 or 256")
        if self.heads < 1 or self.kv_heads < 1:
            raise ValueError(f"heads, kv_heads: {self.heads}, {self.kv_heads}, expected at least 1 each")
        if self.tuning.tile_n % self.head_dim:
            raise ValueError(f"tile_n: {self.tuning.tile_n}, expected a multiple of head_dim {self.head_dim}")
        if self.save_for_backward and not self.qk_norm:
            raise ValueError("save_for_backward: True, but without qk_norm there is nothing to save")

    clusters = True

    # ---- host ---------------------------------------------------------------------------------------------

    def signature(self) -> tuple:
        q, kv, d = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.head_dim
        args = [
            TensorArg("hidden_states", "bf16", ("m", self.hidden)),
            TensorArg("q_proj_weight", "bf16", (q, self.hidden)),
            TensorArg("k_proj_weight", "bf16", (kv, self.hidden)),
            TensorArg("v_proj_weight", "bf16", (kv, self.hidden)),
            TensorArg("cos", "bf16", ("m", d)),
            TensorArg("sin", "bf16", ("m", d)),
            TensorArg("q", "bf16", ("m", q)),
            TensorArg("k", "bf16", ("m", kv)),
            TensorArg("v", "bf16", ("m", kv)),
        ]
        if self.qk_norm:
            args += [TensorArg("q_norm_weight", "bf16", (d,)), TensorArg("k_norm_weight", "bf16", (d,))]
        if self.save_for_backward:
            args += [
                TensorArg("q_normed", "bf16", ("b", self.heads, "s", d)),
                TensorArg("k_normed", "bf16", ("b", self.kv_heads, "s", d)),
                TensorArg("q_rstd", "f32", ("b", self.heads, "s", 1)),
                TensorArg("k_rstd", "f32", ("b", self.kv_heads, "s", 1)),
            ]
        return tuple(args) + self.workspace_signature()

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        wq: cute.Tensor,
        wk: cute.Tensor,
        wv: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        *rest,
    ):
        """Host entry. rest: what `signature` lists from q_norm_weight on; the stream."""
        norms = rest[:2] if cutlass.const_expr(self.qk_norm) else ()
        saved = None
        if cutlass.const_expr(self.save_for_backward):
            q_normed, k_normed, q_rstd, k_rstd = rest[2:6]
            saved = Saved((q_normed, k_normed), (q_rstd, k_rstd), x.shape[0])
        workspace = Workspace(*rest[-3:-1]) if cutlass.const_expr(self.tuning.stream_k) else None
        tma = QKVTma(
            self.tma_a(x),
            (self.tma_b(wq), self.tma_b(wk), self.tma_b(wv)),
            (self.tma_store(q), self.tma_store(k), self.tma_store(v)),
            norms,
            self.tma_rows(cos),
            self.tma_rows(sin),
            saved,
        )
        q_tiles, kv_tiles = self.column_tiles
        section = Section(
            cute.ceil_div(x.shape[0], self.tuning.unit_rows),
            Int32(q_tiles + 2 * kv_tiles),
            Int32(cute.ceil_div(self.hidden, BLOCK_K)),
        )
        schedule = plan((section,), self.tuning.workers, self.tuning.group_m, self.tuning.stream_k)
        self.launch(tma, schedule, workspace, rest[-1])

    @property
    def column_tiles(self) -> tuple[int, int]:
        """Column tiles of q, and of each of k and v."""
        per_tile = self.tuning.tile_n // self.head_dim
        return -(-self.heads // per_tile), -(-self.kv_heads // per_tile)

    # ---- device -------------------------------------------------------------------------------------------

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

    def loads(self, tma, mmas, operands, rank) -> QKVLoads:
        weights = tuple(self.partition_b(weight, mmas[0], operands[0][1], rank) for weight in tma.weights)
        x = self.partition_a(tma.x, mmas[0], operands[0][0], rank)
        return QKVLoads(x, weights, self.column_tiles, self.m_tile(rank))

    def place(self, unit, row):
        """(which of q, k, v; tile within it; first row of the warp in the tensor) of a unit."""
        q_tiles, kv_tiles = self.column_tiles
        part = select(unit.n < q_tiles, Q, select(unit.n < q_tiles + kv_tiles, K, V))
        before = select(part == Q, 0, select(part == K, q_tiles, q_tiles + kv_tiles))
        return part, unit.n - before, unit.m * self.tuning.unit_rows + row

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
        part, _, first_row = self.place(unit, row)
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
        part, tile, first_row = self.place(unit, row)
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
                    self.saved_row(tma.saved, part, first_row, first_head + h) for h in range(len(heads))
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

    def saved_row(self, saved, part, first_row, head) -> SavedRow:
        """The calling thread's row of head number `head` of q or k; row m is (m // S, m % S) of [B, S]."""
        m = first_row + cute.arch.lane_idx()
        seq = saved.normed[Q].shape[2]
        heads = select(part == Q, self.heads, self.kv_heads)
        row = Int64((m // seq) * heads + head) * seq + m % seq
        normed, rstd = (
            Int64(cutlass.select_(part == Q, pair[Q].iterator.toint(), pair[K].iterator.toint()))
            for pair in (saved.normed, saved.rstd)
        )
        valid = cutlass.and_(m < saved.rows, head < heads)
        return SavedRow(normed + row * (2 * self.head_dim), rstd + row * 4, valid)

    def read_weights(self, scratch, part, column):
        """(1 + w) of the 8 columns from pair `column` on, as PAIRS fp32 pairs."""
        values = cute.make_rmem_tensor(2 * PAIRS, Float32)
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
        cute.copy(
            atom, cute.local_tile(scratch.weights[None, part], (2 * PAIRS,), (column // PAIRS,)), values
        )
        return [(values[2 * i], values[2 * i + 1]) for i in range(PAIRS)]
