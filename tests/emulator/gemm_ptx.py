"""A small warp-specialised matrix product in PTX (TMA, mbarrier pipeline, tcgen05,
TMA store) for the engine's tests.

C[128, 64] = A[128, K] B[64, K]^T, bf16 to f32: warp 4 loads tiles of 64 in K into two stages,
warp 5 multiplies, warps 0-3
read the accumulator, write it to shared memory and store it. Tests replace single lines of `BODY`.
"""

from __future__ import annotations

import numpy as np
from ptx_runner import run

MODULE = ".extern .shared .align 1024 .b8 smem[];"
SMEM_BYTES = 81984
_BARRIERS = 81920          # full 0, full 1, empty 0, empty 1, done (8 bytes each), then the TMEM address

_VALUES = [f"%v{i}" for i in range(64)]
_STORES = "\n".join(
    f"st.shared.v4.b32 [%r31+{4 * i}], {{{', '.join(_VALUES[i : i + 4])}}};" for i in range(0, 64, 4)
)
_PRODUCTS = "\n".join(
    f"""add.u32 %r41, %r40, {2 * i}; add.u32 %r43, %r42, {2 * i};
mov.b64 %d4, {{%r41, 0x40004040}}; mov.b64 %d5, {{%r43, 0x40004040}};
{"setp.ne.u32 %p8, %r7, 0;" if i == 0 else "setp.eq.u32 %p8, 0, 0;"}
tcgen05.mma.cta_group::1.kind::f16 [%r5], %d4, %d5, %r44, %p8;"""
    for i in range(4)
)

BODY = f"""
.reg .b32 %v<64>;
ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; ld.param.u64 %d3, [p2]; ld.param.u32 %r20, [p6];
mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5;
mov.u32 %r3, smem; add.u32 %r4, %r3, {_BARRIERS}; mov.u32 %r15, 0;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra INIT_DONE;
mbarrier.init.shared.b64 [%r4], 1; mbarrier.init.shared.b64 [%r4+8], 1;
mbarrier.init.shared.b64 [%r4+16], 1; mbarrier.init.shared.b64 [%r4+24], 1;
mbarrier.init.shared.b64 [%r4+32], 1;
fence.mbarrier_init.release.cluster;
INIT_DONE:
setp.ne.u32 %p2, %r2, 0;
@%p2 bra ALLOC_DONE;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4+40], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOC_DONE:
bar.sync 0;
ld.shared.b32 %r5, [%r4+40];
setp.eq.u32 %p3, %r2, 4; @%p3 bra LOADER;
setp.eq.u32 %p3, %r2, 5; @%p3 bra MULTIPLIER;
bra EPILOGUE;

LOADER:
elect.sync %r6|%p4, -1;
@!%p4 bra END;
mov.u32 %r7, 0;
LOAD_LOOP:
setp.ge.u32 %p5, %r7, %r20; @%p5 bra END;
and.b32 %r8, %r7, 1; shr.u32 %r9, %r7, 1; and.b32 %r9, %r9, 1; xor.b32 %r9, %r9, 1;
shl.b32 %r10, %r8, 3; add.u32 %r11, %r4, %r10;
WAIT_EMPTY:
mbarrier.try_wait.parity.shared.b64 %p6, [%r11+16], %r9;
@!%p6 bra WAIT_EMPTY;
mbarrier.arrive.expect_tx.shared.b64 _, [%r11], 24576;
shl.b32 %r12, %r8, 14; add.u32 %r12, %r12, %r3; shl.b32 %r13, %r8, 13; add.u32 %r13, %r13, %r3;
shl.b32 %r14, %r7, 6;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r12], [%d1, {{%r14, %r15}}],
[%r11];
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r13+32768], [%d2, {{%r14,
%r15}}], [%r11];
add.u32 %r7, %r7, 1;
bra LOAD_LOOP;

MULTIPLIER:
elect.sync %r6|%p4, -1;
@!%p4 bra END;
mov.u32 %r7, 0;
mov.u32 %r44, {1 << 4 | 1 << 7 | 1 << 10 | 8 << 17 | 8 << 24};
MMA_LOOP:
setp.ge.u32 %p5, %r7, %r20; @%p5 bra MMA_DONE;
and.b32 %r8, %r7, 1; shr.u32 %r9, %r7, 1; and.b32 %r9, %r9, 1;
shl.b32 %r10, %r8, 3; add.u32 %r11, %r4, %r10;
WAIT_FULL:
mbarrier.try_wait.parity.shared.b64 %p6, [%r11], %r9;
@!%p6 bra WAIT_FULL;
shl.b32 %r12, %r8, 14; add.u32 %r12, %r12, %r3; shl.b32 %r13, %r8, 13; add.u32 %r13, %r13, %r3;
add.u32 %r13, %r13, 32768;
shr.u32 %r40, %r12, 4; and.b32 %r40, %r40, 0x3fff; or.b32 %r40, %r40, 0x10000;
shr.u32 %r42, %r13, 4; and.b32 %r42, %r42, 0x3fff; or.b32 %r42, %r42, 0x10000;
{_PRODUCTS}
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r11+16];
add.u32 %r7, %r7, 1;
bra MMA_LOOP;
MMA_DONE:
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4+32];
bra END;

EPILOGUE:
WAIT_DONE:
mbarrier.try_wait.parity.shared.b64 %p6, [%r4+32], 0;
@!%p6 bra WAIT_DONE;
shl.b32 %r30, %r2, 21; add.u32 %r30, %r30, %r5;
tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{", ".join(_VALUES[:32])}}}, [%r30];
tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{", ".join(_VALUES[32:])}}}, [%r30+32];
tcgen05.wait::ld.sync.aligned;
shl.b32 %r31, %r1, 8; add.u32 %r31, %r31, %r3; add.u32 %r31, %r31, 49152;
{_STORES}
fence.proxy.async.shared::cta;
bar.sync 1, 128;
@%p1 bra STORED;
add.u32 %r32, %r3, 49152;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d3, {{%r15, %r15}}], [%r32];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
STORED:
@%p2 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;
END:
"""

