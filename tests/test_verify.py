"""The kernels of 047, end to end in the emulator: both pass rules, schedules, the commands users type."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cute_gemma
from cute_gemma import functional, reference
from cute_gemma.cli import main
from cute_gemma.config import MASKED_AT_OR_BELOW
from cute_gemma.emulator import Options as EmulatorOptions
from cute_gemma.verification import Options, verify
from cute_gemma.workloads import relative_error, workload

ROOT = Path(__file__).resolve().parents[1]
FORWARD = workload("047")
SHAPES = [(1, 128), (2, 293), (1, 512), (1, 131), (1, 1), (3, 129)]
# Shapes that run under random schedules by default, suite inputs under all; the rest do so with --slow.
RANDOM_SHAPES = [(1, 131), (3, 129)]
INPUT_SETS = [name for kind in FORWARD.kinds for name in FORWARD.input_sets(kind)]
SCHEDULES = ("lazy", "random:1", "random:2", "random:3")


def _assert_passes(result) -> None:
    failed = [check for stage in result.stages for check in stage.checks if not check.passed]
    assert not failed, failed
    assert result.passed


def _marks(shape: tuple[int, int], name: str, schedule: str):
    quick = shape in RANDOM_SHAPES and (name == "suite" or schedule == SCHEDULES[1])
    return () if schedule == "lazy" or quick else pytest.mark.slow


# Schedules come last, so that one reference serves them all.
CASES = [
    pytest.param(
        shape,
        name,
        schedule,
        marks=_marks(shape, name, schedule),
        id=f"{shape[0]}x{shape[1]}-{name}-{schedule}",
    )
    for shape in SHAPES
    for name in INPUT_SETS
    for schedule in SCHEDULES
]


@pytest.mark.parametrize("shape, name, schedule", CASES)
def test_forward_passes_both_rules(shape, name, schedule):
    _assert_passes(verify(FORWARD, name, *shape, options=Options(schedule=schedule)))


def _forward_bits(inputs, schedule: str) -> list[torch.Tensor]:
    plan = functional.plan_attention_forward(**vars(inputs))
    plan.poison()
    plan.run(emulation=EmulatorOptions(schedule=schedule))
    return [
        t.view(torch.int16) for step in plan.steps for t in step.outputs.values() if t.element_size() == 2
    ]


def test_results_are_bit_identical_across_runs_and_schedules():
    inputs = FORWARD.make_inputs("masked-row", 1, 131)
    first = _forward_bits(inputs, "lazy")
    for schedule in ("lazy", "eager", "random:1", "random:2"):
        again = _forward_bits(inputs, schedule)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), schedule


def _attention_errors(name: str, seq: int) -> tuple[float, float]:
    """Errors against float64 on the eager model's q, k and v: the attention kernel's alone, and eager's."""
    inputs = FORWARD.make_inputs(name, 1, seq)
    stages = FORWARD.reference(inputs, FORWARD.config)
    exact = reference.attention(
        stages.q.double(),
        stages.k.double(),
        stages.v.double(),
        inputs.attention_mask.double(),
        FORWARD.config,
    )
    out = cute_gemma.attention(stages.q, stages.k, stages.v, mask=inputs.attention_mask)
    return relative_error(out, exact), relative_error(stages.attention, exact)


def test_attention_alone_is_four_times_closer_than_eager():
    error, eager = _attention_errors("suite", 512)
    assert error <= 0.004
    assert eager > 0.016


def test_attention_at_the_cap_errs_at_most_half_as_much_as_eager():
    error, eager = _attention_errors("saturated", 256)
    assert error <= eager / 2


def test_attention_takes_any_scale_and_no_mask():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 77, heads, 128, generator=generator).bfloat16() for heads in (4, 2, 2))
    config = cute_gemma.AttentionConfig(heads=4, kv_heads=2, scale=0.2, softcap=30.0)
    exact = reference.attention(q.double(), k.double(), v.double(), None, config)
    out = cute_gemma.attention(q, k, v, mask=None, softcap=30.0, scale=0.2)
    assert relative_error(out, exact) <= 0.004


@pytest.mark.parametrize("mask", ["causal", "tensor"])
def test_attention_without_a_cap(mask):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (3 * torch.randn(1, 150, heads, 128, generator=generator).bfloat16() for heads in (2, 1, 1))
    mask = torch.randn(1, 1, 150, 150, generator=generator) if mask == "tensor" else mask
    config = cute_gemma.AttentionConfig(heads=2, kv_heads=1, softcap=None)
    wide = mask if isinstance(mask, str) else mask.double()
    exact = reference.attention(q.double(), k.double(), v.double(), wide, config)
    assert relative_error(cute_gemma.attention(q, k, v, mask=mask, softcap=None), exact) <= 0.004


