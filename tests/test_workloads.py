"""The suite's cases, the input sets and the two pass rules."""

import math

import pytest
import torch

from cute_gemma.config import MASKED_AT_OR_BELOW
from cute_gemma.workloads import (
    WORKLOADS,
    case_for,
    check_output,
    relative_error,
    suite_cases,
    workload,
)

INPUT_SETS = [
    (number, name)
    for number, problem in WORKLOADS.items()
    for kind in problem.kinds
    for name in problem.kinds[kind]
]


def test_there_are_sixteen_distinct_cases_a_workload():
    for number in ("047", "051"):
        cases = suite_cases(number)
        assert len({(c.batch_size, c.seq_len) for c in cases}) == 16
        assert all(0 < c.max_atol < 0.1 and c.max_rtol == 0.05 and c.b200_sol_us > 0 for c in cases)


def test_the_odd_lengths_of_the_suite_are_there():
    assert {c.seq_len for c in suite_cases("047")} >= {293, 613, 2053, 3557, 8192}
    assert {c.seq_len for c in suite_cases("051")} >= {131, 373, 541, 997, 8192}


def test_a_size_off_the_suite_gets_the_tightest_tolerances():
    assert case_for("047", 1, 1024).max_atol == 0.037
    off = case_for("047", 3, 129)
    assert (off.max_atol, off.max_rtol, off.b200_sol_us) == (0.033, 0.05, None)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="workload: got '048', want one of 047, 051"):
        workload("048")
    with pytest.raises(
        ValueError, match="inputs: got 'dense', want one of suite, causal, structured, noncausal"
    ):
        workload("047").input_sets("dense")
    with pytest.raises(ValueError, match="inputs: got 'noncausal', want one of suite, realistic, structured for"):
        workload("051").input_sets("noncausal")
    with pytest.raises(ValueError, match="inputs: got 'dense', want one of suite, causal, outliers"):
        workload("047").make_inputs("dense", 1, 1)
    with pytest.raises(ValueError, match="batch, seq: got 1, 0, want at least 1 each"):
        workload("047").make_inputs("suite", 1, 0)


@pytest.mark.parametrize("number, name", INPUT_SETS)
def test_inputs_are_finite_and_repeat_by_seed(number, name):
    problem = workload(number)
    first = problem.make_inputs(name, 2, 5, seed=3).tensors()
    again = problem.make_inputs(name, 2, 5, seed=3).tensors()
    other = problem.make_inputs(name, 2, 5, seed=4).tensors()
    assert all(torch.isfinite(t).all() for t in first.values())
    assert all(torch.equal(t, again[key]) for key, t in first.items())
    assert not torch.equal(first["hidden_states"], other["hidden_states"])
    wide = {"q_rstd", "k_rstd", "attention_mask"}
    assert all(t.dtype == torch.bfloat16 for key, t in first.items() if key not in wide)


def test_suite_inputs_have_the_suite_distributions():
    inputs = workload("047").make_inputs("suite", 2, 64)
    assert inputs.hidden_states.float().std().item() == pytest.approx(1, rel=0.02)
    assert inputs.q_proj_weight.float().std().item() == pytest.approx(3072**-0.5, rel=0.02)
    assert (inputs.q_norm_weight == 1).all() and (inputs.k_norm_weight == 1).all()
    assert not torch.equal(inputs.cos[..., :64], inputs.cos[..., 64:])
    assert (inputs.cos.float().square() + inputs.sin.float().square() - 1).abs().max() > 0.1
    below = torch.ones(64, 64, dtype=torch.bool).tril()
    assert (inputs.attention_mask[:, 0, below] == 0).all()
    assert (inputs.attention_mask[:, 0, ~below] == torch.finfo(torch.bfloat16).min).all()


