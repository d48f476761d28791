"""qkv_backward: what it accepts, what it refuses, and both pass rules for its six results in emulation."""

import math

import pytest
import torch

import cute_gemma
from cute_gemma import QKVGradients, jit, reference
from cute_gemma.config import AttentionConfig
from cute_gemma.emulator import Options
from cute_gemma.functional_backward import plan_qkv_backward
from cute_gemma.jit import UnsupportedTargetError
from cute_gemma.kernels.sm100.qkv_proj import QKVProjection
from cute_gemma.workloads import case_for, check_output, workload

B, S, C, H, KV, D = 2, 5, 64, 4, 2, 128
BF16, F32 = torch.bfloat16, torch.float32
PROBLEM = workload("051")
SIZES = [(1, 131), (2, 128), (1, 1), (3, 43), (1, 512), (4, 128), (1, 997)]


class Launched(Exception):
    """Stands for everything that happens once the arguments have passed."""


@pytest.fixture
def no_launch(monkeypatch):
    """Whatever compiles or launches raises Launched instead."""

    def launched(*args, **kwargs):
        raise Launched

    monkeypatch.setattr(jit, "launch", launched)
    monkeypatch.setattr(jit, "compile", launched)


SHAPES = {
    "grad_query": (B, H, S, D),
    "grad_key": (B, KV, S, D),
    "grad_value": (B, KV, S, D),
    "hidden_states": (B, S, C),
    "q_weight": (H * D, C),
    "k_weight": (KV * D, C),
    "v_weight": (KV * D, C),
    "q_norm_weight": (D,),
    "k_norm_weight": (D,),
    "q_rstd": (B, H, S, 1),
    "k_rstd": (B, KV, S, 1),
    "q_normed": (B, H, S, D),
    "k_normed": (B, KV, S, D),
}


def arguments() -> dict:
    return {
        name: torch.zeros(shape, dtype=F32 if name.endswith("rstd") else BF16)
        for name, shape in SHAPES.items()
    }


def call(**changes):
    return cute_gemma.qkv_backward(**{**arguments(), **changes})


def places(**changes) -> QKVGradients:
    """Tensors for the results, each filled with 7."""
    shapes = {
        "hidden_states": (B, S, C),
        "q_weight": (H * D, C),
        "k_weight": (KV * D, C),
        "v_weight": (KV * D, C),
        "q_norm_weight": (D,),
        "k_norm_weight": (D,),
    }
    tensors = {
        name: torch.full(shape, 7, dtype=F32 if name.endswith("norm_weight") else BF16)
        for name, shape in shapes.items()
    }
    return QKVGradients(**{**tensors, **changes})


def test_good_arguments_reach_the_launch(no_launch):
    with pytest.raises(Launched):
        call()
    with pytest.raises(Launched):
        call(out=places(hidden_states=None, k_norm_weight=None))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "change, error, came",
    [
        (lambda t: None, TypeError, "got NoneType, want a torch.Tensor"),
        (lambda t: t.half(), TypeError, "got dtype torch.float16, want torch."),
        (lambda t: t.unsqueeze(0), ValueError, r"got shape \(1, .*want \("),
        (lambda t: t[:0], ValueError, r"got shape \(0,.*want \("),
        (lambda t: t.to("meta"), ValueError, "got a tensor on meta, want"),
        (lambda t: t.clone().requires_grad_(), ValueError, "got a tensor that requires grad, want none"),
    ],
)
def test_a_wrong_tensor_is_named(no_launch, name, change, error, came):
    with pytest.raises(error, match=f"^{name}: {came}"):
        call(**{name: change(arguments()[name])})


@pytest.mark.parametrize("name", [name for name in SHAPES if len(SHAPES[name]) > 1])
def test_a_tensor_that_is_not_contiguous_is_named(no_launch, name):
    shape = SHAPES[name]
    wide = torch.zeros(shape[0], *shape[1:-1], 2 * shape[-1], dtype=arguments()[name].dtype)
    with pytest.raises(ValueError, match=f"^{name}: got strides .*want a contiguous tensor"):
        call(**{name: wide[..., : shape[-1]]})


@pytest.mark.parametrize(
    "name, shape, wanted",
    [
        ("grad_query", (B, H, S), r"\(B, H, S, D\)"),
        ("grad_key", (B, KV, S + 1, D), r"\(2, KV, 5, 128\)"),
        ("grad_value", (B, KV + 1, S, D), r"\(2, 2, 5, 128\)"),
        ("hidden_states", (B, S + 1, C), r"\(2, 5, C\)"),
        ("q_weight", (H * D, C + 8), r"\(512, 64\)"),
        ("k_weight", (H * D, C), r"\(256, 64\)"),
        ("v_weight", (C, KV * D), r"\(256, 64\)"),
        ("q_norm_weight", (2 * D,), r"\(128,\)"),
        ("q_rstd", (B, H, S), r"\(2, 4, 5, 1\)"),
        ("k_normed", (B, H, S, D), r"\(2, 2, 5, 128\)"),
    ],
)
def test_a_wrong_shape_says_what_is_wanted(no_launch, name, shape, wanted):
    came = ", ".join(map(str, shape))
    tensor = torch.zeros(shape, dtype=arguments()[name].dtype)
    with pytest.raises(ValueError, match=rf"^{name}: got shape \({came},?\), want {wanted}"):
        call(**{name: tensor})


