"""Lowerings of integer, logic and floating-point arithmetic, comparisons and moves."""

from __future__ import annotations

from . import ptx
from .lowering import Builder, lowers

# FM_* of csrc/alu.h
ROUND = {"rn": 0, "rz": 1, "rm": 2, "rp": 3}
INTEGRAL_ROUND = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
FTZ, SAT, NAN, XORSIGN, ABS, BF16, X2, RELU, INTEGRAL, SATFINITE, RNA = (4 << i for i in range(11))

HALF = {"f16": 0, "bf16": BF16, "f16x2": X2, "bf16x2": BF16 | X2}
FLOATS = {"f32": 32, "f64": 64, "f32x2": 64, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32}
INTS = {f"{kind}{bits}": bits for kind in "usb" for bits in (16, 32, 64)}


def modifiers(ins: ptx.Instruction, b: Builder, allowed, types: int = 1) -> list[str]:
    """The words between the opcode and its types. Raises when one is not in `allowed`."""
    words = list(ins.words[1 : len(ins.words) - types])
    for word in words:
        if word not in allowed:
            raise b.unsupported(f"modifier .{word}")
    return words


def flags(words, b: Builder, **bits: int) -> int:
    """Op.sub of floating-point modifiers."""
    known = {"ftz": FTZ, "sat": SAT, "NaN": NAN, "relu": RELU, "abs": ABS, "satfinite": SATFINITE, **bits}
    value = 0
    for word in words:
        if word in ROUND:
            value |= ROUND[word]
        elif word in known:
            value |= known[word]
    return value


def operands(ins: ptx.Instruction, b: Builder, count: int) -> tuple:
    if len(ins.operands) != count:
        raise b.unsupported(f"{count} operands are wanted, {len(ins.operands)} came")
    return ins.operands


def nary(ins: ptx.Instruction, b: Builder, code: str, widths, sub: int = 0) -> None:
    """d, a, b, ... of the given widths, straight to one operation."""
    ops = operands(ins, b, len(widths))
    sources = [b.src(o, w) for o, w in zip(ops[1:], widths[1:])]
    b.emit(code, b.dst(ops[0], widths[0]), *sources, sub=sub)


# ---------------------------------------------------------------- add, sub, mul, mad, fma, div
@lowers("add", "sub")
def lower_add(ins: ptx.Instruction, b: Builder) -> None:
    name, kind = ins.words[0].upper(), ins.words[-1]
    if kind in FLOATS:
        return lower_float(ins, b, name, 3)
    words = modifiers(ins, b, ("sat",))
    if words:
        if kind != "s32":
            raise b.unsupported(".sat needs .s32")
        return nary(ins, b, f"{name}SAT_S32", (32, 32, 32))
    if kind in ("u16x2", "s16x2") and name == "ADD":
        return nary(ins, b, "ADD_U16X2", (32, 32, 32))
    if kind not in INTS:
        raise b.unsupported(f"type .{kind}")
    integer(ins, b, f"{name}_U", kind, 3)


def integer(ins: ptx.Instruction, b: Builder, stem: str, kind: str, count: int, signed: bool = False) -> None:
    """An integer operation of equal widths. 16 bits are computed in 32 and cut; `signed` extends their
    sources first."""
    bits = INTS[kind]
    if bits != 16:
        return nary(ins, b, f"{stem}{bits}", (bits,) * count)
    ops = operands(ins, b, count)
    sources = [widened(b, o, signed) for o in ops[1:]]
    wide = b.temp(32)
    b.emit(f"{stem}32", wide, *sources)
    b.emit("TRUNC_16", b.dst(ops[0], 16), wide)


def widened(b: Builder, operand, signed: bool) -> int:
    """A 16-bit source as a 32-bit value."""
    source = b.src(operand, 16)
    if signed:
        temp = b.temp(32)
        b.emit("SEXT_16", temp, source)
        return temp
    return source


def lower_float(ins: ptx.Instruction, b: Builder, name: str, count: int) -> None:
    kind = ins.words[-1]
    words = modifiers(ins, b, ("rn", "rz", "rm", "rp", "ftz", "sat", "relu") if kind in FLOATS else ())
    sub = flags(words, b)
    if kind in HALF:
        if sub & 3:
            raise b.unsupported("only .rn is defined")
        return nary(ins, b, f"{name}_HALF", (FLOATS[kind],) * count, sub | HALF[kind])
    if (
        "relu" in words
        or (kind == "f64" and set(words) & {"ftz", "sat"})
        or (kind == "f32x2" and "sat" in words)
    ):
        raise b.unsupported()
    nary(ins, b, f"{name}_{kind.upper()}", (FLOATS[kind],) * count, sub)


