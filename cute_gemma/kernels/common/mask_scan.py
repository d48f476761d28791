"""Looks through an additive mask once, so that attention reads only the tiles it must.

mask (B or 1, 1, S, S) bf16 or fp32 ->
  classes (B or 1, T, T) u8, T = ceil(S / 128): what each 128x128 tile holds, as kernels.common.mask says;
  row_max (B or 1, C, S) fp32, C = ceil(S / 1024): each row's largest entry among 1024 columns, -inf where
    all are masked.

A CTA takes 128 rows by 1024 columns: up to eight tiles, one after the other. A warp takes a few of the rows;
its lanes read along them, so that rows may start at any element (odd S leaves them unaligned). It loads all
that it reads of a tile at once, and then the next tile's. Of a short mask, later tiles are fetched into L2
meanwhile, so that the latency of memory is waited for only once.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.typing import Boolean, Float32, Int32, Int64, Uint8, Uint16
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from cute_gemma.jit.signature import Signature, TensorArg
from cute_gemma.kernels.common.mask import (
    ALL_MASKED,
    ALL_ZERO,
    DIAGONAL,
    MASK_TILE,
    MASKED_AT_OR_BELOW,
    MIXED,
    SCAN_COLUMNS,
)
from cute_gemma.kernels.common.softmax import warp_max

WARP = 32
COLUMNS = MASK_TILE // WARP  # of a tile and a lane
TILES = SCAN_COLUMNS // MASK_TILE
# Sequence lengths up to which tiles are fetched ahead: L2 holds them all. Beyond, there are CTAs enough to hide
# latency.
FETCHED_AHEAD = 2048
# Words of a warp's findings: a bit for each tile in which an entry is not 0; the same for not masked; whether
# an entry of the diagonal tile is not what that pattern wants.
NOT_ZERO, NOT_MASKED, NOT_DIAGONAL = KINDS = range(3)


@dataclass(frozen=True)
class MaskScan:
    """mask_dtype: "bf16" or "f32". early: the scan may begin while the launch before it still runs, as that
    one began after all before it had ended, and has nothing to do with the scan's tensors: so it is after the
    QKV projection, which is launched without PDL."""

    mask_dtype: str = "bf16"
    early: bool = False

    def __post_init__(self) -> None:
        if self.mask_dtype not in ("bf16", "f32"):
            raise ValueError(f'mask_dtype: got {self.mask_dtype!r}, want "bf16" or "f32"')

    def signature(self) -> Signature:
        """mask, row_max, classes."""
        return mask_arguments(self.mask_dtype)

    @property
    def warps(self) -> int:
        """As many as leave each thread 32 entries of bf16, or 16 of fp32, to load at once."""
        return 16 if self.mask_dtype == "bf16" else 32

    @cute.jit
    def __call__(self, mask: cute.Tensor, row_max: cute.Tensor, classes: cute.Tensor, stream: cuda.CUstream):
        b, s = Int32(mask.shape[0]), Int32(mask.shape[2])
        grid = (cute.ceil_div(s, SCAN_COLUMNS), cute.ceil_div(s, MASK_TILE), b)
        block = (self.warps * WARP, 1, 1)
        # Compiled for 1024 threads, it takes at most 64 registers a thread: an SM holds two CTAs of 512.
        self.kernel(mask, row_max, classes, s).launch(
            grid=grid, block=block, max_number_threads=(1024, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mask: cute.Tensor, row_max: cute.Tensor, classes: cute.Tensor, s: Int32):
        """Classes and maxima of this CTA's tiles."""

        @cute.struct
        class Storage:
            flags: cute.struct.MemRange[Int32, self.warps * len(KINDS)]

        flags = SmemAllocator().allocate(Storage).flags.get_tensor(cute.make_layout((len(KINDS), self.warps)))
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunk, tile, batch = cute.arch.block_idx()
        rows = MASK_TILE // self.warps
        first = tile * MASK_TILE + warp * rows
        tiles = cutlass.min(cute.ceil_div(s, MASK_TILE) - chunk * TILES, TILES)
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(not self.early):
            cute.arch.griddepcontrol_wait()
        largest = _scan(mask, flags, (chunk, tile, batch), first, rows, tiles, s)
        if lane < cutlass.min(s - first, rows):
            row_max[batch, chunk, first + lane] = largest
        cute.arch.sync_threads()
        if warp == 0:
            merged = [cute.arch.warp_redux_sync(flags[k, lane % self.warps], "or") for k in KINDS]
            column = chunk * TILES + lane
            if lane < tiles:
                classes[batch, tile, column] = Uint8(_classify(merged, lane, column == tile))
        if cutlass.const_expr(self.early):
            # The launch after this one waits for this one alone, but relies on the one before as well: that has
            # ended and its memory is visible once this wait returns, hence before this grid ends (PTX ISA,
            # griddepcontrol.wait; causality order is transitive).
            cute.arch.griddepcontrol_wait()


