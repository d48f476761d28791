"""The cubins that are launched: no stack, no local memory, tensor cores and TMA in use."""

import pytest

from cute_gemma import AttentionConfig, jit, preset
from cute_gemma.kernels.registry import backward_kernels, forward_kernels
from cute_gemma.plans_backward import BackwardSizes
from cute_gemma.tile_cost import interior_tile_cost
from cute_gemma.workloads import suite_cases

TARGET = "sm_100a"
CONFIG = preset("047")
UNCAPPED = AttentionConfig(softcap=None)
ROWS = sorted({case.batch_size * case.seq_len for case in suite_cases("047")} | {1, 131})
MASKS = ("causal", "none", "bf16", "f32")


def _kernels():
    """Every kernel that some suite case or mask asks for, once, with a name."""
    kernels = forward_kernels(TARGET)
    distinct = {}
    for rows in ROWS:
        distinct.setdefault(kernels.qkv_projection(CONFIG, rows), f"qkv_projection-{rows}")
        distinct.setdefault(kernels.output_projection(CONFIG, rows), f"output_projection-{rows}")
    for mask in MASKS:
        for seq in (128, 8192):
            distinct.setdefault(kernels.attention(CONFIG, mask, 1, seq), f"attention-{mask}-{seq}")
            distinct.setdefault(kernels.attention(UNCAPPED, mask, 1, seq), f"attention-{mask}-{seq}-uncapped")
    for mask in MASKS[2:]:
        for early in (False, True):
            distinct.setdefault(kernels.mask_scan(mask, early), f"mask_scan-{mask}-{early}")
    return [pytest.param(kernel, id=name) for kernel, name in distinct.items()]


@pytest.mark.parametrize("kernel", _kernels())
def test_nothing_spills_and_the_tensor_cores_are_used(kernel):
    compiled = jit.compile(kernel, TARGET)
    assert compiled.ptxas_version[0] >= 13
    (report,) = jit.inspect(compiled)
    assert report.cubin_path.read_bytes() in compiled.object_code  # what is launched, not a rebuilt one
    assert report.stack_bytes == 0
    assert report.local_loads == report.local_stores == 0
    if "MaskScan" not in type(kernel).__name__:
        assert report.count("UTCHMMA") > 0
        assert report.count("UTMALDG") > 0
        assert 0 < report.tmem_columns <= 512


def _hopper_kernels():
    """What the suite's cases of both workloads launch on sm_90a besides attention, once, with a name."""
    forward, backward = forward_kernels("sm_90a"), backward_kernels("sm_90a")
    distinct = {}
    for rows in ROWS:
        distinct.setdefault(forward.qkv_projection(CONFIG, rows), f"qkv_projection-{rows}")
        distinct.setdefault(forward.output_projection(CONFIG, rows), f"output_projection-{rows}")
    config = preset("051")
    for case in suite_cases("051"):
        sizes = BackwardSizes(
            case.batch_size, case.seq_len, config.hidden, config.heads, config.kv_heads, config.head_dim
        )
        norm = backward.norm_backward(sizes)
        distinct.setdefault(norm, f"norm_backward-{case.batch_size}x{case.seq_len}")
        distinct.setdefault(backward.gradients(sizes, norm), f"gradients-{case.batch_size}x{case.seq_len}")
    return [pytest.param(kernel, id=name) for kernel, name in distinct.items()]


@pytest.mark.parametrize("kernel", _hopper_kernels())
def test_nothing_spills_on_sm_90a_and_products_stay_in_flight(kernel):
    (report,) = jit.inspect(kernel, "sm_90a")
    assert report.stack_bytes == report.local_loads == report.local_stores == 0
    if report.count("HGMMA"):
        assert report.registers <= 168 and report.count("WARPGROUP") < report.count("HGMMA")


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_rope_backward_spills_nothing(target, head_dim):
    (report,) = jit.inspect(backward_kernels(target).rope_backward(4, 1, head_dim), target)
    assert report.stack_bytes == report.local_loads == report.local_stores == 0


def test_an_interior_tile_costs_what_the_design_allows():
    """Over all warps; register moves do not count, special-function operations are those of a logit."""
    cost = interior_tile_cost("suite", TARGET)
    assert cost.instructions <= 2800
    assert cost.special <= 1.0
    assert cost.divisions == 0


def test_an_interior_tile_with_logits_at_the_cap_takes_the_wider_path():
    cost = interior_tile_cost("saturated", TARGET)
    assert cost.instructions <= 2800
    assert 1.0 < cost.special <= 2.0
    assert cost.divisions == 0
