"""Persistent tile schedule with an optional stream-K part, shared by every GEMM of the package.

A GEMM is a list of *sections*, each a grid of output tiles (m_tiles, n_tiles) whose accumulation takes
`k_blocks` blocks. Tiles are numbered section after section. A *worker* is what computes a tile: a CTA,
a CTA pair or a cluster.

* Whole tiles: worker w takes tiles split_tiles + w, + workers, ...
* Split tiles: tiles [0, split_tiles) are laid out as one line of k blocks, which the workers cut into equal
  shares. A share is a run of *units*, each a piece of one tile. The pieces of a tile are added in the order
  of the workers, whoever finishes last, so that results do not depend on timing. Every worker does its share
  before its whole tiles.

Unit i of worker w is a closed formula of (i, w): the warp roles of a CTA walk the same list without talking.
Stream-K: Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication
on the GPU", PPoPP 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

# A share shorter than this costs more in adding up partial tiles than it saves.
MIN_SHARE_BLOCKS = 4


@dataclass(frozen=True)
class Section:
    """One grid of output tiles. n_tiles is static: dividing by it takes a kernel few instructions."""

    m_tiles: Any
    n_tiles: cutlass.Constexpr[int]
    k_blocks: Any

    @property
    def tiles(self):
        return self.m_tiles * self.n_tiles


@dataclass(frozen=True)
class Unit:
    """A tile, or a piece of one, as one worker computes it.

    tile: number of the tile; section: number of its section; m, n: its place in that section's grid.
    k_begin, k_end: the k blocks [k_begin, k_end) of this piece.
    first_worker: who computes k block 0; pieces: how many workers share the tile (1: the whole tile is here).
    """

    tile: Any
    section: Any
    m: Any
    n: Any
    k_begin: Any
    k_end: Any
    first_worker: Any
    pieces: Any


def dynamic(unit: Unit) -> Unit:
    """The unit with every number in a register, so that it can be carried through a loop."""
    return Unit(*(Int32(getattr(unit, field.name)) for field in fields(unit)))


@dataclass(frozen=True)
class Dealt:
    """Tiles dealt out in turn: so many full rounds, and the rest. Divided on the host: a kernel's first loads
    wait for the chain of instructions that a division is."""

    rounds: Any
    rest: Any

    def count(self, place):
        """How many tiles go to a place of the turn."""
        return self.rounds + select(place < self.rest, 1, 0)


def deal(tiles, places) -> Dealt:
    """`tiles` tiles to so many places."""
    return Dealt(tiles // places, tiles % places)


@dataclass(frozen=True)
class TileSchedule:
    """The device's view; built by `plan`.

    whole: the whole tiles, dealt to the workers. Static: group_m, how many tile rows are walked together; splits,
    whether any tile may be split.
    """

    sections: tuple
    workers: Any
    tiles: Any
    whole: Dealt
    split_tiles: Any
    split_blocks: Any
    group_m: cutlass.Constexpr[int]
    splits: cutlass.Constexpr[bool]

    def share_begin(self, worker):
        """First split k block of a worker; share_begin(workers) is the end of the last share."""
        quotient, rest = self.split_blocks // self.workers, self.split_blocks % self.workers
        return worker * quotient + minimum(worker, rest)

    def share_owner(self, block):
        """The worker whose share holds a split k block."""
        quotient, rest = self.split_blocks // self.workers, self.split_blocks % self.workers
        long_blocks = rest * (quotient + 1)
        in_short = rest + (block - long_blocks) // maximum(quotient, 1)
        return select(block < long_blocks, block // (quotient + 1), in_short)

    def tile_of_block(self, block):
        """The split tile that holds a split k block."""
        tile, begin = 0, 0
        for section in self.sections:
            blocks = section.tiles * section.k_blocks
            tile += clamp(block - begin, blocks) // section.k_blocks
            begin += blocks
        return tile

    def unit_count(self, worker):
        """How many units a worker computes."""
        whole = self.whole.count(worker)
        return self._split_units(worker) + whole if self.splits else whole

    def unit(self, worker, index):
        """Unit number `index` of a worker."""
        if not self.splits:
            tile = worker + index * self.workers
            section, in_section, k_blocks = self._locate(tile)
            m, n = self._place(section, in_section)
            return Unit(tile, section, m, n, 0, k_blocks, worker, 1)

        split_units = self._split_units(worker)
        begin, end = self.share_begin(worker), self.share_begin(worker + 1)
        split_tile = self.tile_of_block(begin) + index
        whole_tile = self.split_tiles + worker + (index - split_units) * self.workers
        is_split = index < split_units
        tile = select(is_split, split_tile, whole_tile)

        section, in_section, k_blocks = self._locate(tile)
        tile_begin = begin_of_tile(self.sections, tile)
        tile_end = tile_begin + k_blocks
        k_begin = select(is_split, maximum(begin - tile_begin, 0), 0)
        k_end = select(is_split, minimum(end - tile_begin, k_blocks), k_blocks)
        first_worker = select(is_split, self.share_owner(tile_begin), worker)
        pieces = select(is_split, self.share_owner(tile_end - 1) - first_worker + 1, 1)
        m, n = self._place(section, in_section)
        return Unit(tile, section, m, n, k_begin, k_end, first_worker, pieces)

    def first_section_count(self, worker):
        """How many units of a worker are in the first section. They come before the others."""
        tiles = self.sections[0].tiles
        whole = maximum((tiles - self.split_tiles - worker + self.workers - 1) // self.workers, 0)
        if not self.splits:
            return whole
        split_tile = self.tile_of_block(self.share_begin(worker))
        return clamp(tiles - split_tile, self._split_units(worker)) + whole

    def partial_slot(self, worker, tile):
        """Where a worker keeps its piece of a split tile: slot 2w its first, 2w + 1 its last."""
        return 2 * worker + select(self.share_begin(worker) >= begin_of_tile(self.sections, tile), 0, 1)

    def _split_units(self, worker):
        begin, end = self.share_begin(worker), self.share_begin(worker + 1)
        return select(end > begin, self.tile_of_block(end - 1) - self.tile_of_block(begin) + 1, 0)

    def _locate(self, tile):
        """(section, tile within it, its k blocks)."""
        section, first, k_blocks = 0, 0, self.sections[0].k_blocks
        begin = 0
        for number, candidate in enumerate(self.sections[:-1], start=1):
            begin += candidate.tiles
            beyond = tile >= begin
            section = select(beyond, number, section)
            first = select(beyond, begin, first)
            k_blocks = select(beyond, self.sections[number].k_blocks, k_blocks)
        return section, tile - first, k_blocks

    def _place(self, section, tile):
        """Walk group_m tile rows together, row fastest: a wave of tiles shares both operands in L2."""
        m_tiles, group, in_group = self.sections[0].m_tiles, *self._group(0, tile)
        for number, candidate in enumerate(self.sections[1:], start=1):
            here = section == number
            m_tiles = select(here, candidate.m_tiles, m_tiles)
            group, in_group = (select(here, a, b) for a, b in zip(self._group(number, tile), (group, in_group)))
        first_m = group * self.group_m
        rows = minimum(m_tiles - first_m, self.group_m)
        n = small_quotient(in_group, rows)
        return first_m + in_group - n * rows, n

    def _group(self, section: int, tile):
        """(which group of tile rows holds a tile of this section, its place there)."""
        tiles = self.group_m * self.sections[section].n_tiles
        return tile // tiles, tile % tiles


def begin_of_tile(sections: tuple, tile):
    """How many k blocks the tiles before `tile` have: where it begins if all are split."""
    begin, first = 0, 0
    for section in sections:
        begin += clamp(tile - first, section.tiles) * section.k_blocks
        first += section.tiles
    return begin


def plan(sections: tuple, max_workers: int, group_m: int, stream_k: bool) -> TileSchedule:
    """Choose workers and the split part from the sections' sizes, see `split_plan`; none without stream_k."""
    tiles = sections[0].tiles
    for section in sections[1:]:
        tiles += section.tiles
    if not stream_k:
        workers = minimum(tiles, max_workers)
        return TileSchedule(sections, workers, tiles, deal(tiles, workers), 0, 0, group_m, False)
    split_tiles, split_blocks, workers = split_plan(tiles, partial(begin_of_tile, sections), max_workers)
    whole = deal(tiles - split_tiles, workers)
    return TileSchedule(sections, workers, tiles, whole, split_tiles, split_blocks, group_m, True)


