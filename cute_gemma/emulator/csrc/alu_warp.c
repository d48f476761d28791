// Operations across the lanes of a warp, and predicates.
#include <math.h>
#include "alu.h"

Status op_WARPSYNC(Warp *w, const Op *op, u32 mask) {
  (void)op;
  engine_warp_sync(w, mask);
  return ST_NEXT;
}

Status op_TIME(Warp *w, const Op *op, u32 mask) {      // sub: 0 low half, 1 high half, 2 all 64 bits
  REFS;
  const u64 now = engine_time(w);
  ALIGNED_ROW u64 wide[LANES];
  ALIGNED_ROW u32 half[LANES];
  for (int l = 0; l < LANES; l++) { wide[l] = now; half[l] = (u32)(op->sub == 1 ? now >> 32 : now); }
  if (op->sub == 2) write64(ROW(u64, 0), wide, mask); else write32(ROW(u32, 0), half, mask);
  return ST_NEXT;
}

// PTX ISA, shfl.sync. refs: member mask, d, a, b, c, in-range predicate (when sub).
typedef enum { IDX, UP, DOWN, BFLY } ShflMode;
static inline Status shuffle(Warp *w, const Op *op, u32 mask, ShflMode mode) {
  REFS;
  ALIGNED_ROW u32 out[LANES];
  const u32 *a = ROW(u32, 2), *pb = ROW(u32, 3), *pc = ROW(u32, 4);
  u32 in_range = 0;
  for (int l = 0; l < LANES; l++) {
    const int b = (int)(pb[l] & 31), c = (int)(pc[l] & 31), segment = (int)(pc[l] >> 8 & 31);
    const int max = (l & segment) | (c & ~segment), min = l & segment;
    int j = mode == IDX ? min | (b & ~segment) : mode == UP ? l - b : mode == DOWN ? l + b : l ^ b;
    const int ok = mode == UP ? j >= max : j <= max;
    if (!ok) j = l;
    if (mask >> l & 1 && !(mask >> j & 1))
      return fault(w, op, FAULT_DIVERGENCE, "lane %d takes the value of lane %d, which does not take part",
                   l, j);
    in_range |= (u32)ok << l;
    out[l] = a[j & 31];
  }
  write32(ROW(u32, 1), out, mask);
  if (op->sub) write_pred(w->pred + r[5], in_range, mask);
  return ST_NEXT;
}
Status op_SHFL_IDX(Warp *w, const Op *op, u32 mask) { return shuffle(w, op, mask, IDX); }
Status op_SHFL_UP(Warp *w, const Op *op, u32 mask) { return shuffle(w, op, mask, UP); }
Status op_SHFL_DOWN(Warp *w, const Op *op, u32 mask) { return shuffle(w, op, mask, DOWN); }
Status op_SHFL_BFLY(Warp *w, const Op *op, u32 mask) { return shuffle(w, op, mask, BFLY); }

static void fill32(Warp *w, int32_t ref, u32 value, u32 mask) {
  u32 *d = REG32(w, ref);
  for (int l = 0; l < LANES; l++) if (mask >> l & 1) d[l] = value;
}

static inline u32 members(const Warp *w, const Op *op, u32 mask) {
  return REG32(w, w->refs[op->args])[__builtin_ctz(mask)] & mask;
}

// vote: refs member mask, d, source predicate
Status op_VOTE_ALL(Warp *w, const Op *op, u32 mask) {
  REFS;
  const u32 lanes = members(w, op, mask);
  write_pred(w->pred + r[1], (w->pred[r[2]] & lanes) == lanes ? FULL : 0, mask);
  return ST_NEXT;
}
Status op_VOTE_ANY(Warp *w, const Op *op, u32 mask) {
  REFS;
  write_pred(w->pred + r[1], w->pred[r[2]] & members(w, op, mask) ? FULL : 0, mask);
  return ST_NEXT;
}
Status op_VOTE_UNI(Warp *w, const Op *op, u32 mask) {
  REFS;
  const u32 lanes = members(w, op, mask), yes = w->pred[r[2]] & lanes;
  write_pred(w->pred + r[1], !yes || yes == lanes ? FULL : 0, mask);
  return ST_NEXT;
}
Status op_VOTE_BALLOT(Warp *w, const Op *op, u32 mask) {
  REFS;
  fill32(w, r[1], w->pred[r[2]] & members(w, op, mask), mask);
  return ST_NEXT;
}
Status op_ACTIVEMASK(Warp *w, const Op *op, u32 mask) { REFS; fill32(w, r[0], mask, mask); return ST_NEXT; }

