"""Scores to weights in the registers of one consumer warpgroup (wgmma accumulator layout), for the sm_90a
attention.
 A thread holds 2 rows of a (64, N) tile: element c of its accumulator lies in row 8 * ((c // 2) % 2) + lane /
4 of its warp's 16 rows and in column 8 * (c // 4) + 2 * (lane % 4) + c % 2. Read pairwise as bf16, the same
order is the A operand of the second product, so weights never leave the thread.

Two ways to shift the exponent:
  * fixed (a cap bounds the logits): p = 2^(log2e * cap * tanh(s * scale / cap)), tanh by tanh.approx. Nothing is
      ever rescaled. A score costs two multiplications, tanh, ex2, an addition and half a conversion. Polynomials in
      place of tanh, the way of the sm_100a kernel, lose here: with 1 ex2 and 4 multiply-adds a score, and their longer
      code, the kernel took 5 % longer at S = 8192 and 47 % at S = 128 on an H200 (graph replay, cold caches).
  * lazy (no cap, or one too large for fp32): p = 2^(log2e * scale * s - shift), the shift set well above the
      first tile's maximum and raised, with O rescaled, only where a weight grows beyond all bounds. It learns from
      the sums of weights, which are needed anyway, whether the tile was computed right, and does it anew from the
      scores, which are still there, if it was not. So a score costs no comparison, but 1 multiply-add, ex2, addition
      and half a conversion. While the tensor core runs, an SM sub-partition's registers feed little more than one
      operand a cycle to anything else, so operands count as much as instructions. """

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.typing import Boolean, Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_gemma.kernels.common.softcap import LOG2_E, Softcap, exp2, tanh
from cute_gemma.kernels.common.softmax import pack_bf16, unpack_bf16

ROWS = 2  # rows a thread holds
# Binary orders from a row's largest weight, when its shift is set, to 1; weights 2^-86 of the largest vanish,
# which no bf16 result can tell.
MARGIN = 40.0
# Largest sum that a row's weights in one tile may have before its shift is raised: with MARGIN, scores 2^80
# times heavier than the first tile's heaviest.
RAISE_ABOVE = 2.0**40
# A shift below any: finite, so that differences are never NaN.
LOWEST = -1e30


@dataclass(frozen=True)
class View:
    """What a thread's rows may see of a block. last: the last column of each of its two rows, less its own
    first column; window: how many columns up to there, None for all. Element c is column 8 * (c // 4) + c % 2
    of row (c // 2) % 2."""

    last: tuple
    window: int | None


# In place of a view, where scores have become exponents, those of hidden keys -inf.
GIVEN = "given"


@dataclass(frozen=True)
class Read:
    """keys: above 0 if a warpgroup reads any key of a block, else all weights are 0; may_be_none: whether it can be
    else."""

    keys: Int32
    may_be_none: cutlass.Constexpr[bool]


@dataclass(frozen=True)
class Lazy:
    """A thread's state of lazily shifted softmax. shift: one a row, in binary orders. rescale: what O, as of
    the tile before, is to be multiplied with where raised[0] is not 0."""

    shift: cute.Tensor
    rescale: cute.Tensor
    raised: cute.Tensor


def unseen(x: Int32) -> Int32:
    """x by way of a shuffle from each lane to itself, through which no assembler sees. What depends on it is
    computed where it is used, instead of being kept in registers from an earlier use or from before a
    loop."""
    return cute.arch.shuffle_sync_bfly(x, offset=0)


