// f16 and bf16 arithmetic, one value or two a lane. Operands are exact in double precision, which is wide
// enough that rounding its result again is the rounding of the exact one; fma rounds to odd first.
#include <math.h>
#include "alu.h"

typedef f64 (*Scalar)(f64 a, f64 b, f64 c);

static Status half_op(Warp *w, const Op *op, u32 mask, int sources, Scalar f) {
  REFS;
  const u32 sub = op->sub;
  const FormatId id = sub & FM_BF16 ? FORMAT_BF16 : FORMAT_F16;
  const int count = sub & FM_X2 ? 2 : 1;
  ALIGNED_ROW u32 out[LANES];
  for (int l = 0; l < LANES; l++) {
    u32 packed = 0;
    for (int k = 0; k < count; k++) {
      f64 x[3] = {0, 0, 0};
      for (int s = 0; s < sources; s++) {
        x[s] = format_to_f64(ROW(u32, 1 + s)[l] >> 16 * k & 0xffff, id);
        if (sub & FM_FTZ && id == FORMAT_F16 && fabs(x[s]) < 0x1p-14) x[s] = copysign(0, x[s]);
      }
      f64 y = f(x[0], x[1], x[2]);
      if (sub & FM_SAT) y = y > 0 ? MIN(y, 1.0) : 0.0;
      if (sub & FM_RELU && y < 0) y = 0;
      u32 bits = (u32)round_to_format(y, id, sub & (FM_ROUND | FM_SATFINITE));
      if (sub & FM_FTZ && id == FORMAT_F16 && !(bits & 0x7c00)) bits &= 0x8000;
      packed |= bits << 16 * k;
    }
    out[l] = packed;
  }
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}

static f64 add(f64 a, f64 b, f64 c) {
  (void)c;
  const f64 sum = a + b, bb = sum - a;
  return round_odd(sum, (a - (sum - bb)) + (b - bb));
}
static f64 sub(f64 a, f64 b, f64 c) { return add(a, -b, c); }
static f64 mul(f64 a, f64 b, f64 c) { (void)c; return a * b; }        // 22 significant bits at most: exact
static f64 fma_half(f64 a, f64 b, f64 c) { return add(a * b, c, 0); }
static f64 ex2(f64 a, f64 b, f64 c) { (void)b; (void)c; return exp2(a); }
static f64 tanh_half(f64 a, f64 b, f64 c) { (void)b; (void)c; return tanh(a); }

// ---------------------------------------------------------------- the plain forms, 32 lanes at a time
// sum + error to f32, to odd: a rounding to fewer bits after it is that of the exact value.
static inline f32 odd_f32(f64 sum, f64 error) {
  const f32 f = (f32)sum;
  const f64 rest = (sum - (f64)f) + error;
  const u32 v = bits_f32(f), step = (rest > 0) == (sum > 0) ? 1u : ~0u;
  return (v & 0x7fffffff) < 0x7f800000 && rest != 0 && !(v & 1) ? f32_bits(v + step) : f;
}

static inline f32 widen_f16(u32 h) {
  const u32 magnitude = (h & 0x7fff) << 13; // exponent 112 too small; a product brings subnormals right too
  const u32 v = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : bits_f32(f32_bits(magnitude) * 0x1p112f);
  return f32_bits(v | (h & 0x8000) << 16);
}

static inline u32 round_bf16(f32 x) {
  const u32 v = bits_f32(x);
  return (v & 0x7fffffff) > 0x7f800000 ? 0x7fff : (v + 0x7fff + (v >> 16 & 1)) >> 16;
}

static inline u32 round_f16(f32 x) {
  _Float16 h = (_Float16)x;
  u16 v;
  memcpy(&v, &h, 2);
  return x == x ? v : 0x7fff;
}

// out |= a * b + c, of half k of each lane.
static inline void fma_halves(u32 *out, const u32 *a, const u32 *b, const u32 *c, int k, int bf16) {
  ALIGNED_ROW f32 y[LANES];
  LANE_LOOP {
    const u32 p = a[l] >> 16 * k & 0xffff, q = b[l] >> 16 * k & 0xffff, r = c[l] >> 16 * k & 0xffff;
    const f64 product =
        bf16 ? (f64)f32_bits(p << 16) * (f64)f32_bits(q << 16) : (f64)widen_f16(p) * (f64)widen_f16(q);
    const f64 addend = bf16 ? f32_bits(r << 16) : widen_f16(r);
    const f64 sum = product + addend, bb = sum - product;
    y[l] = odd_f32(sum, (product - (sum - bb)) + (addend - bb));
  }
  if (bf16) LANE_LOOP out[l] |= round_bf16(y[l]) << 16 * k;
  else for (int l = 0; l < LANES; l++) out[l] |= round_f16(y[l]) << 16 * k;
}

