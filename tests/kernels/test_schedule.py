"""The persistent schedule on plain integers: every k block of every tile is computed once."""

from collections import defaultdict

import pytest

pytest.importorskip("cutlass")

from hypothesis import given, settings
from hypothesis import strategies as st

from cute_gemma.kernels.common.schedule import MIN_SHARE_BLOCKS, Section, plan

sections = st.lists(
    st.builds(Section, st.integers(1, 40), st.integers(1, 40), st.integers(1, 70)), min_size=1, max_size=3
).map(tuple)


def units_of(schedule):
    """(worker, unit) in the order each worker takes them."""
    for worker in range(schedule.workers):
        for index in range(schedule.unit_count(worker)):
            yield worker, schedule.unit(worker, index)


@settings(max_examples=150, deadline=None)
@given(sections, st.integers(1, 150), st.integers(1, 9), st.booleans())
def test_every_block_of_every_tile_is_computed_once(sections, workers, group_m, stream_k):
    schedule = plan(sections, workers, group_m, stream_k)
    pieces = defaultdict(list)
    for worker, unit in units_of(schedule):
        pieces[unit.section, unit.m, unit.n].append((unit.k_begin, unit.k_end, worker, unit))
    expected = {
        (s, m, n) for s, grid in enumerate(sections) for m in range(grid.m_tiles) for n in range(grid.n_tiles)
    }
    assert set(pieces) == expected
    for (section, _, _), parts in pieces.items():
        parts.sort(key=lambda part: part[0])
        assert [part[0] for part in parts] == [0] + [part[1] for part in parts[:-1]]
        assert parts[-1][1] == sections[section].k_blocks
        assert all(begin < end for begin, end, _, _ in parts)


@settings(max_examples=150, deadline=None)
@given(sections, st.integers(1, 150), st.integers(1, 9))
def test_pieces_know_each_other_and_have_places_of_their_own(sections, workers, group_m):
    schedule = plan(sections, workers, group_m, True)
    slots, owners = set(), defaultdict(list)
    for worker, unit in units_of(schedule):
        owners[unit.tile].append((worker, unit))
        if unit.pieces > 1:
            slot = schedule.partial_slot(worker, unit.tile)
            assert slot not in slots and slot < 2 * schedule.workers
            slots.add(slot)
    for tile, parts in owners.items():
        assert {unit.pieces for _, unit in parts} == {len(parts)}
        first = parts[0][1].first_worker
        assert sorted(worker for worker, _ in parts) == list(range(first, first + len(parts)))
        assert len(parts) == 1 or tile < schedule.split_tiles < 2 * workers


@settings(max_examples=100, deadline=None)
@given(sections, st.integers(1, 150))
def test_split_work_is_shared_evenly_and_workers_all_have_some(sections, workers):
    schedule = plan(sections, workers, 8, True)
    shares = [schedule.share_begin(w + 1) - schedule.share_begin(w) for w in range(schedule.workers)]
    assert sum(shares) == schedule.split_blocks
    assert max(shares) - min(shares) <= 1
    assert all(schedule.unit_count(worker) > 0 for worker in range(schedule.workers))
    if schedule.split_tiles == schedule.tiles and schedule.split_blocks >= MIN_SHARE_BLOCKS:
        assert min(shares) >= MIN_SHARE_BLOCKS or schedule.workers == 1


def test_whole_rounds_are_not_split():
    assert plan((Section(37, 4, 48),), 148, 8, True).split_tiles == 0


def test_tiles_that_exceed_whole_rounds_are_split_with_one_round():
    schedule = plan((Section(8, 40, 48),), 148, 8, True)  # 320 tiles: two rounds and 24 tiles
    assert (schedule.split_tiles, schedule.workers) == (148 + 24, 148)


def test_few_tiles_are_cut_into_equal_pieces():
    schedule = plan((Section(1, 40, 48),), 148, 8, True)
    assert schedule.workers == 120
    assert {(unit.k_begin, unit.k_end) for _, unit in units_of(schedule)} == {(0, 16), (16, 32), (32, 48)}
