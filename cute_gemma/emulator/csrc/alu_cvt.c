// Conversions: between integers and floats of every width, and packed pairs.
#include <math.h>
#include "alu.h"

const Format formats[] = {
  [FORMAT_F16] = {5, 10, 15, 0x7bff, 0x7fff, 1},       // NaNs as the PTX ISA gives them for cvt: canonical
  [FORMAT_BF16] = {8, 7, 127, 0x7f7f, 0x7fff, 1},
  [FORMAT_F32] = {8, 23, 127, 0x7f7fffff, CANONICAL_NAN, 1},
  [FORMAT_E4M3] = {4, 3, 7, 0x7e, 0x7f, 0},
  [FORMAT_E5M2] = {5, 2, 15, 0x7b, 0x7f, 1},
  [FORMAT_TF32] = {8, 10, 127, 0x3fbff, 0x3ffff, 1},
};

f64 round_odd(f64 sum, f64 error) {
  u64 v = bits_f64(sum);
  if (error == 0 || sum != sum || isinf(sum) || v & 1) return sum;
  return f64_bits((error > 0) == (sum > 0) ? v + 1 : v - 1);
}

// Whether a magnitude whose dropped part is `rest` out of `half * 2` goes up.
static int rounds_up(u64 kept, u64 rest, u64 half, u32 sub, int negative) {
  if (sub & FM_RNA) return rest >= half;
  switch (sub & FM_ROUND) {
    case FM_RZ: return 0;
    case FM_RM: return negative && rest;
    case FM_RP: return !negative && rest;
    default: return rest > half || (rest == half && kept & 1);
  }
}

u64 round_to_format(f64 x, FormatId id, u32 sub) {
  if (id == FORMAT_F64) return bits_f64(x);
  const Format *f = formats + id;
  const u64 v = bits_f64(x), sign = v >> 63, top = sign << (f->exponent_bits + f->mantissa_bits);
  if (x != x) return f->nan;
  const u64 infinity = f->has_inf ? ((1ull << f->exponent_bits) - 1) << f->mantissa_bits : f->nan;
  if (isinf(x)) return top | (sub & FM_SATFINITE ? f->max_finite : infinity);
  if (x == 0) return top;
  int exponent = (int)(v >> 52 & 0x7ff) - 1023;
  u64 mantissa = v & ((1ull << 52) - 1);
  if (exponent == -1023)
    return top; // doubles this small are below half of anything here; no source makes them
  mantissa |= 1ull << 52;
  const int lowest = 1 - f->bias;
  int drop = 52 - f->mantissa_bits + (exponent < lowest ? lowest - exponent : 0);
  if (drop > 63) { mantissa = 1; drop = 63; }      // only the fact that something is left counts
  u64 kept = mantissa >> drop;
  kept += (u64)rounds_up(kept, mantissa & ((1ull << drop) - 1), 1ull << (drop - 1), sub, (int)sign);
  u64 out = exponent < lowest ? kept : kept + ((u64)(exponent - lowest) << f->mantissa_bits);
  if (out > f->max_finite) {
    const u32 mode = sub & FM_ROUND;
    const int to_finite = mode == FM_RZ || (mode == FM_RM && !sign) || (mode == FM_RP && sign);
    return top | (sub & FM_SATFINITE || to_finite ? f->max_finite : infinity);
  }
  if (sub & FM_FTZ && id == FORMAT_F32 && out < 0x800000) return top;
  return top | out;
}

f64 format_to_f64(u64 bits, FormatId id) {
  if (id == FORMAT_F64) return f64_bits(bits);
  if (id == FORMAT_F32) return f32_bits((u32)bits);
  if (id == FORMAT_BF16) return f32_bits((u32)bits << 16);
  if (id == FORMAT_F16) return f16_to_f32((u32)bits);
  const Format *f = formats + id;
  const u64 mantissa = bits & ((1ull << f->mantissa_bits) - 1), top = (1ull << f->exponent_bits) - 1;
  const u64 exponent = bits >> f->mantissa_bits & top;
  const int negative = (int)(bits >> (f->exponent_bits + f->mantissa_bits) & 1);
  f64 x;
  if (f->has_inf && exponent == top) x = mantissa ? NAN : INFINITY;
  else if (!f->has_inf && (bits & 0x7f) == 0x7f) x = NAN;
  else if (!exponent) x = ldexp((f64)mantissa, 1 - f->bias - f->mantissa_bits);
  else x = ldexp((f64)(mantissa | 1ull << f->mantissa_bits), (int)exponent - f->bias - f->mantissa_bits);
  return negative ? -x : x;
}

