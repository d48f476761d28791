"""What attention_forward and attention accept, and what they say about the rest."""

import math

import pytest
import torch

import cute_gemma
from cute_gemma import functional, jit
from cute_gemma.jit import UnsupportedTargetError

B, S, C, H, KV, D = 2, 5, 64, 4, 2, 128
BF16 = torch.bfloat16


class Launched(Exception):
    """Stands for everything that happens once the arguments have passed."""


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    """Whatever compiles or launches raises Launched instead."""

    def launched(*args, **kwargs):
        raise Launched

    monkeypatch.setattr(jit, "launch", launched)
    monkeypatch.setattr(jit, "compile", launched)


def forward_arguments() -> dict:
    shapes = {
        "hidden_states": (B, S, C),
        "cos": (B, S, D),
        "sin": (B, S, D),
        "q_proj_weight": (H * D, C),
        "k_proj_weight": (KV * D, C),
        "v_proj_weight": (KV * D, C),
        "o_proj_weight": (C, H * D),
        "q_norm_weight": (D,),
        "k_norm_weight": (D,),
    }
    return {
        "attention_mask": "causal",
        **{name: torch.zeros(shape, dtype=BF16) for name, shape in shapes.items()},
    }


def attention_arguments() -> dict:
    return {name: torch.zeros(B, S, heads, D, dtype=BF16) for name, heads in (("q", H), ("k", KV), ("v", KV))}


CALLS = {
    "attention_forward": (cute_gemma.attention_forward, forward_arguments),
    "attention": (cute_gemma.attention, attention_arguments),
}
TENSORS = [
    (call, name) for call, (_, make) in CALLS.items() for name, t in make().items() if torch.is_tensor(t)
]


def call(which: str, **changes):
    function, make = CALLS[which]
    return function(**{**make(), **changes})


def changed(which: str, name: str, change) -> dict:
    return {name: change(CALLS[which][1]()[name])}


@pytest.mark.parametrize("which", CALLS)
def test_good_arguments_reach_the_launch(which):
    with pytest.raises(Launched):
        call(which)


@pytest.mark.parametrize("which, name", TENSORS)
@pytest.mark.parametrize(
    "change, error, came",
    [
        (lambda t: None, TypeError, "got NoneType, want a torch.Tensor"),
        (lambda t: t.tolist(), TypeError, "got list, want a torch.Tensor"),
        (lambda t: t.float(), TypeError, "got dtype torch.float32, want torch.bfloat16"),
        (lambda t: t.half(), TypeError, "got dtype torch.float16, want torch.bfloat16"),
        (lambda t: t.to_sparse(), TypeError, "got layout torch.sparse_coo, want torch.strided"),
        (lambda t: t.unsqueeze(0), ValueError, r"got shape \(1, .*want \("),
        (lambda t: t[:0], ValueError, r"got shape \(0,.*want \("),
        (lambda t: t.to("meta"), ValueError, "got a tensor on meta, want"),
        (
            lambda t: t.repeat_interleave(2, -1)[..., ::2],
            ValueError,
            "got strides .*want a contiguous tensor",
        ),
    ],
)
def test_a_wrong_tensor_is_named(which, name, change, error, came):
    with pytest.raises(error, match=f"^{name}: {came}"):
        call(which, **changed(which, name, change))


@pytest.mark.parametrize("which, name", TENSORS)
def test_a_misaligned_tensor_is_named(which, name):
    def shift(t):
        buffer = torch.zeros(t.numel() + 8, dtype=t.dtype)
        start = 1 if buffer.data_ptr() % 16 == 0 else 0
        return buffer[start : start + t.numel()].view(t.shape)

    with pytest.raises(ValueError, match=f"^{name}: got address 0x[0-9a-f]+, want a multiple of 16 bytes"):
        call(which, **changed(which, name, shift))


@pytest.mark.parametrize("which, name", TENSORS)
def test_a_tensor_that_wants_a_gradient_is_named_while_gradients_are_on(which, name):
    changes = changed(which, name, lambda t: t.clone().requires_grad_())
    with pytest.raises(ValueError, match=f"^{name}: got a tensor that requires grad, want none"):
        call(which, **changes)
    with torch.no_grad(), pytest.raises(Launched):
        call(which, **changes)


