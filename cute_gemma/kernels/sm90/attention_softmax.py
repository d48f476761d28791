"""Scores to weights in the registers of one consumer warpgroup (wgmma accumulator layout), for the sm_90a attention.

A thread holds 2 rows of a (64, N) tile: element c of its accumulator lies in row 8 * ((c // 2) % 2) + lane / 4 of its
warp's 16 rows and in column 8 * (c // 4) + 2 * (lane % 4) + c % 2. Read pairwise as bf16, the same order is the A operand
of the second product, so weights never leave the thread.

Two ways to shift the exponent:
  * fixed (a cap bounds the logits): p = 2^(log2e * cap * tanh(s * scale / cap)). Nothing is ever rescaled.
  * lazy (no cap, or one too large for fp32): p = 2^(log2e * scale * s - shift), the shift set well above the first tile's
    maximum and raised, with O rescaled, only where a weight grows beyond all bounds.
Both learn from the sums of weights, which are needed anyway, whether the tile was computed right, and do it anew from the
scores, which are still there, if it was not. So a score costs no comparison: capped, 4 multiply-adds, 1 ex2, 1 addition and
half a conversion; without cap 1, 1, 1 and a half. While the tensor core runs, an SM sub-partition's registers feed little more
than one operand a cycle to anything else, so operands count as much as instructions.
"""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass.cute.typing import Boolean, Float32, Int32

from cute_gemma.kernels.common.softcap import LOG2_E, TANH_FITS, Softcap, exp2, tanh
from cute_gemma.kernels.common.softmax import pack_bf16, unpack_bf16

ROWS = 2  # rows a thread holds
# A weight this far below the sum of its row, as a power of 2, is lost in it, even a million times over.
NEGLIGIBLE = 30
# A polynomial is of use where the end of its range is this large a base-2 exponent: then ordinary sums, from 2^-10 to
# 2^40, tell that scores were in range.
LEAST_EXPONENT = NEGLIGIBLE + 10
WIDE = len(TANH_FITS)  # the level that takes any score
# Binary orders from a row's largest weight, when its shift is set, to 1; weights 2^-86 of the largest vanish, which no bf16
# result can tell.
MARGIN = 40.0
# Largest sum that a row's weights in one tile may have before its shift is raised: with MARGIN, scores 2^80 times heavier
# than the first tile's heaviest.
RAISE_ABOVE = 2.0**40
# A shift below any: finite, so that differences are never NaN.
LOWEST = -1e30


@dataclass(frozen=True)
class Quintic:
    """log2e * cap * tanh(s * scale / cap) ~ r * ((r^2 + b)^2 + c) with r = k s, from the fit of degree 5.

    Completing the square leaves no factor of r^4, so that every step takes at most one register besides its own.
    """

    softcap: Softcap

    @property
    def constants(self) -> tuple[float, float, float]:
        """k, b, c."""
        a0, a1, a2 = self.softcap.coefficients(TANH_FITS[0])
        k = a2**0.2
        b = a1 / (2.0 * k**3)
        return k, b, a0 / k - b * b


@dataclass(frozen=True)
class Limits:
    """Columns of the tile that this thread's rows may see, less its own first column: element c is kept while
    8 * (c // 4) + c % 2 <= columns[(c // 2) % 2]."""

    columns: tuple[Int32, Int32]


@dataclass(frozen=True)
class Lazy:
    """A thread's state of lazily shifted softmax. shift: one a row, in binary orders. rescale: what O, as of the tile before,
    is to be multiplied with where raised[0] is not 0."""

    shift: cute.Tensor
    rescale: cute.Tensor
    raised: cute.Tensor


def unseen(x: Int32) -> Int32:
    """x by way of a shuffle from each lane to itself, through which no assembler sees. What depends on it is computed where
    it is used, instead of being kept in registers from an earlier use or from before a loop."""
    return cute.arch.shuffle_sync_bfly(x, offset=0)


def usable_levels(softcap: Softcap) -> tuple[int, ...]:
    """The ways to compute tanh that this cap admits, cheapest first: polynomials by number, then WIDE."""
    usable = [i for i, fit in enumerate(TANH_FITS) if softcap.exponent_limit(fit) >= LEAST_EXPONENT]
    return (*usable, WIDE)


