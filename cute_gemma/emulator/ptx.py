"""A PTX module as objects: kernels, their parameters, shared symbols, registers and instructions.

Covers what NVVM emits for CuTe DSL kernels, inline assembly with its own register and label scopes included.
Reference: PTX ISA, "Syntax" and "Directives". What is not understood raises `PtxSyntaxError` naming the line.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .errors import PtxSyntaxError

TYPE_BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*|/\*.*?\*/)
      |(?P<newline>\n)
      |(?P<word>[.%$_A-Za-z][\w$%.]*(?:::[\w.]+)*)
      |(?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
                 |\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?)
      |(?P<string>"[^"\n]*")
      |(?P<punct>[{}()\[\],;:@!|+\-<>=])""",
    re.VERBOSE | re.DOTALL,
)
_VECTORS = {".v2": "xy", ".v4": "xyzw"}


class Reg:
    """A virtual register. bits: 1 for a predicate. id: unique in its kernel."""

    __slots__ = ("name", "type", "bits", "id")

    def __init__(self, name: str, type_: str, id_: int) -> None:
        self.name, self.type, self.bits, self.id = name, type_, TYPE_BITS[type_], id_

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal. kind: "int" (value an int), "f32" or "f64" (value the raw bits)."""

    value: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that is no register: label, variable, parameter or function. offset: of `name+4`."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, ...}"""

    items: tuple


@dataclass(frozen=True, slots=True)
class Addr:
    """[base+offset], or [base, {coordinates}] of a tensor address."""

    base: object
    offset: int = 0
    coords: tuple = ()


@dataclass(frozen=True, slots=True)
class Not:
    """!p"""

    pred: object


@dataclass(frozen=True, slots=True)
class Pair:
    """d|p"""

    first: object
    second: object


class Sink:
    """_ : a destination that is thrown away."""

    def __repr__(self) -> str:
        return "_"


SINK = Sink()


class Instruction:
    """op: the whole opcode; words: its parts; guard: predicate register or None, negated by guard_neg.

    line: of the PTX text. loc: (file number, line) of the .loc before it, or None. scope: its block, for
    labels.
    """

    __slots__ = ("op", "words", "operands", "guard", "guard_neg", "line", "loc", "scope")

    def __init__(self, op, words, operands, guard, guard_neg, line, loc, scope) -> None:
        self.op, self.words, self.operands = op, words, operands
        self.guard, self.guard_neg, self.line, self.loc, self.scope = guard, guard_neg, line, loc, scope

    def __repr__(self) -> str:
        guard = f"@{'!' if self.guard_neg else ''}{self.guard} " if self.guard else ""
        return f"{guard}{self.op} {', '.join(map(str, self.operands))}"


class Scope:
    """A { } block: registers, labels and variables declared in it."""

    __slots__ = ("parent", "regs", "ranges", "labels")

    def __init__(self, parent: Scope | None) -> None:
        self.parent, self.regs, self.ranges, self.labels = parent, {}, {}, {}

    def label(self, name: str) -> int | None:
        """Index of the instruction the label stands before."""
        scope = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


@dataclass(frozen=True)
class Variable:
    """A .param, .shared, .global or .const variable. offset: of a parameter in the block. data: an
    initialiser."""

    name: str
    space: str
    type: str
    align: int
    size: int
    offset: int = 0
    extern: bool = False
    data: bytes | None = None


@dataclass
class Kernel:
    """An .entry. directives: such as {"reqntid": (128, 1, 1)}. tables: name -> labels of .branchtargets."""

    name: str
    params: dict[str, Variable] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    nregs: int = 0
    line: int = 0

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params.values()), default=0)


@dataclass
class Module:
    """A PTX text. files: number -> path, of .file directives."""

    version: str
    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]
    files: dict[int, str]


def parse(text: str) -> Module:
    """Parses a module. Raises PtxSyntaxError."""
    return _Parser(text).module()


