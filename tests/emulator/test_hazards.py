"""Each missing piece of synchronisation in a correct kernel is reported, and the correct kernel is not."""

import re

import numpy as np
import pytest
from gemm_ptx import BODY, MODULE, aligned, gemm, without
from ptx_runner import run

from cute_gemma import emulator as emu

WAIT = "mbarrier.try_wait.parity.shared.b64 %p6, {}, {};\n@!%p6 bra {};"
SCHEDULES = ("lazy", "eager", "random:7")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_correct_kernel_raises_nothing_and_is_exact(schedule):
    c, expected, _ = gemm(512, schedule=schedule)
    assert np.array_equal(c, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("line", "instead", "error", "says"),
    [
        pytest.param(WAIT.format("[%r11]", "%r9", "WAIT_FULL"), "", (emu.RaceError, emu.UninitialisedRead),
                     "shared memory at offset", id="full wait"),
        pytest.param(WAIT.format("[%r11+16]", "%r9", "WAIT_EMPTY"), "", emu.EmulationError, "mbarrier",
            id="empty wait"),
        pytest.param(WAIT.format("[%r4+32]", "0", "WAIT_DONE"), "", emu.EmulationError, "TMEM column 0",
            id="done wait"),
        pytest.param("24576;", "24560;", emu.EmulationError, "mbarrier", id="expect_tx too small"),
        pytest.param("24576;", "24592;", emu.DeadlockError, "16 bytes pending", id="expect_tx too large"),
        pytest.param("fence.proxy.async.shared::cta;", "", emu.ProxyFenceError, "fence.proxy.async",
            id="proxy fence"),
        pytest.param("tcgen05.wait::ld.sync.aligned;", "", emu.AsyncRegisterError, "tcgen05.wait::ld",
            id="wait::ld"),
        pytest.param("fence.proxy.async.shared::cta;\nbar.sync 1, 128;", "fence.proxy.async.shared::cta;",
                     (emu.RaceError, emu.UninitialisedRead), "shared memory at offset", id="barrier before "
                     "the store"),
        pytest.param("cp.async.bulk.wait_group.read 0;", "", emu.LeakError, "wait_group", id="bulk wait"),
        pytest.param("cp.async.bulk.commit_group;", "", emu.LeakError, "wait_group", id="bulk commit"),
        pytest.param("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;", "", emu.LeakError,
            "64 TMEM columns", id="dealloc"),
        pytest.param("bar.sync 0;", "", emu.EmulationError, "", id="barrier after init"),
        pytest.param("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4+32];", "",
            emu.DeadlockError,
                     "0x14420", id="commit"),
    ],
)  # fmt: skip
def test_planted_fault_is_reported(line, instead, error, says, schedule):
    with pytest.raises(error) as caught:
        gemm(512, without(line, instead), schedule=schedule)
    assert says in str(caught.value)
    assert "warp" in str(caught.value)


def test_other_swizzle_in_the_tensor_map_is_reported():
    with pytest.raises(emu.DescriptorError, match="128-byte swizzle.*a 64-byte swizzle|wider than its "
        "swizzle"):
        gemm(256, swizzle=64)


def test_other_swizzle_in_the_descriptor_is_reported():
    body = BODY.replace("0x40004040", "0x80004040")
    with pytest.raises(emu.DescriptorError, match="a 64-byte swizzle at shared memory.*with a 128-byte "
        "swizzle"):
        gemm(256, body)


def test_smaller_box_is_reported():
    with pytest.raises(emu.EmulationError, match="bytes pending|nothing has written"):
        gemm(256, box_a=(64, 64))


def test_race_names_both_accesses():
    with pytest.raises(emu.RaceError) as caught:
        gemm(512, without(WAIT.format("[%r11+16]", "%r9", "WAIT_EMPTY")), schedule="eager")
    assert re.search(r"an asynchronous copy .* writes what an asynchronous copy .* wrote at PTX line \d+",
        caught.value.message)
    assert "cp.async.bulk.tensor" in caught.value.text
    assert caught.value.warp == 4


def test_checks_can_be_switched_off():
    c, expected, _ = gemm(256, without("fence.proxy.async.shared::cta;"), hazards=False)
    assert np.array_equal(c, expected)


