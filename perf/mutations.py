"""One-change mutants of a kernel's PTX: what could be wrong in its synchronisation, addresses and rounding.

A mutant replaces one statement (swaps replace two). Where a register has to differ by a constant, the new
value goes to a register of a scope of its own: `{ .reg .b32 mutant; add.s32 mutant, %r5, 8; ... }`.

Not made, being equal to the original by the PTX ISA:
  a second mbarrier.try_wait, tcgen05.wait, wait_group, fence or griddepcontrol instruction after the first:
    each only orders or waits for what came before it, and the first already has;
  a second bar.sync where no other statement names that barrier: every thread then comes twice ("bar": a
    completed barrier "can be immediately reused"); nor a second bar.warp.sync;
  a second commit_group: it commits an empty group, and a wait for all but the N latest waits for no fewer;
  two named barriers swapped that one statement each uses: they only change names;
  without griddepcontrol.launch_dependents: it counts as issued when the CTA ends ("griddepcontrol");
  without prefetch.tensormap, createpolicy or a cache hint: performance hints ("Cache Eviction Priority
    Hints");
  a different suspend-time hint of try_wait: "a system-dependent time limit" in any case.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SYNC, ADDRESSING, PREDICATE, ROUNDING = "synchronisation", "addressing", "predicates", "rounding"

_STATEMENT = re.compile(
    r"^(?P<lead>\s*(?:[\w$]+:\s*)?)(?P<guard>@!?%?[\w$]+\s+)?"
    r"(?P<text>[a-z]\w*[^;{}]*(?:\{[^;]*)?;)(?P<tail>.*)$"
)
_MEMORY = re.compile(r"\[([^\[\]]+)\]")


@dataclass(frozen=True)
class Statement:
    """A PTX statement on a line of its own. site: opcode and how many statements of it come before."""

    index: int  # of the line, from 0
    lead: str
    guard: str
    text: str
    tail: str
    site: str

    @property
    def opcode(self) -> str:
        return self.text.split(None, 1)[0].rstrip(";")

    @property
    def words(self) -> list[str]:
        return self.opcode.split(".")

    def line(self, text: str, guard: str | None = None) -> str:
        return f"{self.lead}{self.guard if guard is None else guard}{text}{self.tail}"

    def with_value(self, old: str, new: str, bits: int, operation: str, amount: int | str) -> str:
        """The line with `new`, holding old changed by operation and amount, in the place `old` had."""
        value = f".reg .b{bits} mutant; {operation} mutant, {old}, {amount};"
        return f"{self.lead}{{ {value} {self.guard}{new} }}{self.tail}"


@dataclass(frozen=True)
class Mutant:
    """kind, as the table counts it; site: of the statement; changes: new lines by index."""

    group: str
    kind: str
    site: str
    line: int  # of the PTX, from 1, in the original
    original: str
    changes: tuple[tuple[int, str], ...]

    @property
    def key(self) -> str:
        """The same for the same change to the same text."""
        return hashlib.sha256(repr((self.kind, self.site, self.changes)).encode()).hexdigest()[:12]

    def apply(self, ptx: str) -> str:
        lines = ptx.split("\n")
        for index, text in self.changes:
            lines[index] = text
        return "\n".join(lines)


def statements(ptx: str) -> list[Statement]:
    """Statements of the kernel's body, in order."""
    found, count = [], {}
    for index, line in enumerate(ptx.split("\n")):
        match = _STATEMENT.match(line)
        if match is None or line.lstrip().startswith(("//", ".")):
            continue
        opcode = match["text"].split(None, 1)[0].rstrip(";")
        ordinal = count[opcode] = count.get(opcode, -1) + 1
        found.append(
            Statement(
                index,
                match["lead"],
                match["guard"] or "",
                match["text"],
                match["tail"],
                f"{opcode}#{ordinal}",
            )
        )
    return found


def mutants(ptx: str) -> list[Mutant]:
    """Every mutant of every kind."""
    body = statements(ptx)
    found = []
    for at, statement in enumerate(body):
        for group, kind, changes in _mutants_of(statement, at, body):
            line = statement.index + 1
            original = statement.guard + " ".join(statement.text.split())
            changes = changes if isinstance(changes, tuple) else ((statement.index, changes),)
            found.append(Mutant(group, kind, statement.site, line, original, changes))
    return found


