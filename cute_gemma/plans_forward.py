"""What the calls of the forward pass launch."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

import torch
from torch import Tensor

from .config import AttentionConfig
from .kernels.common.mask import MASK_TILE, SCAN_COLUMNS
from .kernels.registry import ForwardKernels, forward_kernels
from .recipes import Output, Recipe, RecipeBuilder

_MASK_KINDS = {torch.bfloat16: "bf16", torch.float32: "f32"}


def attention_recipe(
    inputs: Mapping[str, Tensor], mask: Tensor | str | None, config: AttentionConfig, target: str
) -> Recipe:
    """Attention alone on checked tensors: q [B, S, H, D], k and v [B, S, KV, D] to a new [B, S, H, D]."""
    builder = RecipeBuilder(target)
    kernels = forward_kernels(target)
    _check_head_dim(config, kernels.attention_head_dims, target)
    q = inputs["q"]
    # The launch before may be the one that writes the mask.
    scan = _add_mask_scan(builder, kernels, mask, early=False)
    tensors = {"q": "q", "k": "k", "v": "v", "out": "out", **scan}
    _add_attention(builder, kernels, config, mask, q.shape[:2], tensors)
    return builder.build(_with_mask(inputs, mask), {"out": Output("q", torch.bfloat16)}, itemgetter(0))


def forward_recipe(
    inputs: Mapping[str, Tensor], mask: Tensor | str | None, config: AttentionConfig, target: str
) -> Recipe:
    """Workload 047 on checked tensors, named as in `attention_forward`, to a new [B, S, C].

    q, k, v and the attention's output lie in the workspace as bfloat16 [B, S, heads, D].
    """
    kernels = forward_kernels(target)
    _check_head_dim(config, kernels.head_dims, target)
    batch, seq, _ = inputs["hidden_states"].shape
    builder = RecipeBuilder(target)
    slots = {
        name: builder.slot(name, torch.bfloat16, (batch, seq, heads, config.head_dim))
        for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads))
    }
    attended = builder.slot("attention", torch.bfloat16, (batch, seq, config.heads, config.head_dim))

    projection = kernels.qkv_projection(config, batch * seq)
    builder.add("qkv projection", projection, {**{name: name for name in inputs}, **slots}, slots)
    scan = _add_mask_scan(builder, kernels, mask, early=True)
    _add_attention(builder, kernels, config, mask, (batch, seq), {**slots, "out": attended, **scan})
    projection = kernels.output_projection(config, batch * seq)
    tensors = {"attn": attended, "o_proj_weight": "o_proj_weight", "out": "output"}
    builder.add("output projection", projection, tensors, {"output": "output"})
    outputs = {"output": Output("hidden_states", torch.bfloat16)}
    return builder.build(_with_mask(inputs, mask), outputs, itemgetter(0))


def _with_mask(inputs: Mapping[str, Tensor], mask: Tensor | str | None) -> dict[str, Tensor]:
    return {**inputs, "mask": mask} if isinstance(mask, Tensor) else dict(inputs)


def _check_head_dim(config: AttentionConfig, supported: tuple[int, ...], target: str) -> None:
    if config.head_dim not in supported:
        wanted = " or ".join(map(str, supported))
        raise ValueError(f"head_dim: got {config.head_dim}, want {wanted} on {target}")


def _add_mask_scan(
    builder: RecipeBuilder, kernels: ForwardKernels, mask: Tensor | str | None, early: bool
) -> dict[str, str]:
    """The pre-pass over a mask tensor, see MaskScan; returns what attention takes of it, by argument name."""
    if not isinstance(mask, Tensor):
        return {}
    batch, _, seq, _ = mask.shape
    tiles = -(-seq // MASK_TILE)
    chunks = -(-seq // SCAN_COLUMNS)
    scanned = {
        "row_max": builder.slot("row_max", torch.float32, (batch, chunks, seq)),
        "classes": builder.slot("classes", torch.uint8, (batch, tiles, tiles)),
    }
    classified = {"mask": "mask", **scanned}
    builder.add("mask scan", kernels.mask_scan(_mask_kind(mask), early), classified, scanned)
    return classified


def _add_attention(
    builder: RecipeBuilder,
    kernels: ForwardKernels,
    config: AttentionConfig,
    mask: Tensor | str | None,
    sizes: tuple[int, int],
    tensors: Mapping[str, str],
) -> None:
    kernel = kernels.attention(config, _mask_kind(mask), *sizes)
    builder.add("attention", kernel, tensors, {"attention": tensors["out"]})


def _mask_kind(mask: Tensor | str | None) -> str:
    return _MASK_KINDS[mask.dtype] if isinstance(mask, Tensor) else mask or "none"
