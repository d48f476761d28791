"""The two workloads on a GPU against what people use instead.

    python perf/bench.py                    everything: 32 cases and the launches of the largest, both
    protocols python perf/bench.py --quick            a few sizes, short samples python perf/bench.py
    --workload 047 --cases 1x128,2x293 --peers flex,fa4 --protocol graph

Every contestant's result is checked before it is timed: this project's by both pass rules, a peer's by the
suite's. "ours" is the public function, captured in a graph or called, and told, as the best peers are, that
the mask is causal; "ours, mask tensor" reads the suite's mask. Times are medians; ± is half the way from
the tenth to the ninetieth percentile, as a share. measure.py describes the protocols, README.md how long a
run takes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bounds
import peers
import records
import torch
from contest import Contestant, Judge, bits_judge, case_judge, reference_judge, time_contestants
from measure import PROTOCOLS, GraphTimer, SpanTimer, facts, host_us, measure_peaks
from prepare import SuiteCase, choose_cases, compile_all
from torch import Tensor

from cute_gemma import functional, jit, reference
from cute_gemma.plans import Plan
from cute_gemma.verification import PLANNERS
from cute_gemma.workloads import Workload, case_for, suite_cases, workload

RESULTS = Path(__file__).resolve().parent / "results"
LARGEST = (1, 8192)  # whose launches are timed by themselves
LIBRARIES = {
    "qkv projection": peers.library_qkv,
    "output projection": peers.library_output,
    "gradients": peers.library_gradients,
}
# What a launch without outputs of the reference's writes, by the names of its signature. Not its partial sums:
# rows of theirs that no CTA has stay as they were.
_BETWEEN = ("grad_q", "grad_k")


def our_calls(problem: Workload, inputs: Any, target: str) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """This project's contestants for a case."""

    def calling(given: Any) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            plan = PLANNERS[problem.number](given, problem.config, target=target)
            plan.run()
            return as_tuple(plan.output)

        return call

    if problem.number != "047":
        return {records.OURS: calling(inputs)}
    causal = replace(inputs, attention_mask="causal")
    return {records.OURS: calling(causal), f"{records.OURS}, mask tensor": calling(inputs)}


