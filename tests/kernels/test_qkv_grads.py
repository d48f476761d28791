"""The gradients of hidden states and weights: every tile shape, odd sizes, the schedule of two kinds of
tile."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import pytest
import torch

from cute_gemma import jit
from cute_gemma.emulator import Options
from cute_gemma.jit.signature import ScalarArg, TensorArg
from cute_gemma.kernels.common.filled_schedule import plan_filled
from cute_gemma.kernels.common.norm_backward import chunk_rows
from cute_gemma.kernels.common.schedule import Section
from cute_gemma.kernels.sm100.gemm import GemmTuning
from cute_gemma.kernels.sm100.qkv_grads import QkvGradients, default_tuning
from cute_gemma.workloads import suite_cases

TARGET = "sm_100a"


@dataclass
class Problem:
    """Inputs of the kernel and places for its results, all NaN."""

    kernel: QkvGradients
    batch: int
    seq: int

    def __post_init__(self):
        k, generator = self.kernel, torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=generator)

        def place(*shape, dtype=torch.bfloat16):
            return torch.full(shape, math.nan, dtype=dtype)

        widths = [heads * k.head_dim for heads in k.side_heads]
        self.grads = [draw(self.batch, heads, self.seq, k.head_dim).bfloat16() for heads in k.side_heads]
        self.hidden = draw(self.batch, self.seq, k.hidden).bfloat16()
        self.weights = [(draw(width, k.hidden) / k.hidden**0.5).bfloat16() for width in widths]
        self.partials = draw(k.norm.ctas, k.head_dim)
        self.grad_hidden = place(self.batch, self.seq, k.hidden)
        self.grad_weights = [place(width, k.hidden) for width in widths]
        self.grad_norms = [place(k.head_dim, dtype=torch.float32) for _ in range(2)]
        self.scratch = []
        if k.tuning.stream_k:
            counters = torch.zeros(k.tuning.counters, dtype=torch.int32)
            self.scratch = [place(k.tuning.partial_floats, dtype=torch.float32), counters]

    def run(self, schedule="lazy"):
        inputs = (*self.grads, self.hidden, *self.weights, self.partials)
        outputs = (self.grad_hidden, *self.grad_weights, *self.grad_norms, *self.scratch)
        (report,) = jit.launch(
            self.kernel, *inputs, *outputs, target=TARGET, emulation=Options(schedule=schedule)
        )
        return report

    def exact(self):
        """The five matrices and two vectors in float64."""
        rows = [grad.double().transpose(1, 2).flatten(0, 1).flatten(1) for grad in self.grads]
        hidden = self.hidden.double().flatten(0, 1)
        grad_hidden = sum(row @ weight.double() for row, weight in zip(rows, self.weights))
        counts = [self.batch * heads * self.seq for heads in self.kernel.side_heads[:2]]
        chunk = chunk_rows(*counts, self.kernel.norm)
        first, second = (-(-count // chunk) for count in counts)
        partials = self.partials.double()
        sums = partials[:first].sum(0), partials[first : first + second].sum(0)
        return [grad_hidden.view_as(self.grad_hidden), *(row.T @ hidden for row in rows), *sums]

    def results(self):
        return [self.grad_hidden, *self.grad_weights, *self.grad_norms]

    def check(self):
        for out, exact in zip(self.results(), self.exact()):
            # No worse than rounding the exact result, but for the few that fp32 sums tip to the other
            # neighbour.
            rounded = relative_error(exact.to(out.dtype), exact)
            slack = 1e-5 if out.dtype == torch.bfloat16 else 1e-6
            assert relative_error(out, exact) <= 1.01 * rounded + slack


def relative_error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


def gemma3_270m(tile_m=128, tile_n=128, **tuning):
    return QkvGradients(640, 4, 1, 256, GemmTuning(tile_m, tile_n, **tuning))


SHAPES = [(m, n, c) for m in (128, 256) for n in (64, 128, 256) for c in (1, 2) if (n, c) != (64, 2)]


@pytest.mark.parametrize("tile_m, tile_n, cluster_m", SHAPES)
def test_every_tile_shape(tile_m, tile_n, cluster_m):
    kernel = gemma3_270m(tile_m, tile_n, cluster_m=cluster_m)
    problem = Problem(kernel, 3, 143)
    problem.run()
    problem.check()
    (report,) = jit.inspect(kernel, TARGET)
    assert (report.stack_bytes, report.local_loads, report.local_stores) == (0, 0, 0)
    assert report.count("UTCHMMA") == 8  # four a k block for each kind of tile


@pytest.mark.parametrize("batch, seq", [(1, 1), (3, 43), (2, 128), (5, 3)])
@pytest.mark.parametrize("tile_m, cluster_m", [(128, 1), (256, 1), (256, 2)])
def test_sizes_that_fill_no_tile(batch, seq, tile_m, cluster_m):
    problem = Problem(gemma3_270m(tile_m, cluster_m=cluster_m), batch, seq)
    problem.run()
    problem.check()


@pytest.mark.parametrize("tile_m, cluster_m", [(128, 1), (256, 2)])
def test_stream_k_splits_tiles_and_leaves_its_counters_at_zero(tile_m, cluster_m):
    problem = Problem(gemma3_270m(tile_m, cluster_m=cluster_m, stream_k=True, sm_count=40), 1, 131)
    for _ in range(2):
        problem.run()
        problem.check()
        assert (problem.scratch[1] == 0).all()


@pytest.mark.parametrize(
    "hidden, heads, kv_heads, head_dim, batch, seq",
    [
        (1152, 4, 1, 256, 1, 70),  # gemma3-1b
        (3072, 24, 8, 128, 1, 9),  # 047's layer
        (200, 3, 1, 128, 2, 70),  # an odd number of blocks for a pair; columns that fill no box
        (8, 1, 1, 128, 1, 5),
        (136, 1, 3, 256, 1, 5),  # more key than query heads
    ],
)
def test_other_layers(hidden, heads, kv_heads, head_dim, batch, seq):
    kernel = QkvGradients(hidden, heads, kv_heads, head_dim, GemmTuning(256, 128))
    problem = Problem(kernel, batch, seq)
    problem.run()
    problem.check()
    (report,) = jit.inspect(kernel, TARGET)
    assert (report.stack_bytes, report.local_loads, report.local_stores) == (0, 0, 0)


def test_few_workers_take_many_tiles():
    problem = Problem(gemma3_270m(256, 128, sm_count=24), 3, 143)
    problem.run()
    problem.check()


@pytest.mark.parametrize(
    "tuning",
    [
        GemmTuning(128, 128),
        GemmTuning(256, 128, cluster_m=2),
        GemmTuning(256, 128, stream_k=True, sm_count=20),
    ],
)
def test_results_are_bit_identical_across_schedules(tuning):
    results = []
    for schedule in ("lazy", "random:1", "random:2", "random:3"):
        problem = Problem(QkvGradients(136, 2, 1, 128, tuning), 2, 70)
        problem.run(schedule)
        results.append([t.view(torch.uint8) for t in problem.results()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def gemma3_270m_of(tuning):
    return QkvGradients(640, 4, 1, 256, tuning)


@pytest.mark.parametrize("case", suite_cases("051"), ids=lambda c: f"{c.batch_size}x{c.seq_len}")
def test_default_tuning_keeps_the_multiprocessors_busy(case):
    """The busiest worker has at most 1.6 times the mean, or one tile where there are fewer tiles than
    workers."""
    batch, seq = case.batch_size, case.seq_len
    tuning = default_tuning(batch, seq, 640, 6, 256)
    wgrad = -(-12 // tuning.cluster) * -(-640 // tuning.tile_n)
    dgrad = -(-batch * -(-seq // 128) // tuning.cluster) * -(-640 // tuning.tile_n)
    depth = batch * -(-seq // 64)
    loads = [0] * tuning.workers
    for blocks in [depth] * wgrad + [24] * dgrad:
        loads[loads.index(min(loads))] += blocks
    mean = (wgrad * depth + dgrad * 24) / tuning.workers
    assert max(loads) <= max(1.6 * mean, depth, 24)
    assert gemma3_270m_of(tuning).stage_count >= 4


@dataclass(frozen=True)
class ScheduleProbe:
    """owners[tile] and times[tile]: which worker takes a tile, as which of its units. columns: n_tiles of both
    sections."""

    max_workers: int
    columns: tuple[int, int]

    def signature(self):
        sizes = tuple(ScalarArg(name, "i32") for name in ("m0", "k0", "m1", "k1"))
        return *sizes, TensorArg("seen", "i32", ("tiles", 5), align=4)

    @cute.jit
    def __call__(self, m0, k0, m1, k1, seen: cute.Tensor, stream):
        long, short = (Section(m, n, k) for m, n, k in zip((m0, m1), self.columns, (k0, k1)))
        schedule = plan_filled(long, short, self.max_workers, 4)
        self.kernel(schedule, seen).launch(grid=(schedule.workers, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, schedule, seen: cute.Tensor):
        worker = cute.arch.block_idx()[0]
        if cute.arch.thread_idx()[0] == 0:
            for index in cutlass.range(schedule.unit_count(worker), unroll=1):
                unit = schedule.unit(worker, index)
                for place, value in enumerate((worker, index, unit.section, unit.m, unit.n)):
                    seen[unit.tile, place] = value


@pytest.mark.parametrize(
    "sizes", [(6, 5, 64, 16, 5, 24), (12, 5, 2, 1, 5, 24), (3, 1, 7, 50, 2, 3), (1, 1, 1, 1, 1, 1)]
)
@pytest.mark.parametrize("workers", [1, 7, 74])
def test_filled_schedule_deals_every_tile_once_and_ends_evenly(sizes, workers):
    m0, n0, k0, m1, n1, k1 = sizes
    long, short = m0 * n0, m1 * n1
    seen = torch.full((long + short, 5), -1, dtype=torch.int32)
    jit.launch(ScheduleProbe(workers, (n0, n1)), m0, k0, m1, k1, seen, target=TARGET)
    owner, index, section, m, n = seen.unbind(1)
    assert (owner >= 0).all(), "a tile that nobody took"
    assert section.tolist() == [0] * long + [1] * short
    places = list(zip(section.tolist(), m.tolist(), n.tolist()))
    assert len(set(places)) == len(places)
    for which, rows, columns in ((0, m0, n0), (1, m1, n1)):
        assert all(0 <= i < rows and 0 <= j < columns for s, i, j in places if s == which)
    loads = {}
    for worker, at, kind in zip(owner.tolist(), index.tolist(), section.tolist()):
        loads.setdefault(worker, {})[at] = (k0, k1)[kind]
    assert set(loads) == set(range(min(workers, long + short)))
    assert all(sorted(units) == list(range(len(units))) for units in loads.values())
    ends = [sum(units.values()) for units in loads.values()]
    if k0 >= k1:
        assert max(ends) - min(ends) <= max(k0, k1) or long + short < 2 * workers


def test_traffic_at_4096_rows():
    """Every operand once, every result once; the whole backward's traffic is in test_qkv_backward.py."""
    tuning = default_tuning(1, 4096, 640, 6, 256)
    problem = Problem(QkvGradients(640, 4, 1, 256, tuning), 1, 4096)
    report = problem.run("eager")
    problem.check()
    inputs = sum(t.numel() * 2 for t in (*problem.grads, problem.hidden, *problem.weights))
    outputs = sum(t.numel() * 2 for t in problem.results()[:4])
    # The rest is the partial sums of the norms.
    assert report.sectors_read * 32 <= 1.01 * inputs
    assert report.sectors_written * 32 <= 1.001 * outputs