def test_a_fully_masked_row_yields_zeros():
    inputs = FORWARD.make_inputs("masked-row", 2, 40)
    out = cute_gemma.attention_forward(**vars(inputs))
    masked = (inputs.attention_mask <= MASKED_AT_OR_BELOW).all(-1)[:, 0]
    assert torch.count_nonzero(out[masked]) == 0
    assert (out[~masked] != 0).any(-1).all()


def test_one_mask_serves_a_whole_batch():
    inputs = FORWARD.make_inputs("random-bias", 1, 40)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 40, heads, 128, generator=generator).bfloat16() for heads in (2, 1, 1))
    mask = inputs.attention_mask
    shared = cute_gemma.attention(q, k, v, mask=mask)
    for same in (mask.expand(3, 1, 40, 40), mask.repeat(3, 1, 1, 1)):
        assert torch.equal(cute_gemma.attention(q, k, v, mask=same), shared)


@pytest.mark.parametrize("softcap", [50.0, None])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_heads_come_from_the_weights(head_dim, softcap):
    config = cute_gemma.AttentionConfig(hidden=264, heads=5, kv_heads=1, head_dim=head_dim, softcap=softcap)
    inputs = FORWARD.make_inputs("suite", 2, 150, config=config)
    exact = FORWARD.reference(inputs.to(torch.float64), config).output
    eager = FORWARD.reference(inputs, config).output
    out = cute_gemma.attention_forward(**vars(inputs), head_dim=head_dim, softcap=softcap)
    assert relative_error(out, exact) <= 1.25 * relative_error(eager, exact)


@pytest.mark.parametrize("softcap", [50.0, None])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("mask", ["causal", None, "tensor"])
def test_attention_at_other_head_dims(head_dim, mask, softcap):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        2 * torch.randn(2, 150, heads, head_dim, generator=generator).bfloat16() for heads in (2, 1, 1)
    )
    mask = torch.randn(1, 1, 150, 150, generator=generator) if mask == "tensor" else mask
    config = cute_gemma.AttentionConfig(heads=2, kv_heads=1, head_dim=head_dim, softcap=softcap)
    wide = mask.double() if torch.is_tensor(mask) else mask
    exact = reference.attention(q.double(), k.double(), v.double(), wide, config)
    assert relative_error(cute_gemma.attention(q, k, v, mask=mask, softcap=softcap), exact) <= 0.004


def test_the_run_command_prints_every_stage_and_passes(capsys):
    assert main(["run", "047", "--batch", "1", "--seq", "128"]) == 0
    out = capsys.readouterr().out
    for stage in ("mask scan", "qkv projection", "attention", "output projection"):
        assert stage in out
    assert out.splitlines()[-1] == "PASS"


def test_the_inspect_command_shows_what_the_kernels_cost(capsys):
    assert main(["inspect", "047", "--no-traffic"]) == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    header = next(line for line in out.splitlines() if line.startswith("stage"))
    assert header.split()[-3:] == ["UTCHMMA", "UTMALDG", "MUFU"]
    for stage in ("qkv projection", "attention", "output projection"):
        assert int(lines[stage].split()[-3]) > 0 and int(lines[stage].split()[-2]) > 0
    for path in (line.strip() for line in out.splitlines() if line.endswith((".ptx", ".cubin", ".sass"))):
        assert Path(path).stat().st_size > 0
    assert float(lines["suite"].split()[2]) <= 1.0 < float(lines["saturated"].split()[2]) <= 2.0


def test_without_a_c_compiler_the_error_says_what_to_install(tmp_path):
    code = (
        "import torch, cute_gemma; q = torch.zeros(1, 3, 1, 128, dtype=torch.bfloat16)\n"
        "cute_gemma.attention(q, q, q)"
    )
    environment = {**os.environ, "CC": "no-such-compiler", "CUTE_GEMMA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "CompilerNotFoundError: no C compiler found (CC=no-such-compiler not on PATH)" in done.stderr
    assert "apt install gcc" in done.stderr


@pytest.mark.parametrize(
    "example", sorted((ROOT / "scripts/examples").glob("*.py")), ids=lambda path: path.stem
)
def test_examples_run(example):
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "relative error against float64" in done.stdout
