"""The softcapped exponential 2^(log2e * cap * tanh(s * scale / cap)) on pairs of fp32 scores in one thread.

A cap bounds every logit, so softmax needs no running maximum: the shift of a row is known before its first
score. tanh comes in two forms:
  * an odd polynomial in packed FMAs, of a degree that the range of |s * scale / cap| asks for (TANH_FITS);
  * `tanh.approx`, for any score, at one special-function (MUFU) operation more per score.
Some exponentials of the first form can move from the MUFU pipe to the FMA pipe as well. sm_100a uses all of them,
sm_90a tanh.approx alone.
"""

import math
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.typing import Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

LOG2_E = math.log2(math.e)

# tanh(x) ~ x * (c0 + c1 x^2 + ...) on |x| <= range: minimax of the absolute error, by Lawson's reweighted
# least squares (tests/kernels/test_softcap.py repeats the fits). TANH_ERROR bounds the error of both: at a
# cap of 50, 0.16% of a weight, below what rounding the weight to bf16 may cost (2^-9 = 0.2%). Both
# polynomials increase everywhere, so that a weight tells whether its score was in range.
TANH_ERROR = 3.2e-5


@dataclass(frozen=True)
class TanhFit:
    """An odd polynomial for tanh: good for |x| <= range, coefficients of x, x^3, ..."""

    range: float
    coefficients: tuple[float, ...]

    def __call__(self, x: float) -> float:
        return sum(c * x ** (2 * k + 1) for k, c in enumerate(self.coefficients))


TANH_FITS = (
    TanhFit(0.65, (0.999681938, -0.327005676, 0.100918613)),
    TanhFit(1.3, (0.999764768, -0.330229939, 0.121556102, -0.0343934088, 0.00490874178)),
)

# 2^f ~ e0 + e1 f + e2 f^2 + e3 f^3 on |f| <= 1/2: minimax of the relative error by the same method.
# EXP2_ERROR is its largest error, a twenty-fifth of what rounding a weight to bf16 may cost (2^-9).
EXP2_ERROR = 7.48e-5
EXP2_COEFFICIENTS = (0.99992807, 0.693260987, 0.242611174, 0.0551716899)
# 1.5 * 2^23: the sum with |y| < 2^22 holds round(y), in two's complement, in its low mantissa bits.
ROUND_MAGIC = 12582912.0
# Exponents this far from zero stay normal numbers, so that adding to the exponent field is exact.
EXP2_EXPONENT_LIMIT = 125.0
# The largest cap whose weights, down to exp(-cap) against a row's exp(+cap), and sums of them are normal fp32
# numbers.
FIXED_SHIFT_CAP = 60.0

Pair = tuple[Float32, Float32]


@dataclass(frozen=True)
class Softcap:
    """Constants of cap * tanh(s * scale / cap), in units of base-2 exponents.

    scale: what raw scores are multiplied with before capping; cap: the bound of a logit. Both positive.
    """

    scale: float
    cap: float

    def score_limit(self, fit: TanhFit) -> float:
        """Largest |s| the fit is good for; 0 where its scaled coefficients leave fp32's normal range."""
        smallest = min(abs(a) for a in self.coefficients(fit))
        return fit.range * self.cap / self.scale if smallest > 2.0**-126 else 0.0

    def exponent_limit(self, fit: TanhFit) -> float:
        """Base-2 exponent that the fit reaches at the end of its range."""
        return LOG2_E * self.cap * fit(fit.range)

    def score_limit_on_fma(self, fit: TanhFit) -> float:
        """Largest |s| that `exp2_capped_on_fma` may see: its exponent, right or wrong, stays within the
        normal range."""
        x = 0.0
        while LOG2_E * self.cap * fit(x + 0.01) < EXP2_EXPONENT_LIMIT:
            x += 0.01
        return x * self.cap / self.scale

    def coefficients(self, fit: TanhFit) -> tuple[float, ...]:
        """a_k with log2e * cap * tanh(s * scale / cap) ~ s * (a0 + a1 s^2 + a2 s^4 + ...)."""
        x = self.scale / self.cap
        return tuple(LOG2_E * self.cap * c * x ** (2 * k + 1) for k, c in enumerate(fit.coefficients))


