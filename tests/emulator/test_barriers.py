"""mbarriers, named barriers, cluster barriers, and how their misuse and deadlocks are reported."""

import numpy as np
import pytest
from gemm_ptx import MODULE, aligned
from ptx_runner import run

from cute_gemma import emulator as emu

PRELUDE = "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r3, %ctaid.x; setp.ne.u32 %p1, %r1, 0;"
STORE = (
    "ld.param.u64 %d1, [p0]; mad.lo.u32 %r70, %r3, %ntid.x, %r1; mul.wide.u32 %d2, %r70, 4; add.u64 %d3, "
    "%d1, %d2; st.global.b32 [%d3], %r10;"
)


def threads(body: str, block: int = 32, grid: int = 1, **options) -> np.ndarray:
    """Runs `body`, in which %r10 is each thread's result;
    %r1 its number, %r2 the address of shared memory."""
    out = aligned(block * grid, np.uint32)
    run(PRELUDE + body + STORE, out, block=block, grid=grid, module=MODULE, dynamic_smem=256, **options)
    return out


def init(count: int, at: int = 0) -> str:
    return f"@%p1 bra INIT{at}; mbarrier.init.shared.b64 [%r2+{at}], {count}; INIT{at}: bar.sync 0;"


def wait(parity, at: int = 0, label: str = "W") -> str:
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+{at}], {parity}; @!%p2 bra {label};"


# ---------------------------------------------------------------- mbarrier
def test_fresh_barrier_passes_parity_one_and_not_zero():
    body = init(1) + """mbarrier.test_wait.parity.shared.b64 %p2, [%r2], 1;
    mbarrier.test_wait.parity.shared.b64 %p3, [%r2], 0;
    selp.u32 %r10, 1, 0, %p2; @%p3 add.u32 %r10, %r10, 2;"""
    assert (threads(body) == 1).all()


def test_phase_completes_when_every_arrival_has_come():
    body = init(64) + "mbarrier.arrive.shared.b64 _, [%r2];" + wait(0) + """
    mbarrier.test_wait.parity.shared.b64 %p3, [%r2], 1; selp.u32 %r10, 1, 7, %p3;"""
    assert (threads(body, 64) == 7).all()


def test_state_form_waits_for_the_phase_of_its_arrival():
    body = init(64) + """mbarrier.arrive.shared.b64 %d9, [%r2];
    W: mbarrier.try_wait.shared.b64 %p2, [%r2], %d9; @!%p2 bra W; mov.u32 %r10, 5;"""
    assert (threads(body, 64) == 5).all()


def test_counted_arrivals_and_drop():
    body = init(6) + """
    @%p1 bra SKIP;
    mbarrier.arrive.shared.b64 _, [%r2], 4; mbarrier.arrive_drop.shared.b64 _, [%r2];
    mbarrier.arrive.shared.b64 _, [%r2];
    SKIP: """ + wait(0) + """
    @%p1 bra AGAIN; mbarrier.arrive.shared.b64 _, [%r2], 5; AGAIN:
    """ + wait(1, label="V") + "mov.u32 %r10, 3;"  # one of six is gone for good
    assert (threads(body) == 3).all()


def test_transaction_count_holds_the_phase_open():
    body = init(1) + """
    @%p1 bra SKIP; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 100; SKIP: bar.sync 0;
    mbarrier.test_wait.parity.shared.b64 %p2, [%r2], 0; selp.u32 %r10, 1, 0, %p2; bar.sync 0;
    @%p1 bra MORE; mbarrier.complete_tx.shared.b64 [%r2], 100; MORE: bar.sync 0;
    mbarrier.test_wait.parity.shared.b64 %p2, [%r2], 0; @%p2 add.u32 %r10, %r10, 10;"""
    assert (threads(body) == 10).all()


def test_arrival_releases_and_wait_acquires():
    body = init(32) + """
    shr.u32 %r4, %r1, 5; setp.eq.u32 %p3, %r4, 1; @%p3 bra READ;
    st.shared.b32 [%r2+16], 9; mbarrier.arrive.shared.b64 _, [%r2]; mov.u32 %r10, 9; bra OUT;
    READ: """ + wait(0) + "ld.shared.b32 %r10, [%r2+16]; OUT:"
    assert (threads(body, 64) == 9).all()


