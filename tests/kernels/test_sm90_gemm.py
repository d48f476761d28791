"""The projections and the backward's gradients of sm_90a: tile shapes, edges, schedules, tuning, the
cubin."""

import math
import re
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass")

import test_qkv_grads
import test_qkv_proj

from cute_gemma import jit, reference
from cute_gemma.config import AttentionConfig
from cute_gemma.emulator import Options, engine
from cute_gemma.functional import attention_forward
from cute_gemma.functional_backward import plan_qkv_backward
from cute_gemma.kernels.common.qkv_grads import gradient_sections
from cute_gemma.kernels.common.schedule import Section
from cute_gemma.kernels.common.shared_rounds import plan_shared
from cute_gemma.kernels.sm90 import out_proj, qkv_grads, qkv_proj
from cute_gemma.kernels.sm90.out_proj import OutputProjection
from cute_gemma.kernels.sm90.qkv_grads import QkvGradients
from cute_gemma.kernels.sm90.qkv_proj import QKVProjection
from cute_gemma.kernels.sm90.tuning import EPILOGUE_CYCLES, SHARE_CYCLES, GemmTuning, block_cycles, gemm_cycles
from cute_gemma.workloads import case_for, check_output, suite_cases, workload

TARGET = "sm_90a"
SCHEDULES = ("lazy", "eager", "random:1", "random:2", "random:3")
SHAPES = [(128, 64), (128, 128), (128, 192), (128, 256), (256, 64), (256, 128)]


# ---- output projection
# ------------------------------------------------------------------------------------------


def project(kernel, rows, schedule="lazy"):
    """(result, float64 result) on random inputs; asserts that the counters are back at zero."""
    generator = torch.Generator().manual_seed(0)
    attn = torch.randn(rows, kernel.features, generator=generator).bfloat16()
    weight = torch.randn(kernel.hidden, kernel.features, generator=generator) / kernel.features**0.5
    weight = weight.bfloat16()
    out = torch.full((rows, kernel.hidden), math.nan, dtype=torch.bfloat16)
    tensors = [attn, weight, out]
    if kernel.tuning.stream_k:
        counters = torch.zeros(kernel.tuning.counters, dtype=torch.int32)
        tensors += [torch.full((kernel.tuning.partial_floats,), math.nan), counters]
    jit.launch(kernel, *tensors, target=TARGET, emulation=Options(schedule=schedule))
    assert not kernel.tuning.stream_k or not counters.any()
    return out, attn.double() @ weight.double().T


def assert_rounded_once(out, exact):
    """Every element was written, and is exact but for its rounding to bf16 and that of an fp32 sum."""
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("tile_m, tile_n", SHAPES)
def test_every_tile_shape(tile_m, tile_n):
    assert_rounded_once(*project(OutputProjection(456, 200, GemmTuning(tile_m, tile_n, sm_count=4)), 131))


@pytest.mark.parametrize("rows", [1, 128, 300])
def test_row_counts_around_a_tile(rows):
    assert_rounded_once(*project(OutputProjection(328, 192, GemmTuning(sm_count=4)), rows))


@pytest.mark.parametrize("hidden, features", [(8, 8), (136, 1032)])
def test_sizes_that_fill_no_tile(hidden, features):
    tuning = GemmTuning(128, 128, sm_count=6, cluster_m=2)
    assert_rounded_once(*project(OutputProjection(hidden, features, tuning), 70))


SPLIT = [
    GemmTuning(128, 64, stream_k=True, sm_count=23),
    GemmTuning(128, 128, stream_k=True, sm_count=5),
    GemmTuning(256, 128, stream_k=True, sm_count=6),
    GemmTuning(128, 256, stream_k=True, sm_count=6, cluster_m=2),
]


@pytest.mark.parametrize("tuning, rows", [*zip(SPLIT, (300, 1, 300, 300)), (SPLIT[1], 300)], ids=repr)
def test_split_tiles(tuning, rows):
    assert_rounded_once(*project(OutputProjection(328, 1032, tuning), rows))


