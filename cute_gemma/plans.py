"""From checked tensors to launches: which kernels run, on which tensors, and the memory they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from . import emulator, jit
from .config import AttentionConfig
from .emulator.launch import Launch
from .jit.signature import TensorArg
from .kernels.common.mask import MASK_TILE, SCAN_COLUMNS
from .kernels.registry import ForwardKernels, forward_kernels

# What cudaMalloc aligns to (CUDA C++ Programming Guide, device memory accesses); no kernel asks for more.
_SLOT_ALIGN = 256
_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "u8": torch.uint8}
# Seconds after which a launch in the emulator shows a progress bar.
_BAR_DELAY = 3.0
# Scratch arguments that a kernel finds zeroed.
_ZEROED = ("counters",)


@dataclass(frozen=True)
class Step:
    """One kernel launch. tensors: its arguments by the names of its signature, in order.

    outputs: what the step computes, by the name of the reference's stage.
    """

    stage: str
    kernel: Any
    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """Launches in order. output: what the caller gets, one tensor or more. workspace: what lies between."""

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
        arguments = (step.kernel, *step.tensors.values())
        if not self.emulated:
            return jit.launch(*arguments, target=self.target)
        with _progress_bar(step.stage) as progress:
            emulation = replace(emulation or emulator.Options(), progress=progress)
            return jit.launch(*arguments, target=self.target, emulation=emulation)

    def capture(self, step: Step) -> list[Launch]:
        """The launches that the step's host code makes of CPU tensors, without running them."""
        launches: list[Launch] = []
        jit.compile(step.kernel, self.target).host_code(tuple(step.tensors.values()), launches.append)
        return launches

    def run(self, emulation: Any = None) -> list[Any]:
        """Launches every step in order, and returns what each launch returned."""
        # One stream: the emulator checks each launch that may start early against the one before.
        with emulator.stream() if self.emulated else nullcontext():
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


