"""From checked arguments to launches: what a call does, whatever tensors of the same description it gets."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import jit
from .jit.arguments import compact_strides
from .jit.signature import TensorArg
from .plans import Plan, Step
from .workspace import KEPT, Layout, Slot, Workspace

try:  # what torch.compile's code allocates with, on the current GPU: private, but half the time of torch.empty_like
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:  # another torch
    _empty_strided_cuda = None

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "u8": torch.uint8}
# Scratch arguments that a kernel finds zeroed.
_ZEROED = ("counters",)


class Stage(NamedTuple):
    """One kernel launch. tensors: names of values by those of the kernel's arguments, in order; outputs: by the name of
    the reference's stage."""

    name: str
    kernel: Any
    tensors: Mapping[str, str]
    outputs: Mapping[str, str]


class Input(NamedTuple):
    """A tensor that a call gets."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Output(NamedTuple):
    """A new tensor with the shape of the input called `like`."""

    like: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Recipe:
    """A call without its tensors: everything that follows from their shapes, dtypes and device.

    inputs: by name, in the order in which the tensors come. A value is an input, an output or a slot of the
    workspace, by name. result: makes what the caller gets from the list of outputs.
    """

    target: str
    device: torch.device
    inputs: Mapping[str, Input]
    outputs: Mapping[str, Output]
    stages: tuple[Stage, ...]
    layout: Layout
    result: Callable[[list[Tensor]], Any]
    # Addresses of the last call with given outputs whose memory was seen not to overlap.
    apart: list[list[int]] = field(default_factory=lambda: [[]], repr=False)
    _idle: list[_Frame] = field(default_factory=list, repr=False)

    @cached_property
    def emulated(self) -> bool:
        """Whether the tensors are on the CPU, so that the launches run in the emulator."""
        return self.device.type == "cpu"

    @cached_property
    def _makers(self) -> tuple[list[Callable[[], Tensor]], list[Callable[[], Tensor]]]:
        """What makes each output, on any device and where that is the current GPU."""
        shapes = [(self.inputs[like].shape, dtype) for like, dtype in self.outputs.values()]
        general = [partial(torch.empty, shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        if _empty_strided_cuda is None:
            return general, general
        return general, [partial(_empty_strided_cuda, shape, compact_strides(shape), dtype) for shape, dtype in shapes]

    def new_outputs(self, given: Sequence[Tensor | None] | None = None) -> list[Tensor]:
        """Memory for the outputs of a call: what is given of it, and new tensors for the rest."""
        current = not self.emulated and torch._C._cuda_getDevice() == self.device.index
        makers = self._makers[current]
        if given is None:
            return [make() for make in makers]
        return [make() if value is None else value for make, value in zip(makers, given, strict=True)]

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each input, then of each output."""
        outputs = (Input(dtype, self.inputs[like].shape) for like, dtype in self.outputs.values())
        return [math.prod(shape) * dtype.itemsize for dtype, shape in (*self.inputs.values(), *outputs)]

    def plan(self, tensors: Sequence[Tensor], outputs: list[Tensor] | None = None) -> Plan:
        """The launches on these inputs and outputs (None: new ones), with a workspace of its own."""
        outputs = self.new_outputs() if outputs is None else outputs
        workspace = Workspace(self.layout, self.device)
        values = {**workspace.tensors, **dict(zip(self.outputs, outputs, strict=True))}
        for (name, wanted), tensor in zip(self.inputs.items(), tensors, strict=True):
            # Only a mask that is expanded over the batch differs.
            values[name] = tensor if tensor.shape == wanted.shape else tensor[: wanted.shape[0]]
        steps = []
        for stage in self.stages:
            fitted = {}
            for arg in stage.kernel.signature():
                tensor = values[stage.tensors[arg.name]]
                fits = tensor.dim() == len(arg.shape)
                fitted[arg.name] = tensor if fits else tensor.view(_fit(tensor.shape, arg))
            written = {name: values[value] for name, value in stage.outputs.items()}
            steps.append(Step(stage.name, stage.kernel, fitted, written, self.target))
        return Plan(self.target, tuple(steps), self.result(outputs), workspace)

    def run(self, tensors: Sequence[Tensor], addresses: list[int], outputs: list[Tensor] | None = None) -> Any:
        """Launches on these inputs and outputs (None: new ones) and returns the result.

        addresses: of the inputs, and of the outputs where they are known; empty where a launch has to see the tensors
        themselves.
        """
        if not addresses or self.emulated:
            plan = self.plan(tensors, outputs)
            plan.run()
            return plan.output
        outputs = self.new_outputs() if outputs is None else outputs
        if len(addresses) == len(self.inputs):
            addresses = [*addresses, *map(Tensor.data_ptr, outputs)]
        self.launch(addresses)
        return self.result(outputs)

    def launch(self, addresses: list[int]) -> None:
        """Launches on the GPU, its current stream, and the inputs and outputs at these addresses.

        The workspace is kept for the stream, save while it is captured in a graph: the graph owns that memory.
        """
        index = self.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)  # current_stream() takes 40 times as long
        # The default stream, 0, cannot be captured. Another one can be asked of the current device only.
        capturing = stream and (torch._C._cuda_getDevice() != index or torch.cuda.is_current_stream_capturing())
        key = None if capturing else (index, stream)
        try:
            frame = self._idle.pop()
        except IndexError:
            frame = _Frame(self)
        blocks = KEPT.take(self.layout, self.device, key)
        frame.run(addresses, blocks.bases, stream)
        # Neither of them after an error: what a kernel left is unknown.
        self._idle.append(frame)
        KEPT.put(blocks, key)


