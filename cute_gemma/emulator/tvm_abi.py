"""TVM-FFI's calling convention in ctypes (tvm/ffi/c_api.h, dlpack.h)."""

from __future__ import annotations

import ctypes

# TVMFFITypeIndex and DLDeviceType.
ANY_NONE, ANY_INT, ANY_BOOL, ANY_FLOAT, ANY_DLTENSOR, ANY_ARRAY = 0, 1, 2, 3, 7, 71
DEVICE_CUDA = 2
OBJECT_HEADER = 24  # bytes of a TVMFFIObject
# torch dtype -> DLDataType code and bits.
DLPACK_DTYPES = {
    "bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bool": (6, 8),
    "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8),
    "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8),
}  # fmt: skip


class DLTensor(ctypes.Structure):
    """DLTensor (DLPack), with its DLDevice and DLDataType members spelt out."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def dltensor(tensor: object) -> DLTensor:
    """That of a tvm_ffi.Tensor, in place: it follows the object's header. It does not keep the tensor."""
    return DLTensor.from_address(tensor.__chandle__() + OBJECT_HEADER)


class AnyValue(ctypes.Union):
    """The value of an `Any`."""

    _fields_ = [("v_int64", ctypes.c_int64), ("v_float64", ctypes.c_double), ("v_ptr", ctypes.c_void_p)]


class Any(ctypes.Structure):
    """TVMFFIAny: a tagged value."""

    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", AnyValue)]
