"""The two workloads on a GPU against what people use instead.

    python perf/bench.py                    everything: 32 cases and the launches of the largest, both protocols
    python perf/bench.py --quick            a few sizes, short samples
    python perf/bench.py --resume           what the file of a run that was cut short lacks
    python perf/bench.py --workload 047 --cases 1x128,2x293 --peers flex,fa4 --protocol graph

Every contestant's result is checked before it is timed: this project's by both pass rules, a peer's by the
suite's. "ours" is the public function, captured in a graph or called, and told, as the best peers are, that
the mask is causal; "ours, mask tensor" reads the suite's mask. Times are medians; ± is half the way from
the tenth to the ninetieth percentile, as a share. measure.py describes the protocols, README.md how long a
run takes. What fails is kept as its reason, and the rest goes on.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
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

from cute_gemma import functional, functional_backward, jit, reference
from cute_gemma.config import AttentionConfig
from cute_gemma.plans import Plan
from cute_gemma.verification import PLANNERS, forward_arguments
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
# Facts that two parts of one result have in common.
_SAME = ("gpu", "cuda", "packages", "target")


def our_calls(problem: Workload, inputs: Any, target: str) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """This project's contestants for a case."""

    def calling(given: Any) -> Callable[[], tuple[Tensor, ...]]:
        if problem.number == "047":
            arguments, function = forward_arguments(given, problem.config), functional.attention_forward
        else:
            arguments, function = given.tensors(), functional_backward.qkv_backward
        return lambda: as_tuple(function(**arguments, target=target))

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


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