@pytest.mark.parametrize("tuning", [GemmTuning(128, 64, stream_k=True, sm_count=23), SPLIT[1]], ids=repr)
def test_split_tiles_are_bit_identical_across_schedules(tuning):
    kernel = OutputProjection(328, 1032, tuning)
    first, *others = [project(kernel, 131, schedule)[0].view(torch.int16) for schedule in SCHEDULES]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("tile_m, tile_n, rows", [(128, 64, 1), (128, 256, 300), (256, 128, 300)])
def test_tiles_that_two_ctas_share(tile_m, tile_n, rows):
    """A few tiles that only clusters work on, or whole ones and a last round of shared ones."""
    tuning = GemmTuning(tile_m, tile_n, share=2, sm_count=4)
    assert_rounded_once(*project(OutputProjection(328, 1032, tuning), rows))


def test_shared_tiles_are_bit_identical_across_schedules():
    kernel = OutputProjection(328, 1032, GemmTuning(128, 128, share=2, sm_count=8))
    first, *others = [project(kernel, 131, schedule)[0].view(torch.int16) for schedule in SCHEDULES]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("tiles", [1, 2, 5, 9, 10, 11, 15, 16, 29])
@pytest.mark.parametrize("clusters", [1, 5])
def test_every_tile_is_dealt_once_with_all_of_its_blocks(tiles, clusters):
    schedule = plan_shared((Section(1, tiles, 7),), clusters, 2, 8)
    assert schedule.workers % 2 == 0 and schedule.workers <= 2 * clusters
    dealt = {}
    for worker in range(schedule.workers):
        units = [schedule.unit(worker, index) for index in range(schedule.unit_count(worker))]
        assert all(unit.pieces == 1 for unit in units[:-1])
        for unit in units:
            dealt.setdefault(unit.tile, []).append((unit.k_begin, unit.k_end))
    assert sorted(dealt) == list(range(tiles))
    assert all(sorted(pieces) in ([(0, 7)], [(0, 3), (3, 7)]) for pieces in dealt.values())


@pytest.mark.parametrize("stages", [2])
def test_few_stages(stages):
    assert_rounded_once(*project(OutputProjection(328, 1032, GemmTuning(stages=stages, sm_count=4)), 131))


# ---- QKV projection
# ---------------------------------------------------------------------------------------------


class Projections(test_qkv_proj.Problem):
    """The problem of the other architecture's tests, run here."""

    def run(self, schedule="lazy"):
        k = self.kernel
        tensors = [self.x, *self.weights, self.cos, self.sin, *self.outputs]
        tensors += self.norms if k.qk_norm else []
        tensors += [*self.normed, *self.rstd] if k.save_for_backward else []
        tensors += [self.partials, self.counters] if k.tuning.stream_k else []
        jit.launch(k, *tensors, target=TARGET, emulation=Options(schedule=schedule))


def small(head_dim=128, hidden=200, tile_n=None, **settings):
    tuning = GemmTuning(tile_n=tile_n or head_dim, **{"sm_count": 6, **settings.pop("tuning", {})})
    return QKVProjection(hidden, 3 if head_dim == 128 else 2, 1, head_dim, tuning=tuning, **settings)


@pytest.mark.parametrize("rows", [1, 131, 300])
@pytest.mark.parametrize("tile_n", [128, 256])
def test_projections_match_reference_at_odd_lengths(rows, tile_n):
    problem = Projections(small(tile_n=tile_n), 1, rows)
    problem.run()
    problem.check()


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_projections_match_reference_with_and_without_norm(head_dim, qk_norm):
    problem = Projections(small(head_dim, tile_n=256, qk_norm=qk_norm), 1, 70)
    problem.run()
    problem.check()


@pytest.mark.parametrize(
    "tuning, seq",
    [
        ({"sm_count": 12}, 1),
        ({"sm_count": 7}, 131),
        ({"sm_count": 4}, 300),
        ({"sm_count": 12, "cluster_m": 2}, 300),
    ],
    ids=["equal pieces", "shares across tiles", "then whole tiles", "clusters"],
)
def test_projections_of_split_tiles_match_reference(tuning, seq):
    problem = Projections(small(hidden=1032, tuning={"stream_k": True, **tuning}), 1, seq)
    problem.run()
    problem.check()


