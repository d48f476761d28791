"""Launches on a GPU whose arguments are laid out beforehand: a call only fills in addresses.

Handing a torch.Tensor to a compiled kernel costs its conversion, and a reshaped one the view besides. Where
shapes are known and checked already, the TVM-FFI tensors of all arguments are made once, and a launch passes them
on as they are. The host code compares them with what the kernel was compiled for, as in any other call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from cute_gemma.emulator import tvm_abi
from cute_gemma.jit.arguments import compact_strides


class PreparedLaunches:
    """Launches of compiled kernels, in order, on compact tensors of known dtypes and shapes.

    tensors: (torch dtype, shape) of each. launches: for each a Compiled and the numbers of its arguments in
    `tensors`. device: the GPU's index. One thread at a time may use it.

    addresses: addresses[i].value is that of tensor i, and has to be set before `run`.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[Any, tuple[int, ...]]],
        launches: Sequence[tuple[Any, Sequence[int]]],
        device: int,
    ) -> None:
        import tvm_ffi

        self._stream, self._use_stream = tvm_ffi.get_raw_stream, tvm_ffi.use_raw_stream
        self._device = tvm_ffi.device("cuda", device)
        self._shapes: list[ctypes.Array] = []  # what the tensors point to
        self._tensors = [self._describe(dtype, shape, device) for dtype, shape in tensors]
        self.addresses = [
            ctypes.c_void_p.from_address(ctypes.addressof(tvm_abi.dltensor(tensor))) for tensor in self._tensors
        ]
        self._calls = [gpu_call(compiled, [self._tensors[i] for i in numbers]) for compiled, numbers in launches]

    def run(self, stream: int) -> None:
        """Makes every launch on a stream, given by its handle.

        Raises what the host code raises; the launches before have been made then.
        """
        # The host code asks TVM-FFI for the stream: thread-local, and mostly right already.
        if self._stream(self._device) == stream:
            for call in self._calls:
                call()
        else:
            with self._use_stream(self._device, stream):
                for call in self._calls:
                    call()

    @classmethod
    def bound(cls, compiled: Any, arguments: Sequence[Any], device: int) -> PreparedLaunches:
        """One launch with these arguments, torch tensors of any strides among them, which it keeps."""
        import tvm_ffi

        launches = cls((), (), device)
        converted = [tvm_ffi.from_dlpack(x) if hasattr(x, "data_ptr") else x for x in arguments]
        launches._calls.append(gpu_call(compiled, converted))
        return launches

    def _describe(self, dtype: Any, shape: tuple[int, ...], device: int) -> Any:
        """A TVM-FFI tensor without memory."""
        import torch
        import tvm_ffi

        tensor = tvm_ffi.from_dlpack(torch.empty(0, device="cpu"))  # all of which is overwritten
        extents = ctypes.c_int64 * len(shape)
        arrays = extents(*shape), extents(*compact_strides(shape))
        self._shapes += arrays
        code, bits = tvm_abi.DLPACK_DTYPES[str(dtype).removeprefix("torch.")]
        described = tvm_abi.dltensor(tensor)
        described.__init__(None, tvm_abi.DEVICE_CUDA, device, len(shape), code, bits, 1, *arrays, 0)
        return tensor


def gpu_call(compiled: Any, arguments: Sequence[Any]) -> Callable[[], None]:
    """The call of a compiled kernel's host code on TVM-FFI tensors and scalars."""
    return functools.partial(compiled.gpu_function, *arguments)
