"""The shipped kernels at sizes small enough to emulate hundreds of times, with several tiles and k blocks a
CTA and more k blocks than stages, so that every pipeline wraps around."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_gemma import jit
from cute_gemma.emulator import program
from cute_gemma.emulator.engine import Options, region_of, run_launch
from cute_gemma.emulator.launch import Launch
from cute_gemma.jit.signature import TensorArg
from cute_gemma.kernels.common.mask import MASK_TILE, SCAN_COLUMNS

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "u8": torch.uint8}
_LOWEST = torch.finfo(torch.bfloat16).min
SCALE = 128**-0.5
# Written by the launch before in a chain, so that touching them ahead of griddepcontrol.wait is a fault.
_PRODUCED = {
    "hidden_states", "q", "k", "v", "attn", "mask", "row_max", "classes", "grad_q", "grad_k", "norm_partials",
    "grad_query", "grad_key",
}  # fmt: skip
_SCRATCH = ("partials",)  # contents without meaning after the launch

# Rewrites and reads memory as a kernel that comes before in the stream would.
_PREDECESSOR = """
.version 8.8
.target {target}
.address_size 64
.visible .entry predecessor()
{{
  .reg .pred %p; .reg .b64 %rd<4>; .reg .b32 %r<3>;
  mov.u32 %r1, %tid.x; cvt.u64.u32 %rd1, %r1;
{body}
  ret;
}}
"""
_SWEEP = """
  mov.u64 %rd2, {first};
AGAIN{number}:
  add.u64 %rd3, %rd2, %rd1;
  setp.ge.u64 %p, %rd3, {end};
  @%p bra DONE{number};
  ld.global.b8 %r2, [%rd3];
  {store}
  add.u64 %rd2, %rd2, 1024;
  bra AGAIN{number};
