// Integer and IEEE arithmetic, comparisons, moves and bit manipulation: 32 lanes an operation.
#include <math.h>
#include "alu.h"

static inline s32 clamp_s32(s64 x) { return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (s32)x; }

static inline u32 brev32(u32 x) {
  x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(x);
}

// PTX ISA, bfe: pos and len are 8 bits; fields reach past the top as zeros, or as copies of the sign.
static inline u64 bfe_u64(u64 a, u32 pos, u32 len, int width) {
  pos &= 0xff;
  len &= 0xff;
  if (!len || pos >= (u32)width) return 0;
  a >>= pos;
  return len >= 64 ? a : a & ((1ull << len) - 1);
}
static inline s64 bfe_s64(s64 a, u32 pos, u32 len, int width) {
  pos &= 0xff;
  len &= 0xff;
  if (!len) return 0;
  if (pos >= (u32)width) return a < 0 ? -1 : 0;
  a >>= pos;
  if (len >= 64 - 0u) return a;
  s64 field = a & (s64)((1ull << len) - 1), sign = 1ll << (len - 1);
  return pos + len > (u32)width ? a : (field ^ sign) - sign;
}

static inline u32 prmt(u32 a, u32 b, u32 c) {
  u64 bytes = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    u32 select = c >> 4 * i & 0xf, byte = (u32)(bytes >> 8 * (select & 7)) & 0xff;
    if (select & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << 8 * i;
  }
  return out;
}

static inline f64 min_f64(f64 a, f64 b) {
  if (a != a) return b;
  if (b != b) return a;
  return a < b || (a == b && signbit(a)) ? a : b;
}

// ---------------------------------------------------------------- element-wise operations from alu.def
#define WRITE(O)                                                                  \
  if (mask != FULL) {                                                             \
    if (sizeof(O) == 4) blend32((u32 *)d, (u32 *)out, mask); else blend64((u64 *)d, (u64 *)out, mask); \
  }                                                                               \
  return ST_NEXT;
#define PROLOGUE(O)                                                               \
  REFS; (void)r;                                                                  \
  O *d = ROW(O, 0), *out = d;                                                     \
  ALIGNED_ROW O tmp[LANES];                                                       \
  if (mask != FULL) out = tmp;

#define V1(name, O, A, expr)                                                      \
  Status op_##name(Warp *w, const Op *op, u32 mask) {                             \
    PROLOGUE(O) const A *pa = ROW(A, 1);                                          \
    LANE_LOOP { const A a = pa[l]; out[l] = (O)(expr); }                          \
    WRITE(O) }
#define V2(name, O, A, B, expr)                                                   \
  Status op_##name(Warp *w, const Op *op, u32 mask) {                             \
    PROLOGUE(O) const A *pa = ROW(A, 1); const B *pb = ROW(B, 2);                 \
    LANE_LOOP { const A a = pa[l]; const B b = pb[l]; out[l] = (O)(expr); }       \
    WRITE(O) }
#define V3(name, O, A, B, C, expr)                                                \
  Status op_##name(Warp *w, const Op *op, u32 mask) {                             \
    PROLOGUE(O) const A *pa = ROW(A, 1); const B *pb = ROW(B, 2); const C *pc = ROW(C, 3); \
    LANE_LOOP { const A a = pa[l]; const B b = pb[l]; const C c = pc[l]; out[l] = (O)(expr); } \
    WRITE(O) }

// f32: the loop over n lanes, once inline for the plain form and once out of line for the modified ones.
typedef void (*KernelF32)(f32 *out, const f32 *const *in);
static void run_modified_f32(Warp *w, const Op *op, u32 mask, int sources, int lanes, KernelF32 kernel);
#define F_KERNEL(name, n, loads, expr)                                                                       \
  static __attribute__((noinline)) void kernel_##name(f32 *out, const f32 *const *in) {                      \
    const f32 *pa = in[0], *pb = in[1], *pc = in[2];                                                         \
    (void)pb;                                                                                                \
    (void)pc;                                                                                                \
    _Pragma("GCC ivdep") for (int l = 0; l < n; l++) {                                                       \
      loads f32 v = (expr);                                                                                  \
      out[l] = v == v ? v : f32_bits(CANONICAL_NAN);                                                         \
    }                                                                                                        \
  }
