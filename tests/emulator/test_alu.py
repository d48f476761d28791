"""Every family of arithmetic instructions against NumPy, element by element and bit by bit where the ISA is
exact."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx_runner import lanes

from cute_gemma.emulator import UnsupportedInstruction

N = 256
U32, S32, U64, S64, F32, F64 = np.uint32, np.int32, np.uint64, np.int64, np.float32, np.float64
SMALL = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ints(dtype, seed: int = 0) -> np.ndarray:
    info = np.iinfo(dtype)
    values = rng(seed).integers(info.min, info.max, N, dtype=dtype, endpoint=True)
    values[:8] = (
        np.array([0, 1, info.max, info.min, info.max - 1, 2, 31, 64], np.int64).astype(dtype)
        if info.min
        else (np.array([0, 1, info.max, info.max // 2, info.max - 1, 2, 31, 64], dtype))
    )
    values[8:16] = np.roll(values[:8], 3)
    return values


def floats(dtype=F32, seed: int = 0) -> np.ndarray:
    g = rng(seed)
    values = (g.standard_normal(N) * np.exp2(g.integers(-20, 20, N))).astype(dtype)
    tiny = np.finfo(dtype).tiny
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, tiny / 8, -tiny / 4, 1.0, -1.0, 0.5], dtype
    )
    values[: len(special)] = special
    values[16 : 16 + len(special)] = np.roll(special, 1 + seed)
    return values


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[got.itemsize]
    got, want = got.view(kind), np.ascontiguousarray(want).view(kind)
    wrong = np.flatnonzero(got != want)
    assert not len(wrong), (
        f"{len(wrong)} differ, first at {wrong[0]}: {got[wrong[0]]:#x}, want {want[wrong[0]]:#x}"
    )


def canonical(x: np.ndarray) -> np.ndarray:
    """f32 with every NaN as the ISA's."""
    x = x.astype(F32)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(U32)).view(F32)


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32(0), x), x).astype(F32)


# ---------------------------------------------------------------- integers
BINARY = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "min": np.minimum, "max": np.maximum, "mul.lo": lambda a, b: a * b,
}  # fmt: skip
TYPES = {"u16": np.uint16, "s16": np.int16, "u32": U32, "s32": S32, "u64": U64, "s64": S64}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", BINARY)
def test_integer_arithmetic_wraps_like_numpy(name, kind):
    dtype = TYPES[kind]
    a, b = ints(dtype, 1), ints(dtype, 2)
    suffix = f"b{kind[1:]}" if name in ("and", "or", "xor") else kind
    with np.errstate(over="ignore"):
        same_bits(
            lanes(f"{name}.{suffix} {{d}}, {{a}}, {{b}};", a, b, out=dtype), BINARY[name](a, b).astype(dtype)
        )


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_and_high_products_are_exact(kind):
    dtype = TYPES[kind]
    bits = int(kind[1:])
    wide = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 4}")
    a, b, c = ints(dtype, 1), ints(dtype, 2), ints(wide.type, 3)
    product = a.astype(np.int64 if bits < 32 else wide) * b.astype(np.int64 if bits < 32 else wide)
    same_bits(lanes(f"mul.wide.{kind} {{d}}, {{a}}, {{b}};", a, b, out=wide.type), product.astype(wide))
    same_bits(lanes(f"mul.hi.{kind} {{d}}, {{a}}, {{b}};", a, b, out=dtype), (product >> bits).astype(dtype))
    with np.errstate(over="ignore"):
        total = product.astype(wide) + c
    same_bits(lanes(f"mad.wide.{kind} {{d}}, {{a}}, {{b}}, {{c}};", a, b, c, out=wide.type), total)


