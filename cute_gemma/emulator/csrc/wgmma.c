// wgmma, sm_90a. An operation belongs to the four warps of a warpgroup, which all issue it; each holds 16 of
// its 64 rows. Operations run in order, at the latest when a wgmma.wait_group of any of the warps covers
// them.
#include "half.h"
#include "hazard.h"
#include "operand.h"
#include <string.h>

#define MERGE 4                     // K steps that one product takes together

// Op.sub of WGMMA
enum { W_N = 63, W_A_REGISTERS = 64, W_TRANS_A = 128, W_TRANS_B = 256, W_NEGATE_A = 512, W_NEGATE_B = 1024,
      W_FORMAT = 11 };
// Refs: scale-d, B's descriptor, A's descriptor or four registers, then the accumulators.
#define FIRST_D(op) ((op)->sub & W_A_REGISTERS ? 6 : 3)

static uint32_t columns_of(const Op *op) { return (op->sub & W_N) * 8; }
static Format format_of(const Op *op) { return op->sub >> W_FORMAT & 3; }
static uint32_t element_of(const Op *op) { return format_of(op) == F_TF32 ? 4 : 2; }

// PTX ISA, "Matrix descriptor" of wgmma: [13:0] address/16, [29:16] leading offset/16, [45:32] stride
// offset/16, [51:49] base offset, [63:62] swizzle.
static const char *layout_of(uint64_t desc, int mn_major, uint32_t element, uint32_t first, Layout *l) {
  static const uint8_t MODE[4] = {0, 3, 2, 1};
  *l = (Layout){.start = (uint32_t)(desc & 0x3fff) << 4, .leading = (uint32_t)(desc >> 16 & 0x3fff) << 4,
                .first = first,
                .stride = (uint32_t)(desc >> 32 & 0x3fff) << 4, .mn_major = (uint32_t)mn_major,
                    .element = element, .swizzle = MODE[desc >> 62]};
  return desc >> 49 & 7 ? "has a base offset, which is not implemented" : NULL;
}

static void mark(Warp *w, const Op *op, int value) {
  const int32_t *refs = w->launch->program->refs + op->args;
  uint32_t from = op->sub & W_A_REGISTERS ? 2 : 3;
  for (uint32_t i = from; i < op->nargs; i++) {
    if (refs[i] < 0) continue;
    if (value) state(w)->pending[refs[i] / 64] |= 1ull << (refs[i] % 64);
    else state(w)->pending[refs[i] / 64] &= ~(1ull << (refs[i] % 64));
  }
}

// All four warps complete an operation together: one component a warpgroup.
static uint16_t group_comp(const Warp *w) { return (uint16_t)(warp_comp(w, C_WGMMA) - w->id % 4); }

// Each warp checks its rows of A; the first one checks B, which they share.
static Status check(Warp *w, const Op *op, Async *a) {
  Layout l;
  const uint32_t element = element_of(op), depth = 32 / element, first = w->id % 4 * 16;
  const char *wrong = op->sub & W_A_REGISTERS ? NULL : layout_of(a->wgmma.a, op->sub & W_TRANS_A, element,
                                                                 first, &l);
  if (wrong) return fault(w, op, FAULT_DESCRIPTOR, "the descriptor of A %s", wrong);
  Agent x = agent_of(w, op);
  x.comp = group_comp(w);
  x.epoch = state(w)->wgmma.open;
  x.async = 1;
  if (!(op->sub & W_A_REGISTERS) && !operand_check(w->cta, &l, 16, depth, "A", &x)) return ST_FAULT;
  if ((wrong = layout_of(a->wgmma.b, op->sub & W_TRANS_B, element, 0, &l)))
    return fault(w, op, FAULT_DESCRIPTOR, "the descriptor of B %s", wrong);
  return w->id % 4 || operand_check(w->cta, &l, columns_of(op), depth, "B", &x) ? ST_NEXT : ST_FAULT;
}

// ---------------------------------------------------------------- the product
static _Thread_local float panel_a[MERGE * 16 * 16] __attribute__((aligned(64)));
static _Thread_local float panel_b[MERGE * 16 * 256] __attribute__((aligned(64)));

