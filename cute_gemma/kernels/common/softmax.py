"""Small register-level operations of softmax on fp32 values in one thread, shared by the architectures."""

import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.typing import Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def _asm(result, operands, text, constraints, *, loc=None, ip=None):
    values = [x.ir_value(loc=loc, ip=ip) for x in operands]
    att = llvm.AsmDialect.AD_ATT
    return llvm.inline_asm(
        result, values, text, constraints, has_side_effects=False, asm_dialect=att, loc=loc, ip=ip
    )


def max3(a: Float32, b: Float32, c: Float32) -> Float32:
    """The largest of three; one instruction from sm_100 on (PTX ISA, max)."""
    return Float32(_asm(T.f32(), (a, b, c), "max.f32 $0, $1, $2, $3;", "=f,f,f,f"))


def abs_max3(a: Float32, b: Float32, c: Float32) -> Float32:
    """The largest magnitude of three; one instruction from sm_100 on (PTX ISA, max.abs)."""
    return Float32(_asm(T.f32(), (a, b, c), "max.abs.f32 $0, $1, $2, $3;", "=f,f,f,f"))


def reduce3(op, values: list[Float32], start: Float32) -> Float32:
    """Two values an instruction, in two independent chains that hide the latency. `values`: an even number,
    four up."""
    a, b = start, start
    for i in range(0, len(values) - 2, 4):
        a = op(a, values[i], values[i + 1])
        b = op(b, values[i + 2], values[i + 3])
    return op(a, b, b)


def pack_bf16(low: Float32, high: Float32) -> Int32:
    """Two values rounded to nearest bf16, `low` in the low half."""
    return Int32(_asm(T.i32(), (high, low), "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"))



def unpack_bf16(bits: Int32) -> tuple[Float32, Float32]:
    """What `pack_bf16` packed, as fp32: (low, high)."""
    return (bits << 16).bitcast(Float32), (bits & Int32(-65536)).bitcast(Float32)


def warp_max(value: Float32) -> Float32:
    """The warp's largest value in every lane, NaN if any is NaN.

    Ordered as integers, since sm_90a has no redux.f32 (PTX ISA, redux.sync: target sm_100a).
    """
    bits = cute.arch.fmax(value, value, nan=True).bitcast(Int32)  # a NaN of either sign becomes the largest integer
    largest = Int32(cute.arch.warp_redux_sync(_order(bits), "max"))
    return _order(largest).bitcast(Float32)


def _order(bits: Int32) -> Int32:
    """fp32 bits to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
