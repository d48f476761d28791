"""The projections on a GPU: correctness over sizes, then time against the GEMM of the vendor's library.

    python perf/bench_gemm.py [--check] [--time] [--json FILE]

Without options both. Each time is the median over replays of a CUDA graph of back-to-back launches on random
data, the contestants' replays interleaved; the launches of a graph take turns on sets of tensors that
together exceed the L2 cache. "error" is the relative Frobenius norm of the difference to float64 products,
for q and k after the norm and RoPE.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from cute_gemma import jit
from cute_gemma.kernels.common.norm_backward import NormBackward
from cute_gemma.kernels.sm90 import out_proj, qkv_grads, qkv_proj
from cute_gemma.kernels.sm90.tuning import GemmTuning
from cute_gemma.workloads import suite_cases

TARGET = "sm_90a"
HIDDEN, HEADS, KV_HEADS = 3072, 24, 8
EPS = 1e-6
L2_BYTES = 60 << 20


def draw(*shape, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def workspace(kernel):
    """Scratch tensors that a kernel's signature ends with."""
    tuning = kernel.tuning
    if not tuning.stream_k:
        return ()
    return (
        torch.empty(tuning.partial_floats, device="cuda"),
        torch.zeros(tuning.counters, device="cuda", dtype=torch.int32),
    )


@dataclasses.dataclass
class Output:
    """One problem of the output projection."""

    rows: int

    def __post_init__(self):
        self.x = draw(self.rows, HIDDEN)
        self.weight = draw(HIDDEN, HIDDEN, scale=HIDDEN**-0.5)
        self.out = torch.full_like(self.x, float("nan"))

    @staticmethod
    def kernel(rows, tuning=None):
        return out_proj.OutputProjection(
            HIDDEN, HIDDEN, tuning or out_proj.default_tuning(rows, HIDDEN, HIDDEN)
        )

    def launches(self, kernel):
        return [(kernel, (self.x, self.weight, self.out, *workspace(kernel)))]

    def results(self):
        return [self.out]

    def exact(self):
        return [self.x.double() @ self.weight.double().T]

    def library(self):
        torch.mm(self.x, self.weight.T, out=self.out)

    flops = property(lambda self: 2 * self.rows * HIDDEN * HIDDEN)
    bytes = property(lambda self: 2 * (2 * self.rows * HIDDEN + HIDDEN * HIDDEN))


