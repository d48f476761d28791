// Approximate functions. Computed in double precision and rounded: within half a unit of the exact value, so
// well within the errors that the PTX ISA documents. With FM_EDGE the result is moved to near the edge of the
// documented error, up or down by a hash of the operand.
#include <math.h>
#include "alu.h"

static inline f32 finish(f64 y, u32 sub) {
  f32 v = (f32)y;
  if (sub & FM_FTZ) v = flush(v);
  return v == v ? v : f32_bits(CANONICAL_NAN);
}

static inline int goes_up(u32 bits) { return (int)(bits * 0x9e3779b1u >> 31); }

// Moves y by a relative (or absolute) error, leaving room for the final rounding.
static f64 edge(f64 y, u32 bits, f64 relative, f64 absolute) {
  if (y != y || isinf(y)) return y;
  const f64 error = relative * fabs(y) + absolute;
  return goes_up(bits) ? y + error : y - error;
}

// The neighbour of y on one side: an error of just under a unit in the last place.
static f64 edge_ulp(f64 y, u32 bits) {
  if (y != y || isinf(y) || y == 0) return y;
  f32 v = (f32)y;
  const int up = goes_up(bits);
  if (up && v < y) v = nextafterf(v, INFINITY);
  if (!up && v > y) v = nextafterf(v, -INFINITY);
  return isinf(v) ? y : v;
}

// 2^x. Polynomial in the fraction: Taylor series of exp(f ln 2), |f| <= 1/2, error below 2^-35.
static inline f64 exp2_poly(f64 x) {
  x = x < -160 ? -160 : x > 130 ? 130 : x;
  const f64 shifted = x + 0x1.8p52, n = shifted - 0x1.8p52, f = x - n;
  f64 p = 1.0178086009239699e-07;
  p = p * f + 1.321548679014431e-06;
  p = p * f + 1.5252733804059841e-05;
  p = p * f + 1.5403530393381608e-04;
  p = p * f + 1.3333558146428443e-03;
  p = p * f + 9.6181291076284772e-03;
  p = p * f + 5.5504108664821580e-02;
  p = p * f + 2.4022650695910072e-01;
  p = p * f + 6.9314718055994531e-01;
  p = p * f + 1.0;
  return p * f64_bits((u64)((s64)(bits_f64(shifted) << 32) >> 32) + 1023 << 52);
}

Status op_EX2_F32(Warp *w, const Op *op, u32 mask) {      // error 2^-22, relative
  REFS;
  ALIGNED_ROW f32 out[LANES];
  ALIGNED_ROW f64 y[LANES];
  const f32 *a = ROW(f32, 1);
  LANE_LOOP y[l] = exp2_poly((f64)a[l]);
  if (op->sub & FM_EDGE) for (int l = 0; l < LANES; l++) y[l] = edge(y[l], bits_f32(a[l]), 0.75 * 0x1p-22, 0);
  LANE_LOOP {
    const f32 v = (f32)(y[l]);
    out[l] = a[l] != a[l] ? f32_bits(CANONICAL_NAN) : a[l] >= 128 ? INFINITY : v;
  }
  if (op->sub & FM_FTZ) LANE_LOOP out[l] = flush(out[l]);
  write32(ROW(u32, 0), (u32 *)out, mask);
  return ST_NEXT;
}

Status op_TANH_F32(Warp *w, const Op *op, u32 mask) {     // error 2^-11, relative
  REFS;
  ALIGNED_ROW f32 out[LANES];
  ALIGNED_ROW f64 y[LANES];
  const f32 *a = ROW(f32, 1);
  LANE_LOOP {
    const f64 x = a[l], m = __builtin_fabs(x), e = exp2_poly(-2.8853900817779268 * m), t = (1 - e) / (1 + e),
              s = x * x;
    const f64 small = m * (1 + s * (-1.0 / 3 + s * (2.0 / 15 - s * (17.0 / 315))));
    y[l] = __builtin_copysign(m < 0.03 ? small : t, x);
  }
  if (op->sub & FM_EDGE)
    for (int l = 0; l < LANES; l++)
      y[l] = MAX(-1.0, MIN(1.0, edge(y[l], bits_f32(a[l]), 0.999 * 0x1p-11, 0)));
  LANE_LOOP { const f32 v = (f32)y[l]; out[l] = a[l] != a[l] ? f32_bits(CANONICAL_NAN) : v; }
  write32(ROW(u32, 0), (u32 *)out, mask);
  return ST_NEXT;
}

