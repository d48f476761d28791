"""A launch's timeline as Chrome trace JSON: a process a CTA, a track a warp, and one each for copies and the
tensor core."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .report import LaunchReport

# TraceEvent of csrc/emu.h.
TRACE_DTYPE = np.dtype(
    [
        ("start", "<u8"),
        ("end", "<u8"),
        ("cta", "<u4"),
        ("kind", "<u2"),
        ("warp", "<u2"),
        ("line", "<u4"),
        ("unused", "<u4"),
    ]
)
_KINDS = ("run", "wait", "copy", "tensor", "arrive")
_SHARED_TRACKS = {2: (1000, "copies"), 3: (1001, "tensor core"), 4: (1002, "remote arrivals")}


def write(path: str | Path, report: LaunchReport, roles: dict[str, Iterable[int]]) -> None:
    """Writes report.trace. Raises ValueError when it has none."""
    if report.trace is None or not len(report.trace):
        raise ValueError("trace: no events were recorded; launch with Options(trace=...)")
    role_of = {warp: role for role, warps in roles.items() for warp in warps}
    events, tracks = [], {}
    for start, end, cta, kind, warp, line, _ in report.trace.tolist():
        track, label = _SHARED_TRACKS.get(kind, (warp, f"warp {warp} {role_of.get(warp, '')}".strip()))
        tracks[cta, track] = label
        text = (report.program.text(line) or "") if line else ""
        opcode = text.split()[0] if text and kind != 0 else ""
        arguments = {"line": line, "ptx": text, "warp": warp}
        if source := report.program.source_of(line) if line else None:
            arguments["source"] = source
        event = {"name": f"{_KINDS[kind]} {opcode}".strip(), "cat": _KINDS[kind], "ph": "X"}
        events.append(event | {"ts": start, "dur": end - start, "pid": cta, "tid": track, "args": arguments})
    grid = report.launch.grid
    for cta in sorted({cta for cta, _ in tracks}):
        place = (cta % grid[0], cta // grid[0] % grid[1], cta // (grid[0] * grid[1]))
        events.append({"name": "process_name", "ph": "M", "pid": cta, "args": {"name": f"CTA {place}"}})
    for (cta, track), label in sorted(tracks.items()):
        events.append({"name": "thread_name", "ph": "M", "pid": cta, "tid": track, "args": {"name": label}})
    Path(path).write_text(json.dumps({"traceEvents": events, "otherData": {"kernel": report.kernel_name}}))
