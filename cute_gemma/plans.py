"""Launches that are ready to run: which kernels, on which tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from tqdm import tqdm

from . import emulator, jit
from .emulator.launch import Launch
from .workspace import Workspace

# Seconds after which a launch in the emulator shows a progress bar.
_BAR_DELAY = 3.0


@dataclass(frozen=True)
class Step:
    """One kernel launch. tensors: its arguments by the names of its signature, in order.

    outputs: what the step computes, by the name of the reference's stage.
    """

    stage: str
    kernel: Any
    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    target: str

    @cached_property
    def gpu_launch(self) -> Callable[[], None]:
        """Launches on the tensors' GPU. The first access checks the tensors, compiles and loads."""
        return jit.bind(self.kernel, *self.tensors.values(), target=self.target)


@dataclass(frozen=True)
class Plan:
    """Launches in order. output: what the caller gets, one tensor or more. workspace: what lies between, the plan's own
    memory. It runs on the memory that its tensors had at the first run."""

    target: str
    steps: tuple[Step, ...]
    output: Tensor | tuple[Tensor, ...]
    workspace: Workspace

    @property
    def emulated(self) -> bool:
        """Whether the tensors are on the CPU, so that the launches run in the emulator."""
        return self.workspace.device.type == "cpu"

    def launch(self, step: Step, emulation: Any = None) -> Any:
        """Launches one step; emulation: an emulator.Options. Returns what `jit.launch` returns."""
        if not self.emulated:
            return step.gpu_launch()
        with _progress_bar(step.stage) as progress:
            emulation = replace(emulation or emulator.Options(), progress=progress)
            return jit.launch(step.kernel, *step.tensors.values(), target=self.target, emulation=emulation)

    def capture(self, step: Step) -> list[Launch]:
        """The launches that the step's host code makes of CPU tensors, without running them."""
        launches: list[Launch] = []
        jit.compile(step.kernel, self.target).host_code(tuple(step.tensors.values()), launches.append)
        return launches

    def run(self, emulation: Any = None) -> list[Any]:
        """Launches every step in order, and returns what each launch returned."""
        if not self.emulated:
            return [step.gpu_launch() for step in self.steps]
        # One stream: the emulator checks each launch that may start early against the one before.
        with emulator.stream():
            return [self.launch(step, emulation) for step in self.steps]

    def poison(self) -> None:
        """Fills the output and the workspace with NaN, so that what no kernel writes shows."""
        for tensor in (self.output,) if isinstance(self.output, Tensor) else self.output:
            tensor.fill_(math.nan)
        self.workspace.poison()


@contextmanager
def _progress_bar(stage: str) -> Iterator[Callable[[int, int], None]]:
    """What shows a launch's progress in CTAs, on a terminal and once it takes long."""
    bar = tqdm(desc=stage, unit="CTA", delay=_BAR_DELAY, leave=False, disable=None)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    with bar:
        yield progress
