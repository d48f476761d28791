"""Compiles the output projection alone and runs it on CPU tensors, in the emulator."""

import torch

from cute_gemma import jit
from cute_gemma.kernels.sm100.out_proj import OutputProjection

M, C, FEATURES = 150, 256, 512

attended = torch.randn(M, FEATURES).bfloat16()
weight = (torch.randn(C, FEATURES) / FEATURES**0.5).bfloat16()
out = torch.full((M, C), torch.nan, dtype=torch.bfloat16)

kernel = OutputProjection(C, FEATURES)
jit.launch(kernel, attended, weight, out, target="sm_100a")

exact = attended.double() @ weight.double().T
error = ((out - exact).norm() / exact.norm()).item()
print(f"{kernel}\nrelative error against float64: {error:.2g}")
assert error < 0.003
