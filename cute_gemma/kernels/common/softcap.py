"""The softcapped exponential 2^(log2e * cap * tanh(s * scale / cap)) on pairs of fp32 scores in one thread.

A cap bounds every logit, so softmax needs no running maximum: the shift of a row is known before its first score.
tanh comes in two forms:
  * an odd polynomial in packed FMAs, for |s * scale / cap| <= TANH_RANGE;
  * `tanh.approx`, for any score, at one special-function (MUFU) operation more per score.
A share of the exponentials of the first form can move from the MUFU pipe to the FMA pipe as well.
Device functions that both architectures share.
"""

import math
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass.cute.typing import Float32, Int32

LOG2_E = math.log2(math.e)

# tanh(x) ~ x * (c0 + c1 x^2 + c2 x^4 + c3 x^6) on |x| <= TANH_RANGE: minimax of the absolute error, by Lawson's
# reweighted least squares (tests/kernels/test_softcap.py repeats the fit). TANH_ERROR is its largest error.
TANH_RANGE = 1.0
TANH_ERROR = 3.27e-5
TANH_COEFFICIENTS = (0.999693762, -0.328891962, 0.115413693, -0.0246540118)

# 2^f ~ e0 + e1 f + e2 f^2 + e3 f^3 on |f| <= 1/2: minimax of the relative error by the same method. EXP2_ERROR is its
# largest error, a twenty-fifth of what rounding a weight to bf16 may cost (2^-9).
EXP2_ERROR = 7.48e-5
EXP2_COEFFICIENTS = (0.99992807, 0.693260987, 0.242611174, 0.0551716899)
# 1.5 * 2^23: the sum with |y| < 2^22 holds round(y), in two's complement, in its low mantissa bits.
ROUND_MAGIC = 12582912.0
# Exponents this far from zero stay normal numbers, so that adding to the exponent field is exact.
EXP2_EXPONENT_LIMIT = 125.0
# The largest cap whose weights, down to exp(-cap) against a row's exp(+cap), and sums of them are normal fp32 numbers.
FIXED_SHIFT_CAP = 60.0

Pair = tuple[Float32, Float32]


@dataclass(frozen=True)
class Softcap:
    """Constants of cap * tanh(s * scale / cap), in units of base-2 exponents.

    scale: what raw scores are multiplied with before capping; cap: the bound of a logit. Both positive.
    """

    scale: float
    cap: float

    @property
    def score_limit(self) -> float:
        """Largest |s| the polynomial is good for; 0 where its coefficients leave fp32's normal range."""
        smallest = min(abs(a) for a in self.coefficients)
        return TANH_RANGE * self.cap / self.scale if smallest > 2.0**-126 else 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """a_k with log2e * cap * tanh(s * scale / cap) ~ s * (a0 + a1 s^2 + a2 s^4 + a3 s^6)."""
        x = self.scale / self.cap
        return tuple(LOG2_E * self.cap * c * x ** (2 * k + 1) for k, c in enumerate(TANH_COEFFICIENTS))


def _poly(x: Pair, coefficients: tuple[float, ...]) -> Pair:
    """Horner's rule, highest power first, in packed FMAs."""
    acc = (Float32(coefficients[-1]),) * 2
    for c in reversed(coefficients[:-1]):
        acc = cute.arch.fma_packed_f32x2(x, acc, (Float32(c),) * 2)
    return acc


def exp2_capped(s: Pair, softcap: Softcap) -> Pair:
    """2^(capped logit) by polynomial tanh and MUFU ex2; 5 packed operations and 2 MUFU a pair."""
    slope = _poly(cute.arch.mul_packed_f32x2(s, s), softcap.coefficients)
    y = cute.arch.mul_packed_f32x2(s, slope)
    return exp2(y[0]), exp2(y[1])


def exp2_capped_on_fma(s: Pair, softcap: Softcap) -> Pair:
    """2^(capped logit) with no MUFU operation: polynomial tanh, Cody-Waite split y = n + f, cubic for 2^f.

    Needs log2e * cap < EXP2_EXPONENT_LIMIT. 10 packed and 4 integer operations a pair. The product s * slope is never
    rounded on its own: both uses of y are FMAs.
    """
    slope = _poly(cute.arch.mul_packed_f32x2(s, s), softcap.coefficients)
    shifted = cute.arch.fma_packed_f32x2(s, slope, (Float32(ROUND_MAGIC),) * 2)
    minus_n = cute.arch.sub_packed_f32x2((Float32(ROUND_MAGIC),) * 2, shifted)
    f = cute.arch.fma_packed_f32x2(s, slope, minus_n)
    mantissa = _poly(f, EXP2_COEFFICIENTS)
    # The shift keeps n alone: ROUND_MAGIC's own bits leave at the top.
    return tuple((m.bitcast(Int32) + (r.bitcast(Int32) << 23)).bitcast(Float32) for m, r in zip(mantissa, shifted))


def exp2_capped_wide(s: Pair, softcap: Softcap, minus_shift: Float32 | None = None) -> Pair:
    """2^(capped logit + minus_shift) by MUFU tanh and ex2: any score, any shift."""
    x = cute.arch.mul_packed_f32x2(s, (Float32(softcap.scale / softcap.cap),) * 2)
    t = (tanh(x[0]), tanh(x[1]))
    gain = (Float32(LOG2_E * softcap.cap),) * 2
    if minus_shift is None:
        y = cute.arch.mul_packed_f32x2(t, gain)
    else:
        y = cute.arch.fma_packed_f32x2(t, gain, (minus_shift, minus_shift))
    return exp2(y[0]), exp2(y[1])


def exp2(x: Float32) -> Float32:
    """MUFU ex2, denormals flushed."""
    return cute.math.exp2(x, fastmath=True)


def tanh(x: Float32) -> Float32:
    """MUFU tanh, relative error up to 2^-11 (PTX ISA, tanh.approx.f32)."""
    return cute.math.tanh(x, fastmath=True)
