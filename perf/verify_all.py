"""Runs all 32 cases of the two workloads through the kernels in the emulator and keeps the figures in a file.

    scripts/verify_all                       all cases, those already in the file skipped
    scripts/verify_all --workload 051        one workload
    scripts/verify_all --again               every case anew

Each case runs in a process of its own, so that its memory is its own and a stop loses only that case. A case
in the file counts as done if it was computed by the same sources.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import multiprocessing
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "torch", "numpy")


def fingerprint() -> str:
    """Of the package's sources: a result holds for these."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "cute_gemma").rglob("*")):
        if path.suffix in (".py", ".c", ".h", ".def", ".json"):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """The checkout's commit, marked if files differ from it; None outside a checkout."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in PACKAGES
    }


def work(number: str, batch: int, seq: int) -> float:
    """How long a case takes, up to a factor: rows through the projections, and 047's attention (both the
    emulator's and the float64 reference's)."""
    rows = batch * seq
    return rows * (1 + seq / 4000) if number == "047" else rows / 12


def run_case(task: tuple[str, int, int, argparse.Namespace]) -> dict[str, Any]:
    """One case in a fresh process: its record."""
    number, batch, seq, options = task
    from cute_gemma.verification import Options, verify
    from cute_gemma.workloads import workload

    start = time.perf_counter()
    how = Options(target=options.target, schedule=options.schedule)
    result = verify(workload(number), "suite", batch, seq, options.seed, how)
    stages = [
        {
            "stage": stage.stage,
            "kernel": stage.kernel,
            "grid": list(stage.grid),
            "warp_instructions": stage.warp_instructions,
            "seconds": round(stage.seconds, 2),
        }
        for stage in result.stages
    ]
    outputs = [
        {
            "name": check.name,
            "error": float(f"{check.error:.4g}"),
            "eager_error": float(f"{check.eager_error:.4g}"),
            "matched_ratio": check.matched_ratio,
            "max_abs_difference": check.max_abs_difference,
            "suite_rule": check.suite_pass,
            "project_rule": check.project_pass,
        }
        for check in result.checks
    ]
    return {
        "workload": number,
        "batch": batch,
        "seq": seq,
        "passed": result.passed,
        "outputs": outputs,
        "stages": stages,
        "warp_instructions": sum(stage["warp_instructions"] for stage in stages),
        "emulation_seconds": round(sum(stage["seconds"] for stage in stages), 2),
        "seconds": round(time.perf_counter() - start, 1),
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "target": result.target,
        "schedule": result.schedule,
        "seed": result.seed,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cases"] if path.exists() else []


def save(path: Path, records: list[dict[str, Any]]) -> None:
    """Whole or not at all: a stop while writing leaves the file before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = sorted(records, key=lambda r: (r["workload"], r["batch"] * r["seq"], r["seq"]))
    passed = sum(record["passed"] for record in records)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"passed": passed, "cases": records}, indent=1) + "\n")
    partial.replace(path)


def summary(record: dict[str, Any]) -> str:
    worst = max(o["error"] / o["eager_error"] for o in record["outputs"])
    return (
        f"{record['workload']} ({record['batch']}, {record['seq']}): "
        f"{'PASS' if record['passed'] else 'FAIL'}  error at most {worst:.2f} x eager's, "
        f"{record['warp_instructions']:,} warp-instructions, {record['emulation_seconds']} s of emulation, "
        f"{record['seconds']} s, {record['peak_memory_gib']} GiB"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/verify_all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=("047", "051"), help="only this one")
    parser.add_argument("--target", default="sm_100a")
    parser.add_argument("--schedule", default="lazy", help="lazy, eager or random:SEED")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--results", type=Path, help="default: tests/results/emulated_<target>.json")
    parser.add_argument("--again", action="store_true", help="run cases that are done, too")
    parser.add_argument("--limit", type=int, help="at most so many rows, batch x seq, a case")
    return parser.parse_args()


def main() -> int:
    """0 if every case asked for passes."""
    from cute_gemma.workloads import suite_cases

    options = arguments()
    path = options.results or ROOT / "tests" / "results" / f"emulated_{options.target.replace('_', '')}.json"
    sources, now = fingerprint(), {"commit": commit(), "versions": versions()}
    wanted = [
        (number, case.batch_size, case.seq_len)
        for number in (options.workload,) * bool(options.workload) or ("047", "051")
        for case in suite_cases(number)
        if not options.limit or case.batch_size * case.seq_len <= options.limit
    ]
    wanted.sort(key=lambda case: work(*case))
    records = {(r["workload"], r["batch"], r["seq"]): r for r in load(path)}
    how = {"sources": sources, "schedule": options.schedule, "seed": options.seed}
    todo = [
        case for case in wanted
        if options.again or any(records.get(case, {}).get(key) != value for key, value in how.items())
    ]  # fmt: skip
    print(f"{len(wanted)} cases, {len(wanted) - len(todo)} of them done by these sources", flush=True)
    bar = tqdm(total=sum(map(lambda c: work(*c), todo)), unit="row", unit_scale=True, smoothing=0.1)
    with bar, multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for case in todo:
            bar.set_description(f"{case[0]} ({case[1]}, {case[2]})")
            record = pool.apply(run_case, ((*case, options),))
            records[case] = record | {"sources": sources} | now
            save(path, list(records.values()))
            bar.write(summary(records[case]))
            bar.update(work(*case))
    failed = [case for case in wanted if not records[case]["passed"]]
    print(f"{len(wanted) - len(failed)} of {len(wanted)} cases pass both rules; {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
