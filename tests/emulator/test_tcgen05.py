"""tcgen05: products of every layout and type that is implemented, the load and store shapes,
and the rules of TMEM."""

import numpy as np
import pytest
from gemm_ptx import MODULE, aligned
from ptx_runner import run

from cute_gemma import emulator as emu

MODES = {0: 0, 32: 6, 64: 4, 128: 2}                 # swizzle bytes -> layout field of the descriptor
FORMATS = {"f16": (0, 2), "bf16": (1, 2), "tf32": (2, 4)}


# ---------------------------------------------------------------- operands in shared memory
def chunked(matrix, swizzle, mn_major, size):
    """(bytes, leading offset, stride offset) of a (rows, K) matrix of `size`-byte elements,
    one K step of 32 bytes a block.

    PTX ISA, "Canonical layouts": units of 8 rows (or 8 k) by the swizzle width.
    """
    rows, depth = matrix.shape
    row, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    width = swizzle or 16
    if not mn_major:
        byte = k * size
        leading, stride = 16 if swizzle else rows * 16, 8 * width
        at = row % 8 * width + row // 8 * stride + (byte if swizzle else byte // 16 * leading + byte % 16)
    else:
        byte = row * size
        if swizzle:
            stride = 8 * width
            leading = -(-depth // 8) * stride
            at = byte % width + byte // width * leading + k % 8 * width + k // 8 * stride
        else:
            stride, leading = 128, rows * size // 16 * 128
            at = byte % 16 + byte // 16 * stride + k % 8 * 16 + k // 8 * leading
    if swizzle:
        at = at ^ (at >> 3 & (swizzle - 16))
    out = np.zeros(-(-(int(at.max()) + size) // 1024) * 1024, np.uint8)
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, depth, size)
    for i in range(size):
        out[at + i] = raw[:, :, i]
    return out, leading, stride


def encode(values, kind):
    if kind == "f16":
        return values.astype(np.float16)
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float32)


def descriptor(offset, leading, stride, swizzle):
    return offset >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | MODES[swizzle] << 61


def instruction(kind, m, n, mn_a=False, mn_b=False, negate=0):
    fmt = FORMATS[kind][0]
    return (
        1 << 4 | fmt << 7 | fmt << 10 | negate << 13 | mn_a << 15 | mn_b << 16 | n >> 3 << 17 | m >> 4 << 24
    )


COPY_IN = """
mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r3, %ctaid.x; shr.u32 %r4, %r1, 5; shl.b32 %r50, %r1, 2;
COPY: add.u32 %r51, %r50, {share}; cvt.u64.u32 %d3, %r51; add.u64 %d4, %d1, %d3; ld.global.b32 %r52, [%d4];
add.u32 %r53, %r2, %r50; st.shared.b32 [%r53], %r52; add.u32 %r50, %r50, 512; setp.lt.u32 %p1, %r50, {size};
@%p1 bra COPY;
fence.proxy.async.shared::cta;
setp.ne.u32 %p2, %r1, 0; setp.ne.u32 %p3, %r4, 0;
@%p2 bra INIT; mbarrier.init.shared.b64 [%r2+{bar}], 1; fence.mbarrier_init.release.cluster; INIT:
@%p3 bra ALLOC; tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r2+{slot}], 512; ALLOC:
bar.sync 0;
{cluster}
ld.shared.b32 %r5, [%r2+{slot}];
"""
WAIT = "W{0}: mbarrier.try_wait.parity.shared.b64 %p4, [%r2+{bar}], {1}; @!%p4 bra W{0};"
COPY_OUT = """
mov.u32 %r60, 0; shl.b32 %r61, %r4, 21; add.u32 %r61, %r61, %r5; mad.lo.u32 %r62, %r3, 128, %r1;
mul.lo.u32 %r62, %r62, {columns};
OUT: add.u32 %r63, %r61, %r60; tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r64}}, [%r63];
tcgen05.wait::ld.sync.aligned;
add.u32 %r65, %r62, %r60; mul.wide.u32 %d5, %r65, 4; add.u64 %d6, %d2, %d5; st.global.b32 [%d6], %r64;
add.u32 %r60, %r60, 1; setp.lt.u32 %p5, %r60, {columns}; @%p5 bra OUT;
bar.sync 0; {cluster}
@%p3 bra END; tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r5, 512; END:
"""
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def product(a, b, kind, m, n, swizzle=128, mn_a=False, mn_b=False, negate=0, steps=1, extra="", mask="",
    prefix="", d=0, columns=None):
    """D[lane, column] after `steps` K steps of one CTA;
    `a` and `b` are lists of one (rows, K step) matrix a step."""
    size = FORMATS[kind][1]
    blocks, code, base = [], [], 1024
    for step in range(steps):
        descs = []
        for matrix, mn in ((a[step], mn_a), (b[step], mn_b)):
            data, leading, stride = chunked(encode(matrix, kind), swizzle, mn, size)
            descs.append(descriptor(base, leading, stride, swizzle))
            blocks.append(data)
            base += len(data)
        code.append(
            f"""mov.u64 %d10, {descs[0]}; mov.u64 %d11, {descs[1]}; setp.ne.u32 %p6, {step}, 0;
            add.u32 %r71, %r5, {d};
            tcgen05.mma.cta_group::1.kind::{"tf32" if kind == "tf32" else "f16"} [%r71], %d10, %d11,
            %r70{mask}, %p6{extra};"""
        )
    return (
        execute(blocks, f"mov.u32 %r70, {instruction(kind, m, n, mn_a, mn_b, negate)};"
        + "".join(code), columns or n, prefix=prefix)
    )


def execute(blocks, code, columns, prefix="", grid=1, group=1, **options):
    """Copies the blocks to shared memory at 1024, runs `code` in thread 0 of each CTA, commits,
    and returns TMEM."""
    data = aligned(sum(map(len, blocks)), np.uint8)
    data[...] = np.concatenate(blocks)
    share = len(data) // grid
    cluster = CLUSTER if grid > 1 else ""
    names = {"share": f"{0}" if grid == 1 else "%r55", "size": share, "bar": share, "slot": share + 8,
        "group": group, "cluster": cluster}
    out = aligned((grid * 128, columns), np.float32)
    start = (
        "ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1];"
        + (f"mov.u32 %r55, %ctaid.x; mul.lo.u32 %r55, %r55, {share};" if grid > 1 else "")
    )
    issue = "" if grid == 1 else "setp.ne.u32 %p7, %r3, 0; @%p7 bra ISSUED;"
    commit = (
        f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 "
        f"[%r2+{share}];" if grid == 1 else
        f"tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        f"[%r2+{share}], %h9;"
    )  # fmt: skip
    body = (
        start + COPY_IN.format(**names) + prefix
        + f"@%p2 bra ISSUED; {issue} mov.u16 %h9, 3; {code} {commit} ISSUED:"
        + WAIT.format("A", 0, bar=share) + COPY_OUT.format(columns=columns, **names)
    )  # fmt: skip
    run(body, data, out, block=128, grid=grid, cluster=grid, module=MODULE, dynamic_smem=share + 16,
        **options)
    return out


def matrices(rows, depth, steps=1, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(-4, 5, (rows, depth)).astype(np.float32) for _ in range(steps)]


# ---------------------------------------------------------------- products
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("mn_a", "mn_b"), [(False, False), (True, False), (False, True), (True, True)])
def test_product_of_every_layout(swizzle, mn_a, mn_b):
    a, b = matrices(128, 16), matrices(64, 16, seed=1)
    got = product(a, b, "bf16", 128, 64, swizzle, mn_a, mn_b)
    assert np.array_equal(got, a[0] @ b[0].T)