@lowers("fma")
def lower_fma(ins: ptx.Instruction, b: Builder) -> None:
    if ins.words[-1] not in FLOATS:
        raise b.unsupported(f"type .{ins.words[-1]}")
    lower_float(ins, b, "FMA", 4)


@lowers("mul", "mad")
def lower_mul(ins: ptx.Instruction, b: Builder) -> None:
    name, kind = ins.words[0].upper(), ins.words[-1]
    count = 4 if name == "MAD" else 3
    if kind in FLOATS:
        return lower_float(ins, b, "FMA" if name == "MAD" else name, count)
    (part,) = modifiers(ins, b, ("lo", "hi", "wide")) or [None]
    if part is None or kind not in INTS:
        raise b.unsupported(f"type .{kind}")
    bits, signed = INTS[kind], kind[0] == "s"
    ops = operands(ins, b, count)
    if bits == 16:
        return mul16(b, ops, part, signed)
    if part == "wide":
        if bits != 32:
            raise b.unsupported()
        widths = (64, 32, 32, 64)[:count]
        return nary(ins, b, f"{name}WIDE_{'S' if signed else 'U'}32", widths)
    letter = "S" if signed and part == "hi" else "U"
    nary(ins, b, f"{name}{part.upper()}_{letter}{bits}", (bits,) * count)


def mul16(b: Builder, ops: tuple, part: str, signed: bool) -> None:
    left, right = widened(b, ops[1], signed), widened(b, ops[2], signed)
    value = b.temp(32)
    b.emit("MULLO_U32", value, left, right)
    if part == "hi":
        high = b.temp(32)
        b.emit("SHR_S32" if signed else "SHR_U32", high, value, b.imm(16, 32))
        value = high
    if len(ops) == 4:
        total = b.temp(32)
        b.emit("ADD_U32", total, value, b.src(ops[3], 32 if part == "wide" else 16))
        value = total
    if part == "wide":
        b.emit("MOV_B32", b.dst(ops[0], 32), value)
    else:
        b.emit("TRUNC_16", b.dst(ops[0], 16), value)


@lowers("div", "rem")
def lower_div(ins: ptx.Instruction, b: Builder) -> None:
    name, kind = ins.words[0].upper(), ins.words[-1]
    if kind in INTS:
        modifiers(ins, b, ())
        signed = kind[0] == "s"
        return integer(ins, b, f"{name}_{'S' if signed else 'U'}", kind, 3, signed)
    if name == "REM" or kind not in ("f32", "f64"):
        raise b.unsupported(f"type .{kind}")
    words = modifiers(ins, b, ("rn", "rz", "rm", "rp", "ftz", "full", "approx") if kind == "f32" else ROUND)
    code = (
        "DIV_FULL_F32"
        if "full" in words
        else "DIV_APPROX_F32"
        if "approx" in words
        else f"DIV_{kind.upper()}"
    )
    nary(ins, b, code, (FLOATS[kind],) * 3, flags(words, b))


# ---------------------------------------------------------------- min, max, abs, neg
@lowers("min", "max")
def lower_min(ins: ptx.Instruction, b: Builder) -> None:
    name, kind = ins.words[0].upper(), ins.words[-1]
    if kind in INTS and kind[0] != "b":
        words = modifiers(ins, b, ("relu",))
        signed = kind[0] == "s"
        if words and kind != "s32":
            raise b.unsupported("modifier .relu")
        if not words:
            return integer(ins, b, f"{name}_{'S' if signed else 'U'}", kind, 3, signed)
        d, left, right = operands(ins, b, 3)
        temp = b.temp(32)
        b.emit(f"{name}_S32", temp, b.src(left, 32), b.src(right, 32))
        return b.emit("RELU_S32", b.dst(d, 32), temp)
    if kind in ("u16x2", "s16x2"):
        modifiers(ins, b, ())
        return nary(ins, b, f"{name}_{kind.upper()}", (32, 32, 32))
    if kind == "f64":
        modifiers(ins, b, ())
        return nary(ins, b, f"{name}_F64", (64, 64, 64))
    if kind != "f32" and kind not in HALF:
        raise b.unsupported(f"type .{kind}")
    words = modifiers(ins, b, ("ftz", "NaN", "xorsign", "abs"))
    sub = flags(words, b, xorsign=XORSIGN)
    if "xorsign" in words and "abs" not in words:
        raise b.unsupported("modifier .xorsign without .abs")
    if kind in HALF:
        if "abs" in words and "xorsign" not in words:
            raise b.unsupported("modifier .abs")
        return nary(ins, b, f"{name}_HALF", (FLOATS[kind],) * 3, sub | HALF[kind])
    three = len(ins.operands) == 4
    if three and "xorsign" in words:
        raise b.unsupported("modifier .xorsign with three sources")
    nary(ins, b, f"{name}{'3' if three else ''}_F32", (32,) * len(ins.operands), sub)