def test_load_used_before_its_wait_still_arrives_with_checks_off():
    c, expected, _ = gemm(256, without("tcgen05.wait::ld.sync.aligned;"), hazards=False)
    assert np.array_equal(c, expected)


# ---------------------------------------------------------------- ordinary accesses
EXCHANGE = """
ld.param.u64 %d1, [p0];
mov.u32 %r1, %tid.x; mov.u32 %r2, smem; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
st.shared.b32 [%r4], %r1;
bar.sync 0;
xor.b32 %r5, %r3, 128; add.u32 %r5, %r5, %r2;
ld.shared.b32 %r6, [%r5];
cvt.u64.u32 %d2, %r3; add.u64 %d3, %d1, %d2; st.global.b32 [%d3], %r6;
"""


def test_barrier_orders_two_warps():
    out = aligned(64, np.uint32)
    run(EXCHANGE, out, block=64, module=MODULE, dynamic_smem=256)
    assert np.array_equal(out, np.arange(64) ^ 32)


def test_missing_barrier_between_two_warps_is_a_race():
    out = aligned(64, np.uint32)
    with pytest.raises((emu.RaceError, emu.UninitialisedRead)):
        run(without("bar.sync 0;", body=EXCHANGE), out, block=64, module=MODULE, dynamic_smem=256)


def test_overwriting_what_another_warp_still_reads_is_a_race():
    out = aligned(64, np.uint32)
    body = EXCHANGE + "st.shared.b32 [%r4], %r6;"
    with pytest.raises(emu.RaceError, match="warp . (reads what warp . wrote|writes what warp . read)"):
        run(body, out, block=64, module=MODULE, dynamic_smem=256)


def test_neighbouring_bytes_of_different_warps_do_not_race():
    body = """
    ld.param.u64 %d1, [p0];
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r3, smem; add.u32 %r4, %r3, %r2;
    cvt.u16.u32 %h1, %r2; st.shared.b8 [%r4], %h1;
    bar.sync 0;
    ld.shared.b32 %r5, [%r3];
    shl.b32 %r6, %r1, 2; cvt.u64.u32 %d2, %r6; add.u64 %d3, %d1, %d2; st.global.b32 [%d3], %r5;
    """
    out = aligned(128, np.uint32)
    run(body, out, block=128, module=MODULE, dynamic_smem=16)
    assert (out == 0x03020100).all()


def test_reading_shared_memory_nothing_wrote_is_reported():
    out = aligned(1, np.uint32)
    with pytest.raises(emu.UninitialisedRead, match="offset 0x404"):
        run("mov.u32 %r1, smem; ld.shared.b32 %r2, [%r1+4];", out, module=MODULE, dynamic_smem=64)


def test_strong_accesses_do_not_race():
    body = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, smem;
    setp.ne.u32 %p1, %r1, 0; @%p1 bra GO; st.shared.b32 [%r2], 0; GO:
    bar.sync 0;
    atom.shared.add.u32 %r3, [%r2], 1;
    bar.sync 0;
    ld.shared.b32 %r4, [%r2];
    shl.b32 %r6, %r1, 2; cvt.u64.u32 %d2, %r6; add.u64 %d3, %d1, %d2; st.global.b32 [%d3], %r4;
    """
    out = aligned(96, np.uint32)
    run(body, out, block=96, module=MODULE, dynamic_smem=16)
    assert (out == 96).all()


# ---------------------------------------------------------------- strict checks
FENCED = BODY.replace("tcgen05.ld.sync.aligned.32x32b.x32.b32 {%v0,",
    "tcgen05.fence::after_thread_sync;\ntcgen05.ld.sync.aligned.32x32b.x32.b32 {%v0,")
FENCED = FENCED.replace("tcgen05.wait::ld.sync.aligned;",
    "tcgen05.wait::ld.sync.aligned;\ntcgen05.fence::before_thread_sync;")


def test_tcgen05_fences_are_advice_of_the_strict_mode_only():
    c, expected, _ = gemm(256, FENCED, hazards="strict")
    assert np.array_equal(c, expected)
    gemm(256, BODY)
    with pytest.raises(emu.RaceError, match="advice.*tcgen05.fence::after_thread_sync"):
        gemm(256, without("tcgen05.fence::after_thread_sync;", body=FENCED), hazards="strict")
    with pytest.raises(emu.RaceError, match="tcgen05.fence::before_thread_sync .advice."):
        gemm(256, without("tcgen05.fence::before_thread_sync;", body=FENCED), hazards="strict")


def test_barrier_initialisation_unknown_to_the_async_proxy_is_advice_of_the_strict_mode_only():
    body = without("fence.mbarrier_init.release.cluster;", body=FENCED)
    gemm(256, body)
    with pytest.raises(emu.ProxyFenceError, match="advice.*fence.mbarrier_init"):
        gemm(256, body, hazards="strict")


# Each lane writes a word and reads its neighbour's, twice.
LANES = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, smem; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
    add.u32 %r5, %r3, 4; and.b32 %r5, %r5, 127; add.u32 %r5, %r2, %r5; mov.u32 %r6, 0; mov.u32 %r9, 0;
    AGAIN: add.u32 %r7, %r1, %r6; st.shared.b32 [%r4], %r7; bar.warp.sync -1;
    ld.shared.b32 %r8, [%r5]; add.u32 %r9, %r9, %r8; {between}
    add.u32 %r6, %r6, 1; setp.lt.u32 %p1, %r6, 2; @%p1 bra AGAIN;
    cvt.u64.u32 %d2, %r3; add.u64 %d3, %d1, %d2; st.global.b32 [%d3], %r9;
"""


