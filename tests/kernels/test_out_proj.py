"""The output projection of sm_100a against float64: tile shapes, edges, schedules, tuning, the cubin."""

import math

import pytest
import torch

pytest.importorskip("cutlass")

from cute_gemma import jit
from cute_gemma.emulator import Options
from cute_gemma.kernels.sm100.out_proj import OutputProjection, default_tuning
from cute_gemma.kernels.sm100.tuning import GemmTuning, gemm_cycles

TARGET = "sm_100a"


def run(kernel, rows, schedule="lazy", seed=0):
    """(result, float64 result) on random inputs; asserts that the counters are back at zero."""
    generator = torch.Generator().manual_seed(seed)
    attn = torch.randn(rows, kernel.features, generator=generator).bfloat16()
    weight = (
        torch.randn(kernel.hidden, kernel.features, generator=generator) / kernel.features**0.5
    ).bfloat16()
    out = torch.full((rows, kernel.hidden), math.nan, dtype=torch.bfloat16)
    tensors = [attn, weight, out]
    if kernel.tuning.stream_k:
        counters = torch.zeros(kernel.tuning.counters, dtype=torch.int32)
        tensors += [torch.full((kernel.tuning.partial_floats,), math.nan), counters]
    jit.launch(kernel, *tensors, target=TARGET, emulation=Options(schedule=schedule))
    assert not kernel.tuning.stream_k or not counters.any()
    return out, attn.double() @ weight.double().T


def assert_close(out, exact):
    """Every element was written, and is exact but for its rounding to bf16 and that of an fp32 sum."""
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("tile_n", [64, 128, 192, 256])
@pytest.mark.parametrize("tile_m", [128, 256])
def test_every_tile_shape(tile_m, tile_n):
    assert_close(*run(OutputProjection(456, 200, GemmTuning(tile_m, tile_n, sm_count=4)), 131))


@pytest.mark.parametrize("rows", [1, 32, 127, 128, 129, 300])
def test_row_counts_around_a_tile(rows):
    assert_close(*run(OutputProjection(328, 192, GemmTuning(sm_count=4)), rows))


@pytest.mark.parametrize("hidden, features", [(8, 8), (128, 64), (136, 1032), (1160, 72)])
def test_sizes_that_fill_no_tile(hidden, features):
    assert_close(*run(OutputProjection(hidden, features, GemmTuning(256, 128, sm_count=6)), 70))


@pytest.mark.parametrize(
    "tuning",
    [
        GemmTuning(128, 64, stream_k=True, sm_count=23),
        GemmTuning(128, 128, stream_k=True, sm_count=5),
        GemmTuning(256, 256, stream_k=True, sm_count=6),
        GemmTuning(128, 128, stream_k=True, sm_count=6, cluster_m=2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("rows", [1, 300])
def test_split_tiles(tuning, rows):
    assert_close(*run(OutputProjection(328, 1032, tuning), rows))


@pytest.mark.parametrize("stages", [2, 3])
def test_few_stages(stages):
    assert_close(*run(OutputProjection(328, 1032, GemmTuning(stages=stages, sm_count=4)), 131))


@pytest.mark.parametrize("stream_k", [False, True])
def test_bit_identical_across_schedules(stream_k):
    kernel = OutputProjection(328, 1032, GemmTuning(256, 128, stream_k=stream_k, sm_count=6))
    results = [
        run(kernel, 131, schedule)[0] for schedule in ("lazy", "eager", "random:1", "random:2", "random:3")
    ]
    for other in results[1:]:
        assert torch.equal(results[0].view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("stream_k", [False, True])
@pytest.mark.parametrize("tile_n", [64, 128, 192, 256])
@pytest.mark.parametrize("tile_m", [128, 256])
def test_cubin_keeps_everything_in_registers(tile_m, tile_n, stream_k):
    (report,) = jit.inspect(
        OutputProjection(3072, 3072, GemmTuning(tile_m, tile_n, stream_k=stream_k)), TARGET
    )
    assert (report.stack_bytes, report.local_loads, report.local_stores) == (0, 0, 0)
    assert report.count("UTCHMMA") == 4  # one a K=16 slice of a stage
    assert report.count("UTMALDG") > 0 and report.count("UTMASTG") > 0


@pytest.mark.parametrize("rows", [1, 128, 131, 256, 512, 1024, 4096, 8212])
def test_default_tuning_is_no_slower_by_its_own_count_than_any_other(rows):
    chosen = default_tuning(rows, 3072, 3072)
    count = gemm_cycles(chosen, rows, (3072,), 3072)
    for tile_m in (128, 256):
        for tile_n in (64, 128, 256):
            for stream_k in (False, True):
                assert count <= gemm_cycles(
                    GemmTuning(tile_m, tile_n, stream_k=stream_k), rows, (3072,), 3072
                )


def test_default_tuning_splits_small_problems():
    assert all(default_tuning(rows, 3072, 3072).stream_k for rows in (1, 128, 256))


@pytest.mark.parametrize("field, value", [("hidden", 12), ("features", 0), ("hidden", -8)])
def test_rejects_sizes_tma_cannot_address(field, value):
    with pytest.raises(ValueError, match=field):
        OutputProjection(**{"hidden": 328, "features": 192, field: value})


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
    ],
)
def test_tuning_rejects_impossible_shapes(field, value):
    with pytest.raises(ValueError, match=field):
        GemmTuning(**{field: value})


def test_too_many_stages_are_refused():
    with pytest.raises(ValueError, match="stages: 9"):
        OutputProjection(328, 192, GemmTuning(256, 256, stages=9)).stage_count