def test_sizes_without_kernels_are_named(no_launch):
    wide = ("hidden_states", "q_weight", "k_weight", "v_weight")
    narrow = {name: torch.zeros(*SHAPES[name][:-1], 60, dtype=BF16) for name in wide}
    with pytest.raises(ValueError, match="^hidden_states: got 60 columns, want a multiple of 8"):
        call(**narrow)
    dim = 64
    resized = {D: dim, H * D: H * dim, KV * D: KV * dim}
    shapes = {name: tuple(resized.get(n, n) for n in shape) for name, shape in SHAPES.items()}
    small = {name: torch.zeros(shape, dtype=arguments()[name].dtype) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match="^grad_query: got 64 elements a head, want 128 or 256 on sm_100a"):
        cute_gemma.qkv_backward(**small)
    with pytest.raises(UnsupportedTargetError, match="target"):
        call(target="sm_80")
    with pytest.raises(ValueError, match="^backend: got 'cuda' for tensors on cpu"):
        call(backend="cuda")


def test_what_is_wrong_with_out_is_named_and_nothing_is_written(no_launch):
    inputs = arguments()
    wrong = {
        "^out.q_weight: got shape": places(q_weight=torch.zeros(C, H * D, dtype=BF16)),
        "^out.q_norm_weight: got dtype torch.bfloat16, want torch.float32": places(
            q_norm_weight=torch.zeros(D, dtype=BF16)
        ),
        "^out.hidden_states: got memory that overlaps hidden_states": places(
            hidden_states=inputs["hidden_states"]
        ),
        "^out.v_weight: got memory that overlaps k_weight": places(v_weight=inputs["k_weight"]),
    }
    for message, out in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            cute_gemma.qkv_backward(**inputs, out=out)
        mine = [t for t in out if t is not None and all(t is not i for i in inputs.values())]
        assert all((t == 7).all() or (t == 0).all() for t in mine)
    both = torch.full((KV * D, C), 7, dtype=BF16)
    with pytest.raises(ValueError, match="^out.v_weight: got memory that overlaps out.k_weight"):
        call(out=places(k_weight=both, v_weight=both))
    with pytest.raises(TypeError, match="^out: got tuple, want a QKVGradients or None"):
        call(out=tuple(places()))
    out = places()
    with pytest.raises(ValueError, match="^k_normed"):
        call(out=out, k_normed=torch.zeros(B, H, S, D, dtype=BF16))
    assert all((t == 7).all() for t in out), "written though an argument was rejected"
    assert all((t == 0).all() for t in inputs.values())


def run(inputs, schedule="lazy"):
    """The results with NaN in all memory beforehand, and the reports of the launches."""
    plan = plan_qkv_backward(**inputs.tensors())
    plan.poison()
    reports = [report for launched in plan.run(Options(schedule=schedule)) for report in launched]
    return plan.output, reports


def assert_both_rules_hold(inputs, results, batch, seq, config=PROBLEM.config):
    eager = PROBLEM.reference(inputs, config)
    exact = PROBLEM.reference(inputs.to(torch.float64), config)
    case = case_for("051", batch, seq)
    for name in PROBLEM.outputs:
        out = getattr(results, name)
        check = check_output(
            name, out, getattr(eager, name), getattr(exact, name), case.max_atol, case.max_rtol
        )
        assert check.suite_pass, check
        if name.endswith("norm_weight"):
            assert out.dtype == F32
            assert check.error <= 1e-5, check
        assert check.project_pass, check


def make(kind, batch, seq, config=PROBLEM.config):
    return PROBLEM.make_inputs(kind, batch, seq, 0, config)


@pytest.mark.parametrize("kind", ["suite", "realistic", "outliers", "correlated"])
@pytest.mark.parametrize("batch, seq", SIZES)
def test_both_pass_rules(batch, seq, kind):
    inputs = make(kind, batch, seq)
    results, _ = run(inputs)
    assert_both_rules_hold(inputs, results, batch, seq)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["suite", "outliers"])
@pytest.mark.parametrize("case", PROBLEM.cases, ids=lambda c: f"{c.batch_size}x{c.seq_len}")
def test_every_case_of_the_suite(case, kind):
    inputs = make(kind, case.batch_size, case.seq_len)
    results, _ = run(inputs)
    assert_both_rules_hold(inputs, results, case.batch_size, case.seq_len)


@pytest.mark.parametrize(
    "config, batch, seq",
    [
        (AttentionConfig(hidden=1152, heads=4, kv_heads=1, head_dim=256), 1, 70),
        (AttentionConfig(hidden=3072, heads=24, kv_heads=8, head_dim=128), 2, 9),
    ],
)
def test_other_layers(config, batch, seq):
    inputs = make("realistic", batch, seq, config)
    results, _ = run(inputs)
    assert_both_rules_hold(inputs, results, batch, seq, config)