def test_lanes_of_a_warp_want_bar_warp_sync_between_them_in_the_strict_mode_only():
    body = LANES.format(between="bar.warp.sync 0xffffffff;")
    no_read_after, no_write_after = body.replace("bar.warp.sync -1;", ""), LANES.format(between="")
    for text in (body, no_read_after, no_write_after):
        out = aligned(32, np.uint32)
        run(text, out, module=MODULE, dynamic_smem=128)
        assert np.array_equal(out, 2 * ((np.arange(32) + 1) % 32) + 1)
    run(body, aligned(32, np.uint32), module=MODULE, dynamic_smem=128, hazards="strict")
    for text, what in ((no_read_after, "lane 0 reads what lane 1"), (no_write_after, "writes what lane .* read")):
        with pytest.raises(emu.RaceError, match=f"advice.*{what}.*bar.warp.sync"):
            run(text, aligned(32, np.uint32), module=MODULE, dynamic_smem=128, hazards="strict")


def test_lanes_may_write_halves_of_a_word_and_read_their_own_in_the_strict_mode():
    body = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, smem; shl.b32 %r3, %r1, 1; add.u32 %r4, %r2, %r3;
    cvt.u16.u32 %h1, %r1; st.shared.b16 [%r4], %h1; ld.shared.b16 %h2, [%r4]; cvt.u32.u16 %r5, %h2;
    shl.b32 %r6, %r1, 2; cvt.u64.u32 %d2, %r6; add.u64 %d3, %d1, %d2; st.global.b32 [%d3], %r5;
    """
    out = aligned(32, np.uint32)
    run(body, out, module=MODULE, dynamic_smem=64, hazards="strict")
    assert np.array_equal(out, np.arange(32))


# ---------------------------------------------------------------- registers of a CTA
def test_more_registers_wait_for_what_others_give_up():
    body = """mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 7; setp.eq.u32 %p1, %r2, 0; @%p1 bra GIVE;
    setmaxnreg.inc.sync.aligned.u32 232; bra END; GIVE: setmaxnreg.dec.sync.aligned.u32 24; END:"""
    run(body, aligned(1, np.uint32), block=384)
    with pytest.raises(emu.DeadlockError, match="setmaxnreg.inc"):
        run(body.replace("232", "248"), aligned(1, np.uint32), block=384)


def test_atomics_of_several_warps_on_neighbouring_words_do_not_race():
    body = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, smem; and.b32 %r3, %r1, 3;
    shl.b32 %r4, %r3, 2; add.u32 %r5, %r2, %r4;
    setp.gt.u32 %p1, %r1, 3; @%p1 bra GO; st.shared.b32 [%r5], 0; GO: bar.sync 0;
    red.shared.add.u32 [%r5], %r1; ld.volatile.shared.b32 %r7, [%r5]; atom.shared.add.u32 %r8, [%r5], 1;
    bar.sync 0; ld.shared.b32 %r6, [%r5];
    shl.b32 %r9, %r1, 2; cvt.u64.u32 %d2, %r9; add.u64 %d3, %d1, %d2; st.global.b32 [%d3], %r6;
    """
    for schedule in ("lazy", "random:1", "random:2"):
        out = aligned(128, np.uint32)
        run(body, out, block=128, module=MODULE, dynamic_smem=16, schedule=schedule)
        thread = np.arange(128)
        assert np.array_equal(out, np.array([thread[thread % 4 == k].sum() + 32 for k in range(4)])[thread % 4])
    with pytest.raises(emu.RaceError):
        unordered = body.replace("bar.sync 0; ld.shared", "ld.shared")
        run(unordered, aligned(128, np.uint32), block=128, module=MODULE, dynamic_smem=16)


