"""Runs compiled CuTe DSL kernels on the CPU, by executing their PTX.

    compiled = emulator.compile(host_function, a, b, c, target="sm_100a")
    report = emulator.emulate(compiled, a, b, c)          # CPU tensors; results appear in them
    print(report.summary())

The compiled function's own host code runs; each launch it makes is executed warp by warp, with shared memory,
tensor memory, barriers, TMA and tensor cores, and checked: races, missing waits and fences, out-of-bounds
accesses, deadlocks. A fault raises a subclass of `EmulationError` that names the instruction, CTA and warp.
"""

from .capture import CaptureError, capture_launches, compile
from .engine import Options, Region, emulate, run_host_code, run_launch, stream
from .errors import (
    AsyncRegisterError,
    BarrierError,
    DeadlockError,
    DescriptorError,
    DivergenceError,
    EmulationError,
    IllegalInstruction,
    LeakError,
    MemoryFault,
    MisalignedAccess,
    ProgrammaticLaunchError,
    ProxyFenceError,
    PtxSyntaxError,
    RaceError,
    TensorMemoryError,
    UninitialisedRead,
    UnsupportedInstruction,
)
from .launch import Launch, LaunchError
from .report import LaunchReport, Report

__all__ = [
    "AsyncRegisterError", "BarrierError", "CaptureError", "DeadlockError", "DescriptorError",
    "DivergenceError", "EmulationError", "IllegalInstruction", "Launch", "LaunchError", "LaunchReport",
    "LeakError", "MemoryFault", "MisalignedAccess", "Options", "ProgrammaticLaunchError", "ProxyFenceError",
    "PtxSyntaxError", "RaceError", "Region", "Report", "TensorMemoryError", "UninitialisedRead",
    "UnsupportedInstruction", "capture_launches", "compile", "emulate", "run_host_code", "run_launch",
    "stream",
]  # fmt: skip