@lowers("abs", "neg")
def lower_sign(ins: ptx.Instruction, b: Builder) -> None:
    name, kind = ins.words[0].upper(), ins.words[-1]
    words = modifiers(ins, b, ("ftz",) if kind in ("f32", "f16", "f16x2") else ())
    if kind in HALF:
        return nary(ins, b, f"{name}_HALF", (FLOATS[kind],) * 2, flags(words, b) | HALF[kind])
    if kind in ("f32", "f64"):
        return nary(ins, b, f"{name}_{kind.upper()}", (FLOATS[kind],) * 2, flags(words, b))
    if kind not in ("s16", "s32", "s64"):
        raise b.unsupported(f"type .{kind}")
    integer(ins, b, "ABS_S" if name == "ABS" else "NEG_U", kind, 2, True)


@lowers("copysign")
def lower_copysign(ins: ptx.Instruction, b: Builder) -> None:
    modifiers(ins, b, ())
    bits = {"f32": 32, "f64": 64}[ins.words[-1]]
    nary(ins, b, f"COPYSIGN_F{bits}", (bits,) * 3)


# ---------------------------------------------------------------- approximate and correctly rounded functions
_APPROX = {"ex2": "EX2", "lg2": "LG2", "sin": "SIN", "cos": "COS", "tanh": "TANH", "rsqrt": "RSQRT"}


@lowers("ex2", "lg2", "sin", "cos", "tanh", "rsqrt")
def lower_approx(ins: ptx.Instruction, b: Builder) -> None:
    name, kind = ins.words[0], ins.words[-1]
    words = modifiers(ins, b, ("approx", "ftz"))
    if "approx" not in words:
        raise b.unsupported("only the .approx form exists")
    if kind in HALF and name in ("ex2", "tanh"):
        return nary(ins, b, f"{_APPROX[name]}_HALF", (FLOATS[kind],) * 2, flags(words, b) | HALF[kind])
    if kind == "f64" and name == "rsqrt" and "ftz" not in words:
        return nary(ins, b, "RSQRT_F64", (64, 64))
    if kind != "f32":
        raise b.unsupported(f"type .{kind}")
    nary(ins, b, f"{_APPROX[name]}_F32", (32, 32), flags(words, b))


@lowers("rcp", "sqrt")
def lower_rcp(ins: ptx.Instruction, b: Builder) -> None:
    name, kind = ins.words[0].upper(), ins.words[-1]
    if kind not in ("f32", "f64"):
        raise b.unsupported(f"type .{kind}")
    words = modifiers(ins, b, ("approx", "ftz", *ROUND) if kind == "f32" else ROUND)
    code = f"{name}_APPROX_F32" if "approx" in words else f"{name}_{kind.upper()}"
    nary(ins, b, code, (FLOATS[kind],) * 2, flags(words, b))


# ---------------------------------------------------------------- logic and bits
@lowers("and", "or", "xor", "not", "cnot")
def lower_logic(ins: ptx.Instruction, b: Builder) -> None:
    name, kind = ins.words[0].upper(), ins.words[-1]
    modifiers(ins, b, ())
    if kind == "pred" and name != "CNOT":
        sources = [b.pred_src(o) for o in ins.operands[1:]]
        return b.emit(f"P{name}", b.pred_dst(ins.operands[0]), *sources)
    if kind not in ("b16", "b32", "b64"):
        raise b.unsupported(f"type .{kind}")
    integer(ins, b, f"{name}_B", kind, len(ins.operands))


