"""bf16 pairs in 32-bit registers: conversions, and arithmetic that rounds as eager PyTorch does.

A pair holds element 2i in its low half and element 2i + 1 in its high half. The .rn suffix keeps the compiler
from contracting a product and a sum into one rounding (PTX ISA, "Half Precision Floating Point
Instructions").
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32


def pack(low, high):
    """Two fp32 values, or words that hold their bits, rounded to nearest even."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


def unpack(pair):
    """(low, high) as fp32, exactly: a bf16 is the upper half of the fp32 of the same value."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, 16;\nand.b32 {$w1}, {$r0}, 0xffff0000;",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def unpack_again(pair):
    """The same by byte permutation.

    The compiler does not see that it is the same, so it does not keep both halves of every pair of a row in
    registers from a first pass over the row to a second one.
    """
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, 0, 0x1044;\nprmt.b32 {$w1}, {$r0}, 0, 0x3244;",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def mul(a, b):
    return _binary("mul", a, b)


def add(a, b):
    return _binary("add", a, b)


def sub(a, b):
    return _binary("sub", a, b)


def _binary(operation: str, a, b):
    return cute.arch.inline_ptx(
        f"{operation}.rn.bf16x2 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[a, b]
    )
