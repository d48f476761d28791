"""Taking an opcode's modifiers one by one, so that none is left over unnoticed."""

from __future__ import annotations

from . import ptx
from .lowering import Builder

CACHE_WORDS = frozenset(
    ["L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
     "L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::64B", "L2::128B", "L2::256B",
     "ca", "cg", "cs", "lu", "cv", "wb", "wt"]
)  # fmt: skip


class Words:
    """The words of an opcode after its first one."""

    def __init__(self, ins: ptx.Instruction, b: Builder, skip: int = 1) -> None:
        self.left, self.b = list(ins.words[skip:]), b

    def has(self, *names: str) -> bool:
        """Takes the first of `names` that is there; False when none is."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return True
        return False

    def need(self, *names: str) -> None:
        for name in names:
            if not self.has(name):
                raise self.b.unsupported(f"without .{name}")

    def choice(self, table, default=None):
        """The value in `table` (a dict, or names counted from 0) of the word that is there, or `default`."""
        table = table if isinstance(table, dict) else {name: i for i, name in enumerate(table)}
        for word in self.left:
            if word in table:
                self.left.remove(word)
                return table[word]
        if default is None:
            raise self.b.unsupported(f"none of .{', .'.join(table)}")
        return default

    def drop(self, names) -> None:
        """Takes words that change nothing here, such as cache hints."""
        self.left = [word for word in self.left if word not in names]

    def done(self) -> None:
        if self.left:
            raise self.b.unsupported(f"modifier .{self.left[0]}")


def operands(ins: ptx.Instruction, b: Builder, least: int, most: int | None = None) -> tuple:
    most = least if most is None else most
    if not least <= len(ins.operands) <= most:
        raise b.unsupported(f"{len(ins.operands)} operands")
    return ins.operands


def items(operand) -> tuple:
    """The elements of a vector operand, or the operand alone."""
    return operand.items if isinstance(operand, ptx.Vec) else (operand,)


def offsets(low: int, high: int = 0) -> int:
    """Two 32-bit offsets in one Op.imm."""
    value = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    return value - (1 << 64) if value >> 63 else value