// match: refs member mask, d, a, predicate (MATCH_ALL with sub bit 1). sub bit 0: a has 64 bits.
static inline u64 lane_value(const Warp *w, const Op *op, int32_t ref, int l) {
  return op->sub & 1 ? REG64(w, ref)[l] : REG32(w, ref)[l];
}
Status op_MATCH_ANY(Warp *w, const Op *op, u32 mask) {
  REFS;
  const u32 lanes = members(w, op, mask);
  ALIGNED_ROW u32 out[LANES] = {0};
  for (int l = 0; l < LANES; l++)
    for (int k = 0; k < LANES; k++)
      if (lanes >> k & 1 && lane_value(w, op, r[2], l) == lane_value(w, op, r[2], k)) out[l] |= 1u << k;
  write32(ROW(u32, 1), out, mask);
  return ST_NEXT;
}
Status op_MATCH_ALL(Warp *w, const Op *op, u32 mask) {
  REFS;
  const u32 lanes = members(w, op, mask);
  const u64 first = lane_value(w, op, r[2], __builtin_ctz(lanes));
  int same = 1;
  for (int l = 0; l < LANES; l++) if (lanes >> l & 1 && lane_value(w, op, r[2], l) != first) same = 0;
  fill32(w, r[1], same ? lanes : 0, mask);
  if (op->sub & 2) write_pred(w->pred + r[3], same ? FULL : 0, mask);
  return ST_NEXT;
}

// redux: refs member mask, d, a
#define REDUX(name, T, expr)                                                                                 \
  Status op_REDUX_##name(Warp *w, const Op *op, u32 mask) {                                                  \
    REFS;                                                                                                    \
    const u32 lanes = members(w, op, mask);                                                                  \
    const T *s = ROW(T, 2);                                                                                  \
    T a = s[__builtin_ctz(lanes)];                                                                           \
    for (int l = __builtin_ctz(lanes) + 1; l < LANES; l++)                                                   \
      if (lanes >> l & 1) {                                                                                  \
        const T b = s[l];                                                                                    \
        a = (expr);                                                                                          \
      }                                                                                                      \
    fill32(w, r[1], (u32)a, mask);                                                                           \
    return ST_NEXT;                                                                                          \
  }
REDUX(ADD, u32, a + b)
REDUX(AND, u32, a & b)
REDUX(OR, u32, a | b)
REDUX(XOR, u32, a ^ b)
REDUX(MIN_U32, u32, MIN(a, b))
REDUX(MAX_U32, u32, MAX(a, b))
REDUX(MIN_S32, s32, MIN(a, b))
REDUX(MAX_S32, s32, MAX(a, b))

// PTX ISA, redux.sync .f32: .abs takes magnitudes first; NaN inputs are passed over unless .NaN.
static Status redux_f32(Warp *w, const Op *op, u32 mask, int max) {
  REFS;
  const u32 lanes = members(w, op, mask);
  const f32 *s = ROW(f32, 2);
  f32 best = NAN;
  int nan = 0;
  for (int l = 0; l < LANES; l++) {
    if (!(lanes >> l & 1)) continue;
    const f32 v = op->sub & FM_ABS ? fabsf(s[l]) : s[l];
    if (v != v) { nan = 1; continue; }
    const int less = v < best || (v == best && signbit(v) && !signbit(best));
    const int more = v > best || (v == best && !signbit(v) && signbit(best));
    if (best != best || (max ? more : less)) best = v;
  }
  if (best != best || (nan && op->sub & FM_NAN)) fill32(w, r[1], CANONICAL_NAN, mask);
  else fill32(w, r[1], bits_f32(best), mask);
  return ST_NEXT;
}
Status op_REDUX_MIN_F32(Warp *w, const Op *op, u32 mask) { return redux_f32(w, op, mask, 0); }
Status op_REDUX_MAX_F32(Warp *w, const Op *op, u32 mask) { return redux_f32(w, op, mask, 1); }

// elect.sync: the lowest lane, as the hardware chooses (the ISA leaves it open). refs: member mask, d,
// predicate.
Status op_ELECT(Warp *w, const Op *op, u32 mask) {
  REFS;
  const u32 leader = (u32)__builtin_ctz(members(w, op, mask));
  fill32(w, r[1], leader, mask);
  write_pred(w->pred + r[2], 1u << leader, mask);
  return ST_NEXT;
}

// ---------------------------------------------------------------- predicates
#define PREDICATE(name, expr)                                                    \
  Status op_##name(Warp *w, const Op *op, u32 mask) {                            \
    REFS;                                                                        \
    const u32 a = w->pred[r[1]], b = w->pred[r[op->nargs - 1]];                  \
    (void)b;                                                                     \
    write_pred(w->pred + r[0], (expr), mask);                                    \
    return ST_NEXT;                                                              \
  }
PREDICATE(PMOV, a)
PREDICATE(PNOT, ~a)
PREDICATE(PAND, a & b)
PREDICATE(POR, a | b)
PREDICATE(PXOR, a ^ b)

Status op_SELP_B32(Warp *w, const Op *op, u32 mask) {  // refs: d, a, b, predicate
  REFS;
  ALIGNED_ROW u32 out[LANES];
  const u32 *a = ROW(u32, 1), *b = ROW(u32, 2), p = w->pred[r[3]];
  LANE_LOOP out[l] = p >> l & 1 ? a[l] : b[l];
  write32(ROW(u32, 0), out, mask);
  return ST_NEXT;
}
Status op_SELP_B64(Warp *w, const Op *op, u32 mask) {
  REFS;
  ALIGNED_ROW u64 out[LANES];
  const u64 *a = ROW(u64, 1), *b = ROW(u64, 2);
  const u32 p = w->pred[r[3]];
  LANE_LOOP out[l] = p >> l & 1 ? a[l] : b[l];
  write64(ROW(u64, 0), out, mask);
  return ST_NEXT;
}
