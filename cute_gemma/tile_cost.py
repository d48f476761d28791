"""What an interior 128x128 tile costs the attention kernel, counted in emulation.

Without a mask every tile is an interior one. A launch over S = 256 has 4 tiles, one over S = 512 has 16 in
twice as many CTAs: N(512) - 2 N(256) is what 8 tiles cost, start and end of a CTA left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from . import emulator, functional
from .config import AttentionConfig
from .workloads import workload

_SHORT, _LONG = 256, 512
_TILE = 128
_TILES = (_LONG // _TILE) ** 2 - 2 * (_SHORT // _TILE) ** 2
_WARP = 32
# PTX ISA, instructions that the special function unit executes; div is a sequence around one of them.
_SPECIAL = ("ex2", "lg2", "tanh", "rcp", "rsqrt", "sqrt", "sin", "cos")


@dataclass(frozen=True)
class TileCost:
    """Of one tile, over all warps. instructions: warp-instructions besides register moves, as PTX.

    special: special-function (MUFU) operations a logit. divisions: warp-instructions that divide.
    """

    instructions: float
    special: float
    divisions: float


def interior_tile_cost(inputs: str = "suite", target: str | None = None) -> TileCost:
    """The cost on 047's q, k and v of one head with the input set `inputs`, softcapped, head_dim 128.

    "suite" keeps logits far from the cap; "saturated" takes the path for logits near it.
    """
    short, long = (_counts(inputs, seq, target) for seq in (_SHORT, _LONG))
    tiles = {opcode: (long[opcode] - 2 * short[opcode]) / _TILES for opcode in long | short}

    def total(*names: str) -> float:
        return sum(count for opcode, count in tiles.items() if opcode.partition(".")[0] in names)

    return TileCost(
        instructions=sum(tiles.values()) - total("mov"),
        special=total(*_SPECIAL, "div") * _WARP / _TILE**2,
        divisions=total("div"),
    )


def _counts(inputs: str, seq: int, target: str | None) -> Counter[str]:
    """Warp-instructions by opcode of attention without a mask on one head."""
    plan = functional.plan_attention(*_qkv(inputs, seq), mask=None, target=target)
    counts: Counter[str] = Counter()
    for step in plan.steps:
        for report in plan.launch(step, emulator.Options(hazards=False)):
            counts.update(report.by_opcode)
    return counts


def _qkv(inputs: str, seq: int) -> tuple[Tensor, Tensor, Tensor]:
    problem = workload("047")
    config = AttentionConfig(hidden=problem.config.head_dim, heads=1, kv_heads=1)
    drawn = problem.make_inputs(inputs, 1, seq, config=config)
    return problem.reference(drawn, config)[:3]
