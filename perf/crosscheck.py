"""The emulator against the hardware: the same compiled kernels with the same inputs on a GPU and on the CPU.

    python perf/crosscheck.py                   on a machine with a GPU: run every case on both and compare everything
    python perf/crosscheck.py --record FILE     and keep the card's results in FILE, small: hashes and sampled values
    python perf/crosscheck.py --compare FILE    without a GPU: run the emulator and compare with a recorded card

A kernel is run by itself on inputs drawn from a seed, so a difference is its own. Outputs made by data
movement, conversion and plain fp32 arithmetic have to have equal bits. Where the matrix units' unspecified
order of additions or an approximate instruction takes part, at least 99.9% of the elements have to lie within
one bf16 ulp of each other, the ulp taken at the larger of the element and the root mean square of its row;
fp32 outputs that depend on them likewise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata

import torch
from prepare import compile_kernels
from torch import Tensor

from cute_gemma import jit
from cute_gemma.config import AttentionConfig
from cute_gemma.jit.signature import TensorArg
from cute_gemma.kernels.common.mask import MASK_TILE, SCAN_COLUMNS
from cute_gemma.kernels.common.norm_backward import NormBackwardTuning
from cute_gemma.kernels.registry import backward_kernels, forward_kernels
from cute_gemma.plans_backward import BackwardSizes
from cute_gemma.workloads import causal_mask

SHARE_WITHIN_ULP = 0.999
SAMPLES = 256
SCRATCH = ("partials", "counters")  # sized by a kernel's tuning; what they hold beforehand does not matter
_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "u8": torch.uint8}
_CONFIG = AttentionConfig(hidden=512, heads=6, kv_heads=2)
_BACKWARD_HIDDEN = 640


@dataclass(frozen=True)
class Case:
    """A kernel at one size. sizes: its signature's symbols; exact, close: its outputs by how they have to agree."""

    name: str
    kernel: object
    sizes: dict
    exact: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    mask: Tensor | None = None

    def arguments(self) -> dict[str, Tensor]:
        """Arguments by name on the CPU: drawn from the case's name, outputs and scratch NaN, counters zero."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        return {arg.name: self._draw(arg, generator) for arg in self.kernel.signature()}

    def _draw(self, arg: TensorArg, generator: torch.Generator) -> Tensor:
        shape = [self.sizes[size] if isinstance(size, str) else size for size in arg.shape]
        dtype = _DTYPES[arg.dtype]
        if arg.name == "mask" and self.mask is not None:
            return self.mask
        if arg.name == "counters":
            return torch.zeros(shape, dtype=dtype)
        if arg.name in (*self.exact, *self.close, "partials"):
            return _poisoned(shape, dtype)
        values = torch.randn(shape, generator=generator)
        if arg.name in ("q", "k"):
            values *= 2  # what RMSNorm leaves where its weight (1 + w) is 2
        elif arg.name.endswith("rstd"):
            values = values.abs() + 0.1
        elif arg.name.endswith("norm_weight"):
            values *= 0.3
        elif arg.name.endswith("_weight"):
            values *= shape[-1] ** -0.5
        return values.to(dtype)


def _poisoned(shape: list[int], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


def cases(target: str) -> Iterator[Case]:
    """Every kernel of `target` at a few small shapes."""
    forward, backward = forward_kernels(target), backward_kernels(target)
    capped, uncapped = _CONFIG, AttentionConfig(hidden=512, heads=6, kv_heads=2, softcap=None)
    for rows in (1, 131, 300, 1024):
        kernel = forward.qkv_projection(capped, rows)
        yield Case(f"qkv projection {rows}", kernel, {"m": rows}, close=("q", "k", "v"))
        kernel = forward.output_projection(capped, rows)
        yield Case(f"output projection {rows}", kernel, {"m": rows}, close=("out",))
    for batch, seq in ((1, 1), (2, 131), (1, 300)):
        sizes = {"b": batch, "s": seq, "mb": batch, "t": -(-seq // MASK_TILE), "c": -(-seq // SCAN_COLUMNS)}
        for name, config, mask in (
            ("causal", capped, "causal"), ("no mask", capped, "none"), ("no cap", uncapped, "causal"),
        ):  # fmt: skip
            kernel = forward.attention(config, mask, batch, seq)
            yield Case(f"attention {name} {batch}x{seq}", kernel, sizes, close=("out",))
        scan = forward.mask_scan("bf16", False)
        yield Case(f"mask scan {batch}x{seq}", scan, _scan_sizes(scan, batch, seq), exact=("row_max", "classes"),
                   mask=causal_mask(batch, seq))  # fmt: skip
    for batch, seq in ((1, 131), (3, 43), (2, 256)):
        yield from _backward_cases(backward, BackwardSizes(batch, seq, _BACKWARD_HIDDEN, 4, 1, 256))


def _scan_sizes(scan: object, batch: int, seq: int) -> dict[str, int]:
    """Values of a mask scan's symbols, read off its signature: mask [B, 1, S, S], row_max [B, chunks, S], classes."""
    shapes = {arg.name: arg.shape for arg in scan.signature()}
    tiles, chunks = -(-seq // MASK_TILE), -(-seq // SCAN_COLUMNS)
    known = {"mask": (batch, 1, seq, seq), "row_max": (batch, chunks, seq), "classes": (batch, tiles, tiles)}
    return {
        symbol: value
        for name, shape in shapes.items()
        for symbol, value in zip(shape, known[name], strict=True)
        if isinstance(symbol, str)
    }


def _backward_cases(backward: object, sizes: BackwardSizes) -> Iterator[Case]:
    label = f"{sizes.batch}x{sizes.seq}"
    rows = sizes.batch * sizes.seq
    # Tuned as when the card was recorded: the partial sums' number is part of the inputs.
    norm = replace(backward.norm_backward(sizes), tuning=NormBackwardTuning(ctas=132))
    symbols = {"rows_q": rows * sizes.heads, "rows_k": rows * sizes.kv_heads}
    yield Case(f"norm backward {label}", norm, symbols, exact=("grad_q", "grad_k"))
    symbols = {"batch": sizes.batch, "seq": sizes.seq, "b": sizes.batch, "s": sizes.seq}
    close = ("grad_hidden_states", *(f"grad_{name}_weight" for name in "qkv"))
    exact = tuple(f"grad_{name}_norm_weight" for name in "qk")
    yield Case(f"gradients {label}", backward.gradients(sizes, norm), symbols, exact, close)
    rope = backward.rope_backward(sizes.heads, sizes.kv_heads, sizes.head_dim)
    yield Case(f"rope backward {label}", rope, symbols, exact=("out_query", "out_key"))


def run(case: Case, arguments: dict[str, Tensor], target: str, device: str) -> dict[str, Tensor]:
    """The case's outputs, computed on `device` and brought to the CPU."""
    tensors = {name: tensor.to(device, copy=True) for name, tensor in arguments.items()}
    jit.launch(case.kernel, *tensors.values(), target=target)
    return {name: tensors[name].cpu() for name in (*case.exact, *case.close)}


def ulps(ours: Tensor, theirs: Tensor, row_rms: Tensor) -> Tensor:
    """Distance in bf16 ulps, one ulp being 2^-7 of the binade of the larger of |theirs| and its row's RMS."""
    scale = torch.maximum(theirs.double().abs(), row_rms.double()).clamp_min(2.0**-126)
    ulp = torch.exp2(torch.floor(torch.log2(scale)) - 7)
    return (ours.double() - theirs.double()).abs() / ulp


def row_rms(tensor: Tensor) -> Tensor:
    """Root mean square over the last dimension, with the shape of `tensor`."""
    return tensor.double().square().mean(-1, keepdim=True).sqrt().expand(tensor.shape)


def digest(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes in row-major order."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def sample(case: Case, name: str, tensor: Tensor) -> Tensor:
    """Flat indices of the elements kept of an output."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name} {name}".encode()))
    return torch.randint(tensor.numel(), (min(SAMPLES, tensor.numel()),), generator=generator)


def record(case: Case, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict:
    """What of a card's run a file keeps."""
    kept = {}
    for name, tensor in outputs.items():
        index = sample(case, name, tensor)
        kept[name] = {"sha256": digest(tensor)}
        if name in case.close:
            kept[name]["values"] = tensor.flatten()[index].double().tolist()
            kept[name]["row_rms"] = [float(f"{rms:.6g}") for rms in row_rms(tensor).flatten()[index].tolist()]
    drawn = {name: digest(t) for name, t in inputs.items() if name not in (*outputs, *SCRATCH)}
    return {"inputs": drawn, "outputs": kept}


def compare_record(case: Case, inputs: dict[str, Tensor], outputs: dict[str, Tensor], kept: dict) -> list[str]:
    """What disagrees between the emulator's outputs and a recorded card's, as sentences."""
    for name, wanted in kept["inputs"].items():
        if name not in SCRATCH and digest(inputs[name]) != wanted:
            raise RuntimeError(f"{case.name}: input {name} was drawn differently when the card ran")
    faults = []
    for name, tensor in outputs.items():
        card = kept["outputs"][name]
        if name in case.exact:
            if digest(tensor) != card["sha256"]:
                faults.append(f"{name}: other bits than the card's")
            continue
        index = sample(case, name, tensor)
        theirs, rms = torch.tensor(card["values"]), torch.tensor(card["row_rms"])
        faults += _within_ulp(name, ulps(tensor.flatten()[index], theirs, rms))
    return faults


def compare_all(case: Case, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """What disagrees between the emulator's outputs and the card's, as sentences."""
    faults = []
    for name, tensor in theirs.items():
        if name in case.exact:
            if digest(ours[name]) != digest(tensor):
                off = (ours[name] != tensor).sum().item()
                faults.append(f"{name}: other bits in {off} of {tensor.numel()} elements")
        else:
            faults += _within_ulp(name, ulps(ours[name], tensor, row_rms(tensor)))
    return faults


def _within_ulp(name: str, distance: Tensor) -> list[str]:
    share = (distance <= 1).double().mean().item()  # a NaN is not within anything
    if share >= SHARE_WITHIN_ULP:
        return []
    return [f"{name}: {share:.4%} within one ulp, want {SHARE_WITHIN_ULP:.1%}; furthest {distance.max().item():.3g}"]


def facts() -> dict[str, str]:
    """The card and the versions that a recording is made with."""
    import subprocess

    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    card = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    versions = {name: metadata.version(name) for name in ("torch", "nvidia-cutlass-dsl")}
    return {"card, driver, SM clock, memory clock": card, **versions}


def main() -> int:
    """Exit status 0 if everything agrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--record", metavar="FILE")
    parser.add_argument("--compare", metavar="FILE")
    options = parser.parse_args()
    kept = json.load(open(options.compare)) if options.compare else None
    recording, failures = {}, 0
    chosen = list(cases(options.target))
    compile_kernels([case.kernel for case in chosen], options.target)
    for case in chosen:
        inputs = case.arguments()
        ours = run(case, inputs, options.target, "cpu")
        if kept is not None:
            faults = compare_record(case, inputs, ours, kept["cases"][case.name])
        else:
            theirs = run(case, inputs, options.target, "cuda")
            recording[case.name] = record(case, inputs, theirs)
            faults = compare_all(case, ours, theirs)
        failures += bool(faults)
        print(f"{'FAIL' if faults else 'ok  '} {case.name}  {'; '.join(faults)}", flush=True)
    if options.record:
        with open(options.record, "w") as file:
            json.dump({"facts": facts(), "cases": recording}, file, separators=(",", ":"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
