"""Options that several commands take, and plain-text tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def positive(text: str) -> int:
    """An argparse type: an int of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, want at least 1")
    return value


def add_common(command: argparse.ArgumentParser) -> None:
    """The workload, --target and --traceback."""
    command.add_argument("workload", help='"047" (attention forward) or "051" (QKV backward)')
    command.add_argument(
        "--target", help="architecture to compile for (default: the device's; emulated: sm_100a)"
    )
    command.add_argument("--traceback", action="store_true", help="show where an error comes from")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns padded to their widest cell; those whose index is in `right` are set flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
