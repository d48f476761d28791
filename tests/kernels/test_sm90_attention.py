"""The Hopper attention kernel: accuracy, masks, hazards in the emulator, and what is compiled."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from cute_gemma import jit
from cute_gemma.config import AttentionConfig
from cute_gemma.emulator import Options, engine
from cute_gemma.kernels.common.mask import MASK_TILE, SCAN_COLUMNS
from cute_gemma.kernels.common.mask_scan import MaskScan
from cute_gemma.kernels.registry import forward_kernels
from cute_gemma.kernels.sm90.attention import SHORT_SEQUENCE, Attention, AttentionTuning, MaskedAttention
from cute_gemma.kernels.sm90.attention import default_tuning

from attention_cases import bits, errors, masks, suite_qkv

TARGET = "sm_90a"
SCALE = 128**-0.5
# Accuracy asked for on the suite's q, k, v; eager bf16 has about 0.018.
LIMIT = 0.004


def launch(kernel, *args, **options):
    return jit.launch(kernel, *args, target=TARGET, backend="emulator", emulation=Options(**options))


def run(kernel, q, k, v, mask=None, **options):
    """The kernel's output, from NaN, and the launch's report; a mask goes through MaskScan."""
    out = torch.full_like(q, math.nan)
    extra = ()
    if mask is not None:
        batch, seq = mask.shape[0], mask.shape[-1]
        tiles = math.ceil(seq / MASK_TILE)
        row_max = torch.full((batch, math.ceil(seq / SCAN_COLUMNS), seq), math.nan)
        extra = (mask, row_max, torch.full((batch, tiles, tiles), 99, dtype=torch.uint8))
        launch(MaskScan("f32" if mask.dtype == torch.float32 else "bf16"), *extra)
    (report,) = launch(kernel, q, k, v, *extra, out, **options)
    return out, report


def check(kernel, batch, seq, mask=None, q_gain=1.0):
    """Runs the kernel as tuned for the length on the suite's q, k, v and asserts the error: below LIMIT, and not above
    eager bf16's."""
    kernel = replace(kernel, tuning=default_tuning(kernel.head_dim, seq))
    q, k, v = suite_qkv(batch, seq, kernel.heads, kernel.kv_heads, kernel.head_dim)
    q = (q.float() * q_gain).bfloat16()
    out, report = run(kernel, q, k, v, mask)
    error, eager = errors(kernel, out, q, k, v, mask)
    assert error <= LIMIT
    assert error <= max(eager, 1e-6)
    return out, report


@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize("softcap", [50.0, None])
def test_matches_float64_at_any_length(softcap, mask):
    for seq in (1, 64, 128, 131, 293, 512):
        check(Attention(3, 1, 128, SCALE, softcap, mask), 2, seq)


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2)])
def test_any_ratio_of_query_to_kv_heads(heads, kv_heads):
    check(Attention(heads, kv_heads, 128, SCALE, 50.0), 2, 131)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("softcap", [50.0, None])
def test_other_head_dims(head_dim, softcap):
    for seq in (1, 131, 400):
        check(Attention(2, 1, head_dim, head_dim**-0.5, softcap), 1, seq)


@pytest.mark.parametrize("softcap", [5.0, 60.0, 1000.0])
def test_small_caps_and_large_ones(softcap):
    for seq in (1, 300):
        check(Attention(2, 1, 128, SCALE, softcap), 1, seq)


@pytest.mark.parametrize("q_gain", [2.0, 3.0, 8.0, 40.0])
def test_saturated_logits(q_gain):
    """Scores around the cap, and far beyond it."""
    for mask in ("none", "causal"):
        check(Attention(2, 1, 128, SCALE, 50.0, mask), 1, 512, q_gain=q_gain)


@pytest.mark.parametrize("q_gain", [8.0, 40.0])
def test_uncapped_logits_that_outgrow_the_first_shift(q_gain):
    check(Attention(2, 1, 128, SCALE, None, "none"), 1, 512, q_gain=q_gain)


