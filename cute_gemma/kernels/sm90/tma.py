"""TMA loads of the sm_90a GEMMs: their descriptors fetched early, and what the L2 cache does with what they read."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from cutlass import Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_gemma.kernels.common.gemm import TmaTensor


@dsl_user_op
def evict_first(*, loc=None, ip=None) -> Int64:
    """A policy under which what is read leaves the L2 cache before all else does (PTX ISA, createpolicy)."""
    text = "createpolicy.fractional.L2::evict_first.b64 $0;"
    return Int64(llvm.inline_asm(T.i64(), [], text, "=l", asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip))


def prefetch_descriptors(tma: Any) -> None:
    """Of every TmaTensor in a dataclass or tuple. Those of outputs and late operands would else be fetched when they
    are waited for."""
    if isinstance(tma, TmaTensor):
        cpasync.prefetch_descriptor(tma.atom)
    elif isinstance(tma, tuple):
        for part in tma:
            prefetch_descriptors(part)
    elif is_dataclass(tma):
        for field in fields(tma):
            prefetch_descriptors(getattr(tma, field.name))
