"""Bulk copies: boxes, clipping, swizzles, element types, reductions, linear copies, groups,
and what they refuse."""

import numpy as np
import pytest
from gemm_ptx import MODULE, aligned, tensor_map
from ptx_runner import run

from cute_gemma import emulator as emu

BOX = (8, 64)              # rows, bf16 columns: 1 KB


def load(array, box, at, swizzle=0, tail="", **options):
    """Loads a box and copies shared memory out, in order of addresses. `at`: coordinates, innermost first."""
    size = int(np.prod(box)) * array.itemsize
    out = aligned(size // 4, np.uint32)
    coords = ", ".join(f"%r{20 + i}" for i in range(len(at)))
    body = f"""
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p2];
    mov.u32 %r1, %tid.x; mov.u32 %r2, smem; add.u32 %r3, %r2, {size};
    {" ".join(f"mov.u32 %r{20 + i}, {c};" for i, c in enumerate(at))}
    setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT;
    mbarrier.init.shared.b64 [%r3], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {size};
    cp.async.bulk.tensor.{len(at)}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%d1,
    {{{coords}}}], [%r3];
    WAIT:
    bar.warp.sync -1;
    AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra AGAIN;
    {tail}
    LOOP: shl.b32 %r4, %r1, 2; add.u32 %r5, %r4, %r2; ld.shared.b32 %r6, [%r5];
    cvt.u64.u32 %d3, %r4; add.u64 %d4, %d2, %d3; st.global.b32 [%d4], %r6;
    add.u32 %r1, %r1, 32; setp.lt.u32 %p3, %r1, {size // 4}; @%p3 bra LOOP;
    """
    report = run(body, tensor_map(array, box, swizzle), array, out, module=MODULE, dynamic_smem=size + 16,
        **options)
    return out.view(array.dtype), report


def numbered(shape, dtype=np.float16):
    array = aligned(shape, dtype)
    array[...] = np.arange(array.size).reshape(shape) % 2000
    return array


def swizzled(tile, width):
    """Bytes of a tile as the swizzle lays them out: 16-byte units exclusive-or address bits 7 and up."""
    flat = np.ascontiguousarray(tile).view(np.uint8).reshape(-1)
    at = np.arange(flat.size)
    out = np.empty_like(flat)
    out[at ^ (at >> 3 & (width - 16))] = flat
    return out.view(tile.dtype)


@pytest.mark.parametrize("width", [0, 32, 64, 128])
def test_box_lies_in_shared_memory_as_its_swizzle_says(width):
    array, columns = numbered((40, 128)), (width or 64) // 2
    got, _ = load(array, (16, columns), (columns, 3), width)
    expected = array[3:19, columns : 2 * columns]
    assert np.array_equal(got, swizzled(expected, width) if width else expected.reshape(-1))


@pytest.mark.parametrize("at", [(-24, 0), (104, 0), (0, -5), (0, 36), (1000, 0), (0, -100)])
def test_load_fills_with_zeros_outside_the_tensor(at):
    array = numbered((40, 128))
    got, _ = load(array, BOX, at)
    rows, columns = np.arange(8) + at[1], np.arange(64) + at[0]
    inside = ((rows >= 0) & (rows < 40))[:, None] & ((columns >= 0) & (columns < 128))[None, :]
    expected = np.where(inside, array[np.clip(rows, 0, 39)][:, np.clip(columns, 0, 127)], 0)
    assert np.array_equal(got.reshape(BOX), expected)


@pytest.mark.parametrize("dims", [1, 2, 3, 4, 5])
def test_load_of_every_rank(dims):
    shape = (3, 4, 2, 5, 128)[-dims:]
    box, at = (2, 2, 1, 2, 64)[-dims:], (1, 2, 1, 2, 16)[-dims:]
    array = numbered(shape)
    got, _ = load(array, box, at[::-1])
    assert np.array_equal(got.reshape(box), array[tuple(slice(a, a + b) for a, b in zip(at, box))])


def test_load_counts_bytes_and_sectors():
    _, report = load(numbered((40, 128)), BOX, (0, 0))
    assert report.tma_load_bytes == 1024
    assert report.sectors_read >= 32


@pytest.mark.parametrize(
    ("box", "swizzle", "says"),
    [((8, 60), 0, "multiple of 16 bytes"), ((8, 64), 64, "wider than its swizzle")],
)
def test_wrong_box_is_refused(box, swizzle, says):
    with pytest.raises(emu.DescriptorError, match=says):
        load(numbered((40, 128)), box, (0, 0), swizzle)


def test_other_rank_than_the_instruction_is_refused():
    with pytest.raises(emu.DescriptorError, match="3-dimensional copy with a tensor map of 2"):
        load(numbered((40, 128)), BOX, (0, 0, 0))


def test_load_outside_every_tensor_of_the_launch_is_refused():
    array = numbered((40, 128))
    words = tensor_map(array, BOX)
    words[36:40].view("<u4")[0] = 400 - 1            # claims more rows than there are
    with pytest.raises(emu.MemoryFault, match="outside every tensor"):
        body_load(words, array, 300)


def body_load(words, array, row):
    body = f"""
    ld.param.u64 %d1, [p0]; mov.u32 %r2, smem; mov.u32 %r20, 0; mov.u32 %r21, {row};
    mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT;
    mbarrier.init.shared.b64 [%r2+1024], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 1024;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%d1, {{%r20,
    %r21}}], [%r2+1024];
    WAIT: bar.warp.sync -1;
    AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+1024], 0; @!%p2 bra AGAIN;
    """
    run(body, words, array, module=MODULE, dynamic_smem=1040)


def test_misaligned_shared_address_is_refused():
    array = numbered((40, 128))
    with pytest.raises(emu.MisalignedAccess, match="no multiple of 128"):
        run(
            """ld.param.u64 %d1, [p0]; mov.u32 %r2, smem; mov.u32 %r20, 0;
            cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d1, {%r20, %r20}], [%r2+16];""",
            tensor_map(array, BOX), array, module=MODULE, dynamic_smem=2048,
        )  # fmt: skip


# ---------------------------------------------------------------- stores
def store(array, box, at, kind="", dtype=None, wait="cp.async.bulk.wait_group 0;",
    fence="fence.proxy.async.shared::cta;"):
    """Fills shared memory with 1, 2, ... as the array's type and stores the box."""
    count = int(np.prod(box))
    source = aligned(count, array.dtype)
    source[...] = np.arange(1, count + 1) % 100
    coords = ", ".join(f"%r{20 + i}" for i in range(len(at)))
    start, end = ("cp.reduce", f".{kind}") if kind else ("cp", "")
    op = f"{start}.async.bulk.tensor.{len(at)}d.global.shared::cta{end}"
    body = f"""
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p2];
    mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r7, %r1;
    {" ".join(f"mov.u32 %r{20 + i}, {c};" for i, c in enumerate(at))}
    LOOP: shl.b32 %r4, %r1, 2; cvt.u64.u32 %d3, %r4; add.u64 %d4, %d2, %d3; ld.global.b32 %r6, [%d4];
    add.u32 %r5, %r4, %r2; st.shared.b32 [%r5], %r6;
    add.u32 %r1, %r1, 32; setp.lt.u32 %p3, %r1, {count * array.itemsize // 4}; @%p3 bra LOOP;
    {fence}
    bar.warp.sync -1;
    setp.ne.u32 %p1, %r7, 0; @%p1 bra DONE;
    {op}.tile.bulk_group [%d1, {{{coords}}}], [%r2];
    cp.async.bulk.commit_group;
    {wait}
    DONE:
    """
    run(body, tensor_map(array, box, dtype=dtype), array, source, module=MODULE,
        dynamic_smem=count * array.itemsize)
    return source.reshape(box)


@pytest.mark.parametrize("at", [(0, 0), (64, 30), (96, 37), (-16, -3)])
def test_store_writes_what_is_inside_the_tensor_only(at):
    array = aligned((40, 128), np.float16)
    source = store(array, BOX, at)
    expected = np.zeros((40, 128), np.float16)
    for row in range(8):
        for column in range(64):
            r, c = row + at[1], column + at[0]
            if 0 <= r < 40 and 0 <= c < 128:
                expected[r, c] = source[row, column]
    assert np.array_equal(array, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_reduce_store_adds(dtype):
    array = aligned((16, 64), dtype)
    array[...] = 5
    source = store(array, (4, 64), (0, 2), "add")
    expected = np.full((16, 64), 5, dtype)
    expected[2:6] += source
    assert np.array_equal(array, expected)


@pytest.mark.parametrize(("kind", "function"), [("min", np.minimum), ("max", np.maximum)])
def test_reduce_store_of_integers(kind, function):
    array = aligned((16, 64), np.int32)
    array[...] = 50
    source = store(array, (4, 64), (0, 2), kind, dtype="int32")
    expected = np.full((16, 64), 50, np.int32)
    expected[2:6] = function(expected[2:6].view(np.uint32), source.view(np.uint32)).view(np.int32)
    assert np.array_equal(array, expected)


def test_float_minimum_reduction_is_refused():
    with pytest.raises(emu.UnsupportedInstruction, match="reduction"):
        store(aligned((16, 64), np.float32), (4, 64), (0, 0), "min")


def test_store_without_a_wait_is_a_leak():
    with pytest.raises(emu.LeakError, match="wait_group"):
        store(aligned((40, 128), np.float16), BOX, (0, 0), wait="")


def test_store_without_a_proxy_fence_is_reported():
    with pytest.raises(emu.ProxyFenceError):
        store(aligned((40, 128), np.float16), BOX, (0, 0), fence="")


# ---------------------------------------------------------------- cp.async.bulk and cp.async
def test_linear_copies_there_and_back():
    source, out = numbered(256, np.float32), aligned(256, np.float32)
    body = """
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r2, smem; mov.u32 %r3, 1024;
    mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra DONE;
    mbarrier.init.shared.b64 [%r2+1024], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%r2+1024], 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1], %r3, [%r2+1024];
    AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r2+1024], 0; @!%p2 bra AGAIN;
    cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r2], %r3;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE:
    """
    run(body, source, out, module=MODULE, dynamic_smem=1040)
    assert np.array_equal(source, out)


def test_cp_async_groups():
    source, out = numbered(64, np.float32), aligned(64, np.float32)
    body = """
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; mov.u32 %r1, %tid.x; shl.b32 %r4, %r1, 2;
    mov.u32 %r2, smem; add.u32 %r2, %r2, %r4;
    cvt.u64.u32 %d3, %r4; add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3;
    cp.async.ca.shared.global [%r2], [%d1], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r2+128], [%d1+128], 4, 0;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.b32 %r5, [%r2]; st.global.b32 [%d2], %r5;
    cp.async.wait_group 0;
    ld.shared.b32 %r6, [%r2+128]; st.global.b32 [%d2+128], %r6;
    """
    run(body, source, out, module=MODULE, dynamic_smem=256)
    assert np.array_equal(out[:32], source[:32]) and not out[32:].any()


def test_cp_async_read_before_its_wait_is_a_race():
    source, out = numbered(32, np.float32), aligned(32, np.float32)
    body = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; shl.b32 %r4, %r1, 2; mov.u32 %r2, smem;
    add.u32 %r2, %r2, %r4;
    cvt.u64.u32 %d3, %r4; add.u64 %d1, %d1, %d3;
    cp.async.ca.shared.global [%r2], [%d1], 4; cp.async.commit_group;
    ld.shared.b32 %r5, [%r2];
    """
    with pytest.raises(emu.RaceError, match="cp.async.wait_group"):
        run(body, source, out, module=MODULE, dynamic_smem=128)


TWO_GROUPS = """
mov.u32 %r1, %tid.x; mov.u32 %r2, smem; ld.param.u64 %d1, [p0]; and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 0;
mul.lo.u32 %r4, %r1, 16; add.u32 %r5, %r2, %r4; mul.wide.u32 %d2, %r1, 16; add.u64 %d3, %d1, %d2;
st.shared.v4.u32 [%r5], {%r1, %r1, %r1, %r1}; fence.proxy.async.shared::cta;
@%p1 bra EVEN;
cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r5], 16; cp.async.bulk.commit_group;
bra BOTH;
EVEN:
cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r5], 16; cp.async.bulk.commit_group;
cp.async.bulk.commit_group;
BOTH:
@%p1 bra WAIT_EVEN;
cp.async.bulk.wait_group.read 0; bra WAITED;
WAIT_EVEN:
cp.async.bulk.wait_group.read 1;
WAITED:
st.shared.v4.u32 [%r5], {%r2, %r2, %r2, %r2};
"""


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1"])
def test_bulk_groups_belong_to_threads(schedule):
    """Half of a warp's threads commit one group more than the others, and leave that one pending."""
    seen = aligned(128, np.uint32)
    run(TWO_GROUPS, seen, module=MODULE, dynamic_smem=1024, schedule=schedule)
    assert (seen.reshape(32, 4) == np.arange(32)[:, None]).all()


