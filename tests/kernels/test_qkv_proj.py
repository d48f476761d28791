"""The QKV projection of sm_100a against the reference: configurations, edges, schedules, the cubin."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")

from cute_gemma import jit, reference
from cute_gemma.config import AttentionConfig
from cute_gemma.emulator import Options
from cute_gemma.kernels.sm100.qkv_proj import QKVProjection, default_tuning
from cute_gemma.kernels.sm100.tuning import GemmTuning

TARGET = "sm_100a"


class Problem:
    """A kernel, inputs for it, and NaN-filled places for what it writes."""

    def __init__(self, kernel, batch, seq, seed=0):
        self.kernel, self.batch, self.seq = kernel, batch, seq
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        k, rows = kernel, batch * seq
        heads = (k.heads, k.kv_heads, k.kv_heads)
        self.x = draw(rows, k.hidden).bfloat16()
        self.weights = [(draw(n * k.head_dim, k.hidden) / k.hidden**0.5).bfloat16() for n in heads]
        self.cos, self.sin = (f(draw(rows, k.head_dim)).bfloat16() for f in (torch.cos, torch.sin))
        self.norms = [draw(k.head_dim).bfloat16() for _ in range(2)]
        self.outputs = [torch.full((rows, n * k.head_dim), math.nan, dtype=torch.bfloat16) for n in heads]
        self.normed = [torch.full((batch, n, seq, k.head_dim), math.nan).bfloat16() for n in heads[:2]]
        self.rstd = [torch.full((batch, n, seq, 1), math.nan) for n in heads[:2]]
        self.partials = torch.full((k.tuning.partial_floats,), math.nan)
        self.counters = torch.zeros(k.tuning.counters, dtype=torch.int32)

    def run(self, schedule="lazy"):
        k = self.kernel
        tensors = [self.x, *self.weights, self.cos, self.sin, *self.outputs]
        tensors += self.norms if k.qk_norm else []
        tensors += [*self.normed, *self.rstd] if k.save_for_backward else []
        tensors += [self.partials, self.counters] if k.tuning.stream_k else []
        (report,) = jit.launch(k, *tensors, target=TARGET, emulation=Options(schedule=schedule))
        return report

    def reference(self, dtype):
        """q, k, v [M, heads*D] as eager PyTorch computes them in `dtype`."""
        k = self.kernel
        config = AttentionConfig(
            hidden=k.hidden,
            heads=k.heads,
            kv_heads=k.kv_heads,
            head_dim=k.head_dim,
            eps=k.eps,
            qk_norm=k.qk_norm,
        )
        inputs = [t.to(dtype) for t in (self.x, self.cos, self.sin, *self.weights, *self.norms)]
        x, cos, sin = (t.view(self.batch, self.seq, -1) for t in inputs[:3])
        parts = reference.qkv_projection(x, cos, sin, *inputs[3:], config)
        return [part.flatten(2).flatten(0, 1) for part in parts]

    def check(self):
        """Both kinds of error stay within a quarter of eager bf16's, and the counters are back at zero."""
        exact, eager = self.reference(torch.float64), self.reference(torch.bfloat16)
        for out, want, rounded in zip(self.outputs, exact, eager):
            assert error(out, want) <= 1.25 * error(rounded, want)
        assert not self.counters.any()


def error(out, exact):
    """Relative error in the Frobenius norm; NaN if anything was not written."""
    return ((out.double() - exact).norm() / exact.norm()).item()


def small(head_dim=128, hidden=200, **settings):
    """Three query heads or two, one k/v head, and a hidden size that fills no block of 64."""
    tuning = GemmTuning(**{"tile_n": head_dim, "sm_count": 6, **settings.pop("tuning", {})})
    return QKVProjection(hidden, 3 if head_dim == 128 else 2, 1, head_dim, tuning=tuning, **settings)


@pytest.mark.parametrize("rows", [1, 131, 300])
@pytest.mark.parametrize(
    "tuning",
    [{}, {"tile_m": 256, "tile_n": 128}, {"tile_m": 256, "tile_n": 256}],
    ids=["one", "pair", "wide pair"],
)
def test_matches_reference_at_odd_lengths(rows, tuning):
    problem = Problem(small(tuning=tuning), 1, rows)
    problem.run()
    problem.check()


