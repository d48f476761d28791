"""What the GEMMs of every architecture share: how operands are named, the TMA warp's loop, pieces of split
tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64

from cute_gemma.jit.signature import TensorArg
from cute_gemma.kernels.common.schedule import TileSchedule, dynamic, plan

WARP = 32
SMEM_BYTES = 232448  # 227 KB a CTA, CUDA programming guide, "Compute capabilities", 9.0 and 10.0
ALIGNMENT = 1024  # of shared memory under a 128-byte swizzle: eight rows of 128 bytes
BLOCK_K = 64  # elements of K a stage: the 128 bytes that a swizzled row holds
EARLY, LATE = "early", "late"  # operands that the kernel before must not and may have written


@dataclass(frozen=True)
class Workspace:
    """Memory for split tiles: partials f32 [tuning.partial_floats], counters i32 [tuning.counters]."""

    partials: Any
    counters: Any


@dataclass(frozen=True)
class TmaTensor:
    """A TMA copy atom and the coordinate tensor that goes with it."""

    atom: Any
    tensor: Any


@dataclass(frozen=True)
class TmaPartition:
    """One operand seen by one CTA: shared memory by stage, global memory by tile and k block.

    mask: the CTAs of the cluster that receive what this CTA fetches, None for itself alone. policy: a createpolicy's
    of the L2 cache, None for its own.
    """

    atom: Any
    shared: Any
    tiles: Any
    mask: Any = None
    policy: Any = None

    def load(self, stage, barrier, *coordinates):
        """Fetch the tile at `coordinates` (tile, k block, ...) into `stage`, counted by `barrier`."""
        cute.copy(
            self.atom,
            self.tiles[(None, *coordinates)],
            self.shared[(None, stage)],
            tma_bar_ptr=barrier,
            mcast_mask=self.mask,
            cache_policy=self.policy,
        )


class GemmBase:
    """Base of the architectures' GEMMs. A subclass has `tuning`, `stage_count`, `drain`, and `loads`: see
    `produce`."""

    tuning: Any
    stage_count: int
    programmatic: bool = True  # launched with PDL: the kernel before it must not write what is loaded early
    # Stages whose early operands are fetched before the wait for the preceding kernel; None: all. Loads are
    # served in order: where the wait is short, what comes before the first late operand delays it.
    early_stages: int | None = None

    def drain(self, stages, state) -> None:
        """Wait until other CTAs have released this one's stages for the last time, as its shared memory has
        to be there then. state: of the block after the last."""
        raise NotImplementedError

    def workspace_signature(self) -> tuple:
        """The arguments that come last in a stream-K kernel's signature."""
        if not self.tuning.stream_k:
            return ()
        return (
            TensorArg("partials", "f32", (self.tuning.partial_floats,)),
            TensorArg("counters", "i32", (self.tuning.counters,)),
        )

    def schedule(self, sections: tuple) -> TileSchedule:
        """Who computes what of the sections' tiles."""
        return plan(sections, self.tuning.workers, self.tuning.group_m, self.tuning.stream_k)

    @cute.jit
    def produce(self, stages, loads, schedule, worker, first):
        """TMA warp: keep the stages full. Early operands of the first stages go out before the dependency
        wait, see `early_stages`.

        loads: an object with early(unit, k, stage, barrier) and late(...), which fetch one k block of a unit,
        or whatever the subclass's `fetch_blocks` takes. first: the worker's first unit, `dynamic`.
        """
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stage_count)
        count = schedule.unit_count(worker)

        most = self.stage_count if self.early_stages is None else min(self.early_stages, self.stage_count)
        ahead = Int32(cutlass.min(first.k_end - first.k_begin, most))
        if count == 0:
            ahead = Int32(0)
        span = first.k_begin, first.k_begin + ahead
        if cutlass.const_expr(most > 0):
            self.fetch_blocks(stages, loads, first, span, state.clone(), (EARLY,))
        self.wait_for_launch_before()
        if cutlass.const_expr(most > 0):
            state = self.fetch_blocks(stages, loads, first, span, state, (LATE,))

        unit, begin = first, Int32(first.k_begin + ahead)
        for index in cutlass.range(count, unroll=1):
            state = self.fetch_blocks(stages, loads, unit, (begin, unit.k_end), state, (EARLY, LATE))
            unit = dynamic(schedule.unit(worker, index + 1))
            begin = Int32(unit.k_begin)
        cute.arch.griddepcontrol_launch_dependents()
        self.drain(stages, state)

    @cute.jit
    def wait_for_launch_before(self):
        """Nothing to do where the launch is not programmatic: it begins when all before it are done."""
        if cutlass.const_expr(self.programmatic):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def fetch_blocks(self, stages, loads, unit, span, state, parts: cutlass.Constexpr):
        """Load these parts of the unit's k blocks [span[0], span[1]). Returns the state after them."""
        for k in cutlass.range(span[0], span[1], unroll=1):
            barrier = self.open_stage(stages, state, parts)
            if cutlass.const_expr(EARLY in parts):
                loads.early(unit, k, state.index, barrier)
            if cutlass.const_expr(LATE in parts):
                loads.late(unit, k, state.index, barrier)
            state.advance()
        return state

    @staticmethod
    def open_stage(stages, state, parts):
        """The barrier that counts what is loaded into a stage, once the stage is free: at first each is, and
        late parts follow early ones."""
        if EARLY in parts:
            stages.producer_acquire(state, True if LATE not in parts else None)
        return stages.producer_get_barrier(state)


