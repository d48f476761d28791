"""The backward of the QKV projections with QK norm: checks arguments, plans the launches and runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import check_tensor
from .functional import resolve_call_target
from .plans import Plan
from .plans_backward import BackwardSizes, backward_recipe, rope_backward_recipe
from .recipe_cache import RecipeCache
from .recipes import Recipe
from .reference import QKVGradients

_backward_recipes = RecipeCache()
_rope_recipes = RecipeCache()


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
    tensors = (
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
    )
    given = () if out is None else _given(out)
    numbers = target, backend, _which(out, given)
    recipe, key, addresses = _backward_recipes.find((*tensors, *given), numbers)
    if recipe is None:
        recipe = _backward_recipe(tensors, target, backend)
        _check_out(out, recipe, tensors)
        recipe = _backward_recipes.keep(key, (*tensors, *given), recipe)
    elif given and addresses != recipe.apart[0]:
        if _overlap(recipe, out, addresses):
            _check_out(out, recipe, tensors)  # which raises
        recipe.apart[0] = addresses
    if not given:
        return recipe.run(tensors, addresses)
    if len(given) == len(out):
        return recipe.run(tensors, addresses, list(given))
    return recipe.run(tensors, addresses[: len(tensors)], recipe.new_outputs(out))


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
    tensors = (
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
    )
    recipe = _backward_recipe(tensors, target, backend)
    _check_out(out, recipe, tensors)
    return recipe.plan(tensors, recipe.new_outputs(out))


def _backward_recipe(tensors: Sequence[Tensor], target: str | None, backend: str | None) -> Recipe:
    """The checks of `qkv_backward`, and what it launches. tensors: its positional arguments."""
    (
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
    ) = tensors
    grad_query = check_tensor("grad_query", grad_query, ("B", "H", "S", "D"))
    batch, heads, seq, dim = grad_query.shape
    device = grad_query.device
    inputs = {"grad_query": grad_query}

    def check(
        name: str, value: object, *shape: int | str, dtype: torch.dtype = torch.bfloat16, align: int = 16
    ) -> Tensor:
        inputs[name] = check_tensor(name, value, shape, (dtype,), device, align)
        return inputs[name]

    kv_heads = check("grad_key", grad_key, batch, "KV", seq, dim).shape[1]
    check("grad_value", grad_value, batch, kv_heads, seq, dim)
    hidden = check("hidden_states", hidden_states, batch, seq, "C").shape[2]
    if hidden % 8:
        raise ValueError(f"hidden_states: got {hidden} columns, want a multiple of 8 (16-byte rows for TMA)")
    check("q_weight", q_weight, heads * dim, hidden)
    check("k_weight", k_weight, kv_heads * dim, hidden)
    check("v_weight", v_weight, kv_heads * dim, hidden)
    check("q_norm_weight", q_norm_weight, dim)
    check("k_norm_weight", k_norm_weight, dim)
    check("q_rstd", q_rstd, batch, heads, seq, 1, dtype=torch.float32, align=4)
    check("k_rstd", k_rstd, batch, kv_heads, seq, 1, dtype=torch.float32, align=4)
    check("q_normed", q_normed, batch, heads, seq, dim)
    check("k_normed", k_normed, batch, kv_heads, seq, dim)
    sizes = BackwardSizes(batch, seq, hidden, heads, kv_heads, dim)
    return backward_recipe(inputs, sizes, resolve_call_target(target, backend, device))


def _given(out: QKVGradients) -> tuple[Tensor, ...]:
    """The tensors that `out` gives."""
    if not isinstance(out, QKVGradients):
        raise TypeError(f"out: got {type(out).__name__}, want a QKVGradients or None")
    return tuple([value for value in out if value is not None])


def _which(out: QKVGradients | None, given: tuple[Tensor, ...]) -> bool | tuple[bool, ...]:
    """What tells calls by the results that they give: whether all or none, or for each of them."""
    return bool(given) if out is None or len(given) in (0, len(out)) else tuple([value is not None for value in out])


def _check_out(out: QKVGradients | None, recipe: Recipe, inputs: Sequence[Tensor]) -> None:
    """Raises what is wrong with `out`."""
    if out is None:
        return
    _given(out)
    taken = list(zip(recipe.inputs, inputs, strict=True))
    for name, value, output in zip(QKVGradients._fields, out, recipe.outputs.values(), strict=True):
        if value is None:
            continue
        label = f"out.{name}"
        align = 16 if output.dtype == torch.bfloat16 else 4
        shape = recipe.inputs[output.like].shape
        check_tensor(label, value, shape, (output.dtype,), recipe.device, align)
        for other, tensor in taken:
            if value.data_ptr() < _end(tensor) and tensor.data_ptr() < _end(value):
                raise ValueError(f"{label}: got memory that overlaps {other}, want memory of its own")
        taken.append((label, value))


def _end(tensor: Tensor) -> int:
    """The address after a contiguous tensor."""
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _overlap(recipe: Recipe, out: QKVGradients, addresses: list[int]) -> bool:
    """Whether a given result shares a byte with another or with an input. addresses: of inputs and given results."""
    count = len(recipe.inputs)
    sizes = recipe.sizes[:count] + [s for s, value in zip(recipe.sizes[count:], out) if value is not None]
    spans = sorted((address, address + size, i >= count) for i, (address, size) in enumerate(zip(addresses, sizes)))
    inputs_end = outputs_end = 0  # of all that begin earlier
    for begin, end, is_output in spans:
        if begin < outputs_end or is_output and begin < inputs_end:
            return True
        if is_output:
            outputs_end = end
        else:
            inputs_end = max(inputs_end, end)
    return False


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
    tensors = grad_query, grad_key, cos, sin
    recipe, key, addresses = _rope_recipes.find(tensors, (target, backend))
    if recipe is None:
        recipe = _rope_recipes.keep(key, tensors, _rope_backward_recipe(*tensors, target, backend))
    return recipe.run(tensors, addresses)


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
    tensors = grad_query, grad_key, cos, sin
    return _rope_backward_recipe(*tensors, target, backend).plan(tensors)


def _rope_backward_recipe(
    grad_query: Tensor, grad_key: Tensor, cos: Tensor, sin: Tensor, target: str | None, backend: str | None
) -> Recipe:
    """The checks of `rope_backward`, and what it launches."""
    grad_query = check_tensor("grad_query", grad_query, ("B", "H", "S", "D"))
    batch, _, seq, dim = grad_query.shape
    device = grad_query.device
    grad_key = check_tensor("grad_key", grad_key, (batch, "KV", seq, dim), device=device)
    cos = check_tensor("cos", cos, (batch, seq, dim), device=device)
    sin = check_tensor("sin", sin, (batch, seq, dim), device=device)
    if dim % 16:
        raise ValueError(f"grad_query: got {dim} elements a head, want a multiple of 16")
    target = resolve_call_target(target, backend, device)
    inputs = {"grad_query": grad_query, "grad_key": grad_key, "cos": cos, "sin": sin}
    return rope_backward_recipe(inputs, target)