class Bench:
    """One run: its options, what it has measured, and the file that holds it from the first case on."""

    def __init__(
        self,
        options: argparse.Namespace,
        timer: Any,
        span_timer: Any,
        card: Mapping,
        device: str = "cuda",
        before: dict | None = None,
    ) -> None:
        """timer, span_timer: as in measure.py. card: what `facts` and `peaks` say of the GPU. before: the
        result of a run to go on with, as `earlier` gives it; its peaks stay."""
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
        if before is not None:
            before["facts"].setdefault("resumed", []).append(self.result["made"])
            before["protocols"] |= self.result["protocols"]
            self.result = before

    def record(self, case: SuiteCase, launch: str | None, protocol: str) -> dict | None:
        """What is kept of a case or launch."""
        key = (*case, launch, protocol)
        names = ("workload", "batch", "seq", "launch", "protocol")
        return next((c for c in self.result["cases"] if tuple(c[name] for name in names) == key), None)

    def attempt(
        self,
        case: SuiteCase,
        launch: str | None,
        protocol: str,
        work: bounds.Work,
        time_it: Callable[[], tuple[dict, str]],
    ) -> None:
        """Keeps what `time_it` returns, or why it raises."""
        try:
            timed = time_it()
        except Exception as error:
            timed = {records.OURS: {"unavailable": reason_of(error)}}, "nothing was timed"
        self.add(case, launch, protocol, work, timed)

    def tasks(self, cases: list[SuiteCase]) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is left to do, by name."""
        numbers = list(dict.fromkeys(number for number, *_ in cases))
        for case in cases:
            if self.record(case, None, "graph") is None:
                yield f"{case}", partial(self.graph_case, case)
        for number in numbers:
            if self.options.launches:
                yield f"launches of {number}", partial(self.launches, number)
            if number not in self.result["facts"].get("host_us", {}):
                yield f"host cost of {number}", partial(self.host_cost, number)
        for case in cases if "span" in self.options.protocols else ():
            if self.record(case, None, "span") is None:
                yield f"{case}, span", partial(self.span_case, case)

    def run(self, cases: list[SuiteCase], until: float = math.inf) -> bool:
        """Does all tasks, those that fail aside. Returns whether none is left.

        until: of time.perf_counter(), from when on none is begun. Ends early, too, once the GPU answers no
        more, as after an illegal access: what is done then is kept.
        """
        for what, task in self.tasks(cases):
            if time.perf_counter() >= until:
                print(f"time is up before {what}; --resume goes on", flush=True)
                return False
            try:
                task()
            except Exception as error:
                print(f"{what} failed: {reason_of(error)}", flush=True)
                self.result["facts"].setdefault("failed", {})[what] = reason_of(error)
                records.save(self.result, self.options.json)
            try:
                self.tidy()
            except Exception as error:
                print(f"no answer of the GPU after {what}: {reason_of(error)}; --resume goes on", flush=True)
                return False
        return True

    def tidy(self) -> None:
        """Frees what a task leaves. Raises what the GPU says of it."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

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

    def contestants(
        self, case: SuiteCase, inputs: Any, judge: Judge | None, names: Sequence[str]
    ) -> dict[str, Contestant]:
        """The case's contestants of these names."""
        number = case[0]
        config = workload(number).config
        builders = {name: build for name, build in peers.PEERS[number].items() if name in names}
        ours = our_calls(workload(number), inputs, self.options.target)
        return entrants(builders, judge, inputs, config) | {
            name: Contestant(call, judge) for name, call in ours.items() if name in names
        }

    def graph_case(self, case: SuiteCase) -> None:
        """Checks a case's contestants and times them by the protocol "graph"; keeps the right ones for
        "span"."""
        number, batch, seq = case
        problem = workload(number)

        def time_it() -> tuple[dict, str]:
            inputs = self.inputs(problem, batch, seq)
            judge = case_judge(problem, inputs, case_for(number, batch, seq))
            names = [*self.options.peers, *our_calls(problem, inputs, self.options.target)]
            contestants = self.contestants(case, inputs, judge, names)
            timed = time_contestants(self.timer, contestants)
            if "span" in self.options.protocols:
                self.kept[case] = {
                    name: contestants[name].call for name, entry in timed[0].items() if entry.get("passed")
                }
            return timed

        self.attempt(case, None, "graph", bounds.call_work(number, problem.config, batch, seq), time_it)

    def span_case(self, case: SuiteCase) -> None:
        """Times by the protocol "span" what was right by "graph"; last: a profiler may leave traces."""
        number, batch, seq = case
        problem, graph = workload(number), self.record(case, None, "graph")

        def time_it() -> tuple[dict, str]:
            right = [name for name, entry in graph["contestants"].items() if entry.get("passed")]
            calls = self.kept.pop(case, None)
            if calls is None:  # of a run before this one
                found = self.contestants(case, self.inputs(problem, batch, seq), None, right)
                calls = {name: entrant.call for name, entrant in found.items() if callable(entrant.call)}
            if not calls:
                raise RuntimeError("nothing was right by the protocol graph")
            times, state = self.span_timer.sample(calls)
            return {n: {"passed": True, "checks": []} | asdict(taken) for n, taken in times.items()}, state

        if graph is not None:
            self.attempt(case, None, "span", bounds.call_work(number, problem.config, batch, seq), time_it)

    def host_cost(self, number: str) -> None:
        """CPU time at the smallest case: of the public function, for 051 also where it is given its results' memory, of
        the same launches by `jit.launch` and by a plan that is made already, and, to compare with, of an addition in
        place and of an allocation by torch."""
        problem = workload(number)
        batch, seq = min(((c.batch_size, c.seq_len) for c in suite_cases(number)), key=math.prod)
        inputs = self.inputs(problem, batch, seq)
        call = our_calls(problem, inputs, self.options.target)[records.OURS]
        plan, one = self._plan(number, inputs), torch.zeros(1, device=self.device)
        steps = [(step.kernel, *step.tensors.values()) for step in plan.steps]
        calls = {"call": call}
        if number == "051":
            arguments = inputs.tensors() | {"out": functional_backward.QKVGradients(*call())}
            calls["call with out"] = lambda: functional_backward.qkv_backward(**arguments, target=self.options.target)
        calls |= {
            "jit.launch": lambda: [jit.launch(*step, target=self.options.target) for step in steps],
            "plan": plan.run,
            "torch add_": lambda: one.add_(1),
            "torch empty_like": lambda: torch.empty_like(one),
        }
        times, launches = host_us(calls), len(plan.steps)
        found = {"launches": launches, "calls": {name: asdict(taken) for name, taken in times.items()}}
        self.result["facts"].setdefault("host_us", {})[number] = found
        records.save(self.result, self.options.json)
        print(f"{number} CPU time, us: of a call that finds the GPU idle, in a row of calls, there for each launch")
        for name, taken in times.items():
            each = "" if name.startswith("torch") else f"{taken.in_a_row / launches:8.1f}"
            print(f"  {name:18}{taken.idle:8.1f}{taken.in_a_row:8.1f}{each}", flush=True)

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
            if step.stage == "attention" or self.record(case, step.stage, "graph") is not None:
                continue
            written = step.outputs or {name: t for name, t in step.tensors.items() if name in _BETWEEN}

            def time_it(step: Any = step, written: Mapping = written) -> tuple[dict, str]:
                contestants = {}
                if step.stage in LIBRARIES:
                    contestants = entrants({"cublas": LIBRARIES[step.stage]}, None, inputs, problem.config)
                outputs = tuple(written.values())
                ours = Contestant(lambda: (plan.launch(step), outputs)[1], bits_judge(written))
                return time_contestants(self.timer, contestants | {records.OURS: ours})

            self.attempt(case, step.stage, "graph", works[step.stage], time_it)
        if number == "047":
            for softcap in (problem.config.softcap, None):
                self.attention([plan.steps[0].outputs[name] for name in "qkv"], softcap)

    def attention(self, qkv: list[Tensor], softcap: float | None) -> None:
        """Times attention alone on q [B, S, H, D], k and v [B, S, KV, D]."""
        config, case = replace(workload("047").config, softcap=softcap), ("047", *LARGEST)
        name = "attention" if softcap else "attention, no softcap"
        if self.record(case, name, "graph") is None:
            work = bounds.stage_work("047", config, *LARGEST)["attention"]
            self.attempt(case, name, "graph", work, partial(self._time_attention, case, qkv, config))

    def _time_attention(
        self, case: SuiteCase, qkv: list[Tensor], config: AttentionConfig
    ) -> tuple[dict, str]:
        with torch.no_grad():
            eager = reference.attention(*qkv, "causal", config)
            exact = reference.attention(*(t.double() for t in qkv), "causal", config)
        judge = reference_judge([("attention", eager, exact)], case_for(*case))
        plan = functional.plan_attention(
            *qkv, softcap=config.softcap, scale=config.scale, target=self.options.target
        )
        contestants = entrants({"fa4": peers.library_fa4, "cudnn": peers.library_cudnn}, judge, *qkv, config)
        contestants[records.OURS] = Contestant(lambda: (plan.run(), (plan.output,))[1], judge)
        return time_contestants(self.timer, contestants)


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
    parser.add_argument("--resume", action="store_true", help="go on with the file of a run cut short")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no case is begun")
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