#define F_OP(name, n, sources)                                                                               \
  Status op_##name(Warp *w, const Op *op, u32 mask) {                                                        \
    if (op->sub || mask != FULL) {                                                                           \
      run_modified_f32(w, op, mask, sources, n, kernel_##name);                                              \
      return ST_NEXT;                                                                                        \
    }                                                                                                        \
    REFS;                                                                                                    \
    const f32 *in[3] = {0};                                                                                  \
    for (int k = 0; k < sources; k++) in[k] = ROW(f32, k + 1);                                               \
    kernel_##name(ROW(f32, 0), in);                                                                          \
    return ST_NEXT;                                                                                          \
  }
#define LOAD1 const f32 a = pa[l];
#define LOAD2 LOAD1 const f32 b = pb[l];
#define LOAD3 LOAD2 const f32 c = pc[l];
#define F1(name, expr) F_KERNEL(name, 32, LOAD1, expr) F_OP(name, 32, 1)
#define F2(name, expr) F_KERNEL(name, 32, LOAD2, expr) F_OP(name, 32, 2)
#define F3(name, expr) F_KERNEL(name, 32, LOAD3, expr) F_OP(name, 32, 3)
#define P2(name, expr) F_KERNEL(name, 64, LOAD2, expr) F_OP(name, 64, 2)
#define P3(name, expr) F_KERNEL(name, 64, LOAD3, expr) F_OP(name, 64, 3)

typedef void (*KernelF64)(f64 *out, const f64 *const *in);
static void run_f64(Warp *w, const Op *op, u32 mask, int sources, KernelF64 kernel);
#define D_KERNEL(name, sources, loads, expr)                                                                 \
  static __attribute__((noinline)) void kernel_##name(f64 *out, const f64 *const *in) {                      \
    const f64 *pa = in[0], *pb = in[1], *pc = in[2];                                                         \
    (void)pb;                                                                                                \
    (void)pc;                                                                                                \
    LANE_LOOP { loads out[l] = (expr); }                                                                     \
  }                                                                                                          \
  Status op_##name(Warp *w, const Op *op, u32 mask) {                                                        \
    run_f64(w, op, mask, sources, kernel_##name);                                                            \
    return ST_NEXT;                                                                                          \
  }
#define LOADD1 const f64 a = pa[l];
#define LOADD2 LOADD1 const f64 b = pb[l];
#define LOADD3 LOADD2 const f64 c = pc[l];
#define D1(name, expr) D_KERNEL(name, 1, LOADD1, expr)
#define D2(name, expr) D_KERNEL(name, 2, LOADD2, expr)
#define D3(name, expr) D_KERNEL(name, 3, LOADD3, expr)

// Comparisons. refs: p, q (when sub has SET_Q), a, b, combined predicate (when sub has a boolean operator).
enum { SET_BOOL = 3, SET_AND = 1, SET_OR = 2, SET_XOR = 3, SET_Q = 4, SET_FTZ = 8 };
static void write_compare(Warp *w, const Op *op, u32 mask, u32 t);
#define IS_FLOAT(T) ((T)0.5 != 0 && sizeof(T) == 4)
#define C2(name, T, expr)                                                                                    \
  Status op_##name(Warp *w, const Op *op, u32 mask) {                                                        \
    REFS;                                                                                                    \
    const int at = op->sub & SET_Q ? 2 : 1;                                                                  \
    const T *pa = ROW(T, at), *pb = ROW(T, at + 1);                                                          \
    u32 t = 0;                                                                                               \
    ALIGNED_ROW T flushed[2][LANES];                                                                         \
    if (IS_FLOAT(T) && op->sub & SET_FTZ) {                                                                  \
      for (int l = 0; l < LANES; l++) {                                                                      \
        flushed[0][l] = (T)flush((f32)pa[l]);                                                                \
        flushed[1][l] = (T)flush((f32)pb[l]);                                                                \
      }                                                                                                      \
      pa = flushed[0];                                                                                       \
      pb = flushed[1];                                                                                       \
    }                                                                                                        \
    ALIGNED_ROW u32 bit[LANES];                                                                              \
    LANE_LOOP {                                                                                              \
      const T a = pa[l], b = pb[l];                                                                          \
      bit[l] = (expr) ? 1u << l : 0;                                                                         \
    }                                                                                                        \
    for (int l = 0; l < LANES; l++) t |= bit[l];                                                             \
    if (op->sub & ~SET_FTZ) write_compare(w, op, mask, t);                                                   \
    else write_pred(w->pred + r[0], t, mask);                                                                \
    return ST_NEXT;                                                                                          \
  }
