"""Chooses tile shape and schedule of a GEMM on sm_90a from its sizes, by counting the cycles of the candidates.

The count is coarse, but what decides is coarse too: how many tiles the last round is short of, whether a tile is wide
enough for its operands to arrive as fast as they are multiplied, and what adding up split tiles costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cute_gemma.kernels.common.gemm import BLOCK_K
from cute_gemma.kernels.common.schedule import split_plan

SM_COUNT = 132  # of an H100 or H200 SXM
CONSUMER_WARPS = 8  # two warpgroups
MMA_COLUMNS = 256  # largest N of a wgmma (PTX ISA, wgmma.mma_async)
FLOPS_PER_CYCLE = 4096  # dense bf16, an SM (H100 white paper)
SMEM_BYTES_PER_CYCLE = 128  # of an SM's shared memory
L2_BYTES_PER_CYCLE = 40  # into an SM while all of them read, about 9 TB/s
EPILOGUE_CYCLES = 8  # a tile column, as instructions of one warp
EXCHANGE_CYCLES = 3000  # writing out a piece, the counter, reading back: latency alone
START_CYCLES = 2500  # filling the pipeline and leaving it


@dataclass(frozen=True)
class GemmTuning:
    """Tile shape and schedule of a GEMM.

    tile_m: rows of a CTA's tile, 128 or 256, dealt to two consumer warpgroups 64 at a time.
    cluster_m: CTAs, one tile below the other, that form a cluster, walk together and share B by multicast.
    tile_n: columns of a tile, a multiple of 64; tile_m * tile_n may not pass 128 * 256.
    stages: shared-memory stages (None: as many as fit). stream_k: split tiles over K where whole tiles would leave
    workers idle. group_m: unit rows walked together. sm_count: CTAs resident at once.
    """

    tile_m: int = 128
    tile_n: int = 128
    stages: int | None = None
    stream_k: bool = False
    group_m: int = 8
    sm_count: int = SM_COUNT
    cluster_m: int = 1

    def __post_init__(self) -> None:
        if self.tile_m not in (128, 256):
            raise ValueError(f"tile_m: {self.tile_m}, expected 128 or 256")
        # 128 accumulator registers a thread leave room for an epilogue.
        widest = min(MMA_COLUMNS, 128 * 256 // self.tile_m)
        if self.tile_n % 64 or not 64 <= self.tile_n <= widest:
            raise ValueError(f"tile_n: {self.tile_n}, expected a multiple of 64 from 64 to {widest}")
        if self.cluster_m not in (1, 2):
            raise ValueError(f"cluster_m: {self.cluster_m}, expected 1 or 2")
        if self.sm_count < self.cluster_m:
            raise ValueError(f"sm_count: {self.sm_count}, expected at least the {self.cluster_m} CTAs of one cluster")
        if self.group_m < 1:
            raise ValueError(f"group_m: {self.group_m}, expected at least 1")
        if self.stages is not None and self.stages < 2:
            raise ValueError(f"stages: {self.stages}, expected at least 2")

    @property
    def cluster(self) -> int:
        """CTAs of a cluster, which is a worker."""
        return self.cluster_m

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
        """Most units in work at once."""
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
    rows: int, columns: tuple[int, ...], inner: int, shapes: tuple[tuple[int, int, int], ...], sm_count: int = SM_COUNT
) -> GemmTuning:
    """The candidate with the lowest count for `rows` x sum(columns) outputs of `inner` products each.

    columns: widths of the matrices side by side, each cut into tiles of its own. shapes: (tile_m, tile_n, cluster_m).
    """
    candidates = [
        GemmTuning(tile_m, tile_n, stream_k=stream_k, sm_count=sm_count, cluster_m=cluster_m)
        for tile_m, tile_n, cluster_m in shapes
        for stream_k in (False, True)
        if cluster_m <= sm_count
    ]
    return min(candidates, key=lambda tuning: gemm_cycles(tuning, rows, columns, inner))


def gemm_cycles(tuning: GemmTuning, rows: int, columns: tuple[int, ...], inner: int) -> float:
    """Cycles of a GEMM on warm caches; see the module's text for what that is worth."""
    tiles = ceil(rows / tuning.unit_rows) * sum(ceil(width / tuning.tile_n) for width in columns)
    blocks, workers = ceil(inner / BLOCK_K), tuning.workers
    block = block_cycles(tuning)
    epilogue = EPILOGUE_CYCLES * tuning.tile_n
    if not tuning.stream_k or tiles % workers == 0:
        return START_CYCLES + ceil(tiles / workers) * (blocks * block + epilogue / 2) + epilogue
    split, split_blocks, busy = split_plan(tiles, lambda count: count * blocks, workers)
    share = split_blocks / busy
    rounds = (tiles - split) // workers
    pieces = ceil(blocks / share) + (0 if busy % split == 0 else 1)
    exchange = exchange_cycles(tuning, pieces)
    return START_CYCLES + share * block + rounds * (blocks * block + epilogue / 2) + exchange + epilogue


def exchange_cycles(tuning: GemmTuning, pieces: int) -> float:
    """Cycles of adding up a tile of so many pieces: one is written, the others are read."""
    return EXCHANGE_CYCLES + pieces * tuning.tile_m * tuning.tile_n * 4 / L2_BYTES_PER_CYCLE


def block_cycles(tuning: GemmTuning) -> float:
    """Cycles of one k block of a tile: of the tensor cores, of shared memory (operands written once and read by every
    wgmma), or of the operands' way from L2, whichever is longest."""
    m, n = tuning.tile_m, tuning.tile_n
    read = m // 64 * (64 + n)
    fetched = m + n // tuning.cluster_m
    return max(
        2 * m * n * BLOCK_K / FLOPS_PER_CYCLE,
        (read + m + n) * BLOCK_K * 2 / SMEM_BYTES_PER_CYCLE,
        fetched * BLOCK_K * 2 / L2_BYTES_PER_CYCLE,
    )