def test_high_half_of_64_bit_products():
    a, b = ints(U64, 1), ints(U64, 2)
    want = np.array([(int(x) * int(y)) >> 64 for x, y in zip(a, b)], U64)
    same_bits(lanes("mul.hi.u64 {d}, {a}, {b};", a, b, out=U64), want)
    want = np.array([(int(x) * int(y)) >> 64 for x, y in zip(a.view(S64), b.view(S64))], S64)
    same_bits(lanes("mul.hi.s64 {d}, {a}, {b};", a, b, out=S64), want)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_division_truncates(kind):
    dtype = TYPES[kind]
    a, b = ints(dtype, 1), ints(dtype, 2)
    b[b == 0] = 3
    big = [(int(x), int(y)) for x, y in zip(a, b)]
    quotient = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in big]
    mask = (1 << int(kind[1:])) - 1
    unsigned = np.dtype(f"u{dtype().itemsize}")
    want = np.array([q & mask for q in quotient], unsigned)
    same_bits(lanes(f"div.{kind} {{d}}, {{a}}, {{b}};", a, b, out=dtype), want)
    want = np.array([(x - q * y) & mask for (x, y), q in zip(big, quotient)], unsigned)
    same_bits(lanes(f"rem.{kind} {{d}}, {{a}}, {{b}};", a, b, out=dtype), want)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_shifts_past_the_width_give_zero_or_the_sign(kind):
    bits = int(kind[1:])
    unsigned, signed = TYPES[f"u{bits}"], TYPES[f"s{bits}"]
    a = ints(unsigned, 1)
    amount = np.resize(np.array([0, 1, 5, bits - 1, bits, bits + 1, 200, 0xFFFFFFFF], U32), N)
    exact = [(int(x), int(s)) for x, s in zip(a, amount)]
    want = np.array([(x << s) & ((1 << bits) - 1) if s < bits else 0 for x, s in exact], unsigned)
    same_bits(lanes(f"shl.{kind} {{d}}, {{a}}, {{b}};", a, amount, out=unsigned), want)
    want = np.array([x >> s if s < bits else 0 for x, s in exact], unsigned)
    same_bits(lanes(f"shr.u{bits} {{d}}, {{a}}, {{b}};", a, amount, out=unsigned), want)
    want = np.array([int(x) >> min(int(s), bits - 1) for x, s in zip(a.view(signed), amount)], signed)
    same_bits(lanes(f"shr.s{bits} {{d}}, {{a}}, {{b}};", a, amount, out=signed), want)


def test_saturating_addition():
    a, b = ints(S32, 1), ints(S32, 2)
    wide = np.clip(a.astype(S64) + b, -(2**31), 2**31 - 1).astype(S32)
    same_bits(lanes("add.sat.s32 {d}, {a}, {b};", a, b, out=S32), wide)


def test_bit_counting():
    a, b = ints(U32, 1), ints(U64, 2)
    strings = [f"{int(x):032b}" for x in a]
    same_bits(lanes("popc.b32 {d}, {a};", a), np.array([s.count("1") for s in strings], U32))
    same_bits(lanes("clz.b32 {d}, {a};", a), np.array([32 - int(x).bit_length() for x in a], U32))
    same_bits(lanes("brev.b32 {d}, {a};", a), np.array([int(s[::-1], 2) for s in strings], U32))
    same_bits(
        lanes("bfind.u32 {d}, {a};", a), np.array([(int(x).bit_length() - 1) & 0xFFFFFFFF for x in a], U32)
    )
    want = [((int(x) if x >= 0 else ~int(x)).bit_length() - 1) & 0xFFFFFFFF for x in a.view(S32)]
    same_bits(lanes("bfind.s32 {d}, {a};", a), np.array(want, U32))
    same_bits(lanes("popc.b64 {d}, {a};", b), np.array([int(x).bit_count() for x in b], U32))
    same_bits(lanes("clz.b64 {d}, {a};", b), np.array([64 - int(x).bit_length() for x in b], U32))
    want = np.array([int(f"{int(x):064b}"[::-1], 2) for x in b], U64)
    same_bits(lanes("brev.b64 {d}, {a};", b, out=U64), want)


