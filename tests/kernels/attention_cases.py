"""Inputs, reference and launch of the attention tests."""

import math
from functools import lru_cache

import torch

from cute_gemma import jit, reference
from cute_gemma.config import AttentionConfig
from cute_gemma.emulator import LaunchReport, Options
from cute_gemma.kernels.common.mask import MASK_TILE, MASKED_AT_OR_BELOW, SCAN_COLUMNS
from cute_gemma.kernels.common.mask_scan import MaskScan

TARGET = "sm_100a"
LOWEST = torch.finfo(torch.bfloat16).min


@lru_cache(maxsize=32)
def suite_qkv(batch, seq, heads, kv_heads, head_dim, seed=0):
    """q, k, v as the suite's projection yields them: rows normalised to scale 2 and rotated by unrelated
    angles."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    cos, sin = (draw(batch, seq, head_dim).float().clamp(-math.pi, math.pi) for _ in range(2))
    cos, sin = cos.cos().bfloat16(), sin.sin().bfloat16()
    ones = torch.ones(head_dim, dtype=torch.bfloat16)
    q, k = (
        reference.apply_rope(reference.rms_norm(draw(batch, seq, n, head_dim), ones, 1e-6), cos, sin)
        for n in (heads, kv_heads)
    )
    return q, k, draw(batch, seq, kv_heads, head_dim)


def causal(seq):
    return torch.full((seq, seq), LOWEST).triu(1)[None, None]


def block_diagonal(seq, size=100):
    block = torch.arange(seq) // size
    return torch.where(block[:, None] == block[None], 0.0, LOWEST)[None, None]


def masks(seq, batch=1):
    """Additive masks [B or 1, 1, S, S] in fp32, by name."""
    generator = torch.Generator().manual_seed(7)
    position = torch.arange(seq)
    random = 3 * torch.randn(batch, 1, seq, seq, generator=generator)
    rows_masked = causal(seq).clone()
    rows_masked[0, 0, seq // 2] = LOWEST
    rows_masked[0, 0, : seq // 4] = -math.inf
    late = causal(seq).clone()
    late[..., : seq // 2] = LOWEST
    distance = (position[:, None] - position[None]).abs()
    return {
        "causal": causal(seq),
        "zero": torch.zeros(1, 1, seq, seq),
        "random": random,
        "random causal": (random + causal(seq)).clamp(min=LOWEST),
        "-100": torch.full((1, 1, seq, seq), -100.0),
        "-1e4": torch.full((1, 1, seq, seq), -1e4),
        "+200": torch.full((1, 1, seq, seq), 200.0),
        "block diagonal": block_diagonal(seq),
        "masked rows": rows_masked,
        "all masked": torch.full((1, 1, seq, seq), LOWEST),
        # Query tiles without any key, and the others with late ones only.
        "late keys": late,
        "distance": (causal(seq) - 0.5 * distance).clamp(min=LOWEST),
    }


def scan(mask, schedule="lazy"):
    """MaskScan's row_max and classes, from NaN and from a class that does not exist."""
    batch, seq = mask.shape[0], mask.shape[-1]
    tiles = math.ceil(seq / MASK_TILE)
    row_max = torch.full((batch, math.ceil(seq / SCAN_COLUMNS), seq), math.nan)
    classes = torch.full((batch, tiles, tiles), 99, dtype=torch.uint8)
    kernel = MaskScan("f32" if mask.dtype == torch.float32 else "bf16")
    options = Options(schedule=schedule)
    jit.launch(kernel, mask, row_max, classes, target=TARGET, backend="emulator", emulation=options)
    return row_max, classes


def run(kernel, q, k, v, mask=None, schedule="lazy", hazards=True) -> tuple[torch.Tensor, LaunchReport]:
    """The kernel's output, from NaN, and the launch's report; a mask goes through MaskScan."""
    out = torch.full_like(q, math.nan)
    extra = () if mask is None else (mask, *scan(mask, schedule))
    options = Options(schedule=schedule, hazards=hazards)
    reports = jit.launch(kernel, q, k, v, *extra, out, target=TARGET, backend="emulator", emulation=options)
    return out, reports[0]


def errors(kernel, out, q, k, v, mask=None):
    """Relative errors (Frobenius) of `out` and of eager bf16 against float64."""
    config = AttentionConfig(
        heads=kernel.heads, kv_heads=kernel.kv_heads, head_dim=kernel.head_dim, softcap=kernel.softcap,
        scale=kernel.scale, window=kernel.window,
    )  # fmt: skip
    named = "causal" if kernel.mask == "causal" else None
    wide = None
    if mask is not None:
        # In float64 a masked entry weighs nothing, however large a cap or an unmasked entry may be.
        wide = mask.double().masked_fill(mask <= MASKED_AT_OR_BELOW, torch.finfo(torch.float64).min)
    exact = reference.attention(*(t.double() for t in (q, k, v)), named if mask is None else wide, config)
    eager = reference.attention(q, k, v, named if mask is None else mask.to(q.dtype), config)
    return relative_error(out, exact), relative_error(eager, exact)


def relative_error(out, exact):
    assert out.isfinite().all(), "the output holds NaN or infinity"
    size = exact.norm()
    return ((out.double() - exact).norm() / size).item() if size > 0 else out.double().norm().item()


def bits(t):
    return t.contiguous().view(torch.int16)
