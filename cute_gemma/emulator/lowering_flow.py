"""Lowerings of moves, control flow, warp-wide operations, address conversions and reads of parameters."""

from __future__ import annotations

from . import ptx
from .lowering import TIME_SPECIALS, Builder, lowers, param_field
from .lowering_alu import ABS, NAN, modifiers, operands


# ---------------------------------------------------------------- mov
@lowers("mov")
def lower_mov(ins: ptx.Instruction, b: Builder) -> None:
    kind = ins.words[-1]
    modifiers(ins, b, ())
    d, s = operands(ins, b, 2)
    if kind == "pred":
        return b.emit("PMOV", b.pred_dst(d), b.pred_src(s))
    bits = ptx.TYPE_BITS.get(kind, 0)
    if bits < 16:
        raise b.unsupported(f"type .{kind}")
    if isinstance(d, ptx.Vec):
        return unpack(b, d.items, s, bits)
    if isinstance(s, ptx.Vec):
        return pack(b, d, s.items, bits)
    if isinstance(d, ptx.Reg) and d.id in b.alias:
        return
    if isinstance(s, ptx.Special) and s.name in TIME_SPECIALS:
        sub = 2 if bits == 64 else 1 if s.name.endswith("hi") else 0
        return b.emit("TIME", b.dst(d, bits), sub=sub)
    b.emit(f"MOV_B{max(32, bits)}", b.dst(d, bits), b.src(s, bits))


