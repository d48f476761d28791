"""The eager reference against independent formulas."""

import math

import pytest
import torch
from torch.nn import functional

from cute_gemma import reference
from cute_gemma.config import AttentionConfig
from cute_gemma.workloads import workload

SMALL = AttentionConfig(hidden=64, heads=6, kv_heads=2, head_dim=16)


def _qkv(config, batch, seq, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(heads):
        return torch.randn(batch, seq, heads, config.head_dim, generator=generator, dtype=torch.float64).to(
            dtype
        )

    return draw(config.heads), draw(config.kv_heads), draw(config.kv_heads)


def _one_shot_attention(q, k, v, mask, config):
    """The specification's formula over all heads at once; mask [B, 1, S, S]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(config.group, dim=1) for t in (k, v))
    logits = (q @ k.transpose(2, 3)) * config.head_dim**-0.5
    if config.softcap is not None:
        logits = config.softcap * torch.tanh(logits / config.softcap)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = torch.softmax((logits + mask).to(wide), dim=-1).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def test_rms_norm_is_torch_rms_norm_with_one_plus_weight():
    t = torch.randn(3, 5, 16, dtype=torch.float64)
    weight = torch.randn(16, dtype=torch.float64)
    expected = functional.rms_norm(t, (16,), 1 + weight, eps=1e-6)
    torch.testing.assert_close(reference.rms_norm(t, weight, 1e-6), expected, rtol=1e-12, atol=0)


def test_rms_norm_of_bfloat16_computes_in_float32_and_rounds_once():
    t = torch.randn(7, 128).bfloat16()
    weight = torch.randn(128).bfloat16()
    expected = functional.rms_norm(t.float(), (128,), 1 + weight.float(), eps=1e-6).bfloat16()
    assert (
        reference.rms_norm(t, weight, 1e-6) != expected
    ).double().mean() < 0.01  # fp32 sums may differ in order


def test_rope_with_equal_halves_is_a_complex_rotation():
    t = torch.randn(2, 3, 4, 16, dtype=torch.float64)
    angle = torch.randn(2, 3, 8, dtype=torch.float64)
    both = torch.cat((angle, angle), dim=-1)
    rotated = torch.complex(t[..., :8], t[..., 8:]) * torch.polar(torch.ones_like(angle), angle).unsqueeze(2)
    expected = torch.cat((rotated.real, rotated.imag), dim=-1)
    torch.testing.assert_close(reference.apply_rope(t, both.cos(), both.sin()), expected)


def test_rope_reads_both_halves_of_cos_and_sin():
    t = torch.arange(1.0, 5.0, dtype=torch.float64).view(1, 1, 1, 4)
    cos = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    sin = torch.tensor([[[10.0, 20.0, 30.0, 40.0]]], dtype=torch.float64)
    expected = [1 - 30, 4 - 80, 9 + 30, 16 + 80]
    assert reference.apply_rope(t, cos, sin).flatten().tolist() == expected


@pytest.mark.parametrize("seq", [1, 2, 37])
def test_uncapped_attention_is_torch_attention(seq):
    config = AttentionConfig(hidden=64, heads=6, kv_heads=2, head_dim=16, softcap=None)
    q, k, v = _qkv(config, 2, seq)
    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*swapped, is_causal=True, enable_gqa=True).transpose(
        1, 2
    )
    torch.testing.assert_close(reference.attention(q, k, v, "causal", config), expected)
    expected = functional.scaled_dot_product_attention(*swapped, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(reference.attention(q, k, v, None, config), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 64, 1 << 20])
def test_blocks_of_rows_change_nothing(dtype, chunk, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_LOGITS", chunk)
    q, k, v = _qkv(SMALL, 2, 19, dtype)
    mask = torch.randn(2, 1, 19, 19).to(dtype)
    out = reference.attention(q, k, v, mask, SMALL)
    expected = _one_shot_attention(q, k, v, mask, SMALL)
    tolerance = 1e-12 if dtype == torch.float64 else 2**-7
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert out.dtype == dtype


def test_causal_string_equals_the_causal_tensor():
    q, k, v = _qkv(SMALL, 2, 33)
    mask = torch.full((1, 1, 33, 33), torch.finfo(torch.bfloat16).min, dtype=torch.float64).triu(1)
    by_tensor = reference.attention(q, k, v, mask, SMALL)
    torch.testing.assert_close(
        reference.attention(q, k, v, "causal", SMALL), by_tensor, rtol=1e-13, atol=1e-13
    )


def test_a_window_hides_what_lies_before_it():
    config = AttentionConfig(hidden=64, heads=2, kv_heads=1, head_dim=16, window=3)
    q, k, v = _qkv(config, 1, 9)
    distance = torch.arange(9)[:, None] - torch.arange(9)[None, :]
    mask = torch.zeros(1, 1, 9, 9, dtype=torch.float64).masked_fill(
        (distance < 0) | (distance > 2), -math.inf
    )
    torch.testing.assert_close(
        reference.attention(q, k, v, "causal", config), _one_shot_attention(q, k, v, mask, config)
    )
    with pytest.raises(ValueError, match="mask: a config with a window wants 'causal'"):
        reference.attention(q, k, v, None, config)


@pytest.mark.parametrize(
    "lowest", [torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min, -math.inf]
)
def test_a_fully_masked_row_yields_zeros_and_leaves_others_alone(lowest):
    q, k, v = _qkv(SMALL, 1, 8)
    mask = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    expected = _one_shot_attention(q, k, v, mask, SMALL)
    mask[0, 0, 5] = lowest
    out = reference.attention(q, k, v, mask, SMALL)
    assert torch.count_nonzero(out[0, 5]) == 0
    keep = torch.arange(8) != 5
    torch.testing.assert_close(out[:, keep], expected[:, keep])
    out = reference.attention(q, k, torch.full_like(v, math.inf), mask, SMALL)
    assert torch.count_nonzero(out[0, 5]) == 0 and not out[:, keep].isfinite().any(), "whatever v holds"


@pytest.mark.parametrize("bias", [-100.0, -1e4, 200.0])
def test_a_uniform_bias_changes_nothing(bias):
    q, k, v = _qkv(SMALL, 1, 21)
    mask = torch.full((1, 1, 21, 21), bias, dtype=torch.float64)
    out = reference.attention(q, k, v, mask, SMALL)
    torch.testing.assert_close(out, reference.attention(q, k, v, None, SMALL), rtol=1e-9, atol=1e-9)


def test_the_mask_of_each_batch_entry_is_its_own():
    q, k, v = _qkv(SMALL, 2, 5)
    mask = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    both = reference.attention(q, k, v, mask, SMALL)
    second = reference.attention(q[1:], k[1:], v[1:], mask[1:], SMALL)
    torch.testing.assert_close(both[1:], second)
    shared = reference.attention(q, k, v, mask[1:], SMALL)
    torch.testing.assert_close(shared[1:], second)


def test_unknown_mask_string_is_rejected():
    with pytest.raises(ValueError, match="mask: got 'full', want an additive tensor, 'causal' or None"):
        reference.attention(*_qkv(SMALL, 1, 2), "full", SMALL)


def test_eager_bfloat16_attention_has_the_known_error_on_suite_inputs():
    problem = workload("047")
    stages = problem.reference(problem.make_inputs("suite", 1, 256), problem.config)
    assert all(t.dtype == torch.bfloat16 for t in stages)
    q, k, v = (t.double() for t in stages[:3])
    exact = reference.attention(q, k, v, "causal", problem.config)
    error = ((stages.attention.double() - exact).norm() / exact.norm()).item()
    assert 0.012 < error < 0.025  # bfloat16 logits make it so: rounding the result alone would cost 0.0017


def test_forward_stages_chain():
    problem = workload("047")
    config = AttentionConfig(hidden=64, heads=6, kv_heads=2, head_dim=16)
    inputs = problem.make_inputs("suite", 2, 7, config=config).to(torch.float64)
    stages = problem.reference(inputs, config)
    assert stages.q.shape == (2, 7, 6, 16) and stages.k.shape == stages.v.shape == (2, 7, 2, 16)
    third_head = (inputs.hidden_states @ inputs.q_proj_weight.T)[..., 32:48]
    normed = reference.rms_norm(third_head, inputs.q_norm_weight, config.eps)
    rotated = normed * inputs.cos + reference.rotate_half(normed) * inputs.sin
    torch.testing.assert_close(stages.q[:, :, 2], rotated)
    torch.testing.assert_close(stages.v.flatten(2), inputs.hidden_states @ inputs.v_proj_weight.T)
    torch.testing.assert_close(stages.output, stages.attention.reshape(2, 7, 96) @ inputs.o_proj_weight.T)


def test_qkv_projection_without_norm_only_rotates():
    config = AttentionConfig(hidden=64, heads=2, kv_heads=1, head_dim=16, qk_norm=False)
    inputs = workload("047").make_inputs("suite", 1, 3, config=config).to(torch.float64)
    weights = (inputs.q_proj_weight, inputs.k_proj_weight, inputs.v_proj_weight)
    q, _, _ = reference.qkv_projection(
        inputs.hidden_states, inputs.cos, inputs.sin, *weights, None, None, config
    )
    plain = (inputs.hidden_states @ inputs.q_proj_weight.T).view(1, 3, 2, 16)
    torch.testing.assert_close(q, reference.apply_rope(plain, inputs.cos, inputs.sin))


def test_qkv_backward_is_autograd_of_norm_and_projections():
    """In float64 with true rstd and normed, each gradient equals autograd's."""
    config = AttentionConfig(hidden=24, heads=4, kv_heads=2, head_dim=16, softcap=None)
    inputs = workload("051").make_inputs("suite", 2, 5, config=config).to(torch.float64)
    leaves = {
        name: getattr(inputs, name).clone().requires_grad_()
        for name in ("hidden_states", "q_weight", "k_weight", "v_weight", "q_norm_weight", "k_norm_weight")
    }
    saved, loss = {}, 0.0
    for part in "qkv":
        projected = (
            (leaves["hidden_states"] @ leaves[f"{part}_weight"].T).unflatten(-1, (-1, 16)).transpose(1, 2)
        )
        if part == "v":
            loss = loss + (projected * inputs.grad_value).sum()
            continue
        rstd = torch.rsqrt(projected.square().mean(-1, keepdim=True) + config.eps)
        normed = projected * rstd
        saved[f"{part}_rstd"], saved[f"{part}_normed"] = rstd.detach(), normed.detach()
        grad = inputs.grad_query if part == "q" else inputs.grad_key
        loss = loss + (normed * (1 + leaves[f"{part}_norm_weight"]) * grad).sum()
    loss.backward()
    gradients = reference.qkv_backward(**{**inputs.tensors(), **saved})
    for name, leaf in leaves.items():
        torch.testing.assert_close(
            getattr(gradients, name), leaf.grad, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_qkv_backward_of_bfloat16_keeps_norm_weight_gradients_in_float32():
    problem = workload("051")
    inputs = problem.make_inputs("suite", 1, 9)
    gradients = problem.reference(inputs, problem.config)
    exact = problem.reference(inputs.to(torch.float64), problem.config)
    for name, got in gradients._asdict().items():
        wide = name.endswith("norm_weight")
        assert got.dtype == (torch.float32 if wide else torch.bfloat16)
        error = (got.double() - getattr(exact, name)).norm() / getattr(exact, name).norm()
        assert error < (1e-6 if wide else 0.01), name
