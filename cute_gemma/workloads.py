"""The two suite problems: their 32 cases, seeded inputs, and the two rules that a result has to pass.

Input sets, each for any batch and sequence length:
  suite       what the public suite draws.
  causal      047: the same with "causal" in place of the mask tensor.
  structured  outliers (a few channels and rows far above the rest), correlated (rows that nearly agree);
              047: saturated (logits at the cap).
  noncausal   047: additive masks that are not causal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import resources

import torch
from torch import Tensor

from . import reference
from .config import PRESETS, AttentionConfig

# The suite's default share of elements that have to lie within its tolerance.
SUITE_MATCHED_RATIO = 0.99
# The project's rule: error against float64 at most this many times the eager bfloat16 model's own.
EAGER_ERROR_FACTOR = 1.25

_LOWEST = torch.finfo(torch.bfloat16).min


@dataclass(frozen=True)
class Case:
    """A case: size, tolerances, and the suite's B200 estimates in microseconds (None where it has none)."""

    batch_size: int
    seq_len: int
    max_atol: float
    max_rtol: float
    b200_sol_us: float | None = None
    b200_baseline_us: float | None = None


@lru_cache(maxsize=None)
def _suite() -> Mapping[str, dict]:
    return json.loads(resources.files(__package__).joinpath("data/workloads.json").read_text())


def suite_cases(workload: str) -> tuple[Case, ...]:
    """The suite's 16 cases of workload "047" or "051"; ValueError for any other."""
    if workload not in _suite():
        raise ValueError(f"workload: got {workload!r}, want one of {', '.join(_suite())}")
    return tuple(Case(**case) for case in _suite()[workload]["cases"])


def case_for(workload: str, batch: int, seq: int) -> Case:
    """The suite's case of that size, or, where it has none, one with the tightest of its tolerances."""
    cases = suite_cases(workload)
    for case in cases:
        if (case.batch_size, case.seq_len) == (batch, seq):
            return case
    return Case(batch, seq, min(c.max_atol for c in cases), min(c.max_rtol for c in cases))


class _Tensors:
    """A frozen dataclass of tensors that converts as one."""

    def tensors(self) -> dict[str, Tensor]:
        """The fields that hold tensors, by name, in the suite's order."""
        return {
            f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)
        }

    def to(self, *args, **kwargs):
        """Every tensor through Tensor.to: `inputs.to(torch.float64)`, `inputs.to("cuda")`."""
        return replace(self, **{name: t.to(*args, **kwargs) for name, t in self.tensors().items()})


@dataclass(frozen=True)
class ForwardInputs(_Tensors):
    """047's inputs in the suite's order. attention_mask may also be "causal" or None."""

    hidden_states: Tensor  # [B, S, C]
    cos: Tensor  # [B, S, D]
    sin: Tensor  # [B, S, D]
    attention_mask: Tensor | str | None  # [B, 1, S, S], additive
    q_proj_weight: Tensor  # [H*D, C]
    k_proj_weight: Tensor  # [KV*D, C]
    v_proj_weight: Tensor  # [KV*D, C]
    o_proj_weight: Tensor  # [C, H*D]
    q_norm_weight: Tensor  # [D]
    k_norm_weight: Tensor  # [D]


@dataclass(frozen=True)
class BackwardInputs(_Tensors):
    """051's inputs in the suite's order, less those that no output depends on (*_transposed and eps)."""

    grad_query: Tensor  # [B, H, S, D]
    grad_key: Tensor  # [B, KV, S, D]
    grad_value: Tensor  # [B, KV, S, D]
    hidden_states: Tensor  # [B, S, C]
    q_weight: Tensor  # [H*D, C]
    k_weight: Tensor  # [KV*D, C]
    v_weight: Tensor  # [KV*D, C]
    q_norm_weight: Tensor  # [D]
    k_norm_weight: Tensor  # [D]
    q_rstd: Tensor  # [B, H, S, 1] float32
    k_rstd: Tensor  # [B, KV, S, 1] float32
    q_normed: Tensor  # [B, H, S, D]
    k_normed: Tensor  # [B, KV, S, D]


class _Draw:
    """Seeded normal draws in float32, rounded to bfloat16."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def wide(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def __call__(self, *shape: int) -> Tensor:
        return self.wide(*shape).bfloat16()

    def weight(self, out_features: int, fan_in: int) -> Tensor:
        return (self.wide(out_features, fan_in) / math.sqrt(fan_in)).bfloat16()

    def angle(self, *shape: int) -> Tensor:
        return self.wide(*shape).clamp(-math.pi, math.pi)


def causal_mask(batch: int, seq: int) -> Tensor:
    """The suite's additive mask [B, 1, S, S], bfloat16: 0 on and below the diagonal, finfo.min above."""
    mask = torch.full((seq, seq), _LOWEST, dtype=torch.bfloat16).triu_(1)
    return mask.expand(batch, 1, seq, seq).contiguous()