def test_relaxed_arrival_does_not_release():
    body = init(32) + """
    shr.u32 %r4, %r1, 5; setp.eq.u32 %p3, %r4, 1; @%p3 bra READ;
    st.shared.b32 [%r2+16], 9; mbarrier.arrive.relaxed.cta.shared.b64 _, [%r2]; bra OUT;
    READ: """ + wait(0) + "ld.shared.b32 %r10, [%r2+16]; OUT:"
    with pytest.raises(emu.RaceError):
        threads(body, 64)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(init(1) + "mbarrier.arrive.shared.b64 _, [%r2], 2;", "2 arrivals .* expects 1 more",
            id="over-arrival"),
        pytest.param("mbarrier.arrive.shared.b64 _, [%r2];", "no mbarrier.init has made", id="no init"),
        pytest.param(init(1) + "@%p1 bra S; mbarrier.init.shared.b64 [%r2], 1; S:", "is in use",
            id="second init"),
        pytest.param(init(1) + "@%p1 bra S; mbarrier.inval.shared.b64 [%r2]; S: bar.sync 0;" + wait(1),
            "has ended", id="after inval"),
        pytest.param(init(1) + "st.shared.b32 [%r2+4], 0;", "writes the bytes of the mbarrier",
            id="overwritten"),
        pytest.param(init(1) + "@%p1 bra S; mbarrier.expect_tx.relaxed.cta.shared.b64 [%r2], 1048576; S:",
            "outside", id="tx overflow"),
        pytest.param("@%p1 bra S; mbarrier.init.shared.b64 [%r2], 0; S:", "count 0", id="count 0"),
    ],
)
def test_misuse_is_reported(body, says):
    with pytest.raises(emu.BarrierError, match=says):
        threads(body)


def test_use_without_order_after_init_is_a_race():
    body = "@%p1 bra S; mbarrier.init.shared.b64 [%r2], 1; S:" + wait(1)
    with pytest.raises((emu.RaceError, emu.BarrierError)):
        threads(body, 64)


def test_barrier_may_be_made_again_after_inval():
    body = init(32) + "mbarrier.arrive.shared.b64 _, [%r2];" + wait(0) + """bar.sync 0;
    @%p1 bra S; mbarrier.inval.shared.b64 [%r2]; mbarrier.init.shared.b64 [%r2], 32; S: bar.sync 0;
    mbarrier.arrive.shared.b64 _, [%r2];""" + wait(0, label="V") + "mov.u32 %r10, 4;"
    assert (threads(body) == 4).all()


def test_deadlock_report_says_who_waits_for_what():
    body = init(3) + "@%p1 bra S; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 48; S:" + wait(0)
    with pytest.raises(emu.DeadlockError) as caught:
        threads(body, 64)
    for piece in ("warp 0", "warp 1", "mbarrier at 0x400", "parity 0", "phase 0", "2 of 3 arrivals",
        "48 bytes pending"):
        assert piece in caught.value.message
    assert "try_wait" in str(caught.value) or "PTX line" in caught.value.message


# ---------------------------------------------------------------- bar
def test_named_barriers_synchronise_their_own_threads():
    body = """shr.u32 %r4, %r1, 6; add.u32 %r5, %r4, 1; shl.b32 %r6, %r1, 2; add.u32 %r7, %r2, %r6;
    st.shared.b32 [%r7], %r1; bar.sync %r5, 64; xor.b32 %r8, %r6, 128; add.u32 %r8, %r8, %r2;
    ld.shared.b32 %r10, [%r8];"""
    out = aligned(128, np.uint32)
    run(PRELUDE + body + STORE, out, block=128, module=MODULE, dynamic_smem=512)
    assert np.array_equal(out, np.arange(128) ^ 32)


def test_arrive_and_sync_make_a_producer_and_a_consumer():
    body = """shr.u32 %r4, %r1, 5; setp.eq.u32 %p3, %r4, 1; @%p3 bra CONSUME;
    st.shared.b32 [%r2], 6; bar.arrive 1, 64; mov.u32 %r10, 6; bra OUT;
    CONSUME: bar.sync 1, 64; ld.shared.b32 %r10, [%r2]; OUT:"""
    assert (threads(body, 64) == 6).all()


def test_reductions():
    body = """setp.lt.u32 %p3, %r1, 40; barrier.cta.red.popc.u32 %r10, 0, %p3;
    barrier.cta.red.and.pred %p4, 0, %p3; barrier.cta.red.or.pred %p5, 0, %p3;
    @%p4 add.u32 %r10, %r10, 1000; @%p5 add.u32 %r10, %r10, 100;"""
    assert (threads(body, 64) == 140).all()


def test_exited_warps_no_longer_count():
    body = "setp.gt.u32 %p3, %r1, 31; @%p3 exit; bar.sync 0; mov.u32 %r10, 2;"
    assert np.array_equal(threads(body, 64), [2] * 32 + [0] * 32)


def test_barrier_that_others_never_reach_is_a_deadlock():
    body = "setp.gt.u32 %p3, %r1, 31; @%p3 bra S; bar.sync 1, 64; S: bar.sync 2, 64;"
    with pytest.raises(emu.DeadlockError, match="barrier 1: 32 of 64 threads"):
        threads(body, 64)