#define OP(name)
#define CONTROL(name)
#include "alu.def"
#undef OP
#undef CONTROL

// Plain, masked, flushed, directed and saturated forms.
static void run_modified_f32(Warp *w, const Op *op, u32 mask, int sources, int lanes, KernelF32 kernel) {
  REFS;
  const u32 sub = op->sub;
  ALIGNED_ROW f32 copy[3][64], out[64];
  const f32 *in[3] = {0};
  for (int k = 0; k < sources; k++) {
    in[k] = ROW(f32, k + 1);
    if (sub & FM_FTZ) {
      for (int l = 0; l < lanes; l++) copy[k][l] = flush(in[k][l]);
      in[k] = copy[k];
    }
  }
  if (sub & FM_ROUND) {
    u32 old = round_enter(sub & FM_ROUND);
    kernel(out, in);
    round_leave(old);
  } else {
    kernel(out, in);
  }
  if (sub & FM_FTZ) for (int l = 0; l < lanes; l++) out[l] = flush(out[l]);
  if (sub & FM_SAT) for (int l = 0; l < lanes; l++) out[l] = out[l] > 0 ? MIN(out[l], 1.0f) : 0.0f;
  if (lanes == LANES) write32(ROW(u32, 0), (u32 *)out, mask); else write64(ROW(u64, 0), (u64 *)out, mask);
}

static void run_f64(Warp *w, const Op *op, u32 mask, int sources, KernelF64 kernel) {
  REFS;
  ALIGNED_ROW f64 out[LANES];
  const f64 *in[3] = {0};
  for (int k = 0; k < sources; k++) in[k] = ROW(f64, k + 1);
  if (op->sub & FM_ROUND) {
    u32 old = round_enter(op->sub & FM_ROUND);
    kernel(out, in);
    round_leave(old);
  } else {
    kernel(out, in);
  }
  write64(ROW(u64, 0), (u64 *)out, mask);
}

static u32 combine(u32 t, u32 operator, u32 c) {
  return operator == SET_AND ? t & c : operator == SET_OR ? t | c : operator == SET_XOR ? t ^ c : t;
}

static void write_compare(Warp *w, const Op *op, u32 mask, u32 t) {
  REFS;
  const u32 c = op->sub & SET_BOOL ? w->pred[r[op->nargs - 1]] : 0;
  write_pred(w->pred + r[0], combine(t, op->sub & SET_BOOL, c), mask);
  if (op->sub & SET_Q) write_pred(w->pred + r[1], combine(~t, op->sub & SET_BOOL, c), mask);
}

// ---------------------------------------------------------------- minimum and maximum of f32
static inline f32 pick_f32(f32 a, f32 b, int max, u32 sub) {
  if (sub & FM_FTZ) { a = flush(a); b = flush(b); }
  const u32 sign = (bits_f32(a) ^ bits_f32(b)) & 0x80000000;
  if (sub & (FM_XORSIGN | FM_ABS)) { a = __builtin_fabsf(a); b = __builtin_fabsf(b); }
  // -0 is less than +0: order the bits as integers when the values are equal
  const f32 least = a < b || (a == b && bits_f32(a) >> 31) ? a : b,
            most = a < b || (a == b && bits_f32(a) >> 31) ? b : a;
  f32 v = max ? most : least;
  if (a != a || b != b) v = sub & FM_NAN ? NAN : a != a ? b : a;
  if (sub & FM_XORSIGN) v = f32_bits(bits_f32(v) | sign);
  return v == v ? v : f32_bits(CANONICAL_NAN);
}