def bfe(value: int, pos: int, length: int, width: int, signed: bool) -> int:
    """PTX ISA, bfe: the pseudocode."""
    pos, length, msb = pos & 0xFF, length & 0xFF, width - 1
    sign = 0 if not signed or length == 0 else value >> min(pos + length - 1, msb) & 1
    out = 0
    for i in range(width):
        out |= (value >> (pos + i) & 1 if i < length and pos + i <= msb else sign) << i
    return out


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract_follows_the_isa_pseudocode(kind):
    width = int(kind[1:])
    a = ints(TYPES[f"u{width}"], 1)
    pos = np.resize(np.array([0, 1, 7, 31, 32, 60, 63, 64, 255], U32), N)
    length = np.resize(np.array([0, 1, 4, 8, 32, 33, 64, 200], U32), N)[::-1].copy()
    want = [bfe(int(x), int(p), int(n), width, kind[0] == "s") for x, p, n in zip(a, pos, length)]
    got = lanes(f"bfe.{kind} {{d}}, {{a}}, {{b}}, {{c}};", a, pos, length, out=a.dtype.type)
    same_bits(got, np.array(want, a.dtype))


@pytest.mark.parametrize(
    ("pos", "length"), [(0, 4), (4, 8), (28, 8), (31, 1), (32, 4), (0, 32), (5, 0), (0, 255)]
)
def test_bit_field_insert_follows_the_isa_pseudocode(pos, length):
    a, b = ints(U32, 1), ints(U32, 2)

    def insert(x, y):
        for i in range(length):
            if pos + i < 32:
                y = y & ~(1 << pos + i) | (x >> i & 1) << pos + i
        return y

    want = np.array([insert(int(x), int(y)) for x, y in zip(a, b)], U32)
    same_bits(lanes(f"bfi.b32 {{d}}, {{a}}, {{b}}, {pos}, {length};", a, b), want)


def test_byte_permute_selects_bytes_and_signs():
    a, b, c = ints(U32, 1), ints(U32, 2), ints(U32, 3)

    def permute(x, y, selector):
        source = (int(y) << 32 | int(x)).to_bytes(8, "little")
        out = 0
        for i in range(4):
            nibble = int(selector) >> 4 * i & 15
            byte = source[nibble & 7]
            out |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * i
        return out

    want = np.array([permute(*v) for v in zip(a, b, c)], U32)
    same_bits(lanes("prmt.b32 {d}, {a}, {b}, {c};", a, b, c), want)


