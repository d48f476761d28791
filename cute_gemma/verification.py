"""Runs a workload's kernels on an input set and judges every stage against the reference."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import emulator, functional, functional_backward, jit
from .config import AttentionConfig
from .emulator import timeline
from .plans import Plan, Step
from .workloads import OutputCheck, Workload, case_for, check_output

TRACE_EVENTS = 200_000


@dataclass(frozen=True)
class StageResult:
    """One kernel launch. grid and warp_instructions: None on a GPU. seconds: it took, compiling excluded.

    checks: how each tensor the kernel computes compares, of those the reference has.
    """

    stage: str
    kernel: str
    grid: tuple[int, int, int] | None
    warp_instructions: int | None
    seconds: float
    checks: tuple[OutputCheck, ...]


@dataclass(frozen=True)
class Verification:
    """One workload on one input set. checks: the workload's outputs, which alone decide."""

    workload: str
    inputs: str
    batch: int
    seq: int
    seed: int
    target: str
    backend: str
    schedule: str | None
    stages: tuple[StageResult, ...]
    checks: tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        """Both rules, for every output."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Options:
    """How to run. target, backend: as in `attention_forward`.

    schedule: of the emulator's asynchronous operations, "lazy", "eager" or "random:SEED". trace: a file for the
    timeline of the emulated launches, Chrome trace JSON of at most TRACE_EVENTS events a launch.
    """

    target: str | None = None
    backend: str = "emulator"
    schedule: str = "lazy"
    trace: str | None = None


def forward_arguments(inputs: Any, config: AttentionConfig) -> dict[str, Any]:
    """workloads.ForwardInputs as the arguments of `attention_forward`."""
    numbers = {"softcap": config.softcap, "eps": config.eps, "head_dim": config.head_dim}
    return numbers | {f.name: getattr(inputs, f.name) for f in fields(inputs)}


def plan_forward(inputs: Any, config: AttentionConfig, **options: Any) -> Plan:
    """047's launches on workloads.ForwardInputs."""
    return functional.plan_attention_forward(**forward_arguments(inputs, config), **options)


def plan_backward(inputs: Any, config: AttentionConfig, **options: Any) -> Plan:
    """051's launches on workloads.BackwardInputs."""
    return functional_backward.plan_qkv_backward(**inputs.tensors(), **options)


# How to plan a workload: inputs, config, target and backend to a Plan.
PLANNERS: Mapping[str, Callable[..., Plan]] = {"047": plan_forward, "051": plan_backward}


def verify(
    problem: Workload, name: str, batch: int, seq: int, seed: int = 0, options: Options = Options()
) -> Verification:
    """Runs `problem` on the input set `name`, with NaN in all memory that its kernels are to write.

    Raises ValueError for an unknown input set or size, and whatever planning and launching raise.
    """
    if problem.number not in PLANNERS:
        raise ValueError(f"workload: got {problem.number!r}, want one of {', '.join(PLANNERS)}")
    backend = options.backend
    if options.trace and backend != "emulator":
        raise ValueError(f'trace: got {options.trace!r} with backend {backend!r}, want backend "emulator"')
    inputs, judge = _prepare(problem, name, batch, seq, seed)
    device = "cuda" if backend == "cuda" else "cpu"
    with torch.no_grad():
        plan = PLANNERS[problem.number](
            inputs.to(device), problem.config, target=options.target, backend=backend
        )
        plan.poison()
        with emulator.stream():
            traced: list[tuple[str, Any]] = []
            launches = [_timed_launch(plan, step, options, traced) for step in plan.steps]
        if options.trace:
            timeline.write(options.trace, traced)
            for stage, report in traced:
                if len(report.trace) >= TRACE_EVENTS:
                    warnings.warn(f"trace: of {stage} only the first {TRACE_EVENTS:,} events were kept", stacklevel=2)
        stages = tuple(
            StageResult(step.stage, type(step.kernel).__name__, *launched, judge.checks(step.outputs))
            for step, launched in zip(plan.steps, launches, strict=True)
        )
    by_name = {check.name: check for stage in stages for check in stage.checks}
    return Verification(
        workload=problem.number,
        inputs=name,
        batch=batch,
        seq=seq,
        seed=seed,
        target=plan.target,
        backend=backend,
        schedule=options.schedule if backend == "emulator" else None,
        stages=stages,
        checks=tuple(by_name[output] for output in problem.outputs),
    )


def _timed_launch(
    plan: Plan, step: Step, options: Options, traced: list[tuple[str, Any]]
) -> tuple[tuple[int, int, int] | None, int | None, float]:
    """Grid, warp-instructions and seconds of one step, compiled beforehand; its reports go to `traced`."""
    jit.compile(step.kernel, plan.target)
    if not plan.emulated:
        torch.cuda.synchronize()
        start = time.perf_counter()
        plan.launch(step)
        torch.cuda.synchronize()
        return None, None, time.perf_counter() - start
    events = TRACE_EVENTS if options.trace else 0
    reports = plan.launch(step, emulator.Options(schedule=options.schedule, trace=events))
    traced += [(step.stage, report) for report in reports]
    seconds = sum(report.seconds for report in reports)
    return reports[0].launch.grid, sum(report.warp_instructions for report in reports), seconds


class _Judge:
    """Holds the reference's stages, eager and in float64."""

    def __init__(self, problem: Workload, inputs: Any, batch: int, seq: int) -> None:
        self.case = case_for(problem.number, batch, seq)
        self.eager = problem.reference(inputs, problem.config)
        self.exact = problem.reference(inputs.to(torch.float64), problem.config)

    def checks(self, outputs: Mapping[str, Tensor]) -> tuple[OutputCheck, ...]:
        """One check for each of `outputs` that is a stage of the reference."""
        return tuple(
            check_output(
                name,
                tensor.cpu(),
                getattr(self.eager, name),
                getattr(self.exact, name),
                self.case.max_atol,
                self.case.max_rtol,
            )
            for name, tensor in outputs.items()
            if hasattr(self.eager, name)
        )


@lru_cache(maxsize=1)  # another schedule on the same inputs needs no second reference
def _prepare(problem: Workload, name: str, batch: int, seq: int, seed: int) -> tuple[Any, _Judge]:
    inputs = problem.make_inputs(name, batch, seq, seed)
    return inputs, _Judge(problem, inputs, batch, seq)