@pytest.mark.parametrize("tile_n, seq", [(128, 1), (256, 131), (128, 300)])
def test_projections_of_shared_tiles_match_reference(tile_n, seq):
    problem = Projections(small(tile_n=tile_n, tuning={"share": 2, "sm_count": 8}), 1, seq)
    problem.run()
    problem.check()


@pytest.mark.parametrize(
    "head_dim, tile_n, stream_k", [(128, 256, False), (256, 256, False), (128, 128, True)]
)
def test_projections_save_what_the_backward_needs(head_dim, tile_n, stream_k):
    tuning = {"stream_k": stream_k, "sm_count": 5}
    kernel = small(head_dim, 456, tile_n, save_for_backward=True, tuning=tuning)
    problem = Projections(kernel, 3, 43)
    problem.run()
    problem.check()
    for weight, normed, rstd in zip(problem.weights, problem.normed, problem.rstd):
        t = (problem.x.double() @ weight.double().T).bfloat16().double()
        t = t.view(3, 43, -1, head_dim).transpose(1, 2)
        exact = torch.rsqrt(t.square().mean(-1, keepdim=True) + kernel.eps)
        # A projection that rounds to the other neighbour moves rstd by 2^-9 / D of itself.
        assert test_qkv_proj.error(rstd, exact) <= 1e-5
        assert test_qkv_proj.error(normed, t * exact) <= 2**-9


# ---- gradients
# --------------------------------------------------------------------------------------------------


@dataclass
class Gradients(test_qkv_grads.Problem):
    """The problem of the other architecture's tests, run here."""

    def run(self, schedule="lazy", hazards=True):
        inputs = (*self.grads, self.hidden, *self.weights, self.partials)
        outputs = [self.grad_hidden, *self.grad_weights, *self.grad_norms]
        tuning = self.kernel.tuning
        if tuning.stream_k:
            outputs.append(torch.full((tuning.partial_floats,), math.nan))
            outputs.append(torch.zeros(tuning.counters, dtype=torch.int32))
        options = Options(schedule=schedule, hazards=hazards)
        jit.launch(self.kernel, *inputs, *outputs, target=TARGET, emulation=options)


@pytest.mark.parametrize("tile_m, tile_n", [(128, 64), (128, 128), (128, 256), (256, 128)])
def test_gradients_of_every_tile_shape(tile_m, tile_n):
    problem = Gradients(QkvGradients(640, 4, 1, 256, GemmTuning(tile_m, tile_n)), 1, 131)
    problem.run()
    problem.check()


@pytest.mark.parametrize("batch, seq", [(1, 1), (3, 43), (5, 3)])
@pytest.mark.parametrize(
    "tuning",
    [GemmTuning(256, 128), GemmTuning(128, 128, cluster_m=2), GemmTuning(128, 64, stream_k=True)],
    ids=repr,
)
def test_gradients_of_sizes_that_fill_no_tile(batch, seq, tuning):
    problem = Gradients(QkvGradients(200, 3, 1, 128, tuning), batch, seq)
    problem.run()
    problem.check()


@pytest.mark.parametrize(
    "tuning",
    [GemmTuning(128, 128, stream_k=True, sm_count=11), GemmTuning(256, 128, stream_k=True, sm_count=5)],
    ids=repr,
)
def test_gradients_of_split_tiles_are_bit_identical_across_schedules(tuning):
    results = []
    for schedule in SCHEDULES:
        problem = Gradients(QkvGradients(136, 2, 1, 128, tuning), 2, 70)
        problem.run(schedule)
        results.append([t.view(torch.uint8) for t in problem.results()])
    problem.check()
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


