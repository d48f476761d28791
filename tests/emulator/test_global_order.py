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
        ("st.release.cluster.global.b32 [%d2], 1;", ACQUIRE, ""),
        (RELEASE, "ld.acquire.cluster.global.b32 %r5, [%d2];", ""),
        ("fence.acq_rel.cluster;" + RELAXED_WRITE, ACQUIRE, ""),
        (RELEASE, RELAXED_READ, "fence.acq_rel.cluster;"),
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


# ---------------------------------------------------------------- writes after writes and after reads
# CTA 0 does `first`, CTA 1 `second`; between them is a flag in p1, or nothing. %d5: this lane's word of p0.
TWO = """
ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 %d3, [p2]; mov.u32 %r1, %tid.x;
mov.u32 %r3, %ctaid.x; mov.u32 %r2, smem; add.u32 %r20, %r2, 256;
mul.wide.u32 %d4, %r1, 4; add.u64 %d5, %d1, %d4; add.u64 %d6, %d3, %d4; setp.ne.u32 %p1, %r1, 0;
setp.eq.u32 %p2, %r3, 1; @%p2 bra SECOND;
{first} bar.sync 0; @%p1 bra END; {raise} bra END;
SECOND: @%p1 bra GO; POLL: {poll} GO: bar.sync 0; {second} END:
"""
WAITING = "ld.acquire.gpu.global.b32 %r5, [%d2]; setp.eq.u32 %p3, %r5, 0; @%p3 bra POLL;"
SHARED = ".extern .shared .align 128 .b8 smem[];"


def two(first, second, ordered, grid=2, **options):
    data, flag, out = aligned(32, np.uint32), aligned(1, np.uint32), aligned(32, np.uint32)
    between = {"raise": RELEASE, "poll": WAITING} if ordered else {"raise": "", "poll": ""}
    run(TWO.format(first=first, second=second, **between), data, flag, out, grid=grid, module=SHARED,
        dynamic_smem=512, **options)
    return data, out


WRITE, READ = "st.global.b32 [%d5], %r1;", "ld.global.b32 %r6, [%d5];"
ADD, LATEST = "red.relaxed.gpu.global.add.u32 [%d5], 1;", "ld.relaxed.gpu.global.b32 %r6, [%d5];"
CP_ASYNC = """shl.b32 %r7, %r1, 2; add.u32 %r7, %r7, %r2; cp.async.ca.shared.global [%r7], [%d5], 4;
cp.async.wait_all;"""


@pytest.mark.parametrize("schedule", ["lazy", "random:1", "random:2"])
@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        pytest.param(WRITE, WRITE, "writes .* wrote", id="write, write"),
        pytest.param(READ, WRITE, "writes .* read|reads .* wrote", id="read, write"),
        pytest.param(ADD, READ, "reads .* wrote|writes .* read", id="atomic, read"),
        pytest.param(WRITE, ADD, "writes .* wrote", id="write, atomic"),
        pytest.param(WRITE, LATEST, "reads .* wrote|writes .* read", id="write, strong read"),
        pytest.param(WRITE, CP_ASYNC, "reads .* wrote|writes .* read", id="write, cp.async"),
    ],
)
def test_unordered_accesses_of_two_ctas_are_a_race(first, second, says, schedule):
    two(first, second, True, schedule=schedule)
    with pytest.raises(emu.RaceError, match=says):
        two(first, second, False, schedule=schedule)


@pytest.mark.parametrize(("first", "second"), [(ADD, ADD), (ADD, LATEST), (LATEST, ADD), (READ, READ)])
def test_atomics_and_reads_of_two_ctas_do_not_race(first, second):
    two(first, second, False)


def test_warps_of_one_cta_want_a_barrier_between_writes_of_global_memory():
    body = """ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; mul.wide.u32 %d2, %r2, 4;
    add.u64 %d3, %d1, %d2; setp.gt.u32 %p1, %r1, 31; @%p1 bra B; st.global.b32 [%d3], 1; B: {barrier}
    @!%p1 bra END; st.global.b32 [%d3], 2; END:"""
    out = aligned(32, np.uint32)
    run(body.format(barrier="bar.sync 0;"), out, block=64)
    assert (out == 2).all()
    with pytest.raises(emu.RaceError, match="writes .* wrote .*a barrier must come between"):
        run(body.format(barrier=""), aligned(32, np.uint32), block=64)


def test_read_only_loads_of_what_the_launch_writes_are_reported():
    two(WRITE, READ, True)
    with pytest.raises(emu.RaceError, match="ld.global.nc"):
        two(WRITE, READ.replace("global", "global.nc"), True)
    two("", READ.replace("global", "global.nc"), False)