class _Frame:
    """A recipe's launches with their arguments laid out; one call at a time uses it. The kernels are compiled."""

    def __init__(self, recipe: Recipe) -> None:
        values: dict[str, Input | Slot] = {**recipe.layout.slots, **recipe.inputs}
        for name, output in recipe.outputs.items():
            values[name] = Input(output.dtype, recipe.inputs[output.like].shape)
        numbers: dict[tuple[str, tuple[int, ...]], int] = {}  # of the distinct tensors: value and shape
        launches = []
        for stage in recipe.stages:
            arguments = []
            for arg in stage.kernel.signature():
                name = stage.tensors[arg.name]
                arguments.append(numbers.setdefault((name, _fit(values[name].shape, arg)), len(numbers)))
            launches.append((jit.compile(stage.kernel, recipe.target), arguments))
        tensors = [(values[name].dtype, shape) for name, shape in numbers]
        self._launches = jit.PreparedLaunches(tensors, launches, recipe.device.index or 0)
        # Addresses of the launches' tensors, each with what tells it.
        self._given: list[tuple[ctypes.c_void_p, int]] = []
        self._slots: list[tuple[ctypes.c_void_p, Slot]] = []
        order = [*recipe.inputs, *recipe.outputs]
        for (name, _), address in zip(numbers, self._launches.addresses, strict=True):
            value = values[name]
            if isinstance(value, Slot):
                self._slots.append((address, value))
            else:
                self._given.append((address, order.index(name)))
        self._bases: tuple[int, int] | None = None

    def run(self, addresses: list[int], bases: tuple[int, int], stream: int) -> None:
        """Launches on inputs and outputs at `addresses`, with the parts of the workspace, scratch first, at `bases`."""
        for address, index in self._given:
            address.value = addresses[index]
        if bases is not self._bases:
            self._bases = bases
            for address, slot in self._slots:
                address.value = bases[slot.zeroed] + slot.offset
        self._launches.run(stream)


def _fit(shape: tuple[int, ...], arg: TensorArg) -> tuple[int, ...]:
    """The shape as the kernel sees it: [B, S, H, D] is [M, H*D] to a projection."""
    if len(shape) == len(arg.shape):
        return tuple(shape)
    elements = math.prod(shape)
    return (elements,) if len(arg.shape) == 1 else (elements // arg.shape[-1], arg.shape[-1])


@dataclass
class RecipeBuilder:
    """Collects launches, whose tensors are names of inputs, outputs and slots."""

    target: str
    layout: Layout = field(default_factory=Layout)
    stages: list[Stage] = field(default_factory=list)

    def slot(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
        """A new tensor of the workspace. Returns its name."""
        return self.layout.add(name, dtype, shape)

    def add(self, stage: str, kernel: Any, tensors: Mapping[str, str], outputs: Mapping[str, str]) -> None:
        """A launch of `kernel`. What its signature lists and `tensors` lacks is scratch of a fixed size."""
        given = dict(tensors)
        for arg in kernel.signature():
            if arg.name not in given:
                slot = f"{stage}.{arg.name}"
                given[arg.name] = self.layout.add(slot, _DTYPES[arg.dtype], arg.shape, arg.name in _ZEROED)
        self.stages.append(Stage(stage, kernel, given, outputs))

    def build(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Output],
        result: Callable[[list[Tensor]], Any],
    ) -> Recipe:
        """The recipe for calls with tensors like `inputs`, of which none is kept."""
        described = {name: Input(tensor.dtype, tuple(tensor.shape)) for name, tensor in inputs.items()}
        device = next(iter(inputs.values())).device
        return Recipe(self.target, device, described, outputs, tuple(self.stages), self.layout, result)