@pytest.mark.parametrize("kind", ["f16", "tf32"])
def test_product_of_other_types(kind):
    depth = 8 if kind == "tf32" else 16
    a, b = matrices(128, depth), matrices(128, depth, seed=1)
    assert np.array_equal(product(a, b, kind, 128, 128), a[0] @ b[0].T)


@pytest.mark.parametrize("n", [16, 48, 112, 256])
def test_product_accumulates_over_steps(n):
    a, b = matrices(128, 16, 6), matrices(n, 16, 6, seed=1)
    got = product(a, b, "bf16", 128, n, swizzle=32, steps=6)
    assert np.array_equal(got, sum(x @ y.T for x, y in zip(a, b)))


def test_negated_operands():
    a, b = matrices(128, 16), matrices(64, 16, seed=1)
    assert np.array_equal(product(a, b, "bf16", 128, 64, negate=1), -(a[0] @ b[0].T))
    assert np.array_equal(product(a, b, "bf16", 128, 64, negate=3), a[0] @ b[0].T)


ZERO = """mov.u32 %r60, 0; mov.u32 %r64, 0; shl.b32 %r61, %r4, 21; add.u32 %r61, %r61, %r5;
Z: add.u32 %r63, %r61, %r60; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r63], {%r64}; add.u32 %r60, %r60, 1;
setp.lt.u32 %p5, %r60, 64; @%p5 bra Z;
tcgen05.wait::st.sync.aligned; bar.sync 0;"""


