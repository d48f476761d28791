"""Scheduling: every policy gives the same result, resident CTAs run together, polling works,
overlapping launches are checked."""

import numpy as np
import pytest
from gemm_ptx import BODY, aligned, gemm
from ptx_runner import KERNEL, run

from cute_gemma import emulator as emu

STORE = "mul.wide.u32 %d8, %r70, 4; add.u64 %d9, %d1, %d8; st.global.b32 [%d9], %r10;"


def test_every_schedule_gives_the_same_bits():
    first, expected, _ = gemm(384)
    assert np.array_equal(first, expected)
    for seed in range(50):
        again, _, _ = gemm(384, schedule=f"random:{seed}")
        assert np.array_equal(first, again)


def test_a_schedule_is_repeatable():
    counts = [gemm(512, schedule="random:11")[2].warp_instructions for _ in range(3)]
    assert len(set(counts)) == 1


def test_lazy_copies_arrive_only_when_waited_for():
    body = BODY.replace("WAIT_FULL:", "mbarrier.test_wait.parity.shared.b64 %p9, [%r11], %r9;\n@%p9 "
        "trap;\nWAIT_FULL:")
    gemm(64, body, schedule="lazy")
    with pytest.raises(emu.IllegalInstruction):       # eager: the first tile is there before anyone waits
        for seed in range(20):
            gemm(64, body, schedule=f"random:{seed}")
        gemm(64, body, schedule="eager")


CHAIN = """
ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x; mov.u32 %r3, %ctaid.x;
setp.ne.u32 %p1, %r1, 0; @%p1 bra DONE;
AGAIN: ld.acquire.gpu.global.b32 %r4, [%d2]; setp.ne.u32 %p2, %r4, {turn}; @%p2 bra AGAIN;
ld.global.b32 %r5, [%d1]; mad.lo.u32 %r5, %r5, 3, %r3; st.global.b32 [%d1], %r5;
add.u32 %r4, %r4, 1; st.release.gpu.global.b32 [%d2], %r4;
DONE:
"""


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:5"])
def test_ctas_hand_on_a_semaphore_in_reverse_order(schedule):
    value, turn = aligned(1, np.uint32), aligned(1, np.uint32)
    run(CHAIN.format(turn="%r6").replace("AGAIN:", "sub.u32 %r6, 11, %r3; AGAIN:"), value, turn, grid=12,
        schedule=schedule)
    expected = 0
    for cta in reversed(range(12)):
        expected = (expected * 3 + cta) % 2**32
    assert value[0] == expected


def test_more_ctas_than_fit_take_turns():
    out = aligned(100, np.uint32)
    body = "ld.param.u64 %d1, [p0]; mov.u32 %r70, %ctaid.x; mov.u32 %r10, %smid;" + STORE
    run(body, out, grid=100, sm_count=4)
    assert set(out.tolist()) == {0, 1, 2, 3}


def test_semaphore_that_needs_more_resident_ctas_is_a_livelock():
    value, turn = aligned(1, np.uint32), aligned(1, np.uint32)
    with pytest.raises(emu.DeadlockError, match="(?s)livelock.*polling"):
        run(CHAIN.format(turn="%r6").replace("AGAIN:", "sub.u32 %r6, 11, %r3; AGAIN:"), value, turn,
            grid=12, sm_count=4)


def test_progress_is_reported():
    seen = []
    run("mov.u32 %r1, 1;", aligned(1, np.uint32), grid=6, progress=lambda done,
        total: seen.append((done, total)))
    assert seen == [(i, 6) for i in range(1, 7)]


# ---------------------------------------------------------------- programmatic dependent launch
def launch(body, arrays, programmatic):
    params = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    text = KERNEL.format(params=params, body=body, block=64, module="", target="sm_100a")
    values = tuple(int(a.ctypes.data).to_bytes(8, "little") for a in arrays)
    return emu.Launch("k", text, (1, 1, 1), (64, 1, 1), (1, 1, 1), 0, values, programmatic=programmatic)


WRITE = (
    "ld.param.u64 %d1, [p0]; mov.u32 %r70, %tid.x; mov.u32 %r10, 3;" + STORE
    + "griddepcontrol.launch_dependents;"
)
READ = """ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4;
add.u64 %d4, %d1, %d3; add.u64 %d5, %d2, %d3; {wait} ld.global.b32 %r2, [%d4]; st.global.b32 [%d5], %r2;"""


def overlap(wait, programmatic=True):
    a, b = aligned(64, np.uint32), aligned(64, np.uint32)
    regions = [emu.Region(x.ctypes.data, x.nbytes) for x in (a, b)]
    before = emu.run_launch(launch(WRITE, (a,), False), regions)
    emu.run_launch(launch(READ.format(wait=wait), (a, b), programmatic), regions, emu.Options(), before)
    return b


def test_dependent_launch_that_waits_reads_the_result():
    assert (overlap("griddepcontrol.wait;") == 3).all()


def test_dependent_launch_that_does_not_wait_is_reported():
    with pytest.raises(emu.ProgrammaticLaunchError, match="which the launch before wrote"):
        overlap("")


def test_ordinary_launch_needs_no_wait():
    assert (overlap("", programmatic=False) == 3).all()


@pytest.mark.parametrize("between", [["late"], ["late", "late"], [""], ["", ""], ["", "late"]])
def test_what_a_launch_in_between_has_not_waited_for_may_still_run(between):
    """The last launch waits for the one before it, and reads what the first one wrote."""
    arrays = [aligned(64, np.uint32) for _ in range(6)]
    regions = [emu.Region(x.ctypes.data, x.nbytes) for x in arrays]
    previous = emu.run_launch(launch(WRITE, arrays[:1], False), regions)
    for source, late in enumerate(between, 1):
        body = READ.format(wait="") + ("griddepcontrol.wait;" if late else "")
        pair = arrays[2 * source - 1], arrays[2 * source]
        previous = emu.run_launch(launch(body, pair, True), regions, previous=previous)
    last = launch(READ.format(wait="griddepcontrol.wait;"), (arrays[0], arrays[5]), True)
    if all(between):
        emu.run_launch(last, regions, previous=previous)
        assert (arrays[5] == 3).all()
    else:
        with pytest.raises(emu.ProgrammaticLaunchError, match="an earlier launch wrote: it may still run"):
            emu.run_launch(last, regions, previous=previous)


def test_one_warp_may_wait_for_the_others_if_a_barrier_follows():
    one = "setp.gt.u32 %p1, %r1, 31; @%p1 bra S; griddepcontrol.wait; S: bar.sync 0;"
    assert (overlap(one) == 3).all()
    with pytest.raises(emu.ProgrammaticLaunchError):
        overlap(one.replace("bar.sync 0;", ""))
