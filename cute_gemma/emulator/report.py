"""What an emulated launch did: counts by opcode and warp, traffic, matrix operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import timeline
from .launch import Launch
from .program import Program


@dataclass(eq=False)
class LaunchReport:
    """One launch.

    warp_instructions: executed in all, a warp's execution of one PTX instruction counting once.
    tma_load_bytes, tma_store_bytes: moved by bulk and tensor copies, a multicast counting once. mma_flops: of
    tensor-core operations, 2 per multiply-add. tmem_load_bytes, tmem_store_bytes: by tcgen05.ld and
    tcgen05.st. smem_wavefronts: passes that shared memory accesses took, and smem_ideal_wavefronts what they
    would have taken without bank conflicts. sectors_read, sectors_written: distinct 32-byte sectors of global
    memory. seconds: that the emulation took.
    """

    launch: Launch
    program: Program = field(repr=False)
    counts: np.ndarray = field(repr=False)  # [warp of the CTA, PTX instruction], summed over CTAs
    seconds: float = 0.0
    warp_instructions: int = 0
    tma_load_bytes: int = 0
    tma_store_bytes: int = 0
    mma_flops: int = 0
    tmem_load_bytes: int = 0
    tmem_store_bytes: int = 0
    smem_wavefronts: int = 0
    smem_ideal_wavefronts: int = 0
    sectors_read: int = 0
    sectors_written: int = 0
    footprint: object = field(default=None, repr=False)
    trace: np.ndarray | None = field(default=None, repr=False)

    @property
    def kernel_name(self) -> str:
        return self.launch.kernel_name

    @property
    def by_opcode(self) -> dict[str, int]:
        """Executions by full opcode, most frequent first."""
        return self._by_opcode(self.counts.sum(0))

    @property
    def by_warp(self) -> dict[int, int]:
        """Executions by index of the warp in its CTA."""
        return {warp: int(n) for warp, n in enumerate(self.counts.sum(1))}

    def by_opcode_of_warp(self, warp: int) -> dict[str, int]:
        """Executions by opcode of one warp index."""
        return self._by_opcode(self.counts[warp])

    def by_role(self, roles: dict[str, Iterable[int]]) -> dict[str, int]:
        """Executions by role, given the warp indices of each, such as {"load": [8], "softmax": range(8)}."""
        return {role: int(self.counts[list(warps)].sum()) for role, warps in roles.items()}

    def by_line(self) -> list[tuple[int, str, int]]:
        """(PTX line, text, executions) of each instruction, in the order of the text."""
        totals = self.counts.sum(0)
        return [
            (ins.line, self.program.text(ins.line) or ins.op, int(n))
            for ins, n in zip(self.program.kernel.instructions, totals)
        ]

    def _by_opcode(self, totals: np.ndarray) -> dict[str, int]:
        counter: Counter[str] = Counter()
        for ins, n in zip(self.program.kernel.instructions, totals):
            if n:
                counter[ins.op] += int(n)
        return dict(counter.most_common())

    def write_trace(self, path: str | Path, roles: dict[str, Iterable[int]] | None = None) -> None:
        """Writes the timeline as Chrome trace JSON, which Perfetto opens. Time is logical (one unit a
        warp-instruction).

        roles: warp indices by role, for the names of the tracks. Raises ValueError when no events were
        recorded (`Options(trace=...)`).
        """
        timeline.write(path, [("", self)], roles)

    def summary(self, top: int = 12) -> str:
        """The figures as text, with the `top` most frequent opcodes."""
        rate = self.warp_instructions / self.seconds / 1e6 if self.seconds else 0.0
        conflict = self.smem_wavefronts / self.smem_ideal_wavefronts if self.smem_ideal_wavefronts else 1.0
        lines = [
            f"{self.kernel_name}: grid {self.launch.grid}, block {self.launch.block}, "
            f"cluster {self.launch.cluster}",
            f"  {self.warp_instructions} warp instructions in {self.seconds:.3f} s ({rate:.1f} M/s)",
            f"  TMA {self.tma_load_bytes} B in, {self.tma_store_bytes} B out; MMA {self.mma_flops} flop",
            f"  TMEM {self.tmem_load_bytes} B read, {self.tmem_store_bytes} B written",
            f"  shared memory {self.smem_wavefronts} wavefronts ({conflict:.2f} x conflict-free)",
            f"  global memory {self.sectors_read} sectors read, {self.sectors_written} written",
            "  warps: " + ", ".join(f"{w}: {n}" for w, n in self.by_warp.items()),
        ]
        lines += [f"  {n:>12}  {op}" for op, n in list(self.by_opcode.items())[:top]]
        return "\n".join(lines)


@dataclass(eq=False)
class Report:
    """All launches of one call of a compiled function, in order."""

    launches: list[LaunchReport]

    @property
    def warp_instructions(self) -> int:
        return sum(r.warp_instructions for r in self.launches)

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.launches)

    def summary(self, top: int = 12) -> str:
        return "\n".join(report.summary(top) for report in self.launches)