static inline Status extremum(Warp *w, const Op *op, u32 mask, int max, int sources) {
  REFS;
  ALIGNED_ROW f32 out[LANES];
  const f32 *pa = ROW(f32, 1), *pb = ROW(f32, 2);
  if (op->sub == 0) LANE_LOOP out[l] = pick_f32(pa[l], pb[l], max, 0);
  else for (int l = 0; l < LANES; l++) out[l] = pick_f32(pa[l], pb[l], max, op->sub);
  if (sources == 3) {
    const f32 *pc = ROW(f32, 3);
    if (op->sub == 0) LANE_LOOP out[l] = pick_f32(out[l], pc[l], max, 0);
    else for (int l = 0; l < LANES; l++) out[l] = pick_f32(out[l], pc[l], max, op->sub);
  }
  write32(ROW(u32, 0), (u32 *)out, mask);
  return ST_NEXT;
}
Status op_MIN_F32(Warp *w, const Op *op, u32 mask) { return extremum(w, op, mask, 0, 2); }
Status op_MAX_F32(Warp *w, const Op *op, u32 mask) { return extremum(w, op, mask, 1, 2); }
Status op_MIN3_F32(Warp *w, const Op *op, u32 mask) { return extremum(w, op, mask, 0, 3); }
Status op_MAX3_F32(Warp *w, const Op *op, u32 mask) { return extremum(w, op, mask, 1, 3); }

static Status change_sign(Warp *w, const Op *op, u32 mask, u32 keep, u32 flip) {
  REFS;
  ALIGNED_ROW u32 out[LANES];
  const u32 *pa = ROW(u32, 1);
  const int ftz = (op->sub & FM_FTZ) != 0;
  LANE_LOOP { u32 a = pa[l]; if (ftz && !(a & 0x7f800000)) a &= 0x80000000; out[l] = (a & keep) ^ flip; }
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}
Status op_ABS_F32(Warp *w, const Op *op, u32 mask) { return change_sign(w, op, mask, 0x7fffffff, 0); }
Status op_NEG_F32(Warp *w, const Op *op, u32 mask) {
  return change_sign(w, op, mask, 0xffffffff, 0x80000000);
}

// testp: sub is a mask of classes: 1 subnormal, 2 normal, 4 zero, 8 infinite, 16 NaN
static Status classify(Warp *w, const Op *op, u32 mask, int wide) {
  REFS;
  u32 t = 0;
  for (int l = 0; l < LANES; l++) {
    int kind = wide ? fpclassify(ROW(f64, 1)[l]) : fpclassify(ROW(f32, 1)[l]);
    u32 class = kind == FP_SUBNORMAL  ? 1
                : kind == FP_NORMAL   ? 2
                : kind == FP_ZERO     ? 4
                : kind == FP_INFINITE ? 8
                                      : 16;
    if (op->sub & class) t |= 1u << l;
  }
  write_pred(w->pred + r[0], t, mask);
  return ST_NEXT;
}
Status op_TESTP_F32(Warp *w, const Op *op, u32 mask) { return classify(w, op, mask, 0); }
Status op_TESTP_F64(Warp *w, const Op *op, u32 mask) { return classify(w, op, mask, 1); }

// ---------------------------------------------------------------- moves and bits
Status op_NOP(Warp *w, const Op *op, u32 mask) { (void)w; (void)op; (void)mask; return ST_NEXT; }

Status op_MOV_B128(Warp *w, const Op *op, u32 mask) {
  REFS;
  const u64 *s = ROW(u64, 1);
  u64 *d = ROW(u64, 0);
  for (int l = 0; l < LANES; l++) if (mask >> l & 1) { d[2 * l] = s[2 * l]; d[2 * l + 1] = s[2 * l + 1]; }
  return ST_NEXT;
}

Status op_UNPACK_B64(Warp *w, const Op *op, u32 mask) {       // refs: low, high, source
  REFS;
  ALIGNED_ROW u32 low[LANES], high[LANES];
  const u64 *s = ROW(u64, 2);
  LANE_LOOP { low[l] = (u32)s[l]; high[l] = (u32)(s[l] >> 32); }
  write32(ROW(u32, 0), low, mask);
  write32(ROW(u32, 1), high, mask);
  return ST_NEXT;
}