@dataclasses.dataclass
class QKV:
    """One problem of the QKV projection."""

    rows: int
    head_dim: int = 128

    def __post_init__(self):
        d = self.head_dim
        self.x = draw(self.rows, HIDDEN)
        self.weight = draw((HEADS + 2 * KV_HEADS) * d, HIDDEN, scale=HIDDEN**-0.5)
        self.weights = self.weight.split([HEADS * d, KV_HEADS * d, KV_HEADS * d])
        self.cos, self.sin = draw(self.rows, d), draw(self.rows, d)
        self.norms = [draw(d, scale=0.3) for _ in range(2)]
        self.outs = [
            torch.full((self.rows, w.shape[0]), float("nan"), device="cuda").bfloat16() for w in self.weights
        ]
        self.product = self.x.new_empty(self.rows, self.weight.shape[0])

    @staticmethod
    def kernel(rows, tuning=None, head_dim=128):
        tuning = tuning or qkv_proj.default_tuning(rows, HIDDEN, HEADS, KV_HEADS, head_dim)
        return qkv_proj.QKVProjection(HIDDEN, HEADS, KV_HEADS, head_dim, EPS, tuning=tuning)

    def launches(self, kernel):
        arguments = (self.x, *self.weights, self.cos, self.sin, *self.outs, *self.norms, *workspace(kernel))
        return [(kernel, arguments)]

    def results(self):
        return self.outs

    def exact(self):
        d = self.head_dim
        heads = [(self.x.double() @ w.double().T).view(self.rows, -1, d) for w in self.weights]
        cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]
        done = []
        for t, w in zip(heads, self.norms):
            t = t * torch.rsqrt(t.square().mean(-1, keepdim=True) + EPS) * (1 + w.double())
            done.append((t * cos + torch.cat((-t[..., d // 2 :], t[..., : d // 2]), -1) * sin).flatten(1))
        return [*done, heads[2].flatten(1)]

    def library(self):
        torch.mm(self.x, self.weight.T, out=self.product)

    flops = property(lambda self: 2 * self.rows * HIDDEN * self.weight.shape[0])
    bytes = property(lambda self: 2 * (self.rows * HIDDEN + self.weight.numel() + self.product.numel()))


@dataclasses.dataclass
class Backward:
    """One problem of the QKV backward, of (B, S) rows: both launches, or only that of the products."""

    size: tuple
    products_only: bool = False

    HIDDEN, HEADS, KV_HEADS, D = 640, 4, 1, 256

    def __post_init__(self):
        b, s, d = *self.size, self.D
        heads = (self.HEADS, self.KV_HEADS, self.KV_HEADS)
        self.incoming = [draw(b, h, s, d) for h in heads]
        self.normed = [draw(b, h, s, d) for h in heads[:2]]
        self.rstd = [torch.rand(b * h * s, device="cuda") + 0.5 for h in heads[:2]]
        self.norms = [draw(d, scale=0.3) for _ in range(2)]
        self.hidden = draw(b, s, self.HIDDEN)
        self.weights = [draw(h * d, self.HIDDEN, scale=self.HIDDEN**-0.5) for h in heads]
        self.grads = [torch.empty_like(t) for t in self.incoming[:2]]
        self.partials = torch.empty(NORM.ctas, d, device="cuda")
        self.outs = [torch.empty_like(t) for t in (self.hidden, *self.weights)]
        self.outs += [torch.empty(d, device="cuda") for _ in range(2)]
        rows, columns = b * s, sum(heads) * d
        self.side_by_side = draw(rows, columns)
        self.products = self.hidden.new_empty(rows, self.HIDDEN), self.hidden.new_empty(columns, self.HIDDEN)
        self.weight = torch.cat(self.weights)

    @classmethod
    def kernel(cls, size, tuning=None):
        tuning = tuning or qkv_grads.default_tuning(*size, cls.HIDDEN, cls.HEADS + 2 * cls.KV_HEADS, cls.D)
        return qkv_grads.QkvGradients(cls.HIDDEN, cls.HEADS, cls.KV_HEADS, cls.D, tuning, NORM)

    def launches(self, kernel):
        d = self.D
        sides = [
            (self.incoming[i].view(-1, d), self.normed[i].view(-1, d), self.rstd[i], self.norms[i],
             self.grads[i].view(-1, d))
            for i in range(2)
        ]  # fmt: skip
        products = (
            *self.grads,
            self.incoming[2],
            self.hidden,
            *self.weights,
            self.partials,
            *self.outs,
            *workspace(kernel),
        )
        first = [] if self.products_only else [(NormBackward(d, NORM), (*sides[0], *sides[1], self.partials))]
        return [*first, (kernel, products)]

    def results(self):
        return self.outs

    def exact(self):
        rows, norm_grads = [], []
        for i in range(2):
            grad, normed = self.incoming[i].double(), self.normed[i].double()
            g = (grad * (1 + self.norms[i].double())).bfloat16().double()
            centred = g - (g * normed).mean(-1, keepdim=True) * normed
            rows.append(self.rstd[i].double().view(*grad.shape[:3], 1) * centred)
            norm_grads.append((grad * normed).sum((0, 1, 2)))
        rows.append(self.incoming[2].double())
        rows = [t.transpose(1, 2).flatten(0, 1).flatten(1) for t in rows]
        hidden = self.hidden.double().flatten(0, 1)
        grad_hidden = sum(t @ w.double() for t, w in zip(rows, self.weights))
        return [grad_hidden.view_as(self.hidden), *(t.T @ hidden for t in rows), *norm_grads]

    def library(self):
        """Only the two products."""
        torch.mm(self.side_by_side, self.weight, out=self.products[0])
        torch.mm(self.side_by_side.T, self.hidden.flatten(0, 1), out=self.products[1])

    rows = property(lambda self: self.size[0] * self.size[1])
    flops = property(lambda self: 4 * self.rows * self.weight.numel())
    bytes = property(lambda self: 2 * (self.rows * (2 * 640 + 10 * 256) + 2 * self.weight.numel()))


NORM = qkv_grads.NORM_TUNING


def Products(size):
    return Backward(size, products_only=True)


Products.kernel = Backward.kernel


def launch(launches):
    for kernel, arguments in launches:
        jit.launch(kernel, *arguments, target=TARGET)


def check(kernel, problem, name):
    """Whether a launch is right, and more have the same bits."""
    launches = problem.launches(kernel)
    results = []
    for _ in range(4):
        for out in problem.results():
            out.fill_(float("nan"))
        launch(launches)
        results.append([o.clone() for o in problem.results()])
    exact = problem.exact()
    errors = [((o.double() - e).norm() / e.norm()).item() for o, e in zip(results[0], exact)]
    worst = [((o.double() - e).abs().max() / e.abs().max()).item() for o, e in zip(results[0], exact)]
    same = all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
    good = same and max(errors) < 0.005 and max(worst) < 0.03
    print(f"{'ok  ' if good else 'FAIL'} {name:40} errors {' '.join(f'{e:.5f}' for e in errors)}"
          f"{'' if same else ' NOT REPEATABLE'}", flush=True)  # fmt: skip
    return good


def time_all(functions, rounds):
    """Median microseconds of each of {name: (graph of launches, how many)}, replays interleaved."""
    graphs = {}
    for name, (launches, count) in functions.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launches()
            stream.synchronize()
            graphs[name] = torch.cuda.CUDAGraph(), count
            with torch.cuda.graph(graphs[name][0], stream=stream):
                launches()
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, count) in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1000 / count)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(kind, rows, tunings, rounds=15):
    """Times of the library and of each tuning, as rows of a table."""
    sets = max(2, -(-3 * L2_BYTES // kind(rows).bytes))
    problems = [kind(rows) for _ in range(sets)]
    count = sets * max(1, 8 // sets)

    def library():
        for index in range(count):
            problems[index % sets].library()

    functions = {"library": (library, count)}
    for tuning in (None, *tunings):
        kernel = kind.kernel(rows, tuning)
        launches = [problem.launches(kernel) for problem in problems]

        def ours(launches=launches):
            for index in range(count):
                launch(launches[index % sets])

        functions[("default " if tuning is None else "") + describe(kernel.tuning)] = (ours, count)
    times = time_all(functions, rounds)
    for name, us in times.items():
        rates = f"{problems[0].flops / us / 1e6:7.1f} TFLOP/s {problems[0].bytes / us / 1e6:6.2f} TB/s"
        ratio = f"{us:8.2f} us  x library {us / times['library']:.3f}"
        print(f"{kind.__name__:8} {str(rows):>10} {name:28} {ratio} {rates}", flush=True)
    return {"kind": kind.__name__, "rows": rows, "us": times}


def describe(tuning):
    marks = f"{' c2' if tuning.cluster_m == 2 else ''}{' sk' if tuning.stream_k else ''}"
    marks += f" share{tuning.share}" if tuning.share > 1 else ""
    return f"{tuning.tile_m}x{tuning.tile_n}{marks} g{tuning.group_m}" + (
        f" s{tuning.stages}" if tuning.stages else ""
    )


T = GemmTuning
S = {"stream_k": True}
C = {"cluster_m": 2}
# Kind, rows, tuning (None: the default).
CHECKS = [
    (Output, 131, T(128, 64)),
    (Output, 1000, T(256, 128)),
    (Output, 300, T(128, 256, **C)),
    (Output, 128, T(128, 64, share=2)),
    (Output, 2048, T(128, 256, share=2)),
    (Output, 1024, T(128, 192)),
    (Output, 128, T(128, 128, **S)),
    (Output, 586, T(128, 256, **S)),
    (Output, 1000, T(128, 256, **C, **S)),
    (Output, 4000, None),
    (QKV, 1, T(128, 128)),
    (QKV, 300, T(128, 256, **C)),
    (QKV, 128, T(128, 128, share=2)),
    (QKV, 2048, T(128, 256, share=2)),
    (QKV, 1024, T(128, 128, share=2)),
    (QKV, 128, T(128, 128, **S)),
    (QKV, 586, T(128, 256, **S)),
    (QKV, 3557, None),
    (Backward, (1, 131), None),
    (Backward, (4, 373), None),
    (Backward, (1, 4096), None),
    (Backward, (64, 128), None),
    (Backward, (2, 128), T(128, 128, **S)),
    (Backward, (3, 613), T(256, 128, **C)),
    (Backward, (3, 613), T(256, 128, **S)),
    (Backward, (16, 541), T(128, 256, **C, **S)),
]
# Kind, rows, tunings beside the default.
TIMES = [
    (QKV, 8192, [T(128, 256, **C), T(128, 128, **C)]),
    (QKV, 3557, [T(128, 256, **C, **S)]),
    (QKV, 2048, [T(128, 256, **C, **S)]),
    (QKV, 1024, [T(128, 256, share=2)]),
    (QKV, 586, [T(128, 256, **S)]),
    (QKV, 512, [T(128, 128), T(128, 256)]),
    (QKV, 256, []),
    (QKV, 128, [T(128, 128, **S)]),
    (Output, 8192, [T(128, 256, **C)]),
    (Output, 3557, [T(128, 256)]),
    (Output, 2048, []),
    (Output, 1024, []),
    (Output, 586, [T(128, 128, **S)]),
    (Output, 512, []),
    (Output, 256, []),
    (Output, 128, []),
    (Products, (1, 8192), [T(128, 128, **S), T(128, 256, **C, **S)]),
    (Products, (1, 4096), []),
    (Products, (1, 1024), []),
    *((Backward, (case.batch_size, case.seq_len), []) for case in suite_cases("051")),
]


def compile_all():
    """Every kernel of the tables, several at a time, into the cache on disk."""
    kernels = {kind.kernel(rows, tuning) for kind, rows, tuning in CHECKS}
    kernels |= {kind.kernel(rows, tuning) for kind, rows, tunings in TIMES for tuning in (None, *tunings)}
    kernels.add(NormBackward(Backward.D, NORM))
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, kernels))


def _compile(kernel):
    jit.compile(kernel, TARGET)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    both = not (options.check or options.time)
    compile_all()
    torch.manual_seed(0)
    failures, results = 0, []
    if options.check or both:
        for kind, rows, tuning in CHECKS:
            kernel = kind.kernel(rows, tuning)
            failures += not check(kernel, kind(rows), f"{kind.__name__} M={rows} {describe(kernel.tuning)}")
    if options.time or both:
        results = [compare(*case) for case in TIMES]
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "results": results}, file, indent=1)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
