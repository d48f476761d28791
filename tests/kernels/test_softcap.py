"""The fitted polynomials of the softcapped exponential: as good as they are said to be, and what the levels
rely on."""

import math

import numpy as np
import pytest

from cute_gemma.kernels.common.softcap import (
    EXP2_COEFFICIENTS,
    EXP2_ERROR,
    EXP2_EXPONENT_LIMIT,
    TANH_ERROR,
    TANH_FITS,
    Softcap,
)


def minimax(basis, target, rounds=2000):
    """Lawson's method: least squares reweighted by its own errors tends to the smallest largest error."""
    weight = np.ones_like(target)
    for _ in range(rounds):
        root = np.sqrt(weight)
        coefficients = np.linalg.lstsq(basis * root[:, None], target * root, rcond=None)[0]
        error = np.abs(basis @ coefficients - target)
        weight = weight * (error + 1e-12)
        weight /= weight.sum()
    return coefficients, error.max()


@pytest.mark.parametrize("fit", TANH_FITS, ids=lambda f: f"{f.range}")
def test_tanh_coefficients_are_the_minimax_fit(fit):
    x = np.linspace(0, fit.range, 2001)[1:]
    basis = np.stack([x ** (2 * k + 1) for k in range(len(fit.coefficients))], 1)
    coefficients, best = minimax(basis, np.tanh(x))
    error = np.abs(fit(x) - np.tanh(x)).max()
    assert error <= TANH_ERROR
    assert error <= 1.02 * best
    # Neighbouring fits are as good, so the coefficients agree loosely, the values tightly.
    assert np.abs(basis @ (coefficients - np.array(fit.coefficients))).max() <= 0.1 * best


@pytest.mark.parametrize("fit", TANH_FITS, ids=lambda f: f"{f.range}")
def test_tanh_polynomials_increase_everywhere(fit):
    """So that a weight tells on which side of the range's end its score was."""
    derivative = np.polynomial.Polynomial([c * (2 * k + 1) for k, c in enumerate(fit.coefficients)])  # in x^2
    roots = derivative.roots()
    assert not any(abs(r.imag) < 1e-9 and r.real > 0 for r in roots)
    assert fit.coefficients[-1] > 0


def test_exp2_coefficients_are_the_minimax_fit():
    f = np.linspace(-0.5, 0.5, 2001)
    basis = np.stack([f**k / 2**f for k in range(len(EXP2_COEFFICIENTS))], 1)
    _, best = minimax(basis, np.ones_like(f))
    error = np.abs(basis @ np.array(EXP2_COEFFICIENTS) - 1).max()
    assert error <= EXP2_ERROR and error <= 1.02 * best


@pytest.mark.parametrize("cap", [1.0, 50.0, 60.0])
@pytest.mark.parametrize("fit", TANH_FITS, ids=lambda f: f"{f.range}")
def test_scaled_coefficients_give_the_capped_logit(cap, fit):
    softcap = Softcap(0.0884, cap)
    limit = softcap.score_limit(fit)
    for s in (-limit, 0.3 * limit, limit):
        exponent = sum(a * s ** (2 * k + 1) for k, a in enumerate(softcap.coefficients(fit)))
        capped = cap * math.tanh(s * 0.0884 / cap)
        assert abs(exponent * math.log(2) - capped) <= 1.001 * cap * TANH_ERROR
    end = math.log2(math.e) * cap * math.tanh(fit.range)
    assert softcap.exponent_limit(fit) == pytest.approx(end, rel=1e-4)


@pytest.mark.parametrize("cap", [1.0, 50.0, 60.0])
def test_exponents_on_the_fma_pipe_stay_normal(cap):
    softcap, fit = Softcap(0.0884, cap), TANH_FITS[0]
    limit = softcap.score_limit_on_fma(fit)
    exponent = sum(a * limit ** (2 * k + 1) for k, a in enumerate(softcap.coefficients(fit)))
    assert 0.9 * EXP2_EXPONENT_LIMIT <= exponent <= EXP2_EXPONENT_LIMIT


def test_a_polynomial_whose_coefficients_leave_fp32_is_not_used():
    assert Softcap(1e-9, 60.0).score_limit(TANH_FITS[1]) == 0.0
