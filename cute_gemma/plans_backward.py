"""From checked tensors to the launches of the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.registry import backward_kernels
from .plans import Plan, PlanBuilder, Workspace
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

    def results(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each of QKVGradients."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "hidden_states": ((self.batch, self.seq, self.hidden), torch.bfloat16),
            "q_weight": ((query, self.hidden), torch.bfloat16),
            "k_weight": ((key, self.hidden), torch.bfloat16),
            "v_weight": ((key, self.hidden), torch.bfloat16),
            "q_norm_weight": ((self.head_dim,), torch.float32),
            "k_norm_weight": ((self.head_dim,), torch.float32),
        }


def backward_plan(
    inputs: Mapping[str, Tensor], results: QKVGradients, sizes: BackwardSizes, target: str
) -> Plan:
    """Workload 051 on checked tensors, named as in `qkv_backward`, to `results`.

    The gradients of the q and k projections lie in the workspace, bfloat16 [B, heads, S, D], beside the
    partial sums of the norm-weight gradients. grad_value is read in place.
    """
    kernels = backward_kernels(target)
    if sizes.head_dim not in kernels.head_dims:
        wanted = " or ".join(map(str, kernels.head_dims))
        raise ValueError(f"grad_query: got {sizes.head_dim} elements a head, want {wanted} on {target}")
    workspace = Workspace(inputs["grad_query"].device)
    builder = PlanBuilder(target, workspace)
    norm = kernels.norm_backward(sizes)
    gradients = kernels.gradients(sizes, norm)
    slots = {
        name: workspace.request(name, torch.bfloat16, tuple(inputs[like].shape))
        for name, like in (("grad_q", "grad_query"), ("grad_k", "grad_key"))
    }
    partials = workspace.request("norm_partials", torch.float32, norm.partials_shape)
    builder.add(
        "norm backward",
        norm,
        {
            **inputs,
            "q_rstd": inputs["q_rstd"].view(-1),
            "k_rstd": inputs["k_rstd"].view(-1),
            "grad_q": slots["grad_q"],
            "grad_k": slots["grad_k"],
            "norm_partials": partials,
        },
        {},
    )
    outputs = results._asdict()
    builder.add(
        "gradients",
        gradients,
        {**inputs, **slots, "norm_partials": partials, **{f"grad_{name}": t for name, t in outputs.items()}},
        outputs,
    )
    return builder.build(results)


def rope_backward_plan(grad_query: Tensor, grad_key: Tensor, cos: Tensor, sin: Tensor, target: str) -> Plan:
    """`rope_backward` on checked tensors: one launch to two new tensors."""
    kernel = backward_kernels(target).rope_backward(grad_query.shape[1], grad_key.shape[1], cos.shape[2])
    results = torch.empty_like(grad_query), torch.empty_like(grad_key)
    builder = PlanBuilder(target, Workspace(cos.device))
    tensors = {"grad_query": grad_query, "grad_key": grad_key, "cos": cos, "sin": sin}
    outputs = {"out_query": results[0], "out_key": results[1]}
    builder.add("rope backward", kernel, {**tensors, **outputs}, outputs)
    return builder.build(results)
