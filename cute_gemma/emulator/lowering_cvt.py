"""Lowerings of cvt in all the forms the compiler emits for integers, floats and packed small formats."""

from __future__ import annotations

from . import ptx
from .lowering import Builder, lowers
from .lowering_alu import FTZ, INTEGRAL, INTEGRAL_ROUND, RELU, RNA, ROUND, SAT, SATFINITE, operands

_INTS = {f"{kind}{bits}": bits for kind in "us" for bits in (8, 16, 32, 64)}
_FORMATS = {
    "f16": 0,
    "bf16": 1,
    "f32": 2,
    "f64": 3,
    "e4m3": 4,
    "e5m2": 5,
    "tf32": 6,
}  # FormatId of csrc/alu.h
_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32}
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}
_FLAGS = {"ftz": FTZ, "sat": SAT, "relu": RELU, "satfinite": SATFINITE, "rna": RNA}


def _type_code(kind: str) -> int:
    return _INTS[kind] | (256 if kind[0] == "s" else 0)


def _sub(words, b: Builder) -> int:
    value = 0
    for word in words:
        if word in ROUND:
            value |= ROUND[word]
        elif word in INTEGRAL_ROUND:
            value |= INTEGRAL | INTEGRAL_ROUND[word]
        elif word in _FLAGS:
            value |= _FLAGS[word]
        else:
            raise b.unsupported(f"modifier .{word}")
    return value


@lowers("cvt")
def lower_cvt(ins: ptx.Instruction, b: Builder) -> None:
    if ins.words[1] == "pack" or len(ins.words) < 3:
        raise b.unsupported()
    words, to, source = ins.words[1:-2], ins.words[-2], ins.words[-1]
    sub = _sub(words, b)
    if to in _PAIRS:
        return _packed(ins, b, to, source, words, sub)
    if to in _INTS and source in _INTS:
        return _int_to_int(ins, b, to, source, words)
    d, s = operands(ins, b, 2)
    if to in _INTS and source in _BITS and source != "tf32":
        _float_to_int(b, d, s, to, source, sub)
    elif to in _BITS and source in _INTS:
        _int_to_float(b, d, s, to, source, sub)
    elif to in _BITS and source in _BITS and source != "tf32":
        _float_to_float(b, d, s, to, source, words, sub)
    else:
        raise b.unsupported(f"types .{to}.{source}")


def _float_to_int(b: Builder, d, s, to: str, source: str, sub: int) -> None:
    value = b.src(s, _BITS[source])
    target = b.dst(d, _INTS[to], signed=to[0] == "s")
    b.emit("CVT_FLOAT_INT", target, value, sub=sub, imm=_FORMATS[source], imm2=_type_code(to))
    if (
        to[0] == "s" and b.width(d) == 16
    ):  # a negative result fills its row; a 16-bit register's upper half is zero
        b.emit("TRUNC_16", target, target)


def _int_to_float(b: Builder, d, s, to: str, source: str, sub: int) -> None:
    value = b.src(s, _INTS[source])
    target = b.dst(d, _BITS[to])
    if to == "f32" and source in ("u32", "s32") and not sub & 3:
        return b.emit(f"CVT_F32_{source.upper()}", target, value)
    if to == "tf32" or sub & ~3:
        raise b.unsupported()
    b.emit("CVT_INT_FLOAT", target, value, sub=sub, imm=_type_code(source), imm2=_FORMATS[to])


def _float_to_float(b: Builder, d, s, to: str, source: str, words, sub: int) -> None:
    value = b.src(s, _BITS[source])
    target = b.dst(d, _BITS[to])
    if (to, source) in (("f32", "f16"), ("f32", "bf16")) and not set(words) - {"rn"}:
        return b.emit(f"CVT_F32_{source.upper()}", target, value)
    if (to, source) == ("f64", "f32") and not words:
        return b.emit("CVT_F64_F32", target, value)
    b.emit("CVT_FLOAT_FLOAT", target, value, sub=sub, imm=_FORMATS[source], imm2=_FORMATS[to])


def _int_to_int(ins: ptx.Instruction, b: Builder, to: str, source: str, words) -> None:
    d, s = operands(ins, b, 2)
    if set(words) - {"sat"}:
        raise b.unsupported()
    bits, signed = _INTS[to], to[0] == "s"
    value = b.src(s, _INTS[source])
    if words:
        target = b.dst(d, bits, signed=signed)
        b.emit("CVT_SAT_INT", target, value, imm=_type_code(source), imm2=_type_code(to))
        value = target
    else:
        value = _extended(b, value, s, source)
    width = max(bits, b.width(d)) if isinstance(d, ptx.Reg) else bits
    if bits == 64:
        wide = value
        if _INTS[source] < 64 and not words:
            wide = b.temp(64)
            b.emit("CVT_S64_S32" if source[0] == "s" else "CVT_U64_U32", wide, value)
        return b.emit("MOV_B64", b.dst(d, 64), wide)
    if _INTS[source] == 64 and not words:
        low = b.temp(32)
        b.emit("CVT_U32_U64", low, value)
        value = low
    narrow = b.dst(d, bits, signed=signed)
    if bits == 32:
        return b.emit("MOV_B32", narrow, value)
    if not signed:
        return b.emit(f"TRUNC_{bits}", narrow, value)
    # A signed narrow result fills its register with copies of the sign; a 16-bit register's upper half stays
    # zero.
    b.emit(f"SEXT_{bits}", narrow, value)
    if width == 16:
        b.emit("TRUNC_16", narrow, narrow)


def _extended(b: Builder, value: int, operand, source: str) -> int:
    """An 8- or 16-bit source as a 32-bit value."""
    bits = _INTS[source]
    if bits >= 32:
        return value
    if source[0] == "u" and bits == 16 and isinstance(operand, ptx.Reg) and operand.bits == 16:
        return value
    temp = b.temp(32)
    b.emit(f"{'SEXT' if source[0] == 's' else 'TRUNC'}_{bits}", temp, value)
    return temp


def _packed(ins: ptx.Instruction, b: Builder, to: str, source: str, words, sub: int) -> None:
    """cvt to a pair: from two f32 (first operand to the upper half), from a pair of halves, or from a pair of
    bytes."""
    element = _PAIRS[to]
    bits = 32 if element in ("f16", "bf16") else 16
    if source == "f32":
        if len(ins.operands) != 3:
            raise b.unsupported("stochastic rounding" if "rs" in words else "")
        d, high, low = ins.operands
        refs = (b.src(high, 32), b.src(low, 32))
        if bits == 32 and list(words) == ["rn"]:
            return b.emit(f"CVT_PACK_{to.upper()}", b.dst(d, 32), *refs)
        return b.emit("CVT_PACK", b.dst(d, bits), *refs, sub=sub, imm=_FORMATS["f32"], imm2=_FORMATS[element])
    d, s = operands(ins, b, 2)
    if source in ("f16x2", "bf16x2") and bits == 16:
        code, width = "CVT_PACK", 32
    elif source in ("e4m3x2", "e5m2x2") and bits == 32:
        code, width = "CVT_UNPACK", 16
    else:
        raise b.unsupported(f"types .{to}.{source}")
    value = b.src(s, width)
    b.emit(code, b.dst(d, bits), value, sub=sub, imm=_FORMATS[_PAIRS[source]], imm2=_FORMATS[element])
