"""What a workload's launches move, counted in the emulator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .common import table

if TYPE_CHECKING:
    from torch import Tensor

    from ..plans import Plan

SECTOR_BYTES = 32  # the unit of global memory access (CUDA C++ Best Practices Guide, coalesced access)


def describe_traffic(plan: Plan, inputs: Iterable[Tensor]) -> str:
    """Runs the plan's launches in the emulator: a table of what each moves, and totals against the minimum.

    Global traffic counts each 32-byte sector once a launch, read and written apart; TMA bytes count every
    copy. The minimum is each input and each output once.
    """
    from ..emulator import Options

    # Any schedule moves the same bytes; the eager one is the fastest to emulate.
    launched = plan.run(Options(schedule="eager", hazards=False))
    reports = [(step.stage, report) for step, group in zip(plan.steps, launched) for report in group]
    rows, sectors, raw = [], 0, 0
    for stage, report in reports:
        sectors += report.sectors_read + report.sectors_written
        raw += report.tma_load_bytes + report.tma_store_bytes
        moved = (
            report.sectors_read * SECTOR_BYTES,
            report.sectors_written * SECTOR_BYTES,
            report.tma_load_bytes,
            report.tma_store_bytes,
        )
        rows.append([stage, *(f"{size:,}" for size in moved)])
    outputs = plan.output if isinstance(plan.output, tuple) else (plan.output,)
    least = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
    header = ["stage", "bytes read", "bytes written", "TMA in", "TMA out"]
    return "\n".join(
        [
            table(header, rows, right=range(1, len(header))),
            "",
            f"each input and output once: {least:,} bytes",
            f"global traffic: {sectors * SECTOR_BYTES / least:.3f} x that, TMA bytes: {raw / least:.3f} x",
        ]
    )