def as_tuple(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def entrants(builders: Mapping[str, Callable], judge: Judge | None, *arguments: Any) -> dict[str, Contestant]:
    """A contestant for each builder of a call; one that raises takes part as the reason."""
    found = {}
    for name, build in builders.items():
        try:
            found[name] = Contestant(build(*arguments), judge)
        except Exception as reason:
            found[name] = Contestant(reason)
    return found


class Bench:
    """One run: its options, what it has measured, and the file that holds it from the first case on."""

    def __init__(
        self, options: argparse.Namespace, timer: Any, span_timer: Any, card: Mapping, device: str = "cuda"
    ) -> None:
        """timer, span_timer: as in measure.py. card: what `facts` and `peaks` say of the GPU."""
        self.options, self.timer, self.span_timer, self.device = options, timer, span_timer, device
        self.kept: dict[SuiteCase, dict[str, Callable]] = {}
        self.result = {
            "schema": records.SCHEMA,
            "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "seed": options.seed,
            "protocols": {name: PROTOCOLS[name] for name in options.protocols},
            **card,
            "cases": [],
            "summary": {},
        }

    def add(
        self, case: SuiteCase, launch: str | None, protocol: str, work: bounds.Work, timed: tuple[dict, str]
    ) -> None:
        """Keeps a record, in the file too, and prints it."""
        rates = self.result["peaks"]["gemm_tflops"], self.result["peaks"]["copy_tbps"]
        number, batch, seq = case
        entries, state = timed
        record = {
            "workload": number, "batch": batch, "seq": seq, "launch": launch, "protocol": protocol,
            "flops": work.flops, "bytes": work.bytes, "state": state, "contestants": entries,
            "bound_us": work.bound_us(*rates), "bound_by": work.bound_by(*rates),
        }  # fmt: skip
        self.result["cases"].append(record)
        records.save(self.result, self.options.json)
        print(records.case_line(record), flush=True)
        for name, entry in entries.items():
            if "unavailable" in entry or entry.get("passed") is False:
                print(f"  {name}: {entry.get('unavailable') or entry['checks']}", flush=True)

    def inputs(self, problem: Workload, batch: int, seq: int) -> Any:
        """The suite's draw."""
        return problem.make_inputs("suite", batch, seq, self.options.seed).to(self.device)

    def graph_case(self, case: SuiteCase) -> None:
        """Checks a case's contestants and times them by the protocol "graph"; keeps the right ones for
        "span"."""
        number, batch, seq = case
        problem = workload(number)
        inputs = self.inputs(problem, batch, seq)
        judge = case_judge(problem, inputs, case_for(number, batch, seq))
        builders = {name: build for name, build in peers.PEERS[number].items() if name in self.options.peers}
        contestants = entrants(builders, judge, inputs, problem.config)
        contestants |= {
            name: Contestant(call, judge)
            for name, call in our_calls(problem, inputs, self.options.target).items()
        }
        timed = time_contestants(self.timer, contestants)
        self.add(case, None, "graph", bounds.call_work(number, problem.config, batch, seq), timed)
        if "span" in self.options.protocols:
            self.kept[case] = {
                name: contestants[name].call for name, entry in timed[0].items() if entry.get("passed")
            }
        del judge, contestants
        gc.collect()
        torch.cuda.empty_cache()

    def span_cases(self) -> None:
        """Times by the protocol "span" what graph_case kept; last: a profiler may leave traces."""
        for case, calls in self.kept.items():
            times, state = self.span_timer.sample(calls)
            entries = {name: {"passed": True, "checks": []} | asdict(taken) for name, taken in times.items()}
            number, batch, seq = case
            work = bounds.call_work(number, workload(number).config, batch, seq)
            self.add(case, None, "span", work, (entries, state))

    def host_cost(self, number: str) -> None:
        """CPU microseconds of a warm launch and of a warm call of the public function, at the smallest
        case."""
        problem = workload(number)
        batch, seq = min(((c.batch_size, c.seq_len) for c in suite_cases(number)), key=math.prod)
        inputs = self.inputs(problem, batch, seq)
        call = our_calls(problem, inputs, self.options.target)[records.OURS]
        plan = self._plan(number, inputs)
        plan.run()
        found = {"launch": host_us(plan.run, len(plan.steps)), "call": host_us(call, 1)}
        self.result["facts"].setdefault("host_us", {})[number] = found
        records.save(self.result, self.options.json)
        print(
            f"{number} CPU time: {found['launch']:.1f} us a launch, {found['call']:.1f} us a call", flush=True
        )

    def _plan(self, number: str, inputs: Any) -> Plan:
        if number == "047":
            inputs = replace(inputs, attention_mask="causal")
        return PLANNERS[number](inputs, workload(number).config, target=self.options.target)

    def launches(self, number: str) -> None:
        """Times each launch of the largest case by itself, by the protocol "graph", against libraries."""
        problem, case = workload(number), (number, *LARGEST)
        inputs = self.inputs(problem, *LARGEST)
        plan = self._plan(number, inputs)
        plan.run()
        checks = case_judge(problem, inputs, case_for(*case))(as_tuple(plan.output))
        if not all(check.passed for check in checks):
            print(f"{case} is wrong: its launches are not timed", flush=True)
            return
        works = bounds.stage_work(number, problem.config, *LARGEST)
        for step in plan.steps:
            if step.stage == "attention":
                continue
            written = step.outputs or {name: t for name, t in step.tensors.items() if name in _BETWEEN}
            outputs = tuple(written.values())
            contestants = {}
            if step.stage in LIBRARIES:
                contestants = entrants({"cublas": LIBRARIES[step.stage]}, None, inputs, problem.config)
            ours = lambda step=step, outputs=outputs: (plan.launch(step), outputs)[1]  # noqa: E731
            contestants[records.OURS] = Contestant(ours, bits_judge(written))
            self.add(case, step.stage, "graph", works[step.stage], time_contestants(self.timer, contestants))
        if number == "047":
            for softcap in (problem.config.softcap, None):
                self.attention([plan.steps[0].outputs[name] for name in "qkv"], softcap)

    def attention(self, qkv: list[Tensor], softcap: float | None) -> None:
        """Times attention alone on q [B, S, H, D], k and v [B, S, KV, D]."""
        config, case = replace(workload("047").config, softcap=softcap), ("047", *LARGEST)
        with torch.no_grad():
            eager = reference.attention(*qkv, "causal", config)
            exact = reference.attention(*(t.double() for t in qkv), "causal", config)
        judge = reference_judge([("attention", eager, exact)], case_for(*case))
        plan = functional.plan_attention(
            *qkv, softcap=softcap, scale=config.scale, target=self.options.target
        )
        contestants = entrants({"fa4": peers.library_fa4, "cudnn": peers.library_cudnn}, judge, *qkv, config)
        contestants[records.OURS] = Contestant(lambda: (plan.run(), (plan.output,))[1], judge)
        work = bounds.stage_work("047", config, *LARGEST)["attention"]
        name = "attention" if softcap else "attention, no softcap"
        self.add(case, name, "graph", work, time_contestants(self.timer, contestants))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, with what follows from them: `cases`, `peers` and `protocols` as lists."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=sorted(peers.PEERS), help="only this one")
    parser.add_argument("--cases", help="only these sizes, as BATCHxSEQ,...")
    parser.add_argument("--peers", help="only these, by name, or none", default="eager,compile,flex,fa4")
    parser.add_argument(
        "--protocol", choices=("graph", "both"), default="both", help="span builds on what graph has checked"
    )
    parser.add_argument(
        "--launches",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the largest case's, one by one",
    )
    parser.add_argument("--quick", action="store_true", help="a few sizes and short samples")
    parser.add_argument("--seconds", type=float, help="of samples a case (default 0.4, with --quick 0.1)")
    parser.add_argument("--reps", type=int, default=11, help="samples a contestant of the protocol span")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--target", help="default: the GPU's")
    parser.add_argument("--json", type=Path, default=RESULTS / "bench.json", help="default: %(default)s")
    options = parser.parse_args(arguments)
    known = {name for table in peers.PEERS.values() for name in table}
    options.peers = [] if options.peers == "none" else options.peers.split(",")
    if unknown := set(options.peers) - known:
        parser.error(f"--peers: got {', '.join(sorted(unknown))}, want some of {', '.join(sorted(known))}")
    options.protocols = ["graph"] if options.protocol == "graph" else ["graph", "span"]
    options.seconds = options.seconds or (0.1 if options.quick else 0.4)
    options.cases = choose_cases(options.workload, options.cases, options.quick)
    return options


def card_target(name: str | None) -> str:
    """The target called `name`, or the first one for this GPU. Raises jit.UnsupportedTargetError."""
    capability = torch.cuda.get_device_capability()
    fitting = [target.name for target in jit.TARGETS.values() if target.capability == capability]
    return jit.resolve_target(
        name or (fitting[0] if fitting else None), torch.device("cuda", torch.cuda.current_device())
    ).name


def main() -> int:
    """0 if this project's results are right in every case."""
    options = parse()
    if not torch.cuda.is_available():
        print("bench: there is no GPU here; nothing was timed", file=sys.stderr)
        return 2
    options.target = card_target(options.target)
    numbers = list(dict.fromkeys(number for number, *_ in options.cases))
    whole = [(number, *LARGEST) for number in numbers] if options.launches else []
    # A peer that is compiled anew for every size must never fall back to eager code unseen.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    start = time.perf_counter()
    compile_all([*options.cases, *whole], options.target, options.peers)
    with torch.no_grad():
        timer = GraphTimer(options.seconds)
        card = {
            "facts": facts() | {"target": options.target},
            "peaks": measure_peaks() | {"graph_floor_us": timer.floor_us()},
        }
        print(card, flush=True)
        bench = Bench(options, timer, SpanTimer(options.reps), card)
        for case in options.cases:
            bench.graph_case(case)
        for number in numbers:
            if options.launches:
                bench.launches(number)
            bench.host_cost(number)
        bench.span_cases()
    print(f"\n{records.tables(bench.result)}\n\n{time.perf_counter() - start:.0f} s; {options.json}")
    wrong = [case for case in bench.result["cases"] if not records.ours_right(case)]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
