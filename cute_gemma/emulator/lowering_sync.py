"""Lowerings of barriers, fences, the grid dependency and scheduling hints (csrc/barrier.c)."""

from __future__ import annotations

from . import ptx
from .lowering import FALSE, Builder, lowers
from .lowering_memory import SCOPES
from .lowering_words import Words, operands

_SHARED = ("shared", "shared::cta")


# ---------------------------------------------------------------- mbarrier
@lowers("mbarrier")
def lower_mbarrier(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b, 2)
    kind = ins.words[1]
    handler = _MBARRIER.get(kind)
    if handler is None:
        raise b.unsupported()
    handler(ins, b, words)


def _pointer(b: Builder, words: Words, operand) -> tuple[int, int, bool]:
    """Reference, offset, and whether the address may name another CTA. A generic address is narrowed."""
    cluster = words.has("shared::cluster")
    shared = cluster or words.has(*_SHARED)
    if shared:
        return *b.address(operand, 32), cluster
    wide, offset = b.address(operand, 64)
    narrow = b.temp(32)
    b.emit("CVT_U32_U64", narrow, wide)
    return narrow, offset, True


def _init(ins, b, words) -> None:
    words.need("b64")
    pointer, count = operands(ins, b, 2)
    address, offset, _ = _pointer(b, words, pointer)
    words.done()
    b.emit("MBAR_INIT", address, b.src(count, 32), imm=offset)


def _inval(ins, b, words) -> None:
    words.need("b64")
    address, offset, _ = _pointer(b, words, operands(ins, b, 1)[0])
    words.done()
    b.emit("MBAR_INVAL", address, imm=offset)


def _arrive(ins, b, words) -> None:
    words.need("b64")
    ops = list(ins.operands)
    expect, no_complete = words.has("expect_tx"), words.has("noComplete")
    relaxed = words.has("relaxed")
    words.has("release")
    words.has(*SCOPES)
    state = ops.pop(0) if isinstance(ops[0], ptx.Reg) or ops[0] is ptx.SINK else ptx.SINK
    address, offset, cluster = _pointer(b, words, ops.pop(0))
    words.done()
    wanted = state is not ptx.SINK
    if wanted and "shared::cluster" in ins.words:
        raise b.unsupported("a state of a barrier in .shared::cluster")
    value = b.src(ops[0], 32) if ops else b.imm(1, 32)
    count, tx = (b.imm(1, 32), value) if expect else (value, b.imm(0, 32))
    if len(ops) > 1 or (expect and not ops):
        raise b.unsupported(f"{len(ins.operands)} operands")
    target = b.dst(state, 64) if wanted else b.scratch
    drop = ins.words[1] == "arrive_drop"
    sub = cluster | wanted << 1 | expect << 2 | drop << 3 | relaxed << 4 | no_complete << 5
    b.emit("MBAR_ARRIVE", address, count, tx, target, sub=sub, imm=offset)


def _tx(ins, b, words) -> None:
    words.need("b64")
    words.has("relaxed")
    words.has(*SCOPES)
    pointer, count = operands(ins, b, 2)
    address, offset, cluster = _pointer(b, words, pointer)
    words.done()
    sign = 1 if ins.words[1] == "expect_tx" else -1
    b.emit("MBAR_TX", address, b.src(count, 32), sub=cluster, imm=offset, imm2=sign)


def _wait(ins, b, words) -> None:
    words.need("b64")
    parity, relaxed = words.has("parity"), words.has("relaxed")
    words.has("acquire")
    words.has(*SCOPES)
    ops = operands(ins, b, 3, 4)                        # the fourth is a time limit, which is only a hint
    address, offset, _ = _pointer(b, words, ops[1])
    words.done()
    state = b.src(ops[2], 32 if parity else 64)
    sub = parity | (ins.words[1] == "try_wait") << 1 | relaxed << 2
    b.emit("MBAR_WAIT", b.pred_dst(ops[0]), address, state, sub=sub, imm=offset)


_MBARRIER = {
    "init": _init, "inval": _inval, "arrive": _arrive, "arrive_drop": _arrive, "expect_tx": _tx,
    "complete_tx": _tx, "test_wait": _wait, "try_wait": _wait,
}  # fmt: skip


# ---------------------------------------------------------------- bar, barrier, barrier.cluster
@lowers("bar", "barrier")
def lower_bar(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b)
    if words.has("cluster"):
        return _cluster(ins, b, words)
    words.has("cta")
    words.has("aligned")
    kind = words.choice(("sync", "arrive", "red"))
    ops = list(ins.operands)
    red, predicate, result_pred, result = 0, FALSE, FALSE, b.scratch
    if kind == 2:
        red = words.choice(("and", "or", "popc"))
        words.need("u32" if red == 2 else "pred")
        target, source = ops.pop(0), ops.pop()
        predicate = b.pred_src(source)
        if red == 2:
            result = b.dst(target, 32)
        else:
            result_pred = b.pred_dst(target)
    words.done()
    if not ops or (kind == 1 and len(ops) != 2):
        raise b.unsupported(f"{len(ins.operands)} operands")
    counted = len(ops) == 2
    threads = b.src(ops[1], 32) if counted else b.imm(0, 32)
    sub = kind | counted << 2 | red << 4
    b.emit("BAR", b.src(ops[0], 32), threads, predicate, result_pred, result, sub=sub, aligned=True)


def _cluster(ins: ptx.Instruction, b: Builder, words: Words) -> None:
    wait = words.choice(("arrive", "wait"))
    relaxed = words.has("relaxed")
    words.drop({"acquire", "release", "aligned"})
    words.done()
    b.emit("BAR_CLUSTER", sub=wait | relaxed << 1, aligned=True)


# ---------------------------------------------------------------- fences
_ORDERS = ("sc", "acq_rel", "acquire", "release")


@lowers("fence", "membar")
def lower_fence(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b)
    proxy = words.has("proxy")
    kind = 0 if proxy else 3
    if proxy and words.has("async"):
        kind = 6 if words.has("global") else 5 if words.has("shared::cta", "shared::cluster") else 1
    elif proxy:
        if not {"tensormap::generic", "async::generic"} & set(words.left):
            words.need("alias")
        if words.has("async::generic"):
            kind = 0 if "acquire" in words.left else 1
        words.drop({"tensormap::generic", "sync_restrict::shared::cta", "sync_restrict::shared::cluster"})
    if words.has("mbarrier_init"):
        kind = 2
    if kind == 3 and words.has("cta", "cluster"):
        kind = 4
    words.drop({*_ORDERS, *SCOPES, "gl", "sync_restrict::shared::cta", "sync_restrict::shared::cluster"})
    words.done()
    b.emit("FENCE", sub=kind)


@lowers("griddepcontrol")
def lower_griddepcontrol(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b)
    wait = words.choice(("launch_dependents", "wait"))
    words.done()
    b.emit("GRID_WAIT" if wait else "GRID_LAUNCH")


@lowers("nanosleep")
def lower_nanosleep(ins: ptx.Instruction, b: Builder) -> None:
    b.emit("NANOSLEEP")


@lowers("setmaxnreg")
def lower_setmaxnreg(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b)
    grow = words.choice(("dec", "inc"))
    words.need("sync", "aligned", "u32")
    words.done()
    count = operands(ins, b, 1)[0]
    if not isinstance(count, ptx.Imm) or not 24 <= count.value <= 256 or count.value % 8:
        raise b.unsupported("a register count other than a multiple of 8 from 24 to 256")
    b.emit("SETMAXNREG", sub=grow, imm=count.value, aligned=True)