@dsl_user_op
def settle(x: Float32, *, loc=None, ip=None) -> Float32:
    """x, computed before the products that follow are issued: what it depends on may be weights, whose
    registers are theirs from then on (PTX ISA, wgmma.mma_async)."""
    return Float32(
        llvm.inline_asm(
            T.f32(), [x.ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=f,f", has_side_effects=True,
            asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


# ---- exponents: a score's base-2 exponent as a product of two factors --------------------------------------


def _capped(softcap, s):
    return tanh(s * (softcap.scale / softcap.cap)), Float32(LOG2_E * softcap.cap)


def _uncapped(scale, s):
    return s, Float32(LOG2_E * scale)


def given(s):
    """An exponent that has taken its score's place."""
    return s, Float32(1.0)


def _sum_and_pack(rS, rP, tile, exponent, shift=None, view=None):
    """Weights 2^(exponent of the score + shift of its row): rP, and tile[row] = their sums. Where a view
    hides keys a row may have few: it sums the rounded weights, so that a lone key weighs exactly 1."""
    part = [None] * ROWS
    for c in range(0, cute.size(rS), 2):
        row = (c // 2) % ROWS
        p = [_weight(rS, e, exponent, shift, view) for e in (c, c + 1)]
        rP[c // 2] = pack_bf16(*p)
        if view is not None:
            p = unpack_bf16(rP[c // 2])
        both = p[0] + p[1]
        part[row] = both if part[row] is None else part[row] + both
    for row in range(ROWS):
        tile[row] = part[row]


def _weight(rS, e, exponent, shift, view):
    a, b = exponent(rS[e])
    weight = exp2(a * b if shift is None else cute.math.fma(a, b, shift[(e // 2) % ROWS]))
    if view is None or view == GIVEN:
        return weight
    return cutlass.select_(seen(view, e), weight, Float32(0.0))


def seen(view, c):
    """Whether positions let element c be seen."""
    row, column = (c // 2) % ROWS, 8 * (c // 4) + c % 2
    if view.window is None:
        return column <= view.last[row]
    before = view.last[row] - column
    return Boolean(before >= 0) & Boolean(before < view.window)


def _afresh(view):
    """The same view, to be compared with anew: results for every element would fill the predicate
    registers."""
    if view is None or view == GIVEN:
        return view
    return View(tuple(unseen(x) for x in view.last), view.window)


@cute.jit
def to_exponents(rS, s, exponent: cutlass.Constexpr):
    """Puts exponents in the place of scores."""
    # Always so: s is above 0. Without a branch ptxas takes more registers than there are.
    if s > 0:
        for e in cutlass.range_constexpr(cute.size(rS)):
            a, b = exponent(rS[e])
            rS[e] = a * b


def exponents(scale: float, cap: float | None):
    """The exponent function of a score."""
    return partial(_uncapped, scale) if cap is None else partial(_capped, Softcap(scale, cap))


# ---- fixed shift -------------------------------------------------------------------------------------------


@cute.jit
def weights(rS, rP, sums, read: Read, exponent: cutlass.Constexpr, view):
    """Weights of a block, under a view or None: rP, an Int32 view of the A operand, and sums[row] += theirs."""
    tile = cute.make_rmem_tensor((ROWS,), Float32)
    tile.fill(0.0)
    if cutlass.const_expr(read.may_be_none):
        rP.fill(0)
    # Always a branch. Without one ptxas makes products wait (see lazy_weights).
    if read.keys > 0:
        _sum_and_pack(rS, rP, tile, exponent, None, view)
    _add(sums, tile)


def _add(sums, tile):
    for row in range(ROWS):
        sums[row] = settle(sums[row] + tile[row])


# ---- lazy shift --------------------------------------------------------------------------------------------


@cute.jit
def lazy_weights(rS, rP, sums, lazy, read: Read, exponent: cutlass.Constexpr, view, first: cutlass.Constexpr):
    """Weights of a block, under a view or None, and sums[row] += theirs. exponent: an increasing function of
    the score; first: whether this is the unit's first block, which sets the shifts."""
    if cutlass.const_expr(read.may_be_none):
        rP.fill(0)
    if cutlass.const_expr(first):
        if read.keys > 0:
            _raise_shifts(rS, rP, sums, lazy, exponent, view)
    else:
        tile = cute.make_rmem_tensor((ROWS,), Float32)
        tile.fill(0.0)
        # Always a branch. Without one ptxas finds P written among products in flight, and makes them all wait
        # (C7513).
        if read.keys > 0:
            _sum_and_pack(rS, rP, tile, exponent, [-lazy.shift[row] for row in range(ROWS)], view)
        fine = Boolean(True)
        for row in cutlass.range_constexpr(ROWS):
            fine = fine & Boolean(tile[row] <= RAISE_ABOVE)
        if cute.arch.vote_all_sync(fine):
            _add(sums, tile)
        else:
            _raise_shifts(rS, rP, sums, lazy, exponent, _afresh(view))


@cute.jit
def _raise_shifts(rS, rP, sums, lazy, exponent: cutlass.Constexpr, view):
    """Shifts from the block's largest exponents where these are larger, its weights with them, and how to
    rescale O."""
    tops = _largest_exponents(rS, exponent, view)
    for row in cutlass.range_constexpr(ROWS):
        top = tops[row]
        for offset in cutlass.range_constexpr(2):  # a row's columns lie in four lanes
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << offset))
        shift = cutlass.select_(top > lazy.shift[row], top + MARGIN, lazy.shift[row])
        lazy.rescale[row] = exp2(lazy.shift[row] - shift)
        lazy.shift[row] = shift
    tile = cute.make_rmem_tensor((ROWS,), Float32)
    _sum_and_pack(rS, rP, tile, exponent, [-lazy.shift[row] for row in range(ROWS)], _afresh(view))
    for row in cutlass.range_constexpr(ROWS):
        sums[row] = settle(cute.math.fma(sums[row], lazy.rescale[row], tile[row]))
    lazy.raised[0] = Int32(1)


def _largest_exponents(rS, exponent, view):
    """The thread's largest exponent in each row, -inf where it sees no key."""
    tops = [Float32(-Float32.inf)] * ROWS
    for c in range(cute.size(rS)):
        a, b = exponent(rS[c])
        hidden = view is not None and view != GIVEN
        y = cutlass.select_(seen(view, c), a * b, Float32(-Float32.inf)) if hidden else a * b
        tops[(c // 2) % ROWS] = cute.arch.fmax(tops[(c // 2) % ROWS], y)
    return tops
