"""The two workloads in eager PyTorch: what every kernel is compared with.

Each function computes in the dtype of its tensors. With bfloat16 tensors it is the eager model, with that
model's rounding points (norms and softmax in float32, every other result rounded to bfloat16); with float64
tensors it is the exact answer to within float64's own error. Shapes: B batch, S sequence, C hidden, H query
heads, KV key/value heads, D head_dim, G = H / KV.

One deliberate deviation from the eager model: a query row whose mask entries are all at or below
config.MASKED_AT_OR_BELOW is fully masked and yields zeros, where eager code would average every value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import MASKED_AT_OR_BELOW, AttentionConfig

# Logits held at once: attention at S = 8192 then needs a few hundred MB, where all of it would be many GB.
_CHUNK_LOGITS = 1 << 23


class ForwardStages(NamedTuple):
    """Every stage of the forward pass. q, attention: [B, S, H, D]; k, v: [B, S, KV, D]; output: [B, S, C]."""

    q: Tensor
    k: Tensor
    v: Tensor
    attention: Tensor
    output: Tensor


class QKVGradients(NamedTuple):
    """Gradients in the suite's order; those of the norm weights are float32 where the inputs are bfloat16."""

    hidden_states: Tensor  # [B, S, C]
    q_weight: Tensor  # [H*D, C]
    k_weight: Tensor  # [KV*D, C]
    v_weight: Tensor  # [KV*D, C]
    q_norm_weight: Tensor  # [D]
    k_norm_weight: Tensor  # [D]


def _wide(t: Tensor) -> Tensor:
    """`t` in the dtype that norms, softmax and sums are computed in: float64 stays, all else float32."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def rms_norm(t: Tensor, weight: Tensor, eps: float) -> Tensor:
    """t * rsqrt(mean(t^2) + eps) * (1 + weight) over the last dimension, in float32, rounded to t's dtype."""
    wide = _wide(t)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + _wide(weight))).to(t.dtype)


