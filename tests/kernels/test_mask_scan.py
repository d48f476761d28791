"""The mask pre-pass: tile classes and row maxima."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import LOWEST, TARGET, block_diagonal, causal, masks, scan

from cute_gemma import emulator, functional, jit
from cute_gemma.emulator import engine
from cute_gemma.kernels.common.mask import (
    ALL_MASKED,
    ALL_ZERO,
    DIAGONAL,
    MASK_TILE,
    MASKED_AT_OR_BELOW,
    MIXED,
    SCAN_COLUMNS,
)
from cute_gemma.kernels.common.mask_scan import MaskScan


def expected_classes(mask):
    batch, seq = mask.shape[0], mask.shape[-1]
    tiles = math.ceil(seq / MASK_TILE)
    masked = mask[:, 0] <= MASKED_AT_OR_BELOW
    zero = mask[:, 0] == 0
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    diagonal = (masked & hidden) | (zero & ~hidden)
    classes = torch.full((batch, tiles, tiles), MIXED, dtype=torch.uint8)
    for b in range(batch):
        for i in range(tiles):
            for j in range(tiles):
                cut = (b, *(slice(t * MASK_TILE, (t + 1) * MASK_TILE) for t in (i, j)))
                if zero[cut].all():
                    classes[b, i, j] = ALL_ZERO
                elif masked[cut].all():
                    classes[b, i, j] = ALL_MASKED
                elif i == j and diagonal[cut].all():
                    classes[b, i, j] = DIAGONAL
    return classes


def check(mask):
    row_max, classes = scan(mask)
    assert torch.equal(classes, expected_classes(mask))
    entries = mask[:, 0].float()
    entries = entries.masked_fill(entries <= MASKED_AT_OR_BELOW, -math.inf)
    parts = [part.amax(-1) for part in entries.split(SCAN_COLUMNS, dim=-1)]
    assert torch.equal(row_max, torch.stack(parts, 1))


@pytest.mark.parametrize("name", masks(1))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_classes_and_maxima(name, dtype):
    for seq in (131, 257):
        check(masks(seq, batch=2)[name].to(dtype))


@pytest.mark.parametrize("seq", [1, 2, 127, 128, 129])
def test_short_and_odd_lengths(seq):
    for name in ("causal", "random", "all masked"):
        check(masks(seq)[name].bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_columns_than_one_maximum_covers(dtype):
    check(block_diagonal(SCAN_COLUMNS + 3).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_columns_off_the_diagonal(dtype):
    """Rows from 1024 on see the first 1024 columns whole: there each kind of tile, and single entries that
    differ."""
    seq = SCAN_COLUMNS + 130
    mask = torch.zeros(1, 1, seq, seq)
    mask[..., SCAN_COLUMNS:, :128] = LOWEST
    mask[..., SCAN_COLUMNS:, 128:256] = -math.inf
    mask[..., SCAN_COLUMNS:, 256:384] = -0.0
    mask[..., SCAN_COLUMNS:, 384:512] = -3.5
    mask[..., SCAN_COLUMNS + 7, 600] = 2.0
    mask[..., SCAN_COLUMNS + 129, 200] = 0.0
    mask[..., SCAN_COLUMNS + 50, :] = LOWEST
    check(mask.to(dtype))
    mask[..., SCAN_COLUMNS + 60, 700] = math.nan
    row_max, classes = scan(mask.to(dtype))
    assert classes[0, 8, 5] == MIXED
    assert row_max[0, 0].isnan().nonzero().tolist() == [[SCAN_COLUMNS + 60]]


def test_a_single_entry_changes_the_class_of_its_tile_alone():
    changes = ((0, 0, 1.0), (130, 3, LOWEST), (200, 255, 0.0), (255, 255, -0.25), (3, 200, 0.0))
    for row, column, value in changes:
        mask = causal(256)
        mask[0, 0, row, column] = value
        check(mask.bfloat16())
        _, classes = scan(mask.bfloat16())
        _, before = scan(causal(256).bfloat16())
        changed = (classes != before).nonzero().tolist()
        assert changed in ([[0, row // 128, column // 128]], []), "another tile changed"


def test_the_boundary_of_masked_and_negative_zero():
    below = torch.nextafter(torch.tensor(MASKED_AT_OR_BELOW), torch.tensor(0.0))
    classes_of = {MASKED_AT_OR_BELOW: ALL_MASKED, -math.inf: ALL_MASKED, below.item(): MIXED, -0.0: ALL_ZERO}
    for value, kind in classes_of.items():
        _, classes = scan(torch.full((1, 1, 130, 130), value))
        assert (classes == kind).all()


def test_a_nan_is_neither_zero_nor_masked():
    mask = causal(130).bfloat16()
    mask[0, 0, 5, 100] = math.nan
    row_max, classes = scan(mask)
    assert classes.tolist() == [[[MIXED, ALL_MASKED], [ALL_ZERO, DIAGONAL]]]
    assert row_max[0, 0].isnan().nonzero().tolist() == [[5]]


# ---- the order of launches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True])
def test_an_early_scan_of_a_mask_that_the_launch_before_writes_is_a_race(early):
    written = torch.ones(64)  # row maxima of one scan, mask of the next
    classes = torch.full((1, 1, 1), 99, dtype=torch.uint8)
    with emulator.stream():
        first = torch.zeros(1, 1, 64, 64), written.view(1, 1, 64), classes.clone()
        jit.launch(MaskScan("f32"), *first, target=TARGET, backend="emulator")
        second = MaskScan("f32", early), written.view(1, 1, 8, 8), torch.empty(1, 1, 8), classes
        if early:
            race = "reads .* which the launch before wrote"
            with pytest.raises(emulator.ProgrammaticLaunchError, match=race):
                jit.launch(*second, target=TARGET, backend="emulator")
        else:
            jit.launch(*second, target=TARGET, backend="emulator")
            assert classes.item() == ALL_ZERO


@pytest.mark.parametrize("target", ["sm_100a", "sm_90a"])
def test_attention_relies_on_what_the_scan_waits_for(target):
    """The scan does not use what the projection writes, and still waits for it, at its end."""
    seq, hidden = 131, 64
    shapes = {"q_proj_weight": (128, hidden), "k_proj_weight": (128, hidden), "v_proj_weight": (128, hidden),
              "o_proj_weight": (hidden, 128), "q_norm_weight": (128,), "k_norm_weight": (128,),
              "hidden_states": (1, seq, hidden), "cos": (1, seq, 128), "sin": (1, seq, 128),
              "attention_mask": (1, 1, seq, seq)}  # fmt: skip
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    plan = functional.plan_attention_forward(**tensors, target=target)
    stages = ["qkv projection", "mask scan", "attention", "output projection"]
    assert [step.stage for step in plan.steps] == stages

    def run(change):
        previous = None
        for step in plan.steps:
            (launch,) = plan.capture(step)
            if step.stage == "mask scan":
                launch = replace(launch, ptx=change(launch.ptx))
            regions = [engine.region_of(t) for t in step.tensors.values()]
            before = previous if launch.programmatic else None
            previous = emulator.run_launch(launch, regions, previous=before)

    run(lambda ptx: ptx)
    race = "which an earlier launch wrote: it may still run"
    with pytest.raises(emulator.ProgrammaticLaunchError, match=race):
        run(lambda ptx: ptx.replace("griddepcontrol.wait;", ""))


def test_dtypes_are_checked():
    with pytest.raises(ValueError, match="mask_dtype: got 'f16'"):
        MaskScan("f16")


@pytest.mark.parametrize("target", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_no_stack_and_no_local_memory(dtype, early, target):
    (report,) = jit.inspect(MaskScan(dtype, early), target)
    assert report.stack_bytes == 0 and report.local_loads == 0 and report.local_stores == 0
    assert report.registers <= 64, "two CTAs of 512 threads an SM"
