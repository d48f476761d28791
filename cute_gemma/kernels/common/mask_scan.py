"""Looks through an additive mask once, so that attention reads only the tiles it must.

mask (B or 1, 1, S, S) bf16 or fp32 ->
  classes (B or 1, T, T) u8, T = ceil(S / 128): what each 128x128 tile holds, as kernels.common.mask says;
  row_max (B or 1, C, S) fp32, C = ceil(S / 1024): each row's largest entry among 1024 columns, -inf where
    all are masked.

A CTA takes 128 rows by 1024 columns: eight tiles. A warp takes every eighth row and reads along it, so that
rows may start at any element (odd S leaves them unaligned).
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.typing import Boolean, Float32, Int32, Int64, Uint8, Uint16
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
WARPS = 8
TILES = SCAN_COLUMNS // MASK_TILE
# A warp's findings are KINDS words with a bit for each tile: an entry was not 0, was not masked, was not what
# the diagonal pattern wants.
KINDS = 3
ALL_TILES = (1 << TILES) - 1


@dataclass(frozen=True)
class MaskScan:
    """mask_dtype: "bf16" or "f32"."""

    mask_dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.mask_dtype not in ("bf16", "f32"):
            raise ValueError(f'mask_dtype: got {self.mask_dtype!r}, want "bf16" or "f32"')

    def signature(self) -> Signature:
        """mask, row_max, classes."""
        return mask_arguments(self.mask_dtype)

    @cute.jit
    def __call__(self, mask: cute.Tensor, row_max: cute.Tensor, classes: cute.Tensor, stream: cuda.CUstream):
        b, s = Int32(mask.shape[0]), Int32(mask.shape[2])
        grid = (cute.ceil_div(s, SCAN_COLUMNS), cute.ceil_div(s, MASK_TILE), b)
        self.kernel(mask, row_max, classes, s).launch(
            grid=grid, block=(WARPS * WARP, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mask: cute.Tensor, row_max: cute.Tensor, classes: cute.Tensor, s: Int32):
        """Flags and maxima of this CTA's eight tiles."""

        @cute.struct
        class Storage:
            flags: cute.struct.MemRange[Int32, WARPS * KINDS]

        flags = SmemAllocator().allocate(Storage).flags.get_tensor(cute.make_layout((KINDS, WARPS)))
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunk, tile, batch = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        # Neither the sequence's end nor the diagonal lies among these columns.
        found = (Int32(0),) * KINDS
        whole = Boolean((chunk + 1) * SCAN_COLUMNS <= s) & Boolean(tile // TILES != chunk)
        if whole:
            found = _scan_whole(mask, row_max, (chunk, tile, batch), s)
        else:
            found = _scan_any(mask, row_max, (chunk, tile, batch), s)
        cute.arch.griddepcontrol_launch_dependents()
        for k in cutlass.range_constexpr(KINDS):
            merged = cute.arch.warp_redux_sync(found[k], "or")
            if lane == 0:
                flags[k, warp] = merged
        cute.arch.sync_threads()
        column = chunk * TILES + lane
        if Boolean(warp == 0) & Boolean(lane < TILES) & Boolean(column < cute.ceil_div(s, MASK_TILE)):
            classes[batch, tile, column] = Uint8(_classify(flags, lane, column == tile))


@cute.jit
def _scan_whole(mask, row_max, block, s):
    """Columns that lie within the sequence and off the diagonal: a bitwise or and a maximum tell all."""
    chunk, tile, batch = block
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    bits = [Int32(0)] * TILES
    largest = [Float32(-Float32.inf)] * TILES
    for i in cutlass.range(MASK_TILE // WARPS, unroll=1):
        row = tile * MASK_TILE + i * WARPS + warp
        if row < s:
            start = (Int64(batch) * s + row) * s + chunk * SCAN_COLUMNS + lane
            layout = cute.make_layout((MASK_TILE // WARP, TILES), stride=(WARP, MASK_TILE))
            entries = mask_entries(mask, start, layout)
            bits, largest, of_row = _merge_row(entries, bits, largest)
            of_row = warp_max(of_row)
            if lane == 0:
                row_max[batch, chunk, row] = _unless_masked(of_row)
    not_zero, not_masked = Int32(0), Int32(0)
    for t in cutlass.range_constexpr(TILES):
        # Shifting the sign out makes -0 zero.
        not_zero = not_zero | cutlass.select_((bits[t] << 1) != 0, Int32(1 << t), Int32(0))
        masked = Boolean(largest[t] <= MASKED_AT_OR_BELOW)
        not_masked = not_masked | cutlass.select_(masked, Int32(0), Int32(1 << t))
    return not_zero, not_masked, Int32(ALL_TILES)


def _merge_row(entries, bits, largest):
    """A row's entries of the eight tiles, four a lane, joined to those of the rows before; and their
    largest."""
    of_row = Float32(-Float32.inf)
    bits, largest = list(bits), list(largest)
    for t in range(TILES):
        a, b, c, d = (entry_value(entries[i, t]) for i in range(MASK_TILE // WARP))
        joined = [x.bitcast(Int32) for x in (a, b, c, d)]
        bits[t] = bits[t] | joined[0] | joined[1] | joined[2] | joined[3]
        of_tile = _largest(_largest(a, b), _largest(c, d))
        largest[t] = _largest(largest[t], of_tile)
        of_row = _largest(of_row, of_tile)
    return bits, largest, of_row


def _largest(a, b):
    """NaN if either is."""
    return cute.arch.fmax(a, b, nan=True)


def _unless_masked(value):
    return cutlass.select_(value <= MASKED_AT_OR_BELOW, Float32(-Float32.inf), value)


@cute.jit
def _scan_any(mask, row_max, block, s):
    """Columns that may reach beyond the sequence or hold the diagonal: every entry is looked at on its
    own."""
    chunk, tile, batch = block
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    found = (Int32(0), Int32(0), Int32(0))
    for i in cutlass.range(MASK_TILE // WARPS, unroll=1):
        row = tile * MASK_TILE + i * WARPS + warp
        if row < s:
            entries = mask_entries(mask, (Int64(batch) * s + row) * s, cute.make_layout(s))
            largest, found = _scan_row(entries, row, chunk, s, found)
            if lane == 0:
                row_max[batch, chunk, row] = _unless_masked(largest)
    return found


@cute.jit
def _scan_row(entries, row, chunk, s, found):
    """One row of the eight tiles; columns beyond the sequence say nothing. Returns its largest entry and what
    was found."""
    lane = cute.arch.lane_idx()
    not_zero, not_masked, not_diagonal = found
    largest = Float32(-Float32.inf)
    for t in cutlass.range(TILES, unroll=2):
        first = chunk * SCAN_COLUMNS + t * MASK_TILE + lane
        columns = [first + i * WARP for i in range(MASK_TILE // WARP)]
        values = [entry_value(entries[cutlass.min(c, s - 1)]) for c in columns]
        bit = Int32(1) << t
        for column, value in zip(columns, values):
            inside = Boolean(column < s)
            zero, masked = Boolean(value == 0.0), Boolean(value <= MASKED_AT_OR_BELOW)
            hidden = Boolean(column > row)
            wrong = (hidden & ~masked) | (~hidden & ~zero)
            not_zero = not_zero | cutlass.select_(inside & ~zero, bit, Int32(0))
            not_masked = not_masked | cutlass.select_(inside & ~masked, bit, Int32(0))
            not_diagonal = not_diagonal | cutlass.select_(inside & wrong, bit, Int32(0))
            candidate = cutlass.select_(inside, value, Float32(-Float32.inf))
            largest = _largest(largest, candidate)
    largest = warp_max(largest)
    return largest, (not_zero, not_masked, not_diagonal)


def _classify(flags, bit, on_diagonal):
    """The class of tile `bit` from all warps' flags."""
    merged = [flags[k, 0] for k in range(KINDS)]
    for k in range(KINDS):
        for w in range(1, WARPS):
            merged[k] = merged[k] | flags[k, w]
    not_zero, not_masked, not_diagonal = ((m >> bit) & 1 for m in merged)
    diagonal = Boolean(not_diagonal == 0) & Boolean(on_diagonal)
    kind = cutlass.select_(diagonal, Int32(DIAGONAL), Int32(MIXED))
    kind = cutlass.select_(not_masked == 0, Int32(ALL_MASKED), kind)
    return cutlass.select_(not_zero == 0, Int32(ALL_ZERO), kind)


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