# ---------------------------------------------------------------- the async proxy
BULK_READ = """@%p1 bra DONE; mbarrier.init.shared.b64 [%r20], 1; {fence}
mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], 128, [%r20];
W: mbarrier.try_wait.parity.shared.b64 %p6, [%r20], 0; @!%p6 bra W; DONE:"""
BULK_WRITE = """shl.b32 %r7, %r1, 2; add.u32 %r7, %r7, %r2; st.shared.b32 [%r7], %r1;
fence.proxy.async.shared::cta; bar.warp.sync -1; @%p1 bra SENT;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r2], 128;
cp.async.bulk.commit_group; cp.async.bulk.wait_group{read} 0; SENT:"""
PROXY = "fence.proxy.async{};"


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1"])
@pytest.mark.parametrize("scope", ["", ".global"])
def test_bulk_read_of_what_a_thread_wrote_wants_a_proxy_fence(scope, schedule):
    fence = PROXY.format(scope)
    two(WRITE + fence, BULK_READ.format(fence=""), True, schedule=schedule)
    two(WRITE, BULK_READ.format(fence=fence), True, schedule=schedule)
    for there, here in (("", ""), (PROXY.format(".shared::cta"), PROXY.format(".shared::cta"))):
        with pytest.raises(emu.ProxyFenceError, match="reads global memory .* fence.proxy.async"):
            two(WRITE + there, BULK_READ.format(fence=here), True, schedule=schedule)


def test_bulk_read_of_what_its_own_cta_wrote_wants_a_proxy_fence():
    own = WRITE + "{} bar.sync 1; " + BULK_READ.format(fence="")
    two(own.format("fence.proxy.async.global;"), "", False)
    with pytest.raises(emu.ProxyFenceError, match="reads global memory .* fence.proxy.async"):
        two(own.format(""), "", False)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1"])
def test_bulk_write_is_read_after_its_group_has_been_waited_for(schedule):
    two(BULK_WRITE.format(read=""), READ, True, schedule=schedule)
    with pytest.raises(emu.RaceError, match="a bulk copy of warp 0"):
        two(BULK_WRITE.format(read=".read"), READ, True, schedule=schedule)


@pytest.mark.parametrize("schedule", ["lazy", "eager"])
def test_overwriting_what_a_bulk_copy_may_still_read_is_a_race(schedule):
    two(BULK_READ.format(fence=""), WRITE, True, schedule=schedule)
    early = f"DONE: bar.sync 0; @%p1 bra END; {RELEASE} W: mbarrier"
    late = BULK_READ.format(fence="").replace("DONE:", "").replace("W: mbarrier", early)
    late = late.replace("@!%p6 bra W;", "@!%p6 bra W; bra END;")
    with pytest.raises(emu.RaceError, match="writes global memory .*, which a bulk copy"):
        two(late, WRITE, True, schedule=schedule)


def test_fence_of_the_async_proxy_covers_the_memory_that_it_names():
    other = BULK_WRITE.format(read="").replace("fence.proxy.async.shared::cta", "fence.proxy.async.global")
    with pytest.raises(emu.ProxyFenceError, match="shared memory"):
        two(other, READ, True)


@pytest.mark.parametrize("scope", ["cta", "gpu"])
def test_flag_in_global_memory_orders_the_warps_of_a_cta_whatever_its_scope(scope):
    body = f"""ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 32;
    @%p1 bra A; @!%p2 bra E; P: ld.acquire.{scope}.global.u32 %r5, [%d1]; setp.eq.u32 %p3, %r5, 0; @%p3 bra P;
    ld.global.u32 %r6, [%d1+4]; st.global.u32 [%d1+8], %r6; bra E;
    A: st.global.u32 [%d1+4], 9; {{release}} E:"""
    out = aligned(3, np.uint32)
    fenced = f"fence.acq_rel.gpu; fence.acq_rel.cta; st.relaxed.{scope}.global.u32 [%d1], 1;"
    run(body.format(release=fenced), out, block=64)
    assert out[2] == 9
    run(body.format(release=f"st.release.{scope}.global.u32 [%d1], 1;"), aligned(3, np.uint32), block=64)
    with pytest.raises(emu.RaceError, match="a barrier must come between"):
        run(body.format(release="st.relaxed.gpu.global.u32 [%d1], 1;"), aligned(3, np.uint32), block=64)


def test_all_lanes_of_a_warp_may_store_the_same_bytes_in_one_bulk_group():
    everyone = BULK_WRITE.format(read="").replace("@%p1 bra SENT;", "")
    data, _ = two(everyone, READ, True)
    assert np.array_equal(data, np.arange(32))