# (hidden, tuning, batch, seq, tiles that are shared). 640 columns make 5 blocks of wgrad's rows.
SHARED = [
    (104, GemmTuning(128, 128, share=2, sm_count=4), 1, 131, 2),  # a worker of a cluster has a wgrad tile more
    (104, GemmTuning(128, 128, share=2, sm_count=4), 3, 143, 2),  # after a round of whole tiles
    (136, GemmTuning(128, 64, share=2, sm_count=8), 1, 1, 3),
    (136, GemmTuning(128, 64, share=2, sm_count=8), 2, 300, 1),  # after a whole one in place of a wgrad tile
    (200, GemmTuning(128, 128, share=2, sm_count=20), 2, 70, 4),  # workers without any other tile
    (200, GemmTuning(256, 128, share=2, sm_count=4), 3, 143, 2),
    (104, GemmTuning(128, 128, share=2, sm_count=4), 3, 43, 0),  # too many
]


@pytest.mark.parametrize("hidden, tuning, batch, seq, shared", SHARED, ids=repr)
def test_gradients_of_shared_tiles(hidden, tuning, batch, seq, shared):
    sections = gradient_sections(batch, seq, hidden, 640, tuning)
    assert qkv_grads.plan_gradients(sections, tuning).split_tiles == shared
    problem = Gradients(QkvGradients(hidden, 3, 1, 128, tuning), batch, seq)
    problem.run()
    problem.check()


@pytest.mark.parametrize("hidden, tuning, batch, seq, shared", [SHARED[1], SHARED[3]], ids=repr)
def test_gradients_of_shared_tiles_are_bit_identical_across_schedules(
    hidden, tuning, batch, seq, shared, monkeypatch
):
    # Some registers stay unwritten on paths that never run.
    monkeypatch.setattr(engine, "_check_registers", lambda *_: None)
    results = []
    for schedule in SCHEDULES:
        problem = Gradients(QkvGradients(hidden, 3, 1, 128, tuning), batch, seq)
        problem.run(schedule, hazards="strict")
        results.append([t.view(torch.uint8) for t in problem.results()])
    problem.check()
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


# ---- tuning and code
# --------------------------------------------------------------------------------------------


def kernels():
    """Every kind of kernel in every tile shape and schedule it takes."""
    for tile_m, tile_n in SHAPES:
        for way in ({}, {"stream_k": True}, {"cluster_m": 2}, {"cluster_m": 2, "stream_k": True}, {"share": 2}):
            tuning = GemmTuning(tile_m, tile_n, **way)
            yield OutputProjection(3072, 3072, tuning)
            for head_dim in (128, 256):
                if not (tuning.stream_k and tile_m == 256 and (tile_n == 64 or tuning.cluster_m == 2)):
                    yield QkvGradients(640, 4, 1, head_dim, tuning)
                if tile_m == 128 and tile_n % head_dim == 0:
                    yield QKVProjection(3072, 24, 8, head_dim, tuning=tuning)
                    if not qkv_proj.saving_spills(tuning):
                        yield QKVProjection(3072, 24, 8, head_dim, tuning=tuning, save_for_backward=True)


def test_tunings_that_want_more_registers_than_there_are_get_refused():
    for tuning in (GemmTuning(128, 256, stream_k=True), GemmTuning(128, 256, share=2)):
        for head_dim in (128, 256):
            QKVProjection(3072, 24, 8, head_dim, tuning=tuning)
            with pytest.raises(ValueError, match="tuning: got tile_n 256, .* expected with save_for_backward neither"):
                QKVProjection(3072, 24, 8, head_dim, tuning=tuning, save_for_backward=True)
    for spilling in (GemmTuning(256, 64, stream_k=True), GemmTuning(256, 128, stream_k=True, cluster_m=2)):
        with pytest.raises(ValueError, match="tuning: got stream_k with 256 x .* expected tile_m 128, or tile_n 128"):
            QkvGradients(640, 4, 1, 256, spilling)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_default_tunings_fit_what_is_saved_for_the_backward(head_dim):
    plain, saving = (
        {qkv_proj.default_tuning(rows, 3072, 24, 8, head_dim, save_for_backward=save) for rows in range(1, 8193, 128)}
        for save in (False, True)
    )
    assert any(map(qkv_proj.saving_spills, plain)) and not any(map(qkv_proj.saving_spills, saving))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", list(kernels()), ids=lambda k: f"{type(k).__name__} {k.tuning}")
def test_cubin_keeps_everything_in_registers(kernel):
    assert_in_registers(kernel)


