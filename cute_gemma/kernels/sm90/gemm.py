"""The GEMM main loop for sm_90a that the projections share: persistent, warp-specialised, wgmma.

What it computes: for every tile of a schedule, acc[i, j] = sum_k A[i, k] * B[j, k] in fp32 from bf16
operands, handed rounded to bf16, strip by strip, to an epilogue. What A, B and the epilogue are is the
business of a subclass.

    global A, B --TMA--> shared stages --wgmma--> accumulators in registers --> bf16 strips --> epilogue

Three warpgroups a CTA, in three roles, each a method below or of kernels/common/gemm.py, in the order data
meets them:

    warp 0      `produce`  one k block (64 elements of K) of A and B a stage, through TMA
    warps 1-3   `assist`   what else a subclass has to do
    warps 4-11  `consume`  two warpgroups, 64 rows of each 128 apiece, of which a warp has 16, its *strip*.
                           They share the stages but wait for nothing else of each other. The epilogue of a
                           tile may run while the next one's first k blocks are multiplied (`defers`).

Each role walks the same units (kernels/common/schedule.py). A tile split over K between workers is added up
through a workspace: every consumer warp writes its part of the piece, then counts itself in; the one that
completes the count adds all pieces in K order and goes on as if the tile had been whole. Nobody waits. The
count is left at zero, so the workspace needs zeroing once, when it is allocated. A tile shared by the CTAs of
a cluster is added up through their shared memory (cluster_sum.py).

To make a GEMM, subclass `PersistentGemm` and give it

    `operand_majors`             which mode of A and B is contiguous, for each kind of tile: one, or two if
                                 the schedule's first section holds the tiles of the first kind
    `loads(tma, operands, ...)`  how to fetch k block k of a tile; early and late parts (see PDL)
    `epilogue(...)`              what becomes of a finished strip

and call `launch` from its host entry.

PDL: `early` loads must not depend on the preceding kernel in the stream (weights); they fill `early_stages`
of the stages before griddepcontrol.wait. Everything else happens after it. launch_dependents is issued with the
last load.

Budgets (CUDA programming guide, "Compute capabilities" for 9.0): 227 KB of shared memory a CTA; 65,536
registers, of which a consumer thread's accumulators take tile_m * tile_n / 256.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_gemma.kernels.common import bf16
from cute_gemma.kernels.common.boxes import box_layout, box_tma
from cute_gemma.kernels.common.gemm import (
    ALIGNMENT,
    BLOCK_K,
    SMEM_BYTES,
    WARP,
    GemmBase,
    Pieces,
    TmaPartition,
    TmaTensor,
    Workspace,
)
from cute_gemma.kernels.common.schedule import TileSchedule, Unit, dynamic
from cute_gemma.kernels.common.shared_rounds import plan_shared
from cute_gemma.kernels.sm90.boxes import BOX_BYTES, BOX_COLUMNS, BOX_ROWS, SIXTEENS, WarpBoxes
from cute_gemma.kernels.sm90.cluster_sum import BARRIERS, PARTS, ClusterSum
from cute_gemma.kernels.sm90.tma import evict_first, prefetch_descriptors
from cute_gemma.kernels.sm90.tuning import CONSUMER_WARPS, GemmTuning

WARPGROUP = 128
THREADS = 3 * WARPGROUP
FIRST_CONSUMER = 4  # warp
ROWS = 64  # of a wgmma
# Registers a thread of a consumer and of the TMA warpgroup: 2 * 128 * 232 + 128 * 40 of the SM's 65,536.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
BARRIER_BYTES = 256  # at most
CONSUMER_BARRIER = 1  # named barrier of the consumer warps
HEAD_START = 3  # k blocks of a unit under way before the epilogue of the one before


@dataclass(frozen=True)
class Strip:
    """A warp's 16 rows of a finished tile, rounded to bf16.

    pairs[h][j]: columns 8 j + 2 (lane % 4) and the next, of row 8 h + lane / 4 (PTX ISA, "Register Fragments
    for wgmma.mma_async.m64nNk16"). row: the first of its rows in the unit.
    """

    pairs: list
    row: Any

    def sixteen(self, index: int) -> list:
        """The four fragments of columns [16 index, 16 index + 16), as `WarpBoxes.write` takes them."""
        return [self.pairs[half][column] for column in (2 * index, 2 * index + 1) for half in (0, 1)]

    def store(self, boxes: WarpBoxes, first: Any, store: Callable[[list], None]) -> None:
        """Store the strip as it is through the warp's boxes. first: the output's column of boxes that its own
        first one goes to; store(columns): stores as many boxes to these columns of boxes."""
        per_tile = len(self.pairs[0]) // (BOX_COLUMNS // 8)
        for begin in range(0, per_tile, boxes.count):
            end = min(begin + boxes.count, per_tile)
            boxes.fill([self.sixteen(block) for block in range(begin * SIXTEENS, end * SIXTEENS)])
            store([first + column for column in range(begin, end)])


@dataclass(frozen=True)
class Pending:
    """A warp's part of a finished tile, whose epilogue is to come.

    words: bf16 pairs, as many accumulators hold two after the other; row: the first of the warp's rows in a
    unit.
    """

    words: Any
    row: Any
    io: tuple

    def take(self, accumulator) -> None:
        """Round the accumulators."""
        count = cute.size(self.words)
        values = cute.make_tensor(accumulator.iterator, cute.make_layout(2 * count))
        for index in range(count):
            self.words[index] = bf16.pack(values[2 * index], values[2 * index + 1])

    def strip(self, number: int, columns: int) -> Strip:
        """Strip `number`, of `columns` fragments side by side."""
        first = number * 2 * columns
        pairs = [[self.words[first + 2 * column + half] for column in range(columns)] for half in (0, 1)]
        return Strip(pairs, self.row + 128 * number)


def major_layout(major: str):
    """The layout of an operand whose K ("k") or whose M or N ("mn") is contiguous, as the helpers name it."""
    return LayoutEnum.ROW_MAJOR if major == "k" else LayoutEnum.COL_MAJOR


class PersistentGemm(GemmBase):
    """Base of the GEMM kernels; see the module's text for what a subclass provides.

    A subclass is a frozen dataclass with a field `tuning: GemmTuning`.
    """

    tuning: GemmTuning
    operand_majors: tuple[tuple[str, str], ...] = (("k", "k"),)
    boxes: int = 2  # 16 x 64 boxes of shared memory a consumer warp has, see boxes.py
    scratch_bytes: int = 0  # shared memory the epilogue needs besides its boxes
    defers: bool = (
        False  # whether a unit's epilogue runs during the next unit's first blocks, if registers allow it
    )
    # Whether lines of B are the first to leave the L2 cache. Else they displace what has been written, each of which is
    # a write to memory: fetching 31.5 MB takes an H200 11 us into an L2 full of dirty lines, 8 into a clean one.
    b_evict_first: bool = False

    # ---- shapes
    # ---------------------------------------------------------------------------------------------------

    @property
    def stage_count(self) -> int:
        """Stages that fit beside the epilogue's buffers, or the tuning's number if it fits; else
        ValueError."""
        boxes = CONSUMER_WARPS * self.boxes * BOX_BYTES
        header = -(-(BARRIER_BYTES + self.scratch_bytes) // ALIGNMENT) * ALIGNMENT
        fitting = (SMEM_BYTES - header - boxes) // self.tuning.stage_bytes
        wanted = self.tuning.stages or fitting
        if wanted > fitting:
            raise ValueError(f"stages: {wanted}, but {fitting} of {self.tuning.stage_bytes} bytes fit")
        parts = PARTS * self.words * WARP * 4
        if self.tuning.share > 1 and not self.adds_in_boxes and parts > wanted * self.tuning.stage_bytes:
            raise ValueError(f"stages: {wanted}, but parts of shared tiles take {parts} bytes of them")
        return wanted

    @property
    def adds_in_boxes(self) -> bool:
        """Whether a warp's boxes hold half of its part of a shared tile, and are free while that is multiplied."""
        return not self.defers and self.words * WARP * 4 <= 2 * self.boxes * BOX_BYTES

    @property
    def mma_tiler(self) -> tuple[int, int, int]:
        return (self.tuning.tile_m, self.tuning.tile_n, BLOCK_K)

    @property
    def words(self) -> int:
        """fp32 values of a tile that a consumer thread holds."""
        return self.tuning.tile_m * self.tuning.tile_n // (2 * WARPGROUP)

    def tiled_mmas(self) -> tuple:
        """One tiled MMA per kind of tile; they differ in the major mode of their operands alone."""
        majors = {"k": OperandMajorMode.K, "mn": OperandMajorMode.MN}
        return tuple(
            sm90.make_trivial_tiled_mma(
                BFloat16, BFloat16, majors[a], majors[b], Float32, (2, 1, 1), (ROWS, self.tuning.tile_n)
            )
            for a, b in self.operand_majors
        )

    def stage_layouts(self, kind: int, stages: int | None = None) -> tuple:
        """Shared layouts of A (tile_m, BLOCK_K, STAGE) and B (tile_n, BLOCK_K, STAGE)."""
        a, b = (major_layout(major) for major in self.operand_majors[kind])
        count = stages or self.stage_count
        return (
            sm90.make_smem_layout_a(a, self.mma_tiler, BFloat16, count),
            sm90.make_smem_layout_b(b, self.mma_tiler, BFloat16, count),
        )

    # ---- host
    # -----------------------------------------------------------------------------------------------------

    def tma_a(self, tensor, kind: int = 0) -> TmaTensor:
        """Load descriptor for an A operand, (M, K) or (M, K, L)."""
        layout = cute.select(self.stage_layouts(kind, 1)[0], mode=[0, 1])
        info = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, (self.tuning.tile_m, BLOCK_K)
        )
        return TmaTensor(info[0], info[1])

    def tma_b(self, tensor, kind: int = 0) -> TmaTensor:
        """Load descriptor for a B operand, (N, K) or (N, K, L)."""
        shared = self.tuning.cluster_m > 1
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if shared else cpasync.CopyBulkTensorTileG2SOp()
        layout = cute.select(self.stage_layouts(kind, 1)[1], mode=[0, 1])
        info = cpasync.make_tiled_tma_atom(
            op, tensor, layout, (self.tuning.tile_n, BLOCK_K), num_multicast=self.tuning.cluster_m
        )
        return TmaTensor(info[0], info[1])

    def tma_store(self, tensor) -> TmaTensor:
        """Store descriptor for a row-major (M, N) output, box by box."""
        return TmaTensor(*box_tma(cpasync.CopyBulkTensorTileS2GOp(), tensor, BOX_ROWS))

    def schedule(self, sections: tuple) -> TileSchedule:
        tuning = self.tuning
        if tuning.share == 1:
            return super().schedule(sections)
        return plan_shared(sections, tuning.clusters, tuning.share, tuning.group_m)

    def cluster_layout(self):
        """(V, M, N, K) layout of the CTAs of a cluster."""
        return cute.make_layout((1, self.tuning.cluster, 1, 1))

    def launch(self, tma: Any, schedule: TileSchedule, workspace: Workspace | None, stream) -> None:
        """Launch on `stream`; `tma` is whatever `loads` and `epilogue` of the subclass read on the device."""
        ctas = self.tuning.cluster
        self.kernel(self.tiled_mmas(), tma, schedule, workspace).launch(
            grid=(schedule.workers * self.tuning.cluster_m, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(ctas, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.programmatic,
        )

    # ---- device entry
    # ---------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, mmas: tuple, tma: Any, schedule: TileSchedule, workspace: Any):
        """Set up barriers and shared memory, then send every warp to its role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        worker = cute.arch.block_idx()[0] // self.tuning.cluster_m

        @cute.struct
        class Storage:
            stage_barriers: cute.struct.MemRange[Int64, self.stage_count * 2]
            sum_barriers: cute.struct.MemRange[Int64, BARRIERS]

        smem = SmemAllocator()
        storage = smem.allocate(Storage)
        stages = self.make_stages(storage.stage_barriers.data_ptr())
        if cutlass.const_expr(self.tuning.share > 1):
            if warp == 1:
                self.cluster_sum((), storage.sum_barriers.data_ptr(), rank, warp).initialise()
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster_layout(), is_relaxed=True)

        scratch = self.make_scratch(smem)
        a_layout, b_layout = self.stage_layouts(0)
        a_shared = smem.allocate_tensor(BFloat16, a_layout.outer, ALIGNMENT, swizzle=a_layout.inner)
        b_shared = smem.allocate_tensor(BFloat16, b_layout.outer, ALIGNMENT, swizzle=b_layout.inner)
        layout = box_layout(BOX_ROWS, CONSUMER_WARPS * self.boxes)
        box_memory = smem.allocate_tensor(BFloat16, layout.outer, ALIGNMENT, swizzle=layout.inner)
        operands = self.stage_views(a_shared, b_shared)
        first = dynamic(schedule.unit(worker, Int32(0)))  # its arithmetic, while the others come here

        if cutlass.const_expr(self.tuning.share > 1):
            cute.arch.sync_threads()  # the rest of the cluster is waited for where tiles are added up
        else:
            pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster_layout())

        if warp < FIRST_CONSUMER:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(stages, self.loads(tma, operands, rank), schedule, worker, first)
            else:
                if warp == 1:
                    prefetch_descriptors(tma)
                self.assist(tma, first, warp - 1, FIRST_CONSUMER - 1)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            boxes = WarpBoxes(box_memory, (warp - FIRST_CONSUMER) * self.boxes, self.boxes)
            self.prepare_epilogue(tma, scratch)
            self.wait_for_launch_before()
            adder = workspace
            if cutlass.const_expr(self.tuning.share > 1):
                number = warp - FIRST_CONSUMER
                memory = self.part_halves((box_memory if self.adds_in_boxes else a_shared).iterator, number)
                adder = self.cluster_sum(memory, storage.sum_barriers.data_ptr(), rank, number)
            self.consume((stages, mmas, operands), (tma, scratch, boxes), adder, (schedule, worker, rank, first))
            boxes.finish()

    def make_stages(self, barriers):
        """Barriers: a stage is full when its bytes have landed and empty when every warp that reads it is
        done."""
        stages = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stage_count,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.tuning.unit_warps),
            tx_count=self.tuning.stage_bytes,
            cta_layout_vmnk=self.cluster_layout(),
            defer_sync=True,
        )
        if self.tuning.share > 1:  # nobody else fills this CTA's stages, whatever the size of the cluster
            stages = replace(stages, consumer_mask=None, is_signaling_thread=cute.arch.lane_idx() == 0)
        return stages

    def cluster_sum(self, memory, barriers, rank, warp) -> ClusterSum:
        return ClusterSum(memory, barriers, rank, warp, self.words)

    def part_halves(self, memory, warp) -> tuple:
        """fp32 pointers to the halves of a warp's part of a shared tile: its own boxes and those of the warp that gives
        its part away, or one after the other in the stages."""
        if self.adds_in_boxes:
            offsets = [(warp + other) % CONSUMER_WARPS * (self.boxes * BOX_BYTES) for other in (0, PARTS)]
        else:
            part = warp % PARTS * (self.words * WARP * 4)
            offsets = [part, part + self.words * WARP * 2]
        start = cute.recast_ptr(memory, dtype=Int32).toint()
        return tuple(cute.make_ptr(Float32, start + x, cute.AddressSpace.smem, assumed_align=16) for x in offsets)

    @cute.jit
    def drain(self, stages, state):
        """The last stage's release is enough: each warp releases stages in order."""
        if cutlass.const_expr(self.tuning.cluster_m > 1):
            for _ in cutlass.range_constexpr(self.stage_count - 1):
                state.advance()
            stages.sync_object_empty.wait(state.index, state.phase)

    def stage_views(self, a_shared, b_shared) -> tuple:
        """(A, B) shared tensors for each kind of tile: the same bytes, laid out for that kind's major
        modes."""
        views = []
        for kind in range(len(self.operand_majors)):
            layouts = self.stage_layouts(kind)
            views.append(
                tuple(
                    cute.make_tensor(cute.recast_ptr(shared.iterator, layout.inner, BFloat16), layout.outer)
                    for shared, layout in zip((a_shared, b_shared), layouts)
                )
            )
        return tuple(views)

    def row_tile(self, unit: Unit, rank):
        """Number of A's tile that a CTA of a cluster multiplies in a unit."""
        return unit.m * self.tuning.cluster_m + rank % self.tuning.cluster_m

    def partition_a(self, tma: TmaTensor, shared, rank) -> TmaPartition:
        """A's tiles, indexed (tile_m, k block, ...)."""
        return self._partition(tma, shared, (self.tuning.tile_m, BLOCK_K))

    def partition_b(self, tma: TmaTensor, shared, rank) -> TmaPartition:
        """B's tiles, indexed (tile_n, k block, ...). Each CTA of a cluster fetches its part for all of them. For the
        branch that loads: the cache's policy is made here."""
        sharers = self.tuning.cluster_m
        mask = None if sharers == 1 else Int16((1 << sharers) - 1)
        part = self._partition(tma, shared, (self.tuning.tile_n, BLOCK_K), (rank % sharers, sharers, mask))
        return replace(part, policy=evict_first()) if self.b_evict_first else part

    @staticmethod
    def _partition(tma: TmaTensor, shared, tiler, sharers=(0, 1, None)) -> TmaPartition:
        place, count, mask = sharers
        tiles = cute.local_tile(tma.tensor, tiler, (None,) * cute.rank(tma.tensor))
        shared, tiles = cpasync.tma_partition(
            tma.atom,
            place,
            cute.make_layout(count),
            cute.group_modes(shared, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return TmaPartition(tma.atom, shared, tiles, mask)

    # ---- what a subclass provides
    # ---------------------------------------------------------------------------------

    def loads(self, tma, operands, rank):
        """An object with early(unit, k, stage, barrier) and late(...), which fetch one k block of a unit."""
        raise NotImplementedError

    def epilogue(self, strip: Strip, unit: Unit, io: tuple, ready: Any) -> None:
        """Finish a warp's strip of a tile. io = (tma, scratch, WarpBoxes). ready: what `before_epilogue` gave,
        None if the epilogue is deferred."""
        raise NotImplementedError

    def before_epilogue(self, unit: Unit, io: tuple, row: Any) -> Any:
        """Work for a unit's epilogue that may be done while its last blocks are multiplied."""
        return None

    def make_scratch(self, smem):
        """Shared memory of the epilogue, `scratch_bytes` of it."""
        return None

    def prepare_epilogue(self, tma, scratch) -> None:
        """Work of the consumer warps before the first tile that depends on no preceding kernel."""

    def assist(self, tma, unit, warp, warps: int) -> None:
        """Work for the warps beside the TMA warp; `warp` is one of `warps` a CTA, `unit` the CTA's first."""

    # ---- consumer warps
    # -------------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, source, io, workspace, place):
        """Sum a unit up, complete it if its tile is split, hand its strips to `epilogue`."""
        stages, mmas, operands = source
        schedule, worker, rank, unit = place
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_CONSUMER
        row = rank % self.tuning.cluster_m * self.tuning.tile_m + warp * BOX_ROWS
        fragments = self.fragments(mmas, operands, warp // 4)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stage_count)
        pending = Pending(cute.make_rmem_tensor(self.words // 2, Int32), row, io)
        before, waiting = unit, cutlass.Boolean(False)
        begin, end = Int32(0), Int32(schedule.unit_count(worker))
        # A loop for each kind: with two kinds of wgmma on the same registers the assembler would wait after
        # each one.
        for kind in cutlass.range_constexpr(len(mmas)):
            last = end
            if cutlass.const_expr(kind + 1 < len(mmas)):
                last = Int32(schedule.first_section_count(worker))
            accumulator = cute.make_rmem_tensor(mmas[kind].partition_shape_C(self.mma_tiler[:2]), Float32)
            # Shared tiles are the last ones, and so of the last kind.
            shares = self.tuning.share > 1 and kind + 1 == len(mmas)
            for index in cutlass.range(begin, last, unroll=1):
                queue = stages, state, unit.k_end - unit.k_begin
                done = before
                if cutlass.const_expr(kind == 0 and len(mmas) > 1):
                    done = replace(before, section=0)  # the first section's units come first
                ahead = (schedule, worker, index + 1), (pending, done, waiting)
                state, last_block, following = self.multiply(
                    mmas[kind], fragments[kind], accumulator, queue, ahead
                )
                # While the last block is multiplied; not earlier, see `ClusterSum.offer`.
                if cutlass.const_expr(shares and self.adds_in_boxes):
                    if unit.pieces > 1:
                        io[2].reclaim()
                        workspace.offer()
                ready = self.before_epilogue(unit, io, row)
                warpgroup.wait_group(0)
                stages.consumer_release(last_block)
                complete = cutlass.Boolean(True)
                if cutlass.const_expr(self.tuning.stream_k):
                    if unit.pieces > 1:
                        number = rank * CONSUMER_WARPS + warp
                        pieces = Pieces(
                            schedule, workspace, unit, worker, number, self.tuning.unit_warps, self.words
                        )
                        complete = self.add_pieces(accumulator, pieces)
                if cutlass.const_expr(shares):
                    if unit.pieces > 1:
                        if cutlass.const_expr(not self.adds_in_boxes):
                            workspace.offer()
                        complete = workspace.add(accumulator)
                if complete:
                    pending.take(accumulator)
                    if cutlass.const_expr(not self.defers):
                        self.finish(pending, unit, ready)
                before, waiting = unit, complete
                unit = following
            begin = last
        if cutlass.const_expr(self.defers):
            if waiting:
                self.finish(pending, before, None)

    @cute.jit
    def finish(self, pending, unit, ready):
        """The epilogue of a warp's strips of a unit."""
        for number in cutlass.range_constexpr(self.tuning.tile_m // 128):
            self.epilogue(pending.strip(number, self.tuning.tile_n // 8), unit, pending.io, ready)

    def fragments(self, mmas, operands, group) -> list:
        """For each kind of tile the shared-memory descriptors of a warpgroup's A and B, (MMA, MMA_MN, MMA_K,
        STAGE)."""
        descriptors = []
        for mma, (a, b) in zip(mmas, operands):
            part = mma.get_slice(group * WARPGROUP)
            descriptors.append(
                (mma.make_fragment_A(part.partition_A(a)), mma.make_fragment_B(part.partition_B(b)))
            )
        return descriptors

    @cute.jit
    def multiply(self, mma, fragments, accumulator, queue, ahead):
        """Sum of a unit's k blocks, at least one. A stage is released when the block after it is under way.

        Returns the queue's state, that of the last block, still under way, and the unit after. To find it
        takes some hundred cycles, spent during the first blocks, as the epilogue of the unit before is if the
        kernel defers that.
        """
        stages, state, blocks = queue
        (schedule, worker, index), (pending, before, waiting) = ahead
        state, release = state.clone(), state.clone()
        warpgroup.fence()
        stages.consumer_wait(state)
        self.multiply_stage(mma, fragments, accumulator, state.index, False)
        state.advance()
        begun = Int32(1)
        if cutlass.const_expr(self.defers):
            begun = Int32(cutlass.min(blocks, HEAD_START))
            for _ in cutlass.range(begun - 1, unroll=1):
                stages.consumer_wait(state)
                self.multiply_stage(mma, fragments, accumulator, state.index, True)
                state.advance()
        following = dynamic(schedule.unit(worker, index))
        if cutlass.const_expr(self.defers):
            if waiting:
                self.finish(pending, before, None)
            warpgroup.wait_group(1)
            for _ in cutlass.range(begun - 1, unroll=1):
                stages.consumer_release(release)
                release.advance()
        for _ in cutlass.range(blocks - begun, unroll=1):
            stages.consumer_wait(state)
            self.multiply_stage(mma, fragments, accumulator, state.index, True)
            warpgroup.wait_group(1)
            stages.consumer_release(release)
            release.advance()
            state.advance()
        return state, release, following

    def multiply_stage(self, mma, fragments, accumulator, stage, accumulate: bool) -> None:
        """Issue one k block as one group. The atom is fresh: setting its field rebinds it in this scope."""
        atom = cute.make_mma_atom(mma.op)
        a, b = fragments
        for block in range(BLOCK_K // 16):
            atom.set(warpgroup.Field.ACCUMULATE, accumulate or block > 0)
            at = (None, None, block, stage)
            cute.gemm(atom, accumulator, a[at], b[at], accumulator)
        warpgroup.commit_group()

    @cute.jit
    def add_pieces(self, accumulator, pieces):
        """Deliver this warp's part of a piece; True for the warp that completes the tile, with the sum in its
        place.

        The sum runs over the pieces in K order whoever completes it, so it does not depend on timing. The
        first piece is the last of its worker's share: the others are often there already, and it need not be
        written. The first and the
        second stay where they are for adding the others: x + y = y + x.
        """
        values = cute.make_tensor(accumulator.iterator, cute.make_layout((4, self.words // 4)))
        own = pieces.worker - pieces.unit.first_worker
        complete = cutlass.Boolean(False)
        if own == 0:
            complete = pieces.all_others_delivered()
        begin, end = Int32(0), Int32(0)
        if complete:
            end = Int32(pieces.unit.pieces)
        else:
            cute.copy(pieces.atom(), values, pieces.own)
            complete = pieces.deliver()
            if complete:
                if own < 2:
                    end = Int32(pieces.unit.pieces)
                else:
                    values.fill(0.0)
                    end = Int32(pieces.unit.pieces)
                    own = Int32(-1)
        for number in cutlass.range(begin, end, unroll=1):
            if number != own:
                part = cute.make_rmem_tensor(values.shape, Float32)
                cute.copy(pieces.atom(), pieces.piece(pieces.unit.first_worker + number), part)
                values.store(values.load() + part.load())
        if complete:
            pieces.reset()
        return complete