// kind: 0 add, 1 sub, 2 mul, 3 fma. An addition multiplies by one and a product adds a zero of its own sign.
static Status half_arithmetic(Warp *w, const Op *op, u32 mask, int kind) {
  static const Scalar slow[4] = {add, sub, mul, fma_half};
  const u32 flags = op->sub;
  if (flags & ~(u32)(FM_BF16 | FM_X2)) return half_op(w, op, mask, kind == 3 ? 3 : 2, slow[kind]);
  REFS;
  const u32 one = flags & FM_BF16 ? 0x3f803f80 : 0x3c003c00;
  const u32 *pa = ROW(u32, 1), *pb = ROW(u32, 2), *pc = kind == 3 ? ROW(u32, 3) : pb;
  ALIGNED_ROW u32 out[LANES] = {0}, factor[LANES], addend[LANES];
  LANE_LOOP {
    factor[l] = kind < 2 ? one : pb[l];
    addend[l] = kind == 0   ? pb[l]
                : kind == 1 ? pb[l] ^ 0x80008000
                : kind == 2 ? (pa[l] ^ pb[l]) & 0x80008000
                            : pc[l];
  }
  for (int k = 0; k < (flags & FM_X2 ? 2 : 1); k++) {
    if (flags & FM_BF16) fma_halves(out, pa, factor, addend, k, 1);
    else fma_halves(out, pa, factor, addend, k, 0);
  }
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}
Status op_ADD_HALF(Warp *w, const Op *op, u32 mask) { return half_arithmetic(w, op, mask, 0); }
Status op_SUB_HALF(Warp *w, const Op *op, u32 mask) { return half_arithmetic(w, op, mask, 1); }
Status op_MUL_HALF(Warp *w, const Op *op, u32 mask) { return half_arithmetic(w, op, mask, 2); }
Status op_FMA_HALF(Warp *w, const Op *op, u32 mask) { return half_arithmetic(w, op, mask, 3); }

// PTX ISA: ex2.approx.ftz.bf16 has a relative error of 2^-7, ex2.approx.f16 of 2^-9.9; tanh.approx an
// absolute one of 2^-8 (bf16) and 2^-10.987 (f16). Rounding the exact value stays well within; the edge is a
// step of one unit away.
static Status half_approx(Warp *w, const Op *op, u32 mask, Scalar f,
                          u32 most) { // most: bits no result exceeds
  REFS;
  ALIGNED_ROW u32 out[LANES];
  Op plain = *op;
  plain.sub &= ~(u32)FM_EDGE;
  if (!(op->sub & FM_EDGE)) return half_op(w, &plain, mask, 1, f);
  u32 *d = ROW(u32, 0);
  ALIGNED_ROW u32 source[LANES];
  memcpy(source, ROW(u32, 1), sizeof source);
  memcpy(out, d, sizeof out);
  half_op(w, &plain, FULL, 1, f);
  const u32 infinity = op->sub & FM_BF16 ? 0x7f80 : 0x7c00;
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) { d[l] = out[l]; continue; }
    for (int k = 0; k < (op->sub & FM_X2 ? 2 : 1); k++) {
      const u32 v = d[l] >> 16 * k & 0x7fff, up = source[l] * 0x9e3779b1u >> (31 - k) & 1;
      if (v == 0 || v >= infinity - 1) continue;
      d[l] += up && v < most ? 1u << 16 * k : 0u - (1u << 16 * k);
    }
  }
  return ST_NEXT;
}
Status op_EX2_HALF(Warp *w, const Op *op, u32 mask) { return half_approx(w, op, mask, ex2, 0x7fff); }
Status op_TANH_HALF(Warp *w, const Op *op, u32 mask) {
  return half_approx(w, op, mask, tanh_half, op->sub & FM_BF16 ? 0x3f80 : 0x3c00);        // 1
}

static u32 extremum(u32 a, u32 b, int max, u32 sub) {
  const u32 infinity = sub & FM_BF16 ? 0x7f80 : 0x7c00, least = sub & FM_BF16 ? 0x80 : 0x400;
  if (sub & FM_FTZ) { if ((a & 0x7fff) < least) a &= 0x8000; if ((b & 0x7fff) < least) b &= 0x8000; }
  const u32 sign = (a ^ b) & 0x8000;
  if (sub & FM_XORSIGN) { a &= 0x7fff; b &= 0x7fff; }
  const int a_nan = (a & 0x7fff) > infinity, b_nan = (b & 0x7fff) > infinity;
  u32 v;
  if (a_nan || b_nan) {
    if (sub & FM_NAN || (a_nan && b_nan)) return 0x7fff;
    v = a_nan ? b : a;
  } else {
    const s32 x = a & 0x8000 ? -(s32)(a & 0x7fff) - 1 : (s32)a,
              y = b & 0x8000 ? -(s32)(b & 0x7fff) - 1 : (s32)b;
    v = max == (x > y) ? a : b;
  }
  return sub & FM_XORSIGN ? v | sign : v;
}

static Status half_bits(Warp *w, const Op *op, u32 mask, int kind) {       // 0 min, 1 max, 2 abs, 3 neg
  REFS;
  ALIGNED_ROW u32 out[LANES];
  for (int l = 0; l < LANES; l++) {
    out[l] = 0;
    for (int k = 0; k < (op->sub & FM_X2 ? 2 : 1); k++) {
      const u32 a = ROW(u32, 1)[l] >> 16 * k & 0xffff;
      u32 v = kind == 2 ? a & 0x7fff : a ^ 0x8000;
      if (kind < 2) v = extremum(a, ROW(u32, 2)[l] >> 16 * k & 0xffff, kind, op->sub);
      else if ((v & 0x7fff) > (op->sub & FM_BF16 ? 0x7f80u : 0x7c00u)) v = 0x7fff;
      out[l] |= v << 16 * k;
    }
  }
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}
Status op_MIN_HALF(Warp *w, const Op *op, u32 mask) { return half_bits(w, op, mask, 0); }
Status op_MAX_HALF(Warp *w, const Op *op, u32 mask) { return half_bits(w, op, mask, 1); }
Status op_ABS_HALF(Warp *w, const Op *op, u32 mask) { return half_bits(w, op, mask, 2); }
Status op_NEG_HALF(Warp *w, const Op *op, u32 mask) { return half_bits(w, op, mask, 3); }
