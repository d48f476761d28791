"""Compiles the attention kernel alone and runs it on CPU tensors, in the emulator."""

import torch

from cute_gemma import AttentionConfig, jit, reference
from cute_gemma.kernels.sm100.attention import Attention

B, S, H, KV, D = 1, 200, 2, 1, 128
config = AttentionConfig(heads=H, kv_heads=KV, head_dim=D, softcap=50.0)

q, k, v = (2 * torch.randn(B, S, heads, D).bfloat16() for heads in (H, KV, KV))
out = torch.full_like(q, torch.nan)

kernel = Attention(H, KV, D, config.scale, config.softcap, mask="causal")
jit.launch(kernel, q, k, v, out, target="sm_100a")

exact = reference.attention(q.double(), k.double(), v.double(), "causal", config)
error = ((out - exact).norm() / exact.norm()).item()
print(f"{kernel}\nrelative error against float64: {error:.2g}")
assert error < 0.004
