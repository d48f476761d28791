"""Random problems through the kernels in the emulator, under random schedules, or on a GPU, against the reference.

    scripts/fuzz --minutes 30           goes on after the last seed that a run before has done
    scripts/fuzz --seed 123             one problem
    scripts/fuzz --target sm_90a --start 0
    scripts/fuzz --backend cuda --longer 8

Problem number N is the same on every machine, but for --longer, which multiplies its sequence length. Failures are
kept, with their numbers and messages, in a file that the last line names. A new compilation takes seconds, so that
sizes a kernel is compiled for change slowly: the numbers from one multiple of 25 to the next share them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from cute_gemma import emulator, functional, functional_backward, jit, reference
from cute_gemma.config import AttentionConfig

STATE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "cute_gemma" / "fuzz"
DEVICES = {backend: device for device, backend in functional.BACKENDS.items()}
KINDS = ("forward", "attention", "qkv backward", "rope backward")
MASKS = ("causal", "none", "random", "blocks", "masked rows", "late keys", "all masked", "finite causal")
SHARED = 25  # problems in a row with the same sizes compiled in
_LOWEST = torch.finfo(torch.bfloat16).min
# Half a unit in the last place of bfloat16: what rounding the exact result alone may cost.
_ROUNDING = 2.0**-8


@dataclass(frozen=True)
class Problem:
    """kind: one of KINDS. mask: one of MASKS, mask_dtype "bf16" or "f32", mask_batch: one a batch entry.

    offset: elements by which inputs start beyond their allocation. gain: of the logits. data: the inputs'
    seed.
    """

    kind: str
    batch: int = 1
    seq: int = 128
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 128
    hidden: int = 64
    softcap: float | None = 50.0
    mask: str = "causal"
    mask_dtype: str = "bf16"
    mask_batch: bool = False
    offset: int = 0
    gain: float = 1.0
    schedule: str = "lazy"
    data: int = 0


class Mismatch(AssertionError):
    """A result further from the exact one than the rule allows."""


def problem(number: int, longer: int = 1) -> Problem:
    """Problem `number`: sizes that are compiled in from its block of 25, the rest from itself; its sequence `longer`
    times as long."""
    fixed, own = random.Random(f"sizes {number // SHARED}"), random.Random(f"problem {number}")
    kind = fixed.choice(KINDS)
    kv_heads = fixed.choice((1, 1, 2, 3))
    head_dims = {"attention": (64, 128, 256), "rope backward": (16, 64, 80, 128, 256)}.get(kind, (128, 256))
    sizes = {
        "kv_heads": kv_heads,
        "heads": kv_heads * fixed.choice((1, 2, 3, 4)),
        "head_dim": fixed.choice(head_dims),
        "hidden": 8 * fixed.choice((1, 5, 8, 16, 17, 40, 65)),
        "softcap": fixed.choice((None, 5.0, 30.0, 50.0, 200.0)),
    }
    return Problem(
        kind,
        batch=own.choice((1, 1, 2, 3)),
        seq=longer
        * own.choice((1, own.randint(2, 127), own.randint(128, 400), 128 * own.randint(1, 4) + own.randint(-1, 1))),
        mask=own.choice(MASKS),
        mask_dtype=own.choice(("bf16", "f32")),
        mask_batch=own.random() < 0.5,
        offset=own.choice((0, 0, 8, 24)),
        gain=own.choice((0.0, 0.25, 1.0, 1.0, 4.0, 30.0)),
        schedule=own.choice(("lazy", "eager", *(f"random:{own.randrange(1000)}",) * 4)),
        data=number,
        **sizes,
    )


def check(p: Problem, target: str = "sm_100a", device: str = "cpu") -> float:
    """Runs a problem, on the CPU in the emulator; the largest error as a multiple of what is allowed.

    Raises Mismatch and EmulationError."""
    runs: dict[str, Callable[[Problem, _Draw, str], float]] = {
        "forward": _forward, "attention": _attention, "qkv backward": _qkv_backward,
        "rope backward": _rope_backward,
    }  # fmt: skip
    with torch.no_grad():
        return runs[p.kind](p, _Draw(p, device), target)


# ---------------------------------------------------------------- inputs
class _Draw:
    def __init__(self, p: Problem, device: str) -> None:
        self.generator, self.offset, self.device = torch.Generator().manual_seed(p.data), p.offset, device

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.place((scale * torch.randn(shape, generator=self.generator)).to(dtype))

    def place(self, t: Tensor) -> Tensor:
        """A copy that starts `offset` elements into its allocation, with NaN before and after it."""
        memory = torch.full((t.numel() + 2 * self.offset + 8,), torch.nan, dtype=t.dtype, device=self.device)
        view = memory[self.offset : self.offset + t.numel()].view(t.shape)
        view.copy_(t)
        return view


def make_mask(p: Problem, draw: _Draw) -> Tensor | str | None:
    """The mask argument: a tensor for all but "causal" and "none"."""
    if p.mask in ("causal", "none"):
        return None if p.mask == "none" else "causal"
    batch, seq = p.batch if p.mask_batch else 1, p.seq
    mask = 2 * torch.randn(batch, 1, seq, seq, generator=draw.generator)
    row, column = torch.arange(seq)[:, None], torch.arange(seq)[None]
    if p.mask == "blocks":
        mask = torch.where(row // 50 == column // 50, 0.0, _LOWEST).expand_as(mask).clone()
    elif p.mask == "masked rows":
        mask[..., row[:, 0] % 5 == 2, :] = _LOWEST
    elif p.mask == "late keys":
        mask[..., : seq // 2] = _LOWEST
    elif p.mask == "all masked":
        mask.fill_(_LOWEST)
    elif p.mask == "finite causal":
        mask = torch.where(column <= row, 0.0, -1000.0).expand_as(mask).clone()
    return draw.place(mask.to(torch.bfloat16 if p.mask_dtype == "bf16" else torch.float32))


# ---------------------------------------------------------------- kinds
def _run(plan, p: Problem) -> None:
    plan.poison()
    plan.run(emulator.Options(schedule=p.schedule))


def _wide(value):
    return value.double() if isinstance(value, Tensor) else value


def _compare(name: str, out: Tensor, eager: Tensor, exact: Tensor) -> float:
    """Error over what is allowed: 1.25 times the eager model's, and rounding."""
    if not out.isfinite().all():
        raise Mismatch(f"{name}: {int((~out.isfinite()).sum())} of {out.numel()} elements are not finite")
    norm = exact.double().norm()
    if norm == 0:
        if out.any():
            raise Mismatch(f"{name}: got nonzero elements, want zeros")
        return 0.0
    error, eagers = (((t.double() - exact).norm() / norm).item() for t in (out, eager))
    allowed = max(1.25 * eagers, _ROUNDING)
    if not error <= allowed:
        raise Mismatch(f"{name}: error {error:.4g}, eager's {eagers:.4g}, at most {allowed:.4g} allowed")
    return error / allowed


