// What the interpreter's sources share: lane types, masked writes, modifiers of floating-point operations.
#ifndef CUTE_GEMMA_ALU_H
#define CUTE_GEMMA_ALU_H
#include <string.h>
#include "emu.h"

typedef uint16_t u16;
typedef int16_t s16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;
typedef float f32; typedef double f64;

typedef Status (*OpFn)(Warp *w, const Op *op, u32 mask);
extern const OpFn op_table[OP_COUNT];
#define OP(name) Status op_##name(Warp *w, const Op *op, u32 mask);
#define CONTROL(name)
#include "alu.def"
#undef OP
#undef CONTROL

// Modifiers in Op.sub, as lowering_alu.py packs them.
enum {
  FM_RZ = 1,
  FM_RM = 2,
  FM_RP = 3,
  FM_ROUND = 3, // rounding; 0 is to nearest even
  FM_FTZ = 4,
  FM_SAT = 8,
  FM_NAN = 16,
  FM_XORSIGN = 32,
  FM_ABS = 64,
  FM_BF16 = 128,
  FM_X2 = 256,
  FM_RELU = 512,
  FM_INTEGRAL = 1024,
  FM_SATFINITE = 2048,
  FM_RNA = 4096,
  FM_EDGE = 8192,
};

#define LANE_LOOP _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++)
#define ROW(T, i) ((T *)reg(w, r[i]))
#define REFS const int32_t *r = w->refs + op->args
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define CANONICAL_NAN 0x7fffffffu      // PTX ISA, "Floating Point Instructions": what f32 operations return
#define ALIGNED_ROW __attribute__((aligned(64)))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

static inline u32 bits_f32(f32 x) { u32 v; memcpy(&v, &x, 4); return v; }
static inline f32 f32_bits(u32 v) { f32 x; memcpy(&x, &v, 4); return x; }
static inline u64 bits_f64(f64 x) { u64 v; memcpy(&v, &x, 8); return v; }
static inline f64 f64_bits(u64 v) { f64 x; memcpy(&x, &v, 8); return x; }

static inline void blend32(u32 *d, const u32 *t, u32 mask) {
  LANE_LOOP d[l] = mask >> l & 1 ? t[l] : d[l];
}
static inline void blend64(u64 *d, const u64 *t, u32 mask) {
  LANE_LOOP d[l] = mask >> l & 1 ? t[l] : d[l];
}
static inline void write32(u32 *d, const u32 *t, u32 mask) {
  if (mask == FULL) memcpy(d, t, 4 * LANES); else blend32(d, t, mask);
}
static inline void write64(u64 *d, const u64 *t, u32 mask) {
  if (mask == FULL) memcpy(d, t, 8 * LANES); else blend64(d, t, mask);
}
static inline void write_pred(u32 *p, u32 value, u32 mask) { *p = (*p & ~mask) | (value & mask); }

// Subnormals become zero of the same sign.
static inline f32 flush(f32 x) { u32 v = bits_f32(x); return v & 0x7f800000 ? x : f32_bits(v & 0x80000000); }

// Rounding of the host's floating-point unit; a memory clobber keeps arithmetic on its side of the change.
#if defined(__SSE2__)
#include <xmmintrin.h>
static inline u32 round_enter(u32 mode) {
  u32 old = _mm_getcsr();
  static const u32 bits[4] = {0, 0x6000, 0x2000, 0x4000};      // RN, RZ, RM, RP in MXCSR[14:13]
  _mm_setcsr((old & ~0x6000u) | bits[mode & 3]);
  __asm__ volatile("" ::: "memory");
  return old;
}
static inline void round_leave(u32 old) { __asm__ volatile("" ::: "memory"); _mm_setcsr(old); }
#else
#include <fenv.h>
static inline u32 round_enter(u32 mode) {
  u32 old = (u32)fegetround();
  static const int modes[4] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  fesetround(modes[mode & 3]);
  __asm__ volatile("" ::: "memory");
  return old;
}
static inline void round_leave(u32 old) { __asm__ volatile("" ::: "memory"); fesetround((int)old); }
#endif

// Binary formats: value = (-1)^s * 1.m * 2^(e - bias); has_inf: the top exponent holds infinities and NaNs
// (else one NaN).
typedef struct { int exponent_bits, mantissa_bits, bias; u32 max_finite, nan; int has_inf; } Format;
typedef enum {
  FORMAT_F16,
  FORMAT_BF16,
  FORMAT_F32,
  FORMAT_F64,
  FORMAT_E4M3,
  FORMAT_E5M2,
  FORMAT_TF32
} FormatId;
extern const Format formats[];
u64 round_to_format(f64 x, FormatId id, u32 sub);      // sub: rounding, FM_RNA, FM_FTZ (f32), FM_SATFINITE
f64 format_to_f64(u64 bits, FormatId id);
f64 round_odd(f64 sum, f64 error); // sum + error to a double that rounds on as the exact value would
static inline f32 f16_to_f32(u32 h) { _Float16 x; u16 v = (u16)h; memcpy(&x, &v, 2); return (f32)x; }
static inline u32 widen_bf16(u32 h) { return h << 16; }

#endif
