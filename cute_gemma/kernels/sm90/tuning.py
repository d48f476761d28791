"""Chooses tile shape and schedule of a GEMM on sm_90a from its sizes, by counting the candidates' cycles.

The count is coarse, but what decides is coarse too: how many tiles the last round is short of, whether a tile
is wide enough for its operands to arrive as fast as they are multiplied, and what adding up split tiles
costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from cute_gemma.kernels.common.gemm import BLOCK_K
from cute_gemma.kernels.common.schedule import split_plan
from cute_gemma.kernels.common.shared_rounds import shared_tiles

SM_COUNT = 132  # of an H100 or H200 SXM
# Clusters of more CTAs leave SMs idle, since none crosses a GPC. Three that shared a tile took the QKV
# projection of 128 rows, on 120 CTAs, 21.6 us instead of the 17.5 of two on 80; four took the output projection,
# on 96, 16.5 us instead of 14.7, and the QKV projection of 512 rows 56 instead of 36.
CLUSTER_SIZES = (1, 2)
CONSUMER_WARPS = 8  # two warpgroups
MMA_COLUMNS = 256  # largest N of a wgmma (PTX ISA, wgmma.mma_async)
FLOPS_PER_CYCLE = 4096  # dense bf16, an SM (H100 white paper)
# Measured on an H200, in cycles of about 1.55 GHz, which its power allows under these kernels.
TMA_BYTES_PER_CYCLE = 66  # into an SM
# What tiles of so many columns take longer for the same work: they move more bytes for it through shared
# memory.
NARROW = {64: 1.1, 128: 1.05, 192: 1.03, 256: 1.0}
# From here on power bounds the clock: narrow tiles, which need more of it for the same work, lose, and a k block
# takes less where two CTAs share B.
MANY_ROWS = 1536
MULTICAST = 0.99
EPILOGUE_CYCLES = 12  # a tile column, during which nothing is multiplied
SHARE_CYCLES = 2500  # adding up through shared memory
EXCHANGE_CYCLES = 5500  # adding up through memory: latency
EXCHANGE_CYCLES_PER_ELEMENT = 0.6  # and what it takes for each element of the tile
START_CYCLES = 5500  # filling the pipeline and leaving it


@dataclass(frozen=True)
class GemmTuning:
    """Tile shape and schedule of a GEMM.

    tile_m: rows of a CTA's tile, 128 or 256, dealt to two consumer warpgroups 64 at a time.
    cluster_m: CTAs, one tile below the other, that form a cluster, walk together and share B by multicast.
    tile_n: columns of a tile, a multiple of 64; tile_m * tile_n may not pass 128 * 256.
    stages: shared-memory stages (None: as many as fit). stream_k: split tiles over K where whole tiles would
    leave workers idle. group_m: unit rows walked together. sm_count: CTAs resident at once.
    share: CTAs of a cluster that share the tiles of a last round that is not full
    (kernels/common/shared_rounds.py); goes with neither cluster_m > 1 nor stream_k.
    """

    tile_m: int = 128
    tile_n: int = 128
    stages: int | None = None
    stream_k: bool = False
    group_m: int = 8
    sm_count: int = SM_COUNT
    cluster_m: int = 1
    share: int = 1

    def __post_init__(self) -> None:
        if self.tile_m not in (128, 256):
            raise ValueError(f"tile_m: {self.tile_m}, expected 128 or 256")
        # 128 accumulator registers a thread leave room for an epilogue.
        widest = min(MMA_COLUMNS, 128 * 256 // self.tile_m)
        if self.tile_n % 64 or not 64 <= self.tile_n <= widest:
            raise ValueError(f"tile_n: {self.tile_n}, expected a multiple of 64 from 64 to {widest}")
        if self.cluster_m not in CLUSTER_SIZES:
            raise ValueError(f"cluster_m: {self.cluster_m}, expected 1 or 2")
        if self.share not in CLUSTER_SIZES:
            raise ValueError(f"share: {self.share}, expected 1 or 2")
        if self.share > 1 and (self.cluster_m > 1 or self.stream_k):
            raise ValueError(f"share: {self.share}, expected 1 with cluster_m > 1 or stream_k")
        if self.sm_count < self.cluster:
            raise ValueError(
                f"sm_count: {self.sm_count}, expected at least the {self.cluster} CTAs of one cluster"
            )
        if self.group_m < 1:
            raise ValueError(f"group_m: {self.group_m}, expected at least 1")
        if self.stages is not None and self.stages < 2:
            raise ValueError(f"stages: {self.stages}, expected at least 2")

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.share

    @property
    def clusters(self) -> int:
        """Clusters resident at once."""
        return self.sm_count // self.cluster

    @property
    def unit_rows(self) -> int:
        """Rows of a unit: of the tiles of a cluster."""
        return self.tile_m * self.cluster_m

    @property
    def unit_warps(self) -> int:
        """Consumer warps that share a unit."""
        return CONSUMER_WARPS * self.cluster_m

    @property
    def workers(self) -> int:
        """Most units in work at once: each takes cluster_m CTAs."""
        return self.sm_count // self.cluster_m

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return (self.tile_m + self.tile_n) * BLOCK_K * 2

    @property
    def partial_floats(self) -> int:
        """fp32 elements of the workspace for pieces of split tiles: two slots a worker."""
        return 2 * self.workers * self.unit_rows * self.tile_n

    @property
    def counters(self) -> int:
        """int32 counters of the workspace, one for each warp of a split tile; zero between launches."""
        return 2 * self.workers * self.unit_warps


def choose_tuning(
    rows: int,
    columns: tuple[int, ...],
    inner: int,
    shapes: tuple[tuple[int, int], ...],
    sm_count: int = SM_COUNT,
    epilogue: float = EPILOGUE_CYCLES,
    spills: Callable[[GemmTuning], bool] | None = None,
) -> GemmTuning:
    """The candidate with the lowest count for `rows` x sum(columns) outputs of `inner` products each.

    columns: widths of the matrices side by side, each cut into tiles of its own. shapes: (tile_m, tile_n) to
    choose from. epilogue: its cycles a tile column. spills: whether a candidate is to be left out (None: no).
    """
    if rows > MANY_ROWS:
        shapes = tuple(shape for shape in shapes if shape[1] >= 192)
    fitting = (t for t in candidates(shapes, inner, sm_count) if spills is None or not spills(t))
    return min(fitting, key=lambda t: gemm_cycles(t, rows, columns, inner, epilogue))


def candidates(shapes: tuple[tuple[int, int], ...], inner: int, sm_count: int) -> list[GemmTuning]:
    """Every tuning with these tile shapes, the simplest first."""
    ways: list[dict] = [{}]
    if sm_count >= 2:
        ways += [{"share": 2}] if inner > BLOCK_K else []
        ways += [{"cluster_m": 2}, {"cluster_m": 2, "stream_k": True}]
    ways.append({"stream_k": True})
    return [GemmTuning(m, n, sm_count=sm_count, **way) for way in ways for m, n in shapes]


def gemm_cycles(
    tuning: GemmTuning, rows: int, columns: tuple[int, ...], inner: int, epilogue: float = EPILOGUE_CYCLES
) -> float:
    """Cycles of a GEMM; see the module's text for what that is worth."""
    tiles = ceil(rows / tuning.unit_rows) * sum(ceil(width / tuning.tile_n) for width in columns)
    blocks, workers = ceil(inner / BLOCK_K), tuning.workers
    block = block_cycles(tuning)
    if rows > MANY_ROWS and tuning.cluster_m > 1:
        block *= MULTICAST
    whole = blocks * block + epilogue * tuning.tile_n
    if tuning.share > 1:
        shared = shared_tiles(tiles, tuning.clusters, tuning.share)
        rounds = ceil((tiles - shared) / (tuning.clusters * tuning.share))
        last = ceil(blocks / tuning.share) * block + SHARE_CYCLES + epilogue * tuning.tile_n
        return START_CYCLES + rounds * whole + (last if shared else 0)
    if not tuning.stream_k or tiles % workers == 0:
        return START_CYCLES + ceil(tiles / workers) * whole
    split, split_blocks, busy = split_plan(tiles, lambda count: count * blocks, workers)
    last = split_blocks / busy * block + exchange_cycles(tuning) + epilogue * tuning.tile_n
    return START_CYCLES + (tiles - split) // workers * whole + last


def exchange_cycles(tuning: GemmTuning) -> float:
    """Cycles of adding up a tile that stream-K has split."""
    return EXCHANGE_CYCLES + EXCHANGE_CYCLES_PER_ELEMENT * tuning.tile_m * tuning.tile_n


def block_cycles(tuning: GemmTuning) -> float:
    """Cycles of one k block of a tile: the tensor cores' or the operands' way into the SM, by multicast or
    not, whichever is longer."""
    fetched = tuning.tile_m + tuning.tile_n
    multiplied = 2 * tuning.tile_m * tuning.tile_n * BLOCK_K / FLOPS_PER_CYCLE
    return max(multiplied * NARROW[tuning.tile_n], fetched * BLOCK_K * 2 / TMA_BYTES_PER_CYCLE)
