"""What people use instead: each peer is a function of a workload's inputs that returns a call without
arguments.

  eager    the model as it is written, one PyTorch operation after the other.
  compile  the same through torch.compile.
  flex     047: torch.compile of one product for q, k and v, norm and RoPE, FlexAttention, one product.
  fa4      047: the same with FlashAttention-4; what comes before it is compiled.

Peers get what they can have beforehand: weights side by side, block masks, all compilation. flex and fa4
are told that the mask is causal; eager and compile read the mask tensor, as their source says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_gemma import reference
from cute_gemma.config import AttentionConfig
from cute_gemma.workloads import WORKLOADS, BackwardInputs, ForwardInputs

Call = Callable[[], tuple[Tensor, ...]]


class Unavailable(Exception):
    """A peer that this machine lacks, or that cannot run a case; the text says why."""


def eager_forward(
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    attention_mask: Tensor,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    config: AttentionConfig,
) -> Tensor:
    """047 with all heads and batches at once; the shapes of ForwardInputs, to [B, S, C]."""
    q, k, v = (
        t.transpose(1, 2)
        for t in reference.qkv_projection(
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
    )
    k, v = (t.repeat_interleave(config.group, dim=1) for t in (k, v))
    logits = q @ k.transpose(2, 3) * config.scale
    if config.softcap is not None:
        logits = torch.tanh(logits / config.softcap) * config.softcap
    logits = logits + attention_mask
    wide = torch.promote_types(logits.dtype, torch.float32)
    attended = torch.softmax(logits, dim=-1, dtype=wide).to(q.dtype) @ v
    return F.linear(attended.transpose(1, 2).flatten(2), o_proj_weight)


def project(
    hidden_states: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    config: AttentionConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, D]; k, v [B, S, KV, D] from the three weights one below the other."""
    heads = F.linear(hidden_states, weight).unflatten(-1, (-1, config.head_dim))
    q, k, v = heads.split((config.heads, config.kv_heads, config.kv_heads), dim=2)
    q = reference.apply_rope(reference.rms_norm(q, q_norm_weight, config.eps), cos, sin)
    k = reference.apply_rope(reference.rms_norm(k, k_norm_weight, config.eps), cos, sin)
    return q, k, v


def _forward_arguments(inputs: ForwardInputs) -> dict[str, Any]:
    return {field.name: getattr(inputs, field.name) for field in fields(inputs)}


def _projection_arguments(inputs: ForwardInputs) -> tuple[Tensor, ...]:
    weight = torch.cat((inputs.q_proj_weight, inputs.k_proj_weight, inputs.v_proj_weight))
    return inputs.hidden_states, weight, inputs.cos, inputs.sin, inputs.q_norm_weight, inputs.k_norm_weight


def forward_eager(inputs: ForwardInputs, config: AttentionConfig) -> Call:
    """047 as it is written."""
    arguments = _forward_arguments(inputs)
    return lambda: (eager_forward(**arguments, config=config),)


def forward_compile(inputs: ForwardInputs, config: AttentionConfig) -> Call:
    """047 through torch.compile. Sizes are dynamic: its time goes into logits in memory, whatever the
    code."""
    arguments = _forward_arguments(inputs)
    compiled = torch.compile(eager_forward, dynamic=True)
    return lambda: (compiled(**arguments, config=config),)


def forward_flex(inputs: ForwardInputs, config: AttentionConfig, compiler: Callable = torch.compile) -> Call:
    """047 with FlexAttention, compiled as a whole for the case's sizes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seq, softcap = inputs.hidden_states.shape[1], config.softcap

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    block_mask = create_block_mask(causal, None, None, seq, seq, device=inputs.hidden_states.device)
    arguments, o_proj_weight = _projection_arguments(inputs), inputs.o_proj_weight
    score_mod = None if softcap is None else capped

    def forward(*arguments: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in project(*arguments, config))
        attended = flex_attention(q, k, v, score_mod, block_mask, config.scale, enable_gqa=True)
        return F.linear(attended.transpose(1, 2).flatten(2), o_proj_weight)

    compiled = compiler(forward, dynamic=False)
    return lambda: (compiled(*arguments),)


def flash_attention() -> Callable[..., Tensor]:
    """FlashAttention-4's forward on [B, S, heads, D]. Raises Unavailable where it cannot be imported."""
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        raise Unavailable(f"FlashAttention-4 is not installed: {error}") from None

    def attend(q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig) -> Tensor:
        out = flash_attn_func(q, k, v, softmax_scale=config.scale, causal=True, softcap=config.softcap or 0.0)
        return out[0] if isinstance(out, tuple) else out

    return attend


