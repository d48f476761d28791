"""Chooses tile shape and schedule of a GEMM from its sizes, by counting the cycles of the candidates.

The count is coarse, but what decides is coarse too: how many tiles the last round is short of, whether a tile
is wide enough for its operands to arrive as fast as they are multiplied, and what adding up split tiles
costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cute_gemma.kernels.common.gemm import BLOCK_K
from cute_gemma.kernels.common.schedule import split_plan

SM_COUNT = 148  # of a B200
GPC_SMS = 18  # of a graphics processing cluster: 148 over 8, the remainder left out for being spread unevenly
ACC_COLUMNS = 256  # of one of two accumulators in TMEM's 512 columns (PTX ISA, "Tensor Memory")
FLOPS_PER_CYCLE = 8192  # dense bf16, an SM: 2.25 PFLOP/s over 148 SMs at 1.85 GHz (B200 data sheet)
L2_BYTES_PER_CYCLE = 64  # into an SM's shared memory, the width of its L2 port
NARROW_RATE = 0.66  # of the tensor cores' rate that a 64-column tile reaches: its operands bind
EPILOGUE_CYCLES = 12  # a tile column, as instructions of one warp
EXCHANGE_CYCLES = 2500  # writing out a piece, the counter, reading back: latency alone
START_CYCLES = 2000  # filling the pipeline and leaving it


@dataclass(frozen=True)
class GemmTuning:
    """Tile shape and schedule of a GEMM.

    tile_m: rows of an accumulator over its CTAs, 128 (one CTA) or 256 (a CTA pair, cta_group::2).
    cluster_m: accumulators, one below the other, whose CTAs form a cluster, walk together and share B by
    multicast.
    tile_n: columns of an accumulator, a multiple of 64 up to 256. stages: shared-memory stages (None: as many
    as fit).
    stream_k: split tiles over K where whole tiles would leave workers idle. group_m: tile rows walked
    together.
    sm_count: CTAs resident at once.
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
        if self.tile_n % 64 or not 64 <= self.tile_n <= ACC_COLUMNS:
            raise ValueError(f"tile_n: {self.tile_n}, expected a multiple of 64 from 64 to {ACC_COLUMNS}")
        if self.cluster_m not in (1, 2, 4):
            raise ValueError(f"cluster_m: {self.cluster_m}, expected 1, 2 or 4")
        if self.sm_count < self.cluster:
            raise ValueError(
                f"sm_count: {self.sm_count}, expected at least the {self.cluster} CTAs of one cluster"
            )
        if self.group_m < 1:
            raise ValueError(f"group_m: {self.group_m}, expected at least 1")
        if self.stages is not None and self.stages < 2:
            raise ValueError(f"stages: {self.stages}, expected at least 2")

    @property
    def ctas(self) -> int:
        """CTAs that share one accumulator tile."""
        return self.tile_m // 128

    @property
    def cluster(self) -> int:
        """CTAs of a cluster, which is a worker."""
        return self.ctas * self.cluster_m

    @property
    def unit_rows(self) -> int:
        """Rows of a unit: of the accumulators of a cluster."""
        return 128 * self.cluster

    @property
    def workers(self) -> int:
        """Most units in work at once, one a resident cluster.

        A cluster lies within one GPC (CUDA C++ Programming Guide, thread block clusters). Pairs fit any even
        number of SMs; larger clusters are counted as if every GPC had GPC_SMS. A cluster too many would wait
        for a whole share of work to end.
        """
        if self.cluster <= 2:
            return self.sm_count // self.cluster
        return max(self.sm_count // GPC_SMS, 1) * (min(self.sm_count, GPC_SMS) // self.cluster)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage in one CTA: 128 rows of A and this CTA's part of B."""
        return (128 + self.tile_n // self.ctas) * BLOCK_K * 2

    @property
    def partial_floats(self) -> int:
        """fp32 elements of the workspace for pieces of split tiles: two slots a worker."""
        return 2 * self.workers * self.unit_rows * self.tile_n

    @property
    def counters(self) -> int:
        """int32 counters of the workspace, one for each 32 rows of a split tile; zero between launches."""
        return 2 * self.workers * self.unit_rows // 32


def choose_tuning(
    rows: int, columns: tuple[int, ...], inner: int, tile_n: tuple[int, ...], sm_count: int = SM_COUNT
) -> GemmTuning:
    """The candidate with the lowest count for `rows` x sum(columns) outputs of `inner` products each.

    columns: widths of the matrices side by side, each cut into tiles of its own. tile_n: the widths allowed.
    """
    candidates = [
        GemmTuning(tile_m, width, stream_k=stream_k, sm_count=sm_count)
        for tile_m in (128, 256)
        for width in tile_n
        for stream_k in (False, True)
        if sm_count >= tile_m // 128
    ]
    return min(candidates, key=lambda tuning: gemm_cycles(tuning, rows, columns, inner))


def gemm_cycles(tuning: GemmTuning, rows: int, columns: tuple[int, ...], inner: int) -> float:
    """Cycles of a GEMM on warm caches; see the module's text for what that is worth."""
    tiles = ceil(rows / tuning.tile_m) * sum(ceil(width / tuning.tile_n) for width in columns)
    blocks, workers = ceil(inner / BLOCK_K), tuning.workers
    block = block_cycles(tuning)
    epilogue = EPILOGUE_CYCLES * tuning.tile_n
    if not tuning.stream_k or tiles % workers == 0:
        return START_CYCLES + ceil(tiles / workers) * max(blocks * block, epilogue) + epilogue
    split, split_blocks, busy = split_plan(tiles, lambda count: count * blocks, workers)
    share = split_blocks / busy
    rounds = (tiles - split) // workers
    pieces = ceil(blocks / share) + (0 if busy % split == 0 else 1)
    exchange = EXCHANGE_CYCLES + (1 + pieces) * 128 * tuning.tile_n * 4 / L2_BYTES_PER_CYCLE
    if rounds:
        exchange = max(0, exchange - rounds * blocks * block) + EXCHANGE_CYCLES
    return START_CYCLES + share * block + rounds * max(blocks * block, epilogue) + exchange + epilogue


def block_cycles(tuning: GemmTuning) -> float:
    """Cycles of one k block of a tile: the tensor cores', or the operands' way from L2 if longer."""
    rate = FLOPS_PER_CYCLE * (NARROW_RATE if tuning.tile_n == 64 else 1)
    fetched = (128 + tuning.tile_n // tuning.cluster) * BLOCK_K * 2
    return max(2 * 128 * tuning.tile_n * BLOCK_K / rate, fetched / L2_BYTES_PER_CYCLE)
