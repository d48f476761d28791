"""What a call has to do, what the cards can do, and the time that follows from the two.

Operations are counted the usual way: 2 a multiply-add, and a causal mask halves an attention's. Bytes are
the fewest: each input and each output of the whole call, or of a stage, once. A mask tensor is not counted:
that it is causal can be said in a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cute_gemma.config import AttentionConfig

BF16, F32 = 2, 4  # bytes


@dataclass(frozen=True)
class Work:
    """flops: of the matrix products. bytes: to and from memory."""

    flops: int
    bytes: int

    def bound_us(self, tflops: float, tbps: float) -> float:
        """The least time at these rates (1e12 operations and bytes a second), in microseconds."""
        return max(self.flops / tflops, self.bytes / tbps) * 1e-6

    def bound_by(self, tflops: float, tbps: float) -> str:
        """Which of the two rates that time comes from: "tensor" or "dram"."""
        return "tensor" if self.flops / tflops >= self.bytes / tbps else "dram"


@dataclass(frozen=True)
class Card:
    """Rates of one card; those of an SM are per clock.

    mma_flops: dense bf16. mufu, fma: lanes. issue: warp-instructions. smem_bytes: to and from shared memory.
    l2_bytes: from L2 into an SM. tbps: memory, 1e12 bytes a second. ghz: clocks to model at.
    """

    name: str
    sms: int
    mma_flops: int
    mufu: int
    fma: int
    issue: int
    smem_bytes: int
    l2_bytes: int
    tbps: float
    ghz: tuple[float, ...]


# SMs and dense bf16 rates: data sheets (2.25 and 0.99 PFLOP/s). 16 special functions, 128 fp32 lanes, 4
# schedulers and 128 bytes of shared memory an SM and clock: CUDA C++ Programming Guide, arithmetic
# instructions and shared memory. L2: measured on an H200 (kernels/sm90/tuning.py), taken to be no less on a
# B200. Memory: B200's data sheet; H200's is a measured copy. 1.5 GHz is what the public suite locks a B200
# to, 1.85 about its boost.
CARDS: Mapping[str, Card] = {
    "sm_100a": Card("B200", 148, 8192, 16, 128, 4, 128, 90, 8.0, (1.5, 1.85)),
    "sm_90a": Card("H200", 132, 4096, 16, 128, 4, 128, 90, 4.29, (1.55, 1.75)),
}

# The public SOL-ExecBench board's two best suite means on a B200, in microseconds, in its two environments.
BOARD_B200_US = {"047": (155.9, 177.5), "051": (24.5, 25.0)}


def call_work(number: str, config: AttentionConfig, batch: int, seq: int) -> Work:
    """Of one call of workload "047" or "051"."""
    stages = stage_work(number, config, batch, seq)
    rows, c = batch * seq, config.hidden
    width, dim = config.q_width + 2 * config.kv_width, config.head_dim
    flops = sum(work.flops for work in stages.values())
    if number == "047":
        weights = c * (width + config.q_width) + 2 * dim
        return Work(flops, BF16 * (2 * rows * c + 2 * rows * dim + weights))
    normed = config.q_width + config.kv_width
    activations = BF16 * rows * (2 * c + width + normed) + F32 * rows * (config.heads + config.kv_heads)
    return Work(flops, activations + BF16 * (2 * width * c + 2 * dim) + F32 * 2 * dim)


def stage_work(number: str, config: AttentionConfig, batch: int, seq: int) -> dict[str, Work]:
    """Of each launch of a call, by its name in the plan. The mask scan reads a bfloat16 mask."""
    rows, c, dim = batch * seq, config.hidden, config.head_dim
    width = config.q_width + 2 * config.kv_width
    if number == "051":
        normed = config.q_width + config.kv_width
        rstd = F32 * rows * (config.heads + config.kv_heads)
        products = BF16 * (rows * (2 * c + width) + 2 * width * c)
        return {
            "norm backward": Work(0, BF16 * 3 * rows * normed + rstd),
            "gradients": Work(2 * 2 * rows * width * c, products),
        }
    pairs = batch * seq * seq // 2
    return {
        "mask scan": Work(0, BF16 * batch * seq * seq),
        "qkv projection": Work(2 * rows * c * width, BF16 * (rows * (c + 2 * dim + width) + width * c)),
        "attention": Work(
            4 * pairs * config.q_width, BF16 * rows * (2 * config.q_width + 2 * config.kv_width)
        ),
        "output projection": Work(
            2 * rows * c * config.q_width, BF16 * (rows * (c + config.q_width) + c * config.q_width)
        ),
    }
