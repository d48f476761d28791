"""Tunings of one launch against each other, and profiler metrics of every launch.

    python perf/sweep.py 047 1x8192 --stage "qkv projection" tile_n=128,256 group_m=4,8,16
    python perf/sweep.py 047 1x128,2x293,1x8192 --ncu perf/results/ncu_047.csv

The first takes the launch's tuning as the case's default has it, sets the fields named to every combination
of the values given, checks each result by both pass rules and times those that are right, in turn (protocol
"graph" of measure.py). The second runs each case under Nsight Compute, without touching the clocks, and
writes a row a launch; percentages are of the unit's peak over the launch. Launches run one after the other
there, with cold caches.
"""

from __future__ import annotations

import argparse
import ast
import csv
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bounds
import records
import torch
from bench import card_target
from contest import Contestant, reference_judge, time_contestants
from measure import GraphTimer
from prepare import compile_kernel, compile_kernels, kernels_of, pool

from cute_gemma.cli.common import table
from cute_gemma.plans import Plan, Step
from cute_gemma.recipes import RecipeBuilder
from cute_gemma.verification import PLANNERS
from cute_gemma.workloads import WORKLOADS, case_for, workload

# Columns of the CSV and Nsight Compute's names on an H200 (compute capability 9.0).
METRICS = {
    "duration_us": "gpu__time_duration.sum",
    "sm_ghz": "sm__cycles_elapsed.avg.per_second",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "mufu_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "fma_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "smem_pct": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes.sum",
}
COLUMNS = ("workload", "batch", "seq", "inputs", "stage", "kernel", *METRICS)
_UNITS = {
    **dict.fromkeys(
        ("duration_us",), {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3}
    ),
    **dict.fromkeys(
        ("sm_ghz",),
        {"hz": 1e-9, "Khz": 1e-6, "Mhz": 1e-3, "Ghz": 1, "cycle/second": 1e-9, "cycle/nsecond": 1},
    ),
    **dict.fromkeys(("dram_bytes",), {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}),
}


def default_inputs(number: str) -> str:
    """The input set whose mask, where there is one, is causal by name."""
    return "causal" if "causal" in WORKLOADS[number].kinds else "suite"