def _forward(p: Problem, draw: _Draw, target: str) -> float:
    queries, keys = p.heads * p.head_dim, p.kv_heads * p.head_dim
    inputs = {
        "hidden_states": draw(p.batch, p.seq, p.hidden),
        "cos": draw(p.batch, p.seq, p.head_dim),
        "sin": draw(p.batch, p.seq, p.head_dim),
        "attention_mask": make_mask(p, draw),
        "q_proj_weight": draw(queries, p.hidden, scale=p.hidden**-0.5),
        "k_proj_weight": draw(keys, p.hidden, scale=p.hidden**-0.5),
        "v_proj_weight": draw(keys, p.hidden, scale=p.hidden**-0.5),
        "o_proj_weight": draw(p.hidden, queries, scale=queries**-0.5),
        "q_norm_weight": draw(p.head_dim, scale=0.3),
        "k_norm_weight": draw(p.head_dim, scale=0.3),
    }
    numbers = {"softcap": p.softcap, "head_dim": p.head_dim}
    plan = functional.plan_attention_forward(**inputs, **numbers, target=target)
    _run(plan, p)
    config = AttentionConfig(p.hidden, p.heads, p.kv_heads, p.head_dim, p.softcap)
    eager = reference.forward_stages(**inputs, config=config)
    exact = reference.forward_stages(**{name: _wide(t) for name, t in inputs.items()}, config=config)
    return _compare("output", plan.output, eager.output, exact.output)


def _attention(p: Problem, draw: _Draw, target: str) -> float:
    q = draw(p.batch, p.seq, p.heads, p.head_dim, scale=p.gain)
    k, v = (draw(p.batch, p.seq, p.kv_heads, p.head_dim) for _ in range(2))
    mask = make_mask(p, draw)
    plan = functional.plan_attention(q, k, v, mask=mask, softcap=p.softcap, target=target)
    _run(plan, p)
    config = AttentionConfig(heads=p.heads, kv_heads=p.kv_heads, head_dim=p.head_dim, softcap=p.softcap)
    eager = reference.attention(q, k, v, mask, config)
    exact = reference.attention(*map(_wide, (q, k, v, mask)), config)
    return _compare("out", plan.output, eager, exact)