def test_more_units_than_ctas():
    """Few CTAs walk many units, in both directions of the list."""
    whole, few = (
        run(Attention(3, 1, 128, SCALE, 50.0, tuning=tuning), *suite_qkv(2, 293, 3, 1, 128))
        for tuning in (AttentionTuning(sm_count=132), AttentionTuning(sm_count=5))
    )
    assert torch.equal(bits(whole[0]), bits(few[0]))
    assert few[1].mma_flops == whole[1].mma_flops


@pytest.mark.parametrize(
    "head_dim, masked, skips",
    [(128, False, False), (128, False, True), (128, True, False), (256, False, False), (256, True, False)],
)
def test_strict_checks_over_several_units(head_dim, masked, skips, monkeypatch):
    """Every phase of a barrier is waited for, in units of none, one and several key tiles."""
    # Some registers stay unwritten on paths that never run.
    monkeypatch.setattr(engine, "_check_registers", lambda *_: None)
    kind = MaskedAttention if masked else Attention
    kernel = kind(2, 1, head_dim, head_dim**-0.5, 50.0)
    kernel = replace(kernel, tuning=replace(kernel.tuning, sm_count=3, skips_empty=skips))
    for name in ("random", "late keys") if masked else (None,):
        mask = masks(293, 2)[name].bfloat16() if masked else None
        for schedule in ("lazy", "random:1"):
            qkv = suite_qkv(2, 293, 2, 1, head_dim)
            out, _ = run(kernel, *qkv, mask, schedule=schedule, hazards="strict")
            assert out.isfinite().all()


@pytest.mark.parametrize(
    "window, softcap, head_dim",
    [
        (1, 50.0, 128),
        (129, None, 128),
        (200, 50.0, 128),
        pytest.param(300, None, 256, marks=pytest.mark.slow),
        (300, 50.0, 256),
    ],
)
def test_sliding_windows(window, softcap, head_dim):
    check(Attention(2, 1, head_dim, head_dim**-0.5, softcap, window=window), 1, 600)


@pytest.mark.parametrize("name", masks(1))
def test_additive_masks(name):
    kernel = MaskedAttention(2, 1, 128, SCALE, 50.0)
    for seq in (131, 293):
        mask = masks(seq, batch=2)[name].bfloat16()
        out, _ = check(kernel, 2, seq, mask)
        hidden = (mask <= torch.finfo(torch.bfloat16).min / 2).all(-1)[:, 0].expand(2, seq)
        assert (out[hidden] == 0).all(), "a fully masked row yields zeros"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random causal", "-1e4", "masked rows", "late keys"])
def test_additive_masks_without_cap_and_in_fp32(name):
    check(MaskedAttention(2, 1, 128, SCALE, None), 1, 293, masks(293)[name].bfloat16())
    check(MaskedAttention(2, 1, 128, SCALE, 50.0, mask_dtype="f32"), 1, 293, masks(293)[name])


@pytest.mark.parametrize("softcap", [50.0, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 256])
def test_additive_masks_at_other_head_dims(head_dim, softcap):
    for name in ("random causal", "masked rows", "late keys", "distance"):
        kernel = MaskedAttention(2, 1, head_dim, head_dim**-0.5, softcap)
        check(kernel, 1, 293, masks(293)[name].bfloat16())
    check(replace(kernel, mask_dtype="f32"), 1, 293, masks(293)["random"])


def test_a_mask_tensor_gives_what_causal_gives():
    q, k, v = suite_qkv(1, 293, 2, 1, 128)
    by_position, first = run(Attention(2, 1, 128, SCALE, 50.0), q, k, v)
    by_tensor, second = run(MaskedAttention(2, 1, 128, SCALE, 50.0), q, k, v, masks(293)["causal"].bfloat16())
    assert torch.equal(bits(by_position), bits(by_tensor))
    assert first.mma_flops == second.mma_flops, "hidden tiles take part in no product"


