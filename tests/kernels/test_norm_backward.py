"""The norm backward kernel: gradients of rows, partial sums of the norm-weight gradients, RoPE undone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_gemma import jit, reference
from cute_gemma.emulator import Options
from cute_gemma.kernels.common.norm_backward import NormBackward, NormBackwardTuning, chunk_rows
from cute_gemma.kernels.common.rope_backward import RopeBackward

TARGET = "sm_100a"
SCHEDULES = ("lazy", "random:1", "random:2", "random:3")


def draw(generator, *shape):
    return torch.randn(shape, generator=generator).bfloat16()


def side(rows, dim, seed):
    """grad, normed, rstd, norm weight and the place for the result, NaN."""
    generator = torch.Generator().manual_seed(seed)
    rstd = torch.randn(rows, generator=generator).abs() + 0.1
    weight = torch.tensor([-1.0, 0.0, 3.0]).repeat(dim)[:dim] + 0.05 * torch.randn(dim, generator=generator)
    out = torch.full((rows, dim), math.nan, dtype=torch.bfloat16)
    return [draw(generator, rows, dim), draw(generator, rows, dim), rstd, weight.bfloat16(), out]


def launch(kernel, q, k, schedule="lazy"):
    """Runs the kernel; returns the partial sums."""
    partials = torch.full(kernel.partials_shape, math.nan)
    jit.launch(kernel, *q, *k, partials, target=TARGET, emulation=Options(schedule=schedule))
    return partials


def split_partials(kernel, q, k, partials):
    chunk = chunk_rows(len(q[0]), len(k[0]), kernel.tuning)
    ctas_q, ctas_k = (math.ceil(len(t[0]) / chunk) for t in (q, k))
    assert partials[ctas_q + ctas_k :].isnan().all(), "a row that no CTA owns was written"
    return partials[:ctas_q], partials[ctas_q : ctas_q + ctas_k]


def relative_error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    "dim, rows_q, rows_k", [(256, 524, 131), (256, 1, 1), (128, 333, 77), (128, 2, 5), (256, 3988, 997)]
)
def test_gradients_match_the_reference(dim, rows_q, rows_k):
    kernel = NormBackward(dim)
    q, k = side(rows_q, dim, 0), side(rows_k, dim, 1)
    partials = launch(kernel, q, k)
    for (grad, normed, rstd, weight, out), part in zip((q, k), split_partials(kernel, q, k, partials)):
        args = grad[None, None], weight, rstd[None, None, :, None], normed[None, None]
        eager, _ = reference._norm_backward(*args)
        # Both round g at the same place, and the result once: they differ where a sum's order tips a
        # rounding.
        torch.testing.assert_close(out, eager[0, :, 0], rtol=2**-7, atol=2**-7)
        exact, exact_weight = reference._norm_backward(*(t.double() for t in args))
        eager_error = relative_error(eager, exact)
        assert relative_error(out, exact[0, :, 0]) <= 1.05 * eager_error
        assert relative_error(part.double().sum(0), exact_weight) <= 1e-6


def test_results_are_bit_identical_across_schedules():
    kernel = NormBackward(128)
    results = []
    for schedule in SCHEDULES:
        q, k = side(333, 128, 0), side(77, 128, 1)
        partials = launch(kernel, q, k, schedule)
        tensors = (q[-1], k[-1], *split_partials(kernel, q, k, partials))
        results.append([t.contiguous().view(torch.uint8) for t in tensors])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@given(
    st.integers(1, 2**28),
    st.integers(1, 2**28),
    st.builds(NormBackwardTuning, warps=st.integers(1, 32), ctas=st.integers(3, 400)),
)
def test_chunks_never_take_more_ctas_than_there_are_partials(rows_q, rows_k, tuning):
    chunk = chunk_rows(rows_q, rows_k, tuning)
    assert chunk >= tuning.warps
    assert -(-rows_q // chunk) + -(-rows_k // chunk) <= tuning.ctas


@pytest.mark.parametrize("dim", [64, 192, 512])
def test_other_head_dims_are_refused(dim):
    with pytest.raises(ValueError, match=f"^head_dim: got {dim}, want 128 or 256"):
        NormBackward(dim)


@pytest.mark.parametrize("kernel", [NormBackward(128), NormBackward(256), RopeBackward(4, 1, 256)])
def test_no_stack_and_no_local_memory(kernel):
    (report,) = jit.inspect(kernel, TARGET)
    assert (report.stack_bytes, report.local_loads, report.local_stores) == (0, 0, 0)


@pytest.mark.parametrize(
    "batch, heads, kv_heads, seq, dim", [(2, 4, 1, 37, 256), (3, 6, 2, 11, 128), (1, 1, 1, 1, 64)]
)
def test_rope_backward_is_the_gradient_of_rope(batch, heads, kv_heads, seq, dim):
    generator = torch.Generator().manual_seed(0)
    cos, sin = (draw(generator, batch, seq, dim) for _ in range(2))
    grads = [draw(generator, batch, h, seq, dim) for h in (heads, kv_heads)]
    outs = [torch.full_like(grad, math.nan) for grad in grads]
    jit.launch(RopeBackward(heads, kv_heads, dim), *grads, cos, sin, *outs, target=TARGET)
    for grad, out in zip(grads, outs):
        before = torch.zeros(batch, seq, grad.shape[1], dim, dtype=torch.float64, requires_grad=True)
        rotated = reference.apply_rope(before, cos.double(), sin.double())
        rotated.backward(grad.double().transpose(1, 2))
        exact = before.grad.transpose(1, 2)
        # One rounding of an fp32 result: no worse than rounding the exact one, but for ties.
        assert relative_error(out, exact) <= 1.01 * relative_error(exact.bfloat16(), exact)


def test_rope_backward_may_write_over_its_input():
    generator = torch.Generator().manual_seed(0)
    cos, sin = (draw(generator, 1, 9, 128) for _ in range(2))
    grads = [draw(generator, 1, h, 9, 128) for h in (2, 1)]
    outs = [torch.empty_like(grad) for grad in grads]
    kernel = RopeBackward(2, 1, 128)
    jit.launch(kernel, *grads, cos, sin, *outs, target=TARGET)
    jit.launch(kernel, *grads, cos, sin, *grads, target=TARGET)
    assert all(torch.equal(a, b) for a, b in zip(grads, outs))