DONE{number}:
"""


@dataclass(frozen=True)
class Inputs:
    """Values of a signature's symbols, and of inputs with a maker of their own (by name, from the shape).

    kernel: makes the kernel to launch instead of the target's; one that differs in its launch alone.
    """

    symbols: Mapping[str, int]
    values: Mapping[str, Callable[[tuple[int, ...]], Tensor]] = field(default_factory=dict)
    kernel: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Target:
    """One kernel. kernel, inputs: make them (the compiler is imported then). hazards: of Options."""

    name: str
    kernel: Callable[[], Any]
    inputs: Callable[[], list[Inputs]]
    arch: str = "sm_100a"
    hazards: bool | str = "strict"
    given: tuple[
        str, ...
    ] = ()  # inputs that no launch shortly before writes, read ahead of griddepcontrol.wait


class Case:
    """A target's kernel on one set of inputs: its launch, its memory and what it computes."""

    def __init__(self, target: Target, inputs: Inputs, seed: int = 0) -> None:
        self.hazards = target.hazards
        kernel = (inputs.kernel or target.kernel)()
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors = {a.name: self._draw(a, inputs) for a in kernel.signature() if isinstance(a, TensorArg)}
        launches: list[Launch] = []
        compiled = jit.compile(kernel, target.arch)
        compiled.host_code(tuple(self.tensors.values()), launches.append)
        (launch,) = launches
        # As if the launch before could still be running, even where this one is the first of a chain.
        self.launch = replace(launch, programmatic="griddepcontrol.wait" in launch.ptx)
        self.initial = {name: t.clone() for name, t in self.tensors.items()}
        self.regions = [region_of(t) for t in self.tensors.values()]
        self._find_outputs()
        self.previous = self._predecessor(target.arch, target.given) if self.launch.programmatic else None

    def _draw(self, arg: TensorArg, inputs: Inputs) -> Tensor:
        shape = tuple(inputs.symbols[n] if isinstance(n, str) else n for n in arg.shape)
        dtype = _DTYPES[arg.dtype]
        if arg.name in inputs.values:
            return inputs.values[arg.name](shape).to(dtype).contiguous()
        if arg.name == "counters":
            return torch.zeros(shape, dtype=dtype)
        wide = torch.randn(shape, generator=self.generator)
        if arg.name in ("cos", "sin"):
            wide = getattr(wide, arg.name)()
        elif arg.name.endswith("rstd"):
            wide = wide.abs() + 0.1
        elif arg.name.endswith("norm_weight"):
            wide = 0.3 * wide
        elif arg.name.endswith("weight"):
            wide = wide / math.sqrt(shape[-1])
        return wide.to(dtype)

    def _predecessor(self, arch: str, given: tuple[str, ...]) -> Any:
        """The report of a launch that wrote what comes from kernels before, and read what this one writes."""
        body = []
        for number, (name, tensor) in enumerate(self.tensors.items()):
            produced = name in _PRODUCED and name not in given
            if produced or name in self.written:
                first = tensor.data_ptr()
                end = first + tensor.numel() * tensor.element_size()
                store = "st.global.b8 [%rd3], %r2;" if produced else ""
                body.append(_SWEEP.format(number=number, first=first, end=end, store=store))
        ptx = _PREDECESSOR.format(target=arch, body="".join(body))
        launch = Launch("predecessor", ptx, (1, 1, 1), (1024, 1, 1), (1, 1, 1), 0, ())
        return run_launch(launch, [region_of(t) for t in self.tensors.values()])

    def _find_outputs(self) -> None:
        """What an unmodified run writes is output, and poisoned from then on; all else becomes read-only."""
        report = run_launch(self.launch, self.regions)
        self.executed = {line for line, _, n in report.by_line() if n}
        self.warp_instructions = report.warp_instructions
        self.written = {name for name, t in self.tensors.items() if not _same(t, self.initial[name])}
        for name in self.written:
            _bytes(self.initial[name]).fill_(0xFF)
        self.written |= {name for name in self.tensors if name == "counters"}
        self.regions = [
            replace(region_of(t), writable=name in self.written) for name, t in self.tensors.items()
        ]
        self.restore()
        run_launch(self.launch, self.regions)
        self.expected = {n: self.tensors[n].clone() for n in self.written if n not in _SCRATCH}

    def restore(self) -> None:
        """Inputs and poison as they were."""
        for name in self.written:
            _bytes(self.tensors[name]).copy_(_bytes(self.initial[name]))

    def run(self, ptx: str | None = None, schedule: str = "lazy") -> bool:
        """Runs the kernel, or `ptx` in its place: whether the outputs have the expected bits. Raises
        EmulationError."""
        self.restore()
        launch = self.launch if ptx is None else replace(self.launch, ptx=self._named(ptx))
        options = Options(schedule=schedule, hazards=self.hazards)
        # Compilers leave registers unwritten on purpose, on paths that never run: no matter of mutants.
        program.load(launch.ptx, launch.kernel_name).undefined = []
        run_launch(launch, self.regions, options, self.previous)
        return all(_same(self.tensors[name], expected) for name, expected in self.expected.items())

    def _named(self, ptx: str) -> str:
        """The PTX with the name that this launch knows the kernel by."""
        return ptx.replace(_kernel_name(ptx), self.launch.kernel_name)

    @property
    def text(self) -> str:
        """The PTX without the kernel's name, which may spell out what matters to the launch alone."""
        return self.launch.ptx.replace(self.launch.kernel_name, "kernel")


def _kernel_name(ptx: str) -> str:
    return re.search(r"\.entry\s+([\w$]+)", ptx)[1]


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bytes(a), _bytes(b))