static void gather_a_registers(float *out, Warp *w, const int32_t *refs, Format f, int negate) {
  for (uint32_t r = 0; r < 4; r++)
    for (uint32_t l = 0; l < LANES; l++) {
      uint32_t v = REG32(w, refs[r])[l], row = l / 4 + 8 * (r % 2);
      if (f == F_TF32) {                       // k = lane % 4, then 4 more
        uint32_t bits = v & 0xffffe000u;
        memcpy(&out[(l % 4 + 4 * (r / 2)) * 16 + row], &bits, 4);
        continue;
      }
      for (uint32_t half = 0; half < 2; half++)
        out[(l % 4 * 2 + half + 8 * (r / 2)) * 16 + row] = half_value((uint16_t)(v >> 16 * half), f == F_BF16);
    }
  const uint32_t depth = f == F_TF32 ? 8 : 16;
  for (uint32_t i = 0; negate && i < depth * 16; i++) out[i] *= -1.0f;
}

static int mergeable(const Warp *w, const Async *a, const Async *b) {
  const int32_t *refs = w->launch->program->refs, n = (int32_t)columns_of(a->op) / 2;
  const uint32_t same = W_N | 3u << W_FORMAT | W_TRANS_A | W_TRANS_B | W_NEGATE_A | W_NEGATE_B |
      W_A_REGISTERS;
  return b && b->wgmma.accumulate && (a->op->sub & same) == (b->op->sub & same) &&
         !memcmp(refs + a->op->args + FIRST_D(a->op), refs + b->op->args + FIRST_D(b->op),
                 (size_t)n * sizeof *refs);
}

static void gather_a(Warp *w, Async *const *step, uint32_t steps) {
  const Op *op = step[0]->op;
  const Format f = format_of(op);
  const uint32_t depth = 32 / element_of(op);
  for (uint32_t i = 0; i < steps; i++) {
    float *a = panel_a + (size_t)i * depth * 16;
    if (op->sub & W_A_REGISTERS) {
      gather_a_registers(a, w, w->launch->program->refs + step[i]->op->args + 2, f, op->sub & W_NEGATE_A);
      continue;
    }
    Layout l;
    layout_of(step[i]->wgmma.a, op->sub & W_TRANS_A, element_of(op), w->id % 4 * 16, &l);
    unpack_operand(a, 16, 1, w->cta->smem, &l, f, 16, op->sub & W_NEGATE_A);
  }
}

static void gather_b(const Cta *cta, Async *const *step, uint32_t steps) {
  const Op *op = step[0]->op;
  const uint32_t n = columns_of(op), depth = 32 / element_of(op);
  for (uint32_t i = 0; i < steps; i++) {
    Layout l;
    layout_of(step[i]->wgmma.b, op->sub & W_TRANS_B, element_of(op), 0, &l);
    unpack_operand(panel_b + (size_t)i * depth * n, n, 1, cta->smem, &l, format_of(op), n,
                   op->sub & W_NEGATE_B);
  }
}

static void multiply(Warp *w, Async *const *step, uint32_t steps) {
  const Op *op = step[0]->op;
  const uint32_t n = columns_of(op), depth = 32 / element_of(op);
  gather_a(w, step, steps);
  float *d[128];
  const int32_t *refs = w->launch->program->refs + op->args + FIRST_D(op);
  for (uint32_t r = 0; r < n / 2; r++) d[r] = REGF(w, refs[r]);
  fragment_product(d, panel_a, panel_b, n, steps * depth, (int)step[0]->wgmma.accumulate);
  w->launch->result->mma_flops += 2ull * 16 * n * depth * steps;
}

// Runs the next `count` operations of the warpgroup that `first` leads; each warp has queued as many.
static Status run_operations(Warp *first, uint32_t count) {
  while (count) {
    Async *step[MERGE] = {state(first)->wgmma_head};
    uint32_t n = 1;
    while (n < MERGE && n < count && mergeable(first, step[0], step[n - 1]->next))
      step[n] = step[n - 1]->next, n++;
    gather_b(first->cta, step, n);
    for (uint32_t i = 0; i < 4; i++) {
      WarpState *s = state(first + i);
      Async *own[MERGE];
      for (uint32_t k = 0; k < n; k++) {
        own[k] = k ? own[k - 1]->next : s->wgmma_head;
        if (own[k]->op != step[k]->op || own[k]->wgmma.b != step[k]->wgmma.b)
          return fault(first + i, own[k]->op, FAULT_ILLEGAL, "the warps of a warpgroup do not issue the same "
                       "wgmma.mma_async");
      }
      multiply(first + i, own, n);
    }
    for (uint32_t i = 0; i < 4; i++)
      for (uint32_t k = 0; k < n; k++) {
        WarpState *s = state(first + i);
        Async *done = s->wgmma_head;
        s->wgmma_head = done->next;
        if (!done->next) s->wgmma_tail = NULL;
        s->wgmma_queued--;
        if (i) async_free(first->launch, done);
      }
    for (uint32_t k = 0; k < n; k++) async_free(first->launch, step[k]);
    count -= n;
  }
  return ST_NEXT;
}

