"""Compiles the QKV projection alone (norm and RoPE included) and runs it on CPU tensors, in the emulator."""

import torch

from cute_gemma import AttentionConfig, jit, reference
from cute_gemma.kernels.sm100.qkv_proj import QKVProjection

B, S, C, H, KV, D = 1, 150, 256, 2, 1, 128
config = AttentionConfig(hidden=C, heads=H, kv_heads=KV, head_dim=D)

x, cos, sin = (torch.randn(B, S, width).bfloat16() for width in (C, D, D))
weights = [(torch.randn(heads * D, C) / C**0.5).bfloat16() for heads in (H, KV, KV)]
norms = [(0.3 * torch.randn(D)).bfloat16() for _ in "qk"]
outputs = [torch.full((B * S, heads * D), torch.nan, dtype=torch.bfloat16) for heads in (H, KV, KV)]

kernel = QKVProjection(C, H, KV, D, config.eps)
rows = [t.view(B * S, -1) for t in (x, cos, sin)]
jit.launch(kernel, rows[0], *weights, *rows[1:], *outputs, *norms, target="sm_100a")

exact = reference.qkv_projection(*(t.double() for t in (x, cos, sin, *weights, *norms)), config)
print(kernel)
for name, out, expected in zip("qkv", outputs, exact, strict=True):
    error = ((out.view(expected.shape) - expected).norm() / expected.norm()).item()
    print(f"{name}: relative error against float64: {error:.2g}")
    assert error < 0.005
