// atom, red, and the copies of cp.async (the ones that are not bulk).
#include "half.h"
#include "hazard.h"
#include "global.h"
#include "memory.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------- atom, red
enum { AT_ADD, AT_MIN, AT_MAX, AT_AND, AT_OR, AT_XOR, AT_EXCH, AT_CAS, AT_INC, AT_DEC };
enum { TY_UNSIGNED, TY_SIGNED, TY_F32, TY_F64, TY_F16, TY_BF16 };

// PTX ISA, "atom": .add.f32 in global memory flushes subnormal numbers to zeros of their sign.
static float flushed(float x) {
  return x < 0x1p-126f && x > -0x1p-126f ? copysignf(0, x) : x;
}

static float combine_float(float a, float b, uint32_t what) {
  if (what == AT_ADD) return a + b;
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return (what == AT_MIN) == (signbit(a) != 0) ? a : b;      // -0 is below +0
  return what == AT_MIN ? (a < b ? a : b) : (a > b ? a : b);
}

static uint64_t combine_halves(uint64_t x, uint64_t y, uint32_t what, uint32_t size, int bf16) {
  uint64_t r = 0;
  for (uint32_t i = 0; i < size / 2; i++) {
    float v = combine_float(half_value((uint16_t)(x >> 16 * i), bf16), half_value((uint16_t)(y >> 16 * i),
        bf16), what);
    r |= (uint64_t)half_round(v, bf16) << 16 * i;
  }
  return r;
}

static uint64_t combine(uint64_t x, uint64_t y, uint64_t compare, uint32_t what, uint32_t type,
                        uint32_t size, int ftz) {
  if (what == AT_EXCH) return y;
  if (what == AT_CAS) return x == compare ? y : x;
  if (type == TY_F16 || type == TY_BF16) return combine_halves(x, y, what, size, type == TY_BF16);
  if (type == TY_F32) {
    float a, b;
    memcpy(&a, &x, 4), memcpy(&b, &y, 4);
    a = ftz ? flushed(flushed(a) + flushed(b)) : a + b;
    uint64_t r = 0;
    memcpy(&r, &a, 4);
    return r;
  }
  if (type == TY_F64) {
    double a, b;
    memcpy(&a, &x, 8), memcpy(&b, &y, 8);
    a += b;
    memcpy(&x, &a, 8);
    return x;
  }
  int64_t a = size == 8 ? (int64_t)x : (int32_t)x, b = size == 8 ? (int64_t)y : (int32_t)y;
  switch (what) {
    case AT_ADD: return x + y;
    case AT_AND: return x & y;
    case AT_OR: return x | y;
    case AT_XOR: return x ^ y;
    case AT_INC: return x >= y ? 0 : x + 1;
    case AT_DEC: return x == 0 || x > y ? y : x - 1;
    case AT_MIN: return type == TY_SIGNED ? (uint64_t)(a < b ? a : b) : (x < y ? x : y);
    default: return type == TY_SIGNED ? (uint64_t)(a > b ? a : b) : (x > y ? x : y);
  }
}

static uint64_t get(const Warp *w, int32_t ref, uint32_t l, uint32_t size) {
  return size == 8 ? REG64(w, ref)[l] : size == 2 ? REG32(w, ref)[l] & 0xffff : REG32(w, ref)[l];
}

// sub [1:0] space, [4:2] log2 of the size, [8:5] elements, [9] acquire, [10] release, [14:11] operation,
// [17:15] type, [18] result wanted, [19] .cta or .cluster scope.
// Refs: address, (the value compared with,) values, results.
Status exec_atom(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t sub = op->sub, size = 1u << (sub >> 2 & 7), count = sub >> 5 & 15, what = sub >> 11 & 15,
      type = sub >> 15 & 7;
  const int32_t *value = refs + 1 + (what == AT_CAS), *out = value + count;
  Resolved r;
  if (!resolve(w, op, refs[0], mask, size * count, 1, 1, &r)) return ST_FAULT;
  if (w->launch->hazards) {
    const uint32_t order = sub >> 19 & 1 ? NARROW : WIDE;
    strong_write(w, op, &r, mask, sub >> 10 & 1 ? order : WITH_FENCE);
    strong_read(w, op, &r, mask, sub >> 9 & 1 ? order : WITH_FENCE);
  }
  EACH_LANE(l, mask)
    for (uint32_t j = 0; j < count; j++) {
      uint64_t old = 0, new;
      memcpy(&old, r.at[l] + j * size, size);
      new = combine(old, get(w, value[j], l, size), what == AT_CAS ? get(w, refs[1], l, size) : 0, what,
                    type, size, !is_shared(op, &r, l));
      memcpy(r.at[l] + j * size, &new, size);
      if (new != old) made_progress(w->launch);
      if (!(sub >> 18 & 1)) continue;
      if (size == 8) REG64(w, out[j])[l] = old;
      else REG32(w, out[j])[l] = (uint32_t)old;
    }
  return sub >> 18 & 1 && (sub & 3) != SPACE_SHARED ? ST_YIELD : ST_NEXT;    // its result may be a poll
}

// ---------------------------------------------------------------- cp.async
typedef struct { uint32_t mask; uint32_t to[LANES], bytes[LANES]; uint64_t from[LANES]; } CpLanes;

