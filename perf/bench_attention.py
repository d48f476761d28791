"""Attention alone on a GPU: correctness over shapes and masks, then time against FlashAttention-4.

    python perf/bench_attention.py [--check] [--time] [--json FILE]

Without options both. Each time is the median over replays of a CUDA graph of back-to-back launches on random
data, the contestants' replays interleaved. TFLOP/s count 4 S^2 H D B operations, half of them for causal masks.
"error" is the relative Frobenius norm of the difference to a float64 computation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace

import torch

from cute_gemma import jit
from cute_gemma.config import AttentionConfig
from cute_gemma.kernels.registry import forward_kernels

TARGETS = {9: "sm_90a", 10: "sm_100a"}


def target():
    return TARGETS[torch.cuda.get_device_capability()[0]]


def attention_kernel(b, s, heads, kv_heads, head_dim, softcap, mask="causal", **tuning):
    """The current GPU's kernel for these sizes. tuning: what differs from its own."""
    config = AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, softcap=softcap)
    kernel = forward_kernels(target()).attention(config, mask, b, s)
    return replace(kernel, tuning=replace(kernel.tuning, **tuning))


def draw(b, s, heads, kv_heads, head_dim, magnitude=2.0, seed=0):
    """q, k, v: normal; q and k have the magnitude that a norm of weight (1 + 1) leaves, unless told."""
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = ((b, s, heads, head_dim), (b, s, kv_heads, head_dim), (b, s, kv_heads, head_dim))
    q, k, v = (torch.randn(shape, device="cuda", generator=g) for shape in shapes)
    return (q * magnitude).bfloat16(), (k * magnitude).bfloat16(), v.bfloat16()


