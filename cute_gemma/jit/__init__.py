"""Compiles kernels, keeps them, and launches them on torch tensors."""

from cute_gemma.jit.compiler import Compiled, ToolchainWarning, compile
from cute_gemma.jit.inspection import DisassemblerNotFoundError, KernelReport, inspect
from cute_gemma.jit.launcher import bind, launch
from cute_gemma.jit.prepared import PreparedLaunches
from cute_gemma.jit.signature import ScalarArg, TensorArg
from cute_gemma.jit.target import TARGETS, Target, UnsupportedTargetError, resolve_target

__all__ = [
    "TARGETS",
    "Compiled",
    "DisassemblerNotFoundError",
    "KernelReport",
    "PreparedLaunches",
    "ScalarArg",
    "Target",
    "TensorArg",
    "ToolchainWarning",
    "UnsupportedTargetError",
    "bind",
    "compile",
    "inspect",
    "launch",
    "resolve_target",
]