@pytest.mark.parametrize("half", [0, 16])
def test_64_rows_lie_in_half_of_each_quarter(half):
    a, b = matrices(64, 16), matrices(64, 16, seed=1)
    got = product(a, b, "bf16", 64, 64, prefix=ZERO, d=half << 16)
    expected = np.zeros((128, 64), np.float32)
    for row in range(64):
        expected[row // 16 * 32 + row % 16 + half] = (a[0] @ b[0].T)[row]
    assert np.array_equal(got, expected)


def test_disabled_lanes_keep_their_values():
    a, b = matrices(128, 16), matrices(64, 16, seed=1)
    mask = ", {%r73, %r74, %r74, %r74}"
    got = product(a, b, "bf16", 128, 64, mask=mask, prefix=ZERO + "mov.u32 %r73, 0xf; mov.u32 %r74, 0;")
    expected = a[0] @ b[0].T
    expected[:4] = 0
    assert np.array_equal(got, expected)


def test_a_from_tensor_memory():
    a, b = matrices(128, 16)[0], matrices(64, 16, seed=1)[0]
    data, leading, stride = chunked(encode(b, "bf16"), 128, False, 2)
    words = aligned(128 * 32, np.uint8)
    words[...] = encode(a, "bf16").view(np.uint8).reshape(-1)
    load = f"""shl.b32 %r40, %r1, 5; add.u32 %r40, %r40, %r2; shl.b32 %r61, %r4, 21;
    add.u32 %r61, %r61, %r5; add.u32 %r61, %r61, 256;
    ld.shared.v4.b32 {{%r41, %r42, %r43, %r44}}, [%r40+{len(data)}];
    ld.shared.v4.b32 {{%r45, %r46, %r47, %r48}}, [%r40+{len(data) + 16}];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r61], {{%r41, %r42, %r43, %r44, %r45, %r46, %r47, %r48}};
    tcgen05.wait::st.sync.aligned; bar.sync 0;"""
    code = f"""mov.u32 %r70, {instruction("bf16", 128, 64)};
    mov.u64 %d11, {descriptor(1024, leading, stride, 128)};
    setp.ne.u32 %p6, 0, 0; tcgen05.mma.cta_group::1.kind::f16 [%r5], [%r5+256], %d11, %r70, %p6;"""
    assert np.array_equal(execute([data, words], code, 64, prefix=load), a @ b.T)


@pytest.mark.parametrize("m", [256, 128])
def test_pair_of_ctas_shares_one_product(m):
    n, rows = 64, m // 2
    a, b = matrices(m, 16)[0], matrices(n, 16, seed=1)[0]
    blocks, descs = [], []
    for rank in range(2):
        base = 1024
        descs = []
        for part in (a[rank * rows :][:rows], b[rank * n // 2 :][: n // 2]):
            data, leading, stride = chunked(encode(part, "bf16"), 128, False, 2)
            descs.append(descriptor(base, leading, stride, 128))
            blocks.append(data)
            base += len(data)
    code = f"""mov.u32 %r70, {instruction("bf16", m, n)}; mov.u64 %d10, {descs[0]}; mov.u64 %d11, {descs[1]};
    setp.ne.u32 %p6, 0, 0; tcgen05.mma.cta_group::2.kind::f16 [%r5], %d10, %d11, %r70, %p6;"""
    columns = n if m == 256 else n // 2
    got = execute(blocks, code, columns, grid=2, group=2)
    expected = a @ b.T
    if m == 128:       # each CTA's 64 rows: the lower half of N in lanes 0-63, the upper half in lanes 64-127
        expected = np.concatenate([part for x in (expected[:64], expected[64:]) for part in (x[:, :32],
            x[:, 32:])])
    assert np.array_equal(got, expected)


# ---------------------------------------------------------------- tcgen05.ld and tcgen05.st
ALLOC = """ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, smem; shr.u32 %r4, %r1, 5;
setp.ne.u32 %p3, %r4, 0;
@%p3 bra A; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64; A: bar.sync 0;
ld.shared.b32 %r5, [%r2];
shl.b32 %r6, %r4, 21; add.u32 %r6, %r6, %r5;"""
FREE = "bar.sync 0; @%p3 bra F; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64; F:"
FILL = "".join(
    f"add.u32 %r9, %r1, {column * 1000}; add.u32 %r8, %r6, {column}; tcgen05.st.sync.aligned.32x32b.x1.b32 "
    f"[%r8], {{%r9}};\n" for column in range(16)
) + "tcgen05.wait::st.sync.aligned;"


def cell(shape, register, lane):
    """(row, column) within 16 (32) lanes; PTX ISA, the figures of tcgen05.ld."""
    if shape == "32x32b":
        return lane, register
    if shape == "16x64b":
        return lane // 4 + 8 * (lane % 2), lane // 2 % 2 + 2 * register
    if shape == "16x128b":
        return lane // 4 + 8 * (register % 2), lane % 4 + 4 * (register // 2)
    return lane // 4 + 8 * (register // 2 % 2), lane % 4 * 2 + register % 2 + 8 * (register // 4)


@pytest.mark.parametrize(("shape", "repeat", "registers"), [("32x32b", 4, 4), ("16x64b", 4, 4),
    ("16x128b", 2, 4), ("16x256b", 1, 4), ("16x256b", 2, 8)])
def test_load_shapes(shape, repeat, registers):
    names = ", ".join(f"%r{20 + i}" for i in range(registers))
    out = aligned((128, registers), np.uint32)
    stores = "".join(f"st.global.b32 [%d4+{4 * i}], %r{20 + i};" for i in range(registers))
    body = f"""{ALLOC}{FILL} tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {{{names}}}, [%r6];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %d3, %r1, {4 * registers}; add.u64 %d4, %d1, %d3; {stores} {FREE}"""
    run(body, out, block=128, module=MODULE, dynamic_smem=16)
    for thread in range(128):
        for register in range(registers):
            row, column = cell(shape, register, thread % 32)
            assert out[thread, register] == thread // 32 * 32 + row + 1000 * column


def test_store_shape_is_the_inverse_of_its_load():
    body = f"""{ALLOC} add.u32 %r20, %r1, 1000; add.u32 %r21, %r1, 2000; add.u32 %r22, %r1, 3000;
    add.u32 %r23, %r1, 4000; add.u32 %r7, %r6, 0x100000;
    tcgen05.st.sync.aligned.16x256b.x1.b32 [%r6], {{%r20, %r21, %r22, %r23}};
    tcgen05.st.sync.aligned.16x256b.x1.b32 [%r7], {{%r20, %r21, %r22, %r23}}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.16x256b.x1.b32 {{%r30, %r31, %r32, %r33}}, [%r7]; tcgen05.wait::ld.sync.aligned;
    shl.b32 %r40, %r1, 4; cvt.u64.u32 %d3, %r40; add.u64 %d4, %d1, %d3;
    st.global.v4.b32 [%d4], {{%r30, %r31, %r32, %r33}}; {FREE}"""
    out = aligned((128, 4), np.uint32)
    run(body, out, block=128, module=MODULE, dynamic_smem=16)
    assert np.array_equal(out, np.arange(128)[:, None] + [1000, 2000, 3000, 4000])


def test_pack_takes_the_low_halves_of_two_columns():
    body = f"""{ALLOC}{FILL} tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {{%r20, %r21}}, [%r6];
    tcgen05.wait::ld.sync.aligned;
    shl.b32 %r40, %r1, 3; cvt.u64.u32 %d3, %r40; add.u64 %d4, %d1, %d3;
    st.global.v2.b32 [%d4], {{%r20, %r21}}; {FREE}"""
    out = aligned((128, 2), np.uint32)
    run(body, out, block=128, module=MODULE, dynamic_smem=16)
    thread = np.arange(128)
    assert np.array_equal(out, np.stack([thread | thread + 1000 << 16, thread + 2000 | thread
        + 3000 << 16], 1))


# ---------------------------------------------------------------- rules
@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r6]; tcgen05.wait::ld.sync.aligned;",
            emu.UninitialisedRead, "TMEM column 0"),
        ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6+64], {%r1};", emu.TensorMemoryError,
            "64..64 .* not all allocated"),
        ("add.u32 %r6, %r6, 0x200000; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r1};",
            emu.TensorMemoryError, "reaches lanes"),
        ("bar.sync 0; @%p3 bra X; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+4], 48; X:",
            emu.TensorMemoryError, "power of two"),
        ("@%p3 bra X; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32; X:", emu.TensorMemoryError,
            "no allocation"),
        ("@%p3 bra X; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; "
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+4], 32; X:",
         emu.TensorMemoryError, "relinquish"),
        ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r1}; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, "
            "[%r6]; tcgen05.wait::ld.sync.aligned;",
         emu.RaceError, "tcgen05.wait::st"),
    ],
)  # fmt: skip
def test_tensor_memory_rules(code, error, says):
    with pytest.raises(error, match=says):
        run(ALLOC + code + FREE, aligned(128, np.uint32), block=128, module=MODULE, dynamic_smem=16)