class Workspace:
    """One allocation that holds every tensor between the inputs and the output of a call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots: dict[str, tuple[torch.dtype, tuple[int, ...], bool]] = {}
        self._memory: Tensor | None = None
        self._zeroed = 0

    def request(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], zero: bool = False) -> str:
        """Asks for a tensor, zeroed where a kernel expects that of it. Returns its name."""
        self._slots[name] = (dtype, shape, zero)
        return name

    def allocate(self) -> dict[str, Tensor]:
        """The tensors asked for, by name."""
        # Those to be zeroed come first, so that one fill zeroes all.
        ordered = sorted(self._slots.items(), key=lambda slot: not slot[1][2])
        offsets, end = {}, 0
        for name, (dtype, shape, zero) in ordered:
            offsets[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // _SLOT_ALIGN) * _SLOT_ALIGN
            if zero:
                self._zeroed = end
        memory = torch.empty(end + _SLOT_ALIGN, dtype=torch.uint8, device=self.device)
        self._memory = memory[-memory.data_ptr() % _SLOT_ALIGN :][:end]
        if self._zeroed:
            self._memory[: self._zeroed].zero_()
        tensors = {}
        for name, (dtype, shape, _) in ordered:
            size = math.prod(shape) * dtype.itemsize
            tensors[name] = self._memory[offsets[name] : offsets[name] + size].view(dtype).view(shape)
        return tensors

    def poison(self) -> None:
        """Sets every bit of all but the zeroed part: NaN as bfloat16 and float32, -1 as an integer."""
        if self._memory is not None:
            self._memory[self._zeroed :].fill_(0xFF)


@dataclass
class PlanBuilder:
    """Collects launches whose tensors may be names of workspace slots, then allocates once."""

    target: str
    workspace: Workspace
    launches: list[tuple[str, Any, Mapping[str, Tensor | str], Mapping[str, Tensor | str]]] = field(
        default_factory=list
    )

    def add(
        self,
        stage: str,
        kernel: Any,
        tensors: Mapping[str, Tensor | str],
        outputs: Mapping[str, Tensor | str],
    ) -> None:
        """A launch of `kernel`. What its signature lists and `tensors` lacks is scratch of a fixed size."""
        given = dict(tensors)
        for arg in kernel.signature():
            if arg.name not in given:
                slot = f"{stage}.{arg.name}"
                given[arg.name] = self.workspace.request(
                    slot, _DTYPES[arg.dtype], arg.shape, arg.name in _ZEROED
                )
        self.launches.append((stage, kernel, given, outputs))

    def build(self, output: Tensor | tuple[Tensor, ...]) -> Plan:
        """The plan, its workspace allocated."""
        slots = self.workspace.allocate()

        def resolve(value: Tensor | str) -> Tensor:
            return slots[value] if isinstance(value, str) else value

        steps = []
        for stage, kernel, given, outputs in self.launches:
            tensors = {arg.name: _fit(resolve(given[arg.name]), arg) for arg in kernel.signature()}
            steps.append(Step(stage, kernel, tensors, {name: resolve(t) for name, t in outputs.items()}))
        return Plan(self.target, tuple(steps), output, self.workspace)


def _fit(tensor: Tensor, arg: TensorArg) -> Tensor:
    """`tensor` with as many dimensions as the kernel names: [B, S, H, D] is [M, H*D] to a projection."""
    return tensor if tensor.dim() == len(arg.shape) else tensor.view(-1, arg.shape[-1])


def attention_plan(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, config: AttentionConfig, target: str
) -> Plan:
    """Attention alone: q [B, S, H, D], k and v [B, S, KV, D] to a new [B, S, H, D]."""
    builder = PlanBuilder(target, Workspace(q.device))
    kernels = forward_kernels(target)
    _check_head_dim(config, kernels.attention_head_dims, target)
    out = torch.empty_like(q)
    scan = _add_mask_scan(builder, kernels, mask)
    _add_attention(builder, kernels, config, mask, q.shape[:2], {"q": q, "k": k, "v": v, "out": out, **scan})
    return builder.build(out)


def forward_plan(
    inputs: Mapping[str, Tensor], mask: Tensor | str | None, config: AttentionConfig, target: str
) -> Plan:
    """Workload 047 on checked tensors, named as in `attention_forward`, to a new [B, S, C].

    q, k, v and the attention's output lie in the workspace as bfloat16 [B, S, heads, D].
    """
    kernels = forward_kernels(target)
    _check_head_dim(config, kernels.head_dims, target)
    hidden_states = inputs["hidden_states"]
    batch, seq, _ = hidden_states.shape
    workspace = Workspace(hidden_states.device)
    builder = PlanBuilder(target, workspace)
    slots = {
        name: workspace.request(name, torch.bfloat16, (batch, seq, heads, config.head_dim))
        for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads))
    }
    attended = workspace.request("attention", torch.bfloat16, (batch, seq, config.heads, config.head_dim))
    output = torch.empty_like(hidden_states)

    scan = _add_mask_scan(builder, kernels, mask)
    projection = kernels.qkv_projection(config, batch * seq)
    builder.add("qkv projection", projection, {**inputs, **slots}, slots)
    _add_attention(builder, kernels, config, mask, (batch, seq), {**slots, "out": attended, **scan})
    projection = kernels.output_projection(config, batch * seq)
    tensors = {"attn": attended, "o_proj_weight": inputs["o_proj_weight"], "out": output}
    builder.add("output projection", projection, tensors, {"output": output})
    return builder.build(output)


def _check_head_dim(config: AttentionConfig, supported: tuple[int, ...], target: str) -> None:
    if config.head_dim not in supported:
        wanted = " or ".join(map(str, supported))
        raise ValueError(f"head_dim: got {config.head_dim}, want {wanted} on {target}")


def _add_mask_scan(
    builder: PlanBuilder, kernels: ForwardKernels, mask: Tensor | str | None
) -> dict[str, Tensor | str]:
    """The pre-pass over a mask tensor; returns what the attention kernel takes of it, by argument name."""
    if not isinstance(mask, Tensor):
        return {}
    batch, _, seq, _ = mask.shape
    tiles = -(-seq // MASK_TILE)
    chunks = -(-seq // SCAN_COLUMNS)
    classified = {
        "mask": mask,
        "row_max": builder.workspace.request("row_max", torch.float32, (batch, chunks, seq)),
        "classes": builder.workspace.request("classes", torch.uint8, (batch, tiles, tiles)),
    }
    scanned = {name: classified[name] for name in ("row_max", "classes")}
    builder.add("mask scan", kernels.mask_scan(_mask_kind(mask)), classified, scanned)
    return classified


def _add_attention(
    builder: PlanBuilder,
    kernels: ForwardKernels,
    config: AttentionConfig,
    mask: Tensor | str | None,
    sizes: tuple[int, int],
    tensors: dict,
) -> None:
    kernel = kernels.attention(config, _mask_kind(mask), *sizes)
    builder.add("attention", kernel, tensors, {"attention": tensors["out"]})


def _mask_kind(mask: Tensor | str | None) -> str:
    if isinstance(mask, Tensor):
        return {torch.bfloat16: "bf16", torch.float32: "f32"}[mask.dtype]
    return mask or "none"