def earlier(options: argparse.Namespace, facts: Mapping) -> dict | None:
    """The result to go on with, None where there is none. Raises ValueError for one that another card, other
    packages or another seed made."""
    if not (options.resume and options.json.exists()):
        return None
    result = records.load(options.json)
    ours = {"seed": options.seed} | {key: facts[key] for key in _SAME}
    for key, value in ours.items():
        found = result["seed"] if key == "seed" else result["facts"].get(key)
        if found != value:
            raise ValueError(f"--resume: {options.json} has {key} {found!r}, this run {value!r}")
    return result


def main() -> int:
    """0 if this project's results are right in every case, and none is left to do."""
    options = parse()
    if not torch.cuda.is_available():
        print("bench: there is no GPU here; nothing was timed", file=sys.stderr)
        return 2
    options.target = card_target(options.target)
    start = time.perf_counter()
    card_facts = facts() | {"target": options.target}
    try:
        before = earlier(options, card_facts)
    except ValueError as refusal:
        print(f"bench: {refusal}", file=sys.stderr)
        return 2
    numbers = list(dict.fromkeys(number for number, *_ in options.cases))
    whole = [(number, *LARGEST) for number in numbers] if options.launches else []
    # A peer that is compiled anew for every size must never fall back to eager code unseen.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    compile_all([*options.cases, *whole], options.target, options.peers)
    with torch.no_grad():
        timer = GraphTimer(options.seconds)
        card = {"facts": card_facts, "peaks": before["peaks"] if before else peaks(timer)}
        print(card, flush=True)
        bench = Bench(options, timer, SpanTimer(options.reps), card, before=before)
        whole_run = bench.run(options.cases, start + options.budget)
    print(f"\n{records.tables(bench.result)}\n\n{time.perf_counter() - start:.0f} s; {options.json}")
    wrong = [case for case in bench.result["cases"] if not records.ours_right(case)]
    return 1 if wrong or not whole_run or "failed" in bench.result["facts"] else 0


def peaks(timer: GraphTimer) -> dict[str, float]:
    return measure_peaks() | {"graph_floor_us": timer.floor_us()}


if __name__ == "__main__":
    sys.exit(main())
