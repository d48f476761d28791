"""Conversions against NumPy and torch."""

import numpy as np
import pytest
from ptx_runner import lanes
from test_alu import F32, F64, S32, U32, U64, N, canonical, floats, ints, narrow, same_bits, widen

INTS = {
    "u8": np.uint8,
    "s8": np.int8,
    "u16": np.uint16,
    "s16": np.int16,
    "u32": U32,
    "s32": S32,
    "u64": U64,
    "s64": np.int64,
}


@pytest.mark.parametrize("to", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("source", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_conversions_truncate_and_extend(to, source):
    a = ints(INTS[source], 1)
    same_bits(lanes(f"cvt.{to}.{source} {{d}}, {{a}};", a, out=INTS[to]), a.astype(INTS[to]))
    exact = [int(x) for x in a]
    info = np.iinfo(INTS[to])
    want = np.array([max(info.min, min(info.max, x)) for x in exact], INTS[to])
    same_bits(lanes(f"cvt.sat.{to}.{source} {{d}}, {{a}};", a, out=INTS[to]), want)


@pytest.mark.parametrize("kind", ["u8", "s8"])
def test_bytes_within_wider_registers(kind):
    a = ints(U32, 1)
    low = a.astype(np.uint8).view(INTS[kind])
    same_bits(lanes(f"cvt.s32.{kind} {{d}}, {{a}};", a, out=S32), low.astype(S32))
    same_bits(lanes(f"cvt.{kind}.u32 {{d}}, {{a}};", a, out=S32), low.astype(S32))


@pytest.mark.parametrize("source", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize(("to", "dtype"), [("f32", F32), ("f64", F64), ("f16", np.float16)])
def test_integers_to_floats_round_to_nearest(source, to, dtype):
    a = ints(INTS[source], 1)
    with np.errstate(over="ignore"):
        want = a.astype(dtype) if to != "f16" else a.astype(F64).astype(dtype)
    same_bits(lanes(f"cvt.rn.{to}.{source} {{d}}, {{a}};", a, out=dtype), want)


def test_integers_to_floats_in_directed_modes():
    a = ints(U32, 1)
    got = lanes("cvt.rz.f32.u32 {d}, {a};", a, out=F32)
    assert (got.astype(F64) <= a).all() and (np.nextafter(got, F32(np.inf)).astype(F64) > a).all()
    got = lanes("cvt.rp.f32.u32 {d}, {a};", a, out=F32)
    assert (got.astype(F64) >= a).all()


@pytest.mark.parametrize("to", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize(
    ("mode", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_floats_to_integers_clamp_and_send_nan_to_zero(to, mode, function):
    a = floats(seed=1)
    a[64:128] = np.linspace(-300, 300, 64, dtype=F32)
    info = np.iinfo(INTS[to])
    rounded = function(a.astype(F64))
    want = [
        0 if np.isnan(x) else info.max if x > info.max else info.min if x < info.min else int(x)
        for x in rounded
    ]
    if to in ("u8", "s8"):
        got = lanes(f"cvt.{mode}.{to}.f32 {{d}}, {{a}};", a, out=S32)
        return same_bits(got, np.array(want, S32))
    same_bits(lanes(f"cvt.{mode}.{to}.f32 {{d}}, {{a}};", a, out=INTS[to]), np.array(want, INTS[to]))
    if to == "s16":
        text = f"cvt.{mode}.s16.f32 %h1, {{a}}; setp.lt.u16 {{p}}, %h1, 0x8000;"
        same_bits(lanes(text, a), (np.array(want) >= 0).astype(U32))


@pytest.mark.parametrize(
    ("mode", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_rounding_to_integral_floats(mode, function):
    a = floats(seed=2)
    same_bits(lanes(f"cvt.{mode}.f32.f32 {{d}}, {{a}};", a, out=F32), canonical(function(a)))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_f32_to_halves_and_back(kind):
    a = floats(seed=3)
    bits = narrow(a, kind)
    same_bits(lanes(f"cvt.rn.{kind}.f32 {{d}}, {{a}};", a, out=np.uint16), bits)
    pair = lanes(f"cvt.rn.{kind}x2.f32 {{d}}, {{a}}, {{b}};", a, a[::-1].copy())
    same_bits(pair, bits.astype(U32) << 16 | bits[::-1])
    number = ~np.isnan(a)
    same_bits(lanes(f"cvt.f32.{kind} {{d}}, {{a}};", bits, out=F32)[number], widen(bits, kind)[number])


def test_relu_and_satfinite_of_packed_conversions():
    a = np.resize(np.array([-1, 2, 1e30, -1e30, np.inf, np.nan, 0, 70000], F32), N)
    got = lanes("cvt.rn.relu.f16x2.f32 {d}, {a}, {a};", a).view(np.uint16)[::2].view(np.float16)[:8]
    assert got[0] == 0 and got[1] == 2 and got[2] == np.inf and got[3] == 0 and np.isnan(got[5])
    got = lanes("cvt.rn.satfinite.f16x2.f32 {d}, {a}, {a};", a).view(np.uint16)[::2].view(np.float16)[:8]
    assert got[2] == 65504 and got[3] == -65504 and got[7] == 65504


def test_truncating_conversion_to_bf16():
    a = floats(seed=4)
    a = np.where(np.isnan(a), F32(1), a)
    same_bits(lanes("cvt.rz.bf16x2.f32 {d}, {a}, {a};", a), a.view(U32) & 0xFFFF0000 | a.view(U32) >> 16)


@pytest.mark.parametrize(("kind", "largest"), [("e4m3", 448), ("e5m2", 57344)])
def test_eight_bit_floats(kind, largest):
    a = np.linspace(-600, 600, N, dtype=F32)
    a[:4] = [1e9, -1e9, 2**-9, 0.001]
    want = narrow(np.clip(a, -largest, largest), kind)
    got = lanes(f"cvt.rn.satfinite.{kind}x2.f32 {{d}}, {{a}}, {{b}};", a, a[::-1].copy(), out=np.uint16)
    same_bits(got, want.astype(np.uint16) << 8 | want[::-1])
    back = lanes(f"cvt.rn.f16x2.{kind}x2 {{d}}, {{a}};", got)
    same_bits(back.view(np.float16), widen(np.stack([want[::-1], want], 1).ravel(), kind).astype(np.float16))


def test_f64_and_f32():
    a = floats(F64, 1)
    a[128:] = np.ldexp(a[128:], -130)
    with np.errstate(all="ignore"):
        same_bits(lanes("cvt.rn.f32.f64 {d}, {a};", a, out=F32), canonical(a.astype(F32)))
    b = floats(seed=2)
    got, want = lanes("cvt.f64.f32 {d}, {a};", b, out=F64), b.astype(F64)
    same_bits(got[~np.isnan(b)], want[~np.isnan(b)])


def test_tf32_keeps_ten_bits():
    a = np.abs(floats(seed=1))
    a = a[np.isfinite(a) & (a > 1e-30)][:128]
    want = (a.view(U32) + U32(0x1000)) & U32(0xFFFFE000)  # ties away from zero
    same_bits(lanes("cvt.rna.tf32.f32 {d}, {a};", a), want)