def forward_fa4(inputs: ForwardInputs, config: AttentionConfig) -> Call:
    """047 with FlashAttention-4 between a compiled projection and a product."""
    attend, compiled = flash_attention(), torch.compile(project, dynamic=False)
    arguments, o_proj_weight = _projection_arguments(inputs), inputs.o_proj_weight

    def call() -> tuple[Tensor]:
        q, k, v = compiled(*arguments, config)
        return (F.linear(attend(q, k, v, config).flatten(2), o_proj_weight),)

    return call


def backward_eager(inputs: BackwardInputs, config: AttentionConfig) -> Call:
    """051 as it is written."""
    tensors = inputs.tensors()
    return lambda: tuple(reference.qkv_backward(**tensors))


def backward_compile(inputs: BackwardInputs, config: AttentionConfig) -> Call:
    """051 through torch.compile, for the case's sizes."""
    tensors, compiled = inputs.tensors(), torch.compile(reference.qkv_backward, dynamic=False)
    return lambda: tuple(compiled(**tensors))


PEERS: dict[str, dict[str, Callable[..., Call]]] = {
    "047": {"eager": forward_eager, "compile": forward_compile, "flex": forward_flex, "fa4": forward_fa4},
    "051": {"eager": backward_eager, "compile": backward_compile},
}
# Those compiled anew for every case: worth compiling in other processes first, through Inductor's cache on
# disk.
COMPILED_BY_CASE = {"047": ("flex", "fa4"), "051": ("compile",)}


def warm(number: str, name: str, batch: int, seq: int, whole: bool = False) -> str | None:
    """Compiles a peer for a case by calling it once, into the caches on disk. Returns what went wrong, if
    anything.

    FlashAttention-4 keeps its own kernels in memory: unless `whole`, only what torch.compile makes is
    called of fa4.
    """
    problem = WORKLOADS[number]
    try:
        with torch.no_grad():
            inputs = problem.make_inputs("suite", batch, seq).to("cuda")
            if name == "fa4" and not whole:
                torch.compile(project, dynamic=False)(*_projection_arguments(inputs), problem.config)
            else:
                PEERS[number][name](inputs, problem.config)()
            torch.cuda.synchronize()
    except Exception as error:  # the case itself reports a peer that does not run
        return f"{type(error).__name__}: {error}"
    return None


# Libraries' answers to one launch each, told what the launch of the same name is told.


def library_qkv(inputs: ForwardInputs, config: AttentionConfig) -> Call:
    """cuBLAS: the product of the QKV projection, without norm and RoPE."""
    hidden_states, weight, *_ = _projection_arguments(inputs)
    return lambda: (F.linear(hidden_states, weight),)


def library_output(inputs: ForwardInputs, config: AttentionConfig) -> Call:
    """cuBLAS: the output projection, of random rows."""
    like = inputs.hidden_states
    rows = torch.randn(*like.shape[:2], config.q_width, device=like.device).bfloat16()
    return lambda: (F.linear(rows, inputs.o_proj_weight),)


def library_gradients(inputs: BackwardInputs, config: AttentionConfig) -> Call:
    """cuBLAS: one product for the gradient of the hidden states and one for the weights', operands laid
    side by side."""
    rows = inputs.hidden_states.flatten(0, 1)
    weight = torch.cat((inputs.q_weight, inputs.k_weight, inputs.v_weight))
    gradients = torch.randn(rows.shape[0], weight.shape[0], device=rows.device).bfloat16()
    return lambda: (gradients @ weight, gradients.T @ rows)


def library_fa4(q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig) -> Call:
    """FlashAttention-4 alone, causal."""
    attend = flash_attention()
    return lambda: (attend(q, k, v, config),)


def library_cudnn(q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig) -> Call:
    """cuDNN's attention through PyTorch, causal. Raises Unavailable for a softcap, which it has not."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if config.softcap is not None:
        raise Unavailable("cuDNN's attention has no softcap")
    heads = [t.transpose(1, 2) for t in (q, k, v)]

    def call() -> tuple[Tensor]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=config.scale, enable_gqa=True)
        return (out.transpose(1, 2),)

    return call
