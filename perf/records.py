"""What a benchmark's file holds, and what is read off it.

A result is a dict with the keys of TOP. Its `cases` are dicts with the keys of CASE, one a case (or launch)
and protocol. Their `contestants` map a name to its times and checks, or to why it has none:

  {"us", "p10", "p90", "samples", "passed", "checks"}   timed; `passed` by the rules that hold for it
  {"passed": false, "checks"}                           wrong, so not timed
  {"unavailable": reason}                               not run

Names that start with "ours" are this project's; of them both pass rules are asked. A library's answer to
one launch, whose operands are its own, has no checks ("passed": null).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cute_gemma.cli.common import table
from cute_gemma.workloads import suite_cases

SCHEMA = 1
TOP = {
    "schema": int, "made": str, "seed": int, "protocols": dict, "facts": dict, "peaks": dict, "cases": list,
    "summary": dict,
}  # fmt: skip
CASE = {
    "workload": str, "batch": int, "seq": int, "launch": (str, type(None)), "protocol": str,
    "flops": int, "bytes": int, "bound_us": float, "bound_by": str, "state": str, "contestants": dict,
}  # fmt: skip
OURS = "ours"
_TIMES = ("us", "p10", "p90", "samples")


def check_schema(result: Mapping) -> None:
    """Raises ValueError that names the key which is missing, superfluous or of another type, or a time out
    of order."""
    _check_keys("result", result, TOP)
    if result["schema"] != SCHEMA:
        raise ValueError(f"result['schema']: got {result['schema']}, want {SCHEMA}")
    for index, case in enumerate(result["cases"]):
        where = f"cases[{index}]"
        _check_keys(where, case, CASE)
        if case["protocol"] not in result["protocols"]:
            raise ValueError(
                f"{where}['protocol']: got {case['protocol']!r}, want one of {', '.join(result['protocols'])}"
            )
        for name, entry in case["contestants"].items():
            _check_contestant(f"{where} {name}", entry)


def _check_keys(where: str, given: Mapping, wanted: Mapping[str, object]) -> None:
    for key in wanted.keys() ^ given.keys():
        raise ValueError(f"{where}: {'lacks' if key in wanted else 'has an unknown'} {key!r}")
    for key, kind in wanted.items():
        if not isinstance(given[key], kind):
            raise ValueError(f"{where}[{key!r}]: got {type(given[key]).__name__}")


def _check_contestant(where: str, entry: Mapping) -> None:
    if "unavailable" in entry:
        return
    if "passed" not in entry or "checks" not in entry:
        raise ValueError(f"{where}: lacks 'passed' or 'checks'")
    timed = [key for key in _TIMES if key in entry]
    if entry["passed"] is False and timed:
        raise ValueError(f"{where}: is wrong and has times")
    if timed and (len(timed) != len(_TIMES) or not 0 < entry["p10"] <= entry["us"] <= entry["p90"]):
        raise ValueError(
            f"{where}: got times {[entry.get(key) for key in _TIMES]}, want 0 < p10 <= us <= p90, samples"
        )


def load(path: str | Path) -> dict:
    """A checked result."""
    result = json.loads(Path(path).read_text())
    check_schema(result)
    return result


def save(result: dict, path: str | Path) -> None:
    """Writes a result, its summary made anew, whole or not at all."""
    result["summary"] = summarise(result["cases"])
    check_schema(result)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def timed(case: Mapping) -> dict[str, float]:
    """Microseconds of the contestants that have a time."""
    return {name: entry["us"] for name, entry in case["contestants"].items() if "us" in entry}


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def best_peer(case: Mapping) -> tuple[str, float] | None:
    """Name and microseconds of the fastest right contestant that is not ours."""
    peers = {name: us for name, us in timed(case).items() if not is_ours(name)}
    return min(peers.items(), key=lambda item: item[1]) if peers else None


def ratio(case: Mapping, name: str = OURS) -> float | None:
    """A contestant's time as a share of the best peer's; None where either is missing."""
    best, us = best_peer(case), timed(case).get(name)
    return us / best[1] if best and us else None


def suite_means(cases: Iterable[Mapping], workload: str, protocol: str) -> dict[str, float]:
    """Mean microseconds over the suite's 16 cases, of each contestant that has a time for all of them."""
    sizes = {(case.batch_size, case.seq_len) for case in suite_cases(workload)}
    found: dict[str, dict[tuple[int, int], float]] = {}
    for case in cases:
        if (case["workload"], case["protocol"], case["launch"]) == (workload, protocol, None):
            for name, us in timed(case).items():
                found.setdefault(name, {})[case["batch"], case["seq"]] = us
    return {
        name: sum(times[size] for size in sizes) / len(sizes)
        for name, times in found.items()
        if sizes <= times.keys()
    }