def _tokens(text: str) -> list[tuple[str, str, int]]:
    text = text.rstrip("\0")
    tokens, line, position, end = [], 1, 0, len(text)
    match = _TOKEN.match
    append = tokens.append
    while position < end:
        found = match(text, position)
        if found is None:
            raise PtxSyntaxError(f"unexpected character {text[position]!r}", line=line)
        kind, position = found.lastgroup, found.end()
        if kind == "newline":
            line += 1
        elif kind == "skip":
            line += found.group().count("\n") if text[found.start()] == "/" else 0
        else:
            append((kind, found.group(), line))
    append(("end", "", line))
    return tokens


def _number(token: str) -> Imm:
    head = token[:2].lower()
    if head == "0f":
        return Imm(int(token[2:], 16), "f32")
    if head == "0d":
        return Imm(int(token[2:], 16), "f64")
    if "." in token:
        return Imm(struct.unpack("<Q", struct.pack("<d", float(token)))[0], "f64")
    token = token.rstrip("U")
    if len(token) > 1 and token[0] == "0" and token.isdigit():
        return Imm(int(token, 8))
    return Imm(int(token, 0))


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens, self.at = _tokens(text), 0
        self.words: dict[str, tuple[str, ...]] = {}
        self.scope: Scope | None = None
        self.kernel: Kernel | None = None
        self.loc: tuple[int, int] | None = None
        self.files: dict[int, str] = {}
        self.variables: dict[str, Variable] = {}

    # ---- tokens
    def fail(self, what: str) -> None:
        kind, value, line = self.tokens[self.at]
        raise PtxSyntaxError(f"{what}, at {value!r}" if value else what, line=line)

    def peek(self) -> str:
        return self.tokens[self.at][1]

    def next(self) -> str:
        value = self.tokens[self.at][1]
        self.at += 1
        return value

    def accept(self, value: str) -> bool:
        if self.tokens[self.at][1] == value:
            self.at += 1
            return True
        return False

    def expect(self, value: str) -> None:
        if not self.accept(value):
            self.fail(f"expected {value!r}")

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        kind, value, _ = self.tokens[self.at]
        if kind != "number":
            self.fail("expected a number")
        self.at += 1
        return sign * _number(value).value

    def skip_to(self, *ends: str) -> None:
        while self.peek() not in ends:
            if self.tokens[self.at][0] == "end":
                self.fail("unexpected end of the text")
            self.at += 1

    # ---- module
    def module(self) -> Module:
        version = target = ""
        kernels: dict[str, Kernel] = {}
        linkage = set()
        while self.tokens[self.at][0] != "end":
            word = self.next()
            if word == ".version":
                version = self.next()
            elif word == ".target":
                target = self.next()
                while self.accept(","):
                    self.next()
            elif word == ".address_size":
                if self.integer() != 64:
                    self.fail("only .address_size 64 is supported")
            elif word in (".visible", ".extern", ".weak", ".common"):
                linkage.add(word)
                continue
            elif word == ".entry":
                kernel = self.entry()
                kernels[kernel.name] = kernel
            elif word in (".global", ".const", ".shared"):
                self.variable(word[1:], self.variables, ".extern" in linkage)
            elif word == ".file":
                number = self.integer()
                self.files[number] = self.next().strip('"')
                while self.accept(","):
                    self.next()
            elif word == ".func":
                self.skip_function()
            elif word == ".section":
                self.skip_to("{")
                self.skip_to("}")
                self.next()
            elif word == ".alias":
                self.skip_to(";")
                self.next()
            elif word != ";":
                self.at -= 1
                self.fail("directive not understood")
            linkage.clear()
        return Module(version, target, kernels, self.variables, self.files)

    def skip_function(self) -> None:
        """Device functions are not run: calling one is refused where the call stands."""
        self.skip_to(";", "{")
        if self.next() == "{":
            depth = 1
            while depth:
                depth += {"{": 1, "}": -1}.get(self.next(), 0)

    def variable(self, space: str, into: dict[str, Variable], extern: bool = False) -> None:
        align = None
        while True:
            word = self.next()
            if word == ".align":
                align = self.integer()
            elif word.startswith(".") and word[1:] in TYPE_BITS:
                kind = word[1:]
                break
            elif word not in (".v2", ".v4", ".attribute"):
                self.at -= 1
                self.fail("declaration not understood")
        element = max(1, TYPE_BITS[kind] // 8)
        while True:
            name, count, data = self.next(), 1, None
            while self.accept("["):
                count = 0 if self.peek() == "]" else count * self.integer()
                self.expect("]")
            if self.accept("="):
                data = self.initialiser(kind, element)
                count = count or len(data) // element
                data = data.ljust(count * element, b"\0")
            into[name] = Variable(name, space, kind, align or element, count * element, 0, extern, data)
            if not self.accept(","):
                break
        self.expect(";")

    def initialiser(self, kind: str, element: int) -> bytes:
        values = []
        braces = self.accept("{")
        while True:
            negative = self.accept("-")
            token_kind, value, _ = self.tokens[self.at]
            if token_kind != "number":
                self.fail("only numbers are supported in an initialiser")
            self.at += 1
            number = _number(value).value
            values.append(-number if negative else number)
            if not (braces and self.accept(",")):
                break
        if braces:
            self.expect("}")
        mask = (1 << 8 * element) - 1
        return b"".join((v & mask).to_bytes(element, "little") for v in values)

    # ---- kernel
    def entry(self) -> Kernel:
        line = self.tokens[self.at][2]
        kernel = self.kernel = Kernel(self.next(), line=line)
        if self.accept("("):
            offset = 0
            while not self.accept(")"):
                offset = self.parameter(offset)
                self.accept(",")
        while not self.accept("{"):
            word = self.next()
            if not word.startswith("."):
                self.fail("expected the kernel's body")
            values = []
            while self.tokens[self.at][0] == "number":
                values.append(self.integer())
                self.accept(",")
            kernel.directives[word[1:]] = tuple(values)
        self.scope, self.loc = Scope(None), None
        self.body()
        return kernel

    def parameter(self, offset: int) -> int:
        self.expect(".param")
        align = kind = None
        while True:
            word = self.next()
            if word == ".align":
                value = self.integer()
                if kind is None:          # after the type it is of what a pointer points to
                    align = value
            elif word[1:] in TYPE_BITS and word[0] == ".":
                kind = word[1:]
            elif not word.startswith("."):
                break
        element = TYPE_BITS[kind] // 8
        count = 1
        if self.accept("["):
            count = self.integer()
            self.expect("]")
        align = align or element
        offset = -(-offset // align) * align
        self.kernel.params[word] = Variable(word, "param", kind, align, element * count, offset)
        return offset + element * count

    def body(self) -> None:
        depth = 1
        tokens = self.tokens
        while depth:
            kind, value, line = tokens[self.at]
            if value == "{":
                self.at += 1
                self.scope = Scope(self.scope)
                depth += 1
            elif value == "}":
                self.at += 1
                depth -= 1
                self.scope = self.scope.parent
            elif value == ";":
                self.at += 1
            elif value == "@":
                self.at += 1
                negated = self.accept("!")
                guard = self.operand()
                if not isinstance(guard, Reg) or guard.bits != 1:
                    self.fail("the guard is not a predicate register")
                self.instruction(guard, negated)
            elif kind == "word":
                if value[0] == ".":
                    self.at += 1
                    self.directive(value)
                elif tokens[self.at + 1][1] == ":":
                    self.at += 2
                    self.label(value)
                else:
                    self.instruction(None, False)
            else:
                self.fail("statement not understood")

    def label(self, name: str) -> None:
        if self.peek() in (".branchtargets", ".calltargets", ".callprototype"):
            self.next()
            names = []
            while not self.accept(";"):
                names.append(self.next())
                self.accept(",")
            self.kernel.tables[name] = tuple(names)
            return
        self.scope.labels[name] = len(self.kernel.instructions)

    def directive(self, word: str) -> None:
        if word == ".reg":
            kind = self.next()
            lanes = _VECTORS.get(kind, "")
            kind = self.next() if lanes else kind
            if kind[1:] not in TYPE_BITS:
                self.fail("register type not understood")
            while True:
                name = self.next()
                if self.accept("<"):
                    self.scope.ranges[name] = (kind[1:], self.integer())
                    self.expect(">")
                elif lanes:
                    parts = {f"{name}.{lane}": self.new_register(f"{name}.{lane}", kind[1:]) for lane in lanes}
                    self.scope.regs |= parts | {name: Vec(tuple(parts.values()))}
                else:
                    self.scope.regs[name] = self.new_register(name, kind[1:])
                if not self.accept(","):
                    break
            self.expect(";")
        elif word == ".loc":
            number, source_line = self.integer(), self.integer()
            self.loc = (number, source_line)
            line = self.tokens[self.at - 1][2]
            while self.tokens[self.at][2] == line and self.peek() not in ("{", "}"):
                self.at += 1
        elif word == ".pragma":
            self.skip_to(";")
            self.next()
        elif word in (".shared", ".local", ".global", ".const", ".param"):
            self.variable(word[1:], self.kernel.variables)
        else:
            self.at -= 1
            self.fail("directive not understood")

    def new_register(self, name: str, kind: str) -> Reg:
        register = Reg(name, kind, self.kernel.nregs)
        self.kernel.nregs += 1
        return register

    def register(self, name: str) -> Reg | Vec | None:
        scope = self.scope
        while scope is not None:
            found = scope.regs.get(name)
            if found is not None:
                return found
            if scope.ranges:
                prefix = name.rstrip("0123456789")
                declared = scope.ranges.get(prefix)
                if declared and prefix != name and int(name[len(prefix) :]) < declared[1]:
                    register = scope.regs[name] = self.new_register(name, declared[0])
                    return register
            scope = scope.parent
        return None

    # ---- instructions
    def instruction(self, guard: Reg | None, negated: bool) -> None:
        kind, op, line = self.tokens[self.at]
        if kind != "word":
            self.fail("expected an opcode")
        self.at += 1
        words = self.words.get(op)
        if words is None:
            words = self.words[op] = tuple(op.split("."))
        operands = []
        if words[0] == "call":
            self.skip_to(";")
        while not self.accept(";"):
            operands.append(self.operand())
            if not self.accept(","):
                self.expect(";")
                break
        self.kernel.instructions.append(
            Instruction(op, words, tuple(operands), guard, negated, line, self.loc, self.scope)
        )

    def operand(self):
        kind, value, _ = self.tokens[self.at]
        if kind == "word":
            self.at += 1
            found = self.named(value)
            return Pair(found, self.operand()) if self.accept("|") else found
        if kind == "number":
            self.at += 1
            return _number(value)
        if value == "-":
            self.at += 1
            return self.negative()
        if value == "[":
            self.at += 1
            return self.address()
        if value == "{":
            self.at += 1
            items = []
            while not self.accept("}"):
                items.append(self.operand())
                self.accept(",")
            return Vec(tuple(items))
        if value == "!":
            self.at += 1
            return Not(self.operand())
        self.fail("operand not understood")

    def named(self, value: str):
        if value == "_":
            return SINK
        register = self.register(value)
        if register is not None:
            return register
        if value[0] == "%":
            return Special(value)
        if self.peek() == "+" and self.tokens[self.at + 1][0] == "number":
            self.at += 1
            return Symbol(value, self.integer())
        return Symbol(value)

    def negative(self) -> Imm:
        imm = self.operand()
        if not isinstance(imm, Imm):
            self.fail("expected a number after '-'")
        if imm.kind == "int":
            return Imm(-imm.value)
        return Imm(imm.value ^ (1 << (31 if imm.kind == "f32" else 63)), imm.kind)

    def address(self) -> Addr:
        kind, value, _ = self.tokens[self.at]
        if kind == "word":
            self.at += 1
            base = self.named(value)
        else:
            base = self.operand()
        offset, coords = 0, ()
        while self.peek() in ("+", "-"):
            negative = self.next() == "-"
            offset += -self.integer() if negative else self.integer()
        if isinstance(base, Symbol) and base.offset:
            base, offset = Symbol(base.name), offset + base.offset
        if self.accept(","):
            vector = self.operand()
            coords = vector.items if isinstance(vector, Vec) else (vector,)
        self.expect("]")
        return Addr(base, offset, coords)
