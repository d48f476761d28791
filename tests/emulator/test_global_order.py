"""What one CTA writes to global memory and another reads needs a release and an acquire."""

import numpy as np
import pytest
from gemm_ptx import aligned
from ptx_runner import run

from cute_gemma import emulator as emu

# CTA 0 fills data (p0) and raises a flag (p1); CTA 1 waits for the flag and copies the data to p2.
HANDOVER = """
ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 %d3, [p2]; mov.u32 %r1, %tid.x;
mov.u32 %r3, %ctaid.x;
mul.wide.u32 %d4, %r1, 4; add.u64 %d5, %d1, %d4; add.u64 %d6, %d3, %d4; setp.ne.u32 %p1, %r1, 0;
setp.eq.u32 %p2, %r3, 1; @%p2 bra READER;
add.u32 %r4, %r1, 7; st.global.b32 [%d5], %r4; {before} bar.sync 0; @%p1 bra END; {raise} bra END;
READER: @%p1 bra GO; POLL: {poll} setp.eq.u32 %p3, %r5, 0; @%p3 bra POLL; {after} GO: bar.sync 0;
ld.global.b32 %r6, [%d5]; st.global.b32 [%d6], %r6; END:
"""
RELEASE, ACQUIRE = "st.release.gpu.global.b32 [%d2], 1;", "ld.acquire.gpu.global.b32 %r5, [%d2];"
RELAXED_WRITE, RELAXED_READ = "st.relaxed.gpu.global.b32 [%d2], 1;", "ld.relaxed.gpu.global.b32 %r5, [%d2];"
FENCE = "fence.acq_rel.gpu;"


def handover(raise_=RELEASE, poll=ACQUIRE, before="", after="", grid=2, **options):
    data, flag, out = aligned(64, np.uint32), aligned(1, np.uint32), aligned(64, np.uint32)
    body = HANDOVER.format(**{"before": before, "raise": raise_, "poll": poll, "after": after})
    run(body, data, flag, out, block=64, grid=grid, **options)
    return out


@pytest.mark.parametrize("schedule", ["lazy", "random:1", "random:2"])
@pytest.mark.parametrize(
    ("raise_", "poll", "after"),
    [
        (RELEASE, ACQUIRE, ""),
        (FENCE + RELAXED_WRITE, ACQUIRE, ""),
        (RELEASE, RELAXED_READ, FENCE),
        (FENCE + "red.relaxed.gpu.global.add.u32 [%d2], 1;", RELAXED_READ, FENCE),
        ("membar.gl; st.volatile.global.b32 [%d2], 1;", "ld.volatile.global.b32 %r5, [%d2];", "membar.gl;"),
        ("red.release.gpu.global.add.u32 [%d2], 1;", "atom.acquire.gpu.global.or.b32 %r5, [%d2], 0;", ""),
    ],
)
def test_released_and_acquired_data_is_read(raise_, poll, after, schedule):
    assert np.array_equal(handover(raise_, poll, after=after, schedule=schedule), np.arange(64) + 7)


@pytest.mark.parametrize(
    ("raise_", "poll", "after"),
    [
        (RELAXED_WRITE, ACQUIRE, ""),
        (RELEASE, RELAXED_READ, ""),
        ("fence.acq_rel.cta;" + RELAXED_WRITE, ACQUIRE, ""),
        ("st.release.cta.global.b32 [%d2], 1;", ACQUIRE, ""),
        ("red.relaxed.gpu.global.add.u32 [%d2], 1;", "atom.relaxed.gpu.global.or.b32 %r5, [%d2], 0;", ""),
    ],
)
def test_missing_release_or_acquire_is_a_race(raise_, poll, after):
    with pytest.raises(emu.RaceError,
        match=r"warp \d of cluster \(0,0,0\).*a release .* there and an acquire here"):
        handover(raise_, poll, after=after)


def test_missing_barrier_before_the_release_is_a_race():
    with pytest.raises(emu.RaceError):
        body_without = HANDOVER.replace("{before} bar.sync 0;", "")
        data, flag, out = aligned(64, np.uint32), aligned(1, np.uint32), aligned(64, np.uint32)
        run(body_without.format(**{"raise": RELEASE, "poll": ACQUIRE, "after": ""}), data, flag, out,
            block=64, grid=2)


