"""Pictures of recorded results.

    python perf/plots.py perf/results/bench.json              times by workload and protocol, roofline
    python perf/plots.py perf/results/roofline_sm100a.json    what share of its bound each unit takes

Wants matplotlib (pip install -e .[perf]). A picture of modelled figures says so in its title.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import records
from roofline import UNITS

_MARKERS = "osD^vP*X"


def plot_times(result: Mapping, workload: str, protocol: str, path: Path) -> None:
    """Microseconds of every contestant, a row a case, shortest at the top; the bound as a line's end."""
    import matplotlib.pyplot as plt

    cases = [
        c
        for c in result["cases"]
        if (c["workload"], c["protocol"], c["launch"]) == (workload, protocol, None)
    ]
    cases.sort(key=lambda case: case["bound_us"], reverse=True)
    names = list(dict.fromkeys(name for case in cases for name in records.timed(case)))
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.32 * len(cases)), layout="constrained")
    for index, name in enumerate(names):
        points = [(records.timed(c)[name], row) for row, c in enumerate(cases) if name in records.timed(c)]
        ours = records.is_ours(name)
        style = {
            "s": 70 if ours else 40,
            "zorder": 4 if ours else 3,
            "marker": _MARKERS[index % len(_MARKERS)],
        }
        axes.scatter(*zip(*points, strict=True), label=name, **style)
    axes.barh(
        range(len(cases)), [c["bound_us"] for c in cases], color="0.88", label="below the bound", zorder=1
    )
    axes.set_xscale("log")
    axes.set_xlabel("microseconds")
    axes.set_yticks(range(len(cases)), [f"({c['batch']}, {c['seq']})" for c in cases])
    axes.set_title(f"{workload} on {result['facts']['gpu']}: {protocol}", loc="left")
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.legend(fontsize="small")
    _save(figure, path)


def plot_roofline(result: Mapping, path: Path) -> None:
    """Rate against intensity of ours and of the best peer, by case and launch, under the measured
    ceilings."""
    import matplotlib.pyplot as plt
    import numpy as np

    tflops, tbps = result["peaks"]["gemm_tflops"], result["peaks"]["copy_tbps"]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    intensity = np.geomspace(10, 10_000, 200)
    axes.plot(intensity, np.minimum(tflops, intensity * tbps), color="0.3", label="measured peaks")
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for case in result["cases"]:
        best, ours = records.best_peer(case), records.timed(case).get(records.OURS)
        if case["protocol"] != "graph" or not case["flops"]:
            continue
        kind = "launches" if case["launch"] else case["workload"]
        for who, us in (("ours", ours), ("best peer", best and best[1])):
            if us:
                point = case["flops"] / case["bytes"], case["flops"] / us * 1e-6
                groups.setdefault((kind, who), []).append(point)
    kinds = sorted({kind for kind, _ in groups})
    for (kind, who), points in groups.items():
        color = f"C{kinds.index(kind)}"
        fill = {"color": color} if who == "ours" else {"facecolors": "none", "edgecolors": color}
        axes.scatter(*zip(*points, strict=True), label=f"{kind}, {who}", zorder=3, **fill)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.set_title(f"Roofline, {result['facts']['gpu']}, protocol graph", loc="left")
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize="small")
    _save(figure, path)


def plot_shares(title: str, launches: Sequence[tuple[str, Mapping[str, float]]], path: Path) -> None:
    """A heat map: rows are launches, columns units, values shares (1 is the whole of the time or bound)."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.22 * len(launches)), layout="constrained")
    values = [[shares[unit] for unit in UNITS] for _, shares in launches]
    axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    for row, line in enumerate(values):
        for column, share in enumerate(line):
            color = "black" if share > 0.6 else "white"
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=6, color=color)
    axes.set_xticks(range(len(UNITS)), UNITS)
    axes.set_yticks(range(len(launches)), [label for label, _ in launches], fontsize=6)
    axes.set_title(title, loc="left", fontsize="medium")
    _save(figure, path)


def modelled_shares(result: Mapping, ghz: str) -> list[tuple[str, dict[str, float]]]:
    """Of each launch, every unit's time as a share of the modelled bound."""
    launches = []
    for case in result["cases"]:
        for launch in case["launches"]:
            times = launch["us"][ghz]
            bound = max(times.values())
            shares = {unit: us / bound for unit, us in times.items()}
            launches.append((f"{records.case_name(case)} {launch['stage']}", shares))
    return launches


def draw(result: Mapping, folder: Path, stem: str) -> list[Path]:
    """Every picture that a bench's or a roofline's file holds. Returns their paths."""
    drawn: list[Path] = []

    def named(name: str) -> Path:
        drawn.append(folder / f"{stem}_{name}.png")
        return drawn[-1]

    if "protocols" in result:
        records.check_schema(result)
        pairs = {(c["workload"], c["protocol"]): None for c in result["cases"] if c["launch"] is None}
        for workload, protocol in pairs:
            plot_times(result, workload, protocol, named(f"times_{workload}_{protocol}"))
        plot_roofline(result, named("roofline"))
        return drawn
    ghz = str(result["card"]["ghz"][-1])
    title = f"MODELLED on {result['card']['name']} at {ghz} GHz: share of the bound by unit"
    plot_shares(title, modelled_shares(result, ghz), named("modelled"))
    if result["measured"]:
        rows = [
            (f"{records.case_name(row)} {row['stage']}", row["measured"]["share"])
            for row in result["measured"]
        ]
        plot_shares(
            f"Measured on {result['card']['name']}: share of each unit's peak", rows, named("measured")
        )
    return drawn


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="files of bench.py or roofline.py")
    parser.add_argument("--out", type=Path, help="folder (default: each file's own)")
    options = parser.parse_args()
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError:
        print("plots: matplotlib is missing: pip install -e .[perf]", file=sys.stderr)
        return 2
    for path in options.results:
        result = json.loads(path.read_text())
        if not isinstance(result, dict) or "cases" not in result:
            parser.error(f"results: got {path}, want a file of bench.py or roofline.py")
        for picture in draw(result, options.out or path.parent, path.stem):
            print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
