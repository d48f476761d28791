"""The GEMM main loop for sm_100a that all projections share: persistent, warp-specialised, tcgen05 with TMEM.

For every tile of a schedule, acc[i, j] = sum_k A[i, k] * B[j, k] in fp32 from bf16 operands; its rows,
rounded to bf16, go to an epilogue. What A, B and the epilogue are is the business of a subclass: this file
moves the data.

    global A, B --TMA--> shared stages --tcgen05.mma--> TMEM accumulators --tcgen05.ld--> rows --> epilogue

Six warps a CTA in three roles, each a method here or of kernels/common/gemm.py, in the order data meets them:

    warp 5     `produce`    one k block (64 elements of K) of A and B a stage, through TMA
    warp 4     `multiply`   four K=16 MMAs a stage; of a CTA pair (cta_group::2) the leading CTA issues them
    warps 0-3  `consume`    one warp per TMEM lane quarter, so that a thread owns a row of the accumulator. It
                            takes the row to registers and gives the accumulator back before the epilogue's
                            work. There are two accumulators: the next tile is being multiplied meanwhile.

Every role walks the same units of work, see kernels/common/schedule.py. A tile that several workers share
over K is added up through a workspace: an epilogue warp writes out its 32 rows of the piece, then counts
itself in. The one that completes the count adds all pieces in K order, puts the sum back in TMEM and goes on
as if the tile had been whole; nobody waits. The count is left at zero, so a workspace needs zeroing once,
when it is allocated, and must not be used by two launches at a time.

To make a GEMM, subclass `PersistentGemm` and provide

    operand_majors      which mode of A and B is contiguous in memory, for each kind of tile (often one)
    loads(...)          an object whose `early` and `late` fetch one k block of a unit into a stage
    epilogue(...)       what becomes of a finished row; `prefetch` and `skip` go with it

and call `launch` from the host entry. out_proj.py is the shortest example.

Programmatic dependent launch: `early` loads must not depend on the preceding kernel in the stream (weights do
not); they fill `early_stages` of the stages before griddepcontrol.wait. All else comes after it. launch_dependents follows the
last load.

Budgets: 227 KB of shared memory a CTA (CUDA programming guide, compute capability 10.0); 128 lanes x 512
columns of TMEM (PTX ISA, "Tensor Memory"), so each of two fp32 accumulators may have up to 256 columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator

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
from cute_gemma.kernels.sm100.boxes import BOX_BYTES, BOX_ROWS, WarpBoxes
from cute_gemma.kernels.sm100.tmem import CHUNK, accumulator_rows, fence_after_sync, fence_before_sync
from cute_gemma.kernels.sm100.tuning import GemmTuning

EPILOGUE_WARPS = 4
MMA_WARP = 4
TMA_WARP = 5
THREADS = 192

ACC_STAGES = 2
BARRIER_BYTES = 256  # at most, with the TMEM address
TMEM_COLUMNS = 512
SUM_CHUNKS = 2  # chunks of a split tile added up at a time: 64 sums and as many loads in flight a thread


@dataclass(frozen=True)
class Pipelines:
    """The two queues of a CTA: shared stages (TMA to MMA) and accumulators (MMA to epilogue)."""

    stages: Any
    accumulators: Any


class PersistentGemm(GemmBase):
    """Base of the GEMM kernels; see the module's text for what a subclass provides.

    A subclass is a frozen dataclass with a field `tuning: GemmTuning`.
    """

    tuning: GemmTuning
    operand_majors: tuple[tuple[str, str], ...] = (("k", "k"),)
    boxes: int = 2  # 32 x 64 boxes of shared memory an epilogue warp has, see boxes.py
    clusters: bool = False  # whether loads and epilogue place rows by rank, as tuning.cluster_m > 1 needs
    scratch_bytes: int = 0  # shared memory the epilogue needs besides its boxes

    # ---- shapes -------------------------------------------------------------------------------------------

    @property
    def stage_count(self) -> int:
        """Stages that fit beside the epilogue's buffers, or the tuning's; ValueError if those do not fit."""
        boxes = EPILOGUE_WARPS * self.boxes * BOX_BYTES
        header = -(-(BARRIER_BYTES + self.scratch_bytes) // ALIGNMENT) * ALIGNMENT
        free = SMEM_BYTES - header - boxes
        fitting = free // self.tuning.stage_bytes
        wanted = self.tuning.stages or fitting
        if wanted > fitting:
            raise ValueError(f"stages: {wanted}, but {fitting} of {self.tuning.stage_bytes} bytes fit")
        return wanted

    @property
    def mma_tiler(self) -> tuple[int, int, int]:
        return (self.tuning.tile_m, self.tuning.tile_n, BLOCK_K)

    def tiled_mmas(self) -> tuple:
        """One tiled MMA per kind of tile; they differ in the major mode of their operands alone."""
        majors = {"k": OperandMajorMode.K, "mn": OperandMajorMode.MN}
        group = tcgen05.CtaGroup.TWO if self.tuning.ctas == 2 else tcgen05.CtaGroup.ONE
        return tuple(
            sm100.make_trivial_tiled_mma(
                BFloat16, BFloat16, majors[a], majors[b], Float32, group, self.mma_tiler[:2]
            )
            for a, b in self.operand_majors
        )

    def stage_layouts(self, tiled_mma):
        """Shared layouts of A and B, (MMA, MMA_M or MMA_N, MMA_K, STAGE)."""
        return (
            sm100.make_smem_layout_a(tiled_mma, self.mma_tiler, BFloat16, self.stage_count),
            sm100.make_smem_layout_b(tiled_mma, self.mma_tiler, BFloat16, self.stage_count),
        )

    # ---- host ---------------------------------------------------------------------------------------------

    def tma_a(self, tensor, kind: int = 0) -> TmaTensor:
        """Load descriptor for an A operand, (M, K) or (M, K, L)."""
        mma = self.tiled_mmas()[kind]
        layout = cute.slice_(self.stage_layouts(mma)[0], (None, None, None, 0))
        op = sm100.cluster_shape_to_tma_atom_A((self.tuning.ctas, 1), mma.thr_id)
        return TmaTensor(
            *cute.nvgpu.make_tiled_tma_atom_A(
                op, tensor, layout, self.mma_tiler, mma, self.cluster_layout(mma).shape
            )
        )

    def tma_b(self, tensor, kind: int = 0) -> TmaTensor:
        """Load descriptor for a B operand, (N, K) or (N, K, L)."""
        mma = self.tiled_mmas()[kind]
        layout = cute.slice_(self.stage_layouts(mma)[1], (None, None, None, 0))
        op = sm100.cluster_shape_to_tma_atom_B((self.tuning.cluster, 1), mma.thr_id)
        return TmaTensor(
            *cute.nvgpu.make_tiled_tma_atom_B(
                op, tensor, layout, self.mma_tiler, mma, self.cluster_layout(mma).shape
            )
        )

    def tma_store(self, tensor) -> TmaTensor:
        """Store descriptor for a row-major (M, N) output, box by box."""
        return TmaTensor(*box_tma(cpasync.CopyBulkTensorTileS2GOp(), tensor, BOX_ROWS))

    def tma_rows(self, tensor) -> TmaTensor:
        """Load descriptor for a row-major (M, N) epilogue input, box by box."""
        return TmaTensor(*box_tma(cpasync.CopyBulkTensorTileG2SOp(), tensor, BOX_ROWS))

    def cluster_layout(self, tiled_mma):
        """(V, M, N, K) layout of the CTAs of a cluster: those of one accumulator, `cluster_m` times."""
        return cute.tiled_divide(cute.make_layout((self.tuning.cluster, 1, 1)), (tiled_mma.thr_id.shape,))

    def launch(self, tma: Any, schedule: TileSchedule, workspace: Workspace | None, stream) -> None:
        """Launch on `stream`; `tma` is whatever `loads` and `epilogue` of the subclass read on the device."""
        ctas = self.tuning.cluster
        if self.tuning.cluster_m > 1 and not self.clusters:
            raise ValueError(f"cluster_m: {self.tuning.cluster_m}, expected 1 for {type(self).__name__}")
        # A short name instead of one that spells out every field.
        self.kernel.set_name_prefix(type(self).__name__, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(self.tiled_mmas(), tma, schedule, workspace).launch(
            grid=(schedule.workers * ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(ctas, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # without it ptxas holds registers down, and spills
            use_pdl=self.programmatic,
        )

    # ---- device entry -------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, mmas: tuple, tma: Any, schedule: TileSchedule, workspace: Any):
        """Set up barriers, TMEM and shared memory, then send every warp to its role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        worker = cute.arch.block_idx()[0] // self.tuning.cluster
        cluster = self.cluster_layout(mmas[0])
        stages = self.stage_count
        if warp == TMA_WARP:
            for atom in tma_atoms(tma):
                cpasync.prefetch_descriptor(atom)

        @cute.struct
        class Storage:
            stage_barriers: cute.struct.MemRange[Int64, stages * 2]
            accumulator_barriers: cute.struct.MemRange[Int64, ACC_STAGES * 2]
            dealloc_barrier: Int64
            tmem_address: Int32

        smem = SmemAllocator()
        storage = smem.allocate(Storage)
        pipelines = self.make_pipelines(storage, cluster)
        tmem = TmemAllocator(
            storage.tmem_address.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=(EPILOGUE_WARPS + 1) * WARP),
            allocator_warp_id=0,
            is_two_cta=self.tuning.ctas == 2,
            two_cta_tmem_dealloc_mbar_ptr=storage.dealloc_barrier.ptr,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)

        scratch = self.make_scratch(smem)
        a_layout, b_layout = self.stage_layouts(mmas[0])
        a_shared = smem.allocate_tensor(BFloat16, a_layout.outer, ALIGNMENT, swizzle=a_layout.inner)
        b_shared = smem.allocate_tensor(BFloat16, b_layout.outer, ALIGNMENT, swizzle=b_layout.inner)
        layout = box_layout(BOX_ROWS, EPILOGUE_WARPS * self.boxes)
        box_memory = smem.allocate_tensor(BFloat16, layout.outer, ALIGNMENT, swizzle=layout.inner)
        boxes = WarpBoxes(box_memory, warp * self.boxes)
        operands = self.stage_views(mmas, a_shared, b_shared)

        first = dynamic(schedule.unit(worker, Int32(0)))  # its arithmetic, while the others come here
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster)

        if warp == TMA_WARP:
            self.produce(pipelines.stages, self.loads(tma, mmas, operands, rank), schedule, worker, first)
        if warp == MMA_WARP:
            tmem.wait_for_alloc()
            accumulators = self.accumulators(mmas[0], tmem.retrieve_ptr(Float32))
            self.multiply(mmas, operands, accumulators, pipelines, (schedule, worker, rank))
        if warp < EPILOGUE_WARPS:
            tmem.allocate(TMEM_COLUMNS)
            self.prepare_epilogue(tma, scratch)
            tmem.wait_for_alloc()
            tmem.relinquish_alloc_permit()
            address = tmem.retrieve_ptr(Float32)
            self.wait_for_launch_before()
            self.consume(
                pipelines.accumulators, address, (tma, scratch, boxes), workspace, (schedule, worker, rank)
            )
            boxes.finish()
            pipeline.NamedBarrier(barrier_id=2, num_threads=EPILOGUE_WARPS * WARP).arrive_and_wait()
            tmem.free(address)

    def make_pipelines(self, storage, cluster) -> Pipelines:
        """A stage is full when its bytes have landed, and empty when its MMAs are done; likewise in TMEM."""
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        warps = pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS * self.tuning.ctas)
        return Pipelines(
            pipeline.PipelineTmaUmma.create(
                barrier_storage=storage.stage_barriers.data_ptr(),
                num_stages=self.stage_count,
                producer_group=one,
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.tuning.cluster_m),
                tx_count=self.tuning.stage_bytes * self.tuning.ctas,
                cta_layout_vmnk=cluster,
                defer_sync=True,
            ),
            pipeline.PipelineUmmaAsync.create(
                barrier_storage=storage.accumulator_barriers.data_ptr(),
                num_stages=ACC_STAGES,
                producer_group=one,
                consumer_group=warps,
                cta_layout_vmnk=cluster,
                defer_sync=True,
            ),
        )

    def stage_views(self, mmas, a_shared, b_shared) -> tuple:
        """(A, B) shared tensors for each kind of tile: the same bytes, laid out for its major modes."""
        views = []
        for mma in mmas:
            a_layout, b_layout = self.stage_layouts(mma)
            views.append(
                (
                    cute.make_tensor(
                        cute.recast_ptr(a_shared.iterator, a_layout.inner, BFloat16), a_layout.outer
                    ),
                    cute.make_tensor(
                        cute.recast_ptr(b_shared.iterator, b_layout.inner, BFloat16), b_layout.outer
                    ),
                )
            )
        return tuple(views)

    def accumulators(self, mma, address):
        """TMEM accumulators as the MMA writes them, (MMA, MMA_M, MMA_N, STAGE)."""
        shape = mma.partition_shape_C(self.mma_tiler[:2])
        return cute.make_tensor(address, mma.make_fragment_C(cute.append(shape, ACC_STAGES)).layout)

    def row_tile(self, unit: Unit, rank):
        """Number of A's tile that the accumulator of a CTA of the cluster covers in a unit."""
        return unit.m * self.tuning.cluster_m + rank // self.tuning.ctas

    def partition_a(self, tma: TmaTensor, mma, shared, rank) -> TmaPartition:
        """This CTA's part of an A operand; tiles are indexed (tile_m, k block, ...)."""
        tiles = cute.local_tile(
            tma.tensor, cute.select(self.mma_tiler, mode=[0, 2]), (None,) * cute.rank(tma.tensor)
        )
        return self._partition(tma.atom, shared, mma.get_slice(rank % self.tuning.ctas).partition_A(tiles))

    def partition_b(self, tma: TmaTensor, mma, shared, rank) -> TmaPartition:
        """This CTA's part of a B operand; tiles are indexed (tile_n, k block, ...)."""
        tiles = cute.local_tile(
            tma.tensor, cute.select(self.mma_tiler, mode=[1, 2]), (None,) * cute.rank(tma.tensor)
        )
        tiles = mma.get_slice(rank % self.tuning.ctas).partition_B(tiles)
        return self._partition(tma.atom, shared, tiles, self.b_sharers(mma, rank))

    def b_sharers(self, mma, rank):
        """(place among them, count, mask) of the CTAs that fetch this CTA's part of B together, or None."""
        if self.tuning.cluster_m == 1:
            return None
        cluster = self.cluster_layout(mma)
        coordinate = cluster.get_flat_coord(rank)
        mask = cpasync.create_tma_multicast_mask(cluster, coordinate, mcast_mode=1)
        return coordinate[1], self.tuning.cluster_m, mask

    @staticmethod
    def _partition(atom, shared, tiles, sharers=None) -> TmaPartition:
        place, count, mask = sharers or (0, 1, None)
        shared, tiles = cpasync.tma_partition(
            atom,
            place,
            cute.make_layout(count),
            cute.group_modes(shared, 0, 3),
            cute.group_modes(tiles, 0, 3),
        )
        return TmaPartition(atom, shared, tiles, mask)

    # ---- what a subclass provides -------------------------------------------------------------------------

    def loads(self, tma, mmas, operands, rank):
        """An object with early(unit, k, stage, barrier) and late(...), which fetch one k block of a unit."""
        raise NotImplementedError

    def prefetch(self, unit: Unit, index, io: tuple, row) -> None:
        """Epilogue work before the accumulator of the worker's unit number `index` is awaited."""

    def epilogue(self, pairs: list, unit: Unit, index, io: tuple, row) -> None:
        """Finish a tile. pairs: the thread's accumulator row as tile_n / 2 bf16 pairs; row: the calling
        warp's first row in the tile; io = (tma, scratch, WarpBoxes)."""
        raise NotImplementedError

    def skip(self, unit: Unit, index, io: tuple, row) -> None:
        """Instead of `epilogue`, for a warp that another one will finish for (stream-K)."""

    def mma_kind(self, unit: Unit):
        """Number of the tiled MMA for a unit, when there are several."""
        return unit.section

    def make_scratch(self, smem):
        """Shared memory of the epilogue, `scratch_bytes` of it."""
        return None

    def prepare_epilogue(self, tma, scratch) -> None:
        """Work of the epilogue warps before the first tile that depends on no preceding kernel."""

    @cute.jit
    def drain(self, stages, state):
        """Every stage's: commits need not arrive in order."""
        if cutlass.const_expr(self.tuning.cluster > 1):
            stages.producer_tail(state)

    # ---- roles --------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, mmas, operands, accumulators, pipelines, place):
        """MMA warp: one accumulator a unit, four MMAs a stage; a stage is released when its MMAs are done."""
        schedule, worker, rank = place
        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stage_count)
        slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACC_STAGES)
        if rank % self.tuning.ctas == 0:
            for index in cutlass.range(schedule.unit_count(worker), unroll=1):
                unit = schedule.unit(worker, index)
                pipelines.accumulators.producer_acquire(slot)
                accumulator = accumulators[(None, None, None, slot.index)]
                for k in cutlass.range(unit.k_end - unit.k_begin, unroll=1):
                    pipelines.stages.consumer_wait(stage)
                    fence_after_sync()  # for both waits
                    for kind in cutlass.range_constexpr(len(mmas)):
                        if cutlass.const_expr(len(mmas) == 1):
                            self.multiply_stage(mmas[0], operands[0], accumulator, stage.index, k > 0)
                        elif self.mma_kind(unit) == kind:
                            self.multiply_stage(mmas[kind], operands[kind], accumulator, stage.index, k > 0)
                    pipelines.stages.consumer_release(stage)
                    stage.advance()
                pipelines.accumulators.producer_commit(slot)
                slot.advance()

    @cute.jit
    def multiply_stage(self, mma, operands, accumulator, stage, accumulate):
        """One k block; the first MMA of a unit overwrites the accumulator."""
        a, b = mma.make_fragment_A(operands[0]), mma.make_fragment_B(operands[1])
        for block in cutlass.range_constexpr(BLOCK_K // 16):
            mma.set(tcgen05.Field.ACCUMULATE, accumulate if block == 0 else True)
            at = (None, None, block, stage)
            cute.gemm(mma, accumulator, a[at], b[at], accumulator)

    @cute.jit
    def consume(self, accumulators, address, io, workspace, place):
        """Epilogue warps: take an accumulator, complete it if its tile is split, hand it to `epilogue`."""
        schedule, worker, rank = place
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = rank * 128 + warp * WARP
        slot = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACC_STAGES)
        for index in cutlass.range(schedule.unit_count(worker), unroll=1):
            unit = schedule.unit(worker, index)
            self.prefetch(unit, index, io, row)
            accumulators.consumer_wait(slot)
            fence_after_sync()
            rows = accumulator_rows(address, self.tuning.tile_n, slot.index)
            complete = cutlass.Boolean(True)
            if cutlass.const_expr(self.tuning.stream_k):
                if unit.pieces > 1:
                    warps = self.tuning.unit_rows // WARP
                    pieces = Pieces(schedule, workspace, unit, worker, row // WARP, warps, self.tuning.tile_n)
                    complete = self.add_pieces(rows, pieces)
            if complete:
                pairs = self.take_row(rows)
                self.release(accumulators, slot)
                self.epilogue(pairs, unit, index, io, row)
            else:
                self.release(accumulators, slot)
                self.skip(unit, index, io, row)
            slot.advance()

    def take_row(self, rows) -> list:
        """The thread's row, rounded to bf16, as tile_n / 2 pairs in registers."""
        pairs = []
        for chunk in range(rows.chunks):
            values = rows.read(chunk)
            pairs += [bf16.pack(values[2 * index], values[2 * index + 1]) for index in range(CHUNK // 2)]
        return pairs

    def release(self, accumulators, slot) -> None:
        """Give an accumulator back: this warp has read its rows."""
        fence_before_sync()
        with cute.arch.elect_one():
            accumulators.consumer_release(slot)

    @cute.jit
    def add_pieces(self, rows, pieces):
        """Deliver this warp's rows of a piece; True for who completes them, with the sum back in TMEM.

        The sum runs over the pieces in K order whoever completes it, so it does not depend on timing. Who
        finds all others delivered need not write out its own piece, which is in TMEM.
        """
        complete = pieces.all_others_delivered()
        if cutlass.not_(complete):
            own = pieces.own
            for chunk in cutlass.range_constexpr(rows.chunks):
                words = cute.recast_tensor(rows.read(chunk), Float32)
                cute.copy(pieces.atom(), as_vectors(words), self.chunk_of(own, chunk))
            complete = pieces.deliver()
        if complete:
            for first in cutlass.range_constexpr(0, rows.chunks, SUM_CHUNKS):
                total = cute.make_rmem_tensor((CHUNK, SUM_CHUNKS), Float32)
                total.fill(0.0)
                for number in cutlass.range(pieces.unit.pieces, unroll=1):
                    part = cute.make_rmem_tensor((CHUNK, SUM_CHUNKS), Float32)
                    owner = pieces.unit.first_worker + number
                    if owner == pieces.worker:
                        for chunk in cutlass.range_constexpr(SUM_CHUNKS):
                            words = cute.recast_tensor(rows.read(first + chunk), Float32)
                            part[None, chunk].store(words.load())
                    else:
                        source = pieces.piece(owner)
                        for chunk in cutlass.range_constexpr(SUM_CHUNKS):
                            target = as_vectors(part[None, chunk])
                            cute.copy(pieces.atom(), self.chunk_of(source, first + chunk), target)
                    total.store(total.load() + part.load())
                for chunk in cutlass.range_constexpr(SUM_CHUNKS):
                    rows.write(first + chunk, cute.recast_tensor(total[None, chunk], Int32))
            rows.written()
            pieces.reset()
        return complete

    @staticmethod
    def chunk_of(piece, chunk: int):
        """The values of a chunk of columns in a row of a piece, (4, CHUNK / 4)."""
        return cute.local_tile(piece, (4, CHUNK // 4), (0, chunk))


def as_vectors(values):
    """32 register values as (4, CHUNK / 4): 16 bytes a copy."""
    return cute.make_tensor(values.iterator, cute.make_layout((4, CHUNK // 4)))


def tma_atoms(value) -> list:
    """The copy atoms of every TmaTensor in nested dataclasses and tuples."""
    if isinstance(value, TmaTensor):
        return [value.atom]
    if is_dataclass(value):
        value = [getattr(value, each.name) for each in fields(value)]
    return [atom for part in value for atom in tma_atoms(part)] if isinstance(value, (list, tuple)) else []
