"""The backward of the QKV projections with QK norm: checks arguments, plans the launches and runs them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .checks import check_tensor
from .functional import resolve_call_target
from .plans import Plan
from .plans_backward import BackwardSizes, backward_plan, rope_backward_plan
from .reference import QKVGradients


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
    *,
    target: str | None = None,
    backend: str | None = None,
    out: QKVGradients | None = None,
) -> QKVGradients:
    """Gradients of hidden states, projection weights and norm weights from those of the normed q, k and of v.

    The forward pass is t = hidden_states @ weight^T for q, k and v, and for q and k then normed = t * rstd
    and normed * (1 + norm_weight), with rstd the reciprocal root mean square of each head's row. What follows
    there, RoPE, is undone by `rope_backward`.

    grad_query, q_normed: [B, H, S, D]; grad_key, grad_value, k_normed: [B, KV, S, D]; hidden_states: [B, S,
    C]; q_weight: [H*D, C]; k_weight, v_weight: [KV*D, C]; q_norm_weight, k_norm_weight: [D]; all bfloat16.
    q_rstd: [B, H, S, 1]; k_rstd: [B, KV, S, 1]; both float32. All contiguous, 16-byte aligned (q_rstd and
    k_rstd: 4), on one device. D is 128 or 256, C a multiple of 8; any B, S, H and KV from 1.
    target, backend: as in `attention_forward`. out: tensors to write the results to; an entry None means a
    new one. They may overlap neither each other nor an input.

    Returns QKVGradients(hidden_states [B, S, C], q_weight [H*D, C], k_weight and v_weight [KV*D, C] in
    bfloat16, q_norm_weight and k_norm_weight [D] in float32). The mathematics is reference.qkv_backward: the
    gradients of the projections are rounded to bfloat16, all sums are in float32. Equal inputs give
    equal bits.

    Raises, before anything is written, compiled or launched: TypeError for a wrong type or dtype, ValueError
    for a wrong shape, stride, alignment or device and for memory that overlaps, each naming the argument,
    what came and what is wanted; jit.UnsupportedTargetError for a GPU or target without kernels.
    """
    plan = plan_qkv_backward(
        grad_query,
        grad_key,
        grad_value,
        hidden_states,
        q_weight,
        k_weight,
        v_weight,
        q_norm_weight,
        k_norm_weight,
        q_rstd,
        k_rstd,
        q_normed,
        k_normed,
        target=target,
        backend=backend,
        out=out,
    )
    plan.run()
    return plan.output


def plan_qkv_backward(
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
    *,
    target: str | None = None,
    backend: str | None = None,
    out: QKVGradients | None = None,
) -> Plan:
    """The checked and allocated launches of `qkv_backward`, not yet run; same arguments and errors."""
    given = dict(locals())
    names = [name for name in given if name not in ("target", "backend", "out")]
    inputs, sizes = _check_inputs({name: given[name] for name in names})
    results = _check_out(out, sizes, inputs)
    target = resolve_call_target(target, backend, inputs["grad_query"].device)
    return backward_plan(inputs, results, sizes, target)


def _check_inputs(given: Mapping[str, object]) -> tuple[dict[str, Tensor], BackwardSizes]:
    grad_query = check_tensor("grad_query", given["grad_query"], ("B", "H", "S", "D"))
    batch, heads, seq, dim = grad_query.shape
    device = grad_query.device
    checked = {"grad_query": grad_query}

    def check(name: str, *shape: int | str, dtype: torch.dtype = torch.bfloat16, align: int = 16) -> Tensor:
        checked[name] = check_tensor(name, given[name], shape, (dtype,), device, align)
        return checked[name]

    kv_heads = check("grad_key", batch, "KV", seq, dim).shape[1]
    check("grad_value", batch, kv_heads, seq, dim)
    hidden = check("hidden_states", batch, seq, "C").shape[2]
    if hidden % 8:
        raise ValueError(f"hidden_states: got {hidden} columns, want a multiple of 8 (16-byte rows for TMA)")
    check("q_weight", heads * dim, hidden)
    check("k_weight", kv_heads * dim, hidden)
    check("v_weight", kv_heads * dim, hidden)
    check("q_norm_weight", dim)
    check("k_norm_weight", dim)
    check("q_rstd", batch, heads, seq, 1, dtype=torch.float32, align=4)
    check("k_rstd", batch, kv_heads, seq, 1, dtype=torch.float32, align=4)
    check("q_normed", batch, heads, seq, dim)
    check("k_normed", batch, kv_heads, seq, dim)
    return checked, BackwardSizes(batch, seq, hidden, heads, kv_heads, dim)


def _check_out(
    out: QKVGradients | None, sizes: BackwardSizes, inputs: Mapping[str, Tensor]
) -> QKVGradients:
    """Where the results go: what `out` gives, and new tensors for the rest."""
    if out is not None and not isinstance(out, QKVGradients):
        raise TypeError(f"out: got {type(out).__name__}, want a QKVGradients or None")
    device = inputs["grad_query"].device
    taken = list(inputs.items())
    results = {}
    for name, (shape, dtype) in sizes.results().items():
        value = None if out is None else getattr(out, name)
        if value is None:
            continue
        label = f"out.{name}"
        align = 16 if dtype == torch.bfloat16 else 4
        results[name] = check_tensor(label, value, shape, (dtype,), device, align)
        for other, tensor in taken:
            if _overlap(value, tensor):
                raise ValueError(f"{label}: got memory that overlaps {other}, want memory of its own")
        taken.append((label, value))
    for name, (shape, dtype) in sizes.results().items():
        if name not in results:
            results[name] = torch.empty(shape, dtype=dtype, device=device)
    return QKVGradients(**results)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors of one device share a byte."""
    a_end = a.data_ptr() + a.numel() * a.element_size()
    b_end = b.data_ptr() + b.numel() * b.element_size()
    return a.data_ptr() < b_end and b.data_ptr() < a_end


def rope_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    target: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k before RoPE from those after it, the inputs of `qkv_backward`.

    grad_query: [B, H, S, D]; grad_key: [B, KV, S, D]; cos, sin: [B, S, D], any values. All bfloat16,
    contiguous, 16-byte aligned, on one device; D a multiple of 16. target, backend: as in
    `attention_forward`.

    Forward, with halves t = (t1, t2): (t1 cos1 - t2 sin1, t2 cos2 + t1 sin2). Returns new bfloat16 tensors
    (g1 cos1 + g2 sin2, g2 cos2 - g1 sin1), computed in float32. Raises as `qkv_backward` does.
    """
    plan = plan_rope_backward(grad_query, grad_key, cos, sin, target=target, backend=backend)
    plan.run()
    return plan.output


def plan_rope_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    target: str | None = None,
    backend: str | None = None,
) -> Plan:
    """The checked and allocated launch of `rope_backward`, not yet run; same arguments and errors."""
    grad_query = check_tensor("grad_query", grad_query, ("B", "H", "S", "D"))
    batch, _, seq, dim = grad_query.shape
    device = grad_query.device
    grad_key = check_tensor("grad_key", grad_key, (batch, "KV", seq, dim), device=device)
    cos = check_tensor("cos", cos, (batch, seq, dim), device=device)
    sin = check_tensor("sin", sin, (batch, seq, dim), device=device)
    if dim % 16:
        raise ValueError(f"grad_query: got {dim} elements a head, want a multiple of 16")
    target = resolve_call_target(target, backend, device)
    return rope_backward_plan(grad_query, grad_key, cos, sin, target)
