"""Random problems against the reference under random schedules, and every problem that once failed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "perf"))

import fuzz  # noqa: E402

# One compilation each; what a launch may vary is drawn.
COMPILED = (
    fuzz.Problem("attention", heads=4, kv_heads=2),
    fuzz.Problem("attention", heads=1, head_dim=64, softcap=None),
    fuzz.Problem("forward", hidden=72),
    fuzz.Problem("qkv backward", hidden=72),
    fuzz.Problem("rope backward", heads=3, head_dim=80),
)
SCHEDULES = st.sampled_from(("lazy", "eager")) | st.integers(0, 999).map("random:{}".format)
# Problems that failed once, by what was wrong.
REGRESSIONS = {
    "tile classes read ahead of griddepcontrol.wait": (
        "sm_100a",
        fuzz.Problem("attention", seq=293, mask="random"),
    ),
    "zeros staged over q while q was on its way": (
        "sm_100a",
        fuzz.Problem("attention", seq=1, mask="all masked"),
    ),
    "a tile's class overwritten before it was read": (
        "sm_90a",
        fuzz.Problem("attention", seq=700, mask="random"),
    ),
}


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    compiled=st.sampled_from(COMPILED),
    batch=st.integers(1, 3),
    seq=st.integers(1, 300),
    mask=st.sampled_from(fuzz.MASKS),
    mask_dtype=st.sampled_from(("bf16", "f32")),
    mask_batch=st.booleans(),
    offset=st.sampled_from((0, 8)),
    gain=st.sampled_from((0.0, 1.0, 30.0)),
    schedule=SCHEDULES,
    data=st.integers(0, 99),
)
def test_kernels_match_the_reference_on_random_problems(compiled, **drawn):
    assert fuzz.check(replace(compiled, **drawn)) <= 1


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_once_failed_passes(name):
    target, problem = REGRESSIONS[name]
    assert fuzz.check(problem, target) <= 1


def test_a_problem_number_always_means_the_same_problem():
    assert fuzz.problem(7) == fuzz.problem(7)
    assert len({fuzz.problem(number) for number in range(50)}) == 50
    assert fuzz.problem(7, longer=3) == replace(fuzz.problem(7), seq=3 * fuzz.problem(7).seq)
    sizes = {
        (p.kind, p.heads, p.head_dim, p.hidden, p.softcap) for p in map(fuzz.problem, range(fuzz.SHARED))
    }
    assert len(sizes) == 1, "problems of one block share what is compiled in"


@pytest.mark.parametrize(
    "arguments, message",
    [(["--longer", "0"], "--longer: got 0, want at least 1"), (["--backend", "cuda"], "got cuda, but there is no GPU")],
)
def test_options_that_cannot_be_end_before_the_first_problem(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(fuzz.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["fuzz.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        fuzz.main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_a_wrong_result_is_a_mismatch(monkeypatch):
    def wrong(plan, problem):
        plan.poison()
        return None

    monkeypatch.setattr(fuzz, "_run", wrong)
    with pytest.raises(fuzz.Mismatch, match="out: 256 of 256 elements are not finite"):
        fuzz.check(fuzz.Problem("attention", seq=1))
