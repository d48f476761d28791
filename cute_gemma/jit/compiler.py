"""Compiles a kernel once for a target, for every size its signature leaves open, and keeps the result.

One object file serves both ways to run: loaded on a GPU machine it launches on the current stream, and linked
with the launch capture of the emulator it runs on any machine. Its TVM-FFI entry makes a warm call cheap.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cute_gemma.emulator.build import write_atomically
from cute_gemma.emulator.capture import HostCode, export_object
from cute_gemma.emulator.capture import compile as compile_keeping_ptx
from cute_gemma.emulator.launch import entry_names
from cute_gemma.jit.cache import Entry, cache_key, describe, disk_cache_enabled
from cute_gemma.jit.signature import ScalarArg, Signature, TensorArg
from cute_gemma.jit.target import Target, resolve_target

# The entry's name inside the object file; one object is one library, so it can be the same for all.
_FUNCTION = "cute_gemma_kernel"
_ENTRY = f"__tvm_ffi_{_FUNCTION}"
_OBJECT, _PTX, _CUBIN = "host.o", "kernel.ptx", "kernel.cubin"
# Source lines cost nothing at run time (the machine code is the same); the emulator's reports name them.
_OPTIONS = "--enable-tvm-ffi --generate-line-info"
# PTX and ptxas of CUDA 13, whose tcgen05 code the kernels are verified with.
_WANTED_CUDA_MAJOR = 13


class ToolchainWarning(RuntimeWarning):
    """Kernels were compiled by another CUDA toolchain than the one they are verified with."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled kernel. ptx: the module's text. cubin: what a GPU loads, as embedded in the object file."""

    kernel: Any
    target: Target
    signature: Signature
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    object_code: bytes = field(repr=False)
    folder: Path | None = field(default=None, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """The device kernels of the module."""
        return entry_names(self.ptx)

    @property
    def ptxas_version(self) -> tuple[int, int]:
        """Version of the assembler that made the cubin."""
        return ptxas_version(self.cubin)

    @functools.cached_property
    def host_code(self) -> HostCode:
        """The host code, linked for launch capture.

        Raises CompilerNotFoundError without a C compiler.
        """
        with self._lock:
            return HostCode(self.object_code, self.ptx, entry=_ENTRY)

    @functools.cached_property
    def gpu_function(self) -> Callable[..., Any]:
        """The function that launches on the GPU of its tensors and the current stream."""
        with self._lock, contextlib.ExitStack() as stack:
            import cutlass.cute as cute

            folder = self.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            path = folder / _OBJECT
            if not path.exists():
                write_atomically(path, self.object_code)
            module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
            object.__setattr__(self, "_module", module)  # owns the loaded code
            return getattr(module, _FUNCTION)


_memory: dict[tuple[Any, str, str], Compiled] = {}
_memory_lock = threading.Lock()
# cute.compile traces through process-wide state.
_compile_lock = threading.RLock()


def compile(kernel: Any, target: str | None = None, *, options: str = "") -> Compiled:  # noqa: A001
    """Compiles `kernel`, a frozen dataclass with `signature()` and a `@cute.jit` host entry, for `target`
    (default: the emulated one), or takes it from memory or disk.

    options: further command-line style options of the compiler, such as "--opt-level 2".

    Raises UnsupportedTargetError for an unknown target, TypeError for a kernel field without a stable
    description, and what the compiler raises.
    """
    resolved = resolve_target(target)
    key = (kernel, resolved.name, options)
    found = _memory.get(key)
    if found is None:
        found = _load_or_compile(kernel, resolved, options)
        with _memory_lock:
            found = _memory.setdefault(key, found)
    return found


def forget() -> None:
    """Drops every compiled kernel from memory; the disk cache stays."""
    with _memory_lock:
        _memory.clear()


def _load_or_compile(kernel: Any, target: Target, options: str) -> Compiled:
    if not disk_cache_enabled():
        return _from_files(kernel, target, _compile(kernel, target, options), None)
    entry = Entry(cache_key(kernel, target.name, options))
    files = entry.load()
    if files is None:
        with entry.lock():
            files = entry.load()
            if files is None:
                files = _compile(kernel, target, options)
                entry.store(files)
    return _from_files(kernel, target, files, entry.folder)


def _from_files(kernel: Any, target: Target, files: dict[str, bytes], folder: Path | None) -> Compiled:
    version = ptxas_version(files[_CUBIN])
    if version[0] < _WANTED_CUDA_MAJOR:
        warnings.warn(
            f"kernels compiled by ptxas {version[0]}.{version[1]}; they are verified with "
            f"{_WANTED_CUDA_MAJOR}.x: install nvidia-cutlass-dsl[cu13] and, for GPUs, a CUDA 13 driver",
            ToolchainWarning,
            stacklevel=4,
        )
    return Compiled(
        kernel=kernel,
        target=target,
        signature=kernel.signature(),
        ptx=files[_PTX].decode(),
        cubin=files[_CUBIN],
        object_code=files[_OBJECT],
        folder=folder,
    )


def _compile(kernel: Any, target: Target, options: str) -> dict[str, bytes]:
    import cutlass.cute as cute

    with _compile_lock:
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        arguments = (*fake_arguments(kernel.signature()), stream)
        compiled = compile_keeping_ptx(
            kernel, *arguments, target=target.name, options=f"{_OPTIONS} {options}"
        )
        object_code, entry, _ = export_object(compiled, _FUNCTION)
    ptx, cubin = compiled.artifacts.PTX, compiled.artifacts.CUBIN
    if entry != _ENTRY:
        raise AssertionError(f"the object's entry is {entry}, expected {_ENTRY}")
    if cubin not in object_code:
        raise AssertionError("the cubin kept by the compiler is not the one in the object file")
    return {
        _OBJECT: object_code,
        _PTX: ptx.encode(),
        _CUBIN: cubin,
        "kernel.txt": f"{describe(kernel)}\n{target.name} {options}\n".encode(),
    }


def ptxas_version(cubin: bytes) -> tuple[int, int]:
    """Version of the assembler a cubin names in its tool note."""
    match = re.search(rb"ptxas\0+Cuda compilation tools, release (\d+)\.(\d+)", cubin)
    if match is None:
        raise ValueError("the cubin does not say which ptxas made it")
    return int(match[1]), int(match[2])


def fake_arguments(signature: Signature) -> list[Any]:
    """Placeholders for the arguments of a signature, as `cute.compile` takes them; a symbol for each name."""
    import cutlass
    import cutlass.cute as cute

    tensor_types = {
        "bf16": cutlass.BFloat16, "f16": cutlass.Float16, "f32": cutlass.Float32, "i32": cutlass.Int32,
        "i64": cutlass.Int64, "u8": cutlass.Uint8,
    }  # fmt: skip
    scalar_types = {"f32": cutlass.Float32, "i32": cutlass.Int32, "i64": cutlass.Int64}
    symbols = _symbols(signature)
    fakes: list[Any] = []
    for arg in signature:
        if isinstance(arg, ScalarArg):
            fakes.append(scalar_types[arg.dtype](0))
            continue
        dtype = tensor_types[arg.dtype]
        shape = tuple(symbols.get(extent, extent) for extent in arg.shape)
        if arg.strides is None:
            order = tuple(reversed(range(len(shape))))
            fake = cute.runtime.make_fake_compact_tensor(
                dtype, shape, stride_order=order, assumed_align=arg.align
            )
        else:
            strides = tuple(symbols.get(stride, stride) for stride in arg.strides)
            fake = cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=arg.align)
        fakes.append(fake)
    return fakes


def _symbols(signature: Signature) -> dict[str, Any]:
    """Extents are 32 bits wide; what serves as a stride is 64, a multiple of what the alignment asks."""
    import cutlass.cute as cute

    extents: set[str] = set()
    divisibility: dict[str, int] = {}
    for arg in signature:
        if not isinstance(arg, TensorArg):
            continue
        extents.update(e for e in arg.shape if isinstance(e, str))
        for axis, stride in enumerate(arg.strides or ()):
            if isinstance(stride, str):
                quantum = arg.align // arg.itemsize if axis < len(arg.shape) - 1 else 1
                divisibility[stride] = max(divisibility.get(stride, 1), quantum)
    symbols = {name: cute.sym_int32(symbol=name) for name in sorted(extents - divisibility.keys())}
    symbols |= {name: cute.sym_int64(divisibility=q, symbol=name) for name, q in sorted(divisibility.items())}
    return symbols