def _forward_suite(config: AttentionConfig, batch: int, seq: int, seed: int) -> ForwardInputs:
    draw = _Draw(seed)
    ones = torch.ones(config.head_dim, dtype=torch.bfloat16)
    return ForwardInputs(
        hidden_states=draw(batch, seq, config.hidden),
        cos=draw.angle(batch, seq, config.head_dim).cos().bfloat16(),
        sin=draw.angle(batch, seq, config.head_dim).sin().bfloat16(),
        attention_mask=causal_mask(batch, seq),
        q_proj_weight=draw.weight(config.q_width, config.hidden),
        k_proj_weight=draw.weight(config.kv_width, config.hidden),
        v_proj_weight=draw.weight(config.kv_width, config.hidden),
        o_proj_weight=draw.weight(config.hidden, config.q_width),
        q_norm_weight=ones,
        k_norm_weight=ones.clone(),
    )


def _forward_causal(config: AttentionConfig, batch: int, seq: int, seed: int) -> ForwardInputs:
    return replace(_forward_suite(config, batch, seq, seed), attention_mask="causal")


def _with_outliers(rows: Tensor) -> Tensor:
    """The last dimension's every 97th channel eight times as large, and every 41st row four times."""
    rows = rows.clone()
    rows[..., ::97] *= 8
    rows[..., ::41, :] *= 4
    return rows


def _correlated(rows: Tensor, draw: _Draw, own: float = 0.25) -> Tensor:
    """Rows that share one direction, each with `own` of its own."""
    return (draw.wide(rows.shape[-1]) + own * rows.float()).bfloat16()


def _norm_weights(draw: _Draw, head_dim: int) -> tuple[Tensor, Tensor]:
    """Norm weights spread about 0, as trained ones are: the scale 1 + w takes either side of 1."""
    return (0.3 * draw.wide(head_dim)).bfloat16(), (0.3 * draw.wide(head_dim)).bfloat16()


def _forward_outliers(config: AttentionConfig, batch: int, seq: int, seed: int) -> ForwardInputs:
    base, draw = _forward_suite(config, batch, seq, seed), _Draw(seed + 1)
    q_norm, k_norm = _norm_weights(draw, config.head_dim)
    hidden = _with_outliers(base.hidden_states)
    return replace(base, hidden_states=hidden, q_norm_weight=q_norm, k_norm_weight=k_norm)


def _forward_correlated(config: AttentionConfig, batch: int, seq: int, seed: int) -> ForwardInputs:
    base, draw = _forward_suite(config, batch, seq, seed), _Draw(seed + 1)
    q_norm, k_norm = _norm_weights(draw, config.head_dim)
    hidden = _correlated(base.hidden_states, draw)
    return replace(base, hidden_states=hidden, q_norm_weight=q_norm, k_norm_weight=k_norm)


def _forward_saturated(config: AttentionConfig, batch: int, seq: int, seed: int) -> ForwardInputs:
    """q and k scaled by 8 each: logits before the cap have a deviation of about 64, and near half exceed it.

    There the eager model's logits keep a step of 0.25, which moves its weights by up to 13%. Hidden states
    with a shared direction give the values a common part, so that its output still lies within the suite's
    tolerance of the exact one.
    """
    base, draw = _forward_suite(config, batch, seq, seed), _Draw(seed + 1)
    large = torch.full_like(base.q_norm_weight, 7.0)
    hidden = _correlated(base.hidden_states, draw, own=0.4)
    return replace(base, hidden_states=hidden, q_norm_weight=large, k_norm_weight=large.clone())


def _random_bias(batch: int, seq: int, seed: int) -> Tensor:
    return _Draw(seed + 2)(batch, 1, seq, seq)


def _uniform_bias(value: float) -> Callable[[int, int, int], Tensor]:
    # float32: in bfloat16 the eager model's logits + bias would keep no more than a few bits of the logit.
    return lambda batch, seq, seed: torch.full((batch, 1, seq, seq), value)


def _block_diagonal(batch: int, seq: int, seed: int) -> Tensor:
    """Four documents of near equal length, each seeing itself only."""
    document = torch.arange(seq) * 4 // max(seq, 4)
    mask = torch.zeros(seq, seq, dtype=torch.bfloat16)
    mask.masked_fill_(document[:, None] != document[None, :], _LOWEST)
    return mask.expand(batch, 1, seq, seq).contiguous()


