"""Arithmetic on pairs of fp32 values, rounded once per operation: one packed instruction where there is one
(from sm_100 on), else two scalar ones with the same results. The .rn suffix keeps the compiler from
contracting them.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from cutlass.base_dsl import Arch, BaseDSL


def mul(a: tuple, b: tuple) -> tuple:
    if _packed():
        return cute.arch.mul_packed_f32x2(a, b)
    return _each("mul", a, b)


def add(a: tuple, b: tuple) -> tuple:
    if _packed():
        return cute.arch.add_packed_f32x2(a, b)
    return _each("add", a, b)


def fma(a: tuple, b: tuple, c: tuple) -> tuple:
    """a * b + c."""
    if _packed():
        return cute.arch.fma_packed_f32x2(a, b, c)
    return _each("fma", a, b, c)


def _packed() -> bool:
    """Whether the architecture that is compiled for has packed fp32 arithmetic (PTX ISA, fma: .f32x2)."""
    return BaseDSL._get_dsl().get_arch_enum() >= Arch.sm_100


def _each(operation: str, *pairs: tuple) -> tuple:
    operands = ", ".join(f"{{$r{place}}}" for place in range(len(pairs)))
    return tuple(
        cute.arch.inline_ptx(
            f"{operation}.rn.f32 {{$w0}}, {operands};",
            write_only_types=[Float32],
            read_only_args=[Float32(value) for value in values],
        )
        for values in zip(*pairs, strict=True)
    )
