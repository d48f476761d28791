"""Launches on a GPU whose arguments are laid out beforehand: a call only fills in addresses.

Handing a torch.Tensor to a compiled kernel costs its conversion, and a reshaped one the view besides. Where
shapes are known and checked already, the DLTensors of all arguments are made once, and the host code is called
through TVM-FFI's C interface. It compares them with what the kernel was compiled for, as in any other call.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from cute_gemma.emulator import tvm_abi
from cute_gemma.jit.arguments import compact_strides

_WORDS = ctypes.sizeof(tvm_abi.DLTensor) // 8  # DLTensor.data is its first 8 bytes


class PreparedLaunches:
    """Launches of compiled kernels, in order, on compact tensors of known dtypes and shapes.

    tensors: (torch dtype, shape) of each. launches: for each a Compiled and the numbers of its arguments in
    `tensors`. device: the GPU's index. One thread at a time may use it.

    addresses: 64-bit words; that of tensor i is at `place(i)` and has to be set before `run`.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[Any, tuple[int, ...]]],
        launches: Sequence[tuple[Any, Sequence[int]]],
        device: int,
    ) -> None:
        self._device = device
        self._shapes = []  # what the DLTensors point to
        self._tensors = (tvm_abi.DLTensor * len(tensors))()
        for tensor, (dtype, shape) in zip(self._tensors, tensors):
            extents = ctypes.c_int64 * len(shape)
            shape, strides = extents(*shape), extents(*compact_strides(shape))
            self._shapes += [shape, strides]
            code, bits = tvm_abi.DLPACK_DTYPES[str(dtype).removeprefix("torch.")]
            tensor.__init__(None, tvm_abi.DEVICE_CUDA, device, len(shape), code, bits, 1, shape, strides, 0)
        self.addresses = memoryview(self._tensors).cast("B").cast("Q")
        self._compiled = [compiled for compiled, _ in launches]  # owns the code
        self._packed = [self._pack(arguments) for _, arguments in launches]
        self._calls = [gpu_call(c, packed) for c, packed in zip(self._compiled, self._packed)]

    @staticmethod
    def place(tensor: int) -> int:
        """Where in `addresses` that of a tensor goes."""
        return tensor * _WORDS

    def run(self, stream: int) -> None:
        """Makes every launch on a stream, given by its handle.

        Raises what the host code raises; the launches before have been made then.
        """
        library = _library()
        # The host code asks TVM-FFI for the stream: thread-local, and mostly right already.
        before = library.TVMFFIEnvGetStream(tvm_abi.DEVICE_CUDA, self._device) or 0
        if before != stream:
            library.TVMFFIEnvSetStream(tvm_abi.DEVICE_CUDA, self._device, stream, None)
        try:
            for call in self._calls:
                if call():
                    _raise_error()
        finally:
            if before != stream:
                library.TVMFFIEnvSetStream(tvm_abi.DEVICE_CUDA, self._device, before, None)

    def _pack(self, arguments: Sequence[int]) -> ctypes.Array:
        packed = (tvm_abi.Any * len(arguments))()
        for entry, tensor in zip(packed, arguments):
            entry.type_index = tvm_abi.ANY_DLTENSOR
            entry.value.v_ptr = ctypes.addressof(self._tensors[tensor])
        return packed


def gpu_call(compiled: Any, packed: ctypes.Array) -> Callable[[], int]:
    """The call of a compiled kernel's host code on packed arguments; it returns 0, or else has set an error."""
    function = ctypes.c_void_p(compiled.gpu_function.__chandle__())
    result = ctypes.pointer(tvm_abi.Any())
    return functools.partial(_library().TVMFFIFunctionCall, function, packed, len(packed), result)


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    import tvm_ffi

    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    address, integer = ctypes.c_void_p, ctypes.c_int32
    library.TVMFFIFunctionCall.argtypes = [address, address, integer, address]
    library.TVMFFIEnvGetStream.argtypes = [integer, integer]
    library.TVMFFIEnvGetStream.restype = address
    library.TVMFFIEnvSetStream.argtypes = [integer, integer, address, address]
    library.TVMFFIErrorMoveFromRaised.argtypes = [address]
    library.TVMFFIErrorMoveFromRaised.restype = None
    library.TVMFFIObjectDecRef.argtypes = [address]
    return library


def _raise_error() -> None:
    """Raises the error that a call has set."""
    error = ctypes.c_void_p()
    _library().TVMFFIErrorMoveFromRaised(ctypes.byref(error))
    # The object's header, then TVMFFIErrorCell: kind and message, each a pointer and a size.
    texts = (ctypes.c_uint64 * 4).from_address(error.value + tvm_abi.OBJECT_HEADER)
    kind, message = (ctypes.string_at(texts[i], texts[i + 1]).decode(errors="replace") for i in (0, 2))
    _library().TVMFFIObjectDecRef(error)
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        raise known(message)
    raise RuntimeError(f"{kind}: {message}")