@pytest.mark.parametrize(
    "name, shape, wanted",
    [
        ("hidden_states", (B, S), r"\(B, S, C\)"),
        ("hidden_states", (B, 0, C), r"\(B, S, C\)"),
        ("cos", (B, S, D // 2), r"\(2, 5, 128\)"),
        ("sin", (1, S, D), r"\(2, 5, 128\)"),
        ("q_proj_weight", (H * D, C + 8), r"\(H\*D, 64\)"),
        ("k_proj_weight", (KV * D, C - 8), r"\(KV\*D, 64\)"),
        ("v_proj_weight", (D, C), r"\(256, 64\)"),
        ("o_proj_weight", (C, H * D - D), r"\(64, 512\)"),
        ("o_proj_weight", (H * D, C), r"\(64, 512\)"),
        ("q_norm_weight", (D + 1,), r"\(128,\)"),
        ("k_norm_weight", (1, D), r"\(128,\)"),
    ],
)
def test_a_wrong_shape_says_what_is_wanted(name, shape, wanted):
    came = ", ".join(map(str, shape))
    with pytest.raises(ValueError, match=rf"^{name}: got shape \({came},?\), want {wanted}"):
        call("attention_forward", **{name: torch.zeros(shape, dtype=BF16)})


def test_attention_wants_matching_shapes():
    def zeros(*shape):
        return torch.zeros(shape, dtype=BF16)

    with pytest.raises(ValueError, match=r"^k: got shape \(2, 6, 2, 128\), want \(2, 5, KV, 128\)"):
        call("attention", k=zeros(B, 6, KV, D))
    with pytest.raises(ValueError, match=r"^v: got shape \(2, 5, 1, 128\), want \(2, 5, 2, 128\)"):
        call("attention", v=zeros(B, S, 1, D))
    with pytest.raises(ValueError, match="^k: got 3 heads, want a divisor of q's 4"):
        call("attention", k=zeros(B, S, 3, D), v=zeros(B, S, 3, D))


def test_weights_have_to_hold_whole_heads():
    with pytest.raises(
        ValueError, match=r"^q_proj_weight: got 500 rows, want a multiple of head_dim \(128\)"
    ):
        call(
            "attention_forward",
            q_proj_weight=torch.zeros(500, C, dtype=BF16),
            o_proj_weight=torch.zeros(C, 500, dtype=BF16),
        )
    weight = torch.zeros(200, C, dtype=BF16)
    with pytest.raises(
        ValueError, match=r"^k_proj_weight: got 200 rows, want a multiple of head_dim \(128\)"
    ):
        call("attention_forward", k_proj_weight=weight, v_proj_weight=weight)
    weight = torch.zeros(3 * D, C, dtype=BF16)
    with pytest.raises(ValueError, match=r"^kv_heads: got 3, want a divisor of heads \(4\)"):
        call("attention_forward", k_proj_weight=weight, v_proj_weight=weight)


def test_hidden_size_has_to_be_a_multiple_of_eight():
    narrow = {
        name: torch.zeros(shape, dtype=BF16)
        for name, shape in {
            "hidden_states": (B, S, 60),
            "q_proj_weight": (H * D, 60),
            "k_proj_weight": (KV * D, 60),
            "v_proj_weight": (KV * D, 60),
            "o_proj_weight": (60, H * D),
        }.items()
    }
    with pytest.raises(ValueError, match="^hidden: got 60, want a multiple of 8"):
        call("attention_forward", **narrow)


@pytest.mark.parametrize("which", CALLS)
@pytest.mark.parametrize("value", [0, 0.0, -50.0, math.nan, math.inf])
def test_softcap_has_to_be_a_finite_number_above_zero(which, value):
    with pytest.raises(ValueError, match=f"^softcap: got {value}, want a finite number above 0"):
        call(which, softcap=value)


@pytest.mark.parametrize(
    "which, number, value, error",
    [
        ("attention_forward", "eps", 0.0, ValueError),
        ("attention_forward", "eps", -1e-6, ValueError),
        ("attention_forward", "eps", math.nan, ValueError),
        ("attention_forward", "eps", "1e-6", TypeError),
        ("attention_forward", "softcap", "50", TypeError),
        ("attention_forward", "softcap", True, TypeError),
        ("attention_forward", "head_dim", 0, ValueError),
        ("attention_forward", "head_dim", 100, ValueError),
        ("attention_forward", "head_dim", 128.0, TypeError),
        ("attention", "scale", 0.0, ValueError),
        ("attention", "scale", math.nan, ValueError),
        ("attention", "scale", "auto", TypeError),
    ],
)
def test_a_wrong_number_is_named(which, number, value, error):
    with pytest.raises(error, match=f"^{number}: got .*{value}.*, want"):
        call(which, **{number: value})


def test_a_head_dim_without_kernels_is_named():
    q = torch.zeros(1, 3, 2, 96, dtype=BF16)
    with pytest.raises(ValueError, match="^head_dim: got 96, want 64 or 128 or 256 on sm_100a"):
        cute_gemma.attention(q, q, q)
    shapes = {"hidden_states": (B, S, C), "cos": (B, S, 64), "sin": (B, S, 64)}
    shapes |= {"q_norm_weight": (64,), "k_norm_weight": (64,)}
    narrow = {name: torch.zeros(shape, dtype=BF16) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match="^head_dim: got 64, want 128 or 256 on sm_100a"):
        call("attention_forward", **narrow, head_dim=64)


MASKS = {"attention_forward": "attention_mask", "attention": "mask"}


@pytest.mark.parametrize("which", CALLS)
@pytest.mark.parametrize(
    "mask, error, message",
    [
        ("full", ValueError, "got 'full', want an additive tensor, 'causal' or None"),
        (True, TypeError, "got bool, want an additive torch.Tensor, 'causal' or None"),
        (torch.zeros(B, S, S), ValueError, r"got shape \(2, 5, 5\), want \(2 or 1, 1, 5, 5\)"),
        (torch.zeros(3, 1, S, S), ValueError, r"got shape \(3, 1, 5, 5\), want \(2 or 1, 1, 5, 5\)"),
        (torch.zeros(B, H, S, S), ValueError, r"got shape \(2, 4, 5, 5\), want \(2, 1, 5, 5\)"),
        (torch.zeros(B, 1, S, S + 1), ValueError, r"got shape \(2, 1, 5, 6\), want \(2, 1, 5, 5\)"),
        (
            torch.zeros(B, 1, S, S).bool(),
            TypeError,
            "got dtype torch.bool, want torch.bfloat16 or torch.float32",
        ),
        (torch.zeros(B, 1, S, S).double(), TypeError, "got dtype torch.float64, want torch.bfloat16 or"),
        (torch.zeros(B, 1, S, S).transpose(2, 3), ValueError, "got strides .*want a contiguous tensor"),
        (torch.zeros(B, 1, S, S, device="meta"), ValueError, "got a tensor on meta, want one on the CPU"),
    ],
)
def test_a_wrong_mask_is_named(which, mask, error, message):
    with pytest.raises(error, match=f"^{MASKS[which]}: {message}"):
        call(which, **{MASKS[which]: mask})


@pytest.mark.parametrize("which", CALLS)
@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.zeros(B, 1, S, S),
        torch.zeros(1, 1, S, S, dtype=BF16),
        torch.zeros(1, 1, S, S).expand(B, 1, S, S),
    ],
)
def test_every_kind_of_mask_is_accepted(which, mask):
    with pytest.raises(Launched):
        call(which, **{MASKS[which]: mask})