def test_masks_are_what_their_names_say():
    make = workload("047").make_inputs
    assert (make("bias-minus-1e4", 1, 9).attention_mask == -1e4).all()
    blocks = make("block-diagonal", 2, 64).attention_mask[1, 0] == 0
    assert torch.equal(blocks, torch.block_diag(*[torch.ones(16, 16)] * 4).bool())
    fully = (make("masked-row", 2, 9).attention_mask <= MASKED_AT_OR_BELOW).all(-1)
    assert fully[:, 0].nonzero().tolist() == [[0, 4], [1, 4]]


def test_saturated_inputs_reach_the_cap():
    problem = workload("047")
    stages = problem.reference(problem.make_inputs("saturated", 1, 64), problem.config)
    logits = torch.einsum("qd,kd->qk", stages.q[0, :, 0].double(), stages.k[0, :, 0].double()) * 128**-0.5
    assert (logits.abs() > problem.config.softcap).double().mean() > 0.25


@pytest.mark.parametrize("name", [name for number, name in INPUT_SETS if number == "047"])
def test_the_exact_forward_passes_both_rules(name):
    """A set on which even the exact answer left the suite's tolerance would say nothing about a kernel."""
    problem, case = workload("047"), case_for("047", 1, 131)
    inputs = problem.make_inputs(name, 1, 131)
    eager = problem.reference(inputs, problem.config).output
    exact = problem.reference(inputs.to(torch.float64), problem.config).output
    check = check_output("output", exact.bfloat16(), eager, exact, case.max_atol, case.max_rtol)
    assert check.passed, check


@pytest.mark.parametrize("name", [name for number, name in INPUT_SETS if number == "051"])
def test_the_eager_backward_passes_both_rules(name):
    problem, case = workload("051"), case_for("051", 1, 131)
    inputs = problem.make_inputs(name, 1, 131)
    eager = problem.reference(inputs, problem.config)
    exact = problem.reference(inputs.to(torch.float64), problem.config)
    for output in problem.outputs:
        tensors = (getattr(eager, output), getattr(eager, output), getattr(exact, output))
        check = check_output(output, *tensors, case.max_atol, case.max_rtol)
        assert check.passed and check.eager_error < 0.01, check


def test_ignoring_the_mask_fails_both_rules():
    problem, case = workload("047"), case_for("047", 1, 131)
    inputs = problem.make_inputs("random-bias", 1, 131)
    eager = problem.reference(inputs, problem.config).output
    exact = problem.reference(inputs.to(torch.float64), problem.config).output
    causal = problem.make_inputs("suite", 1, 131)
    wrong = problem.reference(causal, problem.config).output
    check = check_output("output", wrong, eager, exact, case.max_atol, case.max_rtol)
    assert not check.suite_pass and not check.project_pass


def test_the_suite_rule_allows_one_percent_of_outliers_and_no_more():
    eager = torch.ones(1000)
    exact = eager.double()
    for count, passes in ((10, True), (11, False)):
        out = eager.clone()
        out[:count] = 1.2
        assert check_output("t", out, eager, exact, 0.1, 0.05).suite_pass is passes


def test_the_project_rule_allows_a_quarter_more_than_eager():
    exact = torch.full((10,), 1.0, dtype=torch.float64)
    eager = torch.full((10,), 1.04, dtype=torch.float64)
    for value, passes in ((1.0499, True), (1.0501, False), (0.9501, True), (1.0, True)):
        out = torch.full((10,), value, dtype=torch.float64)
        assert check_output("t", out, eager, exact, 1.0, 0.0).project_pass is passes


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_value_that_is_not_finite_fails_both_rules(bad):
    eager = torch.ones(1000)
    out = eager.clone()
    out[7] = bad
    check = check_output("t", out, eager, eager.double(), 0.1, 0.05)
    assert not check.finite and not check.suite_pass and not check.project_pass


def test_a_wrong_shape_is_an_error():
    with pytest.raises(ValueError, match=r"t: got shape \(3,\), want \(2,\)"):
        check_output("t", torch.ones(3), torch.ones(2), torch.ones(2), 0.1, 0.1)


def test_relative_error_of_zeros():
    zeros = torch.zeros(3)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(torch.ones(3), zeros) == math.inf
