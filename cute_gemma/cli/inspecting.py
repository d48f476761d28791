"""`cute-gemma inspect`: what a workload's kernels cost, read from the launched cubins and counted in emulation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .common import add_common, positive, table
from .traffic import describe_traffic

if TYPE_CHECKING:
    from ..jit import KernelReport
    from ..plans import Plan, Step

# SASS mnemonics: tensor-core MMA on tensor memory, TMA load, special function (CUDA Binary Utilities,
# instruction set reference).
COUNTED = ("UTCHMMA", "UTMALDG", "MUFU")


def add_commands(commands: Any) -> None:
    """Adds `inspect`."""
    inspect = commands.add_parser(
        "inspect", help="show registers, memory and instructions of a workload's kernels"
    )
    add_common(inspect)
    inspect.add_argument("--batch", type=positive, default=1, help="the tuning depends on batch * seq")
    inspect.add_argument("--seq", type=positive, default=128)
    inspect.add_argument(
        "--inputs", default="suite", help="input set, whose mask decides which kernels there are"
    )
    inspect.add_argument(
        "--traffic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="emulate the launches and count the bytes they move (default: yes)",
    )
    inspect.add_argument(
        "--tile-cost",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="047: emulate attention and count what a 128x128 tile costs (default: yes)",
    )
    inspect.set_defaults(action=inspect_workload)


def inspect_workload(options: argparse.Namespace) -> int:
    """Prints a table over the kernels and where their PTX, cubin and SASS lie; 1 if any kernel spills."""
    from .. import jit
    from ..verification import PLANNERS
    from ..workloads import workload

    problem = workload(options.workload)
    if problem.number not in PLANNERS:
        raise ValueError(f"workload: got {problem.number!r}, want one of {', '.join(PLANNERS)}")
    inputs = problem.make_inputs(options.inputs, options.batch, options.seq)
    plan = PLANNERS[problem.number](inputs, problem.config, target=options.target)
    reports = [(step, report) for step in plan.steps for report in jit.inspect(step.kernel, plan.target)]
    header = [
        "stage",
        "grid",
        "threads",
        "registers",
        "stack",
        "local ld/st",
        "smem",
        "TMEM columns",
        *COUNTED,
    ]
    rows = [_row(plan, step, report) for step, report in reports]
    print(f"{problem.number}  batch {options.batch}  seq {options.seq}  {plan.target}\n")
    print(table(header, rows, right=range(2, len(header))))
    print()
    for step, report in reports:
        print(f"{step.stage}: {report.name}, ptxas {'.'.join(map(str, report.ptxas))}")
        print(f"  {step.kernel}")
        for path in (report.ptx_path, report.cubin_path, report.sass_path):
            print(f"  {path}")
    if options.traffic:
        print(f"\n{describe_traffic(plan, inputs.tensors().values())}")
    if options.tile_cost and problem.number == "047":
        print(f"\n{_describe_tile_cost(options.target)}")
    return 1 if any(report.spills for _, report in reports) else 0


def _describe_tile_cost(target: str | None) -> str:
    """What an interior tile of softcapped attention costs, far from the cap and near it."""
    from ..tile_cost import interior_tile_cost

    header = ["128x128 tile", "warp-instr. besides moves", "MUFU a logit", "divisions"]
    rows = []
    for inputs in ("suite", "saturated"):
        cost = interior_tile_cost(inputs, target)
        rows.append([inputs, f"{cost.instructions:,.0f}", f"{cost.special:.3f}", f"{cost.divisions:.0f}"])
    return table(header, rows, right=(1, 2, 3))


def _row(plan: Plan, step: Step, report: KernelReport) -> list[str]:
    launch = next(launch for launch in plan.capture(step) if launch.kernel_name == report.name)
    numbers = [
        launch.block[0] * launch.block[1] * launch.block[2],
        report.registers,
        report.stack_bytes,
        f"{report.local_loads}/{report.local_stores}",
        report.static_smem + launch.dynamic_smem,
        report.tmem_columns or 0,
        *(report.count(mnemonic) for mnemonic in COUNTED),
    ]
    return [step.stage, "x".join(map(str, launch.grid)), *map(str, numbers)]