def _qkv_backward(p: Problem, draw: _Draw, target: str) -> float:
    query, key = (p.batch, p.heads, p.seq, p.head_dim), (p.batch, p.kv_heads, p.seq, p.head_dim)
    inputs = {
        "grad_query": draw(*query), "grad_key": draw(*key), "grad_value": draw(*key),
        "hidden_states": draw(p.batch, p.seq, p.hidden),
        "q_weight": draw(p.heads * p.head_dim, p.hidden, scale=p.hidden**-0.5),
        "k_weight": draw(p.kv_heads * p.head_dim, p.hidden, scale=p.hidden**-0.5),
        "v_weight": draw(p.kv_heads * p.head_dim, p.hidden, scale=p.hidden**-0.5),
        "q_norm_weight": draw(p.head_dim, scale=0.3), "k_norm_weight": draw(p.head_dim, scale=0.3),
        "q_rstd": draw(*query[:3], 1, dtype=torch.float32).abs_() + 0.1,
        "k_rstd": draw(*key[:3], 1, dtype=torch.float32).abs_() + 0.1,
        "q_normed": draw(*query), "k_normed": draw(*key),
    }  # fmt: skip
    plan = functional_backward.plan_qkv_backward(**inputs, target=target)
    _run(plan, p)
    eager = reference.qkv_backward(**inputs)
    exact = reference.qkv_backward(**{name: _wide(t) for name, t in inputs.items()})
    return max(_compare(*item) for item in zip(exact._fields, plan.output, eager, exact))


def _rope_backward(p: Problem, draw: _Draw, target: str) -> float:
    query, key = (draw(p.batch, n, p.seq, p.head_dim) for n in (p.heads, p.kv_heads))
    cos, sin = (draw(p.batch, p.seq, p.head_dim) for _ in range(2))
    plan = functional_backward.plan_rope_backward(query, key, cos, sin, target=target)
    _run(plan, p)
    worst = 0.0
    for name, grad, out in zip(("query", "key"), (query, key), plan.output):
        with torch.enable_grad():
            t = torch.zeros_like(grad.double().transpose(1, 2)).requires_grad_()
            rotated = reference.apply_rope(t, cos.double(), sin.double())
            (exact,) = torch.autograd.grad(rotated, t, grad.double().transpose(1, 2))
        exact = exact.transpose(1, 2)
        worst = max(worst, _compare(name, out, exact.bfloat16(), exact))
    return worst


# ---------------------------------------------------------------- command
def _gpu_answers() -> bool:
    """Whether it still does: after an illegal access, say, every call of this process fails."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main() -> int:
    """0 if every problem of this run passes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--target", help="the GPU's own; in the emulator sm_100a")
    parser.add_argument("--backend", choices=DEVICES, default="emulator")
    parser.add_argument("--longer", type=int, default=1, help="sequences so many times as long")
    parser.add_argument("--start", type=int, help="first problem (the one after the last that was run)")
    parser.add_argument("--seed", type=int, help="run this problem alone")
    options = parser.parse_args()
    if options.longer < 1:
        parser.error(f"--longer: got {options.longer}, want at least 1")
    device = DEVICES[options.backend]
    if device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--backend: got cuda, but there is no GPU here")
        # The eager model at its best: its error bounds what is allowed.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    target = jit.resolve_target(options.target, torch.device(device)).name
    run = target + f"-{device}" * (device != "cpu") + f"-x{options.longer}" * (options.longer > 1)
    state, failures = STATE / f"{run}.json", STATE / f"{run}-failures.jsonl"
    state.parent.mkdir(parents=True, exist_ok=True)
    number = (
        options.start
        if options.start is not None
        else json.loads(state.read_text())["next"]
        if state.exists()
        else 0
    )
    if options.seed is not None:
        p = problem(options.seed, options.longer)
        print(p)
        print(f"error {check(p, target, device):.3f} x what is allowed")
        return 0
    end, failed, first, worst = time.monotonic() + 60 * options.minutes, 0, number, 0.0
    with tqdm(unit="problem", desc=run) as bar:
        while time.monotonic() < end:
            p = problem(number, options.longer)
            bar.set_postfix_str(f"{number}: {p.kind}" + f", {p.schedule}" * (device == "cpu"))
            try:
                worst = max(worst, check(p, target, device))
            except Exception as error:  # every kind of failure is a finding
                failed += 1
                message = traceback.format_exc()
                bar.write(f"{number}: {type(error).__name__}: {error}\n  {p}")
                with failures.open("a") as out:
                    found = {"number": number, "longer": options.longer, "problem": asdict(p), "error": message}
                    out.write(json.dumps(found) + "\n")
            number += 1
            state.write_text(json.dumps({"next": number}))
            bar.update()
            if device == "cuda" and not _gpu_answers():
                bar.write("the GPU answers no more")
                break
    print(f"problems {first} to {number - 1}: {failed} failed; largest error {worst:.2f} x what is allowed")
    if failed:
        print(f"failures: {failures}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
