"""Timelines of launches as Chrome trace JSON: a process a CTA, a track a warp, and one each for copies and the
tensor core. One launch follows the other, overlap by programmatic launch left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
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


def write(
    path: str | Path, reports: Sequence[tuple[str, LaunchReport]], roles: dict[str, Iterable[int]] | None = None
) -> None:
    """Writes the traces of launches, each with a label for its CTAs. Raises ValueError where one has none."""
    role_of = {warp: role for role, warps in (roles or {}).items() for warp in warps}
    events, first, begin = [], 0, 0
    for label, report in reports:
        if report.trace is None or not len(report.trace):
            raise ValueError("trace: no events were recorded; launch with Options(trace=...)")
        events += _events(report, role_of, label, first, begin)
        first += math.prod(report.launch.grid)
        begin += int(report.trace["end"].max())
    kernels = ", ".join(report.kernel_name for _, report in reports)
    Path(path).write_text(json.dumps({"traceEvents": events, "otherData": {"kernel": kernels}}))


def _events(
    report: LaunchReport, role_of: dict[int, str], launch: str, first: int, begin: int
) -> Iterator[dict]:
    """Of one launch. first: number of its first CTA; begin: its time 0."""
    tracks = {}
    for start, end, cta, kind, warp, line, _ in report.trace.tolist():
        track, label = _SHARED_TRACKS.get(kind, (warp, f"warp {warp} {role_of.get(warp, '')}".strip()))
        tracks[cta, track] = label
        text = (report.program.text(line) or "") if line else ""
        opcode = text.split()[0] if text and kind != 0 else ""
        arguments = {"line": line, "ptx": text, "warp": warp}
        if source := report.program.source_of(line) if line else None:
            arguments["source"] = source
        event = {"name": f"{_KINDS[kind]} {opcode}".strip(), "cat": _KINDS[kind], "ph": "X"}
        times = {"ts": begin + start, "dur": end - start}
        yield event | times | {"pid": first + cta, "tid": track, "args": arguments}
    grid = report.launch.grid
    for cta in sorted({cta for cta, _ in tracks}):
        place = (cta % grid[0], cta // grid[0] % grid[1], cta // (grid[0] * grid[1]))
        name = f"{launch} CTA {place}".strip()
        yield {"name": "process_name", "ph": "M", "pid": first + cta, "args": {"name": name}}
    for (cta, track), label in sorted(tracks.items()):
        yield {"name": "thread_name", "ph": "M", "pid": first + cta, "tid": track, "args": {"name": label}}
