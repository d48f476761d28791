"""What binds each launch of each case: the tensor cores, special functions (MUFU), fp32 lanes, instruction
issue, shared memory, L2 or memory.

    python perf/roofline.py                  B200, modelled: no GPU needed, minutes on two cores
    python perf/roofline.py --target sm_90a --ncu perf/results/ncu_047.csv --ncu perf/results/ncu_051.csv
                                             H200: the model beside measurements

Modelled: the launches run in the emulator, which counts operations and bytes; each unit's count over its
rate (bounds.py) is a time that the launch cannot beat, and the largest binds. No latency, no imbalance
between SMs, no overlap of launches: it is a bound, not a prediction, and says nothing measured. Measured:
Nsight Compute's utilisation of the same units, from sweep.py --ncu. Counts are kept in perf/results and
made anew only for kernels whose sources changed.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bounds import BOARD_B200_US, CARDS, Card
from prepare import SuiteCase, choose_cases

from cute_gemma import emulator
from cute_gemma.cli.common import table
from cute_gemma.emulator import LaunchReport
from cute_gemma.jit.cache import describe, source_digests
from cute_gemma.verification import PLANNERS
from cute_gemma.workloads import WORKLOADS, suite_cases, workload

RESULTS = Path(__file__).resolve().parent / "results"
UNITS = ("tensor", "mufu", "fma", "issue", "smem", "l2", "dram")
WARP, SECTOR, WAVEFRONT = 32, 32, 128  # lanes; bytes of global memory; bytes of a pass over shared memory
# PTX instructions that the special function unit executes; a division is a sequence around one of them.
_SPECIAL = ("ex2", "lg2", "tanh", "rcp", "rsqrt", "sqrt", "sin", "cos", "div")
_FLOAT = ("fma", "mul", "add", "sub")
_FLOAT_TYPES = {"f32": 1, "bf16x2": 1, "f16x2": 1, "bf16": 1, "f16": 1, "f32x2": 2}  # lanes of a thread
_INTEGER_MULTIPLIES = ("mad", "mul")  # on the lanes of fp32 multiply-adds
# PTX that the assembler turns into no instruction, or into an operand of another.
_FREE = ("mov", "cvta", "ld.param")


@dataclass(frozen=True)
class Counts:
    """One launch, as counted in emulation.

    warp_instructions: of PTX. issued: of those that become machine instructions. mufu, fma: operations by
    lane. operand_bytes: that matrix instructions read from shared memory. wavefronts: passes of the
    threads' accesses to it. tma_bytes: in and out. sectors: distinct ones of global memory, read and
    written.
    """

    stage: str
    kernel: str
    ctas: int
    warp_instructions: int
    issued: int
    mufu: int
    fma: int
    mma_flops: int
    operand_bytes: int
    wavefronts: int
    tma_bytes: int
    sectors: int


def count(stage: str, kernel: Any, target: str, report: LaunchReport) -> Counts:
    """The counts of a launch's report."""
    opcodes = report.by_opcode
    grid = report.launch.grid
    return Counts(
        stage=stage,
        kernel=type(kernel).__name__,
        ctas=grid[0] * grid[1] * grid[2],
        warp_instructions=report.warp_instructions,
        issued=sum(n for opcode, n in opcodes.items() if not opcode.startswith(_FREE)),
        mufu=WARP * sum(n for opcode, n in opcodes.items() if is_special(opcode)),
        fma=WARP * sum(n * fma_lanes(opcode) for opcode, n in opcodes.items()),
        mma_flops=report.mma_flops,
        operand_bytes=round(report.mma_flops * operand_bytes_a_flop(kernel, target))
        if report.mma_flops
        else 0,
        wavefronts=report.smem_wavefronts,
        tma_bytes=report.tma_load_bytes + report.tma_store_bytes,
        sectors=report.sectors_read + report.sectors_written,
    )


def is_special(opcode: str) -> bool:
    """Whether an opcode takes the special function unit."""
    name, *modifiers = opcode.split(".")
    return name in _SPECIAL and not (name == "div" and modifiers[-1] not in ("f32",))


def fma_lanes(opcode: str) -> int:
    """Lanes of the fp32 pipe that an opcode takes a thread."""
    name, *modifiers = opcode.split(".")
    kind = modifiers[-1] if modifiers else ""
    if name in _FLOAT and kind in _FLOAT_TYPES:
        return _FLOAT_TYPES[kind]
    return int(name in _INTEGER_MULTIPLIES and kind in ("s32", "u32", "b32"))


def operand_bytes_a_flop(kernel: Any, target: str) -> float:
    """Bytes of shared memory that the matrix instructions of a kernel read for each of their operations.

    An instruction of m x n outputs reads m + n rows of bf16 for 2 m n operations, or only n where the other
    operand comes from tensor memory or registers. sm_100a: m is 128 a CTA, and each CTA of a pair reads
    half of the n; sm_90a: m is 64.
    """
    m = 128 if target == "sm_100a" else 64
    if not hasattr(kernel.tuning, "tile_n"):  # attention: q k^T with both operands in shared memory, then p v
        keys = 128
        return ((m + keys) / (m * keys) + 1 / m) / 2
    n, shared = kernel.tuning.tile_n, 2 if target == "sm_100a" and kernel.tuning.tile_m == 256 else 1
    return (m + n / shared) / (m * n)