def _masked_row(batch: int, seq: int, seed: int) -> Tensor:
    """Causal, with the middle row of every batch entry fully masked."""
    mask = causal_mask(batch, seq)
    mask[:, :, seq // 2] = _LOWEST
    return mask


def _with_mask(build: Callable[[int, int, int], Tensor]) -> Callable[..., ForwardInputs]:
    def make(config: AttentionConfig, batch: int, seq: int, seed: int) -> ForwardInputs:
        return replace(_forward_suite(config, batch, seq, seed), attention_mask=build(batch, seq, seed))

    return make


def _backward_suite(config: AttentionConfig, batch: int, seq: int, seed: int) -> BackwardInputs:
    draw, dim = _Draw(seed), config.head_dim
    ones = torch.ones(dim, dtype=torch.bfloat16)
    return BackwardInputs(
        grad_query=draw(batch, config.heads, seq, dim),
        grad_key=draw(batch, config.kv_heads, seq, dim),
        grad_value=draw(batch, config.kv_heads, seq, dim),
        hidden_states=draw(batch, seq, config.hidden),
        q_weight=draw.weight(config.q_width, config.hidden),
        k_weight=draw.weight(config.kv_width, config.hidden),
        v_weight=draw.weight(config.kv_width, config.hidden),
        q_norm_weight=ones,
        k_norm_weight=ones.clone(),
        q_rstd=draw.wide(batch, config.heads, seq, 1).abs() + 0.1,
        k_rstd=draw.wide(batch, config.kv_heads, seq, 1).abs() + 0.1,
        q_normed=draw(batch, config.heads, seq, dim),
        k_normed=draw(batch, config.kv_heads, seq, dim),
    )


def _backward_outliers(config: AttentionConfig, batch: int, seq: int, seed: int) -> BackwardInputs:
    """Outlier rows in the gradients and hidden states; norm weights near -1, 0 and 3 in turn."""
    base = _backward_suite(config, batch, seq, seed)
    near = torch.tensor([-1.0, 0.0, 3.0]).repeat(config.head_dim)[: config.head_dim]
    norm = (near + 0.05 * _Draw(seed + 1).wide(config.head_dim)).bfloat16()
    return replace(
        base,
        grad_query=_with_outliers(base.grad_query),
        grad_value=_with_outliers(base.grad_value),
        hidden_states=_with_outliers(base.hidden_states),
        q_norm_weight=norm,
        k_norm_weight=norm.flip(0),
    )


def _backward_correlated(config: AttentionConfig, batch: int, seq: int, seed: int) -> BackwardInputs:
    base, draw = _backward_suite(config, batch, seq, seed), _Draw(seed + 1)
    return replace(
        base,
        grad_query=_correlated(base.grad_query, draw),
        hidden_states=_correlated(base.hidden_states, draw),
    )


def _backward_realistic(config: AttentionConfig, batch: int, seq: int, seed: int) -> BackwardInputs:
    """normed and rstd from a forward pass of the same hidden states and weights, as training has them."""
    base, draw = _backward_suite(config, batch, seq, seed), _Draw(seed + 1)
    q_norm, k_norm = _norm_weights(draw, config.head_dim)
    saved = {}
    for side, heads, weight in (("q", config.heads, base.q_weight), ("k", config.kv_heads, base.k_weight)):
        projected = (base.hidden_states @ weight.T).unflatten(-1, (heads, config.head_dim)).transpose(1, 2)
        rstd = torch.rsqrt(projected.float().square().mean(-1, keepdim=True) + config.eps)
        saved[f"{side}_rstd"] = rstd.contiguous()
        saved[f"{side}_normed"] = (projected.float() * rstd).bfloat16().contiguous()
    return replace(base, q_norm_weight=q_norm, k_norm_weight=k_norm, **saved)


def _forward_reference(inputs: ForwardInputs, config: AttentionConfig) -> reference.ForwardStages:
    return reference.forward_stages(
        **{f.name: getattr(inputs, f.name) for f in fields(inputs)}, config=config
    )


def _backward_reference(inputs: BackwardInputs, config: AttentionConfig) -> reference.QKVGradients:
    return reference.qkv_backward(**inputs.tensors())


@dataclass(frozen=True, eq=False)
class Workload:
    """One problem: its configuration, input sets by kind and name, and reference.

    reference(inputs, config) returns a named tuple of every stage; `outputs` names those that are judged.
    """

    number: str
    config: AttentionConfig
    outputs: tuple[str, ...]
    kinds: Mapping[str, Mapping[str, Callable]]
    reference: Callable

    @property
    def name(self) -> str:
        """The suite's name of the problem."""
        return _suite()[self.number]["name"]

    @property
    def cases(self) -> tuple[Case, ...]:
        """The suite's 16 cases."""
        return suite_cases(self.number)

    def input_sets(self, kind: str) -> tuple[str, ...]:
        """Names of the input sets of a kind, such as "suite"; ValueError if this workload has none of it."""
        if kind not in self.kinds:
            raise ValueError(
                f"inputs: got {kind!r}, want one of {', '.join(self.kinds)} for workload {self.number}"
            )
        return tuple(self.kinds[kind])

    def make_inputs(
        self, name: str, batch: int, seq: int, seed: int = 0, config: AttentionConfig | None = None
    ):
        """The input set `name` in the suite's dtypes; the same arguments give the same numbers."""
        sets = {known: make for kind in self.kinds.values() for known, make in kind.items()}
        if name not in sets:
            raise ValueError(
                f"inputs: got {name!r}, want one of {', '.join(sets)} for workload {self.number}"
            )
        if batch < 1 or seq < 1:
            raise ValueError(f"batch, seq: got {batch}, {seq}, want at least 1 each")
        return sets[name](config or self.config, batch, seq, seed)


WORKLOADS: Mapping[str, Workload] = {
    "047": Workload(
        number="047",
        config=PRESETS["047"],
        outputs=("output",),
        kinds={
            "suite": {"suite": _forward_suite},
            "causal": {"causal": _forward_causal},
            "structured": {
                "outliers": _forward_outliers,
                "correlated": _forward_correlated,
                "saturated": _forward_saturated,
            },
            "noncausal": {
                "random-bias": _with_mask(_random_bias),
                "bias-minus-100": _with_mask(_uniform_bias(-100.0)),
                "bias-minus-1e4": _with_mask(_uniform_bias(-1e4)),
                "bias-plus-200": _with_mask(_uniform_bias(200.0)),
                "block-diagonal": _with_mask(_block_diagonal),
                "masked-row": _with_mask(_masked_row),
            },
        },
        reference=_forward_reference,
    ),
    "051": Workload(
        number="051",
        config=PRESETS["051"],
        outputs=reference.QKVGradients._fields,
        kinds={
            "suite": {"suite": _backward_suite},
            "realistic": {"realistic": _backward_realistic},
            "structured": {"outliers": _backward_outliers, "correlated": _backward_correlated},
        },
        reference=_backward_reference,
    ),
}


def workload(number: str) -> Workload:
    """The workload "047" or "051"; ValueError for any other."""
    if number not in WORKLOADS:
        raise ValueError(f"workload: got {number!r}, want one of {', '.join(WORKLOADS)}")
    return WORKLOADS[number]


@dataclass(frozen=True)
class OutputCheck:
    """How one output compares. Errors are relative Frobenius norms; both rules need every element finite."""

    name: str
    finite: bool
    matched_ratio: float  # share of elements within the suite's tolerance of the eager bfloat16 model
    max_abs_difference: float  # from the eager bfloat16 model
    difference: float  # from the eager bfloat16 model
    error: float  # against float64
    eager_error: float  # the eager bfloat16 model's, against float64

    @property
    def suite_pass(self) -> bool:
        """|out - eager| <= atol + rtol * |eager| for 99% of the elements."""
        return self.finite and self.matched_ratio >= SUITE_MATCHED_RATIO

    @property
    def project_pass(self) -> bool:
        """Error against float64 at most 1.25 times the eager model's."""
        return self.finite and self.error <= EAGER_ERROR_FACTOR * self.eager_error

    @property
    def passed(self) -> bool:
        """Both rules."""
        return self.suite_pass and self.project_pass


def relative_error(out: Tensor, exact: Tensor) -> float:
    """||out - exact|| / ||exact|| (Frobenius, in float64); 0 if both are zero, inf if only `exact` is."""
    exact = exact.double()
    difference, norm = (out.double() - exact).norm().item(), exact.norm().item()
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm


def check_output(
    name: str, out: Tensor, eager: Tensor, exact: Tensor, atol: float, rtol: float
) -> OutputCheck:
    """Judge `out` against the eager bfloat16 model's result and the float64 one, all of one shape."""
    if not out.shape == eager.shape == exact.shape:
        raise ValueError(f"{name}: got shape {tuple(out.shape)}, want {tuple(eager.shape)}")
    difference = (out.double() - eager.double()).abs()
    within = difference <= atol + rtol * eager.double().abs()
    return OutputCheck(
        name=name,
        finite=bool(torch.isfinite(out).all()),
        matched_ratio=within.double().mean().item(),
        max_abs_difference=difference.max().item(),
        difference=relative_error(out, eager),
        error=relative_error(out, exact),
        eager_error=relative_error(eager, exact),
    )