def pack(b: Builder, d, items: tuple, bits: int) -> None:
    element = bits // len(items)
    sources = [b.src(item, element) for item in items]
    target = b.dst(d, bits)
    if (bits, element) == (64, 32):
        b.emit("PACK_B64", target, *sources)
    elif (bits, element) == (32, 16):
        b.emit("PACK_B32", target, *sources)
    else:
        b.emit("PACK", target, *sources, sub=element // 8, imm=max(32, bits) // 8)


def unpack(b: Builder, items: tuple, s, bits: int) -> None:
    element = bits // len(items)
    source = b.src(s, bits)
    targets = [b.dst(item, element) for item in items]
    # Sinks share one scratch row, which every write to it leaves meaningless.
    if (bits, element) == (64, 32):
        b.emit("UNPACK_B64", *targets, source)
    elif (bits, element) == (32, 16):
        b.emit("UNPACK_B32", *targets, source)
    else:
        b.emit("UNPACK", *targets, source, sub=element // 8, imm=max(32, bits) // 8)


@lowers("ld.param")
def lower_ld_param(ins: ptx.Instruction, b: Builder) -> None:
    if param_field(ins, b.kernel) is None:
        from .lowering import LOWERINGS  # a computed address: parameters are memory like any other

        return LOWERINGS["ld"](ins, b)
    modifiers(ins, b, ("param", "v2", "v4", "v8"))
    target = ins.operands[0]
    items = target.items if isinstance(target, ptx.Vec) else (target,)
    for lane, item in enumerate(items):
        if item is ptx.SINK or item.id in b.alias:
            continue
        field = param_field(ins, b.kernel, lane)
        wide = b.width(item) > 32
        source = b.const("param", (field.offset, field.bits, field.signed), 64 if wide else 32)
        b.emit("MOV_B64" if wide else "MOV_B32", b.dst(item, 64 if wide else 32), source)


# ---------------------------------------------------------------- control flow
@lowers("bra")
def lower_bra(ins: ptx.Instruction, b: Builder) -> None:
    modifiers(ins, b, ("uni",), types=0)
    b.emit("BRA", target=operands(ins, b, 1)[0])
    b.no_fall_through()


@lowers("brx")
def lower_brx(ins: ptx.Instruction, b: Builder) -> None:
    modifiers(ins, b, ("idx", "uni"), types=0)
    index, table = operands(ins, b, 2)
    if not isinstance(table, ptx.Symbol) or table.name not in b.kernel.tables:
        raise b.unsupported(f"no .branchtargets {table}")
    b.emit_indexed("BRX", b.src(index, 32), [ptx.Symbol(name) for name in b.kernel.tables[table.name]])
    b.no_fall_through()


@lowers("ret", "exit")
def lower_exit(ins: ptx.Instruction, b: Builder) -> None:
    modifiers(ins, b, ("uni",), types=0)
    b.emit("EXIT")
    b.no_fall_through()


@lowers("trap", "brkpt")
def lower_trap(ins: ptx.Instruction, b: Builder) -> None:
    b.emit("TRAP")


@lowers("pragma", "pmevent")
def lower_nothing(ins: ptx.Instruction, b: Builder) -> None:
    b.emit("NOP")


@lowers("bar.warp")
def lower_bar_warp(ins: ptx.Instruction, b: Builder) -> None:
    if ins.words[2:] != ("sync",):
        raise b.unsupported()
    b.emit("WARPSYNC", b.src(operands(ins, b, 1)[0], 32), sync=True)


# ---------------------------------------------------------------- warp-wide operations
@lowers("shfl")
def lower_shfl(ins: ptx.Instruction, b: Builder) -> None:
    words = modifiers(ins, b, ("sync", "idx", "up", "down", "bfly"))
    if words[:1] != ["sync"] or len(words) != 2 or ins.words[-1] != "b32":
        raise b.unsupported("only shfl.sync.MODE.b32 exists on these targets")
    d, a, lane, clamp, members = operands(ins, b, 5)
    sources = [b.src(members, 32), b.src(a, 32), b.src(lane, 32), b.src(clamp, 32)]
    target = d.first if isinstance(d, ptx.Pair) else d
    in_range = [b.pred_dst(d.second)] if isinstance(d, ptx.Pair) else []
    b.emit(
        f"SHFL_{words[1].upper()}",
        sources[0],
        b.dst(target, 32),
        *sources[1:],
        *in_range,
        sub=len(in_range),
        sync=True,
    )


@lowers("vote")
def lower_vote(ins: ptx.Instruction, b: Builder) -> None:
    words = modifiers(ins, b, ("sync", "all", "any", "uni", "ballot"))
    if words[:1] != ["sync"] or len(words) != 2:
        raise b.unsupported("only vote.sync exists on these targets")
    d, p, members = operands(ins, b, 3)
    refs = [b.src(members, 32), b.pred_src(p)]
    target = b.dst(d, 32) if words[1] == "ballot" else b.pred_dst(d)
    b.emit(f"VOTE_{words[1].upper()}", refs[0], target, refs[1], sync=True)


@lowers("activemask")
def lower_activemask(ins: ptx.Instruction, b: Builder) -> None:
    b.emit("ACTIVEMASK", b.dst(operands(ins, b, 1)[0], 32))


@lowers("match")
def lower_match(ins: ptx.Instruction, b: Builder) -> None:
    words = modifiers(ins, b, ("any", "all", "sync"))
    bits = {"b32": 32, "b64": 64}.get(ins.words[-1])
    if bits is None or words[-1] != "sync":
        raise b.unsupported()
    d, a, members = operands(ins, b, 3)
    mask, source = b.src(members, 32), b.src(a, bits)
    target = d.first if isinstance(d, ptx.Pair) else d
    extra = [b.pred_dst(d.second)] if isinstance(d, ptx.Pair) else []
    sub = (bits == 64) | (2 if extra else 0)
    b.emit(f"MATCH_{words[0].upper()}", mask, b.dst(target, 32), source, *extra, sub=sub, sync=True)


@lowers("redux")
def lower_redux(ins: ptx.Instruction, b: Builder) -> None:
    kind = ins.words[-1]
    words = modifiers(ins, b, ("sync", "add", "min", "max", "and", "or", "xor", "abs", "NaN"))
    if words[:1] != ["sync"] or kind not in ("u32", "s32", "b32", "f32"):
        raise b.unsupported()
    operation, extra = words[1], words[2:]
    code = f"REDUX_{operation.upper()}"
    if operation in ("min", "max"):
        code += f"_{kind.upper()}"
    if (extra or kind == "f32") and not (kind == "f32" and operation in ("min", "max")):
        raise b.unsupported()
    d, a, members = operands(ins, b, 3)
    mask, source = b.src(members, 32), b.src(a, 32)
    sub = (ABS if "abs" in extra else 0) | (NAN if "NaN" in extra else 0)
    b.emit(code, mask, b.dst(d, 32), source, sub=sub, sync=True)


@lowers("elect")
def lower_elect(ins: ptx.Instruction, b: Builder) -> None:
    d, members = operands(ins, b, 2)
    if not isinstance(d, ptx.Pair):
        raise b.unsupported("elect.sync gives d|p")
    mask = b.src(members, 32)
    b.emit("ELECT", mask, b.dst(d.first, 32), b.pred_dst(d.second), sync=True)


# ---------------------------------------------------------------- addresses
_SHARED_WINDOW = 0x7A000000_00000000  # emu.h
_SHARED_MASK = 0xFFFFFFFF_00000000


@lowers("cvta")
def lower_cvta(ins: ptx.Instruction, b: Builder) -> None:
    words = ins.words[1:-1]
    to, space = words[:1] == ("to",), words[-1].split("::")[0]
    if space not in ("global", "shared", "param", "const", "local") or len(words) > 2 or space == "local":
        raise b.unsupported()
    d, s = operands(ins, b, 2)
    if ins.words[-1] not in ("u64", "u32"):
        raise b.unsupported()
    if space != "shared":  # global, constant and parameter addresses are generic ones
        return b.emit("MOV_B64", b.dst(d, 64), b.src(s, 64))
    code, value = ("AND_B64", 0xFFFFFFFF) if to else ("OR_B64", _SHARED_WINDOW)
    b.emit(code, b.dst(d, 64), b.src(s, 64), b.imm(value, 64))


@lowers("isspacep")
def lower_isspacep(ins: ptx.Instruction, b: Builder) -> None:
    space = ins.words[1].split("::")
    p, address = operands(ins, b, 2)
    top = b.temp(64)
    if space[0] == "shared":
        b.emit("AND_B64", top, b.src(address, 64), b.imm(_SHARED_MASK, 64))
        if space[1:] != ["cta"]:
            return b.emit("SETP_EQ_U64", b.pred_dst(p), top, b.imm(_SHARED_WINDOW, 64))
        own, mine = b.temp(64), b.temp(64)
        b.emit("AND_B64", top, b.src(address, 64), b.imm(~0xFFFFFF, 64))
        b.emit("CVT_U64_U32", own, b.special("%smem_window"))
        b.emit("OR_B64", mine, own, b.imm(_SHARED_WINDOW, 64))
        return b.emit("SETP_EQ_U64", b.pred_dst(p), top, mine)
    if space != ["global"]:
        raise b.unsupported(f"state space .{ins.words[1]}")
    b.emit("AND_B64", top, b.src(address, 64), b.imm(_SHARED_MASK, 64))
    b.emit("SETP_NE_U64", b.pred_dst(p), top, b.imm(_SHARED_WINDOW, 64))
