"""Lowerings of tcgen05 (csrc/tensor.c)."""

from __future__ import annotations

from . import ptx
from .lowering import Builder, lowers
from .lowering_words import Words, items, operands

_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")          # SHAPE_* of csrc/tensor.c
_REGISTERS = (1, 1, 2, 4, 1)                                            # a repetition
_REPEATS = {f"x{1 << k}": 1 << k for k in range(8)}
_GROUPS = {"cta_group::1": 0, "cta_group::2": 1}


@lowers("tcgen05")
def lower_tcgen05(ins: ptx.Instruction, b: Builder) -> None:
    handler = _HANDLERS.get(ins.words[1])
    if handler is None:
        raise b.unsupported()
    handler(ins, b, Words(ins, b, 2))


def _alloc(ins, b, words) -> None:
    group = words.choice(_GROUPS)
    words.need("sync", "aligned", "b32")
    shared = words.has("shared::cta")
    words.done()
    pointer, columns = operands(ins, b, 2)
    if not shared:
        raise b.unsupported("a generic address")
    address, offset = b.address(pointer, 32)
    b.emit("TC_ALLOC", address, b.src(columns, 32), sub=group, imm=offset, aligned=True)


def _dealloc(ins, b, words) -> None:
    group = words.choice(_GROUPS)
    words.need("sync", "aligned", "b32")
    words.done()
    address, columns = operands(ins, b, 2)
    b.emit("TC_DEALLOC", b.src(address, 32), b.src(columns, 32), sub=group, aligned=True)


def _relinquish(ins, b, words) -> None:
    group = words.choice(_GROUPS)
    words.need("sync", "aligned")
    words.done()
    b.emit("TC_RELINQUISH", sub=group, aligned=True)


def _access(ins, b, words, pack: str) -> int:
    words.need("sync", "aligned", "b32")
    shape, repeat = words.choice(_SHAPES), words.choice(_REPEATS)
    packed = words.has(pack)
    words.done()
    if packed and shape:
        raise b.unsupported(f".{pack} with shape .{_SHAPES[shape]}")
    return shape | repeat << 4 | packed << 12


def _registers(b: Builder, sub: int, operand) -> tuple:
    found, wanted = items(operand), _REGISTERS[sub & 7] * (sub >> 4 & 255)
    if len(found) != wanted:
        raise b.unsupported(f"{len(found)} registers where {wanted} are wanted")
    return found


def _ld(ins, b, words) -> None:
    if words.has("red"):
        raise b.unsupported()
    sub = _access(ins, b, words, "pack::16b")
    ops = operands(ins, b, 2 + (sub & 7 == 4))
    address, offset = b.address(ops[1], 32)
    split = ops[2].value if sub & 7 == 4 else 0
    targets = [b.dst(r, 32, pending="tcgen05.ld") for r in _registers(b, sub, ops[0])]
    b.emit("TC_LD", address, *targets, sub=sub, imm=offset, imm2=split, aligned=True)


def _st(ins, b, words) -> None:
    sub = _access(ins, b, words, "unpack::16b")
    ops = operands(ins, b, 2 + (sub & 7 == 4))
    address, offset = b.address(ops[0], 32)
    split = ops[1].value if sub & 7 == 4 else 0
    sources = [b.src(r, 32) for r in _registers(b, sub, ops[-1])]
    b.emit("TC_ST", address, *sources, sub=sub, imm=offset, imm2=split, aligned=True)


def _wait(kind: int):
    def lower(ins, b, words) -> None:
        words.need("sync", "aligned")
        words.done()
        b.emit("TC_WAIT", sub=kind, aligned=True)
        if not kind:
            b.completes("tcgen05.ld")

    return lower


def _fence(kind: int):
    def lower(ins, b, words) -> None:
        words.done()
        b.emit("TC_FENCE", sub=kind)

    return lower


def _commit(ins, b, words) -> None:
    group = words.choice(_GROUPS)
    words.need("mbarrier::arrive::one", "b64")
    cluster = words.has("shared::cluster")
    multicast = words.has("multicast::cluster")
    words.done()
    ops = operands(ins, b, 1 + multicast)
    if not cluster:
        raise b.unsupported("a generic address")
    address, offset = b.address(ops[0], 32)
    mask = b.src(ops[1], 16) if multicast else b.imm(0, 32)
    b.emit("TC_COMMIT", address, mask, sub=group | multicast << 1, imm=offset)


def _mma(ins, b, words) -> None:
    if words.has("ws") or words.has("sp") or words.has("block_scale"):
        raise b.unsupported()
    group = words.choice(_GROUPS)
    tf32 = words.choice({"kind::f16": 0, "kind::tf32": 1})
    # the collector buffer is a cache of A: it changes speed only
    words.drop({f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")})
    words.done()
    ops = list(ins.operands)
    d, a, bdesc, idesc = ops[:4]
    rest = ops[4:]
    lanes = items(rest.pop(0)) if isinstance(rest[0], ptx.Vec) else ()
    if lanes and len(lanes) != (8 if group else 4):
        raise b.unsupported(f"{len(lanes)} masks of disabled lanes")
    if not 1 <= len(rest) <= 2:
        raise b.unsupported(f"{len(ops)} operands")
    d_ref, d_offset = b.address(d, 32)
    in_tmem = isinstance(a, ptx.Addr)
    a_ref, a_offset = b.address(a, 32) if in_tmem else (b.src(a, 64), 0)
    refs = [d_ref, a_ref, b.src(bdesc, 64), b.src(idesc, 32), b.pred_src(rest[0])]
    refs.append(b.src(rest[1], 32) if len(rest) == 2 else b.imm(0, 32))
    refs += [b.src(lane, 32) for lane in lanes]
    sub = group | in_tmem << 1 | tf32 << 2 | (len(rest) == 2) << 3 | bool(lanes) << 4
    b.emit("TC_MMA", *refs, sub=sub, imm=d_offset, imm2=a_offset)


def _cp(ins, b, words) -> None:
    raise b.unsupported()


_HANDLERS = {
    "alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "ld": _ld, "st": _st,
    "wait::ld": _wait(0), "wait::st": _wait(1), "commit": _commit, "mma": _mma, "cp": _cp,
    "fence::before_thread_sync": _fence(0), "fence::after_thread_sync": _fence(1),
}  # fmt: skip
