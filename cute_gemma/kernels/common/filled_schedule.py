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

from cutlass import Int32

from cute_gemma.kernels.common.schedule import Dealt, Section, TileSchedule, Unit, clamp, deal, maximum, minimum, select
from cute_gemma.kernels.common.shared_rounds import SharedRounds, shared_tiles


@dataclass(frozen=True)
class FilledSchedule(TileSchedule):
    """The device's view; built by `plan_filled`. whole: of the long tiles. rounds: short tiles that stand for a long
    one; filling, later: the short tiles, dealt to those that fill up, and those of later rounds, dealt to all."""

    rounds: Any
    filling: Dealt
    later: Dealt

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
        return self.whole.rest

    def _whole_tile(self, worker, index):
        long_count = self._long_count(worker)
        is_long = index < long_count
        short_tile = self.sections[0].tiles + self._short_tile(worker, index - long_count)
        return select(is_long, index * self.workers + worker, short_tile)

    def _long_count(self, worker):
        return self.whole.count(worker)

    def _short_tile(self, worker, index):
        """Number of a worker's short tile among the short ones."""
        free = self.workers - self._busy
        filling = index * free + worker - self._busy
        later = self.rounds * free + (index - self.rounds) * self.workers + worker - self._busy
        after_long = self.rounds * free + index * self.workers + free + worker
        return select(worker < self._busy, after_long, select(index < self.rounds, filling, later))

    def _short_count(self, worker):
        is_busy, place = worker < self._busy, worker - self._busy
        filling = clamp(self.filling.count(place), self.rounds)
        later = self.later.count(place + select(is_busy, self.workers, 0))
        return later + select(is_busy, 0, filling)


def deal_short(tiles, rounds, workers, busy) -> tuple[Dealt, Dealt]:
    """(filling, later) of a FilledSchedule for so many short tiles."""
    free = workers - busy
    return deal(tiles, free), deal(maximum(tiles - rounds * free, 0), workers)


def plan_filled(long: Section, short: Section, max_workers: int, group_m: int) -> FilledSchedule:
    """Any two sections will do; the order pays when `long` has the more k blocks."""
    tiles, rounds = long.tiles + short.tiles, long.k_blocks // short.k_blocks
    workers = minimum(tiles, max_workers)
    whole = deal(long.tiles, workers)
    filling, later = deal_short(short.tiles, rounds, workers, whole.rest)
    return FilledSchedule(
        sections=(long, short),
        workers=workers,
        tiles=tiles,
        whole=whole,
        split_tiles=0,
        split_blocks=0,
        group_m=group_m,
        splits=False,
        rounds=rounds,
        filling=filling,
        later=later,
    )


@dataclass(frozen=True)
class SharedFilledSchedule(SharedRounds, FilledSchedule):
    """A filled schedule whose last round, if it is not full, is shared as in `SharedRounds`: by the last
    clusters, as the first workers have a long tile more. Built by `plan_shared_filled`."""

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
    whole = deal(long.tiles, workers)
    # Without a worker that has a long tile more, nobody fills up: all rounds of short tiles are alike.
    rounds = select(whole.rest == 0, 0, long.k_blocks // short.k_blocks)
    left = maximum(short.tiles - rounds * (workers - whole.rest), 0)
    shared = shared_tiles(left, clusters, ctas)
    filling, later = deal_short(short.tiles - shared, rounds, workers, whole.rest)
    return SharedFilledSchedule(
        sections=(long, short),
        workers=workers,
        tiles=long.tiles + short.tiles,
        whole=whole,
        split_tiles=shared,
        split_blocks=0,
        group_m=group_m,
        splits=True,
        rounds=rounds,
        filling=filling,
        later=later,
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