@cute.jit
def _scan(mask, flags, block, first, count: cutlass.Constexpr, tiles, s):
    """Leaves what a warp finds in `count` rows, from `first` on, of a CTA's tiles in its column of `flags`.
    Returns in lane r the largest entry of row r, -inf where all are masked.

    What lies beyond the sequence reads as the last row or column, which is part of the same tile.
    """
    chunk, tile, batch = block
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if s <= FETCHED_AHEAD:
        _prefetch(mask, batch, first, count, chunk, tiles, s)
    rows = [cutlass.min(first + r, s - 1) for r in range(count)]
    rows = [mask_entries(mask, (Int64(batch) * s + row) * s, cute.make_layout(s)) for row in rows]
    found = cute.make_rmem_tensor((2,), Int32)  # NOT_ZERO, NOT_MASKED
    found.fill(0)
    largest = cute.make_rmem_tensor((count,), Float32)
    largest.fill(-Float32.inf)
    entries = cute.make_rmem_tensor((count, COLUMNS), rows[0].element_type)
    # The diagonal tile is the first, if it is one of them.
    t = cutlass.select_(tile // TILES == chunk, tile % TILES, Int32(0))
    _load(rows, entries, chunk * TILES + t, s)
    # To save registers ptxas would use entries ahead of other loads; across a barrier it moves neither.
    cute.arch.sync_threads()
    differs = cute.arch.vote_any_sync(_differs_from_diagonal(entries, first, tile, s))
    if lane == 0:
        flags[NOT_DIAGONAL, warp] = Int32(differs)
    for _ in cutlass.range(tiles - 1, unroll=1):
        _merge(entries, t, found, largest)
        t = cutlass.select_(t + 1 < tiles, t + 1, Int32(0))
        _load(rows, entries, chunk * TILES + t, s)
    _merge(entries, t, found, largest)
    for k in cutlass.range_constexpr(2):
        of_warp = cute.arch.warp_redux_sync(found[k], "or")
        if lane == 0:
            flags[k, warp] = of_warp
    of_row = Float32(0.0)
    for r in cutlass.range_constexpr(count):
        of_row = cutlass.select_(lane == r, warp_max(largest[r]), of_row)
    return cutlass.select_(of_row <= MASKED_AT_OR_BELOW, Float32(-Float32.inf), of_row)


def _columns(tile, s):
    """A lane's columns of a tile, or of the sequence's last tile the last column again."""
    first = tile * MASK_TILE + cute.arch.lane_idx()
    return [cutlass.min(first + i * WARP, s - 1) for i in range(COLUMNS)]


def _load(rows, entries, tile, s):
    for i, column in enumerate(_columns(tile, s)):
        for r, row in enumerate(rows):
            entries[r, i] = row[column]


def _merge(entries, t, found, largest):
    """Joins the entries of tile t to the findings."""
    bits, of_tile = Int32(0), Float32(-Float32.inf)
    for r in range(cute.size(entries, mode=[0])):
        values = [entry_value(entries[r, i]) for i in range(COLUMNS)]
        for value in values:
            bits = bits | value.bitcast(Int32)
        of_row = _largest(_largest(values[0], values[1]), _largest(values[2], values[3]))
        largest[r] = _largest(largest[r], of_row)
        of_tile = _largest(of_tile, of_row)
    # Shifting the sign out makes -0 zero.
    not_zero, not_masked = Boolean((bits << 1) != 0), ~Boolean(of_tile <= MASKED_AT_OR_BELOW)
    found[NOT_ZERO] = found[NOT_ZERO] | (Int32(not_zero) << t)
    found[NOT_MASKED] = found[NOT_MASKED] | (Int32(not_masked) << t)


def _differs_from_diagonal(entries, first, tile, s):
    """Whether some entry of the diagonal tile is not 0, or beyond the diagonal not masked."""
    wrong = Boolean(False)
    for i, column in enumerate(_columns(tile, s)):
        for r in range(cute.size(entries, mode=[0])):
            hidden, value = Boolean(column - first > r), entry_value(entries[r, i])
            masked, zero = Boolean(value <= MASKED_AT_OR_BELOW), Boolean(value == 0.0)
            wrong = wrong | (hidden & ~masked) | (~hidden & ~zero)
    return wrong


@cute.jit
def _prefetch(mask, batch, first, count: cutlass.Constexpr, chunk, tiles, s):
    """A warp's entries of a CTA's tiles but the first into L2, 64 bytes a lane."""
    lanes = WARP // count  # of a row
    lane = cute.arch.lane_idx()
    start = (Int64(batch) * s + cutlass.min(first + lane // lanes, s - 1)) * s
    column = chunk * SCAN_COLUMNS + lane % lanes * (MASK_TILE // lanes)
    row = mask_entries(mask, start, cute.make_layout(s))
    for t in cutlass.range(1, tiles, unroll=1):
        _prefetch_l2(row.iterator + cutlass.min(column + t * MASK_TILE, s - 1))


@dsl_user_op
def _prefetch_l2(pointer, *, loc=None, ip=None):
    llvm.inline_asm(
        None, [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)], "prefetch.global.L2 [$0];", "l",
        has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


def _largest(a, b):
    """NaN if either is."""
    return cute.arch.fmax(a, b, nan=True)


def _classify(found, bit, on_diagonal):
    """The class of tile `bit` from all warps' findings."""
    not_zero, not_masked, not_diagonal = found
    diagonal = Boolean(not_diagonal == 0) & Boolean(on_diagonal)
    kind = cutlass.select_(diagonal, Int32(DIAGONAL), Int32(MIXED))
    kind = cutlass.select_((not_masked >> bit) & 1 == 0, Int32(ALL_MASKED), kind)
    return cutlass.select_((not_zero >> bit) & 1 == 0, Int32(ALL_ZERO), kind)


def mask_entries(mask, offset, layout):
    """A view of the mask from element `offset` on; bf16 as bare bits, for `entry_value`."""
    start = mask.iterator + offset
    if mask.element_type is not Float32:
        start = cute.recast_ptr(start, dtype=Uint16)
    return cute.make_tensor(start, layout)


def entry_value(entry) -> Float32:
    """An element of `mask_entries` as fp32: bf16 is fp32's upper half."""
    return entry if isinstance(entry, Float32) else (entry.to(Int32) << 16).bitcast(Float32)


def mask_arguments(dtype: str) -> tuple[TensorArg, TensorArg, TensorArg]:
    """mask, row_max and classes as `MaskScan` and `MaskedAttention` take them."""
    return (
        TensorArg("mask", dtype, ("mask_b", 1, "s", "s"), align=2 if dtype == "bf16" else 4),
        TensorArg("row_max", "f32", ("mask_b", "c", "s"), align=4),
        TensorArg("classes", "u8", ("mask_b", "t", "t"), align=1),
    )