def test_barrier_with_different_counts_is_reported():
    body = "setp.gt.u32 %p3, %r1, 31; @%p3 bra S; bar.sync 1, 64; S: bar.sync 1, 96;"
    with pytest.raises(emu.BarrierError, match="with 96 threads, while others came to it with 64|with 64 "
        "threads"):
        threads(body, 96)


# ---------------------------------------------------------------- clusters
CLUSTER_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def test_cluster_barrier_orders_distributed_shared_memory():
    body = f"""mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mapa.shared::cluster.u32 %r6, %r2, %r5;
    {CLUSTER_SYNC} shl.b32 %r8, %r1, 2; add.u32 %r6, %r6, %r8; st.shared::cluster.b32 [%r6], %r4;
    {CLUSTER_SYNC}
    add.u32 %r9, %r2, %r8; ld.shared.b32 %r10, [%r9]; {CLUSTER_SYNC}"""
    assert np.array_equal(threads(body, 32, 4, cluster=2), np.repeat([1, 0, 1, 0], 32))


def test_remote_arrival_wakes_and_orders():
    body = f"""mov.u32 %r4, %cluster_ctarank; @%p1 bra I; mbarrier.init.shared.b64 [%r2], 32;
    fence.mbarrier_init.release.cluster; I:
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r5, 0; mapa.shared::cluster.u32 %r6, %r2, %r5; setp.eq.u32 %p3, %r4, 0; @%p3 bra RECEIVE;
    shl.b32 %r8, %r1, 2; add.u32 %r9, %r6, %r8; st.shared::cluster.b32 [%r9+16], %r1;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6]; mov.u32 %r10, 0; bra OUT;
    RECEIVE: {wait(0)} xor.b32 %r7, %r1, 1; shl.b32 %r8, %r7, 2; add.u32 %r9, %r2, %r8;
    ld.shared.b32 %r10, [%r9+16];
    OUT: {CLUSTER_SYNC}"""
    out = threads(body, 32, 2, cluster=2)
    assert np.array_equal(out[:32], np.arange(32) ^ 1)


def test_shared_memory_of_a_cta_that_has_gone_is_refused():
    body = """mov.u32 %r4, %cluster_ctarank; setp.eq.u32 %p3, %r4, 1; @%p3 exit;
    mov.u32 %r8, 0; L: add.u32 %r8, %r8, 1; setp.lt.u32 %p4, %r8, 20000; @%p4 bra L;
    mov.u32 %r5, 1; mapa.shared::cluster.u32 %r6, %r2, %r5; st.shared::cluster.b32 [%r6], %r1;"""
    with pytest.raises(emu.MemoryFault, match="rank 1, whose threads have all exited"):
        threads(body, 32, 2, cluster=2)


def test_missing_cluster_barrier_is_a_race():
    body = """mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mapa.shared::cluster.u32 %r6, %r2, %r5;
    st.shared.b32 [%r2], %r4; ld.shared::cluster.b32 %r10, [%r6];""" + CLUSTER_SYNC
    with pytest.raises((emu.RaceError, emu.UninitialisedRead)):
        threads(body, 32, 2, cluster=2)


# ---------------------------------------------------------------- misuse of barrier and setmaxnreg
TWO_WARPS = "mov.u32 %r1, %tid.x; setp.gt.u32 %p1, %r1, 31; @%p1 bra B; {} bra E; B: {} E:"


@pytest.mark.parametrize("schedule", ["lazy", "random:1", "random:2"])
@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("bar.sync 1, 64;", "bar.red.popc.u32 %r5, 1, 64, %p1;", "barrier.red together with"),
        ("bar.sync 1, 64;", "bar.sync 1;", "while others came to it with"),
        ("bar.arrive 1, 64; bar.sync 1, 64;", "", "a second time before it is complete"),
        ("and.b32 %r2, %r1, 1; bar.sync %r2, 64;", "bar.sync 0, 64;", "do not agree on the barrier"),
    ],
)
def test_misused_named_barriers_are_reported(first, second, says, schedule):
    with pytest.raises(emu.EmulationError, match=says):
        run(TWO_WARPS.format(first, second), np.zeros(1, np.uint32), block=96, schedule=schedule)


def test_a_warp_may_arrive_for_every_phase_of_a_named_barrier():
    again = "bar.arrive 1, 64; bar.sync 2, 64; bar.arrive 1, 64;"
    other = "bar.sync 1, 64; bar.sync 2, 64; bar.sync 1, 64;"
    run(TWO_WARPS.format(again, other), np.zeros(1, np.uint32), block=64)


GIVE_UP = "setmaxnreg.dec.sync.aligned.u32 40;"