def unit_times(counts: Counts, card: Card, ghz: float) -> dict[str, float]:
    """Microseconds that each unit is busy at least, all SMs that have a CTA sharing the work evenly.

    smem: operands of matrix instructions and accesses of threads; whether TMA's writes take turns with
    those is not known, so they are left out. l2: what TMA moves, or each sector once where that is more.
    dram: each sector once, though later launches of a call find much of it in L2.
    """
    sms = min(card.sms, counts.ctas)
    bytes_touched = counts.sectors * SECTOR
    cycles = {
        "tensor": counts.mma_flops / card.mma_flops,
        "mufu": counts.mufu / card.mufu,
        "fma": counts.fma / card.fma,
        "issue": counts.issued / card.issue,
        "smem": (counts.wavefronts * WAVEFRONT + counts.operand_bytes) / card.smem_bytes,
        "l2": max(counts.tma_bytes, bytes_touched) / card.l2_bytes,
    }
    times = {unit: n / sms / ghz * 1e-3 for unit, n in cycles.items()}
    return times | {"dram": bytes_touched / card.tbps * 1e-6}


def binding(times: Mapping[str, float]) -> str:
    """The unit with the longest time."""
    return max(times, key=times.get)


def identity(kernel: Any) -> str:
    """Changes with a kernel's configuration and the sources it is made of."""
    text = describe(kernel) + json.dumps(source_digests(type(kernel).__module__), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def emulate(case: SuiteCase, inputs: str, target: str, known: Mapping | None) -> dict:
    """A case's counts by launch, taken from `known` where they are of the same kernels."""
    number, batch, seq = case
    problem = workload(number)
    drawn = problem.make_inputs(inputs, batch, seq)
    plan = PLANNERS[number](drawn, problem.config, target=target)
    identities = [identity(step.kernel) for step in plan.steps]
    if known is not None and known["kernels"] == identities:
        return dict(known)
    # Any schedule counts the same; the eager one is the fastest to emulate.
    launched = plan.run(emulator.Options(schedule="eager", hazards=False))
    counts = [
        asdict(count(step.stage, step.kernel, target, report))
        for step, reports in zip(plan.steps, launched, strict=True)
        for report in reports
    ]
    return {
        "workload": number, "batch": batch, "seq": seq, "inputs": inputs, "target": target,
        "kernels": identities, "launches": counts,
    }  # fmt: skip


def counted(cases: Sequence[SuiteCase], inputs: Callable[[str], str], target: str, path: Path) -> list[dict]:
    """The counts of all cases, kept in `path` as they come."""
    kept = json.loads(path.read_text()) if path.exists() else []
    by_case = {(c["workload"], c["batch"], c["seq"], c["inputs"]): c for c in kept}
    for case in sorted(cases, key=lambda case: (case[0], case[1] * case[2] * (1 + case[2] / 4000))):
        key = (*case, inputs(case[0]))
        before = by_case.get(key)
        by_case[key] = emulate(case, key[-1], target, before)
        if by_case[key] != before:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(sorted(by_case.values(), key=_order), indent=1) + "\n")
            print(f"counted {case}", flush=True)
    return [by_case[(*case, inputs(case[0]))] for case in cases]


def _order(case: Mapping) -> tuple:
    return case["workload"], case["batch"] * case["seq"], case["seq"], case["inputs"]


def model(cases: Sequence[Mapping], card: Card) -> dict:
    """Modelled times of every launch of the counted cases at each of the card's clocks, and suite means."""
    modelled = []
    for case in cases:
        launches = []
        for counts in case["launches"]:
            times = {str(ghz): unit_times(Counts(**counts), card, ghz) for ghz in card.ghz}
            bound = {ghz: binding(units) for ghz, units in times.items()}
            launches.append(
                {"stage": counts["stage"], "kernel": counts["kernel"], "us": times, "bound_by": bound}
            )
        totals = {str(g): sum(max(launch["us"][str(g)].values()) for launch in launches) for g in card.ghz}
        modelled.append(
            {key: case[key] for key in ("workload", "batch", "seq", "inputs")}
            | {"launches": launches, "bound_us": totals}
        )
    means = {}
    for number in dict.fromkeys(case["workload"] for case in modelled):
        own = [case for case in modelled if case["workload"] == number]
        if {(c["batch"], c["seq"]) for c in own} >= {(c.batch_size, c.seq_len) for c in suite_cases(number)}:
            means[number] = {
                str(g): sum(case["bound_us"][str(g)] for case in own) / len(own) for g in card.ghz
            }
    return {
        "what": f"MODELLED bounds on a {card.name} from counts in emulation; nothing here was measured",
        "card": asdict(card), "cases": modelled, "suite_mean_bound_us": means,
        "board_b200_us": BOARD_B200_US if card.name == "B200" else None,
    }  # fmt: skip


