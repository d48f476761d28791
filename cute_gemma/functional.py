"""What users call: checks the arguments, plans the launches and runs them.

Tensors on a GPU run there, on its current stream, without synchronising. Tensors on the CPU run in the
emulator. Inputs are never copied: a tensor that is not contiguous is rejected, save a mask expanded over the
batch, which is read where it lies.

A call like an earlier one (`RecipeCache`) is launched without being checked and planned again. On a GPU these calls
share one workspace a stream (`workspace.Kept`), up to 32 MiB that stay allocated; a plan has its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import jit
from .checks import check_heads, check_mask, check_tensor
from .config import AttentionConfig
from .plans import Plan
from .plans_forward import attention_recipe, forward_recipe
from .recipe_cache import RecipeCache
from .recipes import Recipe

BACKENDS = {"cpu": "emulator", "cuda": "cuda"}

_forward_recipes = RecipeCache()
_attention_recipes = RecipeCache()


def attention_forward(
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention_mask: Tensor | str | None,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    *,
    softcap: float | None = 50.0,
    eps: float = 1e-6,
    head_dim: int = 128,
    target: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """One attention layer: QKV projection, QK-RMSNorm, RoPE, softcapped grouped-query attention, output
    projection.

    hidden_states: [B, S, C]. cos, sin: [B, S, D], any values. attention_mask: an additive tensor [B, 1, S,
    S] or [1, 1, S, S] (bfloat16 or float32), "causal", or None for no mask. q_proj_weight: [H*D, C];
    k_proj_weight and
    v_proj_weight: [KV*D, C]; o_proj_weight: [C, H*D]; q_norm_weight, k_norm_weight: [D]. All but the mask
    bfloat16, contiguous, 16-byte aligned, on one device. D is head_dim; H and KV come from the weights.
    softcap: logits become softcap * tanh(logits / softcap) before the mask is added; None leaves them as
    they are.
    target: "sm_100a" (None: the one of the tensors' GPU; in the emulator "sm_100a"). backend: "cuda" or
    "emulator" (None: the one of the tensors' device).

    Returns a new bfloat16 tensor [B, S, C]. The mathematics is reference.forward_stages; norms, softmax and
    sums are in float32. A mask entry at or below finfo(bfloat16).min / 2 counts as masked, and a query row
    whose entries are all masked attends to nothing (zeros), where eager code would average every value.

    Raises, before anything is allocated, compiled or launched: TypeError for a wrong type or dtype,
    ValueError for a wrong shape, stride, alignment, device or number, each naming the argument, what came
    and what is wanted; jit.UnsupportedTargetError for a GPU or target without kernels.
    """
    tensors = (
        hidden_states,
        cos,
        sin,
        q_proj_weight,
        k_proj_weight,
        v_proj_weight,
        o_proj_weight,
        q_norm_weight,
        k_norm_weight,
    )
    mask, numbers = attention_mask, (softcap, eps, head_dim, target, backend)
    if isinstance(mask, Tensor):
        tensors += (mask,)
    recipe, key, addresses = _forward_recipes.find(tensors, numbers, mask)
    if recipe is None:
        recipe = _forward_recipes.keep(key, tensors, _forward_recipe(*tensors[:9], mask, *numbers))
    return recipe.run(tensors, addresses)


def plan_attention_forward(
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention_mask: Tensor | str | None,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    *,
    softcap: float | None = 50.0,
    eps: float = 1e-6,
    head_dim: int = 128,
    target: str | None = None,
    backend: str | None = None,
) -> Plan:
    """The checked and allocated launches of `attention_forward`, not yet run; same arguments and errors."""
    tensors = (
        hidden_states,
        cos,
        sin,
        q_proj_weight,
        k_proj_weight,
        v_proj_weight,
        o_proj_weight,
        q_norm_weight,
        k_norm_weight,
    )
    numbers = softcap, eps, head_dim, target, backend
    if isinstance(attention_mask, Tensor):
        tensors += (attention_mask,)
    return _forward_recipe(*tensors[:9], attention_mask, *numbers).plan(tensors)


def _forward_recipe(
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    attention_mask: Tensor | str | None,
    softcap: float | None,
    eps: float,
    head_dim: int,
    target: str | None,
    backend: str | None,
) -> Recipe:
    """The checks of `attention_forward`, and what it launches."""
    config = AttentionConfig(softcap=softcap, eps=eps, head_dim=head_dim)  # checks the numbers first
    hidden_states = check_tensor("hidden_states", hidden_states, ("B", "S", "C"))
    batch, seq, hidden = hidden_states.shape
    device = hidden_states.device

    def check(name: str, value: object, *shape: int | str) -> Tensor:
        return check_tensor(name, value, shape, device=device)

    cos = check("cos", cos, batch, seq, head_dim)
    sin = check("sin", sin, batch, seq, head_dim)
    mask = check_mask("attention_mask", attention_mask, batch, seq, device)
    q_proj_weight = check("q_proj_weight", q_proj_weight, "H*D", hidden)
    k_proj_weight = check("k_proj_weight", k_proj_weight, "KV*D", hidden)
    v_proj_weight = check("v_proj_weight", v_proj_weight, k_proj_weight.shape[0], hidden)
    o_proj_weight = check("o_proj_weight", o_proj_weight, hidden, q_proj_weight.shape[0])
    q_norm_weight = check("q_norm_weight", q_norm_weight, head_dim)
    k_norm_weight = check("k_norm_weight", k_norm_weight, head_dim)
    config = AttentionConfig(
        hidden=hidden,
        heads=check_heads("q_proj_weight", q_proj_weight, head_dim),
        kv_heads=check_heads("k_proj_weight", k_proj_weight, head_dim),
        head_dim=head_dim,
        softcap=config.softcap,
        eps=config.eps,
    )
    inputs = {
        "hidden_states": hidden_states,
        "cos": cos,
        "sin": sin,
        "q_proj_weight": q_proj_weight,
        "k_proj_weight": k_proj_weight,
        "v_proj_weight": v_proj_weight,
        "o_proj_weight": o_proj_weight,
        "q_norm_weight": q_norm_weight,
        "k_norm_weight": k_norm_weight,
    }
    return forward_recipe(inputs, mask, config, resolve_call_target(target, backend, device))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | str | None = "causal",
    softcap: float | None = 50.0,
    scale: float | None = None,
    target: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softcapped grouped-query attention, the middle kernel of `attention_forward` alone.

    q: [B, S, H, D]; k, v: [B, S, KV, D], all bfloat16, contiguous, 16-byte aligned, on one device; KV
    divides H, and query head h reads kv head h // (H / KV). mask, softcap, target, backend: as in
    `attention_forward`. scale: factor of q k^T, None for D ** -0.5.

    Returns a new bfloat16 tensor [B, S, H, D]. Raises as `attention_forward` does.
    """
    tensors = (q, k, v, mask) if isinstance(mask, Tensor) else (q, k, v)
    numbers = softcap, scale, target, backend
    recipe, key, addresses = _attention_recipes.find(tensors, numbers, mask)
    if recipe is None:
        recipe = _attention_recipes.keep(key, tensors, _attention_recipe(q, k, v, mask, *numbers))
    return recipe.run(tensors, addresses)


def plan_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | str | None = "causal",
    softcap: float | None = 50.0,
    scale: float | None = None,
    target: str | None = None,
    backend: str | None = None,
) -> Plan:
    """The checked and allocated launches of `attention`, not yet run; same arguments and errors."""
    tensors = (q, k, v, mask) if isinstance(mask, Tensor) else (q, k, v)
    return _attention_recipe(q, k, v, mask, softcap, scale, target, backend).plan(tensors)


def _attention_recipe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | str | None,
    softcap: float | None,
    scale: float | None,
    target: str | None,
    backend: str | None,
) -> Recipe:
    """The checks of `attention`, and what it launches."""
    q = check_tensor("q", q, ("B", "S", "H", "D"))
    batch, seq, heads, head_dim = q.shape
    k = check_tensor("k", k, (batch, seq, "KV", head_dim), device=q.device)
    v = check_tensor("v", v, tuple(k.shape), device=q.device)
    mask = check_mask("mask", mask, batch, seq, q.device)
    kv_heads = k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"k: got {kv_heads} heads, want a divisor of q's {heads}")
    config = AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, softcap=softcap, scale=scale)
    inputs = {"q": q, "k": k, "v": v}
    return attention_recipe(inputs, mask, config, resolve_call_target(target, backend, q.device))


def resolve_call_target(target: str | None, backend: str | None, device: torch.device) -> str:
    """The target's name, once `backend` is known to fit the tensors' device."""
    wanted = BACKENDS[device.type]
    if backend not in (None, *BACKENDS.values()):
        raise ValueError(f"backend: got {backend!r}, want one of {', '.join(BACKENDS.values())} or None")
    if backend not in (None, wanted):
        raise ValueError(f"backend: got {backend!r} for tensors on {device}, want {wanted!r}")
    return jit.resolve_target(target, device).name