def test_a_nan_stays_in_its_row():
    q, k, v = suite_qkv(1, 293, 1, 1, 128)
    q = q.clone()
    q[0, 200, 0, 5] = math.nan
    out, _ = run(Attention(1, 1, 128, SCALE, 50.0), q, k, v)
    rows = out.isnan().all(-1)[0, :, 0]
    assert rows.nonzero().tolist() == [[200]] and out.isnan().any(-1).sum() == 1


def test_a_nan_does_not_reach_the_rows_without_keys_that_follow():
    q, k, v = suite_qkv(1, 256, 1, 1, 128)
    v = torch.full_like(v, math.nan)
    mask = torch.zeros(1, 1, 256, 256)
    mask[0, 0, :128] = -math.inf
    kernel = MaskedAttention(1, 1, 128, SCALE, 50.0, tuning=AttentionTuning(sm_count=1))
    out, _ = run(kernel, q, k, v, mask.bfloat16())
    assert out[:, 128:].isnan().all() and (out[:, :128] == 0).all()


@pytest.mark.parametrize("softcap", [50.0, None])
def test_results_are_bit_identical_across_schedules(softcap):
    q, k, v = suite_qkv(1, 400, 2, 1, 128)
    kernel = Attention(2, 1, 128, SCALE, softcap, tuning=default_tuning(128, 400))
    results = [bits(run(kernel, q, k, v, schedule=s)[0]) for s in ("lazy", "eager", "random:1", "random:2")]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_interior_tile_costs_two_special_functions_a_score():
    counts = []
    for seq in (256, 512):
        _, report = run(Attention(1, 1, 128, SCALE, 50.0, "none"), *suite_qkv(1, seq, 1, 1, 128))
        counts.append(report.by_opcode)
    small, large = counts
    tile = {op: (large.get(op, 0) - 2 * small.get(op, 0)) / 8 for op in large}
    special = sum(n for op, n in tile.items() if op.split(".")[0] in ("ex2", "tanh", "rcp", "rsqrt"))
    assert special * 32 / 128**2 <= 2.05
    assert not any(op.startswith("div") for op, n in tile.items() if n)