_DTYPES = {"uint8": 0, "int32": 2, "float16": 6, "float32": 7, "bfloat16": 10}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def aligned(shape, dtype, alignment: int = 128) -> np.ndarray:
    """Zeros whose address is a multiple of `alignment`."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def tensor_map(array: np.ndarray, box, swizzle: int = 0, dtype: str | None = None) -> np.ndarray:
    """The 128 bytes for a compact array; `box` in the array's order (outermost first)."""
    flags = 2 | array.ndim - 1 << 4 | _DTYPES[dtype or array.dtype.name] << 7 | _SWIZZLES[swizzle] << 13
    words = aligned(128, np.uint8)
    words[:8] = np.frombuffer(int(array.ctypes.data).to_bytes(8, "little"), np.uint8)
    words[8:12].view("<u4")[0] = flags
    for k in range(array.ndim):
        axis = array.ndim - 1 - k
        if k:
            words[8 + 4 * k : 12 + 4 * k].view("<u4")[0] = array.strides[axis] // 16
        words[32 + 4 * k : 36 + 4 * k].view("<u4")[0] = array.shape[axis] - 1
        words[55 + k] = box[axis] - 1
    return words


def to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits of float32 values that bf16 can hold."""
    out = aligned(values.shape, np.uint16)
    out[...] = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return out


def gemm(k: int = 256, body: str = BODY, box_a=(128, 64), swizzle: int = 128, **options):
    """Runs the product on small integers. Returns (C, expected C, report)."""
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-3, 4, (rows, k)).astype(np.float32) for rows in (128, 64))
    ha, hb, c = to_bf16(a), to_bf16(b), aligned((128, 64), np.float32)
    c[...] = np.nan
    maps = tensor_map(ha, box_a, swizzle, "bfloat16"), tensor_map(hb, (64, 64), swizzle,
        "bfloat16"), tensor_map(c, (128, 64))
    report = run(
        body, *maps, ha, hb, c, block=192, module=MODULE, dynamic_smem=SMEM_BYTES,
        scalars=(("u32", (k // 64).to_bytes(4, "little")),), **options,
    )  # fmt: skip
    return c, a @ b.T, report


def without(line: str, instead: str = "", body: str = BODY) -> str:
    """`body` with `line`, which must be there once, replaced."""
    assert body.count(line) == 1, f"{body.count(line)} times: {line}"
    return body.replace(line, instead)
