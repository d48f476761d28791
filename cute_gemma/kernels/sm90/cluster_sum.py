"""Adding up a tile whose k blocks the two CTAs of a cluster have shared, through their shared memory.

The parts of the first warpgroup's warps are one CTA's, the rest the other's, so that either finishes its own on
all four of its SM's sub-partitions. Once the owner's memory is free, the other CTA's warp of the same number
stores its values there by st.async, whose bytes an mbarrier of the owner counts: no fence has to wait until they
have arrived. x + y = y + x, so the sum does not depend on who adds.

The memory is the boxes of the epilogue (boxes.py), those of the warp and of the one that gives its part away,
offered while the last block is multiplied; or the stages, free after that, where boxes are too small or still in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_gemma.kernels.common.gemm import WARP
from cute_gemma.kernels.sm90.tuning import CONSUMER_WARPS

# mbarriers: "the other CTA's memory is free", then for each warp "its part is here".
BARRIERS = 1 + CONSUMER_WARPS
PARTS = CONSUMER_WARPS // 2  # that a CTA receives


@dataclass(frozen=True)
class ClusterSum:
    """memory: fp32 pointers, 16-byte aligned, to the two halves of the warp's part, WARP * words values.

    barriers: BARRIERS mbarriers. Each serves once. rank, warp: of the caller; words: fp32 values of a part that a
    thread holds.
    """

    memory: tuple
    barriers: Any
    rank: Any
    warp: Any
    words: cutlass.Constexpr[int]

    @cute.jit
    def initialise(self) -> None:
        """By one warp, before all threads of the cluster arrive at its barrier, for which `offer` waits."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(self.barriers, CONSUMER_WARPS)
            for warp in cutlass.range_constexpr(CONSUMER_WARPS):
                cute.arch.mbarrier_init(self.barriers + 1 + warp, 1)

    @cute.jit
    def offer(self) -> None:
        """Tells the other CTA that this warp no longer needs the memory.

        Called once all of the tile's blocks have arrived: compute-sanitizer's racecheck hung where warps waited for the
        cluster while this CTA's loads waited for those warps to release stages.
        """
        cute.arch.cluster_wait()  # until the other CTA has its barriers
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.barriers, 1 - self.rank)

    @cute.jit
    def add(self, accumulator):
        """True for the warp that owns its part of the tile, with the sum in the accumulator's place. After `offer`."""
        groups = self.words // 4
        values = cute.make_tensor(accumulator.iterator, cute.make_layout((4, groups)))
        lane = cute.arch.lane_idx()
        owner = self.warp // PARTS
        arrived = self.barriers + 1 + self.warp
        halves = [(half + lane * 4).align(16) for half in self.memory]
        places = [(i // (groups // 2), i % (groups // 2) * 4 * WARP) for i in range(groups)]
        if owner == self.rank:
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, WARP * self.words * 4)
            cute.arch.mbarrier_wait(arrived, 0)
            for i in cutlass.range_constexpr(groups):
                half, offset = places[i]
                received = cute.make_rmem_tensor(4, Float32)
                cute.copy(self.atom(), cute.make_tensor(halves[half] + offset, cute.make_layout(4)), received)
                for j in cutlass.range_constexpr(4):
                    values[j, i] = values[j, i] + received[j]
        else:
            cute.arch.mbarrier_wait(self.barriers, 0)
            *remote, barrier = [cute.arch.map_dsmem_ptr(pointer, owner).toint() for pointer in (*halves, arrived)]
            bits = cute.recast_tensor(values, Int32)
            for i in cutlass.range_constexpr(groups):  # a warp's 512 bytes at a time
                half, offset = places[i]
                store_async((remote[half], barrier), offset * 4, [bits[j, i] for j in range(4)])
        return owner == self.rank

    def atom(self):
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)


@dsl_user_op
def store_async(remote: tuple, offset: int, four: list, *, loc=None, ip=None) -> None:
    """st.async of 16 bytes to remote[0] + offset, counted by the mbarrier at remote[1] (shared::cluster
    addresses).

    cute.arch.store_async_dsmem maps every address by itself, and the compiler keeps all of them in registers.
    """
    text = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}}, [$5];"
    operands = [Int32(value).ir_value(loc=loc, ip=ip) for value in (remote[0], *four, remote[1])]
    llvm.inline_asm(
        None, operands, text, ",".join("r" * len(operands)), has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