def test_use_after_dealloc_is_reported():
    with pytest.raises(emu.TensorMemoryError, match="not all allocated"):
        run(ALLOC + FREE + "bar.sync 0; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r1};",
            aligned(128, np.uint32), block=128, module=MODULE,
            dynamic_smem=16)  # fmt: skip


def test_allocation_waits_for_columns():
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, smem; shr.u32 %r4, %r1, 5; setp.ne.u32 %p3, %r4, 0;
    @%p3 bra OTHER;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 512; bar.sync 1, 64;
    ld.shared.b32 %r5, [%r2];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 512; bra END;
    OTHER: bar.sync 1, 64; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+4], 256;
    ld.shared.b32 %r6, [%r2+4];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 256; END:"""
    run(body, aligned(1, np.uint32), block=64, module=MODULE, dynamic_smem=16)


PAIR = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, smem; ld.param.u64 %d1, [p0]; mov.u32 %r3, 0;
setp.eq.u32 %p1, %r1, 0; @%p1 bra FIRST;
DELAY: add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 5000; @%p2 bra DELAY; st.global.b32 [%d1], %r3;
FIRST: {alloc} @!%p1 bra FREE; ld.global.b32 %r4, [%d1]; st.global.b32 [%d1+4], %r4; FREE: {free}"""
PAIR_ALLOC = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2], 64;"
PAIR_FREE = "ld.shared.b32 %r5, [%r2]; tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r5, 64;"


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1", "random:2"])
def test_a_pair_allocates_together(schedule):
    out = aligned(2, np.uint32)
    run(PAIR.format(alloc=PAIR_ALLOC, free=PAIR_FREE), out, grid=2, cluster=2, module=MODULE, dynamic_smem=16,
        schedule=schedule, hazards=False)  # fmt: skip
    assert out[1] == 5000