@pytest.mark.parametrize("tuning", [{}, {"tile_m": 256}], ids=["one", "pair"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_matches_reference_at_head_dim_256(tuning, qk_norm):
    problem = Problem(small(256, qk_norm=qk_norm, tuning=tuning), 1, 131)
    problem.run()
    problem.check()


@pytest.mark.parametrize("hidden, rows", [(8, 5), (64, 128), (1032, 129)])
def test_matches_reference_at_other_hidden_sizes(hidden, rows):
    problem = Problem(small(hidden=hidden), 1, rows)
    problem.run()
    problem.check()


SPLIT = {
    "equal pieces": ({"sm_count": 12}, 1, 1),
    "shares across tiles": ({"sm_count": 7}, 1, 131),
    "then whole tiles": ({"sm_count": 4}, 3, 100),
    "pairs": ({"sm_count": 8, "tile_m": 256, "tile_n": 256}, 1, 300),
    "clusters": ({"sm_count": 12, "tile_m": 256, "tile_n": 128, "cluster_m": 2}, 1, 131),
}


@pytest.mark.parametrize("tuning, batch, seq", SPLIT.values(), ids=SPLIT)
def test_split_tiles_match_reference(tuning, batch, seq):
    problem = Problem(small(hidden=1032, tuning={"stream_k": True, **tuning}), batch, seq)
    problem.run()
    problem.check()


@pytest.mark.parametrize("tile_m", [128, 256])
def test_clusters_share_weights(tile_m):
    problem = Problem(small(tuning={"tile_m": tile_m, "cluster_m": 2, "sm_count": 8}), 1, 400)
    problem.run()
    problem.check()


def test_uneven_head_counts_fill_no_wide_tile():
    kernel = QKVProjection(64, 3, 3, tuning=GemmTuning(tile_n=256, sm_count=3))
    problem = Problem(kernel, 2, 33)
    problem.run()
    problem.check()


def test_norm_weights_near_minus_one_and_large():
    problem = Problem(small(), 1, 40)
    problem.norms = [(-1 + torch.arange(128) * 1e-2).bfloat16(), torch.full((128,), 30.0).bfloat16()]
    problem.run()
    problem.check()


def test_rows_of_zeros_stay_zero():
    problem = Problem(small(), 1, 40)
    problem.x[7] = 0
    problem.run()
    assert all(not out[7].any() for out in problem.outputs)


SPLIT_TUNING = {"stream_k": True, "sm_count": 7}


@pytest.mark.parametrize(
    "kernel",
    [small(tuning={"tile_m": 256, "tile_n": 256}), small(hidden=1032, tuning=SPLIT_TUNING)],
    ids=["pair", "split"],
)
def test_bit_identical_across_schedules_and_repetitions(kernel):
    results = []
    for schedule in ("lazy", "lazy", "eager", "random:1", "random:2"):
        problem = Problem(kernel, 1, 131)
        problem.run(schedule)
        results.append([out.view(torch.int16) for out in problem.outputs])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again))


def test_workspace_is_left_ready_for_the_next_launch():
    problem = Problem(small(hidden=1032, tuning=SPLIT_TUNING), 1, 131)
    problem.run()
    problem.outputs = [torch.full_like(out, math.nan) for out in problem.outputs]
    problem.run()
    problem.check()


@pytest.mark.parametrize(
    "head_dim, tuning, batch, seq",
    [
        (128, {"tile_m": 256, "tile_n": 256}, 3, 43),
        (256, {}, 2, 70),
        (128, {"stream_k": True, "sm_count": 5}, 3, 43),
    ],
)
def test_saves_what_the_backward_needs(head_dim, tuning, batch, seq):
    kernel = small(head_dim, hidden=456, save_for_backward=True, tuning=tuning)
    problem = Problem(kernel, batch, seq)
    problem.run()
    problem.check()
    for weight, normed, rstd in zip(problem.weights, problem.normed, problem.rstd):
        t = (problem.x.double() @ weight.double().T).bfloat16().double()
        t = t.view(batch, seq, -1, head_dim).transpose(1, 2)
        exact = torch.rsqrt(t.square().mean(-1, keepdim=True) + kernel.eps)
        # A projection that rounds to the other neighbour moves rstd by 2^-9 / D of itself.
        assert error(rstd, exact) <= 1e-5
        assert error(normed, t * exact) <= 2**-9


