"""Sizes and constants of one attention layer, and presets for the Gemma 2 and 3 family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

# An additive mask entry at or below this value, half of bfloat16's lowest finite number, counts as masked.
# A query row that holds only such entries attends to nothing and yields zeros.
MASKED_AT_OR_BELOW = -(2.0 - 2.0**-7) * 2.0**126

MAX_HEAD_DIM = 256
# TMA global strides are multiples of 16 bytes (PTX ISA, tensor map), which is 8 bf16 elements.
ROW_MULTIPLE = 8


@dataclass(frozen=True)
class AttentionConfig:
    """What stays the same for every batch and sequence length of one attention layer.

    hidden: width C of the hidden states, a multiple of 8.
    heads, kv_heads: H query and KV key/value heads; KV divides H, query head h reads kv head h // (H / KV).
    head_dim: D, a multiple of 16 up to 256.
    softcap: logits become softcap * tanh(logits / softcap); None leaves them uncapped.
    eps: added to the mean square in RMSNorm.
    qk_norm: whether q and k pass through RMSNorm with weight (1 + w).
    scale: factor of q k^T; None means head_dim ** -0.5, and the attribute always holds the number.
    window: with causal masking, a query attends to itself and the window - 1 keys before it; None: to all.

    Raises TypeError or ValueError that names the field, what came and what is wanted.
    """

    hidden: int = 3072
    heads: int = 24
    kv_heads: int = 8
    head_dim: int = 128
    softcap: float | None = 50.0
    eps: float = 1e-6
    qk_norm: bool = True
    scale: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "kv_heads", "head_dim"):
            _require_positive_int(name, getattr(self, name))
        if self.hidden % ROW_MULTIPLE:
            raise ValueError(
                f"hidden: got {self.hidden}, want a multiple of {ROW_MULTIPLE} (16-byte rows for TMA)"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, want a divisor of heads ({self.heads})")
        if self.head_dim % 16 or self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim: got {self.head_dim}, want a multiple of 16 up to {MAX_HEAD_DIM}")
        if not isinstance(self.qk_norm, bool):
            raise TypeError(f"qk_norm: got {self.qk_norm!r}, want True or False")
        if self.window is not None:
            _require_positive_int("window", self.window)
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        # Stored as floats, so that equal configurations written as 50 and 50.0 print and hash alike.
        object.__setattr__(self, "scale", require_positive("scale", self.scale))
        object.__setattr__(self, "eps", require_positive("eps", self.eps))
        if self.softcap is not None:
            object.__setattr__(self, "softcap", require_positive("softcap", self.softcap))

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def q_width(self) -> int:
        """Columns of the query projection, heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


def require_positive(name: str, value: object) -> float:
    """`value` as a float if it is a finite number above zero; else TypeError or ValueError naming `name`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {type(value).__name__} {value!r}, want a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: got {value!r}, want a finite number above 0")
    return float(value)


def _require_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__} {value!r}, want an int")
    if value < 1:
        raise ValueError(f"{name}: got {value}, want at least 1")


@dataclass(frozen=True)
class _Model:
    """Attention facts of a released checkpoint's text model, in the terms of its Hugging Face config.json."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    query_pre_attn_scalar: int
    sliding_window: int
    softcap: float | None
    qk_norm: bool


def _gemma2(hidden: int, heads: int, kv_heads: int, head_dim: int, scalar: int) -> _Model:
    return _Model(hidden, heads, kv_heads, head_dim, scalar, 4096, softcap=50.0, qk_norm=False)


def _gemma3(hidden: int, heads: int, kv_heads: int, head_dim: int, scalar: int, window: int) -> _Model:
    return _Model(hidden, heads, kv_heads, head_dim, scalar, window, softcap=None, qk_norm=True)


_MODELS = {
    "gemma2-2b": _gemma2(2304, 8, 4, 256, 256),
    "gemma2-9b": _gemma2(3584, 16, 8, 256, 256),
    "gemma2-27b": _gemma2(4608, 32, 16, 128, 144),
    "gemma3-270m": _gemma3(640, 4, 1, 256, 256, 512),
    "gemma3-1b": _gemma3(1152, 4, 1, 256, 256, 512),
    "gemma3-4b": _gemma3(2560, 8, 4, 256, 256, 1024),
    "gemma3-12b": _gemma3(3840, 16, 8, 256, 256, 1024),
    "gemma3-27b": _gemma3(5376, 32, 16, 128, 168, 1024),
}


def _preset(model: _Model, window: int | None) -> AttentionConfig:
    return AttentionConfig(
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        softcap=model.softcap,
        qk_norm=model.qk_norm,
        scale=model.query_pre_attn_scalar**-0.5,
        window=window,
    )


# The suite workloads by number; a model's global layers by name, its sliding-window layers as NAME-local.
PRESETS = MappingProxyType(
    {
        "047": AttentionConfig(),
        "051": AttentionConfig(hidden=640, heads=4, kv_heads=1, head_dim=256, softcap=None),
        **{name: _preset(model, None) for name, model in _MODELS.items()},
        **{f"{name}-local": _preset(model, model.sliding_window) for name, model in _MODELS.items()},
    }
)


def preset(name: str) -> AttentionConfig:
    """The configuration called `name` in PRESETS; ValueError lists the names where there is none."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"preset: got {name!r}, want one of {', '.join(PRESETS)}") from None