def rotate_half(t: Tensor) -> Tensor:
    """(-second half, first half) along the last dimension."""
    first, second = t.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """t [B, S, heads, D] rotated by cos, sin [B, S, D]: each product and the sum rounded to t's dtype."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return t * cos + rotate_half(t) * sin


def qkv_projection(
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    config: AttentionConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, D]; k, v [B, S, KV, D]. q and k pass through RMSNorm, if config.qk_norm, then RoPE."""
    split = (config.head_dim,)
    q = (hidden_states @ q_proj_weight.T).unflatten(-1, (config.heads, *split))
    k = (hidden_states @ k_proj_weight.T).unflatten(-1, (config.kv_heads, *split))
    v = (hidden_states @ v_proj_weight.T).unflatten(-1, (config.kv_heads, *split))
    if config.qk_norm:
        q = rms_norm(q, q_norm_weight, config.eps)
        k = rms_norm(k, k_norm_weight, config.eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def _visible(rows: range, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[rows, keys] bool: which keys a causal query row attends to."""
    query = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, config: AttentionConfig) -> Tensor:
    """Attention of q [G, rows, D] over k, v [keys, D] with an additive bias [rows, keys]."""
    logits = (q @ k.T) * config.scale
    if config.softcap is not None:
        logits = torch.tanh(logits / config.softcap) * config.softcap
    if bias is not None:
        logits = logits + bias
    weights = torch.softmax(_wide(logits), dim=-1).to(q.dtype)
    if bias is None:
        return weights @ v
    # Before the product: on some CPUs a NaN in one row of its operand gets into the row before. And after it: v may
    # hold what zero times it is not zero.
    masked_rows = (bias <= MASKED_AT_OR_BELOW).all(-1, keepdim=True)
    return (weights.masked_fill(masked_rows, 0) @ v).masked_fill(masked_rows, 0)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, config: AttentionConfig) -> Tensor:
    """Softcapped grouped-query attention.

    q: [B, S, H, D]; k, v: [B, S, KV, D]. mask: an additive tensor [B or 1, 1, S, S], "causal", or None.
    Returns [B, S, H, D]. config.window needs mask="causal". Works through one kv head and a block of query
    rows at a time, so that memory stays small at any S.
    """
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(f"mask: got {mask!r}, want an additive tensor, 'causal' or None")
    causal = isinstance(mask, str)
    if config.window is not None and not causal:
        raise ValueError("mask: a config with a window wants 'causal'")
    batch, seq, _, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    block = max(1, min(seq, _CHUNK_LOGITS // (config.group * seq)))
    for b in range(batch):
        for first in range(0, seq, block):
            rows = range(first, min(first + block, seq))
            # Keys after the last row of a causal block have weight exactly 0.
            keys = rows.stop if causal else seq
            bias = None
            if causal:
                hidden = ~_visible(rows, keys, config.window, q.device)
                bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
                bias.masked_fill_(hidden, torch.finfo(torch.bfloat16).min)
            elif mask is not None:
                bias = mask[b if mask.shape[0] > 1 else 0, 0, rows.start : rows.stop]
            for head in range(config.kv_heads):
                group = slice(head * config.group, (head + 1) * config.group)
                queries = q[b, rows.start : rows.stop, group].transpose(0, 1)
                attended = _attend(queries, k[b, :keys, head], v[b, :keys, head], bias, config)
                out[b, rows.start : rows.stop, group] = attended.transpose(0, 1)
    return out


def output_projection(attended: Tensor, o_proj_weight: Tensor) -> Tensor:
    """attended [B, S, H, D] times o_proj_weight [C, H*D] transposed: [B, S, C]."""
    return attended.flatten(2) @ o_proj_weight.T


def forward_stages(
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention_mask: Tensor | str | None,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    config: AttentionConfig,
) -> ForwardStages:
    """Workload 047: hidden_states [B, S, C] to the attention output [B, S, C], with every stage between."""
    q, k, v = qkv_projection(
        hidden_states,
        cos,
        sin,
        q_proj_weight,
        k_proj_weight,
        v_proj_weight,
        q_norm_weight,
        k_norm_weight,
        config,
    )
    attended = attention(q, k, v, attention_mask, config)
    return ForwardStages(q, k, v, attended, output_projection(attended, o_proj_weight))


def _norm_backward(grad: Tensor, norm_weight: Tensor, rstd: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
    """Through t -> normed * (1 + w): the gradient [B, S, heads, D] of the projection, and of w [D] (wide)."""
    wide_grad, wide_normed = _wide(grad), _wide(normed)
    grad_weight = (wide_grad * wide_normed).sum(dim=(0, 1, 2))
    g = _wide((wide_grad * (1.0 + _wide(norm_weight))).to(grad.dtype))
    mean = (g * wide_normed).mean(-1, keepdim=True)
    grad_projected = (rstd.to(g.dtype) * (g - mean * wide_normed)).to(grad.dtype)
    return grad_projected.transpose(1, 2), grad_weight


def qkv_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    hidden_states: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    q_normed: Tensor,
    k_normed: Tensor,
) -> QKVGradients:
    """Workload 051: gradients through the QK norms and the three projections.

    grad_query, q_normed: [B, H, S, D]; grad_key, grad_value, k_normed: [B, KV, S, D]; q_rstd [B, H, S, 1]
    and k_rstd [B, KV, S, 1] (float32, or float64 throughout); hidden_states [B, S, C]; weights as in the
    forward pass.
    """
    grad_q, grad_q_norm = _norm_backward(grad_query, q_norm_weight, q_rstd, q_normed)
    grad_k, grad_k_norm = _norm_backward(grad_key, k_norm_weight, k_rstd, k_normed)
    grads = [t.flatten(2) for t in (grad_q, grad_k, grad_value.transpose(1, 2))]
    grad_hidden = grads[0] @ q_weight + grads[1] @ k_weight + grads[2] @ v_weight
    rows = hidden_states.flatten(0, 1)
    grad_weights = [t.flatten(0, 1).T @ rows for t in grads]
    return QKVGradients(grad_hidden, *grad_weights, grad_q_norm, grad_k_norm)