@pytest.mark.parametrize("rows", [1, 128, 586, 1024, 8192])
def test_default_tunings_keep_everything_in_registers(rows):
    assert_in_registers(OutputProjection(3072, 3072, out_proj.default_tuning(rows, 3072, 3072)))
    tuning = qkv_proj.default_tuning(rows, 3072, 24, 8)
    assert_in_registers(QKVProjection(3072, 24, 8, tuning=tuning))
    tuning = qkv_grads.default_tuning(1, rows, 640, 6, 256)
    assert_in_registers(QkvGradients(640, 4, 1, 256, tuning))


@pytest.mark.parametrize(
    "kernel, weights",
    [
        (OutputProjection(328, 1032, GemmTuning(128, 128, share=2)), 1),
        (OutputProjection(328, 1032, GemmTuning(128, 128, cluster_m=2)), 1),
        (QKVProjection(264, 2, 1, tuning=GemmTuning(128, 128)), 3),
        (QkvGradients(200, 2, 1, 256, GemmTuning(128, 128)), 0),
    ],
    ids=lambda x: f"{type(x).__name__} {x.tuning}" if hasattr(x, "tuning") else None,
)
def test_weights_of_the_projections_alone_are_read_evict_first(kernel, weights):
    """In each of the loops over k blocks."""
    (report,) = jit.inspect(kernel, TARGET)
    ptx = report.ptx_path.read_text()
    policies = re.findall(r"createpolicy\.fractional\.L2::evict_first\.b64\s+(%rd\d+);", ptx)
    loads = re.findall(r"cp\.async\.bulk\.tensor\S*global\S*complete_tx\S*L2::cache_hint [^;]*, (%rd\d+);", ptx)
    assert len(policies) == bool(weights) and loads
    assert sum(policy in policies for policy in loads) * (weights + 1) == len(loads) * weights


@pytest.mark.parametrize("rows", [1, 8192])
def test_default_tunings_of_wide_heads_keep_everything_in_registers(rows):
    tuning = qkv_proj.default_tuning(rows, 640, 4, 1, 256)
    assert_in_registers(QKVProjection(640, 4, 1, 256, tuning=tuning))


def assert_in_registers(kernel):
    (report,) = jit.inspect(kernel, TARGET)
    assert (report.stack_bytes, report.local_loads, report.local_stores) == (0, 0, 0)
    # Of each K=16 slice of a stage, for each 64 rows; the first blocks of a unit apart from the others.
    per_block, places = 4 * kernel.tuning.tile_m // 128, 3 if kernel.defers else 2
    assert report.count("HGMMA") == places * per_block * len(kernel.operand_majors)
    # The assembler did not have to add waits after each of them.
    assert report.count("WARPGROUP.DEPBAR") == places * len(kernel.operand_majors)
    assert report.count("STSM") > 0 and report.count("UTMASTG") > 0


@pytest.mark.parametrize("rows", [1, 128, 131, 586, 1024, 4096, 8212])
def test_default_tuning_is_no_slower_by_its_own_count_than_any_other(rows):
    chosen = gemm_cycles(out_proj.default_tuning(rows, 3072, 3072), rows, (3072,), 3072)
    for tile_n in (192, 256):
        for way in ({}, {"stream_k": True}, {"share": 2}, {"cluster_m": 2}):
            assert chosen <= gemm_cycles(GemmTuning(128, tile_n, **way), rows, (3072,), 3072)


def test_default_tuning_lets_clusters_share_the_tiles_of_few_rows():
    assert qkv_proj.default_tuning(128, 3072, 24, 8).share == 2
    assert out_proj.default_tuning(128, 3072, 3072).share == 2


@pytest.mark.parametrize("case", suite_cases("051"), ids=lambda c: f"{c.batch_size}x{c.seq_len}")
def test_default_tuning_of_gradients_fits_shared_memory(case):
    tuning = qkv_grads.default_tuning(case.batch_size, case.seq_len, 640, 6, 256)
    assert QkvGradients(640, 4, 1, 256, tuning).stage_count >= 4


