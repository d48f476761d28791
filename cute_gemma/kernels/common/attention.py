"""What the attention kernels of all architectures share: the problem, its arguments and its host entry.

A kernel class derives from `AttentionBase`, checks its tuning in __post_init__, and has a `launch`; with
`MaskTensor` in front it takes a mask.
"""

import math
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from cute_gemma.jit.signature import Signature, TensorArg
from cute_gemma.kernels.common.mask_scan import mask_arguments
from cute_gemma.kernels.common.softcap import FIXED_SHIFT_CAP


@dataclass(frozen=True)
class AttentionBase:
    """heads, kv_heads, head_dim: H, KV, D (64, 128 or 256). scale: factor of q k^T. softcap: cap of the
    logits, None for none. mask: "causal", "none", or "tensor" with `MaskTensor`. window: with "causal", a row
    reads itself and the window - 1 keys before it; None for all before it. tuning: None for the
    architecture's default."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    mask: str = "causal"
    window: int | None = None
    tuning: Any = None

    def __post_init__(self) -> None:
        if self.head_dim not in (64, 128, 256):
            raise ValueError(f"head_dim: got {self.head_dim}, want 64, 128 or 256")
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, want a divisor of heads ({self.heads})")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale: got {self.scale}, want a finite number above 0")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap: got {self.softcap}, want None or a finite number above 0")
        if self.mask not in ("causal", "none", "tensor"):
            raise ValueError(f'mask: got {self.mask!r}, want "causal", "none" or "tensor"')
        if self.window is not None and (self.mask != "causal" or self.window < 1):
            got = f"{self.window} with mask {self.mask!r}"
            raise ValueError(f'window: got {got}, want at least 1, with "causal"')

    @property
    def fixed_shift(self) -> bool:
        """Whether the cap alone bounds the exponents, so that no running maximum is needed."""
        return self.softcap is not None and self.softcap <= FIXED_SHIFT_CAP

    def signature(self) -> Signature:
        """q, k, v, out; every batch and length shares one compilation."""
        q = ("b", "s", self.heads, self.head_dim)
        kv = ("b", "s", self.kv_heads, self.head_dim)
        return (
            TensorArg("q", "bf16", q),
            TensorArg("k", "bf16", kv),
            TensorArg("v", "bf16", kv),
            TensorArg("out", "bf16", q),
        )

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream
    ):
        self.launch(q, k, v, out, None, stream)


@dataclass(frozen=True)
class MaskTensor:
    """Attention under an additive mask (B or 1, 1, S, S), bf16 or fp32, which `MaskScan` has looked through.

    row_max, classes: as `MaskScan` writes them.
    """

    mask: str = "tensor"
    mask_dtype: str = "bf16"

    def signature(self) -> Signature:
        q, k, v, out = super().signature()
        return (q, k, v, *mask_arguments(self.mask_dtype), out)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        mask: cute.Tensor,
        row_max: cute.Tensor,
        classes: cute.Tensor,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ):
        self.launch(q, k, v, out, (mask, row_max, classes), stream)


def reorder(t: cute.Tensor, order: tuple[int, int, int, int]) -> cute.Tensor:
    """(B, S, H, D) with its modes in another order, the last two as one: (1, 3, 2, 0) makes it
    (S, D, (H, B)), the modes of a tile first, as tiled TMA wants them."""
    shape, stride = ([x[i] for i in order] for x in (t.shape, t.stride))
    shape, stride = ((*x[:2], tuple(x[2:])) for x in (shape, stride))
    return cute.make_tensor(t.iterator, cute.make_layout(shape, stride=stride))
