"""PTX instructions to the interpreter's operations: the registry of lowerings and the builder they write to.

A lowering is a function `(ins, b)` registered for the first words of an opcode: `@lowers("mbarrier")`, or
`@lowers("ld.param")` where two words decide (the longer one wins); `ins` is a `ptx.Instruction`, `b` the
`Builder`. It must raise `UnsupportedInstruction` (`raise b.unsupported("why")`) for any modifier it does not
implement.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from . import ptx
from .errors import EmulationError, UnsupportedInstruction

LOWERINGS: dict[str, Callable] = {}
CSRC = Path(__file__).parent / "csrc"

# Symbolic references: plain numbers are value registers, the rest is offset by its kind.
CONST, PRED, LABEL = 1 << 24, 1 << 25, 1 << 26
FALSE, TRUE = PRED, PRED + 1  # predicates that interp_start fills

# Op.flags in emu.h
PRED_NEG, PENDING, ALIGNED, SYNC = 1, 2, 4, 8

SMEM_RESERVED = 1024  # emu.h

# Special registers that differ between the warps of a launch, in the order of Program's fields in emu.h.
WARP_SPECIALS = (
    "%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%laneid", "%warpid",
    "%clusterid.x", "%clusterid.y", "%clusterid.z", "%cluster_ctaid.x", "%cluster_ctaid.y",
    "%cluster_ctaid.z",
    "%cluster_ctarank", "%smid", "%smem_window",
)  # fmt: skip
# Special registers that a launch fixes: engine.py puts their values into the constant bank.
LAUNCH_SPECIALS = frozenset(
    [f"%{name}.{axis}" for name in ("ntid", "nctaid", "cluster_nctaid", "nclusterid") for axis in "xyz"]
    + ["%cluster_nctarank", "%dynamic_smem_size", "%total_smem_size", "%nwarpid", "%nsmid", "%gridid"]
)
TIME_SPECIALS = frozenset(
    ["%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"]
)
_LANE_MASKS = {
    "%lanemask_eq": lambda lane: 1 << lane,
    "%lanemask_le": lambda lane: (2 << lane) - 1,
    "%lanemask_lt": lambda lane: (1 << lane) - 1,
    "%lanemask_ge": lambda lane: 0xFFFFFFFF & ~((1 << lane) - 1),
    "%lanemask_gt": lambda lane: 0xFFFFFFFF & ~((2 << lane) - 1),
}


_STEADY_SPECIALS = {*WARP_SPECIALS, *LAUNCH_SPECIALS, *_LANE_MASKS}


def lowers(*words: str):
    """Registers a lowering for opcodes that start with one of `words`."""

    def register(function):
        for word in words:
            LOWERINGS[word] = function
        return function

    return register


@lru_cache(maxsize=1)
def opcodes() -> dict[str, int]:
    """Numbers of the operations, counted as emu.h counts them. A line of a .def file is KIND(NAME, ...)."""
    codes: dict[str, int] = {}
    number = 0
    for name in ("alu.def", "engine.def"):
        for match in re.finditer(r"^[A-Z]\w*\((\w+)", (CSRC / name).read_text(), re.MULTILINE):
            codes[match[1]] = number
            number += 1
        if name == "alu.def":
            codes["ENGINE_FIRST"] = number
            number += 1
    return codes


class Op:
    """One operation under construction; fields as in emu.h, references symbolic. ins: index of its
    instruction.

    settled: it runs after the wait for the registers in flight that it touches.
    """

    __slots__ = ("code", "flags", "guard", "refs", "sub", "imm", "imm2", "target", "ins", "line", "settled")

    def __init__(self, code, flags, guard, refs, sub, imm, imm2, target, ins, line, settled) -> None:
        self.code, self.flags, self.guard, self.refs, self.sub = code, flags, guard, refs, sub
        self.imm, self.imm2, self.target = imm, imm2, target
        self.ins, self.line, self.settled = ins, line, settled


def _f32_to_f64(bits: int) -> int:
    return struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]


def _f64_to_f32(bits: int) -> int:
    return struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0]))[0]


class Builder:
    """What a lowering uses. References are symbolic until registers are allocated.

    src(operand, bits) / dst(operand, bits): a register reference (immediates and special registers: constant
        bank). bits is the instruction's; a register of the other storage class (up to 32 bits, or 64) is
        converted with one more operation (dst: zero-extended, or sign-extended with signed=True). `_` gets a
        scratch row.
    dst(operand, bits, pending="tcgen05.ld"): a result that arrives asynchronously, in class `pending`.
    completes("tcgen05.ld"): from here on, no result of that class is in flight (a wait).
    pred_src(operand) / pred_dst(operand): a predicate index (a negated source costs a NOT operation first).
    address(operand, bits): (reference of the base address, 32 bits for shared-window operands, else 64; byte
        offset).
    temp(bits) / pred_temp(): a register that lives within this instruction.
    width(operand): declared bits of a register operand.
    emit(code, *refs, sub=0, imm=0, imm2=0, target=None, aligned=False, sync=False): appends one operation;
        guard and line come from the instruction. target: a Symbol. sync: refs[0] is the member mask.
    """

    def __init__(self, kernel: ptx.Kernel, module: ptx.Module, lines: list[str]) -> None:
        self.kernel, self.module, self.lines = kernel, module, lines
        self.codes = opcodes()
        self.ops: list[Op] = []
        self.reg_bits: list[int] = [0] * kernel.nregs  # value registers: index -> bits, PTX registers first
        self.consts: dict[tuple, int] = {}
        self.specials: dict[str, int] = {}  # warp special -> value register
        self.preds: dict[int, int] = {}  # PTX register id -> predicate index
        self.npreds = 2
        count = len(kernel.instructions)
        self.uses: list[list[int]] = [[] for _ in range(count)]
        self.defs: list[list[int]] = [[] for _ in range(count)]
        self.pending: dict[str, dict[int, list[int]]] = {}  # class -> instruction -> registers
        self.completions: dict[int, list[str]] = {}
        self.first_op: list[int] = [0] * (count + 1)
        self.jumps: dict[int, list[int]] = {}  # instruction -> instructions it may jump to
        self.ends: set[int] = set()  # instructions that never fall through
        self.alias: dict[int, object] = {}  # register id -> operand it always equals
        self.scratch = self._value(128)
        self.shared = self._shared_layout()
        self.ins: ptx.Instruction = None
        self.index = 0
        self._after: list[tuple] = []
        self._flying: set[int] = set()  # registers in flight in this block
        self._held: list[tuple[int, ptx.Instruction]] = []  # copies of them that are put off
        self._settled = False

    # ---------------------------------------------------------------- errors
    def unsupported(self, why: str = "") -> UnsupportedInstruction:
        """The exception to raise for the instruction at hand."""
        return self.error(
            UnsupportedInstruction, f"{self.ins.op} is not implemented" + (f": {why}" if why else "")
        )

    def error(self, kind: type[EmulationError], message: str) -> EmulationError:
        line = self.ins.line
        return kind(
            message,
            kernel=self.kernel.name,
            line=line,
            text=self.lines[line - 1].strip(),
            source=self.source(self.ins),
        )

    def source(self, ins: ptx.Instruction) -> str | None:
        if not ins.loc:
            return None
        return f"{self.module.files.get(ins.loc[0], f'file {ins.loc[0]}')}:{ins.loc[1]}"

    # ---------------------------------------------------------------- registers
    def _value(self, bits: int) -> int:
        self.reg_bits.append(bits)
        return len(self.reg_bits) - 1

    def temp(self, bits: int) -> int:
        value = self._value(bits)
        self.defs[self.index].append(value)
        return value

    def pred_temp(self) -> int:
        self.npreds += 1
        return PRED + self.npreds - 1

    def width(self, operand) -> int:
        if not isinstance(operand, ptx.Reg):
            raise self.unsupported(f"operand {operand} should be a register")
        return operand.bits

    def const(self, kind: str, value, bits: int) -> int:
        """A row of the constant bank. kind: "imm", "param", "param_addr", "launch", "global" or "lanes"."""
        key = (kind, value, 64 if bits > 32 else 32)
        return CONST + self.consts.setdefault(key, len(self.consts))

    def imm(self, value: int, bits: int) -> int:
        return self.const("imm", value & ((1 << bits) - 1), bits)

    def special(self, name: str) -> int:
        """Value register that holds a warp's special register `name`."""
        if name not in self.specials:
            self.specials[name] = self._value(32)
        return self.specials[name]

    def src(self, operand, bits: int) -> int:
        if isinstance(operand, ptx.Reg):
            if operand.id in self.alias:
                return self._convert(self._source(self.alias[operand.id], operand.bits), operand.bits, bits)
            if operand.bits == 1:
                raise self.unsupported(f"predicate {operand} used as a value")
            self.reg_bits[operand.id] = operand.bits
            self.uses[self.index].append(operand.id)
            return self._convert(operand.id, operand.bits, bits)
        return self._source(operand, bits)

    def _convert(self, ref: int, have: int, want: int) -> int:
        if (have > 64) != (want > 64):
            raise self.unsupported(f"a {have}-bit register as a {want}-bit operand")
        if (have > 32) == (want > 32):
            return ref
        temp = self.temp(want)
        self.emit("CVT_U32_U64" if have > 32 else "CVT_U64_U32", temp, ref)
        return temp

    def _source(self, operand, bits: int) -> int:
        if isinstance(operand, ptx.Imm):
            value = operand.value
            if operand.kind == "f32" and bits == 64:
                value = _f32_to_f64(value)
            elif operand.kind == "f64" and bits == 32:
                value = _f64_to_f32(value)
            return self.imm(value, bits)
        if isinstance(operand, ptx.Special):
            return self._convert(self._special(operand.name), 32, bits)
        if isinstance(operand, _Param):
            return self.const("param", (operand.offset, operand.bits, operand.signed), bits)
        if isinstance(operand, ptx.Symbol):
            return self._symbol(operand, bits)
        raise self.unsupported(f"operand {operand}")

    def _special(self, name: str) -> int:
        if name == "%laneid":
            return self.const("lanes", tuple(range(32)), 32)
        if name in _LANE_MASKS:
            return self.const("lanes", tuple(_LANE_MASKS[name](lane) for lane in range(32)), 32)
        if name in WARP_SPECIALS:
            return self.special(name)
        if name in LAUNCH_SPECIALS:
            return self.const("launch", name, 32)
        raise self.unsupported(f"special register {name}")

    def _symbol(self, symbol: ptx.Symbol, bits: int) -> int:
        name, offset = symbol.name, symbol.offset
        if name in self.shared:
            temp = self.temp(32)
            self.emit("ADD_U32", temp, self.special("%smem_window"), self.imm(self.shared[name] + offset, 32))
            return self._convert(temp, 32, bits)
        if name in self.kernel.params:
            return self.const("param_addr", self.kernel.params[name].offset + offset, 64)
        variable = self.kernel.variables.get(name) or self.module.variables.get(name)
        if variable is not None and variable.space in ("global", "const"):
            return self.const("global", (name, offset), 64)
        if name == "WARP_SZ":
            return self.imm(32, bits)
        raise self.unsupported(f"symbol {name}")

    def dst(self, operand, bits: int, pending: str | None = None, signed: bool = False) -> int:
        if operand is ptx.SINK:
            return self.scratch
        if not isinstance(operand, ptx.Reg) or operand.bits == 1:
            raise self.unsupported(f"destination {operand}")
        value = operand.id
        self.reg_bits[value] = operand.bits
        self.defs[self.index].append(value)
        if (operand.bits > 64) != (bits > 64):
            raise self.unsupported(f"a {operand.bits}-bit register for a {bits}-bit result")
        if (operand.bits > 32) != (bits > 32):
            if pending or operand.bits < bits:
                raise self.unsupported(f"a {operand.bits}-bit register for a {bits}-bit result")
            temp = self.temp(bits)
            self._after.append(("CVT_S64_S32" if signed else "CVT_U64_U32", value, temp))
            return temp
        if pending:
            self.pending.setdefault(pending, {}).setdefault(self.index, []).append(value)
        return value

    def completes(self, pending: str) -> None:
        self.completions.setdefault(self.index, []).append(pending)

    # ---------------------------------------------------------------- predicates
    def _pred(self, operand) -> int:
        if not isinstance(operand, ptx.Reg) or operand.bits != 1:
            raise self.unsupported(f"operand {operand} should be a predicate")
        if operand.id not in self.preds:
            self.preds[operand.id] = self.npreds
            self.npreds += 1
        return PRED + self.preds[operand.id]

    def pred_src(self, operand) -> int:
        if isinstance(operand, ptx.Not):
            temp = self.pred_temp()
            self.emit("PNOT", temp, self.pred_src(operand.pred))
            return temp
        if isinstance(operand, ptx.Imm):
            return TRUE if operand.value else FALSE
        return self._pred(operand)

    def pred_dst(self, operand) -> int:
        return self.pred_temp() if operand is ptx.SINK else self._pred(operand)

    # ---------------------------------------------------------------- addresses
    def address(self, operand: ptx.Addr, bits: int) -> tuple[int, int]:
        if not isinstance(operand, ptx.Addr):
            raise self.unsupported(f"operand {operand} should be an address")
        base, offset = operand.base, operand.offset
        if isinstance(base, ptx.Imm):
            return self.imm(base.value + offset, bits), 0
        if isinstance(base, ptx.Symbol) and base.name in self.shared and bits == 32:
            return self.special("%smem_window"), self.shared[base.name] + base.offset + offset
        return self.src(base, bits), offset

    def _shared_layout(self) -> dict[str, int]:
        """Offsets of shared variables. Dynamic shared memory follows the static variables, aligned as
        declared."""
        declared = [
            v
            for v in (*self.module.variables.values(), *self.kernel.variables.values())
            if v.space == "shared"
        ]
        offset, layout = SMEM_RESERVED, {}
        for variable in declared:
            if variable.size:
                offset = -(-offset // variable.align) * variable.align
                layout[variable.name] = offset
                offset += variable.size
        self.static_smem = offset - SMEM_RESERVED
        dynamic = [v for v in declared if not v.size]
        align = max([16, *(v.align for v in dynamic)])
        self.dynamic_base = -(-offset // align) * align
        layout.update((v.name, self.dynamic_base) for v in dynamic)
        return layout

    # ---------------------------------------------------------------- operations
    def emit(
        self,
        code: str,
        *refs: int,
        sub: int = 0,
        imm: int = 0,
        imm2: int = 0,
        target=None,
        aligned=False,
        sync=False,
    ) -> None:
        number = self.codes.get(code)
        if number is None:
            raise self.unsupported(f"no operation {code}")
        ins = self.ins
        flags = (ALIGNED if aligned else 0) | (SYNC if sync else 0)
        guard = -1
        if ins.guard is not None:
            guard = self._pred(ins.guard) - PRED
            flags |= PRED_NEG if ins.guard_neg else 0
        if target is not None:
            target = self.label(target)
            self.jumps.setdefault(self.index, []).append(target)
        self.ops.append(
            Op(number, flags, guard, refs, sub, imm, imm2, target, self.index, ins.line, self._settled)
        )

    def emit_indexed(self, code: str, index: int, targets: list[ptx.Symbol]) -> None:
        """A branch to one of `targets`."""
        found = [self.label(t) for t in targets]
        self.jumps.setdefault(self.index, []).extend(found)
        self.emit(code, index, *(LABEL + t for t in found))

    def label(self, symbol) -> int:
        """Index of the instruction a label names."""
        if not isinstance(symbol, ptx.Symbol):
            raise self.unsupported(f"branch to {symbol}")
        found = self.ins.scope.label(symbol.name)
        if found is None:
            raise self.unsupported(f"no label {symbol.name}")
        return found

    def no_fall_through(self) -> None:
        if self.ins.guard is None:
            self.ends.add(self.index)

    # ---------------------------------------------------------------- the pass over a kernel
    def run(self) -> None:
        instructions = self.kernel.instructions
        labelled = set()
        for scope in {id(i.scope): i.scope for i in instructions}.values():
            while scope is not None:
                labelled.update(scope.labels.values())
                scope = scope.parent
        self.alias = _aliases(self.kernel)
        for index, ins in enumerate(instructions):
            if index in labelled and index:
                self._release_copies(index)
                self._flying.clear()
                if self.first_op[index - 1] == len(self.ops):
                    self._begin(index - 1, instructions[index - 1])
                    self.emit("NOP")  # so that the instruction above is counted as often as it runs
            if self._flying and self._holds(index, ins):
                continue
            self._begin(index, ins)
            self.first_op[index] = len(self.ops)
            self._lower(ins)
            if index in self.completions and ins.guard is None:
                self._release_copies(index, settled=True)
                self._flying.clear()
            for starts in self.pending.values():
                self._flying.update(starts.get(index, ()))
            if index in self.jumps:
                self._flying.clear()
        self._release_copies(len(instructions) - 1)
        self._begin(len(instructions) - 1, instructions[-1])
        self.ins = ptx.Instruction(
            "exit", ("exit",), (), None, False, self.ins.line, self.ins.loc, self.ins.scope
        )
        self.first_op[len(instructions)] = len(self.ops)
        self.emit("EXIT")  # the closing brace

    def _lower(self, ins: ptx.Instruction) -> None:
        words = ins.words
        lowering = LOWERINGS.get(".".join(words[:2])) or LOWERINGS.get(words[0])
        if lowering is None:
            raise self.unsupported()
        lowering(ins, self)
        for after in self._after:
            self.emit(*after)

    # The compiler pairs the results of tcgen05.ld with mov before the wait that the source has between: a
    # copy of a register in flight is done at that wait. Anything else that touches it, or the end of the
    # block, makes it due.
    def _holds(self, index: int, ins: ptx.Instruction) -> bool:
        touched = set()
        _registers_of(ins.operands, touched)
        if ins.words[0] == "mov" and ins.guard is None and ins.words[-1] != "pred":
            sources: set[int] = set()
            _registers_of(ins.operands[1:], sources)
            if sources & self._flying and not touched - sources & self._flying:
                self._held.append((index, ins))
                self._flying |= touched
                return True
        if self._held and (
            index in self.jumps or ins.words[0] in ("bra", "brx", "ret", "exit") or touched & self._flying
        ):
            self._release_copies(index)
        return False

    def _release_copies(self, index: int, settled: bool = False) -> None:
        """Emits the copies put off, at instruction `index`: their sources are needed until there."""
        self._settled = settled
        for own, ins in self._held:
            self._begin(own, ins)
            self.first_op[own] = len(self.ops)
            self._lower(ins)
            self.uses[index].extend(self.uses[own])
        self._held.clear()
        self._settled = False

    def _begin(self, index: int, ins: ptx.Instruction) -> None:
        self.ins, self.index, self._after = ins, index, []


class _Param:
    """Operand of an alias: a field of the parameter block."""

    __slots__ = ("offset", "bits", "signed")

    def __init__(self, offset: int, bits: int, signed: bool) -> None:
        self.offset, self.bits, self.signed = offset, bits, signed


_NO_RESULT = frozenset(
    ["st", "red", "bar", "barrier", "bra", "prefetch", "fence", "membar", "cp", "tcgen05", "stmatrix"]
)


def param_field(ins: ptx.Instruction, kernel: ptx.Kernel, lane: int = 0) -> _Param | None:
    """What element `lane` of an ld.param with a constant address reads, or None when the address is a
    register."""
    base = ins.operands[1].base
    if not isinstance(base, ptx.Symbol) or base.name not in kernel.params:
        return None
    bits = ptx.TYPE_BITS[ins.words[-1]]
    offset = kernel.params[base.name].offset + base.offset + ins.operands[1].offset + lane * bits // 8
    return _Param(offset, bits, ins.words[-1][0] == "s")


def _aliases(kernel: ptx.Kernel) -> dict[int, object]:
    """Registers with one definition that is a constant of the launch or a special register: id -> that
    operand."""
    definitions: dict[int, int] = {}
    found: dict[int, object] = {}
    for ins in kernel.instructions:
        operands = ins.operands
        if not operands:
            continue
        if ins.words[0] not in _NO_RESULT or ins.words[0] in ("tcgen05", "cp"):
            _count_definitions(operands[0], definitions)
        if ins.guard is not None or len(operands) < 2:
            continue
        if ins.words[0] == "mov" and isinstance(operands[0], ptx.Reg) and operands[0].bits > 1:
            value = operands[1]
            if isinstance(value, ptx.Imm) or (
                isinstance(value, ptx.Special) and value.name in _STEADY_SPECIALS
            ):
                found[operands[0].id] = value
            elif isinstance(value, ptx.Symbol) and value.name in kernel.params:
                found[operands[0].id] = value
        elif ins.op.startswith("ld.param") and not isinstance(operands[0], ptx.Vec):
            field = param_field(ins, kernel)
            if field is not None:
                found[operands[0].id] = field
    return {register: value for register, value in found.items() if definitions[register] == 1}


def _registers_of(operand, into: set[int]) -> None:
    """Adds the ids of the registers within an operand."""
    if isinstance(operand, ptx.Reg):
        into.add(operand.id)
    elif isinstance(operand, tuple):
        for item in operand:
            _registers_of(item, into)
    elif isinstance(operand, ptx.Vec):
        _registers_of(operand.items, into)
    elif isinstance(operand, ptx.Addr):
        _registers_of((operand.base, *operand.coords), into)
    elif isinstance(operand, ptx.Pair):
        _registers_of((operand.first, operand.second), into)
    elif isinstance(operand, ptx.Not):
        _registers_of(operand.pred, into)


def _count_definitions(operand, counts: dict[int, int]) -> None:
    if isinstance(operand, ptx.Reg):
        counts[operand.id] = counts.get(operand.id, 0) + 1
    elif isinstance(operand, ptx.Vec):
        for item in operand.items:
            _count_definitions(item, counts)
    elif isinstance(operand, ptx.Pair):
        _count_definitions(operand.first, counts)
        _count_definitions(operand.second, counts)