# ---------------------------------------------------------------- inputs of the attention kernels
def _mask(seq: int) -> Tensor:
    """Tiles that are free, masked in part and masked as a whole, and rows without any key."""
    position = torch.arange(seq)
    mask = 2 * torch.randn(seq, seq, generator=torch.Generator().manual_seed(5))
    mask[:, : seq // 2] = 0
    mask[position[None] > position[:, None]] = _LOWEST
    mask[-60:, :150] = _LOWEST
    mask[170:190] = _LOWEST
    return mask[None, None].bfloat16()


def _blocks(seq: int) -> Tensor:
    """Tiles that are free or masked as a whole: query tiles, and pairs of them, that read other key tiles
    than their neighbours or none."""
    tiles = -(-seq // MASK_TILE)
    reads = torch.ones(tiles, tiles, dtype=torch.bool).tril()
    reads[0::4] = False  # the first of a CTA's two query tiles reads nothing
    reads[3::4] = False  # the second
    reads[4:, :] = False
    reads[4, 1::2] = True
    reads[5:, 0::2] = True
    mask = torch.zeros(seq, seq)
    mask[~reads.repeat_interleave(MASK_TILE, 0).repeat_interleave(MASK_TILE, 1)[:seq, :seq]] = _LOWEST
    return mask[None, None].bfloat16()


def _growing(seq: int) -> Tensor:
    """The query tiles that come first read one key tile, those after them two or all."""
    tile = torch.arange(seq) // MASK_TILE
    count = torch.tensor([seq, 2, 1, 1])[tile]
    return torch.where(tile[None] < count[:, None], 0.0, _LOWEST)[None, None].bfloat16()


def _mask_symbols(seq: int, batch: int = 1) -> dict[str, int]:
    return {"b": batch, "mask_b": 1, "s": seq, "t": -(-seq // MASK_TILE), "c": -(-seq // SCAN_COLUMNS)}


def _peaks(seq: int) -> Tensor:
    """A mask whose every column is the largest of some row, off the diagonal if there are rows enough."""
    mask = -torch.rand(seq, seq, generator=torch.Generator().manual_seed(5))
    row = torch.arange(seq)
    mask[row, (row - SCAN_COLUMNS) % seq] = 1.0
    return mask[None, None].bfloat16()


def _scan_mask(mask: Tensor) -> Inputs:
    return Inputs(_mask_symbols(mask.shape[-1]), {"mask": lambda shape: mask.view(shape)})


def _masked(batch: int, mask: Tensor, arch: str, gains: tuple[float, ...]) -> Inputs:
    seq = mask.shape[-1]
    tiles = math.ceil(seq / MASK_TILE)
    row_max = torch.full((1, math.ceil(seq / SCAN_COLUMNS), seq), math.nan)
    classes = torch.full((1, tiles, tiles), 99, dtype=torch.uint8)
    jit.launch(_mask_scan(), mask, row_max, classes, target=arch, backend="emulator")
    scanned = {"mask": mask, "row_max": row_max, "classes": classes}
    values = {name: (lambda shape, t=t: t.view(shape)) for name, t in scanned.items()}
    return Inputs(_mask_symbols(seq, batch), {**_logits(batch, seq, 128, gains).values, **values})


def _logits(batch: int, seq: int, head_dim: int, gains: tuple[float, ...]) -> Inputs:
    """Logits whose deviation goes from gains[0] to gains[1] along the keys, and to gains[2], if there is one,
    in half a tile of them, so that tiles take different ranges of softcap and shift."""
    generator = torch.Generator().manual_seed(6)
    gain = torch.linspace(*gains[:2], seq).view(1, seq, 1, 1)
    gain[:, 192:256] = gains[2] if len(gains) > 2 else gain[:, 192:256]

    def draw(shape: tuple[int, ...], factor: Any) -> Tensor:
        return torch.randn(shape, generator=generator) * factor

    values = {"q": lambda shape: draw(shape, 1.0), "k": lambda shape: draw(shape, gain)}
    return Inputs({"b": batch, "s": seq}, values)


# ---------------------------------------------------------------- the kernels
def _attention(arch: str, masked: bool, *args: Any, **tuning: Any) -> Any:
    """tuning: what differs from the default one."""
    if arch == "sm_100a":
        from cute_gemma.kernels.sm100 import attention as module
    else:
        from cute_gemma.kernels.sm90 import attention as module

        tuning["sm_count"] = 4
    kind = module.MaskedAttention if masked else module.Attention
    return kind(*args, tuning=replace(module.default_tuning(args[2]), **tuning))


def _gemm(arch: str, name: str, *args: Any, tuning: Mapping[str, Any], norm: bool = False) -> Any:
    from cute_gemma.kernels.common.norm_backward import NormBackwardTuning

    if arch == "sm_100a":
        from cute_gemma.kernels.sm100 import out_proj, qkv_grads, qkv_proj
        from cute_gemma.kernels.sm100 import tuning as tunings
    else:
        from cute_gemma.kernels.sm90 import out_proj, qkv_grads, qkv_proj
        from cute_gemma.kernels.sm90 import tuning as tunings
    modules = {"OutputProjection": out_proj, "QKVProjection": qkv_proj, "QkvGradients": qkv_grads}
    settings = {"norm": NormBackwardTuning(warps=1)} if norm else {}  # many partial sums of few rows
    return getattr(modules[name], name)(*args, tuning=tunings.GemmTuning(**tuning), **settings)


def _mask_scan() -> Any:
    from cute_gemma.kernels.common.mask_scan import MaskScan

    return MaskScan("bf16")


def _norm_backward() -> Any:
    from cute_gemma.kernels.common.norm_backward import NormBackward, NormBackwardTuning

    return NormBackward(256, NormBackwardTuning(warps=8, ctas=6))


def _rope_backward() -> Any:
    from cute_gemma.kernels.common.rope_backward import RopeBackward

    return RopeBackward(4, 1, 256)


def _attention_targets(arch: str) -> list[Target]:
    def kernel(masked: bool, *args: Any, **tuning: Any) -> Callable[[], Any]:
        return partial(_attention, arch, masked, *args, **tuning)

    masked = (
        *((1, _mask, 700, *gains) for gains in ((1.0, 1.0), (0.5, 20.0), (20.0, 0.5), (120.0, 1.0))),
        (1, _mask, 300, 1.0, 1.0),
        (1, _blocks, 900, 1.0, 1.0, 40.0),
        (5, _mask, 100, 1.0, 1.0),
        (1, _growing, 500, 1.0, 1.0),
    )
    # Units of one or two key tiles, several a CTA of sm_90a; units of one whose second half has the peaks.
    few = (5, 100, 1.0, 1.0), (3, 200, 1.0, 1.0), (2, 100, 40.0, 0.3)

    def logits(head_dim: int, *cases: tuple[float, ...]) -> Callable[[], list[Inputs]]:
        several = (*((1, *case) for case in cases), *few)
        return lambda: [_logits(batch, seq, head_dim, gains) for batch, seq, *gains in several]

    # First blocks are skipped, as in short sequences.
    skips = {} if arch == "sm_100a" else {"skips_empty": True}
    # What one architecture alone has: query tiles that two warpgroups share, as small grids get them; below, no block
    # skipped.
    own = [
        Target("attention, one query tile", kernel(False, 2, 1, 128, SCALE, 50.0, "causal", query_tiles=1),
               logits(128, (520, 0.5, 20.0), (520, 20.0, 0.5), (520, 120.0, 1.0), (300, 1.0, 1.0)), arch),
        Target("attention, no cap, one query tile", kernel(False, 2, 1, 128, SCALE, None, "causal", query_tiles=1),
               logits(128, (700, 0.3, 4.0), (700, 4.0, 0.3), (300, 1.0, 1.0)), arch),
    ]  # fmt: skip
    capped = logits(128, (700, 0.5, 20.0), (700, 20.0, 0.5), (700, 120.0, 1.0), (300, 1.0, 1.0))
    every = Target("attention, every block", kernel(False, 2, 1, 128, SCALE, 50.0, "causal"), capped, arch)
    return [
        *(own if arch == "sm_100a" else []),
        Target("attention", kernel(False, 2, 1, 128, SCALE, 50.0, "causal", **skips), capped, arch),
        Target("attention, no cap", kernel(False, 2, 1, 128, SCALE, None, "none", **skips),
               logits(128, (700, 0.3, 4.0), (700, 4.0, 0.3), (300, 1.0, 1.0)), arch),
        *([every] if arch == "sm_90a" else []),
        Target("attention, mask", kernel(True, 2, 1, 128, SCALE, 50.0),
               lambda: [_masked(batch, mask(seq), arch, gains) for batch, mask, seq, *gains in masked], arch),
        Target("attention, head_dim 256", kernel(False, 2, 1, 256, 1 / 16, 50.0, "causal"),
               logits(256, (520, 0.5, 20.0), (520, 20.0, 0.5), (520, 120.0, 1.0), (300, 1.0, 1.0)), arch),
    ]  # fmt: skip


def _gemm_targets(arch: str) -> list[Target]:
    pair = {"tile_m": 256} if arch == "sm_100a" else {"cluster_m": 2}
    pair_6, pair_18 = pair | {"sm_count": 6}, pair | {"sm_count": 18}
    split = {"sm_count": 8, "stream_k": True}
    # Unless tiles are split, a tile has no more k blocks than there are stages: then nothing but the other
    # warps' own griddepcontrol.wait orders the first tile's output after the launch before.
    qkv, out = ("QKVProjection", 264, 1, 1, 128), ("OutputProjection", 384, 264)
    long, grads = ("QKVProjection", 520, 1, 1, 128), ("QkvGradients", 200, 2, 1, 256)

    def kernel(name: str, *args: Any, **settings: Any) -> Callable[[], Any]:
        return partial(_gemm, arch, name, *args, **settings)

    def rows(*counts: int) -> Callable[[], list[Inputs]]:
        return lambda: [Inputs({"m": m}) for m in counts]

    def gradients(few: Mapping[str, int]) -> Callable[[], list[Inputs]]:
        """Workers whose first tile is one of grad_hidden, workers that use every accumulator twice, and with
        the tuning `few` workers with several tiles of both kinds."""
        sizes = ((20, 20), (1, 146), (2, 30))
        several = Inputs({"batch": 2, "seq": 300}, kernel=kernel(*grads, tuning=few, norm=True))
        return lambda: [*(Inputs({"batch": batch, "seq": seq}) for batch, seq in sizes), several]

    # What one architecture alone has: two pairs that share B; tiles that the CTAs of a cluster add up.
    last = []
    if arch == "sm_100a":
        other = Target("output projection, wide clusters",
                       kernel(*out, tuning={**pair, "cluster_m": 2, "sm_count": 12}), rows(1900, 100), arch)
    else:
        other = Target("qkv projection, shared tiles", kernel(*qkv, tuning={"share": 2, "sm_count": 4}),
                       rows(700, 250, 100), arch)
        share_18, share_4 = {"share": 2, "sm_count": 18}, {"share": 2, "sm_count": 4}
        last.append(Target("gradients, shared tiles", kernel(*grads, tuning=share_18, norm=True),
                           gradients(share_4), arch, given=("hidden_states",)))
    return [
        other,
        Target("qkv projection", kernel(*qkv, tuning={"sm_count": 3}), rows(600, 100), arch),
        Target("qkv projection, clusters", kernel(*qkv, tuning=pair_6), rows(1100, 100), arch),
        Target("qkv projection, split", kernel(*long, tuning=split), rows(1100, 600, 100), arch),
        Target("output projection", kernel(*out, tuning={"sm_count": 3}), rows(600, 100), arch),
        Target("output projection, clusters", kernel(*out, tuning=pair_6), rows(1100, 100), arch),
        Target("gradients", kernel(*grads, tuning={"sm_count": 17}, norm=True), gradients({"sm_count": 3}),
               arch, given=("hidden_states",)),
        Target("gradients, clusters", kernel(*grads, tuning=pair_18, norm=True), gradients(pair_6), arch,
               given=("hidden_states",)),
        *last,
    ]  # fmt: skip


def targets(arch: str) -> dict[str, Target]:
    """Every shipped kernel of an architecture, by name."""
    small = [
        Target("mask scan", _mask_scan, lambda: [_scan_mask(m) for m in (_mask(300), _peaks(2060))], arch),
        Target("norm backward", _norm_backward, lambda: [Inputs({"rows_q": 524, "rows_k": 131})], arch),
        Target("rope backward", _rope_backward, lambda: [Inputs({"batch": 2, "seq": 37})], arch),
    ]
    found = [
        small[0],
        *_gemm_targets(arch)[:4],
        *_attention_targets(arch),
        *_gemm_targets(arch)[4:],
        *small[1:],
    ]
    return {target.name: target for target in found}