static Warp *leader(Warp *w) { return w - w->id % 4; }

static uint32_t queued_by_all(Warp *w) {
  uint32_t n = FULL;
  for (uint32_t i = 0; i < 4; i++)
    if (state(leader(w) + i)->wgmma_queued < n) n = state(leader(w) + i)->wgmma_queued;
  return n;
}

// Without checks: results arrive when they are used, if the other warps have come as far.
Status wgmma_arrive(Warp *w) {
  if (run_operations(leader(w), queued_by_all(w)) == ST_FAULT) return ST_FAULT;
  if (!state(w)->wgmma_queued)
    memset(state(w)->pending, 0, (w->launch->program->reg_bytes / SLOT / 64 + 1) * sizeof(uint64_t));
  return ST_NEXT;
}

// ---------------------------------------------------------------- instructions
Status exec_wgmma(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t lane = first_lane(mask);
  WarpState *s = state(w);
  if ((w->id | 3) >= w->launch->nwarps)
    return fault(w, op, FAULT_ILLEGAL, "wgmma.mma_async needs four warps, and warp %u has no full warpgroup",
                 w->id);
  if (!s->wgmma_fenced)
    return fault(w, op, FAULT_ASYNC_REGISTER, "wgmma.mma_async without a wgmma.fence before it: its "
                 "registers' values are not ordered before it");
  if (!uniform(w, op, refs[1], mask, 64, "the descriptor of B") ||
      (!(op->sub & W_A_REGISTERS) && !uniform(w, op, refs[2], mask, 64, "the descriptor of A")))
    return ST_FAULT;
  Async *a = async_new(w->launch, A_WGMMA, w, op);
  a->wgmma.a = op->sub & W_A_REGISTERS ? 0 : REG64(w, refs[2])[lane];
  a->wgmma.b = REG64(w, refs[1])[lane];
  a->wgmma.accumulate = w->pred[refs[0]] >> lane & 1;
  a->wgmma.group = s->wgmma.open;
  s->wgmma.used++;
  if (check(w, op, a) == ST_FAULT) return ST_FAULT;
  if (s->wgmma_tail) s->wgmma_tail->next = a; else s->wgmma_head = a;
  a->next = NULL;
  s->wgmma_tail = a;
  s->npending++;
  s->wgmma_queued++;
  mark(w, op, 1);
  const uint32_t policy = w->launch->desc->policy;
  return policy == 0 || (policy == 2 && next_random(w->launch) % 8 == 0) ? run_operations(leader(w),
      queued_by_all(w)) : ST_NEXT;
}

Status exec_wgmma_fence(Warp *w, const Op *op, uint32_t mask) {
  (void)op, (void)mask;
  state(w)->wgmma_fenced = 1;
  return ST_NEXT;
}

Status exec_wgmma_commit(Warp *w, const Op *op, uint32_t mask) {
  (void)op, (void)mask;
  state(w)->wgmma.open++;
  state(w)->wgmma.used = 0;
  wake(cluster_of(w), w->cta, WAIT_WGMMA, NULL, w->id / 4);
  return ST_NEXT;
}

// wgmma.wait_group imm
Status exec_wgmma_wait(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  WarpState *s = state(w);
  Groups *g = &s->wgmma;
  if (g->open - 1 <= (uint32_t)op->imm) return ST_NEXT;
  const uint32_t last = g->open - 1 - (uint32_t)op->imm;
  uint32_t count = 0;
  for (Async *a = s->wgmma_head; a && a->wgmma.group <= last; a = a->next) count++;
  for (uint32_t i = 0; count && i < 4; i++)
    if (state(leader(w) + i)->wgmma.open <= last)
      return block(w, op, &(Waiting){.kind = WAIT_WGMMA, .id = w->id / 4});
  if (run_operations(leader(w), count) == ST_FAULT) return ST_FAULT;
  if (last > g->done) g->done = last;
  if (w->launch->hazards) clock_g(cluster_of(w), s->clock)[group_comp(w)] = g->done;
  // registers stay in flight for the groups that remain (of which some may have run already)
  memset(s->pending, 0, (w->launch->program->reg_bytes / SLOT / 64 + 1) * sizeof *s->pending);
  s->npending = 0;
  for (Async *a = s->wgmma_head; a; a = a->next) {
    mark(w, a->op, 1);
    s->npending++;
  }
  return ST_NEXT;
}
