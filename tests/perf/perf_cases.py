"""Small workloads, a timer without a GPU, and made-up results, for the tests of the benchmarks."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "perf"))

import bounds
import measure
import records

from cute_gemma.config import AttentionConfig
from cute_gemma.workloads import WORKLOADS

SMALL = {
    "047": AttentionConfig(hidden=64, heads=6, kv_heads=2, head_dim=32),
    "051": AttentionConfig(hidden=64, heads=4, kv_heads=1, head_dim=32, softcap=None),
}


def small_workload(number):
    return replace(WORKLOADS[number], config=SMALL[number])


def small_inputs(number, batch=2, seq=37):
    problem = small_workload(number)
    return problem, problem.make_inputs("suite", batch, seq, config=problem.config)


class FakeTimer:
    """Calls on the CPU in place of replays; every time is a microsecond."""

    def __init__(self):
        self.sampled = []

    def capture(self, call):
        outputs = tuple(out.clone() for out in call())

        def run():
            for out, new in zip(outputs, call(), strict=True):
                out.copy_(new)

        return measure.Replay(run, outputs)

    def sample(self, replays):
        self.sampled += replays
        return {name: measure.Times(1.0, 1.0, 1.0, 15) for name in replays}, "fake"


def timed(us, passed=True):
    return {"us": us, "p10": us * 0.9, "p90": us * 1.1, "samples": 15, "passed": passed, "checks": []}


def made_case(number="051", batch=1, seq=131, **contestants):
    work = bounds.call_work(number, WORKLOADS[number].config, batch, seq)
    return {
        "workload": number, "batch": batch, "seq": seq, "launch": None, "protocol": "graph",
        "flops": work.flops, "bytes": work.bytes,
        "bound_us": work.bound_us(783, 4.29), "bound_by": work.bound_by(783, 4.29),
        "state": "", "contestants": contestants or {"ours": timed(10.0), "compile": timed(20.0)},
    }  # fmt: skip


def made_result(*cases):
    return {
        "schema": records.SCHEMA, "made": "2000-01-01", "seed": 0, "protocols": measure.PROTOCOLS,
        "facts": {"gpu": "made up"}, "peaks": {"gemm_tflops": 783.0, "copy_tbps": 4.29},
        "cases": list(cases), "summary": {},
    }  # fmt: skip
