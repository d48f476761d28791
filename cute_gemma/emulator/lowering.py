"""PTX instructions to the interpreter's operations: the registry of lowerings and the builder they write to.

A lowering is a function `(ins, b)` registered for the first word of an opcode (`@lowers("mbarrier")`); `ins` is a
`ptx.Instruction`, `b` the `Builder`. It must raise `UnsupportedInstruction` for any modifier it does not implement.
"""
from __future__ import annotations

from typing import Callable

LOWERINGS: dict[str, Callable] = {}


def lowers(*words: str):
    """Registers a lowering for opcodes whose first word is one of `words`."""
    def register(function):
        for word in words:
            LOWERINGS[word] = function
        return function
    return register


class Builder:
    """What a lowering uses. References are symbolic until registers are allocated.

    src(operand, bits) / dst(operand, bits): a register reference (immediates and special registers: constant bank).
    dst(operand, bits, pending="tcgen05.ld"): a result that arrives asynchronously, in class `pending`.
    completes("tcgen05.ld"): from here on, no result of that class is in flight (a wait).
    pred_src(operand) / pred_dst(operand): a predicate index (a negated source costs a NOT operation first).
    address(operand): (reference of the 64-bit base address, or of a 32-bit one for shared-window operands; byte offset).
    emit(code, *refs, sub=0, imm=0, imm2=0, target=None): appends one operation; guard and line come from the instruction.
    """
