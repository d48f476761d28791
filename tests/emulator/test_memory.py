"""Loads, stores, atomics, matrix moves, and the bounds they are held to."""

import numpy as np
import pytest
from gemm_ptx import MODULE, aligned
from ptx_runner import run

from cute_gemma import emulator as emu

ADDRESS = (
    "ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, {0}; "
    "add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3;"
)


def bytes_of(count: int) -> np.ndarray:
    data = aligned(count, np.uint8)
    data[...] = np.random.default_rng(count).integers(0, 256, count)
    return data


@pytest.mark.parametrize(
    ("suffix", "registers"),
    [
        ("b8", "%h1"), ("b16", "%h1"), ("b32", "%r5"), ("b64", "%d5"), ("v2.b8", "{%h1, %h2}"),
        ("v4.b16", "{%h1, %h2, %h3, %h4}"), ("v2.b32", "{%r5, %r6}"), ("v4.b32", "{%r5, %r6, %r7, %r8}"),
        ("v8.b32", "{%r5, %r6, %r7, %r8, %r9, %r10, %r11, %r12}"), ("v2.b64", "{%d5, %d6}"),
        ("v4.b64", "{%d5, %d6, %d7, %d8}"), ("b128", "%q1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("through", ["global", "shared", "generic"])
def test_copies_of_every_width(suffix, registers, through):
    count = registers.count("%")
    size = count * int(suffix.rpartition("b")[2]) // 8
    if through == "shared" and size > 16:
        pytest.skip("256-bit accesses are global only")
    source, out = bytes_of(32 * size), aligned(32 * size, np.uint8)
    body = ADDRESS.format(size) + f"mov.u32 %r20, smem; mad.lo.u32 %r20, %r1, {size}, %r20;"
    if through == "shared":
        body += (
            f"ld.global.{suffix} {registers}, [%d1]; st.shared.{suffix} [%r20], {registers}; "
            f"ld.shared.{suffix} {registers}, [%r20]; st.global.{suffix} [%d2], {registers};"
        )
    else:
        space = ".global" if through == "global" else ""
        body += f"ld{space}.{suffix} {registers}, [%d1]; st{space}.{suffix} [%d2], {registers};"
    run(body, source, out, module=MODULE, dynamic_smem=1024)
    assert np.array_equal(source, out)


def test_narrow_loads_extend_to_their_register():
    source = aligned(4, np.uint8)
    source[...] = [0x80, 0xFF, 0x7F, 0x01]
    out = aligned((32, 4), np.uint32)
    body = """ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %d3, %r1, 16; add.u64 %d2, %d2, %d3;
    ld.global.s8 %r5, [%d1]; ld.global.u8 %r6, [%d1+1]; ld.global.s16 %r7, [%d1]; ld.global.s8 %h1, [%d1];
    cvt.u32.u16 %r8, %h1;
    st.global.v4.b32 [%d2], {%r5, %r6, %r7, %r8};"""
    run(body, source, out)
    assert (out == [0xFFFFFF80, 0xFF, 0xFFFFFF80, 0xFF80]).all()


def test_generic_address_reaches_shared_memory():
    out = aligned(32, np.uint32)
    body = """ld.param.u64 %d2, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4; add.u64 %d2, %d2, %d3;
    mov.u32 %r2, smem; cvt.u64.u32 %d4, %r2; cvta.shared.u64 %d5, %d4; add.u64 %d5, %d5, %d3;
    st.b32 [%d5], %r1; ld.b32 %r6, [%d5]; st.b32 [%d2], %r6;"""
    run(body, out, module=MODULE, dynamic_smem=128)
    assert np.array_equal(out, np.arange(32))


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("ld.global.b32 %r5, [%d1+128];", emu.MemoryFault, "outside every tensor"),
        ("st.global.b32 [%d1+-4], %r1;", emu.MemoryFault, "outside every tensor"),
        ("ld.global.b32 %r5, [%d1+2];", emu.MisalignedAccess, "no multiple of 4"),
        ("mov.u32 %r2, smem; st.shared.b32 [%r2+64], %r1;", emu.MemoryFault,
            "outside the CTA's shared memory"),
        ("st.shared.b32 [0], %r1;", emu.MemoryFault, "outside the CTA's shared memory"),
        ("mov.u32 %r2, smem; st.shared.b32 [%r2+2], %r1;", emu.MisalignedAccess, "no multiple of 4"),
        ("mov.u32 %r2, smem; add.u32 %r2, %r2, 0x1000000; st.shared.b32 [%r2], %r1;", emu.MemoryFault,
            "rank 1"),
        ("mov.u32 %r2, smem; mov.u32 %r3, 1; mapa.shared::cluster.u32 %r4, %r2, %r3; st.shared::cluster.b32 "
            "[%r4], %r1;", emu.MemoryFault, "rank 255"),
    ],
)  # fmt: skip
def test_wrong_addresses_are_reported(code, error, says):
    with pytest.raises(error, match=says):
        run("ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x;" + code, aligned(32, np.uint32), module=MODULE,
            dynamic_smem=64)


def test_fault_names_the_line_the_warp_and_the_cta():
    body = (
        "ld.param.u64 %d1, [p0]; mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 2; @%p1 exit;\nld.global.b32 "
        "%r5, [%d1+4096];"
    )
    with pytest.raises(emu.MemoryFault) as caught:
        run(body, aligned(32, np.uint32), block=64, grid=4)
    assert caught.value.text.startswith("ld.global.b32 %r5") and caught.value.cta == (2, 0, 0)


# ---------------------------------------------------------------- atomics
@pytest.mark.parametrize(
    ("op", "dtype", "start", "expected"),
    [
        ("add.u32", np.uint32, 7, 7 + 32 * 33 // 2), ("add.s32", np.int32, -7, -7 + 32 * 33 // 2),
        ("max.s32", np.int32, -5, 32), ("min.u32", np.uint32, 9, 1), ("or.b32", np.uint32, 0, 63),
        ("xor.b32", np.uint32, 0, 32), ("add.f32", np.float32, 0.5, 528.5), ("inc.u32", np.uint32, 0, 19),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["red", "atom"])
def test_atomics_on_one_word(op, dtype, start, expected, form):
    if op == "inc.u32" and form == "red":
        pytest.skip("the sequence is what the atom form tests")
    word = aligned(1, dtype)
    word[0] = start
    value = "add.u32 %r2, %r1, 1;" if dtype != np.float32 else "add.u32 %r2, %r1, 1; cvt.rn.f32.u32 %r2, %r2;"
    value = "mov.u32 %r2, 40;" if op == "inc.u32" else value
    code = f"atom.global.{op} %r3, [%d1], %r2;" if form == "atom" else f"red.global.{op} [%d1], %r2;"
    run(f"ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; {value} {code}", word)
    assert word[0] == (32 if op == "inc.u32" else expected)


def test_compare_and_swap_returns_the_old_value():
    word, out = aligned(1, np.uint32), aligned(32, np.uint32)
    word[0] = 5
    body = (
        ADDRESS.format(4).replace("add.u64 %d1, %d1, %d3;", "")
        + "add.u32 %r2, %r1, 100; atom.global.cas.b32 %r3, [%d1], 5, %r2; st.global.b32 [%d2], %r3;"
    )
    run(body, word, out)
    assert word[0] == 100 and out[0] == 5 and (out[1:] == 100).all()


def test_vector_and_packed_reductions():
    words, halves = aligned(4, np.float32), aligned(2, np.uint16)
    body = """ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.b32 %r1, 0f3F800000;
    mov.b32 %r2, 0f40000000; mov.b32 %r3, 0x40003F80;
    red.global.add.v4.f32 [%d1], {%r1, %r2, %r1, %r2}; red.global.add.noftz.bf16x2 [%d2], %r3;"""
    run(body, words, halves)
    assert np.array_equal(words, [32, 64, 32, 64]) and np.array_equal(halves.astype(np.uint32) << 16,
        np.array([32, 64], np.float32).view(np.uint32))


# ---------------------------------------------------------------- ldmatrix, stmatrix
def test_ldmatrix_and_its_transpose():
    source, out = aligned((32, 8), np.uint16), aligned((32, 8), np.uint32)
    source[...] = np.arange(256).reshape(32, 8)
    body = """ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %d3, %r1, 16; add.u64 %d1, %d1, %d3;
    mul.wide.u32 %d3, %r1, 32; add.u64 %d2, %d2, %d3; mov.u32 %r2, smem; shl.b32 %r3, %r1, 4;
    add.u32 %r2, %r2, %r3;
    ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%d1]; st.shared.v4.b32 [%r2], {%r5, %r6, %r7, %r8};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r2];
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r14, %r15, %r16, %r17}, [%r2];
    st.global.v4.b32 [%d2], {%r10, %r11, %r12, %r13}; st.global.v4.b32 [%d2+16], {%r14, %r15, %r16, %r17};"""
    run(body, source, out, module=MODULE, dynamic_smem=512)
    for lane in range(32):
        for matrix in range(4):
            tile = source[8 * matrix : 8 * matrix + 8].astype(np.uint32)
            row, pair = lane // 4, lane % 4 * 2
            assert out[lane, matrix] == tile[row, pair] | tile[row, pair + 1] << 16
            assert out[lane, 4 + matrix] == tile[pair, row] | tile[pair + 1, row] << 16


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_is_the_inverse_of_ldmatrix(trans):
    out = aligned((32, 4), np.uint32)
    body = f"""ld.param.u64 %d2, [p0]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 16; add.u64 %d2, %d2, %d3;
    mov.u32 %r2, smem; shl.b32 %r3, %r1, 4; add.u32 %r2, %r2, %r3;
    mul.lo.u32 %r5, %r1, 65537; add.u32 %r6, %r5, 100; add.u32 %r7, %r5, 200; add.u32 %r8, %r5, 300;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r2], {{%r5, %r6, %r7, %r8}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r2];
    st.global.v4.b32 [%d2], {{%r10, %r11, %r12, %r13}};"""
    run(body, out, module=MODULE, dynamic_smem=512)
    assert np.array_equal(out, np.arange(32)[:, None] * 65537 + [0, 100, 200, 300])


# ---------------------------------------------------------------- figures
@pytest.mark.parametrize(
    ("offset", "width", "wavefronts"),
    [("shl.b32 %r3, %r1, 2;", 4, 1), ("shl.b32 %r3, %r1, 3;", 4, 2), ("shl.b32 %r3, %r1, 7;", 4, 32),
        ("mov.u32 %r3, 0;", 4, 1), ("shl.b32 %r3, %r1, 4;", 16, 4),
     ("shl.b32 %r3, %r1, 7;", 16, 32)],
)  # fmt: skip
def test_bank_conflicts_are_counted(offset, width, wavefronts):
    store = "st.shared.b32 [%r2], %r1;" if width == 4 else "st.shared.v4.b32 [%r2], {%r1, %r1, %r1, %r1};"
    report = run(f"mov.u32 %r1, %tid.x; mov.u32 %r2, smem; {offset} add.u32 %r2, %r2, %r3; {store}",
        aligned(1, np.uint32), module=MODULE, dynamic_smem=4096)
    assert report.smem_wavefronts == wavefronts
    assert report.smem_ideal_wavefronts == width // 4


def test_sectors_are_counted_once():
    source, out = bytes_of(4096), aligned(128, np.uint8)
    body = (
        ADDRESS.format(4)
        + "ld.global.b32 %r5, [%d1]; ld.global.b32 %r6, [%d1+4]; ld.global.b32 %r7, [%d1+1024]; "
        "st.global.b32 [%d2], %r5;"
    )
    report = run(body, source, out)
    assert (report.sectors_read, report.sectors_written) == (4 + 1 + 4, 4)


@pytest.mark.parametrize("space", ["global", "shared"])
def test_float_atomics_flush_subnormals_in_global_memory_only(space):
    """PTX ISA, "atom": subnormal inputs and results of .add.f32 become zeros in global memory."""
    smallest, tiny = np.float32(2.0**-126), np.float32(-(2.0**-130))
    start = np.repeat(np.array([tiny, smallest, 1.0, smallest], np.float32), 8)
    term = np.repeat(np.array([tiny, tiny, tiny, -1.5 * smallest], np.float32), 8)
    value = aligned(32, np.float32)
    value[...] = start
    body = """ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4;
    add.u64 %d4, %d1, %d3; add.u64 %d5, %d2, %d3; ld.global.b32 %r2, [%d5]; ld.global.b32 %r4, [%d4];
    mov.u32 %r3, smem; mad.lo.u32 %r3, %r1, 4, %r3; st.shared.b32 [%r3], %r4; """
    at = {"global": "%d4", "shared": "%r3"}[space]
    body += f"red.{space}.add.f32 [{at}], %r2; ld.{space}.b32 %r5, [{at}]; st.global.b32 [%d4], %r5;"
    run(body, value, term, module=MODULE, dynamic_smem=128)

    def flush(x):
        small = (abs(x) < smallest) & (space == "global")
        return np.where(small, np.copysign(np.float32(0), x), x)

    expected = flush(flush(start) + flush(term))
    assert np.array_equal(value.view(np.uint32), expected.view(np.uint32))


# ---------------------------------------------------------------- CTAs of a cluster
REMOTE = """mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r3, %cluster_ctarank; xor.b32 %r4, %r3, 1;
mapa.shared::cluster.u32 %r5, %r2, %r4; shl.b32 %r6, %r1, 2; add.u32 %r5, %r5, %r6; add.u32 %r7, %r2, %r6;
{start} st.shared::cluster.b32 [%r5], %r1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ld.shared.b32 %r8, [%r7];"""


@pytest.mark.parametrize("schedule", ["lazy", "random:1"])
def test_memory_of_another_cta_wants_a_cluster_barrier_first(schedule):
    options = {"grid": 2, "cluster": 2, "module": MODULE, "dynamic_smem": 128, "schedule": schedule}
    for kind in ("", ".relaxed"):
        start = f"barrier.cluster.arrive{kind}.aligned; barrier.cluster.wait.aligned;"
        run(REMOTE.format(start=start), np.zeros(1, np.uint32), **options)
    with pytest.raises(emu.RaceError, match="may not have started: a cluster barrier comes first"):
        run(REMOTE.format(start=""), np.zeros(1, np.uint32), **options)
