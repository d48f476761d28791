"""Runs a kernel on torch tensors: on their GPU and its current stream, or in the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from cute_gemma.jit.arguments import check_arguments
from cute_gemma.jit.compiler import Compiled, compile
from cute_gemma.jit.prepared import PreparedLaunches
from cute_gemma.jit.signature import TensorArg
from cute_gemma.jit.target import resolve_target

BACKENDS = ("cuda", "emulator")


class GpuLauncher:
    """Launches one compiled kernel on GPUs. A call that passes its checks costs a few microseconds of CPU:
    the host code itself compares dtypes, shapes, strides, alignment and devices, and the checks in Python,
    with their messages, run only when it refuses."""

    def __init__(self, compiled: Compiled) -> None:
        self.signature = compiled.signature
        self.function = compiled.gpu_function
        self.compact = tuple(
            index
            for index, arg in enumerate(self.signature)
            if isinstance(arg, TensorArg) and arg.strides is None
        )

    def __call__(self, args: tuple[Any, ...]) -> None:
        try:
            for index in self.compact:  # strides of a compact tensor are not the host code's to check
                if not args[index].is_contiguous():
                    break
            else:
                if len(args) == len(self.signature):
                    self.function(*args)
                    return
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            if "CUDA" in type(error).__name__ or "CUDA" in str(error):
                raise
        # This raises the error that names the argument, or mends what may differ.
        self.function(*check_arguments(self.signature, args))


_gpu_launchers: dict[tuple[Any, int, str | None], GpuLauncher] = {}


def launch(
    kernel: Any,
    *args: Any,
    target: str | None = None,
    backend: str | None = None,
    stream: Any = None,
    emulation: Any = None,
) -> list[Any] | None:
    """Runs `kernel` on tensors and scalars in the order of `kernel.signature()`, outputs among them.

    target: "sm_100a", ...; None takes the one of the tensors' GPU, and for CPU tensors the emulated default.
    backend: "cuda" or "emulator"; None follows the tensors' device.
    stream: a torch.cuda.Stream or raw handle; None is the current stream of the tensors' device.
    emulation: options of the emulator, `cute_gemma.emulator.Options`.

    On a GPU it returns None at once: no synchronisation, no allocation, so that it can be captured in a CUDA
    graph (the first call compiles and loads, so call once before capturing). In the emulator it returns a
    list of LaunchReport, one for each device kernel, once all have run.

    Raises TypeError or ValueError naming the argument, what came and what is wanted; UnsupportedTargetError
    for a GPU or target without kernels; in the emulator what `cute_gemma.emulator` raises on a fault.
    """
    device = _device_of(args)
    if backend is None:
        backend = "cuda" if device is not None and device.type == "cuda" else "emulator"
    if backend == "cuda":
        if emulation is not None:
            raise ValueError("emulation: given for backend 'cuda', expected None")
        _launch_on_gpu(kernel, args, target, stream, device)
        return None
    if backend != "emulator":
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)} or None")
    if device is not None and device.type != "cpu":
        raise ValueError(f"backend 'emulator' runs on CPU tensors, got tensors on {device}")
    if stream is not None:
        raise ValueError("stream: given for backend 'emulator', expected None")
    return _launch_in_emulator(compile(kernel, resolve_target(target).name), args, emulation)


def bind(kernel: Any, *args: Any, target: str | None = None) -> Callable[[], None]:
    """What launches `kernel` on a GPU with these arguments, all checked and compiled now, on the stream that is
    current at each call. It stays with the memory that the tensors have now.

    Raises what `launch` does for wrong arguments, devices and targets.
    """
    import torch

    checked = check_arguments(kernel.signature(), args)
    device = _device_of(args)
    resolved = resolve_target(target, device)
    _check_cuda(device)
    launches = PreparedLaunches.bound(compile(kernel, resolved.name), checked, device.index)
    return lambda: launches.run(torch._C._cuda_getCurrentRawStream(device.index))


def _device_of(args: tuple[Any, ...]) -> Any:
    for arg in args:
        device = getattr(arg, "device", None)
        if device is not None:
            return device
    return None


def _check_cuda(device: Any) -> None:
    if device is None or device.type != "cuda":
        raise ValueError(
            f"backend 'cuda' runs on CUDA tensors, got {'no tensor' if device is None else device}"
        )


def _launch_on_gpu(kernel: Any, args: tuple[Any, ...], target: str | None, stream: Any, device: Any) -> None:
    _check_cuda(device)
    key = (kernel, device.index, target)
    launcher = _gpu_launchers.get(key)
    if launcher is None:
        check_arguments(kernel.signature(), args)
        compiled = compile(kernel, resolve_target(target, device).name)
        launcher = _gpu_launchers.setdefault(key, GpuLauncher(compiled))
    if stream is None:
        launcher(args)
        return
    with _on_stream(stream, device):
        launcher(args)


def _on_stream(stream: Any, device: Any) -> contextlib.AbstractContextManager:
    import torch

    if not isinstance(stream, torch.cuda.Stream):
        stream = torch.cuda.ExternalStream(stream, device)
    return torch.cuda.stream(stream)


def _launch_in_emulator(compiled: Compiled, args: tuple[Any, ...], emulation: Any) -> list[Any]:
    from cute_gemma import emulator

    checked = check_arguments(compiled.signature, args)
    return emulator.run_host_code(compiled.host_code, checked, options=emulation)