def split_plan(tiles, begin_of_tile, max_workers: int) -> tuple:
    """(tiles to split, their k blocks, workers) for a stream-K schedule of `tiles` tiles.

    The tiles that do not fill a round of workers are split, together with one full round, so that shares are
    long; fewer than two rounds are split altogether. When one round is not half full, each tile is cut into
    equal pieces if that occupies three quarters of the workers. begin_of_tile(t): k blocks of the first t
    tiles.
    """
    rest = tiles % max_workers
    split_tiles = select(tiles < 2 * max_workers, tiles, max_workers + rest)
    split_tiles = select(rest == 0, 0, split_tiles)
    split_blocks = begin_of_tile(split_tiles)
    even = minimum(max_workers // minimum(tiles, max_workers) * tiles, max_workers)
    workers = select(even * 4 >= 3 * max_workers, even, max_workers)
    workers = select(
        split_tiles == tiles, minimum(workers, maximum(split_blocks // MIN_SHARE_BLOCKS, 1)), workers
    )
    workers = select(split_tiles == 0, minimum(tiles, max_workers), workers)
    return split_tiles, split_blocks, workers


# The schedule is arithmetic on non-negative integers, dynamic in a kernel and plain in host code and tests.


def select(condition, if_true, if_false):
    """Integer choice without a branch."""
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return Int32(cutlass.select_(condition, Int32(if_true), Int32(if_false)))


def minimum(a, b):
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.min(a, b)


def maximum(a, b):
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else cutlass.max(a, b)


def clamp(value, upper):
    """Keep an integer within [0, upper]."""
    return minimum(maximum(value, 0), upper)


def small_quotient(a, b):
    """a // b for 0 <= a < 2^21 and 1 <= b, in a few instructions: (a + 1/2) / b is at least 1 / (2 b) from any
    integer, further than float32 and rcp.approx (1 ulp, PTX ISA) can be off."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return Int32((Int32(a).to(Float32) + 0.5) * cute.arch.rcp_approx(Int32(b).to(Float32)))