Status op_UNPACK_B32(Warp *w, const Op *op, u32 mask) {
  REFS;
  ALIGNED_ROW u32 low[LANES], high[LANES];
  const u32 *s = ROW(u32, 2);
  LANE_LOOP { low[l] = s[l] & 0xffff; high[l] = s[l] >> 16; }
  write32(ROW(u32, 0), low, mask);
  write32(ROW(u32, 1), high, mask);
  return ST_NEXT;
}

// Any other packing: sub is the element's bytes, imm the row's. refs: row, elements (PACK); elements, row
// (UNPACK).
Status op_PACK(Warp *w, const Op *op, u32 mask) {
  REFS;
  const size_t element = op->sub, row = (size_t)op->imm, stride = element > 4 ? 8 : 4;
  uint8_t *d = ROW(uint8_t, 0);
  for (int l = 0; l < LANES; l++) if (mask >> l & 1)
      for (size_t k = 0; k < row / element; k++)
        memcpy(d + l * row + k * element, ROW(uint8_t, 1 + k) + l * stride, element);
  return ST_NEXT;
}
Status op_UNPACK(Warp *w, const Op *op, u32 mask) {
  REFS;
  const size_t element = op->sub, row = (size_t)op->imm, stride = element > 4 ? 8 : 4, count = row / element;
  const uint8_t *s = ROW(uint8_t, count);
  for (int l = 0; l < LANES; l++) if (mask >> l & 1)
    for (size_t k = 0; k < count; k++) {
      u64 value = 0;
      memcpy(&value, s + l * row + k * element, element);
      memcpy(ROW(uint8_t, k) + l * stride, &value, stride);
    }
  return ST_NEXT;
}

Status op_BFI_B32(Warp *w, const Op *op, u32 mask) {          // refs: d, inserted, into, position, length
  REFS;
  ALIGNED_ROW u32 out[LANES];
  const u32 *a = ROW(u32, 1), *b = ROW(u32, 2), *pos = ROW(u32, 3), *len = ROW(u32, 4);
  LANE_LOOP {
    const u32 p = pos[l] & 0xff, n = len[l] & 0xff;
    const u64 field = (n >= 32 ? 0xffffffffull : (1ull << n) - 1) << (p & 31);
    out[l] = p > 31 ? b[l] : (u32)((b[l] & ~field) | ((u64)a[l] << (p & 31) & field));
  }
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}
Status op_BFI_B64(Warp *w, const Op *op, u32 mask) {
  REFS;
  ALIGNED_ROW u64 out[LANES];
  const u64 *a = ROW(u64, 1), *b = ROW(u64, 2);
  const u32 *pos = ROW(u32, 3), *len = ROW(u32, 4);
  for (int l = 0; l < LANES; l++) {
    const u32 p = pos[l] & 0xff, n = len[l] & 0xff;
    const u64 field = n >= 64 ? ~0ull : (1ull << n) - 1;
    out[l] = p > 63 ? b[l] : (b[l] & ~(field << p)) | (a[l] & field) << p;
  }
  write64(ROW(u64, 0), out, mask);
  return ST_NEXT;
}

// PTX ISA, prmt: selectors of the modes f4e, b4e, rc8, ecl, ecr, rc16 (sub 1..6) for c = 0..3
Status op_PRMT_MODE(Warp *w, const Op *op, u32 mask) {
  static const u32 selectors[6][4] = {
    {0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123}, {0x0000, 0x1111, 0x2222, 0x3333},
    {0x3210, 0x3211, 0x3222, 0x3333}, {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  REFS;
  ALIGNED_ROW u32 out[LANES];
  const u32 *a = ROW(u32, 1), *b = ROW(u32, 2), *c = ROW(u32, 3);
  for (int l = 0; l < LANES; l++) out[l] = prmt(a[l], b[l], selectors[op->sub - 1][c[l] & 3]);
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}

Status op_LOP3(Warp *w, const Op *op, u32 mask) {             // sub: the truth table, bit 4a + 2b + c
  REFS;
  ALIGNED_ROW u32 out[LANES];
  const u32 *a = ROW(u32, 1), *b = ROW(u32, 2), *c = ROW(u32, 3), table = op->sub;
  LANE_LOOP {
    u32 v = 0;
    for (int k = 0; k < 8; k++)
      v |= (table >> k & 1 ? ~0u : 0) & (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) &
           (k & 1 ? c[l] : ~c[l]);
    out[l] = v;
  }
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}
