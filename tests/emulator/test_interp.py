"""Control flow, divergence, warp-wide operations, special registers and execution counts."""

import numpy as np
import pytest
from ptx_runner import lanes, run

from cute_gemma.emulator import DivergenceError, IllegalInstruction, UninitialisedRead

U32 = np.uint32
STORE = "mov.u32 %r70, %tid.x; ld.param.u64 %d1, [p0]; mad.wide.u32 %d2, %r70, 4, %d1;"


def store(register: str) -> str:
    return f"{STORE} st.global.b32 [%d2], {register};"


def test_divergent_branches_join_and_every_lane_has_its_own_result():
    out = np.zeros(32, U32)
    report = run(
        """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; mov.u32 %r3, 5;
        @%p1 bra EVEN; add.u32 %r3, %r3, 100; bra JOIN;
        EVEN: mul.lo.u32 %r3, %r1, 3;
        JOIN: activemask.b32 %r4; xor.b32 %r3, %r3, %r4; """
        + store("%r3"),
        out,
    )
    lane = np.arange(32, dtype=U32)
    assert (out == (np.where(lane % 2, 105, 3 * lane) ^ 0xFFFFFFFF)).all()
    counts = report.by_opcode
    assert counts["add.u32"] == 1 and counts["mul.lo.u32"] == 1 and counts["activemask.b32"] == 1