@lowers("shl", "shr")
def lower_shift(ins: ptx.Instruction, b: Builder) -> None:
    kind = ins.words[-1]
    modifiers(ins, b, ())
    if kind not in INTS:
        raise b.unsupported(f"type .{kind}")
    bits, signed = INTS[kind], kind[0] == "s"
    d, value, amount = operands(ins, b, 3)
    stem = "SHL_B" if ins.words[0] == "shl" else "SHR_S" if signed else "SHR_U"
    count = b.src(amount, 32)
    if bits == 16:
        wide = b.temp(32)
        b.emit(f"{stem}32", wide, widened(b, value, signed), count)
        return b.emit("TRUNC_16", b.dst(d, 16), wide)
    b.emit(f"{stem}{bits}", b.dst(d, bits), b.src(value, bits), count)


@lowers("shf")
def lower_funnel(ins: ptx.Instruction, b: Builder) -> None:
    words = modifiers(ins, b, ("l", "r", "wrap", "clamp"))
    if ins.words[-1] != "b32" or len(words) != 2:
        raise b.unsupported()
    nary(ins, b, f"SHF_{words[0].upper()}_{words[1].upper()}", (32,) * 4)


@lowers("bfe", "bfi")
def lower_field(ins: ptx.Instruction, b: Builder) -> None:
    kind = ins.words[-1]
    modifiers(ins, b, ())
    bits = INTS.get(kind, 0)
    if bits not in (32, 64) or (kind[0] == "b") != (ins.words[0] == "bfi"):
        raise b.unsupported(f"type .{kind}")
    if ins.words[0] == "bfe":
        nary(ins, b, f"BFE_{kind.upper()}", (bits, bits, 32, 32))
    else:
        nary(ins, b, f"BFI_{kind.upper()}", (bits, bits, bits, 32, 32))


@lowers("popc", "clz", "brev")
def lower_count(ins: ptx.Instruction, b: Builder) -> None:
    modifiers(ins, b, ())
    kind = ins.words[-1]
    if kind not in ("b32", "b64"):
        raise b.unsupported(f"type .{kind}")
    bits = INTS[kind]
    nary(ins, b, f"{ins.words[0].upper()}_{kind.upper()}", (bits if ins.words[0] == "brev" else 32, bits))


@lowers("bfind")
def lower_bfind(ins: ptx.Instruction, b: Builder) -> None:
    words = modifiers(ins, b, ("shiftamt",))
    kind = ins.words[-1]
    bits = INTS.get(kind, 0)
    if bits not in (32, 64) or kind[0] == "b":
        raise b.unsupported(f"type .{kind}")
    d, value = operands(ins, b, 2)
    source = b.src(value, bits)
    if kind[0] == "s":  # the most significant bit that differs from the sign
        temp = b.temp(bits)
        b.emit(f"SIGNBITS_S{bits}", temp, source)
        source = temp
    b.emit(f"BFIND_{'SH_' if words else ''}U{bits}", b.dst(d, 32), source)


@lowers("prmt")
def lower_prmt(ins: ptx.Instruction, b: Builder) -> None:
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = ins.words[2] if len(ins.words) == 3 else None
    if ins.words[1] != "b32" or (mode and mode not in modes) or len(ins.words) > 3:
        raise b.unsupported()
    nary(ins, b, "PRMT_MODE" if mode else "PRMT", (32,) * 4, modes.index(mode) + 1 if mode else 0)


@lowers("lop3")
def lower_lop3(ins: ptx.Instruction, b: Builder) -> None:
    modifiers(ins, b, ())
    if ins.words[-1] != "b32" or len(ins.operands) != 5 or not isinstance(ins.operands[4], ptx.Imm):
        raise b.unsupported()
    d, x, y, z, table = ins.operands
    sources = [b.src(o, 32) for o in (x, y, z)]
    b.emit("LOP3", b.dst(d, 32), *sources, sub=table.value & 0xFF)