// cp.async.ca/.cg.shared.global. sub [4:0] size (4, 8, 16), [5] source size given. Refs: destination, source,
// source size.
// imm: offset of the destination, imm2: of the source. Bytes past the source size are zero.
Status exec_cp_async(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t size = op->sub & 31;
  CpLanes *lanes = malloc(sizeof *lanes);
  lanes->mask = mask;
  Agent x = agent_of(w, op);
  x.comp = (uint16_t)warp_comp(w, C_CP_ASYNC);
  x.epoch = state(w)->cp.open;
  EACH_LANE(l, mask) {
    uint32_t to = REG32(w, refs[0])[l] + (uint32_t)op->imm;
    uint64_t from = REG64(w, refs[1])[l] + (uint64_t)op->imm2;
    uint32_t bytes = op->sub & 32 ? REG32(w, refs[2])[l] : size;
    Status bad = ST_NEXT;
    if (!shared_target(w, op, to, size, size, 0)) bad = ST_FAULT;
    else if (from & (size - 1))
      bad = fault(w, op, FAULT_MISALIGNED, "lane %u: global address 0x%llx is no multiple of %u", l,
                  (unsigned long long)from, size);
    else if (bytes > size)
      bad = fault(w, op, FAULT_ILLEGAL, "cp.async with source size %u of %u", bytes, size);
    else if (w->launch->hazards && !smem_touch(w->cta, to & SMEM_OFFSET, size, 1, &x)) bad = ST_FAULT;
    else if (bytes && !global_order(&x, from, bytes, 0)) bad = ST_FAULT;
    if (bad == ST_FAULT) {
      free(lanes);
      return bad;
    }
    lanes->to[l] = to & SMEM_OFFSET, lanes->from[l] = from, lanes->bytes[l] = bytes;
  }
  Async *a = async_new(w->launch, A_CP_ASYNC, w, op);
  a->copy.buffer = (uint8_t *)lanes;
  a->copy.group = state(w)->cp.open;
  a->copy.bytes = size;
  state(w)->cp.used++;
  return async_issue(a);
}

Status run_cp_async(Async *a) {
  CpLanes *lanes = (CpLanes *)a->copy.buffer;
  Status s = ST_NEXT;
  async_unlink(a);
  EACH_LANE(l, lanes->mask) {
    if (s == ST_FAULT) break;
    uint8_t *to = a->cta->smem + lanes->to[l];
    memset(to, 0, a->copy.bytes);
    if (!lanes->bytes[l]) continue;
    if (!global_check_async(a, lanes->from[l], lanes->bytes[l], 0)) s = ST_FAULT;
    else memcpy(to, (const void *)lanes->from[l], lanes->bytes[l]);
  }
  free(lanes);
  async_free(a->warp->launch, a);
  return s;
}

static Status finish_cp(Warp *w, uint32_t last) {
  for (Async *a = cluster_of(w)->queue_head, *next; a; a = next) {
    next = a->next;
    if (a->kind == A_CP_ASYNC && a->warp == w && a->copy.group <= last && run_cp_async(a) == ST_FAULT)
      return ST_FAULT;
  }
  if (last > state(w)->cp.done) state(w)->cp.done = last;
  return ST_NEXT;
}

Status exec_cp_commit(Warp *w, const Op *op, uint32_t mask) {
  (void)op, (void)mask;
  state(w)->cp.open++;
  state(w)->cp.used = 0;
  return ST_NEXT;
}

// cp.async.wait_group imm; sub 1: cp.async.wait_all.
Status exec_cp_wait(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  Groups *g = &state(w)->cp;
  if (op->sub & 1) {
    g->open++;
    g->used = 0;
  }
  if (g->open - 1 <= (uint32_t)op->imm) return ST_NEXT;
  const uint32_t last = g->open - 1 - (uint32_t)op->imm;
  if (finish_cp(w, last) == ST_FAULT) return ST_FAULT;
  if (w->launch->hazards) {
    uint32_t *clock = clock_g(cluster_of(w), state(w)->clock);
    if (clock[warp_comp(w, C_CP_ASYNC)] < last) clock[warp_comp(w, C_CP_ASYNC)] = last;
  }
  return ST_NEXT;
}

// cp.async.mbarrier.arrive[.noinc]. sub 0: noinc. Refs: mbarrier. imm: offset. The arrival follows all
// earlier cp.async of the thread.
Status exec_cp_arrive(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  Groups *g = &state(w)->cp;
  if (g->used) {
    g->open++;
    g->used = 0;
  }
  if (finish_cp(w, g->open - 1) == ST_FAULT) return ST_FAULT;
  ClockId clock = NO_CLOCK;
  if (w->launch->hazards) {
    clock = clock_snapshot(w);
    clock_g(cluster_of(w), clock)[warp_comp(w, C_CP_ASYNC)] = g->open - 1;
  }
  EACH_LANE(l, mask) {
    uint32_t address = REG32(w, refs[0])[l] + (uint32_t)op->imm;
    Cta *cta = shared_target(w, op, address, 8, 8, 0);
    Mbarrier *b = cta ? mbar_find(w, op, cta, address & SMEM_OFFSET) : NULL;
    if (!b) return ST_FAULT;
    if (!(op->sub & 1)) b->pending++;           // without noinc the arrival first raises what is pending
    if (mbar_arrive(w, op, cta, address & SMEM_OFFSET, 1, 0, clock, 0) == ST_FAULT) return ST_FAULT;
  }
  clock_free(cluster_of(w), clock);
  return ST_NEXT;
}