static u64 load_lane(const Warp *w, int32_t ref, int l, int wide) {
  return wide ? REG64(w, ref)[l] : REG32(w, ref)[l];
}

static void store_lane(Warp *w, int32_t ref, int l, int wide, u64 value) {
  if (wide) REG64(w, ref)[l] = value; else REG32(w, ref)[l] = (u32)value;
}

#define FOR_ACTIVE for (int l = 0; l < LANES; l++) if (mask >> l & 1)

// Integer types in imm, imm2: bits, plus 256 when signed.
static s64 extend(u64 v, int type) {
  const int shift = 64 - (type & 255);
  return type & 256 ? (s64)(v << shift) >> shift : (s64)(v << shift >> shift);
}

Status op_CVT_SAT_INT(Warp *w, const Op *op, u32 mask) {       // imm: source type, imm2: destination type
  REFS;
  const int from = (int)op->imm, to = (int)op->imm2, bits = to & 255, from_wide = (from & 255) > 32,
            to_wide = bits > 32;
  FOR_ACTIVE {
    const s64 v = extend(load_lane(w, r[1], l, from_wide), from);
    const int huge = !(from & 256) && v < 0;                   // an unsigned source past the signed range
    u64 out;
    if (to & 256) {
      const s64 max = (s64)(~0ull >> (65 - bits));
      out = (u64)(huge || v > max ? max : v < -max - 1 ? -max - 1 : v);
    } else {
      const u64 max = ~0ull >> (64 - bits);
      out = !huge && from & 256 && v < 0 ? 0 : (u64)v > max ? max : (u64)v;
    }
    store_lane(w, r[0], l, to_wide, out);
  }
  return ST_NEXT;
}

Status op_CVT_INT_FLOAT(Warp *w, const Op *op, u32 mask) {     // imm: source type, imm2: FormatId
  REFS;
  const int from = (int)op->imm;
  FOR_ACTIVE {
    const u64 raw = load_lane(w, r[1], l, (from & 255) > 32);
    const s64 v = extend(raw, from);
    const int negative = from & 256 && v < 0;
    u64 magnitude = negative ? 0ull - (u64)v : (u64)v;
    if (op->imm2 == FORMAT_F64) {
      const u32 old = round_enter(op->sub);
      const f64 x = negative ? (f64)v : (f64)magnitude;
      store_lane(w, r[0], l, 1, bits_f64(x));
      round_leave(old);
      continue;
    }
    int shift = 0;
    while (magnitude >> 53) {
      magnitude = magnitude >> 1 | (magnitude & 1);
      shift++;
    } // round to odd: exact enough
    const f64 x = ldexp((f64)magnitude, shift);
    store_lane(w, r[0], l, 0, round_to_format(negative ? -x : x, (FormatId)op->imm2, op->sub));
  }
  return ST_NEXT;
}

static f64 integral(f64 x, u32 sub) {
  switch (sub & FM_ROUND) {
    case FM_RZ: return trunc(x);
    case FM_RM: return floor(x);
    case FM_RP: return ceil(x);
    default: return nearbyint(x);
  }
}

Status op_CVT_FLOAT_INT(Warp *w, const Op *op, u32 mask) {     // imm: FormatId, imm2: destination type
  REFS;
  const int to = (int)op->imm2, bits = to & 255;
  const FormatId from = (FormatId)op->imm;
  const f64 low = to & 256 ? -ldexp(1, bits - 1) : 0,
            high = ldexp(1, to & 256 ? bits - 1 : bits); // high is excluded
  FOR_ACTIVE {
    f64 x = format_to_f64(load_lane(w, r[1], l, from == FORMAT_F64), from);
    if (op->sub & FM_FTZ && from == FORMAT_F32) x = flush((f32)x);
    x = integral(x, op->sub);
    u64 out;
    if (x != x) out = 0;                                       // PTX ISA, cvt: NaN becomes 0
    else if (x < low) out = (u64)(s64)low;
    else if (x >= high) out = to & 256 ? ~0ull >> (65 - bits) : ~0ull >> (64 - bits);
    else
      out = to & 256 || x < 9223372036854775808.0 ? (u64)(s64)x
                                                  : (u64)(s64)(x - 9223372036854775808.0) ^ 1ull << 63;
    store_lane(w, r[0], l, bits > 32, out);
  }
  return ST_NEXT;
}