def test_loops_of_different_length_per_lane():
    out = np.zeros(32, U32)
    report = run(
        """mov.u32 %r1, %tid.x; mov.u32 %r2, 0; mov.u32 %r3, 0;
        LOOP: add.u32 %r3, %r3, %r2; add.u32 %r2, %r2, 1; setp.le.u32 %p1, %r2, %r1; @%p1 bra LOOP; """
        + store("%r3"),
        out,
    )
    lane = np.arange(32)
    assert (out == lane * (lane + 1) // 2).all()
    assert report.by_opcode["setp.le.u32"] == 32


def test_lanes_that_return_early_leave_the_rest_running():
    out = np.zeros(32, U32)
    run(
        "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 5; @%p1 ret; bar.warp.sync 0xffffffff; " + store("7"), out
    )
    assert (out == np.where(np.arange(32) < 5, 7, 0)).all()


def test_spinning_lanes_do_not_starve_the_lane_they_wait_for():
    out, flag = np.zeros(32, U32), np.zeros(1, U32)
    run(
        """mov.u32 %r1, %tid.x; ld.param.u64 %d5, [p1]; setp.eq.u32 %p1, %r1, 31; @%p1 bra SETTER;
        SPIN: ld.relaxed.gpu.global.u32 %r2, [%d5]; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN; bra JOIN;
        SETTER: st.relaxed.gpu.global.u32 [%d5], 9; mov.u32 %r2, 9;
        JOIN: """
        + store("%r2"),
        out,
        flag,
    )
    assert (out == 9).all()


def test_indexed_branches():
    out = np.zeros(32, U32)
    run(
        """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 3; TABLE: .branchtargets A, B, C, D;
        brx.idx %r2, TABLE;
        A: mov.u32 %r3, 10; bra END; B: mov.u32 %r3, 11; bra END; C: mov.u32 %r3, 12; bra END; D: mov.u32 %r3,
        13; END: """
        + store("%r3"),
        out,
    )
    assert (out == 10 + np.arange(32) % 4).all()


# ---------------------------------------------------------------- .sync and .aligned
def test_a_sync_operation_waits_for_lanes_that_can_still_come():
    out = np.zeros(32, U32)
    run(
        """mov.u32 %r1, %tid.x; mov.u32 %r2, %r1; setp.lt.u32 %p1, %r1, 16; @%p1 bra LOW;
        add.u32 %r2, %r2, 1000;
        LOW: shfl.sync.bfly.b32 %r3, %r2, 16, 31, -1; """
        + store("%r3"),
        out,
    )
    lane = np.arange(32)
    assert (out == np.where(lane < 16, lane + 1016, lane - 16)).all()


def test_a_sync_operation_for_half_a_warp_needs_only_that_half():
    out = np.zeros(32, U32)
    run(
        """mov.u32 %r1, %tid.x; mov.u32 %r3, 1; setp.ge.u32 %p1, %r1, 16; @%p1 bra END;
        redux.sync.add.u32 %r3, %r1, 0x0000ffff;
        END: """
        + store("%r3"),
        out,
    )
    assert (out == np.where(np.arange(32) < 16, 120, 1)).all()


def test_lanes_that_cannot_meet_are_an_error():
    with pytest.raises(DivergenceError, match="cannot meet"):
        run(
            """mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 16; @%p1 bra HIGH;
            shfl.sync.idx.b32 %r3, %r1, 0, 31, -1; bra END;
            HIGH: shfl.sync.idx.b32 %r3, %r1, 1, 31, -1;
            END: """
            + store("%r3"),
            np.zeros(32, U32),
        )


def test_a_member_mask_that_leaves_out_a_running_lane_is_an_error():
    with pytest.raises(DivergenceError, match="member mask"):
        run(
            "mov.u32 %r1, %tid.x; shfl.sync.idx.b32 %r3, %r1, 0, 31, 0xff; " + store("%r3"), np.zeros(32, U32)
        )


def test_trap_is_an_error():
    with pytest.raises(IllegalInstruction, match="trap"):
        run("trap;", np.zeros(1, U32))


# ---------------------------------------------------------------- warp-wide operations
def shuffle(mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    """PTX ISA, shfl.sync: the pseudocode. Source lane and in-range flag."""
    source, ok = np.zeros(32, int), np.zeros(32, int)
    bval, cval, segment = b & 31, c & 31, c >> 8 & 31
    for lane in range(32):
        high, low = (lane & segment) | (cval & ~segment & 31), lane & segment
        j = {
            "up": lane - bval,
            "down": lane + bval,
            "bfly": lane ^ bval,
            "idx": low | (bval & ~segment & 31),
        }[mode]
        p = j >= high if mode == "up" else j <= high
        source[lane], ok[lane] = (j, 1) if p else (lane, 0)
    return source, ok


@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
@pytest.mark.parametrize(
    ("b", "c"), [(0, 31), (1, 31), (5, 31), (16, 31), (1, 0), (2, 0x1C1F), (3, 0x1C03), (1, 0x1800)]
)
def test_shuffles_follow_the_isa_pseudocode(mode, b, c):
    values = np.arange(32, dtype=U32) * 3 + 7
    source, ok = shuffle(mode, b, c)
    text = f"shfl.sync.{mode}.b32 {{d}}|{{p}}, {{a}}, {b}, {c}, -1;"
    text += " selp.b32 %r60, 1000, 0, {p}; add.u32 {d}, {d}, %r60;"
    assert (lanes(text, values) == values[source] + 1000 * ok).all()


def test_votes_and_matches():
    values = np.arange(32, dtype=U32) // 8
    mask = "setp.eq.u32 %p5, {a}, 2; "
    assert (lanes(mask + "vote.sync.ballot.b32 {d}, %p5, -1;", values) == 0x00FF0000).all()
    assert (lanes(mask + "vote.sync.any.pred {p}, %p5, -1;", values) == 1).all()
    assert (lanes(mask + "vote.sync.all.pred {p}, %p5, -1;", values) == 0).all()
    assert (lanes(mask + "vote.sync.uni.pred {p}, %p5, -1;", values) == 0).all()
    assert (lanes(mask + "vote.sync.all.pred {p}, !%p5, 0xffffffff;", values * 0) == 1).all()
    assert (lanes("match.any.sync.b32 {d}, {a}, -1;", values) == 0xFF << (values * 8)).all()
    got = lanes("match.all.sync.b32 {d}|{p}, {a}, -1; selp.b32 {d}, {d}, 5, {p};", values)
    assert (got == 5).all()
    assert (lanes("match.all.sync.b32 {d}, {a}, -1;", values * 0) == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    ("name", "function"),
    [("add.u32", np.sum), ("min.u32", np.min), ("max.u32", np.max), ("and.b32", np.bitwise_and.reduce),
     ("or.b32", np.bitwise_or.reduce), ("xor.b32", np.bitwise_xor.reduce)],
)  # fmt: skip
def test_warp_reductions(name, function):
    values = np.random.default_rng(1).integers(0, 2**32, 32, dtype=U32)
    assert (
        lanes(f"redux.sync.{name} {{d}}, {{a}}, -1;", values)
        == U32(int(function(values.astype(np.uint64))) & 0xFFFFFFFF)
    ).all()


def test_signed_and_float_reductions():
    signed = np.random.default_rng(2).integers(-100, 100, 32, dtype=np.int32)
    assert (lanes("redux.sync.min.s32 {d}, {a}, -1;", signed, out=np.int32) == signed.min()).all()
    values = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    values[3] = np.nan
    assert (lanes("redux.sync.max.f32 {d}, {a}, -1;", values, out=np.float32) == np.nanmax(values)).all()
    assert (
        lanes("redux.sync.max.abs.f32 {d}, {a}, -1;", values, out=np.float32) == np.nanmax(np.abs(values))
    ).all()
    assert np.isnan(lanes("redux.sync.max.NaN.f32 {d}, {a}, -1;", values, out=np.float32)).all()


def test_elect_chooses_one_lane():
    values = np.arange(32, dtype=U32)
    assert lanes("elect.sync %r60|{p}, -1;", values).sum() == 1
    assert (lanes("elect.sync {d}|%p5, -1;", values) == 0).all()


# ---------------------------------------------------------------- special registers and parameters
@pytest.mark.parametrize(
    ("name", "want"),
    [("%laneid", lambda t, c: t % 32), ("%warpid", lambda t, c: t // 32), ("%ntid.x", lambda t,
    c: 96 + 0 * t),
     ("%nctaid.x", lambda t, c: 4 + 0 * t), ("%ctaid.x", lambda t, c: c + 0 * t), ("%cluster_ctarank",
     lambda t, c: c % 2 + 0 * t),
     ("%clusterid.x", lambda t, c: c // 2 + 0 * t), ("%cluster_nctaid.x", lambda t, c: 2 + 0 * t),
     ("%nclusterid.x", lambda t, c: 2 + 0 * t), ("%lanemask_lt", lambda t, c: (1 << t % 32) - 1), ("%ntid.y",
     lambda t, c: 1 + 0 * t)],
)  # fmt: skip
def test_special_registers(name, want):
    out = np.zeros(4 * 96, U32)
    body = f"""mov.u32 %r1, {name}; mov.u32 %r70, %tid.x; mov.u32 %r71, %ctaid.x; mad.lo.u32 %r72, %r71, 96,
    %r70;
        ld.param.u64 %d1, [p0]; mad.wide.u32 %d2, %r72, 4, %d1; st.global.b32 [%d2], %r1;"""
    run(body, out, block=96, grid=4, cluster=2)
    thread, cta = np.tile(np.arange(96), 4), np.repeat(np.arange(4), 96)
    assert (out == want(thread, cta)).all()


def test_parameters_of_every_width_and_sign():
    out = np.zeros(32, U32)
    scalars = (
        ("s8", (-3).to_bytes(1, "little", signed=True)),
        ("u16", (40000).to_bytes(2, "little")),
        ("f32", np.float32(2).tobytes()),
    )
    run(
        """ld.param.s8 %r1, [p1]; ld.param.u16 %h1, [p2]; ld.param.f32 %r2, [p3]; cvt.u32.u16 %r3, %h1;
        cvt.rzi.s32.f32 %r4, %r2; add.s32 %r5, %r1, %r3; add.s32 %r5, %r5, %r4; """
        + store("%r5"),
        out,
        scalars=scalars,
    )
    assert (out == 40000 - 3 + 2).all()


def test_module_variables_hold_their_initial_values():
    out = np.zeros(32, U32)
    run(
        """mov.u32 %r1, %tid.x; and.b32 %r1, %r1, 3; mov.u64 %d5, table;
        mad.wide.u32 %d6, %r1, 4, %d5; ld.global.u32 %r2, [%d6]; """
        + store("%r2"),
        out,
        module=".global .align 4 .u32 table[4] = {3, 1, 4, 15};",
    )
    assert (out == np.tile([3, 1, 4, 15], 8)).all()


# ---------------------------------------------------------------- counts and register allocation
def test_counts_are_exact_for_every_instruction_and_warp():
    out = np.zeros(3 * 64, U32)
    report = run(
        """mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r3, 0;
        LOOP: add.u32 %r3, %r3, 1; setp.le.u32 %p1, %r3, %r2; @%p1 bra LOOP; """
        + "mov.u32 %r4, %ctaid.x; mad.lo.u32 %r4, %r4, 64, %r1; "
        + store("%r3").replace("%tid.x", "%r4"),
        out,
        block=64,
        grid=3,
    )
    assert report.by_opcode_of_warp(0)["add.u32"] == 3 and report.by_opcode_of_warp(1)["add.u32"] == 6
    assert report.by_opcode["ret"] == 6 and report.by_opcode["ld.param.u64"] == 6
    assert sum(report.by_warp.values()) == report.warp_instructions == sum(report.by_opcode.values())
    assert sum(count for _, _, count in report.by_line()) == report.warp_instructions


@pytest.mark.parametrize("seed", range(4))
def test_allocated_registers_never_collide(seed):
    """A random dataflow program with branches that diverge, against the same program in Python."""
    g = np.random.default_rng(seed)
    values = g.integers(0, 2**32, (32, 12), dtype=U32)
    lane = np.arange(32, dtype=U32)
    body = ["mov.u32 %r70, %tid.x;"]
    state = np.zeros((12, 32), U32)
    for i in range(12):
        body.append(f"mul.lo.u32 %r{i}, %r70, {values[0, i]}; xor.b32 %r{i}, %r{i}, {values[1, i]};")
        state[i] = lane * values[0, i] ^ values[1, i]
    for step in range(150):
        d, a, b, bit = (int(x) for x in g.integers(0, 12, 4))
        take = (state[bit] >> 3 & 1).astype(bool)
        body.append(f"and.b32 %r20, %r{bit}, 8; setp.ne.u32 %p1, %r20, 0; @%p1 bra T{step};")
        body.append(f"sub.u32 %r{d}, %r{a}, %r{b}; mov.b64 %d{d}, {{%r{d}, %r{a}}}; bra E{step};")
        body.append(f"T{step}: mul.wide.u32 %d{d}, %r{a}, %r{b}; mov.b64 {{_, %r{d}}}, %d{d};")
        body.append(f"E{step}: shr.u64 %d{d}, %d{d}, 7; cvt.u32.u64 %r21, %d{d}; xor.b32 %r{b}, %r{b}, %r21;")
        x, y = state[a].astype(np.uint64), state[b].astype(np.uint64)
        difference = (x - y) & 0xFFFFFFFF
        wide = np.where(take, x * y, difference | (np.where(d == a, difference, x) << np.uint64(32)))
        state[d] = np.where(take, wide >> np.uint64(32), difference).astype(U32)
        state[b] ^= (wide >> np.uint64(7)).astype(U32)
    out = np.zeros((12, 32), U32)
    body.append("ld.param.u64 %d50, [p0]; mad.wide.u32 %d51, %r70, 4, %d50;")
    body += [f"st.global.b32 [%d51+{128 * i}], %r{i};" for i in range(12)]
    run("\n".join(body), out)
    assert (out == state).all()


def test_strict_mode_reports_registers_that_some_path_leaves_unwritten():
    text = """mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 9; @%p1 bra SKIP;
        add.u32 %r2, %r1, 3; SKIP: add.u32 %r3, %r2, 1;"""
    run(text, np.zeros(1, U32))
    with pytest.raises(UninitialisedRead, match="add.u32"):
        run(text, np.zeros(1, U32), hazards="strict")
    run("mov.u32 %r2, 0; " + text, np.zeros(1, U32), hazards="strict")
