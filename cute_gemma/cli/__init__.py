"""cute-gemma run | verify | inspect."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import inspecting, verifying


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="cute-gemma", description="Gemma attention kernels, run and checked.")
    commands = top.add_subparsers(dest="command", required=True, metavar="{run,verify,inspect}")
    verifying.add_commands(commands)
    inspecting.add_commands(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0 for success, 1 for a failed result or launch; misuse exits with 2."""
    options = parser().parse_args(arguments)
    try:
        return options.action(options)
    except (ValueError, TypeError, RuntimeError) as error:
        if options.traceback:
            raise
        print(f"cute-gemma {options.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