@pytest.mark.parametrize("which", CALLS)
def test_backend_and_target_are_checked(which):
    with pytest.raises(ValueError, match="^backend: got 'tpu', want one of emulator, cuda or None"):
        call(which, backend="tpu")
    with pytest.raises(ValueError, match="^backend: got 'cuda' for tensors on cpu, want 'emulator'"):
        call(which, backend="cuda")
    with pytest.raises(UnsupportedTargetError, match="^target: got 'sm_80'"):
        call(which, target="sm_80")
    with pytest.raises(UnsupportedTargetError, match="^target: got 'sm_103a', want one of sm_100a"):
        call(which, target="sm_103a")


def test_a_gpu_without_kernels_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(
        UnsupportedTargetError, match=r"Some GPU, compute capability 8\.0\); supported: 10\.0"
    ):
        functional.resolve_call_target(None, None, torch.device("cuda", 0))
    with pytest.raises(UnsupportedTargetError, match=r"sm_100a needs a GPU of compute capability 10\.0"):
        functional.resolve_call_target("sm_100a", None, torch.device("cuda", 0))


def test_a_rejected_call_leaves_its_arguments_alone():
    arguments = forward_arguments()
    versions = {name: t._version for name, t in arguments.items() if torch.is_tensor(t)}
    with pytest.raises(ValueError, match="^softcap"):
        cute_gemma.attention_forward(**arguments, softcap=-1)
    assert versions == {name: t._version for name, t in arguments.items() if torch.is_tensor(t)}


def test_a_plan_shares_one_allocation():
    plan = functional.plan_attention_forward(**forward_arguments())
    stages = {name: t for step in plan.steps for name, t in step.outputs.items()}
    assert list(stages) == ["q", "k", "v", "attention", "output"]
    assert stages["q"].shape == stages["attention"].shape == (B, S, H, D)
    assert stages["k"].shape == stages["v"].shape == (B, S, KV, D)
    assert stages["output"] is plan.output and plan.output.shape == (B, S, C)
    between = [stages[name] for name in ("q", "k", "v", "attention")]
    assert len({t.untyped_storage().data_ptr() for t in between}) == 1
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in between)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert all(start % 16 == 0 for start, _ in spans)


def test_poison_reaches_every_stage():
    plan = functional.plan_attention_forward(**forward_arguments())
    plan.poison()
    for step in plan.steps:
        assert all(torch.isnan(t).all() for t in step.outputs.values())
        assert all((step.tensors[name] == 0).all() for name in ("counters",) if name in step.tensors)
