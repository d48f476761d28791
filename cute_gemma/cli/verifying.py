"""`cute-gemma run` and `cute-gemma verify`: a workload's kernels against its reference."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .common import add_common, positive, table

if TYPE_CHECKING:
    from ..verification import StageResult, Verification
    from ..workloads import OutputCheck


def add_commands(commands: Any) -> None:
    """Adds `run` and `verify`."""
    run = commands.add_parser("run", help="run a workload on the suite's inputs and show every stage")
    verify = commands.add_parser("verify", help="check a workload by both pass rules")
    for command in (run, verify):
        add_common(command)
        command.add_argument("--batch", type=positive, default=1)
        command.add_argument("--seq", type=positive, default=128)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--backend", choices=("emulator", "cuda"), default="emulator")
        command.add_argument(
            "--schedule", default="lazy", help="order of asynchronous operations: lazy, eager or random:SEED"
        )
    verify.add_argument(
        "--inputs", default="suite", help="a kind of input sets (suite, structured, ...), or one set's name"
    )
    verify.add_argument("--json", action="store_true", help="print figures as JSON")
    run.add_argument(
        "--trace", metavar="FILE", help="write the emulated launches' timeline, up to 200,000 events each (Perfetto)"
    )
    verify.set_defaults(trace=None)
    run.set_defaults(action=run_workload, inputs="suite")
    verify.set_defaults(action=verify_workload)


def run_workload(options: argparse.Namespace) -> int:
    """Shows every stage of one run; 0 if both rules hold."""
    results = _verify(options)
    for result in results:
        print(describe(result))
    return _status(results)


def verify_workload(options: argparse.Namespace) -> int:
    """Checks every input set of a kind; 0 if both rules hold for all outputs of all."""
    results = _verify(options)
    if options.json:
        print(
            json.dumps({"passed": _status(results) == 0, "results": [as_json(r) for r in results]}, indent=1)
        )
    else:
        print(summarise(results))
    return _status(results)


def _verify(options: argparse.Namespace) -> list[Verification]:
    from ..verification import Options, verify
    from ..workloads import workload

    problem = workload(options.workload)
    known = options.inputs in problem.kinds
    names = problem.input_sets(options.inputs) if known else (options.inputs,)
    how = Options(options.target, options.backend, options.schedule, options.trace)
    return [verify(problem, name, options.batch, options.seq, options.seed, how) for name in names]


def _status(results: list[Verification]) -> int:
    return 0 if all(result.passed for result in results) else 1


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def _figures(check: OutputCheck) -> list[str]:
    return [
        check.name,
        f"{check.error:.3g}",
        f"{check.eager_error:.3g}",
        f"{check.difference:.3g}",
        f"{100 * check.matched_ratio:.3f}%",
        _verdict(check.suite_pass),
        _verdict(check.project_pass),
    ]


_FIGURES = ["tensor", "error", "eager's", "from eager", "matched", "suite rule", "project rule"]


def _stage_rows(stage: StageResult) -> list[list[str]]:
    grid = "x".join(map(str, stage.grid)) if stage.grid else "-"
    count = f"{stage.warp_instructions:,}" if stage.warp_instructions is not None else "-"
    launch = [stage.stage, stage.kernel, grid, count, f"{stage.seconds:.2f} s"]
    checks = [_figures(check) for check in stage.checks] or [["-"] * len(_FIGURES)]
    return [(launch if i == 0 else [""] * len(launch)) + figures for i, figures in enumerate(checks)]


def _title(result: Verification) -> str:
    r = result
    schedule = f" ({r.schedule})" if r.schedule else ""
    sizes = f"{r.workload}  batch {r.batch}  seq {r.seq}  inputs {r.inputs}  seed {r.seed}"
    return f"{sizes}  on {r.target}, {r.backend}{schedule}"


def describe(result: Verification) -> str:
    """A table with a row for every tensor that a stage computes, and the verdict on the last line.

    error, eager's: against float64; from eager: against the eager bfloat16 model; relative Frobenius norms.
    """
    header = ["stage", "kernel", "grid", "warp-instr.", "time", *_FIGURES]
    rows = [row for stage in result.stages for row in _stage_rows(stage)]
    total = sum(stage.warp_instructions or 0 for stage in result.stages)
    seconds = sum(stage.seconds for stage in result.stages)
    return "\n".join(
        [
            _title(result),
            "",
            table(header, rows, right=(3, 4, 6, 7, 8, 9)),
            "",
            f"{total:,} warp-instructions in {seconds:.2f} s" if total else f"{seconds:.2f} s",
            _verdict(result.passed),
        ]
    )


def summarise(results: list[Verification]) -> str:
    """A line for every judged output, and the verdict."""
    rows = [
        [result.inputs, f"{sum(stage.seconds for stage in result.stages):.2f} s", *_figures(check)]
        for result in results
        for check in result.checks
    ]
    header = ["inputs", "time", *_FIGURES]
    head = _title(results[0]).replace(f"  inputs {results[0].inputs}", "")
    return "\n".join(
        [head, "", table(header, rows, right=(1, 3, 4, 5, 6)), "", _verdict(_status(results) == 0)]
    )


def as_json(result: Verification) -> dict[str, Any]:
    """Every field, with the verdict on each check and on the whole."""

    def check(c: OutputCheck) -> dict[str, Any]:
        return {**asdict(c), "suite_pass": c.suite_pass, "project_pass": c.project_pass}

    stages = [{**asdict(stage), "checks": [check(c) for c in stage.checks]} for stage in result.stages]
    return {
        **asdict(result),
        "stages": stages,
        "checks": [check(c) for c in result.checks],
        "passed": result.passed,
    }
