"""What the calls of the backward pass launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.registry import backward_kernels
from .recipes import Output, Recipe, RecipeBuilder
from .reference import QKVGradients


@dataclass(frozen=True)
class BackwardSizes:
    """The sizes of one call: B, S, C, H, KV and D."""

    batch: int
    seq: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


def backward_recipe(inputs: Mapping[str, Tensor], sizes: BackwardSizes, target: str) -> Recipe:
    """Workload 051 on checked tensors, named as in `qkv_backward`, to QKVGradients.

    The gradients of the q and k projections lie in the workspace, bfloat16 [B, heads, S, D], beside the
    partial sums of the norm-weight gradients. grad_value is read in place.
    """
    kernels = backward_kernels(target)
    if sizes.head_dim not in kernels.head_dims:
        wanted = " or ".join(map(str, kernels.head_dims))
        raise ValueError(f"grad_query: got {sizes.head_dim} elements a head, want {wanted} on {target}")
    builder = RecipeBuilder(target)
    norm = kernels.norm_backward(sizes)
    gradients = kernels.gradients(sizes, norm)
    slots = {
        name: builder.slot(name, torch.bfloat16, tuple(inputs[like].shape))
        for name, like in (("grad_q", "grad_query"), ("grad_k", "grad_key"))
    }
    slots["norm_partials"] = builder.slot("norm_partials", torch.float32, norm.partials_shape)
    named = {name: name for name in inputs}
    builder.add("norm backward", norm, {**named, **slots}, {})
    # Each gradient has the shape of what it belongs to, an input of that name.
    outputs = {
        f"grad_{name}": Output(name, torch.float32 if name.endswith("norm_weight") else torch.bfloat16)
        for name in QKVGradients._fields
    }
    written = {name: f"grad_{name}" for name in QKVGradients._fields}
    builder.add("gradients", gradients, {**named, **slots, **{name: name for name in outputs}}, written)
    return builder.build(inputs, outputs, QKVGradients._make)


def rope_backward_recipe(inputs: Mapping[str, Tensor], target: str) -> Recipe:
    """`rope_backward` on checked tensors: one launch to two new tensors."""
    heads, kv_heads = inputs["grad_query"].shape[1], inputs["grad_key"].shape[1]
    kernel = backward_kernels(target).rope_backward(heads, kv_heads, inputs["cos"].shape[2])
    builder = RecipeBuilder(target)
    outputs = {"out_query": Output("grad_query", torch.bfloat16), "out_key": Output("grad_key", torch.bfloat16)}
    written = {name: name for name in outputs}
    builder.add("rope backward", kernel, {**{name: name for name in inputs}, **written}, written)
    return builder.build(inputs, outputs, tuple)
