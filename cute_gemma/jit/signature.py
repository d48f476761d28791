"""What a kernel takes: one argument description per parameter of its host entry, in order.

A kernel's `signature()` returns a tuple of these. They are plain data: the launcher checks real tensors
against them and builds the fake tensors a kernel is compiled with from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Signature dtype -> bytes an element takes.
ITEMSIZE = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8, "u8": 1}
SCALAR_DTYPES = ("f32", "i32", "i64")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")


@dataclass(frozen=True)
class TensorArg:
    """A tensor parameter.

    name: the name used in error messages.
    dtype: one of "bf16", "f16", "f32", "i32", "i64", "u8".
    shape: an int is a fixed extent, a str names a dynamic one; equal names must have equal values within one
        call.
    align: bytes the address of the first element is a multiple of.
    strides: None for compact row-major; otherwise one entry per dimension, in elements, int or str. A dynamic
        stride is a multiple of `align // itemsize` elements, unless it belongs to the innermost dimension, so
        that every row starts aligned.

    Raises ValueError for a dtype, alignment, rank or symbol that cannot be meant.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    align: int = 16
    strides: tuple[int | str, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"{self.name}: dtype {self.dtype!r}, expected one of {sorted(ITEMSIZE)}")
        if self.align < ITEMSIZE[self.dtype] or self.align & (self.align - 1):
            raise ValueError(
                f"{self.name}: align {self.align}, expected a power of two of at least the "
                f"{ITEMSIZE[self.dtype]} bytes of one {self.dtype}"
            )
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise ValueError(f"{self.name}: {len(self.strides)} strides for {len(self.shape)} dimensions")
        for what, entries in (("extent", self.shape), ("stride", self.strides or ())):
            for entry in entries:
                valid = (
                    _NAME.match(entry) if isinstance(entry, str) else isinstance(entry, int) and entry >= 0
                )
                if not valid:
                    raise ValueError(f"{self.name}: {what} {entry!r}, expected an int >= 0 or an identifier")

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the dynamic extents and strides, in order of first use."""
        return tuple(dict.fromkeys(e for e in self.shape + (self.strides or ()) if isinstance(e, str)))


@dataclass(frozen=True)
class ScalarArg:
    """A scalar parameter passed by value. dtype: "f32", "i32" or "i64"."""

    name: str
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in SCALAR_DTYPES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r}, expected one of {list(SCALAR_DTYPES)}")


Signature = tuple[TensorArg | ScalarArg, ...]
