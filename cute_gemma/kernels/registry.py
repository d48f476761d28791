"""Which kernel classes serve a target: the one place to add an architecture or a kernel to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..config import AttentionConfig


@dataclass(frozen=True)
class ForwardKernels:
    """Builds the kernels of the forward pass, tuned for a configuration and a call's sizes.

    head_dims: of the whole pass; attention_head_dims: of attention alone. The projections take M = B*S rows,
    attention the mask, B and S; mask is "causal", "none" or, for a tensor, its dtype ("bf16", "f32"). The scan takes
    that dtype and whether it may begin early (see MaskScan).
    """

    head_dims: tuple[int, ...]
    attention_head_dims: tuple[int, ...]
    qkv_projection: Callable[[AttentionConfig, int], Any]
    mask_scan: Callable[[str, bool], Any]
    attention: Callable[[AttentionConfig, str, int, int], Any]
    output_projection: Callable[[AttentionConfig, int], Any]


@dataclass(frozen=True)
class BackwardKernels:
    """Builds the kernels of the backward pass for a call's sizes (plans_backward.BackwardSizes).

    head_dims: those of norm_backward and gradients. gradients takes the norm_backward kernel too, whose partial sums
    it finishes. rope_backward takes H, KV and D.
    """

    head_dims: tuple[int, ...]
    norm_backward: Callable[[Any], Any]
    gradients: Callable[[Any, Any], Any]
    rope_backward: Callable[[int, int, int], Any]


@lru_cache(maxsize=None)
def backward_kernels(target: str) -> BackwardKernels:
    """The backward kernels of a target's name. Raises jit.UnsupportedTargetError where there are none yet."""
    from ..jit import UnsupportedTargetError

    if target not in _BACKWARD:
        raise UnsupportedTargetError(
            f"target: got {target!r}, want one of {', '.join(_BACKWARD)} for the backward pass"
        )
    return _BACKWARD[target]()


@lru_cache(maxsize=None)
def forward_kernels(target: str) -> ForwardKernels:
    """The forward kernels of a target's name. Raises jit.UnsupportedTargetError where there are none yet."""
    from ..jit import UnsupportedTargetError

    if target not in _FORWARD:
        raise UnsupportedTargetError(
            f"target: got {target!r}, want one of {', '.join(_FORWARD)} for the forward pass"
        )
    return _FORWARD[target]()


def _sm100_forward() -> ForwardKernels:
    """Kernel modules import the compiler, which takes seconds: each loads with its first kernel."""

    def qkv_projection(config: AttentionConfig, rows: int) -> Any:
        from .sm100.qkv_proj import QKVProjection, default_tuning

        sizes = (config.hidden, config.heads, config.kv_heads, config.head_dim)
        tuning = default_tuning(rows, *sizes)
        return QKVProjection(*sizes, config.eps, config.qk_norm, tuning=tuning)

    def mask_scan(mask: str, early: bool) -> Any:
        from .common.mask_scan import MaskScan

        return MaskScan(mask, early)

    def attention(config: AttentionConfig, mask: str, batch: int, seq: int) -> Any:
        from .sm100.attention import Attention, MaskedAttention, default_tuning

        sizes = (config.heads, config.kv_heads, config.head_dim, config.scale, config.softcap)
        tuning = default_tuning(config.head_dim, config.heads * batch * -(-seq // 256))
        if mask in ("causal", "none"):
            return Attention(*sizes, mask, config.window, tuning=tuning)
        return MaskedAttention(*sizes, mask_dtype=mask, tuning=tuning)

    def output_projection(config: AttentionConfig, rows: int) -> Any:
        from .sm100.out_proj import OutputProjection, default_tuning

        sizes = (config.hidden, config.q_width)
        return OutputProjection(*sizes, default_tuning(rows, *sizes))

    return ForwardKernels((128, 256), (64, 128, 256), qkv_projection, mask_scan, attention, output_projection)


def _sm90_forward() -> ForwardKernels:
    def qkv_projection(config: AttentionConfig, rows: int) -> Any:
        from .sm90.qkv_proj import QKVProjection, default_tuning

        sizes = (config.hidden, config.heads, config.kv_heads, config.head_dim)
        tuning = default_tuning(rows, *sizes)
        return QKVProjection(*sizes, config.eps, config.qk_norm, tuning=tuning)

    def attention(config: AttentionConfig, mask: str, batch: int, seq: int) -> Any:
        from .sm90.attention import Attention, MaskedAttention, default_tuning

        sizes = (config.heads, config.kv_heads, config.head_dim, config.scale, config.softcap)
        if mask in ("causal", "none"):
            return Attention(*sizes, mask, config.window, tuning=default_tuning(config.head_dim, seq))
        return MaskedAttention(*sizes, mask_dtype=mask)

    def output_projection(config: AttentionConfig, rows: int) -> Any:
        from .sm90.out_proj import OutputProjection, default_tuning

        sizes = (config.hidden, config.q_width)
        return OutputProjection(*sizes, default_tuning(rows, *sizes))

    mask_scan = _sm100_forward().mask_scan
    return ForwardKernels((128, 256), (64, 128, 256), qkv_projection, mask_scan, attention, output_projection)


_FORWARD = {"sm_100a": _sm100_forward, "sm_90a": _sm90_forward}


def _sm100_backward() -> BackwardKernels:
    def norm_backward(sizes: Any) -> Any:
        from .common.norm_backward import NormBackward

        return NormBackward(sizes.head_dim)

    def gradients(sizes: Any, norm: Any) -> Any:
        from .sm100.qkv_grads import QkvGradients, default_tuning

        tuning = default_tuning(sizes.batch, sizes.seq, sizes.hidden, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
        return QkvGradients(sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, tuning, norm.tuning)

    def rope_backward(heads: int, kv_heads: int, head_dim: int) -> Any:
        from .common.rope_backward import RopeBackward

        return RopeBackward(heads, kv_heads, head_dim)

    return BackwardKernels((128, 256), norm_backward, gradients, rope_backward)


def _sm90_backward() -> BackwardKernels:
    def norm_backward(sizes: Any) -> Any:
        from .common.norm_backward import NormBackward
        from .sm90.qkv_grads import NORM_TUNING

        return NormBackward(sizes.head_dim, NORM_TUNING)

    def gradients(sizes: Any, norm: Any) -> Any:
        from .sm90.qkv_grads import QkvGradients, default_tuning

        heads = sizes.heads + 2 * sizes.kv_heads
        tuning = default_tuning(sizes.batch, sizes.seq, sizes.hidden, heads, sizes.head_dim)
        return QkvGradients(sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, tuning, norm.tuning)

    return BackwardKernels((128, 256), norm_backward, gradients, _sm100_backward().rope_backward)


_BACKWARD = {"sm_100a": _sm100_backward, "sm_90a": _sm90_backward}
