"""Adding up a tile whose k blocks the CTAs of a cluster have shared, through their shared memory.

Every warp's part of the tile has an owner among the CTAs, in turn. Once the owner is done with its stages, the
other CTAs' warps of the same number store their values there by st.async, whose bytes an mbarrier of the owner
counts: no fence has to wait until they have arrived. Who owns a part and the order of its sum depend on no
timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_gemma.kernels.common.gemm import WARP
from cute_gemma.kernels.sm90.tuning import CONSUMER_WARPS, SHARES

# mbarriers: for each CTA of a cluster "its stages are free", then for each warp "its parts are here".
BARRIERS = max(SHARES) + CONSUMER_WARPS


@dataclass(frozen=True)
class ClusterSum:
    """memory: fp32 pointer to `parts` parts of WARP * words values, 16-byte aligned.

    barriers: BARRIERS mbarriers. Each serves once. rank, warp: of the caller; ctas: of the cluster; words:
    fp32 values of a part that a thread holds.
    """

    memory: Any
    barriers: Any
    rank: Any
    warp: Any
    ctas: cutlass.Constexpr[int]
    words: cutlass.Constexpr[int]

    @staticmethod
    def parts(ctas: int) -> int:
        """How many a CTA receives at most: of each warp that it owns one from every other CTA."""
        return -(-CONSUMER_WARPS // ctas) * (ctas - 1)

    @cute.jit
    def initialise(self) -> None:
        """By one warp, before the cluster's first barrier."""
        with cute.arch.elect_one():
            for cta in cutlass.range_constexpr(self.ctas):
                cute.arch.mbarrier_init(self.barriers + cta, CONSUMER_WARPS)
            for warp in cutlass.range_constexpr(CONSUMER_WARPS):
                cute.arch.mbarrier_init(self.arrived(warp), 1)

    @cute.jit
    def add(self, accumulator):
        """True for the warp that owns its part of the tile, with the sum in the accumulator's place."""
        values = cute.make_tensor(accumulator.iterator, cute.make_layout((4, self.words // 4)))
        lane = cute.arch.lane_idx()
        owner = self.warp % self.ctas
        arrived = self.arrived(self.warp)

        if lane == 0:  # the products that read the stages are the whole warp's, and done
            for cta in cutlass.range_constexpr(self.ctas):
                if cta != self.rank:
                    cute.arch.mbarrier_arrive(self.barriers + self.rank, cta)
        if owner == self.rank:
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, (self.ctas - 1) * WARP * self.words * 4)
            cute.arch.mbarrier_wait(arrived, 0)
            for number in cutlass.range_constexpr(self.ctas - 1):
                received = cute.make_rmem_tensor(values.shape, Float32)
                layout = cute.make_layout(values.shape, stride=(1, 4 * WARP))
                cute.copy(self.atom(), cute.make_tensor(self.part(number), layout), received)
                values.store(values.load() + received.load())
        else:
            cute.arch.mbarrier_wait(self.barriers + owner, 0)
            part = self.part(self.rank - Int32(self.rank > owner))
            bits = cute.recast_tensor(values, Int32)
            for i in cutlass.range_constexpr(self.words // 4):  # a warp's 512 bytes at a time
                four = tuple(bits[j, i] for j in range(4))
                cute.arch.store_async_dsmem((part + i * 4 * WARP).align(16), four, arrived, owner)
        return owner == self.rank

    def arrived(self, warp):
        return self.barriers + self.ctas + warp

    def part(self, number):
        """Where the owner receives the calling warp's part from the other CTA of this number, the calling
        thread's first 16 bytes."""
        place = self.warp // self.ctas * (self.ctas - 1) + number
        return (self.memory + place * (WARP * self.words) + cute.arch.lane_idx() * 4).align(16)

    def atom(self):
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
