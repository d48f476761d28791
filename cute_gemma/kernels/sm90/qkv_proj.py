"""QKV projection with QK norm and RoPE for sm_90a: see kernels/common/qkv_proj.py for what it computes.

Epilogue: a warp's strip has 16 rows, of which a thread holds two, 2 columns of every 8. So the pairs (d, d +
D/2) stay within a thread, and the mean of squares takes two shuffles among the four lanes of a row. cos and
sin are read from global memory, 16 bytes at a time, and traded among those lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_gemma.kernels.common import bf16, norm_rope
from cute_gemma.kernels.common.gemm import WARP
from cute_gemma.kernels.common.qkv_proj import K, Q, QKVProjectionBase, V
from cute_gemma.kernels.sm90.boxes import BOX_COLUMNS, BOX_ROWS
from cute_gemma.kernels.sm90.gemm import CONSUMER_BARRIER, FIRST_CONSUMER, PersistentGemm, Strip
from cute_gemma.kernels.sm90.tuning import CONSUMER_WARPS, SM_COUNT, GemmTuning, choose_tuning

LINE = 128  # bytes of a cache line
EPILOGUE_CYCLES = 18  # a tile column, measured as those of tuning.py


@dataclass(frozen=True)
class Head:
    """One head of a strip. pairs[h][j] as in `Strip`, of this head; inverses[h]; saved[h]: None or a
    SavedRow."""

    pairs: list
    inverses: list
    saved: list


@dataclass(frozen=True)
class Factors:
    """What a thread multiplies with in its columns 8 j + 2 (lane % 4) and the next.

    cos[h][j], sin[h][j]: bf16 pairs of row h; weights: (D, 2) fp32 in shared memory, (1 + w) of q and of k.
    """

    cos: list
    sin: list
    weights: Any
    part: Any

    def weight(self, j: int) -> tuple:
        """(1 + w) of the two columns of j, fp32."""
        column = 8 * j + 2 * (cute.arch.lane_idx() % 4)
        pair = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(cute.local_tile(self.weights[None, self.part], (2,), (column // 2,)), pair)
        return pair[0], pair[1]


def quad_transposed(words) -> list:
    """words[p] of lane q from word q of lane p, for the four lanes of a row.

    Loads of 16 bytes bring a lane eight neighbouring columns, of which it needs two; loads of the two alone
    keep the L1 cache busy for longer than this takes.
    """
    lane = cute.arch.lane_idx()
    values = [words[i] for i in range(4)]
    for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        upper = (lane & bit) != 0
        for low, high in pairs:
            received = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, values[low], values[high]), offset=bit)
            values[low], values[high] = (
                cutlass.select_(upper, received, values[low]), cutlass.select_(upper, values[high], received))
    return values


def saving_spills(tuning: GemmTuning) -> bool:
    """Whether registers would not suffice with `save_for_backward`: for 256 columns that may have to be added up."""
    return tuning.tile_n == 256 and (tuning.stream_k or tuning.share > 1)


def default_tuning(
    rows: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    sm_count: int = SM_COUNT,
    save_for_backward: bool = False,
) -> GemmTuning:
    """The tuning for M = `rows`; sizes and `save_for_backward` as in `QKVProjection`."""
    columns = tuple(count * head_dim for count in (heads, kv_heads, kv_heads))
    shapes = tuple((128, width) for width in (256, 128) if width % head_dim == 0)
    spills = saving_spills if save_for_backward else None
    return choose_tuning(rows, columns, hidden, shapes, sm_count, EPILOGUE_CYCLES, spills)


@dataclass(frozen=True)
class QKVProjection(QKVProjectionBase, PersistentGemm):
    """See QKVProjectionBase. tuning: see `default_tuning`; tile_m 128, tile_n a multiple of head_dim
    (default: one head). With `save_for_backward` tiles of 256 columns are neither shared nor split."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    eps: float = 1e-6
    qk_norm: bool = True
    save_for_backward: bool = False
    tuning: GemmTuning | None = None
    b_evict_first = True

    def __post_init__(self) -> None:
        if self.tuning is None:
            object.__setattr__(self, "tuning", GemmTuning(tile_n=self.head_dim))
        if self.tuning.tile_m != 128:
            raise ValueError(f"tile_m: {self.tuning.tile_m}, expected 128")
        if self.save_for_backward and saving_spills(self.tuning):
            raise ValueError(
                f"tuning: got tile_n 256, stream_k {self.tuning.stream_k} and share {self.tuning.share}, expected with "
                "save_for_backward neither stream_k nor share 2 at tile_n 256"
            )
        self.check()

    @property
    def scratch_bytes(self) -> int:
        return 2 * self.head_dim * 4

    def make_scratch(self, smem):
        """(1 + w) of q and k, fp32."""
        return smem.allocate_tensor(Float32, cute.make_layout((self.head_dim, 2)), 16)

    @cute.jit
    def prepare_epilogue(self, tma, scratch) -> None:
        if cutlass.const_expr(self.qk_norm):
            thread = cute.arch.thread_idx()[0] - FIRST_CONSUMER * 32
            if thread < self.head_dim:
                for part in cutlass.range_constexpr(2):
                    scratch[thread, part] = tma.norms[part][thread].to(Float32) + 1.0
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=CONSUMER_WARPS * 32)

    @cute.jit
    def assist(self, tma, unit, warp, warps: cutlass.Constexpr):
        """Brings the rows of cos and sin that the first tile needs into L2 while it is being multiplied."""
        per_row = self.head_dim * 2 // LINE
        first = unit.m * self.tuning.unit_rows
        begin, end = warp * WARP + cute.arch.lane_idx(), self.tuning.unit_rows * per_row
        for index in cutlass.range(begin, end, warps * WARP, unroll=1):
            for table in (tma.cos, tma.sin):
                row = cutlass.min(first + index // per_row, table.shape[0] - 1)
                line = table.iterator + (Int64(row) * self.head_dim + index % per_row * (LINE // 2))
                cute.arch.prefetch(line.to_llvm_ptr(), cache_level="L2")

    def read_tables(self, tma, first_row) -> tuple:
        """(cos, sin) of the thread's two rows, [h][j] as in `Factors`. Rows past the end read the last one."""
        lane = cute.arch.lane_idx()
        tables = []
        for table in (tma.cos, tma.sin):
            rows = []
            for half in (0, 1):
                row = cutlass.min(first_row + lane // 4 + 8 * half, table.shape[0] - 1)
                start = table.iterator + (Int64(row) * self.head_dim + lane % 4 * 8)
                pairs = cute.recast_ptr(start.align(16), dtype=Int32)
                loaded = [cute.make_rmem_tensor(4, Int32) for _ in range(self.head_dim // 32)]
                for i, words in enumerate(loaded):
                    cute.autovec_copy(cute.make_tensor(pairs + 16 * i, cute.make_layout(4)), words)
                rows.append(loaded)
            tables.append(rows)
        return tuple([[pair for words in row for pair in quad_transposed(words)] for row in rows] for rows in tables)

    def before_epilogue(self, unit, io, row):
        """cos and sin, of v's tiles too: they are loaded and traded while products are under way. Not where
        registers are short: beside a tile of 256 columns that may be added up first, or whose head is as wide."""
        if self.words > 64 and (self.tuning.stream_k or self.tuning.share > 1 or self.head_dim > 128):
            return None
        words = cute.make_rmem_tensor((2, 2, self.head_dim // 8), Int32)
        words.fill(0)
        self.keep_tables(io[0], unit, row, words)
        pairs = range(self.head_dim // 8)
        return tuple([[words[table, half, j] for j in pairs] for half in (0, 1)] for table in (0, 1))

    @cute.jit
    def keep_tables(self, tma, unit, row, words):
        """Always done. Without a branch the assembler waits for the products first, and trades then."""
        if unit.k_end > unit.k_begin:
            tables = self.read_tables(tma, unit.m * self.tuning.unit_rows + row)
            for table in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    for j in cutlass.range_constexpr(self.head_dim // 8):
                        words[table, half, j] = tables[table][half][j]

    @cute.jit
    def epilogue(self, strip, unit, io, ready):
        """v leaves as it is; heads of q and k are normalised, rotated and leave one by one."""
        tma, scratch, boxes = io
        part, tile = self.place(unit)
        first_row = unit.m * self.tuning.unit_rows + strip.row
        box_row, box_column = first_row // BOX_ROWS, tile * (self.tuning.tile_n // BOX_COLUMNS)
        if part == V:
            strip.store(
                boxes,
                box_column,
                lambda columns: boxes.store(tma.outputs[V], [(box_row, column) for column in columns]),
            )
        else:
            cos, sin = self.read_tables(tma, first_row) if cutlass.const_expr(ready is None) else ready
            factors = Factors(cos, sin, scratch, part)
            per_head = self.head_dim // 8
            for number in cutlass.range_constexpr(self.tuning.tile_n // self.head_dim):
                pairs = [half[number * per_head : (number + 1) * per_head] for half in strip.pairs]
                head = self.head(
                    pairs, tma, (part, first_row, tile * (self.tuning.tile_n // self.head_dim) + number)
                )
                column = box_column + number * (self.head_dim // BOX_COLUMNS)
                self.store_head(head, factors, (tma, boxes), (box_row, column))

    @cute.jit
    def store_head(self, head, factors, io, target):
        """Rotate and store a head, 64 columns of each half at a time."""
        tma, boxes = io
        box_row, column = target
        steps = self.head_dim // (2 * BOX_COLUMNS)
        for step in cutlass.range_constexpr(steps):
            low, high = self.rotated(head, factors, step * (BOX_COLUMNS // 8))
            blocks = [strip.sixteen(index) for strip in (low, high) for index in range(BOX_COLUMNS // 16)]
            targets = [(box_row, column + step), (box_row, column + step + steps)]
            boxes.fill(blocks)
            if factors.part == Q:
                boxes.store(tma.outputs[Q], targets)
            else:
                boxes.store(tma.outputs[K], targets)

    def head(self, pairs, tma, place) -> Head:
        """The mean of squares of a head, and where it is saved."""
        part, first_row, number = place
        inverses, saved = [None, None], [None, None]
        for half in (0, 1):
            if self.qk_norm:
                squares = norm_rope.sum_of_squares(pairs[half])
                for distance in (1, 2):
                    squares = squares + cute.arch.shuffle_sync_bfly(squares, distance)
                inverses[half] = norm_rope.inverse_root(squares, self.head_dim, self.eps)
            if self.save_for_backward:
                lane = cute.arch.lane_idx()
                saved[half] = self.saved_row(tma.saved, part, first_row + lane // 4 + 8 * half, number)
                self.save_rstd(saved[half], inverses[half])
        return Head(pairs, inverses, saved)

    @cute.jit
    def save_rstd(self, row, value):
        """One lane of the row's four writes."""
        if cute.arch.lane_idx() % 4 == 0:
            row.save_rstd(value)

    def rotated(self, head: Head, factors: Factors, first: int) -> tuple:
        """Columns [8 first, 8 first + 64) of a head, and those half a head further, normalised and
        rotated."""
        low, high = ([], []), ([], [])
        for j in range(first, first + BOX_COLUMNS // 8):
            columns = (j, j + self.head_dim // 16)
            weights = [factors.weight(column) for column in columns] if self.qk_norm else None
            for half in (0, 1):
                values = [head.pairs[half][column] for column in columns]
                if self.qk_norm:
                    normed = [norm_rope.normalise(value, head.inverses[half]) for value in values]
                    if self.save_for_backward:
                        for column, pair in zip(columns, normed):
                            place = 4 * column + cute.arch.lane_idx() % 4
                            head.saved[half].save_normed(place, [bf16.pack(*pair)])
                    values = [norm_rope.scale(pair, weight) for pair, weight in zip(normed, weights)]
                cos = tuple(factors.cos[half][column] for column in columns)
                sin = tuple(factors.sin[half][column] for column in columns)
                for strip, value in zip((low, high), norm_rope.rotate(*values, cos, sin)):
                    strip[half].append(value)
        return Strip(low, None), Strip(high, None)