def exact(q, k, v, softcap, causal, heads=None):
    """float64 attention of the given query heads (all), (B, S, heads, D)."""
    b, s, h, d = q.shape
    group = h // k.shape[2]
    outs = []
    hidden = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1) if causal else None
    for head in heads if heads is not None else range(h):
        x = q[:, :, head].double() @ k[:, :, head // group].double().transpose(1, 2) * d**-0.5
        if softcap is not None:
            x = softcap * torch.tanh(x / softcap)
        if causal:
            x.masked_fill_(hidden, float("-inf"))
        outs.append(torch.softmax(x, -1) @ v[:, :, head // group].double())
    return torch.stack(outs, 2)


def error(out, reference):
    return ((out.double() - reference).norm() / reference.norm()).item()


def run(kernel, q, k, v):
    out = torch.full_like(q, float("nan"))
    jit.launch(kernel, q, k, v, out, target=target())
    return out


# name, B, S, H, KV, D, softcap, mask, magnitude of q and k
CHECKS = [
    ("suite sizes", 2, 293, 24, 8, 128, 50.0, "causal", 2.0),
    ("one row", 1, 1, 24, 8, 128, 50.0, "causal", 2.0),
    ("one tile", 1, 128, 24, 8, 128, 50.0, "causal", 2.0),
    ("129 rows", 3, 129, 24, 8, 128, 50.0, "causal", 2.0),
    ("odd", 1, 997, 24, 8, 128, 50.0, "causal", 2.0),
    ("long", 1, 4096, 24, 8, 128, 50.0, "causal", 2.0),
    ("many batches", 16, 512, 24, 8, 128, 50.0, "causal", 2.0),
    ("wider scores", 1, 541, 24, 8, 128, 50.0, "causal", 3.0),
    ("widest scores", 1, 541, 24, 8, 128, 50.0, "causal", 9.0),
    ("no mask", 1, 613, 24, 8, 128, 50.0, "none", 2.0),
    ("no cap", 1, 997, 24, 8, 128, None, "causal", 2.0),
    ("no cap, long", 1, 4096, 24, 8, 128, None, "causal", 2.0),
    ("no cap, wide", 1, 541, 24, 8, 128, None, "causal", 6.0),
    ("no cap, no mask", 2, 613, 24, 8, 128, None, "none", 2.0),
    ("no cap, one row", 1, 1, 24, 8, 128, None, "none", 2.0),
    ("d = 256", 1, 997, 16, 8, 256, 50.0, "causal", 1.5),
    ("d = 256, no cap", 2, 517, 16, 8, 256, None, "causal", 1.5),
    ("d = 256, no mask", 2, 517, 16, 8, 256, 50.0, "none", 1.5),
    ("d = 64", 2, 517, 8, 1, 64, 50.0, "causal", 2.0),
]


def check(cases, **tuning):
    failures = 0
    for name, b, s, h, kv, d, softcap, mask, magnitude in cases:
        q, k, v = draw(b, s, h, kv, d, magnitude)
        kernel = attention_kernel(b, s, h, kv, d, softcap, mask, **tuning)
        out = run(kernel, q, k, v)
        again = run(kernel, q, k, v)
        e = error(out, exact(q, k, v, softcap, mask == "causal"))
        same = torch.equal(out, again)
        good = e <= 0.004 and same
        failures += not good
        print(f"{'ok  ' if good else 'FAIL'} {name:18} ({b},{s}) {h}/{kv} d={d} cap={softcap} {mask:6} "
              f"error {e:.5f}{'' if same else ' NOT REPEATABLE'}", flush=True)  # fmt: skip
    return failures


def contestants(b, s, h, kv, d, softcap, variants, peers):
    """name -> function that launches on the current stream."""
    q, k, v = draw(b, s, h, kv, d)
    found = {}
    for name, tuning in variants.items():
        kernel, out = attention_kernel(b, s, h, kv, d, softcap, **tuning), torch.empty_like(q)
        found[name] = lambda kernel=kernel, out=out: jit.launch(kernel, q, k, v, out, target=target())
    if not peers:
        return found
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as reason:
        print(f"no FlashAttention-4: {reason}", file=sys.stderr)
        return found
    found["FA4 no cap"] = lambda: flash_attn_func(q, k, v, causal=True)
    if softcap is not None:
        found["FA4"] = lambda: flash_attn_func(q, k, v, causal=True, softcap=softcap)
    return found


def time_all(functions, launches, rounds):
    """Median microseconds a launch of each, replays interleaved."""
    graphs = {}
    for name, function in functions.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            function()
            stream.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for _ in range(launches):
                    function()
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1000 / launches)
    return {name: statistics.median(t) for name, t in times.items()}


def tflops(b, s, h, d, us):
    return 2 * s * s * h * d * b / us * 1e-6


TIMES = [
    (1, 8192, 24, 8, 128, 50.0),
    (1, 8192, 24, 8, 128, None),
    (4, 2048, 24, 8, 128, 50.0),
    (16, 512, 24, 8, 128, 50.0),
    (1, 1024, 24, 8, 128, 50.0),
    (1, 128, 24, 8, 128, 50.0),
    (1, 8192, 16, 8, 256, 50.0),
    (1, 8192, 16, 8, 256, None),
]


def measure(cases, variants, rounds, peers):
    records = []
    for b, s, h, kv, d, softcap in cases:
        launches = max(4, min(50, int(3e10 / (s * s * h * d * b))))
        found = time_all(contestants(b, s, h, kv, d, softcap, variants, peers), launches, rounds)
        records.append({"B": b, "S": s, "H": h, "KV": kv, "D": d, "softcap": softcap, "us": found})
        line = "  ".join(f"{name} {us:.1f} us {tflops(b, s, h, d, us):.0f}" for name, us in found.items())
        print(f"({b},{s}) {h}/{kv} d={d} cap={softcap}: {line} TFLOP/s", flush=True)
    return records


def versions():
    import importlib.metadata as metadata

    names = ("torch", "nvidia-cutlass-dsl", "flash-attn-4")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {"gpu": torch.cuda.get_device_name(), **found}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--alone", action="store_true", help="no peers")
    parser.add_argument("--cases", help="which cases, as a Python slice such as 0:2")
    parser.add_argument("--variant", action="append", default=[], help="name:field=value,... of the tuning")
    parser.add_argument("--json")
    options = parser.parse_args()
    both = not (options.check or options.time)
    ends = options.cases.split(":") if options.cases else ("", "")
    chosen = slice(*(int(x) if x else None for x in ends))
    variants = {}
    for text in options.variant or ["default:"]:
        name, _, assignments = text.partition(":")
        variants[name] = {
            key: int(value) for key, value in (a.split("=") for a in assignments.split(",") if a)
        }
    facts = versions()
    print(facts)
    failures = check(CHECKS[chosen], **next(iter(variants.values()))) if options.check or both else 0
    records = []
    if options.time or both:
        records = measure(TIMES[chosen], variants, options.rounds, not options.alone)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"versions": facts, "records": records}, file, indent=1)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