def test_an_allocation_that_the_peer_never_comes_to_is_a_deadlock():
    alone = PAIR.format(alloc=f"@!%p1 bra SKIP; {PAIR_ALLOC} SKIP:", free=f"@!%p1 bra END; {PAIR_FREE} END:")
    with pytest.raises(emu.DeadlockError, match="the peer CTA has not come to it"):
        run(alone, aligned(2, np.uint32), grid=2, cluster=2, module=MODULE, dynamic_smem=16)


@pytest.mark.parametrize(
    ("kind", "m", "n", "says"), [("bf16", 128, 24, "an N"), ("bf16", 192, 64, "an M"),
        ("bf16", 32, 64, "an M")]
)
def test_wrong_shapes_are_refused(kind, m, n, says):
    with pytest.raises(emu.DescriptorError, match=says):
        product(matrices(128, 16), matrices(64, 16), kind, m, n, columns=64)


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("@%p3 bra X; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+4], 128; X:",
            emu.TensorMemoryError, "128 columns after one of 64"),
        ("@%p3 bra X; tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; X:", emu.TensorMemoryError,
            "cta_group::2 after cta_group::1"),
        (FREE.replace("cta_group::1", "cta_group::2"), emu.TensorMemoryError,
            "cta_group::2 after cta_group::1"),
        (FILL + "and.b32 %r7, %r1, 1; add.u32 %r7, %r6, %r7; "
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r7];",
            emu.DivergenceError, "do not agree on the TMEM address"),
    ],
)  # fmt: skip
def test_operands_that_break_the_rules_of_tensor_memory(code, error, says):
    with pytest.raises(error, match=says):
        run(ALLOC + code + FREE, aligned(128, np.uint32), block=128, module=MODULE, dynamic_smem=16)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1"])
def test_commit_by_another_warp_does_not_cover_a_product(monkeypatch, schedule):
    a, b, plain = matrices(128, 16), matrices(64, 16, seed=1), run

    def committed_by(thread):
        other = f"ISSUED: bar.sync 3; setp.ne.u32 %p8, %r1, {thread}; @%p8 bra LEFT; tcgen05.commit"

        def edited(body, *arrays, **options):
            body = body.replace("ISSUED:", "LEFT:").replace("tcgen05.commit", other)
            return plain(body, *arrays, schedule=schedule, **options)

        monkeypatch.setattr("test_tcgen05.run", edited)
        return product(a, b, "bf16", 128, 64)

    assert np.array_equal(committed_by(0), a[0] @ b[0].T)
    with pytest.raises(emu.RaceError, match="the tensor core for warp 0"):
        committed_by(32)
