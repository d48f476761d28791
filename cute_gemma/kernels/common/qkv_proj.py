"""QKV projection with QK norm and RoPE, what the architectures share: one launch for

    q = rope(norm(x wq^T, q_norm)), k = rope(norm(x wk^T, k_norm)), v = x wv^T

Shapes, all bf16 and row-major: x [M, C]; wq [H*D, C]; wk, wv [KV*D, C]; q_norm, k_norm [D]; cos, sin [M, D];
q [M, H*D]; k, v [M, KV*D]. Any M >= 1, C divisible by 8, D 128 or 256. The maths and its roundings are those
of norm_rope.py, applied to projections rounded to bf16; each row of each head is normalised by itself.

The columns of q, k and v are one row of output tiles: the tile's number picks the weight and its TMA
descriptor, so nothing is concatenated. A tile is one or two whole heads wide. Edges, and a last tile that is
not full of heads, are clipped by TMA.

With `save_for_backward` the kernel also writes what the backward needs, row by row because the rows of a tile
may cross
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
from cute_gemma.kernels.common.gemm import BLOCK_K, Workspace
from cute_gemma.kernels.common.schedule import Section, select

Q, K, V = 0, 1, 2


@dataclass(frozen=True)
class QKVTma:
    """What the device reads and writes. Triples are in order q, k, v, pairs in order q, k.

    norms: the two norm weights, () without qk_norm. cos, sin: as the architecture reads them. saved: None, or
    a `Saved`.
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
    """What the backward needs, pairs in order q, k: normed [B, heads, S, D], rstd [B, heads, S, 1]; rows = B
    * S."""

    normed: tuple
    rstd: tuple
    rows: Any


@dataclass(frozen=True)
class SavedRow:
    """Where one row of one head is saved: byte addresses, and whether there is such a row."""

    normed: Any
    rstd: Any
    valid: Any

    @cute.jit
    def save_rstd(self, value) -> None:
        if self.valid:
            pointer = cute.make_ptr(Float32, self.rstd, cute.AddressSpace.gmem, assumed_align=4)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = value

    @cute.jit
    def save_normed(self, column, pairs: list) -> None:
        """Write elements from pair `column` on; the address is a multiple of what is written."""
        if self.valid:
            values = cute.make_rmem_tensor(len(pairs), Int32)
            for index in cutlass.range_constexpr(len(pairs)):
                values[index] = pairs[index]
            pointer = cute.make_ptr(
                Int32, self.normed + 4 * column, cute.AddressSpace.gmem, assumed_align=4 * len(pairs)
            )
            cute.make_tensor(pointer, cute.make_layout(len(pairs))).store(values.load())


@dataclass(frozen=True)
class QKVLoads:
    """kernel: for its tiles' places."""

    x: Any
    weights: tuple
    kernel: Any
    rank: Any

    @cute.jit
    def early(self, unit, k, stage, barrier):
        q_tiles, k_tiles = self.kernel.column_tiles
        if unit.n < q_tiles:
            self.weights[Q].load(stage, barrier, unit.n, k)
        elif unit.n < q_tiles + k_tiles:
            self.weights[K].load(stage, barrier, unit.n - q_tiles, k)
        else:
            self.weights[V].load(stage, barrier, unit.n - q_tiles - k_tiles, k)

    def late(self, unit, k, stage, barrier):
        self.x.load(stage, barrier, self.kernel.row_tile(unit, self.rank), k)


class QKVProjectionBase:
    """To be mixed with an architecture's PersistentGemm in a frozen dataclass with these fields and `tuning`.

    hidden: C; heads: H; kv_heads: KV; head_dim: D. qk_norm: normalise q and k before RoPE. eps: of the norm.
    save_for_backward: also write rstd and normed of q and k (needs qk_norm). Raises ValueError for sizes it
    does not support.
    """

    # First in a call: the kernel before it is someone else's, and may have written the weights.
    programmatic = False
    early_stages = 0

    def check(self) -> None:
        """Raise ValueError for fields that do not go together."""
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
        """Host entry. rest: the arguments of `signature` from q_norm_weight on, as far as they are there; the
        stream."""
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
            self.table(cos),
            self.table(sin),
            saved,
        )
        q_tiles, kv_tiles = self.column_tiles
        section = Section(
            cute.ceil_div(x.shape[0], self.tuning.unit_rows),
            Int32(q_tiles + 2 * kv_tiles),
            Int32(cute.ceil_div(self.hidden, BLOCK_K)),
        )
        self.launch(tma, self.schedule((section,)), workspace, rest[-1])

    def table(self, tensor):
        """cos or sin as the epilogue reads it."""
        return tensor

    @property
    def column_tiles(self) -> tuple[int, int]:
        """Column tiles of q, and of each of k and v."""
        per_tile = self.tuning.tile_n // self.head_dim
        return -(-self.heads // per_tile), -(-self.kv_heads // per_tile)

    def loads(self, tma, operands, rank) -> QKVLoads:
        weights = tuple(self.partition_b(weight, operands[0][1], rank) for weight in tma.weights)
        return QKVLoads(self.partition_a(tma.x, operands[0][0], rank), weights, self, rank)

    def place(self, unit):
        """(which of q, k, v; tile within it) of a unit."""
        q_tiles, kv_tiles = self.column_tiles
        part = select(unit.n < q_tiles, Q, select(unit.n < q_tiles + kv_tiles, K, V))
        before = select(part == Q, 0, select(part == K, q_tiles, q_tiles + kv_tiles))
        return part, unit.n - before

    def saved_row(self, saved, part, m, head) -> SavedRow:
        """Row m of q or k's head number `head`: row (m // S, m % S) of [B, S]."""
        seq = saved.normed[Q].shape[2]
        heads = select(part == Q, self.heads, self.kv_heads)
        row = Int64((m // seq) * heads + head) * seq + m % seq
        normed, rstd = (
            Int64(cutlass.select_(part == Q, pair[Q].iterator.toint(), pair[K].iterator.toint()))
            for pair in (saved.normed, saved.rstd)
        )
        valid = cutlass.and_(m < saved.rows, head < heads)
        return SavedRow(normed + row * (2 * self.head_dim), rstd + row * 4, valid)
