"""Checks of what users pass. Every failure names the argument, what came and what is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

# TMA global addresses and vector accesses (PTX ISA, tensor map: a multiple of 16 bytes).
ALIGNMENT = 16

Shape = tuple[int | str, ...]


def _join(items: tuple) -> str:
    return " or ".join(str(item) for item in items)


def _format(shape: Shape) -> str:
    return f"({', '.join(str(extent) for extent in shape)}{',' if len(shape) == 1 else ''})"


def check_tensor(
    name: str,
    value: object,
    shape: Shape,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    device: torch.device | None = None,
    align: int = ALIGNMENT,
) -> Tensor:
    """`value`, if it is a dense row-major tensor of that shape, dtype and device.

    shape: an int is a required extent; a string names an extent that may be anything from 1. device: None
    accepts any CPU or CUDA device. align: bytes that the address has to be a multiple of.

    Raises TypeError for what is no tensor or has another dtype, ValueError for all else.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, want a torch.Tensor")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: got layout {value.layout}, want {torch.strided}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {value.dtype}, want {_join(dtypes)}")
    fits = value.dim() == len(shape) and all(
        have >= 1 if isinstance(want, str) else have == want
        for have, want in zip(value.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: got shape {_format(tuple(value.shape))}, want {_format(shape)}, none of it 0"
        )
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: got a tensor on {value.device}, want one on the CPU or a CUDA device")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: got a tensor on {value.device}, want {device}, where the first input lies")
    if not value.is_contiguous():
        raise ValueError(
            f"{name}: got strides {tuple(value.stride())} for shape {_format(tuple(value.shape))}, "
            "want a contiguous tensor; call .contiguous()"
        )
    if value.data_ptr() % align:
        raise ValueError(
            f"{name}: got address {value.data_ptr():#x}, want a multiple of {align} bytes; call .clone()"
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: got a tensor that requires grad, want none: the result carries no gradient; "
            "call under torch.no_grad()"
        )
    return value


def check_mask(name: str, mask: object, batch: int, seq: int, device: torch.device) -> Tensor | str | None:
    """An additive mask [batch or 1, 1, seq, seq], bfloat16 or float32, "causal" or None.

    A mask that is expanded over the batch (stride 0) comes back as its one batch entry.
    """
    if mask is None:
        return None
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"{name}: got {mask!r}, want an additive tensor, 'causal' or None")
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: got {type(mask).__name__}, want an additive torch.Tensor, 'causal' or None")
    if mask.dim() != 4 or mask.shape[0] not in (1, batch):
        wanted = _format((f"{batch} or 1" if batch > 1 else 1, 1, seq, seq))
        raise ValueError(f"{name}: got shape {_format(tuple(mask.shape))}, want {wanted}")
    if mask.shape[0] > 1 and mask.stride(0) == 0:
        mask = mask[:1]
    dtypes = (torch.bfloat16, torch.float32)
    # The mask is read element by element: its rows start anywhere when seq is odd.
    return check_tensor(name, mask, (mask.shape[0], 1, seq, seq), dtypes, device, align=mask.element_size())


def check_heads(name: str, weight: Tensor, head_dim: int) -> int:
    """The number of heads in a projection weight [heads * head_dim, C]."""
    rows = weight.shape[0]
    if rows % head_dim:
        raise ValueError(f"{name}: got {rows} rows, want a multiple of head_dim ({head_dim})")
    return rows // head_dim
