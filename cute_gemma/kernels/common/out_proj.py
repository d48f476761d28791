"""Output projection, what the architectures share: out[m, c] = bf16(sum_k attn[m, k] * wo[c, k]).

Shapes: attn [M, H*D], wo [C, H*D], out [M, C], all bf16, row-major. Any M >= 1; C and H*D divisible by 8 (TMA
needs rows of a multiple of 16 bytes). Tiles at the edges are clipped by TMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute

from cute_gemma.jit.signature import TensorArg
from cute_gemma.kernels.common.gemm import BLOCK_K, Workspace
from cute_gemma.kernels.common.schedule import Section


@dataclass(frozen=True)
class OutputTma:
    """TMA tensors of the kernel."""

    attn: Any
    weight: Any
    out: Any


@dataclass(frozen=True)
class OutputLoads:
    """Weights do not depend on the attention kernel, its output does."""

    attn: Any
    weight: Any
    kernel: Any
    rank: Any

    def early(self, unit, k, stage, barrier):
        self.weight.load(stage, barrier, unit.n, k)

    def late(self, unit, k, stage, barrier):
        self.attn.load(stage, barrier, self.kernel.row_tile(unit, self.rank), k)


class OutputProjectionBase:
    """To be mixed with an architecture's PersistentGemm in a frozen dataclass with fields hidden, features,
    tuning."""

    def __post_init__(self) -> None:
        for name in ("hidden", "features"):
            value = getattr(self, name)
            if value < 8 or value % 8:
                raise ValueError(f"{name}: {value}, expected a positive multiple of 8")

    def signature(self) -> tuple:
        args = (
            TensorArg("attn", "bf16", ("m", self.features)),
            TensorArg("o_proj_weight", "bf16", (self.hidden, self.features)),
            TensorArg("out", "bf16", ("m", self.hidden)),
        )
        return args + self.workspace_signature()

    @cute.jit
    def __call__(self, attn: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, *rest):
        """Host entry; rest = (partials, counters, stream) with stream-K, else (stream,)."""
        tma = OutputTma(self.tma_a(attn), self.tma_b(weight), self.tma_store(out))
        section = Section(
            cute.ceil_div(attn.shape[0], self.tuning.unit_rows),
            cute.ceil_div(self.hidden, self.tuning.tile_n),
            cute.ceil_div(self.features, BLOCK_K),
        )
        workspace = Workspace(*rest[:2]) if cutlass.const_expr(self.tuning.stream_k) else None
        self.launch(tma, self.schedule((section,)), workspace, rest[-1])

    def loads(self, tma, operands, rank) -> OutputLoads:
        return OutputLoads(
            self.partition_a(tma.attn, operands[0][0], rank),
            self.partition_b(tma.weight, operands[0][1], rank),
            self,
            rank,
        )
