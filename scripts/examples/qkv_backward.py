"""Compiles the two kernels of the QKV backward and runs them on CPU tensors, in the emulator."""

import torch

from cute_gemma import jit, reference
from cute_gemma.kernels.common.norm_backward import NormBackward
from cute_gemma.kernels.sm100.qkv_grads import QkvGradients

B, S, C, H, KV, D = 2, 70, 256, 2, 1, 128


def bf16(*shape, scale=1.0):
    return (scale * torch.randn(shape)).bfloat16()


def empty(*shape, dtype=torch.bfloat16):
    return torch.full(shape, torch.nan, dtype=dtype)


grads = [bf16(B, heads, S, D) for heads in (H, KV, KV)]
normed = [bf16(B, heads, S, D) for heads in (H, KV)]
rstd = [torch.rand(B, heads, S, 1) + 0.5 for heads in (H, KV)]
norm_weights = [bf16(D, scale=0.3) for _ in "qk"]
hidden = bf16(B, S, C)
weights = [bf16(heads * D, C, scale=C**-0.5) for heads in (H, KV, KV)]

norm = NormBackward(D)
projected = [torch.empty_like(grad) for grad in grads[:2]]
partials = torch.empty(norm.partials_shape)
sides = [
    (grad.view(-1, D), side_normed.view(-1, D), side_rstd.view(-1), weight, out.view(-1, D))
    for grad, side_normed, side_rstd, weight, out in zip(grads, normed, rstd, norm_weights, projected)
]
jit.launch(norm, *sides[0], *sides[1], partials, target="sm_100a")

kernel = QkvGradients(C, H, KV, D, norm=norm.tuning)
results = [empty(B, S, C), *(torch.full_like(w, torch.nan) for w in weights)]
norm_results = [empty(D, dtype=torch.float32) for _ in "qk"]
jit.launch(
    kernel, *projected, grads[2], hidden, *weights, partials, *results, *norm_results, target="sm_100a"
)

exact = reference.qkv_backward(
    *(t.double() for t in (*grads, hidden, *weights, *norm_weights, *rstd, *normed))
)
errors = [((a - b).norm() / b.norm()).item() for a, b in zip((*results, *norm_results), exact)]
print(f"{norm}\n{kernel}\nrelative error against float64: {', '.join(f'{error:.2g}' for error in errors)}")
assert max(errors[:4]) < 0.004 and max(errors[4:]) < 1e-5