def _poly(x: Pair, coefficients: tuple[float, ...]) -> Pair:
    """Horner's rule, highest power first, in packed FMAs."""
    acc = (Float32(coefficients[-1]),) * 2
    for c in reversed(coefficients[:-1]):
        acc = cute.arch.fma_packed_f32x2(x, acc, (Float32(c),) * 2)
    return acc


def exp2_capped(s: Pair, softcap: Softcap, fit: TanhFit, bias: Pair | None = None) -> Pair:
    """2^(capped logit + bias): polynomial tanh, MUFU ex2."""
    slope = _poly(cute.arch.mul_packed_f32x2(s, s), softcap.coefficients(fit))
    if bias is None:
        y = cute.arch.mul_packed_f32x2(s, slope)
    else:
        y = cute.arch.fma_packed_f32x2(s, slope, bias)
    return exp2(y[0]), exp2(y[1])


def exp2_capped_on_fma(s: Pair, softcap: Softcap, fit: TanhFit) -> Pair:
    """2^(capped logit) without MUFU: polynomial tanh, Cody-Waite split y = n + f, cubic for 2^f.

    Needs |s| <= `score_limit_on_fma`. The product y = s * slope is never rounded: both its uses are FMAs.
    """
    magic = (Float32(ROUND_MAGIC),) * 2
    slope = _poly(cute.arch.mul_packed_f32x2(s, s), softcap.coefficients(fit))
    shifted = cute.arch.fma_packed_f32x2(s, slope, magic)
    f = cute.arch.fma_packed_f32x2(s, slope, cute.arch.sub_packed_f32x2(magic, shifted))
    mantissa = _poly(f, EXP2_COEFFICIENTS)
    return _scale_by_exponent(mantissa[0], shifted[0]), _scale_by_exponent(mantissa[1], shifted[1])


def exp2_capped_wide(s: Pair, softcap: Softcap, bias: Pair | None = None) -> Pair:
    """2^(capped logit + bias): MUFU tanh and ex2, any score."""
    t = capped_tanh(s, softcap)
    gain = (Float32(LOG2_E * softcap.cap),) * 2
    y = cute.arch.mul_packed_f32x2(t, gain) if bias is None else cute.arch.fma_packed_f32x2(t, gain, bias)
    return exp2(y[0]), exp2(y[1])


def capped_tanh(s: Pair, softcap: Softcap) -> Pair:
    """tanh(s * scale / cap) on the MUFU pipe."""
    x = cute.arch.mul_packed_f32x2(s, (Float32(softcap.scale / softcap.cap),) * 2)
    return tanh(x[0]), tanh(x[1])


@dsl_user_op
def _scale_by_exponent(mantissa: Float32, shifted: Float32, *, loc=None, ip=None) -> Float32:
    """mantissa * 2^n for shifted = ROUND_MAGIC + n: (bits of shifted) * 2^23 leaves n alone in the exponent
    field, since ROUND_MAGIC's own bits overflow. One multiply-add, which the assembler turns into a shifted
    add."""
    bits = llvm.inline_asm(
        T.i32(),
        [shifted.bitcast(Int32).ir_value(loc=loc, ip=ip), mantissa.bitcast(Int32).ir_value(loc=loc, ip=ip)],
        "mad.lo.s32 $0, $1, 8388608, $2;",
        "=r,r,r",
        has_side_effects=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(bits).bitcast(Float32)


def exp2(x: Float32) -> Float32:
    """MUFU ex2, denormals flushed."""
    return cute.math.exp2(x, fastmath=True)


def tanh(x: Float32) -> Float32:
    """MUFU tanh, relative error up to 2^-11 (PTX ISA, tanh.approx.f32)."""
    return cute.math.tanh(x, fastmath=True)
