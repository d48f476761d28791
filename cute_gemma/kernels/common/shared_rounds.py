"""A persistent schedule whose last round's tiles are shared by the CTAs of a cluster.

With W workers, one a CTA, in G clusters of C: T tiles make T div W rounds of whole tiles. If the T mod W
tiles left are no more than G, each goes to a cluster, whose CTAs sum up one part of its k blocks apiece and
add the parts up through each other's shared memory; else they are one more round of whole tiles. Everybody's
shared tile is the last of his units.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass

from cute_gemma.kernels.common.schedule import Section, TileSchedule, Unit, deal, minimum, select


@dataclass(frozen=True)
class SharedRounds(TileSchedule):
    """The device's view; built by `plan_shared`. split_tiles: how many, the last ones, clusters share; ctas:
    C."""

    ctas: cutlass.Constexpr[int]

    def unit_count(self, worker):
        """How many units a worker computes."""
        return self._whole_count(worker) + select(self._turn(worker) < self.split_tiles, 1, 0)

    def unit(self, worker, index):
        """Unit number `index` of a worker; `pieces` of a shared tile is C."""
        shared = index >= self._whole_count(worker)
        first = self.tiles - self.split_tiles
        tile = select(shared, first + self._turn(worker), self._whole_tile(worker, index))
        section, in_section, k_blocks = self._locate(tile)
        m, n = self._place(section, in_section)
        rank = worker % self.ctas
        k_begin = select(shared, k_blocks * rank // self.ctas, 0)
        k_end = select(shared, k_blocks * (rank + 1) // self.ctas, k_blocks)
        return Unit(tile, section, m, n, k_begin, k_end, worker - rank, select(shared, self.ctas, 1))

    def _whole_count(self, worker):
        return self.whole.count(worker)

    def _whole_tile(self, worker, index):
        return index * self.workers + worker

    def _turn(self, worker):
        """Which shared tile a worker's cluster takes, if there are as many."""
        return worker // self.ctas


def plan_shared(sections: tuple[Section, ...], clusters: int, ctas: int, group_m: int) -> SharedRounds:
    """The schedule for up to `clusters` clusters of `ctas`. Every tile needs at least `ctas` k blocks."""
    tiles = sections[0].tiles
    for section in sections[1:]:
        tiles += section.tiles
    shared = shared_tiles(tiles, clusters, ctas)
    busy = select(shared == tiles, shared, (tiles - shared + ctas - 1) // ctas)
    workers = minimum(busy, clusters) * ctas
    whole = deal(tiles - shared, workers)
    return SharedRounds(sections, workers, tiles, whole, shared, 0, group_m, True, ctas)


def shared_tiles(tiles, clusters: int, ctas: int):
    """How many tiles are shared."""
    rest = tiles % (clusters * ctas)
    return select(rest <= clusters, rest, 0)
