"""wgmma: layouts, types, operands in registers, groups, and registers used too early."""

import numpy as np
import pytest
from gemm_ptx import MODULE, aligned
from ptx_runner import run
from test_tcgen05 import chunked, encode, matrices

from cute_gemma import emulator as emu

MODES = {0: 0, 32: 3, 64: 2, 128: 1}


def descriptor(offset, leading, stride, swizzle):
    return offset >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | MODES[swizzle] << 62


def product(a, b, kind="bf16", swizzle=128, mn_a=False, mn_b=False, signs=(1, 1), a_registers=False,
    steps=1, fence="wgmma.fence.sync.aligned;",
            wait="wgmma.wait_group.sync.aligned 0;", **options):  # fmt: skip
    """D[64, N] of one warpgroup."""
    n, size = b[0].shape[0], 4 if kind == "tf32" else 2
    blocks, code, base = [], "", 1024
    d = [f"%v{i}" for i in range(n // 2)]
    for step in range(steps):
        descs = []
        for matrix, mn in ((a[step], mn_a), (b[step], mn_b)):
            data, leading, stride = chunked(encode(matrix, kind), swizzle, mn, size)
            descs.append(descriptor(base, leading, stride, swizzle))
            blocks.append(data)
            base += len(data)
        source = "{%r40, %r41, %r42, %r43}" if a_registers else "%d10"
        trans = "" if kind == "tf32" else f", {int(mn_b)}" if a_registers else f", {int(mn_a)}, {int(mn_b)}"
        code += f"""mov.u64 %d10, {descs[0]}; mov.u64 %d11, {descs[1]}; setp.ne.u32 %p6, {step}, 0;
        wgmma.mma_async.sync.aligned.m64n{n}k{32 // size}.f32.{kind}.{kind} {{{", ".join(d)}}}, {source},
        %d11, %p6, {signs[0]}, {signs[1]}{trans};"""
    data, out = aligned(sum(map(len, blocks)), np.uint8), aligned((64, n), np.float32)
    data[...] = np.concatenate(blocks)
    fragments = aligned((128, 4), np.uint32)
    if a_registers:
        half = encode(a[0], kind).view(np.uint16).astype(np.uint32)
        for thread in range(128):
            row, k = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
            for i, (r, c) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                fragments[thread, i] = half[row + r, k + c] | half[row + r, k + c + 1] << 16
    stores = "".join(
        f"st.global.b32 [%d6+{(r // 2 % 2 * 8 * n + r // 4 * 8 + r % 2) * 4}], {d[r]};" for r in range(n // 2)
    )
    body = f""".reg .b32 %v<{n // 2}>;
    ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 %d3, [p2]; mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem; shl.b32 %r50, %r1, 2;
    COPY: cvt.u64.u32 %d4, %r50; add.u64 %d5, %d1, %d4; ld.global.b32 %r52, [%d5]; add.u32 %r53, %r2, %r50;
    st.shared.b32 [%r53], %r52;
    add.u32 %r50, %r50, 512; setp.lt.u32 %p1, %r50, {len(data)}; @%p1 bra COPY;
    mul.wide.u32 %d4, %r1, 16; add.u64 %d5, %d3, %d4; ld.global.v4.b32 {{%r40, %r41, %r42, %r43}}, [%d5];
    fence.proxy.async.shared::cta; bar.sync 0;
    {fence} {code} wgmma.commit_group.sync.aligned; {wait}
    shr.u32 %r4, %r1, 5; and.b32 %r5, %r1, 31; shr.u32 %r6, %r5, 2; mad.lo.u32 %r6, %r4, 16, %r6;
    and.b32 %r7, %r5, 3; shl.b32 %r7, %r7, 1;
    mad.lo.u32 %r8, %r6, {n}, %r7; mul.wide.u32 %d4, %r8, 4; add.u64 %d6, %d2, %d4; {stores}"""
    run(body, data, out, fragments, block=128, module=MODULE, dynamic_smem=len(data), target="sm_90a",
        **options)
    return out


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("mn_a", "mn_b"), [(False, False), (True, False), (False, True), (True, True)])
def test_product_of_every_layout(swizzle, mn_a, mn_b):
    a, b = matrices(64, 16), matrices(64, 16, seed=1)
    assert np.array_equal(product(a, b, "bf16", swizzle, mn_a, mn_b), a[0] @ b[0].T)


@pytest.mark.parametrize(("kind", "depth"), [("f16", 16), ("tf32", 8)])
@pytest.mark.parametrize("n", [8, 72, 256])
def test_product_of_other_types_and_widths(kind, depth, n):
    a, b = matrices(64, depth), matrices(n, depth, seed=1)
    assert np.array_equal(product(a, b, kind), a[0] @ b[0].T)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random:3"])
def test_product_accumulates_over_steps(schedule):
    a, b = matrices(64, 16, 7), matrices(96, 16, 7, seed=1)
    got = product(a, b, swizzle=32, steps=7, schedule=schedule)
    assert np.array_equal(got, sum(x @ y.T for x, y in zip(a, b)))


def test_a_in_registers_and_signs():
    a, b = matrices(64, 16), matrices(64, 16, seed=1)
    assert np.array_equal(product(a, b, a_registers=True), a[0] @ b[0].T)
    assert np.array_equal(product(a, b, signs=(-1, 1)), -(a[0] @ b[0].T))


def test_result_used_before_its_wait_is_reported():
    with pytest.raises(emu.AsyncRegisterError, match="wgmma.wait_group"):
        product(matrices(64, 16), matrices(64, 16, seed=1), wait="")


def test_result_of_a_group_that_may_still_run_is_reported():
    with pytest.raises(emu.AsyncRegisterError, match="wgmma.wait_group"):
        product(matrices(64, 16), matrices(64, 16, seed=1), wait="wgmma.wait_group.sync.aligned 1;")


def test_missing_fence_is_reported():
    with pytest.raises(emu.AsyncRegisterError, match="wgmma.fence"):
        product(matrices(64, 16), matrices(64, 16, seed=1), fence="")


# Two products in a row, the second after the first one's result has been touched, or in a loop.
AGAIN = """wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {between} {fence}
    mov.u64 %d11, %d11; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%v0, %v1, %v2, %v3}}, %d10, %d11,
    %p6, 1, 1, 0, 0; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""
TOUCHES = "mul.f32 %v2, %v2, %v2;", "mov.b32 %r60, %v3;"


@pytest.mark.parametrize("between", ["", *TOUCHES, "setp.eq.u32 %p5, %r1, 999; @%p5 bra ON; mov.b32 %v1, 0; ON:"])
def test_registers_touched_after_a_fence_are_advice_of_the_strict_mode_only(between):
    a, b = matrices(64, 16), matrices(8, 16, seed=1)
    fence = "wgmma.fence.sync.aligned;"
    product(a, b, wait=AGAIN.format(between=between, fence=fence), hazards="strict")
    missing = AGAIN.format(between=between, fence="")
    product(a, b, wait=missing)
    if not between:
        product(a, b, wait=missing, hazards="strict")
        return
    with pytest.raises(emu.AsyncRegisterError, match="advice.*wgmma.fence"):
        product(a, b, wait=missing, hazards="strict")


def test_a_operand_written_after_a_fence_is_advice_of_the_strict_mode():
    a, b = matrices(64, 16), matrices(64, 16, seed=1)
    late = "wgmma.fence.sync.aligned; mov.b32 %r41, %r41;"
    product(a, b, a_registers=True, fence=late)
    with pytest.raises(emu.AsyncRegisterError, match="advice.*wgmma.fence"):
        product(a, b, a_registers=True, fence=late, hazards="strict")


@pytest.mark.parametrize("schedule", ["lazy", "random:1"])
def test_exit_with_a_product_in_flight_is_reported(monkeypatch, schedule):
    cut, plain = "wgmma.commit_group.sync.aligned;", run

    def shortened(body, *arrays, **options):
        return plain(body.split(cut)[0] + cut, *arrays, **options)

    monkeypatch.setattr("test_wgmma.run", shortened)
    with pytest.raises(emu.LeakError, match="wgmma.wait_group comes first"):
        product(matrices(64, 16), matrices(64, 16, seed=1), schedule=schedule)


def test_descriptors_that_differ_between_lanes_are_reported(monkeypatch):
    plain = run

    def edited(body, *arrays, **options):
        uneven = "and.b32 %r9, %r1, 1; cvt.u64.u32 %d20, %r9; add.u64 %d11, %d11, %d20; wgmma.mma_async"
        return plain(body.replace("wgmma.mma_async", uneven), *arrays, **options)
    monkeypatch.setattr("test_wgmma.run", edited)
    with pytest.raises(emu.DivergenceError, match="do not agree on the descriptor of B"):
        product(matrices(64, 16), matrices(64, 16, seed=1))
