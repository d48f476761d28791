"""RMS norm with (1 + w) and half-split RoPE on one row held by one thread as bf16 pairs.

    n = bf16(t * rsqrt(mean(t^2) + eps) * (1 + w))                  in fp32, rounded once
    out[d]       = bf16(bf16(n[d] * cos[d]) - bf16(n[d + D/2] * sin[d]))              for d < D/2
    out[d + D/2] = bf16(bf16(n[d + D/2] * cos[d + D/2]) + bf16(n[d] * sin[d + D/2]))

which is n * cos + rotate_half(n) * sin with eager PyTorch's bf16 roundings; cos and sin are arbitrary.
A row of D elements is a list of D / 2 pairs (see bf16.py).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from cute_gemma.kernels.common import bf16


def inverse_rms(pairs: list, eps: float):
    """rsqrt(mean of squares + eps) of a row, in fp32."""
    # Four partial sums, so that consecutive additions do not wait for each other.
    sums = [(Float32(0.0), Float32(0.0))] * 4
    for index, pair in enumerate(pairs):
        exact = bf16.unpack(pair)
        sums[index % 4] = cute.arch.fma_packed_f32x2(exact, exact, sums[index % 4])
    left = cute.arch.add_packed_f32x2(sums[0], sums[1])
    right = cute.arch.add_packed_f32x2(sums[2], sums[3])
    low, high = cute.arch.add_packed_f32x2(left, right)
    return cute.math.rsqrt((low + high) * Float32(0.5 / len(pairs)) + Float32(eps), fastmath=True)


def normalise(pair, inverse):
    """(t * inverse) of a pair, in fp32."""
    return cute.arch.mul_packed_f32x2(bf16.unpack_again(pair), (inverse, inverse))


def scale(normed, weight):
    """bf16 pair of fp32 values times (1 + w), the latter given as an fp32 pair."""
    return bf16.pack(*cute.arch.mul_packed_f32x2(normed, weight))


def rotate(low, high, cos: tuple, sin: tuple):
    """RoPE of two pairs half a row apart; cos and sin hold the pair for the low and the one for the high half."""
    rotated_low = bf16.sub(bf16.mul(low, cos[0]), bf16.mul(high, sin[0]))
    rotated_high = bf16.add(bf16.mul(high, cos[1]), bf16.mul(low, sin[1]))
    return rotated_low, rotated_high
