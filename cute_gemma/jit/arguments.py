"""Checks what a caller passes against a kernel's signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_gemma.jit.signature import ScalarArg, Signature, TensorArg

_TORCH_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
}
_INT_RANGES = {"i32": 2**31, "i64": 2**63}
# Dynamic extents reach a kernel as 32-bit integers.
MAX_EXTENT = 2**31 - 1


def check_arguments(signature: Signature, args: Sequence[Any]) -> list[Any]:
    """Checks every argument and returns them ready to pass: detached, compact tensors with row-major strides.

    Raises TypeError for a wrong count, type or dtype, ValueError for a wrong shape, stride, alignment or
    device; the message names the argument, what came and what is wanted.
    """
    if len(args) != len(signature):
        names = ", ".join(arg.name for arg in signature)
        raise TypeError(f"got {len(args)} arguments, expected {len(signature)}: {names}")
    symbols: dict[str, tuple[int, str]] = {}
    device = None
    checked = []
    for spec, value in zip(signature, args):
        if isinstance(spec, ScalarArg):
            checked.append(_check_scalar(spec, value))
            continue
        checked.append(_check_tensor(spec, value, symbols))
        if device is not None and value.device != device[0]:
            raise ValueError(f"{spec.name}: on {value.device}, expected {device[0]} like {device[1]}")
        device = device or (value.device, spec.name)
    return checked


def compact_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _check_scalar(spec: ScalarArg, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float) if spec.dtype == "f32" else int):
        wanted = "a float" if spec.dtype == "f32" else "an int"
        raise TypeError(f"{spec.name}: got {type(value).__name__} {value!r}, expected {wanted}")
    if spec.dtype == "f32":
        return float(value)
    limit = _INT_RANGES[spec.dtype]
    if not -limit <= value < limit:
        raise ValueError(f"{spec.name}: got {value}, expected an integer that fits {spec.dtype}")
    return value


def _check_tensor(spec: TensorArg, value: Any, symbols: dict[str, tuple[int, str]]) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{spec.name}: got {type(value).__name__}, expected a torch.Tensor")
    if str(value.dtype) != f"torch.{_TORCH_DTYPES[spec.dtype]}":
        raise TypeError(f"{spec.name}: dtype {value.dtype}, expected torch.{_TORCH_DTYPES[spec.dtype]}")
    shape = tuple(value.shape)
    if len(shape) != len(spec.shape):
        raise ValueError(
            f"{spec.name}: shape {shape}, expected {len(spec.shape)} dimensions, {_shown(spec.shape)}"
        )
    for axis, (extent, wanted) in enumerate(zip(shape, spec.shape)):
        if extent > MAX_EXTENT:
            raise ValueError(f"{spec.name}: shape {shape}, extent {axis} exceeds {MAX_EXTENT}")
        _match(spec, "shape", shape, axis, extent, wanted, symbols)
    value = value.detach()
    if spec.strides is None:
        if not value.is_contiguous():
            raise ValueError(
                f"{spec.name}: strides {value.stride()}, expected a contiguous tensor of shape {shape}"
            )
        if value.stride() != (strides := compact_strides(shape)):
            # An extent of 1 may carry any stride, and a TMA descriptor holds them all.
            value = value.as_strided(shape, strides)
    else:
        strides = _check_strides(spec, shape, tuple(value.stride()), symbols)
        if strides != value.stride():
            value = value.as_strided(shape, strides)
    if value.data_ptr() % spec.align:
        raise ValueError(
            f"{spec.name}: address {value.data_ptr():#x}, expected a multiple of {spec.align} bytes"
        )
    return value


def _check_strides(
    spec: TensorArg, shape: tuple[int, ...], strides: tuple[int, ...], symbols: dict
) -> tuple[int, ...]:
    """The strides to pass: an extent of 1 never uses its own, so it gets one that the kernel can take."""
    quantum = spec.align // spec.itemsize
    passed = list(strides)
    used = [axis for axis, extent in enumerate(shape) if extent > 1]
    for axis in used:
        _match(spec, "strides", strides, axis, strides[axis], spec.strides[axis], symbols)
    for axis in used:
        if isinstance(spec.strides[axis], str) and axis < len(shape) - 1 and strides[axis] % quantum:
            raise ValueError(
                f"{spec.name}: strides {strides}, expected a multiple of {quantum} at dimension {axis}"
            )
    for axis in set(range(len(shape))).difference(used):
        wanted, row = spec.strides[axis], compact_strides(shape)[axis]
        if isinstance(wanted, str):
            passed[axis] = symbols.setdefault(wanted, (-(-row // quantum) * quantum, spec.name))[0]
        else:
            passed[axis] = wanted
    return tuple(passed)


def _match(
    spec: TensorArg, what: str, came: tuple[int, ...], axis: int, value: int, wanted: int | str, symbols: dict
) -> None:
    if isinstance(wanted, str):
        known, source = symbols.setdefault(wanted, (value, spec.name))
        if known != value:
            raise ValueError(
                f"{spec.name}: {what} {came}, expected {wanted} = {known} at dimension {axis} as in {source}"
            )
    elif value != wanted:
        entries = spec.shape if what == "shape" else spec.strides
        raise ValueError(f"{spec.name}: {what} {came}, expected {_shown(entries)}")


def _shown(entries: tuple[int | str, ...]) -> str:
    return "(" + ", ".join(map(str, entries)) + ("," if len(entries) == 1 else "") + ")"