# ---------------------------------------------------------------- comparisons and selection
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_FLOAT_COMPARISONS = (*_COMPARISONS, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_BOOLEANS = {"and": 1, "or": 2, "xor": 3}
SET_Q, SET_FTZ = 4, 8


def compare(
    ins: ptx.Instruction, b: Builder, kind: str, words, sources, p: int, q: int | None = None
) -> None:
    """Emits setp: words are the comparison, the boolean operator and .ftz; sources a, b and the combined
    predicate."""
    comparison = _UNSIGNED_NAMES.get(words[0], words[0])
    rest = list(words[1:])
    sub = SET_FTZ if "ftz" in rest and rest.remove("ftz") is None else 0
    boolean = rest.pop(0) if rest and rest[0] in _BOOLEANS else None
    floating = kind in FLOATS
    if (
        rest
        or comparison not in (_FLOAT_COMPARISONS if floating else _COMPARISONS)
        or kind in ("f16x2", "bf16x2")
    ):
        raise b.unsupported()
    left, right, type_ = _compared(b, kind, comparison, sources)
    refs = [p] if q is None else [p, q]
    refs += [left, right]
    if boolean:
        sub |= _BOOLEANS[boolean]
        refs.append(b.pred_src(sources[2]))
    if q is not None:
        sub |= SET_Q
    b.emit(f"SETP_{comparison.upper()}_{type_}", *refs, sub=sub)


def _compared(b: Builder, kind: str, comparison: str, sources) -> tuple[int, int, str]:
    if kind in ("f16", "bf16"):
        wide = []
        for operand in sources[:2]:
            wide.append(b.temp(32))
            b.emit(f"CVT_F32_{kind.upper()}", wide[-1], b.src(operand, 16))
        return wide[0], wide[1], "F32"
    if kind in ("f32", "f64"):
        return b.src(sources[0], FLOATS[kind]), b.src(sources[1], FLOATS[kind]), kind.upper()
    if kind not in INTS:
        raise b.unsupported(f"type .{kind}")
    bits, signed = INTS[kind], kind[0] == "s" and comparison not in ("eq", "ne")
    letter = "S" if signed else "U"
    if bits == 16:
        return widened(b, sources[0], signed), widened(b, sources[1], signed), f"{letter}32"
    return b.src(sources[0], bits), b.src(sources[1], bits), f"{letter}{bits}"


@lowers("setp")
def lower_setp(ins: ptx.Instruction, b: Builder) -> None:
    words = [w for w in ins.words[1:-1]]
    target = ins.operands[0]
    if isinstance(target, ptx.Pair):
        p, q = b.pred_dst(target.first), b.pred_dst(target.second)
    else:
        p, q = b.pred_dst(target), None
    compare(ins, b, ins.words[-1], words, ins.operands[1:], p, q)


@lowers("set")
def lower_set(ins: ptx.Instruction, b: Builder) -> None:
    result, kind = ins.words[-2:]
    one = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000}.get(result)
    if one is None:
        raise b.unsupported(f"result type .{result}")
    p = b.pred_temp()
    compare(ins, b, kind, ins.words[1:-2], ins.operands[1:], p)
    b.emit("SELP_B32", b.dst(ins.operands[0], 32), b.imm(one, 32), b.imm(0, 32), p)


@lowers("selp")
def lower_selp(ins: ptx.Instruction, b: Builder) -> None:
    kind = ins.words[-1]
    modifiers(ins, b, ())
    bits = ptx.TYPE_BITS.get(kind, 0)
    if bits not in (16, 32, 64):
        raise b.unsupported(f"type .{kind}")
    d, x, y, p = operands(ins, b, 4)
    sources = (b.src(x, bits), b.src(y, bits), b.pred_src(p))
    b.emit(f"SELP_B{64 if bits == 64 else 32}", b.dst(d, bits), *sources)


@lowers("slct")
def lower_slct(ins: ptx.Instruction, b: Builder) -> None:
    kind, selector = ins.words[-2:]
    words = modifiers(ins, b, ("ftz",), types=2)
    bits = ptx.TYPE_BITS.get(kind, 0)
    if bits not in (32, 64) or selector not in ("s32", "f32"):
        raise b.unsupported()
    d, x, y, c = operands(ins, b, 4)
    p = b.pred_temp()
    b.emit(f"SETP_GE_{selector.upper()}", p, b.src(c, 32), b.imm(0, 32), sub=SET_FTZ if words else 0)
    b.emit(f"SELP_B{bits}", b.dst(d, bits), b.src(x, bits), b.src(y, bits), p)


@lowers("testp")
def lower_testp(ins: ptx.Instruction, b: Builder) -> None:
    classes = {"finite": 7, "infinite": 8, "number": 15, "notanumber": 16, "normal": 2, "subnormal": 1}
    (word,), kind = modifiers(ins, b, classes), ins.words[-1]
    if kind not in ("f32", "f64"):
        raise b.unsupported(f"type .{kind}")
    d, value = operands(ins, b, 2)
    b.emit(f"TESTP_{kind.upper()}", b.pred_dst(d), b.src(value, FLOATS[kind]), sub=classes[word])