def measured(path: Path) -> dict[tuple, dict]:
    """Utilisation by (workload, batch, seq, stage) from a CSV of sweep.py --ncu: duration_us, sm_ghz, a
    share by unit."""
    found = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            shares = {unit: float(row[f"{unit}_pct"]) / 100 for unit in UNITS}
            figures = {
                "duration_us": float(row["duration_us"]),
                "sm_ghz": float(row["sm_ghz"]),
                "share": shares,
            }
            key = (row["workload"], int(row["batch"]), int(row["seq"]), row["stage"])
            found[key] = figures | {"bound_by": binding(shares)}
    return found


def compare(cases: Sequence[Mapping], card: Card, figures: Mapping[tuple, dict]) -> list[dict]:
    """Each measured launch with the model of it at the clock it ran at: the share of its time that each
    unit should take."""
    rows = []
    for case in cases:
        for counts in case["launches"]:
            found = figures.get((case["workload"], case["batch"], case["seq"], counts["stage"]))
            if found is None:
                continue
            times = unit_times(Counts(**counts), card, found["sm_ghz"])
            shares = {unit: us / found["duration_us"] for unit, us in times.items()}
            key = {
                "workload": case["workload"],
                "batch": case["batch"],
                "seq": case["seq"],
                "stage": counts["stage"],
            }
            rows.append(
                key | {"measured": found, "modelled_share": shares, "modelled_bound_us": max(times.values())}
            )
    return rows


def model_table(result: Mapping) -> str:
    """A row a launch: the units' times at the highest clock, and what binds at each clock; then the suite
    means."""
    clocks = [str(ghz) for ghz in result["card"]["ghz"]]
    rows = []
    for case in result["cases"]:
        for launch in case["launches"]:
            times = launch["us"][clocks[-1]]
            bounds = [f"{max(launch['us'][g].values()):.1f} {launch['bound_by'][g]}" for g in clocks]
            rows.append([_label(case), launch["stage"], *(f"{times[unit]:.2f}" for unit in UNITS), *bounds])
    header = ["case", "launch", *(f"{unit} us" for unit in UNITS), *(f"bound at {g} GHz" for g in clocks)]
    lines = [
        result["what"],
        f"Times of units at {clocks[-1]} GHz.",
        "",
        table(header, rows, right=range(2, 2 + len(UNITS))),
        "",
    ]
    for number, means in result["suite_mean_bound_us"].items():
        text = ", ".join(f"{us:.1f} us at {ghz} GHz" for ghz, us in means.items())
        board = (result["board_b200_us"] or {}).get(number)
        beside = (
            f"; the public board's best on a B200, measured: {' and '.join(map(str, board))} us"
            if board
            else ""
        )
        lines.append(f"{number} suite mean of modelled bounds: {text}{beside}")
    return "\n".join(lines)


def compare_table(rows: Sequence[Mapping]) -> str:
    """A row a measured launch: each unit's share measured / modelled, and what binds by each."""
    shown = []
    for row in rows:
        found, shares = row["measured"], row["modelled_share"]
        units = [f"{found['share'][unit]:.0%} / {shares[unit]:.0%}" for unit in UNITS]
        shown.append(
            [
                _label(row),
                row["stage"],
                f"{found['duration_us']:.1f}",
                f"{found['sm_ghz']:.2f}",
                *units,
                found["bound_by"],
                binding(shares),
            ]
        )
    header = ["case", "launch", "us", "GHz", *UNITS, "bound", "modelled"]
    return "\n".join(
        [
            "Share of each unit's peak, measured / modelled from counts in emulation.",
            "",
            table(header, shown, right=(2, 3)),
        ]
    )


def _label(case: Mapping) -> str:
    return f"{case['workload']} ({case['batch']},{case['seq']})"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=sorted(CARDS), default="sm_100a")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="only this one")
    parser.add_argument("--cases", help="only these sizes, as BATCHxSEQ,...")
    parser.add_argument(
        "--inputs", choices=("causal", "suite"), default="causal", help="047: suite reads the mask tensor"
    )
    parser.add_argument(
        "--ncu", type=Path, action="append", default=[], metavar="CSV", help="measurements, of sweep.py --ncu"
    )
    parser.add_argument(
        "--ghz", type=float, action="append", help="clock of the model (default: the card's two)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (default: %(default)s)")
    return parser.parse_args(arguments)


def main() -> int:
    """Models the cases asked for, and compares those that were measured."""
    options = parse()
    card = CARDS[options.target]
    if options.ghz:
        card = replace(card, ghz=tuple(options.ghz))
    suffix = options.target.replace("_", "")
    cases = choose_cases(options.workload, options.cases, quick=False)

    def inputs(number: str) -> str:
        return options.inputs if number == "047" else "suite"

    counts = counted(cases, inputs, options.target, options.results / f"counts_{suffix}.json")
    result = model(counts, card)
    figures: dict[tuple, dict] = {}
    for path in options.ncu:
        figures |= measured(path)
    result["measured"] = compare(counts, card, figures)
    path = options.results / f"roofline_{suffix}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(model_table(result))
    if result["measured"]:
        print(f"\n{compare_table(result['measured'])}")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
