"""Who is timed on a case, and the check that comes before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from measure import Replay
from records import is_ours
from torch import Tensor

from cute_gemma.workloads import Case, OutputCheck, Workload, check_output

Judge = Callable[[Sequence[Tensor]], list[OutputCheck]]


@dataclass(frozen=True)
class Contestant:
    """call: what is timed; an exception says why there is nothing to time. judge: of its outputs; None
    leaves a library's answer unchecked, whose operands are not those of the case."""

    call: Callable[[], tuple[Tensor, ...]] | Exception
    judge: Judge | None = None


def case_judge(problem: Workload, inputs: Any, case: Case) -> Judge:
    """Checks a workload's outputs against the eager model and the same in float64, both computed where the
    inputs are."""
    with _full_sums(), torch.no_grad():
        eager = problem.reference(inputs, problem.config)
        exact = problem.reference(inputs.to(torch.float64), problem.config)
    references = [(name, getattr(eager, name), getattr(exact, name)) for name in problem.outputs]
    return reference_judge(references, case)


def reference_judge(references: Sequence[tuple[str, Tensor, Tensor]], case: Case) -> Judge:
    """Checks outputs against (name, eager, exact) each, by the case's tolerances."""

    def judge(outputs: Sequence[Tensor]) -> list[OutputCheck]:
        return [
            check_output(name, out.view_as(eager), eager, exact, case.max_atol, case.max_rtol)
            for out, (name, eager, exact) in zip(outputs, references, strict=True)
        ]

    return judge


def bits_judge(outputs: Mapping[str, Tensor]) -> Judge:
    """Wants the bits that a launch's outputs hold now, after a call that was found right."""
    wanted = {name: tensor.clone() for name, tensor in outputs.items()}

    def judge(found: Sequence[Tensor]) -> list[OutputCheck]:
        checks = []
        for out, (name, want) in zip(found, wanted.items(), strict=True):
            off = 0.0 if torch.equal(out, want) else math.inf
            checks.append(
                OutputCheck(name, bool(torch.isfinite(out).all()), float(not off), off, off, off, 0.0)
            )
        return checks

    return judge


@contextmanager
def _full_sums() -> Iterator[None]:
    """cuBLAS adds in float32 throughout: errors are held against the eager model at its best."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def time_contestants(timer: Any, contestants: Mapping[str, Contestant]) -> tuple[dict[str, dict], str]:
    """Captures each contestant, checks what one replay writes over NaN, and times those that are not wrong.

    timer: a measure.GraphTimer, or what has its capture and sample. Returns the entries of records.py by
    name, and the card's state while it was timed.
    """
    entries: dict[str, dict] = {}
    replays: dict[str, Replay] = {}
    for name, contestant in contestants.items():
        try:
            if isinstance(contestant.call, Exception):
                raise contestant.call
            replay = timer.capture(contestant.call)
            entries[name] = _check(replay, contestant.judge, ours=is_ours(name))
        except Exception as error:
            entries[name] = {"unavailable": f"{type(error).__name__}: {error}"[:400]}
            continue
        if entries[name]["passed"] is not False:
            replays[name] = replay
    if not replays:
        return entries, "nothing was timed"
    times, state = timer.sample(replays)
    for name, taken in times.items():
        entries[name] |= asdict(taken)
    return entries, state


def _check(replay: Replay, judge: Judge | None, ours: bool) -> dict:
    """The entry of a contestant not timed yet. Both rules hold for ours, the suite's for a peer."""
    if judge is None:
        return {"passed": None, "checks": []}
    for out in replay.outputs:
        out.fill_(math.nan)
    replay.run()
    checks = judge(replay.outputs)
    passed = bool(checks) and all(check.passed if ours else check.suite_pass for check in checks)
    return {"passed": passed, "checks": [asdict(check) for check in checks]}
