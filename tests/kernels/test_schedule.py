"""The persistent schedule on plain integers: every k block of every tile is computed once; and its one step that
only a kernel takes."""

from collections import defaultdict
from dataclasses import dataclass

import pytest

pytest.importorskip("cutlass")

import cutlass.cute as cute
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_gemma import jit
from cute_gemma.jit.signature import TensorArg
from cute_gemma.kernels.common.filled_schedule import plan_shared_filled
from cute_gemma.kernels.common.qkv_grads import batch_entry
from cute_gemma.kernels.common.schedule import MIN_SHARE_BLOCKS, Section, plan, small_quotient

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


long_sections = st.builds(Section, st.integers(1, 20), st.integers(1, 8), st.integers(1, 70))
short_sections = st.builds(Section, st.integers(1, 40), st.integers(1, 8), st.integers(2, 30))


@settings(max_examples=300, deadline=None)
@given(long_sections, short_sections, st.integers(1, 70), st.integers(1, 9))
def test_filled_schedule_with_shared_tiles_computes_every_block_once(long, short, clusters, group_m):
    schedule = plan_shared_filled(long, short, clusters, 2, group_m)
    assert schedule.workers % 2 == 0 and schedule.workers <= 2 * clusters
    pieces = defaultdict(list)
    for worker in range(schedule.workers):
        units = [schedule.unit(worker, index) for index in range(schedule.unit_count(worker))]
        kinds = [unit.section for unit in units]
        assert kinds == sorted(kinds) and kinds.count(0) == schedule.first_section_count(worker)
        assert all(unit.pieces == 1 for unit in units[:-1]), "a shared tile is its CTAs' last"
        for unit in units:
            pieces[unit.section, unit.m, unit.n].append((int(unit.k_begin), int(unit.k_end), worker, unit))
    assert set(pieces) == {
        (s, m, n) for s, grid in enumerate((long, short)) for m in range(grid.m_tiles) for n in range(grid.n_tiles)
    }
    shared = 0
    for (section, _, _), parts in pieces.items():
        parts.sort(key=lambda part: part[0])
        blocks = (long, short)[section].k_blocks
        assert [part[0] for part in parts] == [0] + [part[1] for part in parts[:-1]] and parts[-1][1] == blocks
        assert {unit.pieces for *_, unit in parts} == {len(parts)}
        if len(parts) > 1:
            first = parts[0][2]
            assert section == 1 and first % 2 == 0 and [part[2] for part in parts] == [first, first + 1]
            assert {unit.first_worker for *_, unit in parts} == {first}
            shared += 1
    assert shared == schedule.split_tiles <= schedule.workers // 2


@settings(max_examples=300, deadline=None)
@given(long_sections, short_sections, st.integers(1, 70))
def test_shared_tiles_go_to_the_clusters_with_the_least_to_do(long, short, clusters):
    schedule = plan_shared_filled(long, short, clusters, 2, 8)
    whole, takers = [0] * schedule.workers, set()
    for worker, unit in units_of(schedule):
        if unit.pieces > 1:
            takers.add(worker // 2)
        else:
            whole[worker] += int(unit.k_end)
    ends = [max(pair) for pair in zip(whole[::2], whole[1::2])]
    others = [end for cluster, end in enumerate(ends) if cluster not in takers]
    assert not takers or not others or max(ends[cluster] for cluster in takers) <= min(others)
    if takers:  # all rounds but the shared one are full
        assert max(whole) - min(whole) <= max(long.k_blocks, short.k_blocks)


@pytest.mark.parametrize(
    "long, short, clusters, shared, busiest",
    [
        ((60, 64), (160, 24), 66, 16, 64),  # the clusters without a long tile have two short ones and a half
        ((60, 32), (80, 24), 66, 8, 36),
        ((60, 128), (320, 24), 66, 0, 128),  # the short tiles fill up the time of a long one, not even all
        ((60, 16), (40, 24), 66, 40, 28),  # four clusters with long tiles share too
        ((60, 8), (20, 24), 66, 20, 12),  # fewer workers than there are
        ((8, 10), (3, 6), 2, 0, 26),  # nobody fills up, and three tiles are too many for two clusters
        ((8, 10), (6, 6), 2, 2, 29),
        ((5, 10), (5, 6), 2, 2, 23),  # a cluster of which one CTA has a long tile more
    ],
)
def test_busiest_worker(long, short, clusters, shared, busiest):
    schedule = plan_shared_filled(Section(long[0], 1, long[1]), Section(short[0], 1, short[1]), clusters, 2, 8)
    ends = defaultdict(int)
    for worker, unit in units_of(schedule):
        ends[worker] += int(unit.k_end) - int(unit.k_begin)
    assert (schedule.split_tiles, max(ends.values())) == (shared, busiest)


DIVIDE = {"small quotient": small_quotient, "batch entry": batch_entry}


@dataclass(frozen=True)
class QuotientProbe:
    """quotients[i] = a[i] // b[i] by the function called `divide`, one a thread."""

    divide: str

    def signature(self):
        return tuple(TensorArg(name, "i32", ("n",), align=4) for name in ("a", "b", "quotients"))

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, quotients: cute.Tensor, stream):
        self.kernel(a, b, quotients).launch(
            grid=(cute.ceil_div(a.shape[0], 256), 1, 1), block=(256, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, quotients: cute.Tensor):
        i = cute.arch.block_idx()[0] * 256 + cute.arch.thread_idx()[0]
        if i < a.shape[0]:
            quotients[i] = DIVIDE[self.divide](a[i], b[i])


def dividends_and_divisors():
    """Small numbers, and up to 2^21 those where a quotient changes."""
    a, b = (grid.flatten() for grid in torch.meshgrid(torch.arange(200), torch.arange(1, 40), indexing="ij"))
    divisors = torch.randint(1, 2**12, (4000,), generator=torch.Generator().manual_seed(0))
    edges = (2**21 // divisors) * divisors
    return (
        torch.cat([a, edges - 1, (edges // 2 // divisors) * divisors, torch.tensor([2**21 - 1, 2**21 - 1])]).int(),
        torch.cat([b, divisors, divisors, torch.tensor([1, 2**21 - 1])]).int(),
    )


def test_small_quotients_are_exact():
    a, b = dividends_and_divisors()
    quotients = torch.full_like(a, -1)
    jit.launch(QuotientProbe("small quotient"), a, b, quotients, target="sm_90a")
    assert torch.equal(quotients, a // b)


def test_batch_entries_are_exact_where_each_has_one_block_however_many_they_are():
    a = torch.tensor([0, 1, 2**21, 2**23 + 1, 2**23 + 3, 2**24 + 1, 2**31 - 1], dtype=torch.int32)
    entries = torch.full_like(a, -1)
    jit.launch(QuotientProbe("batch entry"), a, torch.ones_like(a), entries, target="sm_90a")
    assert torch.equal(entries, a)


def test_small_quotients_are_exact_whatever_rcp_rounds():
    """With a reciprocal one unit in the last place off either way."""
    a, b = dividends_and_divisors()
    exact = b.float().reciprocal()
    for reciprocal in (exact, exact.nextafter(torch.tensor(0.0)), exact.nextafter(torch.tensor(2.0))):
        assert torch.equal(((a.float() + 0.5) * reciprocal).int(), a // b)