def parse_fields(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Values by field from texts such as "tile_n=128,256"; numbers, True, False and None."""
    fields = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals:
            raise ValueError(f"field: got {text!r}, want NAME=VALUE,...")
        fields[name] = [ast.literal_eval(value) for value in values.split(",")]
    return fields


def tunings(default: Any, fields: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Any]]:
    """(name, tuning) of every combination; a ValueError in place of a tuning that its class refuses.

    Raises TypeError for a field that the tuning does not have.
    """
    for values in itertools.product(*fields.values()):
        chosen = dict(zip(fields, values))
        name = " ".join(f"{key}={value}" for key, value in chosen.items())
        try:
            yield name, replace(default, **chosen)
        except ValueError as refusal:
            yield name, refusal


def retuned(plan: Plan, step: Step, tuning: Any) -> Plan:
    """One launch of `plan` with another tuning, on the same tensors; scratch of another size is its own."""
    kernel = replace(step.kernel, tuning=tuning)
    builder = RecipeBuilder(plan.target)
    given = {
        arg.name: step.tensors[arg.name]
        for arg in kernel.signature()
        if arg.name in step.tensors and _fits(step.tensors[arg.name].shape, arg.shape)
    }
    builder.add(step.stage, kernel, {name: name for name in given}, {})
    made = builder.build(given, {}, tuple).plan(tuple(given.values()))
    steps = tuple(replace(made_step, outputs=step.outputs) for made_step in made.steps)
    return replace(made, steps=steps, output=tuple(step.outputs.values()))


def _fits(shape: Sequence[int], wanted: Sequence[int | str]) -> bool:
    return len(shape) == len(wanted) and all(isinstance(b, str) or a == b for a, b in zip(shape, wanted))


def variants(plan: Plan, step: Step, fields: Mapping[str, Sequence[Any]]) -> dict[str, Plan | Exception]:
    """The default and every combination by name, as a plan of that one launch or the reason for none."""
    found: dict[str, Plan | Exception] = {"default": retuned(plan, step, step.kernel.tuning)}
    for name, tuning in tunings(step.kernel.tuning, fields):
        try:
            found[name] = tuning if isinstance(tuning, ValueError) else retuned(plan, step, tuning)
        except ValueError as refusal:  # the kernel's own
            found[name] = refusal
    return found


def compile_variants(plans: Mapping[str, Plan | Exception]) -> dict[str, Plan | Exception]:
    """The plans whose kernel compiles, the others as the reason."""
    found = dict(plans)
    with pool() as workers:
        futures = {
            name: workers.submit(compile_kernel, plan.steps[0].kernel, plan.target)
            for name, plan in plans.items()
            if isinstance(plan, Plan)
        }
        for name, future in futures.items():
            if error := future.exception():
                found[name] = error
    return found


def sweep(options: argparse.Namespace, number: str, batch: int, seq: int) -> list[dict]:
    """A row for each tuning of one case, the fastest first."""
    problem = workload(number)
    inputs = problem.make_inputs(options.inputs, batch, seq).to("cuda")
    plan = PLANNERS[number](inputs, problem.config, target=options.target)
    step = next((step for step in plan.steps if step.stage == options.stage), None)
    if step is None or not step.outputs:
        stages = ", ".join(step.stage for step in plan.steps if step.outputs)
        raise ValueError(
            f"--stage: got {options.stage!r}, want one of {stages} (those whose outputs the reference has)"
        )
    plans = compile_variants(variants(plan, step, options.fields))
    plan.run()
    with torch.no_grad():
        eager = problem.reference(inputs, problem.config)
        exact = problem.reference(inputs.to(torch.float64), problem.config)
    references = [(name, getattr(eager, name), getattr(exact, name)) for name in step.outputs]
    judge = reference_judge(references, case_for(number, batch, seq))
    contestants = {
        # Named as this project's, so that both rules are asked.
        f"{records.OURS} {name}": Contestant(found if isinstance(found, Exception) else _caller(found), judge)
        for name, found in plans.items()
    }
    entries, _ = time_contestants(GraphTimer(options.seconds), contestants)
    work = bounds.stage_work(number, problem.config, batch, seq)[options.stage]
    print(f"{number} ({batch},{seq}) {options.stage}; default {step.kernel.tuning}")
    return _rows(entries, work, {"workload": number, "batch": batch, "seq": seq, "stage": options.stage})


def _caller(plan: Plan) -> Any:
    return lambda: (plan.run(), plan.output)[1]


def _rows(entries: Mapping[str, dict], work: bounds.Work, case: dict) -> list[dict]:
    default = entries[f"{records.OURS} default"].get("us")
    rows = []
    for name, entry in entries.items():
        us = entry.get("us")
        rows.append(
            case
            | {
                "tuning": name.removeprefix(f"{records.OURS} "),
                "us": us,
                "of_default": us / default if us and default else None,
                "tflops": work.flops / us * 1e-6 if us else None,
                "note": entry.get("unavailable") or ("" if entry["passed"] else "wrong"),
            }
        )
    return sorted(rows, key=lambda row: row["us"] or float("inf"))


def show(rows: Sequence[dict]) -> str:
    """A sweep's rows as a table."""

    def cell(row: dict, key: str, digits: int) -> str:
        return f"{row[key]:.{digits}f}" if row[key] else "-"

    shown = [
        [row["tuning"], cell(row, "us", 2), cell(row, "of_default", 3), cell(row, "tflops", 0), row["note"]]
        for row in rows
    ]
    return table(["tuning", "us", "x default", "TFLOP/s", ""], shown, right=(1, 2, 3))


def profile(options: argparse.Namespace) -> list[dict]:
    """A row of COLUMNS for each launch of the cases, by Nsight Compute. Raises RuntimeError if it fails."""
    if shutil.which("ncu") is None:
        raise RuntimeError("--ncu: ncu is not on the PATH")
    # Compiled here, several at a time, so that the profiled process only loads.
    compile_kernels(
        (kernel for case in options.sizes for kernel in kernels_of(*case, options.target)), options.target
    )
    with tempfile.TemporaryDirectory() as folder:
        manifest, log = Path(folder) / "launches.json", Path(folder) / "ncu.csv"
        driven = [sys.executable, __file__, options.workload, options.cases, "--inputs", options.inputs]
        driven += ["--target", options.target, "--drive", str(manifest)]
        command = ["ncu", "--clock-control=none", "--profile-from-start=off", "--csv", "--page=raw"]
        command += [f"--log-file={log}", f"--metrics={','.join(METRICS.values())}"]
        done = subprocess.run([*command, *driven], capture_output=True, text=True)
        output = (log.read_text() if log.exists() else "") + done.stdout
        if done.returncode:
            raise RuntimeError(f"ncu failed ({done.returncode}): {done.stderr[-2000:]}{output[-2000:]}")
        return parse_ncu(output, json.loads(manifest.read_text()))


def parse_ncu(text: str, launches: Sequence[dict]) -> list[dict]:
    """Rows of COLUMNS from Nsight Compute's CSV, `launches` naming in order what it profiled.

    Raises RuntimeError if their numbers differ, a metric is missing or a unit is unknown.
    """
    lines = text.splitlines()
    first = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise RuntimeError(f"no table in ncu's output: {text[-500:]}")
    units, *found = list(csv.DictReader(line for line in lines[first:] if line.startswith('"')))
    if len(found) != len(launches):
        raise RuntimeError(f"ncu profiled {len(found)} launches, want {len(launches)}")
    rows = []
    for launch, row in zip(launches, found):
        figures = {}
        for column, metric in METRICS.items():
            if not row.get(metric):
                raise RuntimeError(f"ncu gave no {metric} for {launch['stage']}")
            factor = _UNITS[column].get(units[metric]) if column in _UNITS else 1
            if factor is None:
                raise RuntimeError(
                    f"ncu gave {metric} in {units[metric]!r}, want one of {', '.join(_UNITS[column])}"
                )
            figures[column] = float(row[metric].replace(",", "")) * factor
        rows.append(launch | {"kernel": row["Kernel Name"].split("(")[0]} | figures)
    return rows


def drive(options: argparse.Namespace) -> None:
    """What runs under the profiler: each case twice, its second run profiled; names the launches in a
    file."""
    launches = []
    for number, batch, seq in options.sizes:
        problem = workload(number)
        inputs = problem.make_inputs(options.inputs, batch, seq).to("cuda")
        plan = PLANNERS[number](inputs, problem.config, target=options.target)
        plan.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        plan.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        case = {"workload": number, "batch": batch, "seq": seq, "inputs": options.inputs}
        launches += [case | {"stage": step.stage} for step in plan.steps]
    options.drive.write_text(json.dumps(launches))


def write_csv(path: Path, rows: Sequence[dict]) -> None:
    """All rows under the keys of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("cases", help="BATCHxSEQ,...")
    parser.add_argument("fields", nargs="*", help="of the tuning, as NAME=VALUE,...")
    parser.add_argument("--stage", help="the launch whose tuning is varied")
    parser.add_argument("--inputs", help="input set (default: causal for 047, suite for 051)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of samples a case")
    parser.add_argument("--csv", type=Path, help="where the sweep's rows go")
    parser.add_argument(
        "--ncu", type=Path, metavar="CSV", help="profile the cases' launches into this file instead"
    )
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--target", help="default: the GPU's")
    options = parser.parse_intermixed_args(arguments)  # fields may follow options
    options.sizes = [(options.workload, *map(int, size.split("x"))) for size in options.cases.split(",")]
    options.inputs = options.inputs or default_inputs(options.workload)
    options.fields = parse_fields(options.fields)
    if not (options.ncu or options.drive) and not (options.stage and options.fields):
        parser.error("want --ncu CSV, or --stage with fields to vary")
    return options


def main() -> int:
    """0 if every tuning that ran was right, or the profile is whole."""
    options = parse()
    if not torch.cuda.is_available():
        print("sweep: there is no GPU here", file=sys.stderr)
        return 2
    options.target = card_target(options.target)
    if options.drive:
        drive(options)
        return 0
    if options.ncu:
        rows = profile(options)
        write_csv(options.ncu, rows)
        print(
            table(
                list(COLUMNS[:5] + COLUMNS[6:]),
                [[_cell(row[c]) for c in COLUMNS[:5] + COLUMNS[6:]] for row in rows],
            )
        )
        return 0
    rows = []
    for case in options.sizes:
        found = sweep(options, *case)
        print(show(found), flush=True)
        rows += found
    if options.csv:
        write_csv(options.csv, rows)
    return 1 if any(row["note"] == "wrong" for row in rows) else 0


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