@pytest.mark.parametrize("table", [0x00, 0x80, 0x96, 0xE8, 0xCA, 0x1E, 0xFF])
def test_lop3_is_its_truth_table(table):
    a, b, c = ints(U32, 1), ints(U32, 2), ints(U32, 3)
    want = np.zeros(N, U32)
    for bit in range(32):
        index = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
        want |= (np.uint32(table) >> index & 1) << np.uint32(bit)
    same_bits(lanes(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};", a, b, c), want)


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(mode):
    a, b = ints(U32, 1), ints(U32, 2)
    amount = np.resize(np.array([0, 1, 16, 31, 32, 40], U32), N)
    effective = [int(s) & 31 if mode == "wrap" else min(int(s), 32) for s in amount]
    both = [int(y) << 32 | int(x) for x, y in zip(a, b)]
    left = np.array([(v << s) >> 32 & 0xFFFFFFFF for v, s in zip(both, effective)], U32)
    right = np.array([v >> s & 0xFFFFFFFF for v, s in zip(both, effective)], U32)
    same_bits(lanes(f"shf.l.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};", a, b, amount), left)
    same_bits(lanes(f"shf.r.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};", a, b, amount), right)


def test_absolute_value_and_negation_of_the_least_integer_wrap():
    for kind in ("s16", "s32", "s64"):
        a = ints(TYPES[kind], 1)
        with np.errstate(over="ignore"):
            same_bits(lanes(f"abs.{kind} {{d}}, {{a}};", a, out=a.dtype.type), np.abs(a))
            same_bits(lanes(f"neg.{kind} {{d}}, {{a}};", a, out=a.dtype.type), (0 - a).astype(a.dtype))


# ---------------------------------------------------------------- f32 and f64
FLOAT_BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


@pytest.mark.parametrize("name", FLOAT_BINARY)
def test_f32_arithmetic_rounds_to_nearest_and_returns_the_canonical_nan(name):
    a, b = floats(seed=1), floats(seed=2)
    with np.errstate(all="ignore"):
        want = canonical(FLOAT_BINARY[name](a, b))
    same_bits(lanes(f"{name}.rn.f32 {{d}}, {{a}}, {{b}};", a, b, out=F32), want)


@pytest.mark.parametrize("name", FLOAT_BINARY)
def test_ftz_flushes_subnormal_inputs_and_results(name):
    a, b = floats(seed=1), floats(seed=2)
    a[100:200] = np.ldexp(a[100:200], -100)
    with np.errstate(all="ignore"):
        want = canonical(flush(FLOAT_BINARY[name](flush(a), flush(b))))
    same_bits(lanes(f"{name}.rn.ftz.f32 {{d}}, {{a}}, {{b}};", a, b, out=F32), want)


def directed(exact: np.ndarray, mode: str) -> np.ndarray:
    """Rounds values that are exact in extended precision to f32 in one direction."""
    near = exact.astype(F32)
    down = np.where(near.astype(np.longdouble) > exact, np.nextafter(near, F32(-np.inf)), near)
    up = np.where(near.astype(np.longdouble) < exact, np.nextafter(near, F32(np.inf)), near)
    if mode == "rz":
        return np.where(exact < 0, up, down)
    return down if mode == "rm" else up


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_directed_rounding(name, mode):
    g = rng(3)
    a, b, c = (g.standard_normal(N).astype(F32) for _ in range(3))
    x, y, z = (v.astype(np.longdouble) for v in (a, b, c))
    exact = {"add": x + y, "mul": x * y, "fma": x * y + z}[name]
    if name == "fma":
        got = lanes(f"fma.{mode}.f32 {{d}}, {{a}}, {{b}}, {{c}};", a, b, c, out=F32)
    else:
        got = lanes(f"{name}.{mode}.f32 {{d}}, {{a}}, {{b}};", a, b, out=F32)
    same_bits(got, directed(exact, mode))


def test_fma_rounds_once():
    a = np.full(N, 1 + 2**-12, F32)
    c = np.full(N, -(1 + 2**-11), F32)
    same_bits(lanes("fma.rn.f32 {d}, {a}, {b}, {c};", a, a, c, out=F32), np.full(N, 2.0**-24, F32))


def test_saturation_clamps_to_the_unit_interval_and_nan_to_zero():
    a = floats(seed=1)
    with np.errstate(all="ignore"):
        want = np.where(np.isnan(a), 0, np.clip(a, 0, 1)).astype(F32) + F32(0)
    same_bits(lanes("mul.sat.f32 {d}, {a}, 0f3F800000;", a, out=F32), want)


@pytest.mark.parametrize("mode", ["rn", "rm", "rz"])
def test_packed_f32x2_works_on_each_half(mode):
    g = rng(5)
    a, b = (g.standard_normal(2 * N).astype(F32) for _ in range(2))
    wide = a.astype(np.longdouble) * b + b
    want = directed(wide, mode) if mode != "rn" else (a.astype(F64) * b + b).astype(F32)
    text = f"fma.{mode}.f32x2 {{d}}, {{a}}, {{b}}, {{b}};"
    same_bits(lanes(text, a.view(U64), b.view(U64), out=U64), want.view(U64))
    with np.errstate(all="ignore"):
        text = "add.rn.ftz.f32x2 {d}, {a}, {b};"
        x, y = (
            np.concatenate([floats(seed=1), floats(seed=3)]),
            np.concatenate([floats(seed=2), floats(seed=4)]),
        )
        same_bits(
            lanes(text, x.view(U64), y.view(U64), out=U64), canonical(flush(flush(x) + flush(y))).view(U64)
        )


def ordered_min(a, b, maximum):
    """PTX ISA, min: NaN loses, -0 is less than +0."""
    less = (a < b) | ((a == b) & np.signbit(a))
    out = np.where(less != maximum, a, b)
    return canonical(np.where(np.isnan(a), b, np.where(np.isnan(b), a, out)))


@pytest.mark.parametrize("maximum", [False, True])
def test_min_and_max_of_f32(maximum):
    a, b, c = floats(seed=1), floats(seed=2), floats(seed=3)
    name = "max" if maximum else "min"
    with np.errstate(all="ignore"):
        want = ordered_min(a, b, maximum)
        same_bits(lanes(f"{name}.f32 {{d}}, {{a}}, {{b}};", a, b, out=F32), want)
        same_bits(
            lanes(f"{name}.f32 {{d}}, {{a}}, {{b}}, {{c}};", a, b, c, out=F32), ordered_min(want, c, maximum)
        )
        nan = np.isnan(a) | np.isnan(b)
        propagated = canonical(np.where(nan, np.nan, want))
        same_bits(lanes(f"{name}.NaN.f32 {{d}}, {{a}}, {{b}};", a, b, out=F32), propagated)
        magnitude = (
            ordered_min(np.abs(a), np.abs(b), maximum).view(U32) | (a.view(U32) ^ b.view(U32)) & 0x80000000
        )
        got = lanes(f"{name}.xorsign.abs.f32 {{d}}, {{a}}, {{b}};", a, b, out=F32)
        same_bits(got, canonical(magnitude.view(F32)))


def test_f64_arithmetic():
    a, b, c = floats(F64, 1), floats(F64, 2), floats(F64, 3)
    ok = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    with np.errstate(all="ignore"):
        for name, f in FLOAT_BINARY.items():
            got, want = lanes(f"{name}.rn.f64 {{d}}, {{a}}, {{b}};", a, b, out=F64), f(a, b)
            same_bits(got[~np.isnan(want)], want[~np.isnan(want)])
        same_bits(lanes("sqrt.rn.f64 {d}, {a};", np.abs(a[ok][:32]), out=F64), np.sqrt(np.abs(a[ok][:32])))


@pytest.mark.parametrize("name", ["rcp.rn", "sqrt.rn"])
def test_correctly_rounded_reciprocal_and_root(name):
    a = floats(seed=1)
    with np.errstate(all="ignore"):
        want = canonical(F32(1) / a if name == "rcp.rn" else np.sqrt(a))
    same_bits(lanes(f"{name}.f32 {{d}}, {{a}};", a, out=F32), want)


# ---------------------------------------------------------------- approximate functions: documented errors
APPROXIMATE = {     # PTX ISA: function, relative error, absolute error, range
    "ex2.approx.ftz.f32": (np.exp2, 2**-22, 0, (-120, 120)),
    "lg2.approx.f32": (np.log2, 2**-22, 2**-22, (2.0**-20, 2.0**20)),
    "rcp.approx.ftz.f32": (lambda x: 1 / x, 2**-23, 0, (-1e6, 1e6)),
    "rsqrt.approx.f32": (lambda x: 1 / np.sqrt(x), 2**-22.9, 0, (2.0**-30, 1e9)),
    "sqrt.approx.f32": (np.sqrt, 2**-22.9, 0, (0, 1e9)),
    "sin.approx.f32": (np.sin, 0, 2**-20, (-6.28, 6.28)),
    "cos.approx.f32": (np.cos, 0, 2**-20, (-6.28, 6.28)),
    "tanh.approx.f32": (np.tanh, 2**-11, 0, (-12, 12)),
}  # fmt: skip


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("op", APPROXIMATE)
def test_approximate_functions_stay_within_the_documented_error(op, edge):
    function, relative, absolute, (low, high) = APPROXIMATE[op]
    a = np.linspace(low, high, 1024).astype(F32)
    got = lanes(f"{op} {{d}}, {{a}};", a, out=F32, approx_edge=edge).astype(F64)
    want = function(a.astype(F64))
    error = np.abs(got - want)
    assert (error <= relative * np.abs(want) + absolute).all()
    if edge:
        normal = error > 0.4 * (relative * np.abs(want) + absolute)
        assert normal.mean() > 0.3, "the edge mode leaves most results near the exact value"


@pytest.mark.parametrize(
    ("op", "values", "want"),
    [
        (
            "ex2.approx.f32",
            [-np.inf, np.inf, 0, np.nan, 128, -149, -200],
            [0, np.inf, 1, np.nan, np.inf, 2.0**-149, 0],
        ),
        ("ex2.approx.ftz.f32", [-126.5, 1e-40], [0, 1]),
        ("lg2.approx.f32", [0, -1, np.inf, 1], [-np.inf, np.nan, np.inf, 0]),
        ("rcp.approx.f32", [0, -0.0, np.inf, -np.inf, np.nan], [np.inf, -np.inf, 0, -0.0, np.nan]),
        ("rcp.approx.ftz.f32", [1e-40, -1e-40], [np.inf, -np.inf]),
        ("rsqrt.approx.f32", [0, -0.0, -1, np.inf], [np.inf, -np.inf, np.nan, 0]),
        ("sqrt.approx.f32", [-0.0, -1, np.inf], [-0.0, np.nan, np.inf]),
        ("tanh.approx.f32", [np.inf, -np.inf, 0, -0.0, np.nan, 1e-30], [1, -1, 0, -0.0, np.nan, 1e-30]),
        ("sin.approx.f32", [np.inf, 0], [np.nan, 0]),
    ],
)
def test_special_values_of_approximate_functions(op, values, want):
    a = np.resize(np.array(values, F32), 32)
    same_bits(lanes(f"{op} {{d}}, {{a}};", a, out=F32)[: len(values)], canonical(np.array(want, F32)))


def test_approximate_division_gives_zero_for_huge_divisors():
    a = np.resize(np.array([1.0, np.inf, 3.0], F32), 96)
    b = np.resize(np.array([2.0**127, 2.0**127, 4.0], F32), 96)
    got = lanes("div.approx.f32 {d}, {a}, {b};", a, b, out=F32)
    assert got[0] == 0 and np.isnan(got[1]) and got[2] == F32(0.75)
    full = lanes("div.full.f32 {d}, {a}, {b};", a, b, out=F32)
    assert full[0] == F32(2.0**-127)


# ---------------------------------------------------------------- comparisons
@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_integer_comparisons(name, kind):
    a, b = ints(TYPES[kind], 1), ints(TYPES[kind], 2)
    b[::3] = a[::3]
    want = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[name]
    same_bits(lanes(f"setp.{name}.{kind} {{p}}, {{a}}, {{b}};", a, b), want.astype(U32))


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize(
    "name", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
def test_float_comparisons_with_and_without_order(name, kind):
    dtype = F32 if kind == "f32" else F64
    a, b = floats(dtype, 1), floats(dtype, 2)
    b[::3] = a[::3]
    nan = np.isnan(a) | np.isnan(b)
    with np.errstate(invalid="ignore"):
        ordered = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    if name == "num":
        want = ~nan
    elif name == "nan":
        want = nan
    elif name.endswith("u"):
        want = ordered[name[:2]] | nan
    else:
        want = ordered[name] & ~nan
    same_bits(lanes(f"setp.{name}.{kind} {{p}}, {{a}}, {{b}};", a, b), want.astype(U32))


def test_setp_combines_with_a_predicate_and_gives_the_complement():
    a, b = ints(S32, 1), ints(S32, 2)
    c = a & 1 == 0
    for word, f in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        prefix = "and.b32 %r60, {a}, 1; setp.eq.s32 %p3, %r60, 0;"
        first = lanes(f"{prefix} setp.lt.{word}.s32 {{p}}|{{q}}, {{a}}, {{b}}, %p3;", a, b)
        same_bits(first, f(a < b, c).astype(U32))
        text = f"{prefix} setp.lt.{word}.s32 {{q}}|{{p}}, {{a}}, {{b}}, !%p3;"
        same_bits(lanes(text, a, b), f(~(a < b), ~c).astype(U32))


def test_set_and_selp_and_slct():
    a, b, c = floats(seed=1), floats(seed=2), ints(S32, 3)
    with np.errstate(invalid="ignore"):
        want = np.where(a < b, 0xFFFFFFFF, 0).astype(U32)
        same_bits(lanes("set.lt.u32.f32 {d}, {a}, {b};", a, b), want)
        same_bits(lanes("set.lt.f32.f32 {d}, {a}, {b};", a, b, out=F32), np.where(a < b, 1, 0).astype(F32))
        want = np.where(a < b, a.view(U32), b.view(U32))
        same_bits(lanes("setp.lt.f32 %p1, {a}, {b}; selp.b32 {d}, {a}, {b}, %p1;", a, b), want)
    got = lanes("slct.f32.s32 {d}, {a}, {b}, {c};", a, b, c)
    same_bits(got, np.where(c >= 0, a.view(U32), b.view(U32)))


# ---------------------------------------------------------------- halves
def narrow(x: np.ndarray, kind: str) -> np.ndarray:
    """Bits of x rounded to a small format, NaN as the ISA's."""
    bits = (
        torch.from_numpy(np.ascontiguousarray(x))
        .to(SMALL[kind])
        .view(torch.int16 if kind in ("f16", "bf16") else torch.uint8)
    )
    bits = bits.numpy().view(np.uint16 if kind in ("f16", "bf16") else np.uint8)
    return np.where(np.isnan(x), bits.dtype.type(0x7FFF & np.iinfo(bits.dtype).max >> 1), bits)


def widen(bits: np.ndarray, kind: str) -> np.ndarray:
    signed = np.int16 if bits.itemsize == 2 else np.uint8
    return (
        torch.from_numpy(np.ascontiguousarray(bits).view(signed)).view(SMALL[kind]).to(torch.float32).numpy()
    )


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_half_arithmetic_rounds_once(name, kind):
    a, b = narrow(floats(seed=1), kind), narrow(floats(seed=2), kind)
    x, y = widen(a, kind).astype(F64), widen(b, kind).astype(F64)
    with np.errstate(all="ignore"):
        want = narrow({"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](x, y), kind)
    same_bits(lanes(f"{name}.rn.{kind} {{d}}, {{a}}, {{b}};", a, b, out=np.uint16), want)
    pairs = lanes(
        f"{name}.rn.{kind}x2 {{d}}, {{a}}, {{b}};", np.tile(a, 2).view(U32), np.tile(b, 2).view(U32)
    )
    same_bits(pairs.view(np.uint16), np.tile(want, 2))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_fma_rounds_the_exact_value_to_nearest_even(kind):
    g = rng(7)
    a, b = (narrow(g.standard_normal(N).astype(F32), kind) for _ in range(2))
    c = narrow((g.standard_normal(N) * np.exp2(g.integers(-14, 6, N))).astype(F32), kind)
    ties = slice(0, 64)  # 1 + half a unit, moved off the tie by a tiny addend
    unit = 2.0**-10 if kind == "f16" else 2.0**-7
    a[ties], b[ties] = narrow(np.full(64, 1 + unit), kind), narrow(np.full(64, 1 + 4 * unit), kind)
    c[ties] = narrow(
        np.resize([unit / 2, -unit / 2, 2.0**-13, -(2.0**-13), unit / 2 - 4 * unit * unit], 64), kind
    )
    got = lanes(f"fma.rn.{kind} {{d}}, {{a}}, {{b}}, {{c}};", a, b, c, out=np.uint16)
    for bits, *sources in zip(got, *(widen(v, kind) for v in (a, b, c))):
        x, y, z = (Fraction(float(v)) for v in sources)
        exact = x * y + z
        near = [Fraction(float(v)) for v in widen(np.array([bits - 1, bits, bits + 1], np.uint16), kind)]
        distance = [abs(v - exact) for v in near]
        assert distance[1] <= min(distance), (sources, bits)
        assert distance[1] < min(distance[0], distance[2]) or bits % 2 == 0, "a tie goes to even"


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_min_max_abs_neg(kind):
    a, b = narrow(floats(seed=1), kind), narrow(floats(seed=2), kind)
    x, y = widen(a, kind), widen(b, kind)
    for name, maximum in (("min", False), ("max", True)):
        with np.errstate(invalid="ignore"):
            want = narrow(ordered_min(x, y, maximum), kind)
        same_bits(lanes(f"{name}.{kind} {{d}}, {{a}}, {{b}};", a, b, out=np.uint16), want)
    number = ~np.isnan(x)
    same_bits(lanes(f"abs.{kind} {{d}}, {{a}};", a, out=np.uint16)[number], (a & 0x7FFF)[number])
    same_bits(lanes(f"neg.{kind} {{d}}, {{a}};", a, out=np.uint16)[number], (a ^ 0x8000)[number])


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize(
    ("kind", "exp_error", "tanh_error"), [("f16", 2**-9.9, 2**-10.987), ("bf16", 2**-7, 2**-8)]
)
def test_half_approximations_stay_within_the_documented_error(kind, exp_error, tanh_error, edge):
    a = narrow(np.linspace(-8, 8, 512), kind)
    x = widen(a, kind).astype(F64)
    ftz = ".ftz" if kind == "bf16" else ""
    got = lanes(f"ex2.approx{ftz}.{kind}x2 {{d}}, {{a}};", a.view(U32), approx_edge=edge).view(np.uint16)
    assert (np.abs(widen(got, kind) - np.exp2(x)) <= 1.5 * exp_error * np.exp2(x)).all()
    got = lanes(f"tanh.approx.{kind} {{d}}, {{a}};", a, out=np.uint16, approx_edge=edge)
    assert (np.abs(widen(got, kind) - np.tanh(x)) <= 1.5 * tanh_error).all()


# ---------------------------------------------------------------- moves
def test_moves_pack_and_unpack():
    a, b = ints(U32, 1), ints(U32, 2)
    same_bits(lanes("mov.b64 {d}, {{{a}, {b}}};", a, b, out=U64), b.astype(U64) << 32 | a)
    wide = ints(U64, 3)
    same_bits(lanes("mov.b64 {{_, {d}}}, {a};", wide), (wide >> 32).astype(U32))
    same_bits(lanes("mov.b64 {{%r60, _}}, {a}; mov.b32 {d}, %r60;", wide), wide.astype(U32))
    same_bits(lanes("mov.b32 {{%h1, %h2}}, {a}; mov.b32 {d}, {{%h2, %h1}};", a), a >> 16 | a << 16)
    quads = "mov.b64 {{%h1, %h2, %h3, %h4}}, {a}; mov.b64 {d}, {{%h4, %h3, %h2, %h1}};"
    same_bits(
        lanes(quads, wide, out=U64), wide.view(np.uint16).reshape(-1, 4)[:, ::-1].copy().view(U64).ravel()
    )
    through = "mov.b128 %q1, {{{a}, {b}}}; mov.b128 {{%d40, %d41}}, %q1; xor.b64 {d}, %d40, %d41;"
    same_bits(lanes(through, wide, wide[::-1].copy(), out=U64), wide ^ wide[::-1])


# ---------------------------------------------------------------- loud where it is not implemented
@pytest.mark.parametrize(
    "text",
    ["add.cc.u32 {d}, {a}, {a};", "fma.rn.oob.f16 %h1, %h2, %h3, %h4;", "shl.b32.wrap {d}, {a}, 1;",
    "vadd.s32 {d}, {a}, {a};",
     "cvt.rs.bf16x2.f32 {d}, {a}, {a}, {a};", "mov.b32 {d}, %envreg3;"],
)  # fmt: skip
def test_unknown_forms_are_refused_with_their_line(text):
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+") as caught:
        lanes(text, ints(U32))
    assert text.split()[0] in str(caught.value)
