"""Adding up a tile whose k blocks the CTAs of a cluster have shared, through each other's shared memory.

Every warp's part of the tile has an owner among the CTAs, in turn. When all are done with their stages, each
warp stores its values where the owner's stages were; the owner's warp of the same number adds them up in K
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import nvvm

from cute_gemma.kernels.common.gemm import WARP
from cute_gemma.kernels.sm90.tuning import CONSUMER_WARPS

BARRIERS = 1 + CONSUMER_WARPS


@dataclass(frozen=True)
class ClusterSum:
    """memory: fp32 pointer to at least `ctas` parts for every warp that a CTA owns, 16-byte aligned.

    barriers: mbarriers, the first for "all stages are free", then one for each warp's parts. Each serves
    once.
    rank, warp: of the caller; words: fp32 values of a part that a thread holds.
    """

    memory: Any
    barriers: Any
    rank: Any
    warp: Any
    ctas: cutlass.Constexpr[int]
    words: cutlass.Constexpr[int]

    @cute.jit
    def initialise(self) -> None:
        """By one warp, before the cluster's first barrier."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(self.barriers, self.ctas * CONSUMER_WARPS)
            for warp in cutlass.range_constexpr(CONSUMER_WARPS):
                cute.arch.mbarrier_init(self.barriers + 1 + warp, self.ctas)

    @cute.jit
    def add(self, accumulator):
        """True for the warp that owns its part of the tile, with the sum in the accumulator's place."""
        values = cute.make_tensor(accumulator.iterator, cute.make_layout((4, self.words // 4)))
        lane = cute.arch.lane_idx()
        owner = self.warp % self.ctas
        arrived = self.barriers + 1 + self.warp

        if lane == 0:  # the products that read the stages are the whole warp's, and done
            for rank in cutlass.range_constexpr(self.ctas):
                cute.arch.mbarrier_arrive(self.barriers, rank, scope=nvvm.MemScopeKind.CLUSTER)
        cute.arch.mbarrier_wait(self.barriers, 0)

        remote = cute.arch.map_dsmem_ptr(self.part(self.rank), owner)
        cute.copy(self.atom(), values, self.view(remote))
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(arrived, owner, scope=nvvm.MemScopeKind.CLUSTER)

        if owner == self.rank:
            cute.arch.mbarrier_wait(arrived, 0)
            cute.arch.fence_acq_rel_cluster()
            values.fill(0.0)
            for rank in cutlass.range(self.ctas, unroll=1):
                received = cute.make_rmem_tensor(values.shape, Float32)
                cute.copy(self.atom(), self.view(self.part(rank)), received)
                values.store(values.load() + received.load())
        return owner == self.rank

    def part(self, rank):
        """Where the owner receives the calling warp's part from the CTA `rank`, the calling thread's first 16
        bytes."""
        place = self.warp // self.ctas * self.ctas + rank
        return (self.memory + place * (WARP * self.words) + cute.arch.lane_idx() * 4).align(16)

    def view(self, pointer):
        """The calling thread's values in a part, (4, words / 4): a warp touches 512 bytes at a time."""
        return cute.make_tensor(pointer, cute.make_layout((4, self.words // 4), stride=(1, 4 * WARP)))

    def atom(self):
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