def test_own_bytes_of_a_shared_sector_may_be_read_back():
    out = aligned(8, np.uint32)
    body = """ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r1, 0;
    @%p1 bra END;
    mul.wide.u32 %d2, %r3, 4; add.u64 %d3, %d1, %d2; st.global.b32 [%d3], %r3; ld.global.b32 %r4, [%d3];
    add.u32 %r4, %r4, 1; st.global.b32 [%d3], %r4; END:"""
    run(body, out, grid=8)
    assert np.array_equal(out, np.arange(8) + 1)


# One warp a CTA: its lane 0 waits for the flag, all lanes read the data.
ONE_LANE_WAITS = HANDOVER.replace("{before} bar.sync 0;", "bar.warp.sync -1;")
ONE_LANE_WAITS = ONE_LANE_WAITS.replace("bar.sync 0;", "{meet}")


def one_lane_waits(meet, poll=ACQUIRE, after="", **options):
    data, flag, out = aligned(32, np.uint32), aligned(1, np.uint32), aligned(32, np.uint32)
    body = ONE_LANE_WAITS.format(**{"meet": meet, "raise": RELEASE, "poll": poll, "after": after})
    run(body, data, flag, out, grid=2, hazards="strict", **options)
    return out


@pytest.mark.parametrize("schedule", ["lazy", "random:1", "random:2"])
@pytest.mark.parametrize(("poll", "after"), [(ACQUIRE, ""), (RELAXED_READ, FENCE)])
def test_what_one_lane_acquires_the_others_know_once_they_meet(poll, after, schedule):
    out = one_lane_waits("bar.warp.sync -1;", poll, after, schedule=schedule)
    assert np.array_equal(out, np.arange(32) + 7)
    with pytest.raises(emu.RaceError, match=r"advice: .* another lane of the warp may have acquired it"):
        one_lane_waits("shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;", poll, after, schedule=schedule)


LAST = """
ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 %d3, [p2]; mov.u32 %r1, %tid.x;
mov.u32 %r3, %ctaid.x; mov.u32 %r2, smem;
mad.lo.u32 %r4, %r3, 32, %r1; mul.wide.u32 %d4, %r4, 4; add.u64 %d5, %d1, %d4; st.global.b32 [%d5], %r4;
bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra JOIN; {count} st.shared.b32 [%r2], %r5; JOIN: bar.sync 0;
ld.shared.b32 %r6, [%r2]; setp.ne.u32 %p2, %r6, 15; @%p2 bra END;
mov.u32 %r7, 0; mov.u32 %r8, 0; SUM: mad.lo.u32 %r9, %r7, 32, %r1; mul.wide.u32 %d6, %r9, 4;
add.u64 %d7, %d1, %d6; ld.global.b32 %r10, [%d7];
add.u32 %r8, %r8, %r10; add.u32 %r7, %r7, 1; setp.lt.u32 %p3, %r7, 16; @%p3 bra SUM;
mul.wide.u32 %d8, %r1, 4; add.u64 %d9, %d3, %d8; st.global.b32 [%d9], %r8; END:
"""


@pytest.mark.parametrize(
    ("count", "fine"),
    [
        ("atom.acq_rel.gpu.global.add.u32 %r5, [%d2], 1;", True),
        ("fence.acq_rel.gpu; atom.relaxed.gpu.global.add.u32 %r5, [%d2], 1; fence.acq_rel.gpu;", True),
        ("atom.relaxed.gpu.global.add.u32 %r5, [%d2], 1;", False),
        ("atom.release.gpu.global.add.u32 %r5, [%d2], 1;", False),
    ],
)
def test_last_cta_sums_what_all_wrote(count, fine):
    data, counter, out = aligned(512, np.uint32), aligned(1, np.uint32), aligned(32, np.uint32)
    module = ".extern .shared .align 16 .b8 smem[];"
    arguments = {"grid": 16, "module": module, "dynamic_smem": 16, "schedule": "random:4"}
    if fine:
        run(LAST.format(count=count), data, counter, out, **arguments)
        assert np.array_equal(out, np.arange(512).reshape(16, 32).sum(0))
    else:
        with pytest.raises(emu.RaceError):
            run(LAST.format(count=count), data, counter, out, **arguments)