@pytest.mark.parametrize("schedule", ["lazy", "random:1", "random:2"])
@pytest.mark.parametrize(
    ("first", "others"),
    [(GIVE_UP, ""), (GIVE_UP, GIVE_UP.replace("40", "48")), (GIVE_UP + GIVE_UP, GIVE_UP)],
)
def test_setmaxnreg_by_a_part_of_a_warpgroup_is_reported(first, others, schedule):
    with pytest.raises(emu.IllegalInstruction, match="setmaxnreg is for all warps of a warpgroup alike"):
        run(TWO_WARPS.format(first, others), np.zeros(1, np.uint32), block=128, schedule=schedule)


@pytest.mark.parametrize("schedule", ["lazy", "random:1", "random:2"])
def test_ending_an_mbarrier_that_others_still_use_is_a_race(schedule):
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.eq.u32 %p1, %r1, 0; setp.gt.u32 %p3, %r1, 31;
    @!%p1 bra G; mbarrier.init.shared.b64 [%r2], 1; G: bar.sync 0; @!%p1 bra W;
    mbarrier.arrive.shared.b64 _, [%r2];
    W: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra W; {} @!%p1 bra E;
    mbarrier.inval.shared.b64 [%r2]; mbarrier.init.shared.b64 [%r2], 2; E:"""
    smem = {"module": ".extern .shared .align 16 .b8 smem[];", "dynamic_smem": 16, "block": 64}
    run(body.format("bar.sync 0;"), np.zeros(1, np.uint32), schedule=schedule, **smem)
    with pytest.raises(emu.EmulationError, match="uses with nothing that orders the two|inval has ended"):
        run(body.format(""), np.zeros(1, np.uint32), schedule=schedule, **smem)


def test_shuffle_from_a_lane_that_does_not_take_part_is_reported():
    body = """mov.u32 %r1, %tid.x; setp.gt.u32 %p1, %r1, 15; @%p1 bra E;
    shfl.sync.idx.b32 %r5, %r1, {}, 31, 0xffff; E:"""
    run(body.format(15), np.zeros(1, np.uint32))
    with pytest.raises(emu.DivergenceError, match="takes the value of lane 20"):
        run(body.format(20), np.zeros(1, np.uint32))


INIT = """mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 bra I;
mbarrier.init.shared.b64 [%r2], 1; I: bar.sync 0;"""


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("mov.u32 %r9, 0; mbarrier.arrive.shared.b64 _, [%r2], %r9;", emu.BarrierError,
            "an arrival with count 0"),
        ("mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;", emu.LeakError, "advice: .* 16 bytes pending in phase 0"),
        ("mbarrier.arrive.shared.b64 _, [%r2]; mbarrier.arrive.shared.b64 _, [%r2];", emu.BarrierError,
            "advice: .* phase 1 .* no thread has waited for phase 0"),
        ("mbarrier.arrive.shared.b64 %d9, [%r2]; mbarrier.test_wait.shared.b64 %p5, [%r2], %d9; "
            "mbarrier.arrive.shared.b64 _, [%r2]; "
            "mbarrier.test_wait.shared.b64 %p5, [%r2], %d9;", emu.BarrierError,
            "with a state of phase 0 .* in phase 2"),
    ],
)  # fmt: skip
def test_misused_mbarriers_are_reported(code, error, says):
    with pytest.raises(error, match=says):
        run(INIT + "@%p1 bra E;" + code + "E:", np.zeros(1, np.uint32), module=MODULE, dynamic_smem=16,
            hazards="strict")


def test_state_of_a_barrier_in_another_cta_is_refused():
    with pytest.raises(emu.UnsupportedInstruction, match="a state of a barrier in .shared::cluster"):
        run(INIT + "mbarrier.arrive.shared::cluster.b64 %d9, [%r2];", np.zeros(1, np.uint32), module=MODULE,
            dynamic_smem=16)


@pytest.mark.parametrize("schedule", ["lazy", "random:1", "random:2"])
def test_relaxed_wait_acquires_with_the_help_of_a_fence(schedule):
    body = INIT + """@!%p1 bra W; setp.ne.u32 %p3, %r1, 32; @%p3 bra E;
    Q: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p5, [%r2], 0; @!%p5 bra Q; {}
    ld.shared.u32 %r10, [%r2+8]; bra E;
    W: st.shared.u32 [%r2+8], %r1; mbarrier.arrive.shared.b64 _, [%r2]; E:"""
    options = {"block": 64, "module": MODULE, "dynamic_smem": 16, "schedule": schedule}
    run(body.format("fence.acq_rel.cta;"), np.zeros(1, np.uint32), **options)
    with pytest.raises(emu.RaceError):
        run(body.format(""), np.zeros(1, np.uint32), **options)
