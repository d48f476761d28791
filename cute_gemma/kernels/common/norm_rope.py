"""RMS norm with (1 + w) and half-split RoPE on one row, or part of one, that a thread holds as bf16 pairs.

    n = bf16(t * rsqrt(mean(t^2) + eps) * (1 + w))                  in fp32, rounded once
    out[d]       = bf16(bf16(n[d] * cos[d]) - bf16(n[d + D/2] * sin[d]))              for d < D/2
    out[d + D/2] = bf16(bf16(n[d + D/2] * cos[d + D/2]) + bf16(n[d] * sin[d + D/2]))

which is n * cos + rotate_half(n) * sin with eager PyTorch's bf16 roundings; cos and sin are arbitrary.
A row of D elements is a list of D / 2 pairs (see bf16.py).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from cute_gemma.kernels.common import bf16, f32x2


def sum_of_squares(pairs: list):
    """Of the elements of a row, or of a thread's part of one, in fp32."""
    # Four partial sums, so that consecutive additions do not wait for each other.
    sums = [(Float32(0.0), Float32(0.0))] * 4
    for index, pair in enumerate(pairs):
        exact = bf16.unpack(pair)
        sums[index % 4] = f32x2.fma(exact, exact, sums[index % 4])
    low, high = f32x2.add(f32x2.add(sums[0], sums[1]), f32x2.add(sums[2], sums[3]))
    return low + high


def inverse_root(squares, count: int, eps: float):
    """rsqrt(mean + eps) of `count` squares with the given sum."""
    return cute.math.rsqrt(squares * Float32(1 / count) + Float32(eps), fastmath=True)


def inverse_rms(pairs: list, eps: float):
    """rsqrt(mean of squares + eps) of a row, in fp32."""
    return inverse_root(sum_of_squares(pairs), 2 * len(pairs), eps)


def normalise(pair, inverse):
    """(t * inverse) of a pair, in fp32."""
    return f32x2.mul(bf16.unpack_again(pair), (inverse, inverse))


def scale(normed, weight):
    """bf16 pair of fp32 values times (1 + w), the latter given as an fp32 pair."""
    return bf16.pack(*f32x2.mul(normed, weight))


def rotate(low, high, cos: tuple, sin: tuple):
    """RoPE of two pairs half a row apart; cos and sin hold the pair for the low and the one for the high half."""
    rotated_low = bf16.sub(bf16.mul(low, cos[0]), bf16.mul(high, sin[0]))
    rotated_high = bf16.add(bf16.mul(high, cos[1]), bf16.mul(low, sin[1]))
    return rotated_low, rotated_high