@pytest.mark.parametrize(
    "mask, seq, blocks", [("none", 128, 4), ("causal", 128, 3), ("none", 64, 2), ("causal", 131, 9)]
)
def test_no_weights_for_first_blocks_that_nothing_reads(mask, seq, blocks):
    """blocks: of 64 rows and 64 keys that are computed. 4096 scores take as many lanes one tanh each."""
    qkv = suite_qkv(1, seq, 1, 1, 128)
    every, every_report = run(Attention(1, 1, 128, SCALE, 50.0, mask), *qkv)
    short, report = run(Attention(1, 1, 128, SCALE, 50.0, mask, tuning=default_tuning(128, seq)), *qkv)
    tanhs = [sum(n for op, n in r.by_opcode.items() if op.startswith("tanh")) for r in (report, every_report)]
    tiles = math.ceil(seq / 128)
    assert tanhs[0] == blocks * 4096 // 32
    assert tanhs[1] == 4 * (tiles * (tiles + 1) // 2 if mask == "causal" else tiles**2) * 4096 // 32
    assert torch.equal(bits(every), bits(short))


def test_only_short_sequences_skip_first_blocks():
    build, config = forward_kernels(TARGET).attention, AttentionConfig(heads=3, kv_heads=1)
    assert build(config, "causal", 1, SHORT_SEQUENCE - 1).skips
    assert not build(config, "causal", 1, SHORT_SEQUENCE).skips
    assert not build(config, "bf16", 1, 1).skips
    assert build(config, "bf16", 1, 1) == build(config, "bf16", 1, SHORT_SEQUENCE), "one kernel for all lengths"
    wide = replace(config, head_dim=256)
    assert build(wide, "causal", 1, 1) == build(wide, "causal", 1, SHORT_SEQUENCE)


FAST = {("causal", 128, 50.0, None), ("causal", 256, 50.0, 4096), ("none", 128, None, None)}


def every_configuration():
    """All head sizes, masks and ways to shift, with a window and without; most take 10 s or more to
    compile."""
    found = []
    for head_dim, softcap in itertools.product((64, 128, 256), (50.0, None)):
        for mask, window in (("causal", None), ("causal", 200), ("causal", 4096), ("none", None)):
            found.append(Attention(16, 8, head_dim, head_dim**-0.5, softcap, mask, window))
        for dtype in ("bf16", "f32"):
            found.append(MaskedAttention(16, 8, head_dim, head_dim**-0.5, softcap, mask_dtype=dtype))
    # A cap beyond the fixed shift, and a small one.
    for head_dim, softcap in itertools.product((64, 128, 256), (1000.0, 5.0)):
        found.append(Attention(16, 8, head_dim, head_dim**-0.5, softcap))
        for dtype in ("bf16", "f32"):
            found.append(MaskedAttention(16, 8, head_dim, head_dim**-0.5, softcap, mask_dtype=dtype))
    # The suite's and the presets'.
    found += [Attention(24, 8, 128, SCALE, 50.0), MaskedAttention(24, 8, 128, SCALE, 50.0)]
    found += [Attention(8, 4, 256, 0.0625, None, window=1024), Attention(32, 16, 128, 168**-0.5, None)]
    found += [Attention(16, 8, 256, 0.0625, None, window=129)]
    # What short sequences get, where that is another kernel.
    short = [replace(kernel, tuning=default_tuning(kernel.head_dim, 1)) for kernel in found]
    found += [kernel for kernel in short if kernel.skips]
    return [
        kernel if (kernel.mask, kernel.head_dim, kernel.softcap, kernel.window) in FAST
        else pytest.param(kernel, marks=pytest.mark.slow)
        for kernel in found
    ]  # fmt: skip


def named(kernel):
    mask = getattr(kernel, "mask_dtype", kernel.mask)
    short = "-short" if kernel.skips else ""
    return f"{mask}-{kernel.heads}-{kernel.head_dim}-{kernel.softcap}-{kernel.window}{short}"


@pytest.mark.parametrize("kernel", every_configuration(), ids=named)
def test_no_stack_no_local_memory_and_products_in_flight(kernel):
    (report,) = jit.inspect(kernel, TARGET)
    assert report.stack_bytes == 0 and report.local_loads == 0 and report.local_stores == 0
    # 384 threads at 168 registers are all an SM has; setmaxnreg shares them out.
    assert report.registers <= 168 and report.threads == 384
    counts = {}
    for name, n in report.instructions.items():
        counts[name.split(".")[0]] = counts.get(name.split(".")[0], 0) + n
    assert {"HGMMA", "UTMALDG", "UTMASTG", "STSM"} <= set(counts)
    # A compiler that finds operands written while products are in flight waits after each one of them.
    assert counts["WARPGROUP"] < counts["HGMMA"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 96}, "head_dim: got 96"),
        ({"kv_heads": 2}, "kv_heads: got 2"),
        ({"scale": 0.0}, "scale: got 0.0"),
        ({"softcap": -1.0}, "softcap: got -1.0"),
        ({"mask": "window"}, "mask: got 'window'"),
        ({"mask": "none", "window": 5}, "window: got 5"),
        ({"tuning": AttentionTuning(stages=3)}, "stages: got 3"),
    ],
)
def test_bad_configurations_are_named(changes, message):
    good = {"heads": 3, "kv_heads": 1, "head_dim": 128, "scale": SCALE, "softcap": 50.0}
    with pytest.raises(ValueError, match=message):
        Attention(**{**good, **changes})