@pytest.mark.parametrize("schedule", ["lazy", "eager"])
@pytest.mark.parametrize("old, new", [("read 1", "read 2"), ("read 0", "read 1")])
def test_a_group_that_some_threads_left_pending_is_found(schedule, old, new):
    with pytest.raises(emu.RaceError, match="wait_group"):
        run(TWO_GROUPS.replace(old, new), aligned(128, np.uint32), module=MODULE, dynamic_smem=1024,
            schedule=schedule)  # fmt: skip


def test_waits_that_leave_many_groups_are_refused():
    with pytest.raises(emu.UnsupportedInstruction, match="16 groups"):
        run("cp.async.bulk.wait_group 16;")


# ---------------------------------------------------------------- copies between the CTAs of a cluster
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# Each CTA sends its first 128 bytes to the other one's next 128.
TO_PEER = """ld.param.u64 %d1, [p0]; mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mov.u32 %r3, %cluster_ctarank;
add.u32 %r20, %r2, 256; setp.ne.u32 %p1, %r1, 0; shl.b32 %r7, %r1, 2; add.u32 %r8, %r2, %r7;
st.shared.u32 [%r8], %r1; fence.proxy.async.shared::cta; bar.warp.sync -1; @%p1 bra A;
mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster;
A: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
xor.b32 %r5, %r3, 1; mapa.shared::cluster.u32 %r10, %r2, %r5; mapa.shared::cluster.u32 %r11, %r20, {rank};
add.u32 %r10, %r10, 128; @%p1 bra B; mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 128;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r10], [%r2], 128, [%r11];
B: {wait} {meet} {then}"""
AWAIT = "W: mbarrier.try_wait.parity.shared.b64 %p6, [%r20], 0; @!%p6 bra W;"