def cubins():
    """Kernels that differ in what the epilogue has to keep in registers; the tightest run by default."""
    wide, split = GemmTuning(256, 256), GemmTuning(256, 256, stream_k=True)
    tight = [
        QKVProjection(1152, 4, 1, tuning=wide),
        QKVProjection(1152, 4, 1, tuning=split),
        QKVProjection(1152, 4, 1, 256, tuning=wide),
        QKVProjection(1152, 4, 1, 256, tuning=GemmTuning(128, 256, stream_k=True)),
        QKVProjection(1152, 4, 1, save_for_backward=True, tuning=wide),
    ]
    others = [
        QKVProjection(
            1152, 4, 1, head_dim, save_for_backward=save, tuning=GemmTuning(tile_m, tile_n, stream_k=stream_k)
        )
        for head_dim, tile_n in ((128, 128), (128, 256), (256, 256))
        for tile_m in (128, 256)
        for stream_k in (False, True)
        for save in (False, True)
    ]
    others.append(QKVProjection(1152, 4, 1, 256, qk_norm=False, tuning=split))
    others.append(QKVProjection(1152, 4, 1, save_for_backward=True, tuning=GemmTuning(128, 128, cluster_m=2)))
    return tight + [pytest.param(kernel, marks=pytest.mark.slow) for kernel in others if kernel not in tight]


@pytest.mark.parametrize("kernel", cubins(), ids=repr)
def test_cubin_keeps_everything_in_registers(kernel):
    (report,) = jit.inspect(kernel, TARGET)
    assert (report.stack_bytes, report.local_loads, report.local_stores) == (0, 0, 0)
    assert report.count("UTCHMMA") == 4  # one a K=16 slice of a stage
    assert report.count("UTMALDG") > 0 and report.count("UTMASTG") > 0


@pytest.mark.parametrize("rows", [1, 128, 131, 256])
def test_default_tuning_splits_small_problems(rows):
    assert default_tuning(rows, 3072, 24, 8).stream_k


@pytest.mark.parametrize("rows", [2048, 4096, 8192, 8212])
def test_default_tuning_pairs_ctas_for_large_problems(rows):
    tuning = default_tuning(rows, 3072, 24, 8)
    assert (tuning.tile_m, tuning.tile_n) == (256, 256)


def test_default_tuning_suits_every_configuration():
    for rows in (1, 300, 5000):
        for heads, kv_heads, head_dim in ((24, 8, 128), (4, 1, 256), (16, 8, 256)):
            tuning = default_tuning(rows, 1152, heads, kv_heads, head_dim)
            assert QKVProjection(1152, heads, kv_heads, head_dim, tuning=tuning).stage_count >= 2


@pytest.mark.slow
@pytest.mark.parametrize("rows", [128, 131, 586, 1024])
def test_default_tuning_matches_reference_at_full_size(rows):
    problem = Problem(QKVProjection(3072, 24, 8, tuning=default_tuning(rows, 3072, 24, 8)), 1, rows)
    problem.run()
    problem.check()


@pytest.mark.parametrize(
    "change, name",
    [
        ({"hidden": 100}, "hidden"),
        ({"hidden": 0}, "hidden"),
        ({"head_dim": 96}, "head_dim"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"tuning": GemmTuning(tile_n=192)}, "tile_n"),
        ({"save_for_backward": True, "qk_norm": False}, "save_for_backward"),
    ],
)
def test_rejects_what_it_cannot_compute(change, name):
    with pytest.raises(ValueError, match=name):
        replace(QKVProjection(3072, 24, 8), **change)