@pytest.mark.parametrize("batch, seq", SIZES)
def test_results_are_bit_identical_across_schedules(batch, seq):
    inputs = make("outliers", batch, seq)
    first, _ = run(inputs)
    for schedule in ("random:1", "random:2", "random:3"):
        other, _ = run(inputs, schedule)
        for name, a, b in zip(QKVGradients._fields, first, other):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_out_is_written_and_returned():
    inputs = make("suite", 1, 1).tensors()
    new = cute_gemma.qkv_backward(**inputs)
    out = QKVGradients(*(torch.full_like(t, math.nan) for t in new))._replace(k_weight=None)
    returned = cute_gemma.qkv_backward(**inputs, out=out)
    for name, result, given, wanted in zip(QKVGradients._fields, returned, out, new):
        assert result is given or given is None, name
        assert torch.equal(result, wanted), name


@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 128), (2, 1, 256)])
def test_the_projection_kernel_and_the_backward_form_a_pair(heads, kv_heads, dim):
    """Forward with what it saves, RoPE undone, backward: against autograd through the float64 reference."""
    batch, seq, hidden = 2, 21, 136
    config = AttentionConfig(hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=dim)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).bfloat16()

    def place(*shape, dtype=BF16):
        return torch.full(shape, math.nan, dtype=dtype)

    cos, sin = draw(batch, seq, dim), draw(batch, seq, dim)
    inputs = {
        "hidden_states": draw(batch, seq, hidden),
        "q_weight": draw(heads * dim, hidden, scale=hidden**-0.5),
        "k_weight": draw(kv_heads * dim, hidden, scale=hidden**-0.5),
        "v_weight": draw(kv_heads * dim, hidden, scale=hidden**-0.5),
        "q_norm_weight": draw(dim, scale=0.3),
        "k_norm_weight": draw(dim, scale=0.3),
    }
    sides = (heads, kv_heads, kv_heads)
    grads = [draw(batch, h, seq, dim) for h in sides]
    exact = {name: t.double().requires_grad_() for name, t in inputs.items()}
    hidden_states, *weights, q_norm, k_norm = exact.values()
    projected = reference.qkv_projection(
        hidden_states, cos.double(), sin.double(), *weights, q_norm, k_norm, config
    )
    torch.autograd.backward(projected, [grad.double().transpose(1, 2) for grad in grads])

    rows = batch * seq
    outputs = [place(rows, h * dim) for h in sides]
    saved = {f"{side}_normed": place(batch, h, seq, dim) for side, h in zip("qk", sides)}
    saved |= {f"{side}_rstd": place(batch, h, seq, 1, dtype=F32) for side, h in zip("qk", sides)}
    kernel = QKVProjection(hidden, heads, kv_heads, dim, config.eps, save_for_backward=True)
    flat = [t.view(rows, -1) for t in (inputs["hidden_states"], cos, sin)]
    jit.launch(
        kernel, flat[0], *list(inputs.values())[1:4], *flat[1:], *outputs,
        inputs["q_norm_weight"], inputs["k_norm_weight"], *saved.values(), target="sm_100a",
    )  # fmt: skip
    for out, wanted in zip(outputs, projected):
        assert relative_error(out, wanted.flatten(0, 1).flatten(1)) <= 4 * 2**-9

    before = cute_gemma.rope_backward(grads[0], grads[1], cos, sin)
    results = cute_gemma.qkv_backward(*before, grads[2], **inputs, **saved)
    for name, out in results._asdict().items():
        # bf16 roundings of the rotated gradients, of normed, of the projections' gradients and of the result.
        assert relative_error(out, exact[name].grad) <= 4 * 2**-9, name


def relative_error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


def test_the_launched_binaries_neither_spill_nor_lack_tensor_cores():
    plan = plan_qkv_backward(**make("suite", 1, 131).tensors())
    assert [step.stage for step in plan.steps] == ["norm backward", "gradients"]
    for step in plan.steps:
        (report,) = jit.inspect(step.kernel, plan.target)
        assert (report.stack_bytes, report.local_loads, report.local_stores) == (0, 0, 0)
        assert (report.count("UTCHMMA") > 0) == (step.stage == "gradients")


def test_the_second_launch_may_start_before_the_first_has_finished():
    plan = plan_qkv_backward(**make("suite", 1, 1).tensors())
    first, second = (plan.capture(step)[0] for step in plan.steps)
    assert second.programmatic and not first.programmatic


def test_traffic_at_4096_rows():
    inputs = make("suite", 1, 4096)
    results, reports = run(inputs, "eager")
    assert_both_rules_hold(inputs, results, 1, 4096)
    tensors = (*inputs.tensors().values(), *results)
    least = sum(t.numel() * t.element_size() for t in tensors)
    sectors = sum(report.sectors_read + report.sectors_written for report in reports)
    raw = sum(report.tma_load_bytes + report.tma_store_bytes for report in reports)
    assert 32 * sectors <= 1.6 * least
    assert raw <= 5 * least
