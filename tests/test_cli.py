"""The command line: what it prints, its exit status, and what it says of misuse."""

import json
import re

import pytest

from cute_gemma import verification
from cute_gemma.cli import main
from cute_gemma.verification import StageResult, Verification
from cute_gemma.workloads import OutputCheck, workload


def check(name: str = "output", **changes) -> OutputCheck:
    figures = {
        "finite": True,
        "matched_ratio": 0.999,
        "max_abs_difference": 0.05,
        "difference": 0.02,
        "error": 0.003,
        "eager_error": 0.02,
    }
    return OutputCheck(name=name, **{**figures, **changes})


def verification_of(output: OutputCheck, name: str = "suite") -> Verification:
    stages = (
        StageResult("mask scan", "MaskScan", (4, 1, 1), 1234, 0.25, ()),
        StageResult("attention", "Attention", (24, 2, 1), 5_000_000, 1.5, (check("attention"), output)),
    )
    return Verification("047", name, 2, 293, 0, "sm_100a", "emulator", "lazy", stages, (output,))


@pytest.fixture
def verified(monkeypatch):
    """Replaces the runs: `verified[name]` is the check an input set gets, `verified.calls` what was asked."""

    class Verified(dict):
        calls: list = []

    results = Verified()
    results.calls = []

    def verify(problem, name, batch, seq, seed, options):
        results.calls.append((problem.number, name, batch, seq, seed, options))
        return verification_of(results.get(name, check()), name)

    monkeypatch.setattr(verification, "verify", verify)
    return results


def test_run_shows_every_stage_and_passes(verified, capsys):
    assert main(["run", "047", "--batch", "2", "--seq", "293"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "mask scan",
        "MaskScan",
        "4x1x1",
        "1,234",
        "attention",
        "24x2x1",
        "5,000,000",
        "1.50 s",
        "0.003",
    ):
        assert expected in out
    assert "5,001,234 warp-instructions in 1.75 s" in out
    assert out.splitlines()[-1] == "PASS"
    assert verified.calls == [("047", "suite", 2, 293, 0, verification.Options())]


@pytest.mark.parametrize(
    "failing",
    [{"error": 0.0251}, {"matched_ratio": 0.98}, {"finite": False}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_either_rule_failing_fails_the_command(verified, capsys, command, failing):
    verified["suite"] = check(**failing)
    assert main([command, "047"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL"


def test_verify_takes_every_set_of_a_kind(verified, capsys):
    verified["block-diagonal"] = check(error=0.3)
    arguments = [
        "--batch",
        "3",
        "--seq",
        "129",
        "--inputs",
        "noncausal",
        "--seed",
        "7",
        "--schedule",
        "random:5",
    ]
    assert main(["verify", "047", *arguments]) == 1
    names = workload("047").input_sets("noncausal")
    assert [call[1] for call in verified.calls] == list(names)
    assert all(call[2:] == (3, 129, 7, verification.Options(schedule="random:5")) for call in verified.calls)
    lines = capsys.readouterr().out.splitlines()
    failed = [line.split()[0] for line in lines if line.split()[-1:] == ["FAIL"] and len(line.split()) > 1]
    assert failed == ["block-diagonal"]


def test_verify_takes_one_set_by_name(verified):
    assert main(["verify", "047", "--inputs", "saturated"]) == 0
    assert [call[1] for call in verified.calls] == ["saturated"]


def test_json_holds_the_figures_and_the_verdict(verified, capsys):
    verified["suite"] = check(error=0.3)
    assert main(["verify", "047", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    result = printed["results"][0]
    assert printed["passed"] is False and result["passed"] is False
    assert result["checks"][0]["project_pass"] is False and result["checks"][0]["suite_pass"] is True
    assert result["checks"][0]["error"] == 0.3
    assert result["stages"][1]["warp_instructions"] == 5_000_000
    assert result["stages"][1]["checks"][0]["name"] == "attention"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run"], "workload"),
        (["run", "047", "--batch", "0"], "argument --batch: got 0, want at least 1"),
        (["run", "047", "--seq", "many"], "argument --seq: invalid positive value: 'many'"),
        (["run", "047", "--backend", "tpu"], "argument --backend: invalid choice: 'tpu'"),
        (["train", "047"], "invalid choice: 'train'"),
    ],
)
def test_misuse_exits_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "048"], "cute-gemma run: ValueError: workload: got '048', want one of 047, 051"),
        (["inspect", "048"], "cute-gemma inspect: ValueError: workload: got '048', want one of 047, 051"),
        (["verify", "047", "--inputs", "dense"], "ValueError: inputs: got 'dense', want one of suite"),
        (["verify", "047", "--target", "sm_80"], "UnsupportedTargetError: target: got 'sm_80'"),
    ],
)
def test_an_error_exits_with_1_and_one_line(capsys, arguments, message):
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_traceback_shows_where_an_error_comes_from():
    with pytest.raises(ValueError, match="workload: got '048'"):
        main(["run", "048", "--traceback"])


def test_inspect_counts_traffic_against_the_minimum(capsys):
    assert main(["inspect", "051", "--batch", "1", "--seq", "3"]) == 0
    out = capsys.readouterr().out
    assert "norm backward" in out and "gradients" in out
    ratios = re.search(r"global traffic: ([\d.]+) x that, TMA bytes: ([\d.]+) x", out)
    # Nothing can be read or written less than once.
    assert float(ratios[1]) >= 1 and float(ratios[2]) >= 1
    assert main(["inspect", "051", "--batch", "1", "--seq", "3", "--no-traffic"]) == 0
    assert "global traffic" not in capsys.readouterr().out


def test_a_run_writes_its_timeline(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["run", "051", "--batch", "1", "--seq", "3", "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    launches = {e["args"]["name"].partition(" CTA")[0] for e in events if e["name"] == "process_name"}
    assert launches == {"norm backward", "gradients"}
    begin = {name: [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"].startswith(name)]
             for name in launches}  # fmt: skip
    first, second = (
        [e for e in events if e["ph"] == "X" and e["pid"] in begin[name]] for name in ("norm backward", "gradients")
    )
    assert first and second
    assert max(e["ts"] + e["dur"] for e in first) <= min(e["ts"] for e in second)


def test_a_timeline_of_a_gpu_is_refused(capsys):
    assert main(["run", "047", "--backend", "cuda", "--trace", "out.json"]) == 1
    assert "trace: got 'out.json' with backend 'cuda'" in capsys.readouterr().err
