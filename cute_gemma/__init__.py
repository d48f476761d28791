"""Gemma attention kernels for NVIDIA GPUs in CuTe DSL, with a CPU emulator that runs the compiled kernels.

Importing this package loads neither torch nor cutlass; its public names load theirs on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import AttentionConfig, preset
    from .functional import attention, attention_forward
    from .functional_backward import qkv_backward, rope_backward
    from .reference import QKVGradients

__version__ = "0.1.0"

_HOME = {
    "AttentionConfig": "config",
    "preset": "config",
    "attention": "functional",
    "attention_forward": "functional",
    "QKVGradients": "reference",
    "qkv_backward": "functional_backward",
    "rope_backward": "functional_backward",
}

__all__ = [
    "AttentionConfig",
    "QKVGradients",
    "attention",
    "attention_forward",
    "preset",
    "qkv_backward",
    "rope_backward",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