@dataclass(frozen=True)
class Pieces:
    """The pieces of one split tile, as one warp exchanges them: its part of the tile, `words` fp32 values a
    thread.

    warp: this warp's number among the `warps` of the workers that share an accumulator.
    """

    schedule: Any
    workspace: Workspace
    unit: Any
    worker: Any
    warp: Any
    warps: cutlass.Constexpr[int]
    words: cutlass.Constexpr[int]

    def piece(self, worker):
        """The calling thread's values in the piece of a worker, (4, words / 4): a warp touches 512 bytes at a
        time."""
        slot = self.schedule.partial_slot(worker, self.unit.tile)
        block = (slot * self.warps + self.warp) * Int64(WARP * self.words)
        base = self.workspace.partials.iterator + block + cute.arch.lane_idx() * 4
        layout = cute.make_layout((4, self.words // 4), stride=(1, 4 * WARP))
        return cute.make_tensor(base.align(16), layout)

    @property
    def own(self):
        """The piece of the calling worker."""
        return self.piece(self.worker)

    def atom(self):
        """16 bytes a thread."""
        return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)

    def _counter(self):
        return self.workspace.counters.iterator + self.unit.tile * self.warps + self.warp

    @cute.jit
    def all_others_delivered(self):
        """Whether every piece but the calling warp's has been counted in."""
        arrived = Int32(0)
        if cute.arch.lane_idx() == 0:
            arrived = cute.arch.load(self._counter(), Int32, sem="acquire", scope="gpu")
        arrived = cute.arch.shuffle_sync(arrived, 0)
        cute.arch.sync_warp()
        return arrived == self.unit.pieces - 1

    @cute.jit
    def deliver(self):
        """Count the calling warp's piece, which it has written, in; True for the warp that completes the
        count."""
        cute.arch.sync_warp()
        arrived = Int32(0)
        if cute.arch.lane_idx() == 0:
            arrived = cute.arch.atomic_add(self._counter(), Int32(1), sem="acq_rel", scope="gpu")
        arrived = cute.arch.shuffle_sync(arrived, 0)
        cute.arch.sync_warp()
        return arrived == self.unit.pieces - 1

    @cute.jit
    def reset(self):
        """Leave the count at zero for the next launch."""
        if cute.arch.lane_idx() == 0:
            cute.arch.store(self._counter(), Int32(0))
