"""A persistent schedule of two sections of whole tiles, the first with the longer sums.

Round-robin would give a second long tile, or a long and a short one, to workers while others sit idle. Here
long tiles go round first; then the workers that got one fewer fill up with short tiles, `rounds` of them
each, about as many as a long tile takes; from there on everybody takes short tiles in turn. With W workers, n
long tiles and b = n mod W the short tiles are numbered

    rounds 0 .. rounds - 1:  workers b .. W - 1, then
    all later rounds:        workers b .. W - 1, 0 .. b - 1

so that a worker's units are again a closed formula of its number. It is the greedy longest-first order for
two lengths, whose end times differ by a tile at most. `SharedFilledSchedule` has clusters share the tiles of
the last round.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32

from cute_gemma.kernels.common.schedule import Section, TileSchedule, Unit, clamp, maximum, minimum, select
from cute_gemma.kernels.common.shared_rounds import SharedRounds, shared_tiles


@dataclass(frozen=True)
class FilledSchedule(TileSchedule):
    """The device's view; built by `plan_filled`. rounds: short tiles that stand for a long one."""

    rounds: Any

    def unit_count(self, worker):
        """How many units a worker computes."""
        return self._long_count(worker) + self._short_count(worker)

    def unit(self, worker, index):
        """Unit number `index` of a worker."""
        tile = self._whole_tile(worker, index)
        section, in_section, k_blocks = self._locate(tile)
        m, n = self._place(section, in_section)
        return Unit(tile, section, m, n, Int32(0), k_blocks, worker, Int32(1))

    def first_section_count(self, worker):
        """How many units of a worker are long tiles."""
        return self._long_count(worker)

    @property
    def _busy(self):
        """Workers with one long tile more than the others: 0 .. busy - 1."""
        return self.sections[0].tiles % self.workers

    @property
    def _short_tiles(self):
        """How many short tiles are dealt whole."""
        return self.sections[1].tiles

    def _whole_tile(self, worker, index):
        long_count = self._long_count(worker)
        is_long = index < long_count
        short_tile = self.sections[0].tiles + self._short_tile(worker, index - long_count)
        return select(is_long, index * self.workers + worker, short_tile)

    def _long_count(self, worker):
        return self.sections[0].tiles // self.workers + select(worker < self._busy, 1, 0)

    def _short_tile(self, worker, index):
        """Number of a worker's short tile among the short ones."""
        free = self.workers - self._busy
        filling = index * free + worker - self._busy
        later = self.rounds * free + (index - self.rounds) * self.workers + worker - self._busy
        after_long = self.rounds * free + index * self.workers + free + worker
        return select(worker < self._busy, after_long, select(index < self.rounds, filling, later))

    def _short_count(self, worker):
        free, tiles = self.workers - self._busy, self._short_tiles
        filling = clamp((tiles - (worker - self._busy) + free - 1) // free, self.rounds)
        first = self.rounds * free + worker + select(worker < self._busy, free, -self._busy)
        later = maximum((tiles - first + self.workers - 1) // self.workers, 0)
        return later + select(worker < self._busy, 0, filling)


def plan_filled(long: Section, short: Section, max_workers: int, group_m: int) -> FilledSchedule:
    """Any two sections will do; the order pays when `long` has the more k blocks."""
    tiles = long.tiles + short.tiles
    return FilledSchedule(
        sections=(long, short),
        workers=cutlass.min(tiles, max_workers),
        tiles=tiles,
        split_tiles=Int32(0),
        split_blocks=Int32(0),
        group_m=group_m,
        splits=False,
        rounds=long.k_blocks // short.k_blocks,
    )


@dataclass(frozen=True)
class SharedFilledSchedule(SharedRounds, FilledSchedule):
    """A filled schedule whose last round, if it is not full, is shared as in `SharedRounds`: by the last
    clusters, as the first workers have a long tile more. Built by `plan_shared_filled`."""

    @property
    def _short_tiles(self):
        return self.sections[1].tiles - self.split_tiles

    def _whole_count(self, worker):
        return FilledSchedule.unit_count(self, worker)

    def _whole_tile(self, worker, index):
        return FilledSchedule._whole_tile(self, worker, index)

    def _turn(self, worker):
        return (self.workers - 1 - worker) // self.ctas


def plan_shared_filled(
    long: Section, short: Section, clusters: int, ctas: int, group_m: int
) -> SharedFilledSchedule:
    """The schedule for up to `clusters` clusters of `ctas`. Every short tile needs at least `ctas` k blocks.

    What is left for the last round are the tiles after those that stand for a long one and after full rounds.
    """
    clusters = minimum(clusters, (long.tiles + ctas - 1) // ctas + short.tiles)
    workers = clusters * ctas
    busy = long.tiles % workers
    # Without a worker that has a long tile more, nobody fills up: all rounds of short tiles are alike.
    rounds = select(busy == 0, 0, long.k_blocks // short.k_blocks)
    later = maximum(short.tiles - rounds * (workers - busy), 0)
    return SharedFilledSchedule(
        sections=(long, short),
        workers=workers,
        tiles=long.tiles + short.tiles,
        split_tiles=shared_tiles(later, clusters, ctas),
        split_blocks=0,
        group_m=group_m,
        splits=True,
        rounds=rounds,
        ctas=ctas,
    )


def makespan(long: tuple[int, float], short: tuple[int, float], workers: int) -> float:
    """When the last worker is done, on the host: long and short are (tiles, cost of one), dealt out long ones
    first to whoever is free."""
    tiles = long[0] + short[0]
    if tiles > 8 * workers:
        return (long[0] * long[1] + short[0] * short[1]) / workers + max(long[1], short[1]) / 2
    ends = [0.0] * workers
    for count, cost in (long, short):
        for _ in range(count):
            heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)