# ---- exponents: a score's base-2 exponent as a product of two factors ------------------------------------------------


def _quintic(softcap, s, one):
    k, b, c = (Float32(x) for x in Quintic(softcap).constants)
    r = s * (k if one is None else one)
    v = cute.math.fma(r, r, b)
    return r, cute.math.fma(v, v, c)


def _polynomial(softcap, fit, s, one):
    *rest, slope = (Float32(x) for x in softcap.coefficients(fit))
    square = s * s
    for a in reversed(rest):
        slope = cute.math.fma(slope, square, a)
    return s, slope


def _wide(softcap, s, one=None):
    """Any score."""
    return tanh(s * (softcap.scale / softcap.cap)), Float32(LOG2_E * softcap.cap)


def _uncapped(scale, s, one=None):
    return s, Float32(LOG2_E * scale)


def _sum_and_pack(rS, rP, tile, exponent, bias=None, limits=None, gate=None, group=8, lag=1):
    """Weights 2^(exponent of the score + bias of its row), 0 beyond the limits: rP, and tile[row] = their sums. Where there are
    limits a row may have few keys: it sums the rounded weights, so that a lone key weighs exactly 1."""
    part = [None] * ROWS
    history = []
    ones = [None] * ROWS
    for c in range(0, cute.size(rS), 2):
        row = (c // 2) % ROWS
        if gate is not None and c % group == 0:
            history.append(list(part))
            if len(history) > lag:
                ones = [cute.math.fma(x, Float32(0.0), Float32(gate)) for x in history[-1 - lag] if x is not None] or ones
        p = []
        for e in (c, c + 1):
            a, b = exponent(rS[e], ones[row])
            weight = exp2(a * b if bias is None else cute.math.fma(a, b, bias[row]))
            p.append(weight if limits is None else cutlass.select_(_seen(limits, e), weight, Float32(0.0)))
        rP[c // 2] = pack_bf16(*p)
        if limits is not None:
            p = unpack_bf16(rP[c // 2])
        both = p[0] + p[1]
        part[row] = both if part[row] is None else part[row] + both
    for row in range(ROWS):
        tile[row] = part[row]


def _seen(limits, c):
    return 8 * (c // 4) + c % 2 <= limits.columns[(c // 2) % ROWS]


def _afresh(limits):
    """The same limits, to be compared with anew: results for every element would fill the predicate registers."""
    return None if limits is None else Limits(tuple(unseen(c) for c in limits.columns))


def any_exponent(scale: float, cap: float | None):
    """The exponent function that takes any score."""
    return partial(_uncapped, scale) if cap is None else partial(_wide, Softcap(scale, cap))


# ---- fixed shift -----------------------------------------------------------------------------------------------------


@cute.jit
def capped_weights(rS, rP, sums, level, softcap: cutlass.Constexpr, group: cutlass.Constexpr, lag: cutlass.Constexpr):
    """Weights of a tile without masked entries: rP, an Int32 view of the A operand, and sums[row] += theirs.

    level[0] is the cheapest way that the warp's scores have not yet outgrown in this work unit.
    """
    tile = cute.make_rmem_tensor((ROWS,), Float32)
    for i in cutlass.range_constexpr(WIDE):
        if cutlass.const_expr(i in usable_levels(softcap)):
            if level[0] == i:
                _sum_and_pack(
                    rS, rP, tile, _at_level(softcap, i), gate=Quintic(softcap).constants[0] if i == 0 and group else None, group=group or 8, lag=lag
                )
                if not _in_range(tile, softcap.exponent_limit(TANH_FITS[i])):
                    level[0] = Int32(i + 1)
    if level[0] == WIDE:
        _sum_and_pack(rS, rP, tile, _at_level(softcap, WIDE))
    for row in cutlass.range_constexpr(ROWS):
        sums[row] = sums[row] + tile[row]


def _at_level(softcap, i):
    if i == WIDE:
        return partial(_wide, softcap)
    return partial(_polynomial, softcap, TANH_FITS[i]) if i else partial(_quintic, softcap)


def _in_range(tile, limit):
    """Whether every weight of the warp is right, or lost in its row: the polynomials increase, so that a weight below 2^limit
    means a score within the range or below it; and weights of scores below it are less than 2^-limit."""
    fine = Boolean(True)
    for row in range(ROWS):
        fine = fine & Boolean(tile[row] <= 2.0**limit) & Boolean(tile[row] >= 2.0 ** (NEGLIGIBLE - limit))
    return cute.arch.vote_all_sync(fine)


@cute.jit
def capped_weights_within(rS, rP, sums, softcap: cutlass.Constexpr, limits: cutlass.Constexpr):
    """The same for a tile that limits cut: by the widest polynomial where all scores of the warp allow, else by tanh.approx."""
    tile = cute.make_rmem_tensor((ROWS,), Float32)
    fine = Boolean(False)
    if cutlass.const_expr(WIDE - 1 in usable_levels(softcap)):
        largest = Float32(0.0)
        for c in cutlass.range_constexpr(cute.size(rS)):
            largest = cute.arch.fmax(largest, cute.math.abs(rS[c]))
        fine = cute.arch.vote_all_sync(largest <= softcap.score_limit(TANH_FITS[-1]))
    if fine:
        _sum_and_pack(rS, rP, tile, _at_level(softcap, WIDE - 1), None, limits)
    else:
        _sum_and_pack(rS, rP, tile, _at_level(softcap, WIDE), None, _afresh(limits))
    for row in cutlass.range_constexpr(ROWS):
        sums[row] = sums[row] + tile[row]


# ---- lazy shift ------------------------------------------------------------------------------------------------------


@cute.jit
def lazy_weights(rS, rP, sums, lazy, exponent: cutlass.Constexpr, limits: cutlass.Constexpr, first: cutlass.Constexpr):
    """Weights of a tile and sums[row] += theirs. exponent: an increasing function of the score; first: whether this is the
    unit's first tile, which sets the shifts."""
    if cutlass.const_expr(first):
        _raise_shifts(rS, rP, sums, lazy, exponent, limits)
    else:
        tile = cute.make_rmem_tensor((ROWS,), Float32)
        tile.fill(0.0)
        # Always so. Without a branch ptxas finds P written among products in flight, and makes them all wait (C7513).
        if lazy.shift[0] >= LOWEST:
            _sum_and_pack(rS, rP, tile, exponent, [-lazy.shift[row] for row in range(ROWS)], limits)
        fine = Boolean(True)
        for row in cutlass.range_constexpr(ROWS):
            fine = fine & Boolean(tile[row] <= RAISE_ABOVE)
        if cute.arch.vote_all_sync(fine):
            for row in cutlass.range_constexpr(ROWS):
                sums[row] = sums[row] + tile[row]
        else:
            _raise_shifts(rS, rP, sums, lazy, exponent, limits)


@cute.jit
def _raise_shifts(rS, rP, sums, lazy, exponent: cutlass.Constexpr, limits: cutlass.Constexpr):
    """Shifts from the tile's maxima where these are larger, the tile's weights with them, and how much to rescale O."""
    tops = [Float32(-Float32.inf)] * ROWS
    for c in cutlass.range_constexpr(cute.size(rS)):
        row = (c // 2) % ROWS
        score = rS[c] if limits is None else cutlass.select_(_seen(limits, c), rS[c], Float32(-Float32.inf))
        tops[row] = cute.arch.fmax(tops[row], score)
    for row in cutlass.range_constexpr(ROWS):
        top = tops[row]
        for offset in cutlass.range_constexpr(2):  # a row's columns lie in four lanes
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << offset))
        a, b = exponent(top)
        top = a * b
        shift = cutlass.select_(top > lazy.shift[row], top + MARGIN, lazy.shift[row])
        lazy.rescale[row] = exp2(lazy.shift[row] - shift)
        lazy.shift[row] = shift
    tile = cute.make_rmem_tensor((ROWS,), Float32)
    minus = [-lazy.shift[row] for row in range(ROWS)]
    _sum_and_pack(rS, rP, tile, exponent, minus, _afresh(limits))
    for row in cutlass.range_constexpr(ROWS):
        sums[row] = cute.math.fma(sums[row], lazy.rescale[row], tile[row])
    lazy.raised[0] = Int32(1)