def to_peer(rank="%r5", wait=AWAIT, meet=MEET, then="", schedule="lazy"):
    body = TO_PEER.format(rank=rank, wait=wait, meet=meet, then=then)
    run(body, np.zeros(1, np.uint32), grid=2, cluster=2, module=MODULE, dynamic_smem=512, schedule=schedule)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:1"])
def test_source_of_a_copy_to_a_peer_is_free_once_its_barrier_is_complete(schedule):
    to_peer(then="st.shared.u32 [%r8], %r1;", schedule=schedule)
    with pytest.raises(emu.RaceError, match="writes what an asynchronous copy that signals phase 0"):
        to_peer(meet="", then="st.shared.u32 [%r8], %r1;" + MEET, schedule=schedule)


def test_exit_while_a_copy_to_a_peer_reads_is_reported():
    with pytest.raises(emu.EmulationError, match="still reads its shared memory|have all exited"):
        to_peer(meet="", wait="@%p1 bra D; setp.eq.u32 %p4, %r3, 1; @%p4 bra D;" + AWAIT + "D:")


def test_barrier_of_another_cta_than_the_data_is_reported():
    with pytest.raises(emu.BarrierError, match="both must be in one CTA"):
        to_peer(rank="%r3")


def test_tensor_maps_that_the_launch_writes_are_refused():
    array, out = numbered((40, 128)), aligned(4, np.uint32)
    body = """ld.param.u64 %d1, [p0]; mov.u32 %r2, smem; mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0; @%p1 bra E; ld.global.u64 %d2, [%d1]; st.global.u64 [%d1], %d2; mov.u32 %r3, 0;
    add.u32 %r4, %r2, 1024; mbarrier.init.shared.b64 [%r4], 1;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%d1, {%r3, %r3}],
    [%r4]; E:"""
    with pytest.raises(emu.UnsupportedInstruction, match="tensor maps that the launch itself writes"):
        run(body, tensor_map(array, BOX), array, out, module=MODULE, dynamic_smem=1040)