static f64 clamp_modes(f64 x, u32 sub) {
  if (sub & FM_SAT) x = x > 0 ? MIN(x, 1.0) : 0.0;
  if (sub & FM_RELU && x < 0) x = 0;
  return x;
}

Status op_CVT_FLOAT_FLOAT(Warp *w, const Op *op,
                          u32 mask) { // imm: source FormatId, imm2: destination FormatId
  REFS;
  const FormatId from = (FormatId)op->imm, to = (FormatId)op->imm2;
  FOR_ACTIVE {
    f64 x = format_to_f64(load_lane(w, r[1], l, from == FORMAT_F64), from);
    if (op->sub & FM_FTZ && from == FORMAT_F32) x = flush((f32)x);
    if (op->sub & FM_INTEGRAL) x = integral(x, op->sub);
    u64 out = round_to_format(clamp_modes(x, op->sub), to, op->sub);
    if (to == FORMAT_TF32) out <<= 13;                         // held in the upper bits of 32
    store_lane(w, r[0], l, to == FORMAT_F64, out);
  }
  return ST_NEXT;
}

Status op_CVT_PACK_BF16X2(Warp *w, const Op *op, u32 mask) {   // refs: d, upper, lower; to nearest even
  REFS;
  ALIGNED_ROW u32 out[LANES];
  const u32 *high = ROW(u32, 1), *low = ROW(u32, 2);
  LANE_LOOP {
    const u32 h = high[l], n = low[l];
    const u32 hr = (h & 0x7fffffff) > 0x7f800000 ? 0x7fff0000 : h + 0x7fff + (h >> 16 & 1);
    const u32 nr = (n & 0x7fffffff) > 0x7f800000 ? 0x7fff0000 : n + 0x7fff + (n >> 16 & 1);
    out[l] = (hr & 0xffff0000) | nr >> 16;
  }
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}

static inline u32 half_bits(f32 x) {
  _Float16 h = (_Float16)x;
  u16 v;
  memcpy(&v, &h, 2);
  return x == x ? v : 0x7fff;
}

Status op_CVT_PACK_F16X2(Warp *w, const Op *op, u32 mask) {
  REFS;
  ALIGNED_ROW u32 out[LANES];
  const f32 *high = ROW(f32, 1), *low = ROW(f32, 2);
  LANE_LOOP out[l] = half_bits(high[l]) << 16 | half_bits(low[l]);
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}

// Any other pair. imm: source FormatId (f32: refs d, upper, lower; f16, bf16: d, pair), imm2: destination
// FormatId.
Status op_CVT_PACK(Warp *w, const Op *op, u32 mask) {
  REFS;
  const FormatId from = (FormatId)op->imm, to = (FormatId)op->imm2;
  const int width = 1 + formats[to].exponent_bits + formats[to].mantissa_bits;
  FOR_ACTIVE {
    u32 v[2];
    if (from == FORMAT_F32) { v[1] = ROW(u32, 1)[l]; v[0] = ROW(u32, 2)[l]; }
    else { v[1] = ROW(u32, 1)[l] >> 16; v[0] = ROW(u32, 1)[l] & 0xffff; }
    u32 out = 0;
    for (int k = 0; k < 2; k++)
      out |= (u32)round_to_format(clamp_modes(format_to_f64(v[k], from), op->sub), to, op->sub) << k * width;
    ROW(u32, 0)[l] = out;
  }
  return ST_NEXT;
}

Status op_CVT_UNPACK(Warp *w, const Op *op, u32 mask) { // imm: source FormatId (8 bits), imm2: f16 or bf16
  REFS;
  FOR_ACTIVE {
    u32 out = 0;
    for (int k = 0; k < 2; k++) {
      const f64 x = clamp_modes(format_to_f64(ROW(u32, 1)[l] >> 8 * k & 0xff, (FormatId)op->imm), op->sub);
      out |= (u32)round_to_format(x, (FormatId)op->imm2, op->sub) << 16 * k;
    }
    ROW(u32, 0)[l] = out;
  }
  return ST_NEXT;
}