def summarise(cases: Sequence[Mapping]) -> dict:
    """By protocol and workload: suite means, the ratio of ours to the best peer's mean, worst ratio of a
    case, failures."""
    summary: dict = {}
    for protocol in dict.fromkeys(case["protocol"] for case in cases):
        for workload in dict.fromkeys(case["workload"] for case in cases):
            own = [
                c for c in cases if (c["protocol"], c["workload"], c["launch"]) == (protocol, workload, None)
            ]
            means = suite_means(own, workload, protocol)
            peers = {name: us for name, us in means.items() if not is_ours(name)}
            best = min(peers, key=peers.get) if peers else None
            ratios = [[ratio(c), [c["batch"], c["seq"]]] for c in own if ratio(c) is not None]
            summary.setdefault(protocol, {})[workload] = {
                "cases": len(own),
                "means_us": means,
                "bound_us": sum(c["bound_us"] for c in own) / len(own) if own else None,
                "best_peer": best,
                "ratio": {name: us / peers[best] for name, us in means.items() if best and is_ours(name)},
                "worst_case": max(ratios) if ratios else None,
                "wrong": [[c["batch"], c["seq"], name] for c in own for name in wrong(c)],
            }
    return summary


def wrong(case: Mapping) -> list[str]:
    """Contestants that fail a rule."""
    return [name for name, entry in case["contestants"].items() if entry.get("passed") is False]


def ours_right(case: Mapping) -> bool:
    """Whether this project takes part and is right in all that it is asked for."""
    ours = [entry for name, entry in case["contestants"].items() if is_ours(name)]
    return bool(ours) and all(entry.get("passed") is True and "us" in entry for entry in ours)


def case_line(case: Mapping) -> str:
    """One case: microseconds of everyone (spread in percent), ours against the best peer and the bound, its
    rates."""
    parts = [f"{case_name(case)} [{case['protocol']}]"]
    for name, entry in case["contestants"].items():
        if "us" in entry:
            spread = (entry["p90"] - entry["p10"]) / entry["us"] * 100
            parts.append(f"{name} {entry['us']:.1f}±{spread / 2:.0f}%")
        else:
            parts.append(f"{name} {'WRONG' if 'checks' in entry else 'n/a'}")
    if us := timed(case).get(OURS):
        if (share := ratio(case)) is not None:
            parts.append(f"{share:.3f} x {best_peer(case)[0]}")
        rates = f"{case['flops'] / us * 1e-6:.0f} TFLOP/s, {case['bytes'] / us * 1e-6:.2f} TB/s"
        parts.append(f"{rates}, {case['bound_us'] / us:.0%} of the {case['bound_by']} bound")
    return "  ".join(parts)


def tables(result: Mapping) -> str:
    """A table of every case by protocol, and the suite means."""
    lines = []
    for protocol, text in result["protocols"].items():
        cases = [case for case in result["cases"] if case["protocol"] == protocol]
        if not cases:
            continue
        names = list(dict.fromkeys(name for case in cases for name in case["contestants"]))
        header = ["case", *names, "best peer", "ours / it", "TFLOP/s", "TB/s", "of bound", "bound by"]
        rows = [_row(case, names) for case in cases]
        lines += [f"{protocol}: {text}", "", table(header, rows, right=range(1, len(header) - 1)), ""]
        lines += [
            _means(workload, summary)
            for workload, summary in result["summary"][protocol].items()
            if summary["means_us"]
        ]
        lines.append("")
    return "\n".join(lines)


def _means(workload: str, summary: Mapping) -> str:
    means = ", ".join(f"{name} {us:.1f}" for name, us in summary["means_us"].items())
    ratios = ", ".join(f"{name} {share:.3f}" for name, share in summary["ratio"].items())
    beside = f"; share of {summary['best_peer']}'s: {ratios}" if ratios else ""
    return f"{workload} suite mean, us: {means}; bound {summary['bound_us']:.1f}{beside}"


def _row(case: Mapping, names: Sequence[str]) -> list[str]:
    times, best, share = timed(case), best_peer(case), ratio(case)
    cells = [case_name(case)]
    for name in names:
        cells.append(f"{times[name]:.1f}" if name in times else "WRONG" if name in wrong(case) else "-")
    cells += [best[0] if best else "-", f"{share:.3f}" if share else "-"]
    if us := times.get(OURS):
        cells += [f"{case['flops'] / us * 1e-6:.0f}", f"{case['bytes'] / us * 1e-6:.2f}"]
        cells.append(f"{case['bound_us'] / us:.0%}")
    else:
        cells += ["-"] * 3
    return [*cells, case["bound_by"]]


def case_name(case: Mapping) -> str:
    """Workload, sizes and, of a single launch, its name."""
    launch = f" {case['launch']}" if case.get("launch") else ""
    return f"{case['workload']} ({case['batch']},{case['seq']}){launch}"
