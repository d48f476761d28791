"""Lowerings of wgmma, sm_90a (csrc/wgmma.c)."""

from __future__ import annotations

import re

from . import ptx
from .lowering import Builder, lowers
from .lowering_words import Words, items

_FORMATS = {"f16": 0, "bf16": 1, "tf32": 2}
_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8}


@lowers("wgmma")
def lower_wgmma(ins: ptx.Instruction, b: Builder) -> None:
    words = Words(ins, b, 2)
    kind = ins.words[1]
    words.need("sync", "aligned")
    if kind == "fence":
        words.done()
        return b.emit("WGMMA_FENCE", aligned=True)
    if kind == "commit_group":
        words.done()
        return b.emit("WGMMA_COMMIT", aligned=True)
    if kind == "wait_group":
        words.done()
        b.emit("WGMMA_WAIT", imm=ins.operands[0].value, aligned=True)
        if ins.operands[0].value == 0:
            b.completes("wgmma")
        return None
    if kind != "mma_async" or words.has("sp"):
        raise b.unsupported()
    return _mma(ins, b, words)


def _mma(ins: ptx.Instruction, b: Builder, words: Words) -> None:
    shape, result, kind, kind_b = words.left if len(words.left) == 4 else (None,) * 4
    size = re.fullmatch(r"m64n(\d+)k(\d+)", shape or "")
    known = size is not None and result == "f32" and kind == kind_b and kind in _FORMATS
    if not known or int(size[2]) != _DEPTH[kind]:
        raise b.unsupported("shape or types")
    columns = int(size[1])
    if columns % 8 or not 8 <= columns <= 256:
        raise b.unsupported(f"N = {columns}")
    target, a, desc_b, scale, *signs = ins.operands
    in_registers = isinstance(a, ptx.Vec)
    flags = [sign.value for sign in signs]
    # scale-a, scale-b, then trans-a (of a descriptor) and trans-b, which 32-bit types do not have
    wanted = 2 if kind == "tf32" else 3 if in_registers else 4
    fine = set(flags[:2]) <= {1, -1} and set(flags[2:]) <= {0, 1}
    if len(flags) != wanted or not fine:
        raise b.unsupported(f"{len(ins.operands)} operands")
    trans_b = flags[-1] if wanted > 2 else 0
    trans_a = flags[2] if wanted == 4 else 0
    registers = items(target)
    if len(registers) != columns // 2 or (in_registers and len(items(a)) != 4):
        raise b.unsupported(f"{len(registers)} accumulators")
    sources = [b.src(r, 32) for r in items(a)] if in_registers else [b.src(a, 64)]
    refs = [b.pred_src(scale), b.src(desc_b, 64), *sources]
    for register in registers:
        b.src(register, 32)                        # the accumulators are read too
    refs += [b.dst(r, 32, pending="wgmma") for r in registers]
    if in_registers:
        flying = b.pending.setdefault("wgmma", {}).setdefault(b.index, [])
        flying += [r.id for r in items(a)]
    sub = columns // 8 | in_registers << 6 | trans_a << 7 | trans_b << 8 | _FORMATS[kind] << 11
    sub |= (flags[0] < 0) << 9 | (flags[1] < 0) << 10
    b.emit("WGMMA", *refs, sub=sub, aligned=True)