#define APPROX(name, exact, at_edge)                                              \
  Status op_##name(Warp *w, const Op *op, u32 mask) {                             \
    REFS;                                                                         \
    ALIGNED_ROW f32 out[LANES];                                                   \
    const f32 *pa = ROW(f32, 1);                                                  \
    const u32 sub = op->sub;                                                      \
    for (int l = 0; l < LANES; l++) {                                             \
      const f64 a = sub & FM_FTZ ? flush(pa[l]) : pa[l];                          \
      const u32 bits = bits_f32(pa[l]);                                           \
      f64 y = (exact);                                                            \
      (void)bits;                                                                 \
      if (sub & FM_EDGE) y = (at_edge);                                           \
      out[l] = finish(y, sub);                                                    \
    }                                                                             \
    write32(ROW(u32, 0), (u32 *)out, mask);                                       \
    return ST_NEXT;                                                               \
  }
// PTX ISA: lg2 2^-22, absolute within (0.5, 2) and relative outside; rcp 1 ulp; rsqrt 2^-22.9 and sqrt 2^-23
// relative (about a unit in the last place); sin and cos 2^-20.5 absolute within [-2 pi, 2 pi]
APPROX(LG2_F32, log2(a),
       a > 0.5 && a < 2 ? edge(y, bits, 0, 0.75 * 0x1p-22) : edge(y, bits, 0.75 * 0x1p-22, 0))
APPROX(RCP_APPROX_F32, 1 / a, edge_ulp(y, bits))
APPROX(RSQRT_F32, 1 / sqrt(a), edge_ulp(y, bits))
APPROX(SQRT_APPROX_F32, sqrt(a), edge_ulp(y, bits))
APPROX(SIN_F32, sin(a), edge(y, bits, 0, 0.9 * 0x1p-20))
APPROX(COS_F32, cos(a), edge(y, bits, 0, 0.9 * 0x1p-20))

// PTX ISA, div: 2 ulp. div.approx gives 0 for a divisor above 2^126 (NaN when the dividend is infinite).
static Status divide(Warp *w, const Op *op, u32 mask, int approximate) {
  REFS;
  ALIGNED_ROW f32 out[LANES];
  const f32 *pa = ROW(f32, 1), *pb = ROW(f32, 2);
  for (int l = 0; l < LANES; l++) {
    const f64 a = op->sub & FM_FTZ ? flush(pa[l]) : pa[l], b = op->sub & FM_FTZ ? flush(pb[l]) : pb[l];
    f64 y = a / b;
    if (approximate && fabs(b) > 0x1p126 && !isinf(b)) y = a * copysign(0.0, b);
    if (op->sub & FM_EDGE) y = edge(y, bits_f32(pa[l]) ^ bits_f32(pb[l]), 0x1p-24, 0);
    out[l] = finish(y, op->sub);
  }
  write32(ROW(u32, 0), (u32 *)out, mask);
  return ST_NEXT;
}
Status op_DIV_APPROX_F32(Warp *w, const Op *op, u32 mask) { return divide(w, op, mask, 1); }
Status op_DIV_FULL_F32(Warp *w, const Op *op, u32 mask) { return divide(w, op, mask, 0); }

Status op_RSQRT_F64(Warp *w, const Op *op, u32 mask) {
  REFS;
  ALIGNED_ROW f64 out[LANES];
  for (int l = 0; l < LANES; l++) out[l] = 1 / sqrt(ROW(f64, 1)[l]);
  write64(ROW(u64, 0), (u64 *)out, mask);
  return ST_NEXT;
}