# Warp 0's lanes write, its lane 0 arrives; warp 1 waits and reads.
ONE_LANE_ARRIVES = """
ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, smem; and.b32 %r3, %r1, 31; shl.b32 %r4, %r3, 2;
add.u32 %r5, %r2, %r4; setp.ne.u32 %p1, %r3, 0; setp.gt.u32 %p2, %r1, 31; setp.ne.u32 %p3, %r1, 0;
@%p3 bra MADE; mbarrier.init.shared::cta.b64 [%r2+128], 1; MADE: bar.sync 0; @%p2 bra READ;
st.shared.u32 [%r5], %r1; {between} @%p1 bra END; mbarrier.arrive.shared::cta.b64 _, [%r2+128]; bra END;
READ: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2+128], 0; @!%p4 bra READ;
ld.shared.u32 %r6, [%r5]; cvt.u64.u32 %d2, %r4; add.u64 %d3, %d1, %d2; st.global.b32 [%d3], %r6; END:
"""


def test_an_arrival_by_one_lane_releases_what_others_wrote_if_bar_warp_sync_comes_before():
    for between, hazards in (("bar.warp.sync -1;", "strict"), ("", True)):
        out = aligned(32, np.uint32)
        run(ONE_LANE_ARRIVES.format(between=between), out, block=64, module=MODULE, dynamic_smem=136,
            hazards=hazards)
        assert np.array_equal(out, np.arange(32))
    with pytest.raises(emu.RaceError, match="warp 1 reads what warp 0 wrote"):
        run(ONE_LANE_ARRIVES.format(between=""), aligned(32, np.uint32), block=64, module=MODULE,
            dynamic_smem=136, hazards="strict")


# ---------------------------------------------------------------- flags in shared memory
FLAG = """mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.ne.u32 %p1, %r1, 0; @%p1 bra Z;
st.shared.u32 [%r2+8], 0; Z: bar.sync 0; setp.gt.u32 %p2, %r1, 31; @%p2 bra R; @%p1 bra E;
st.shared.u32 [%r2], 5; {write} bra E;
R: {read} setp.eq.u32 %p2, %r6, 0; @%p2 bra R; {after} ld.shared.u32 %r7, [%r2]; E:"""
SET, GET = "st.volatile.shared.u32 [%r2+8], 1;", "ld.volatile.shared.u32 %r6, [%r2+8];"
CTA_FENCE = "fence.acq_rel.cta;"


@pytest.mark.parametrize("schedule", ["lazy", "random:1", "random:2"])
@pytest.mark.parametrize(
    ("write", "read", "after", "fine"),
    [
        ("st.release.cta.shared.u32 [%r2+8], 1;", "ld.acquire.cta.shared.u32 %r6, [%r2+8];", "", True),
        ("red.release.cta.shared.add.u32 [%r2+8], 1;", "atom.acquire.cta.shared.or.b32 %r6, [%r2+8], 0;",
            "", True),
        (CTA_FENCE + SET, GET, CTA_FENCE, True),
        (SET, GET, CTA_FENCE, False),
        (CTA_FENCE + SET, GET, "", False),
        (SET, "ld.acquire.cta.shared.u32 %r6, [%r2+8];", "", False),
    ],
)
def test_flags_in_shared_memory_order_what_is_released_and_acquired(write, read, after, fine, schedule):
    body, out = FLAG.format(write=write, read=read, after=after), aligned(1, np.uint32)
    options = {"block": 64, "module": MODULE, "dynamic_smem": 16, "schedule": schedule}
    if fine:
        run(body, out, **options)
    else:
        with pytest.raises(emu.RaceError):
            run(body, out, **options)
