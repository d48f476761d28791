"""Scores to weights in the registers of one consumer warpgroup (wgmma accumulator layout), for the sm_90a attention.

A thread holds 2 rows of a (64, N) tile: element c of its accumulator lies in row 8 * ((c // 2) % 2) + lane / 4 of its
warp's 16 rows and in column 8 * (c // 4) + 2 * (lane % 4) + c % 2. Read pairwise as bf16, the same order is the A operand
of the second product, so weights never leave the thread.

Instructions a score, softcapped: 5 FMA pipe (s^2 - limit^2, three Horner steps, times s), 1 MUFU ex2, 1 add of the row
sum, 1/2 conversion, 1/2 for the range test: 1,024 issue cycles a 128x128 tile against 2,048 of tensor work.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.typing import Float32, Int32

from cute_gemma.kernels.common.softcap import LOG2_E, TANH_FITS, Softcap, TanhFit, exp2, tanh
from cute_gemma.kernels.common.softmax import pack_bf16

AND3 = 0x80  # lop3 table of a & b & c (PTX ISA, lop3)
ROWS = 2  # rows a thread holds
# A row's running maximum is raised only once it lags by more than this many binary orders: weights stay below 2^8, and
# most tiles need no rescaling of O.
LAZY_RESCALE = 8.0
# Stands for minus infinity in running maxima: finite, so that differences are never NaN.
LOWEST = -1e30


@dataclass(frozen=True)
class ShiftedPolynomial:
    """log2e * cap * tanh(s * scale / cap) ~ s * sum_k coefficients[k] w^k with w = s^2 - limit^2, by one TanhFit.

    The shift costs nothing, the square being an FMA, and makes the sign of w the range test: w < 0 iff |s| < limit.
    """

    softcap: Softcap
    fit: TanhFit

    @property
    def square(self) -> float:
        return self.softcap.score_limit(self.fit) ** 2

    @property
    def coefficients(self) -> tuple[float, ...]:
        a, x = self.softcap.coefficients(self.fit), self.square
        return tuple(
            sum(a[j] * math.comb(j, k) * x ** (j - k) for j in range(k, len(a))) for k in range(len(a))
        )


@dataclass(frozen=True)
class Limits:
    """Columns of the tile that this thread's rows may see, less its own first column: element c is kept while
    8 * (c // 4) + c % 2 <= columns[(c // 2) % 2]."""

    columns: tuple[Int32, Int32]


def unseen(x: Int32) -> Int32:
    """x by way of a shuffle from each lane to itself, through which no assembler sees. What depends on it is computed where
    it is used, instead of being kept in registers from an earlier use or from before a loop."""
    return cute.arch.shuffle_sync_bfly(x, offset=0)


def _afresh(limits):
    """The same limits, to be compared with anew: results for every element would fill the predicate registers."""
    return None if limits is None else Limits(tuple(unseen(c) for c in limits.columns))


def keep(limits, c: int, value, otherwise):
    """`value` if element c is within the limits (None: no limit)."""
    if limits is None:
        return value
    return cutlass.select_(8 * (c // 4) + c % 2 <= limits.columns[(c // 2) % 2], value, Float32(otherwise))


@cute.jit
def capped_weights(rS, rP, sums, level, softcap: cutlass.Constexpr, limits: cutlass.Constexpr, shift: cutlass.Constexpr):
    """rP = bf16(2^(capped logit - shift)) and sums[row] += weights, from scores rS; rP is an Int32 view.

    A polynomial runs on trust while its range test accumulates. A warp that finds a score beyond the range redoes the
    tile at the next level, from rS, which is still there, and starts later tiles at that level: level 0 is the shortest
    polynomial, the last is tanh.approx, good for any score. A NaN counts as beyond every range, and stays NaN.
    """
    tile = cute.make_rmem_tensor((ROWS,), Float32)
    for i in cutlass.range_constexpr(len(TANH_FITS)):
        if level[0] == i:
            polynomial = ShiftedPolynomial(softcap, TANH_FITS[i])
            inside = _polynomial_weights(rS, rP, tile, polynomial, _afresh(limits), shift)
            if not cute.arch.vote_all_sync(inside < 0):
                level[0] = Int32(i + 1)
    if level[0] == len(TANH_FITS):
        _wide_weights(rS, rP, tile, softcap, _afresh(limits), shift)
    for row in cutlass.range_constexpr(ROWS):
        sums[row] = sums[row] + tile[row]


@cute.jit
def _polynomial_weights(
    rS, rP, tile, polynomial: cutlass.Constexpr, limits: cutlass.Constexpr, shift: cutlass.Constexpr
):
    """Weights and tile[row] = their sums; negative if every score lies within the polynomial's range."""
    inside = Int32(-1)
    part = [Float32(0.0)] * (2 * ROWS)
    for c in cutlass.range_constexpr(0, cute.size(rS), 2):
        row = (c // 2) % ROWS
        w = [cute.math.fma(rS[c + i], rS[c + i], Float32(-polynomial.square)) for i in range(2)]
        inside = cute.arch.lop3(inside, w[0].bitcast(Int32), w[1].bitcast(Int32), AND3)
        p = [_weight(rS[c + i], _horner(w[i], polynomial.coefficients), shift, c) for i in range(2)]
        p = [keep(limits, c + i, p[i], 0.0) for i in range(2)]
        rP[c // 2] = pack_bf16(p[0], p[1])
        part[2 * row], part[2 * row + 1] = part[2 * row] + p[0], part[2 * row + 1] + p[1]
    for row in cutlass.range_constexpr(ROWS):
        tile[row] = part[2 * row] + part[2 * row + 1]
    return inside


def _horner(w, coefficients):
    acc = Float32(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        acc = cute.math.fma(acc, w, Float32(c))
    return acc


def _weight(s, slope, shift, c):
    """2^(s * slope - shift of the row)."""
    if shift is None:
        return exp2(s * slope)
    return exp2(cute.math.fma(s, slope, -shift[(c // 2) % ROWS]))


@cute.jit
def _wide_weights(rS, rP, tile, softcap: cutlass.Constexpr, limits: cutlass.Constexpr, shift: cutlass.Constexpr):
    """The same for any score, by tanh.approx."""
    part = [Float32(0.0)] * ROWS
    for c in cutlass.range_constexpr(0, cute.size(rS), 2):
        row = (c // 2) % ROWS
        p = [
            keep(limits, c + i, _weight(tanh(rS[c + i] * (softcap.scale / softcap.cap)), LOG2_E * softcap.cap, shift, c), 0.0)
            for i in range(2)
        ]
        rP[c // 2] = pack_bf16(p[0], p[1])
        part[row] = part[row] + (p[0] + p[1])
    for row in cutlass.range_constexpr(ROWS):
        tile[row] = part[row]


@cute.jit
def online_weights(rS, rP, sums, maxima, rescale, scale: cutlass.Constexpr, limits: cutlass.Constexpr):
    """rP = bf16(2^(log2e * scale * (s - row maximum))), sums[row] += weights; rP is an Int32 view.

    maxima: running maximum of the raw scores of each row, raised lazily; rescale[row]: what the older O is to be
    multiplied with. Returns whether any row of the warp needs that.
    """
    exponent = LOG2_E * scale
    tops = [maxima[row] for row in range(ROWS)]
    for c in cutlass.range_constexpr(cute.size(rS)):
        row = (c // 2) % ROWS
        if cutlass.const_expr(limits is not None):
            rS[c] = keep(limits, c, rS[c], -math.inf)
        tops[row] = cute.arch.fmax(tops[row], rS[c])
    stale = Int32(0)
    for row in cutlass.range_constexpr(ROWS):
        for offset in cutlass.range_constexpr(2):
            tops[row] = cute.arch.fmax(tops[row], cute.arch.shuffle_sync_bfly(tops[row], offset=1 << offset))
        stale = stale | Int32((tops[row] - maxima[row]) * exponent > LAZY_RESCALE)
    raised = cute.arch.vote_any_sync(stale != 0)
    for row in cutlass.range_constexpr(ROWS):
        top = cutlass.select_(raised, tops[row], maxima[row])
        rescale[row] = exp2((maxima[row] - top) * exponent)
        maxima[row] = top
        sums[row] = sums[row] * rescale[row]
    minus = [-maxima[row] * exponent for row in range(ROWS)]
    part = [Float32(0.0)] * (2 * ROWS)
    for c in cutlass.range_constexpr(0, cute.size(rS), 2):
        row = (c // 2) % ROWS
        p = [exp2(cute.math.fma(rS[c + i], Float32(exponent), minus[row])) for i in range(2)]
        rP[c // 2] = pack_bf16(p[0], p[1])
        part[2 * row], part[2 * row + 1] = part[2 * row] + p[0], part[2 * row + 1] + p[1]
    for row in cutlass.range_constexpr(ROWS):
        sums[row] = sums[row] + (part[2 * row] + part[2 * row + 1])
    return raised