def sample(
    found: list[Mutant], per_kind: int | None, seed: int = 0, everything: tuple[str, ...] = (SYNC,)
) -> list[Mutant]:
    """At most per_kind mutants of each kind, drawn at random, and all of the groups in `everything`."""
    if per_kind is None:
        return found
    kinds: dict[str, list[Mutant]] = {}
    for mutant in found:
        kinds.setdefault(mutant.kind, []).append(mutant)
    chosen = set()
    for kind, members in kinds.items():
        if members[0].group not in everything and len(members) > per_kind:
            members = members[:]
            random.Random(f"{seed} {kind}").shuffle(members)  # a larger choice holds every smaller one
            members = members[:per_kind]
        chosen.update(id(m) for m in members)
    return [m for m in found if id(m) in chosen]


_Made = tuple[str, str, "str | tuple[tuple[int, str], ...]"]


def _mutants_of(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    for maker in (
        _waits,
        _signals,
        _fences,
        _barriers,
        _tensor_memory,
        _coordinates,
        _accesses,
        _predicates,
        _rounding,
    ):
        yield from maker(s, at, body)


# ---------------------------------------------------------------- synchronisation
def _waits(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    op = s.opcode
    if op.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        passed, _, parity = _operands(s)[:3]
        yield SYNC, "drop mbarrier wait", s.line(f"setp.eq.u32 {passed}, 0, 0;")
        if ".parity" in op:
            if parity.isdigit():
                yield SYNC, "flip parity", s.line(s.text.replace(f", {parity}", f", {1 - int(parity)}", 1))
            else:
                flipped = re.sub(rf"{re.escape(parity)}(?!\w)", "mutant", s.text)
                yield SYNC, "flip parity", s.with_value(parity, flipped, 32, "xor.b32", 1)
    elif op.startswith("tcgen05.wait"):
        yield SYNC, "drop tcgen05.wait", s.line("")
    elif op.startswith("griddepcontrol.wait"):
        yield SYNC, "drop griddepcontrol.wait", s.line("")
    elif "wait_group" in op or op.startswith("cp.async.wait"):
        yield SYNC, "drop wait_group", s.line("")
        pending = re.search(r"\d+(?=\s*;)", s.text)
        if pending and "wait_all" not in op:
            yield (
                SYNC,
                "wait_group for one less",
                s.line(f"{s.text[: pending.start()]}{int(pending[0]) + 1};"),
            )


def _signals(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    op = s.opcode
    if op.startswith("mbarrier.arrive.expect_tx"):
        plain = s.text.replace(".expect_tx", "", 1)
        count = _operands(s)[-1]
        yield SYNC, "drop expect_tx", s.line(plain.replace(f", {count}", "", 1))
        yield (
            SYNC,
            "drop arrive",
            s.line(
                s.text.replace(".arrive.expect_tx", ".expect_tx.relaxed.cta", 1).replace(
                    f"{_operands(s)[0]},", "", 1
                )
                if not _operands(s)[0].startswith("[")
                else ""
            ),
        )
        yield SYNC, "duplicate expect_tx", s.line(f"{s.text} {s.guard}{s.text}")
        for amount in (16, -16):
            changed = re.sub(rf"{re.escape(count)}(?=\s*;)", "mutant", s.text)
            yield ADDRESSING, "shift tx count", s.with_value(count, changed, 32, "add.s32", amount)
    elif op.startswith("mbarrier.expect_tx"):
        yield SYNC, "drop expect_tx", s.line("")
        yield SYNC, "duplicate expect_tx", s.line(f"{s.text} {s.guard}{s.text}")
    elif op.startswith("mbarrier.arrive"):
        yield SYNC, "drop arrive", s.line("")
        yield SYNC, "duplicate arrive", s.line(f"{s.text} {s.guard}{s.text}")
    elif op.startswith("mbarrier.init"):
        count = _operands(s)[-1]
        changed = re.sub(rf"{re.escape(count)}(?=\s*;)", "mutant", s.text)
        yield SYNC, "arrival count + 1", s.with_value(count, changed, 32, "add.s32", 1)
    elif op.startswith("tcgen05.commit"):
        yield SYNC, "drop commit", s.line("")
        yield SYNC, "duplicate commit", s.line(f"{s.text} {s.guard}{s.text}")
    elif "commit_group" in op:
        yield SYNC, "drop commit", s.line("")
    if any(w in s.words for w in ("acquire", "release", "acq_rel")) and s.words[0] in (
        "ld",
        "st",
        "atom",
        "red",
    ):
        yield (
            SYNC,
            "relax an acquire or release",
            s.line(re.sub(r"\.(acquire|release|acq_rel)\b", ".relaxed", s.text, count=1)),
        )


def _fences(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    if s.words[0] in ("fence", "membar"):
        yield SYNC, "drop fence", s.line("")
    elif s.opcode.startswith("tcgen05.fence"):
        yield SYNC, "drop tcgen05.fence", s.line("")
    elif s.opcode.startswith("wgmma.fence"):
        yield SYNC, "drop wgmma.fence", s.line("")


def _is_barrier(s: Statement) -> bool:
    return s.words[0] in ("bar", "barrier")


def _named(s: Statement) -> str | None:
    """The number of the named barrier."""
    if not _is_barrier(s) or s.words[1] in ("warp", "cluster"):
        return None
    operands = _operands(s)
    return operands[0] if operands and operands[0].isdigit() else None


def _mbarrier(s: Statement) -> str | None:
    """Text within the brackets of the mbarrier operand."""
    op = s.opcode
    memory = _MEMORY.findall(s.text)
    if not memory or not (op.startswith(("mbarrier.", "tcgen05.commit")) or "mbarrier::complete_tx" in op):
        return None
    if op.startswith("cp.async.bulk"):
        return memory[2] if len(memory) > 2 else memory[-1]
    return memory[0]


def _barriers(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    if _is_barrier(s):
        yield SYNC, f"drop {'.'.join(s.words[:2])}", s.line("")
        if s.words[1] == "cluster":
            yield SYNC, "duplicate barrier", s.line(f"{s.text} {s.guard}{s.text}")
        number = _named(s)
        if number is not None:
            if any(_named(other) == number for other in body if other is not s):
                yield SYNC, "duplicate barrier", s.line(f"{s.text} {s.guard}{s.text}")
            uses = Counter(map(_named, body))
            for other in body[at + 1 :]:
                theirs = _named(other)
                if theirs not in (None, number) and uses[number] + uses[theirs] > 2:
                    swapped = [(s, number, theirs), (other, theirs, number)]
                    yield (
                        SYNC,
                        "swap two barriers",
                        tuple(
                            (x.index, x.line(re.sub(rf"(?<=\s){old}(?=\s*[,;])", new, x.text, count=1)))
                            for x, old, new in swapped
                        ),
                    )
                    break
    address = _mbarrier(s)
    if address is None or s.opcode.startswith("mbarrier.init"):
        return
    for amount in (8, -8):
        yield (
            ADDRESSING,
            "shift stage index",
            s.line(s.text.replace(f"[{address}]", f"[{_shifted(address, amount)}]")),
        )
    base = address.partition("+")[0]
    for other in body[at + 1 : at + 400]:
        theirs = _mbarrier(other)
        if (
            theirs
            and theirs != address
            and theirs.partition("+")[0] == base
            and not other.opcode.startswith("mbarrier.init")
        ):
            yield (
                SYNC,
                "swap two barriers",
                tuple(
                    (x.index, x.line(x.text.replace(f"[{old}]", f"[{new}]")))
                    for x, old, new in ((s, address, theirs), (other, theirs, address))
                ),
            )
            break


def _tensor_memory(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    op = s.opcode
    if op.startswith("tcgen05.relinquish"):
        yield SYNC, "drop relinquish", s.line("")
    elif op.startswith("tcgen05.dealloc"):
        yield SYNC, "drop dealloc", s.line("")
    elif op.startswith(("tcgen05.mma", "wgmma.mma_async")):
        layout = 62 if s.words[0] == "wgmma" else 61
        # The descriptors: the 64-bit registers (PTX ISA, "Shared memory descriptor").
        for register in dict.fromkeys(re.findall(r"%rd\d+", s.text)):
            for kind, operation, amount in (
                ("shift descriptor offset", "add.s64", 1),
                ("shift descriptor offset", "add.s64", 64),
                ("flip swizzle bits", "xor.b64", 1 << layout),
                ("flip swizzle bits", "xor.b64", 3 << layout),
            ):
                changed = re.sub(rf"{register}(?!\d)", "mutant", s.text)
                yield ADDRESSING, kind, s.with_value(register, changed, 64, operation, amount)
    if op.startswith(("tcgen05.mma", "tcgen05.ld", "tcgen05.st", "tcgen05.cp")):
        for address in dict.fromkeys(_MEMORY.findall(s.text)):
            yield (
                ADDRESSING,
                "shift TMEM column",
                s.line(s.text.replace(f"[{address}]", f"[{_shifted(address, 1)}]")),
            )


# ---------------------------------------------------------------- addresses
def _coordinates(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    if not s.opcode.startswith(("cp.async.bulk", "cp.reduce.async.bulk")) or "group" == s.words[-1]:
        return
    tensor = re.search(r"\{([^}]*)\}", s.text)
    if tensor is not None:
        names = [name.strip() for name in tensor[1].split(",")]
        for place, name in enumerate(names):
            changed = ", ".join("mutant" if i == place else n for i, n in enumerate(names))
            text = f"{s.text[: tensor.start(1)]}{changed}{s.text[tensor.end(1) :]}"
            for amount in (1, 64):
                yield ADDRESSING, "shift TMA coordinate", s.with_value(name, text, 32, "add.s32", amount)
    memory = _MEMORY.findall(re.sub(r"\{[^}]*\}", "", s.text))
    shared = [m for m in memory if "," not in m]
    if ".shared" in s.opcode and shared:
        shift = 1024 if "tensor" in s.opcode else 16
        yield (
            ADDRESSING,
            "shift shared address",
            s.line(s.text.replace(f"[{shared[0]}]", f"[{_shifted(shared[0], shift)}]", 1)),
        )


def _accesses(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    words = s.words
    if words[0] not in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix") or "param" in words:
        return
    address = _MEMORY.findall(s.text)
    if not address:
        return
    size = re.search(r"\d+$", words[-1])
    size = int(size[0]) // 8 if size and words[0] in ("ld", "st", "atom", "red") else 16
    size *= next((int(w[1:]) for w in words if re.fullmatch(r"v\d", w)), 1)
    space = "shared" if any(w.startswith("shared") for w in words) or "matrix" in words[0] else "global"
    changed = s.text.replace(f"[{address[0]}]", f"[{_shifted(address[0], size)}]", 1)
    yield ADDRESSING, f"shift {space} address", s.line(changed)


def _shifted(address: str, amount: int) -> str:
    base, _, offset = address.partition("+")
    total = int(offset or 0) + amount
    return f"{base}+{total}" if total else base


# ---------------------------------------------------------------- predicates and rounding
def _predicates(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    if not s.guard or re.match(r"@!?P\d", s.guard):  # P1: the waiting loops of inline assembly
        return
    yield PREDICATE, "drop predicate", s.line(s.text, guard="")
    if s.words[0] == "bra":
        yield PREDICATE, "never branch", s.line("", guard="")


def _rounding(s: Statement, at: int, body: list[Statement]) -> Iterator[_Made]:
    words = s.words
    if words[0] in ("cvt", "fma", "add", "sub", "mul") and any(w in words for w in ("rn", "f32", "f32x2")):
        to_integer = words[0] == "cvt" and words[-2][0] in "su" and words[-1][0] in "su"
        if "rn" in words and not to_integer:
            yield ROUNDING, "round towards zero", s.line(s.text.replace(".rn", ".rz", 1))
        elif words[0] in ("add", "sub", "mul") and words[-1] in ("f32", "f32x2") and "rn" not in words:
            yield ROUNDING, "round towards zero", s.line(s.text.replace(words[0], f"{words[0]}.rz", 1))
    if "ftz" in words:
        yield ROUNDING, "drop ftz", s.line(s.text.replace(".ftz", "", 1))
    elif words[0] in ("fma", "add", "sub", "mul", "ex2") and words[-1] in ("f32", "f32x2"):
        yield ROUNDING, "add ftz", s.line(re.sub(r"\.(f32(x2)?)(?=\s)", r".ftz.\1", s.text, count=1))


def _operands(s: Statement) -> list[str]:
    """Operands at the outer level."""
    rest = s.text[len(s.opcode) :].strip().rstrip(";")
    parts, depth, start = [], 0, 0
    for i, c in enumerate(rest):
        depth += (c in "[{") - (c in "]}")
        if c == "," and not depth:
            parts.append(rest[start:i].strip())
            start = i + 1
    parts.append(rest[start:].strip())
    return [p for p in parts if p]


Maker = Callable[[Statement, int, list[Statement]], Iterator[_Made]]
