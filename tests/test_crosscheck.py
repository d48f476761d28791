"""The emulator gives what an H200 gave: recorded runs of the sm_90a kernels (perf/crosscheck.py --record)."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "perf"))

import crosscheck  # noqa: E402

RECORDED = json.loads((ROOT / "tests/results/h200_crosscheck.json").read_text())["cases"]
TARGET = "sm_90a"
# One size of each kernel; the others are slow.
QUICK = ("131", "causal 1x300", "no mask 1x300", "no cap 1x300", "mask scan 1x300")
CASES = {case.name: case for case in crosscheck.cases(TARGET)}


def _quick(name: str) -> bool:
    return name.endswith(QUICK) and "2x131" not in name


def test_every_case_was_recorded_and_no_other():
    assert set(CASES) == set(RECORDED)


@pytest.mark.parametrize("name", [n if _quick(n) else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_emulator_agrees_with_the_card(name):
    case = CASES[name]
    inputs = case.arguments()
    outputs = crosscheck.run(case, inputs, TARGET, "cpu")
    assert crosscheck.compare_record(case, inputs, outputs, RECORDED[name]) == []


def test_a_result_two_ulps_off_is_seen():
    case = CASES["output projection 131"]
    kept = RECORDED[case.name]["outputs"]["out"]
    theirs, rms = torch.tensor(kept["values"]), torch.tensor(kept["row_rms"])
    size = torch.exp2(torch.floor(torch.log2(torch.maximum(theirs.abs(), rms))) - 7)
    assert (crosscheck.ulps(theirs + size, theirs, rms) <= 1).all()
    assert (crosscheck.ulps(theirs + 2 * size, theirs, rms) > 1).all()


def test_other_inputs_than_the_card_had_are_refused():
    case = CASES["mask scan 1x300"]
    inputs = case.arguments() | {"mask": torch.zeros(1, 1, 300, 300, dtype=torch.bfloat16)}
    with pytest.raises(RuntimeError, match="input mask was drawn differently"):
        crosscheck.compare_record(case, inputs, {}, RECORDED[case.name])