@pytest.mark.parametrize("rows", [1, 131, 256, 512, 1024, 2048, 3000, 4096, 8656])
@pytest.mark.parametrize("way", [{"tile_n": 64}, {"cluster_m": 2}, {"share": 2}, {"share": 2, "sm_count": 7}], ids=repr)
def test_busiest_worker_of_gradients_is_counted_exactly(rows, way):
    tuning = GemmTuning(**way)
    sections = gradient_sections(1, rows, 640, 1536, tuning)
    schedule, ends = qkv_grads.plan_gradients(sections, tuning), []
    block = block_cycles(tuning) * (qkv_grads.MULTICAST if tuning.cluster_m > 1 else 1)
    for worker in range(schedule.workers):
        units = [schedule.unit(worker, index) for index in range(schedule.unit_count(worker))]
        blocks = sum(int(unit.k_end) - int(unit.k_begin) for unit in units)
        shared = sum(tuning.share > 1 and unit.pieces > 1 for unit in units)
        ends.append(blocks * block + len(units) * EPILOGUE_CYCLES * tuning.tile_n + shared * SHARE_CYCLES)
    assert qkv_grads.busiest_cycles(tuning, sections) == pytest.approx(max(ends))


@pytest.mark.parametrize("batch, seq, share", [(8, 256, 2), (1, 4096, 2), (32, 128, 2), (1, 8192, 1), (1, 1024, 1)])
def test_default_tuning_of_gradients_shares_tiles_where_few_are_left_over(batch, seq, share):
    assert qkv_grads.default_tuning(batch, seq, 640, 6, 256).share == share


def test_default_tuning_of_gradients_for_one_multiprocessor():
    assert qkv_grads.default_tuning(1, 300, 640, 6, 256, 1).cluster == 1


@pytest.mark.parametrize(
    "field, value",
    [
        ("tile_m", 64),
        ("tile_n", 96),
        ("tile_n", 320),
        ("stages", 1),
        ("sm_count", 0),
        ("group_m", 0),
        ("cluster_m", 3),
        ("share", 3),
    ],
)
def test_tuning_rejects_impossible_shapes(field, value):
    with pytest.raises(ValueError, match=field):
        GemmTuning(**{field: value})


def test_accumulators_that_leave_no_registers_are_refused():
    with pytest.raises(ValueError, match="tile_n: 256"):
        GemmTuning(256, 256)


def test_too_many_stages_are_refused():
    with pytest.raises(ValueError, match="stages: 9"):
        OutputProjection(328, 192, GemmTuning(128, 256, stages=9)).stage_count


# ---- the whole passes -------------------------------------------------------------------------------------------


def test_forward_pass_matches_reference():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    config = AttentionConfig(hidden=200, heads=2, kv_heads=1)
    weights = [draw(rows, 200, scale=200**-0.5) for rows in (256, 128, 128)]
    inputs = [draw(2, 70, 200), draw(2, 70, 128), draw(2, 70, 128), "causal", *weights]
    inputs += [draw(200, 256, scale=1 / 16), draw(128, scale=0.1), draw(128, scale=0.1)]
    out = attention_forward(*inputs, target=TARGET)
    exact, eager = (
        reference.forward_stages(*(t if isinstance(t, str) else t.to(dtype) for t in inputs), config).output
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert test_qkv_proj.error(out, exact) <= 1.25 * test_qkv_proj.error(eager, exact)


@pytest.mark.parametrize("batch, seq", [(1, 131), (4, 128)])
def test_backward_pass_keeps_both_pass_rules(batch, seq):
    problem, case = workload("051"), case_for("051", batch, seq)
    inputs = problem.make_inputs("realistic", batch, seq, 0, problem.config)
    plan = plan_qkv_backward(**inputs.tensors(), target=TARGET)
    plan.poison()
    plan.run()
    eager = problem.reference(inputs, problem.config)
    exact = problem.reference(inputs.to(torch.float64), problem.config)
    for name in problem.outputs:
        out, rounded, wanted = (getattr(results, name) for results in (plan.output, eager, exact))
        check = check_output(name, out, rounded, wanted, case.max_atol, case.max_rtol)
        assert check.suite_pass and check.project_pass, check
