// Tensor memory and the fifth-generation tensor core: allocation, loads and stores, matrix products, commits.
#include "hazard.h"
#include "operand.h"
#include <stdlib.h>
#include <string.h>

#define MERGE 4                     // K steps that one product takes together

// ---------------------------------------------------------------- allocation
static int allocated(const Cta *cta, uint32_t column, uint32_t count) {
  for (uint32_t i = column; i < column + count; i++)
    if (i >= TMEM_COLUMNS || !(cta->tmem_allocated[i / 64] >> (i % 64) & 1)) return 0;
  return 1;
}

static void set_allocated(Cta *cta, uint32_t column, uint32_t count, int value) {
  for (uint32_t i = column; i < column + count; i++) {
    if (value) cta->tmem_allocated[i / 64] |= 1ull << (i % 64);
    else cta->tmem_allocated[i / 64] &= ~(1ull << (i % 64));
    if (value && cta->tmem_shadow)
      for (uint32_t q = 0; q < 4; q++) cta->tmem_shadow[i * 4 + q] = (Shadow){.gen = cta->gen};
  }
}

static int tmem_make(Cta *cta) {
  if (!cta->tmem) {
    size_t bytes = (size_t)TMEM_COLUMNS * TMEM_LANES * sizeof *cta->tmem;
    cta->tmem = aligned_alloc(4096, bytes);
    memset(cta->tmem, 0, bytes);
    if (cta->launch->hazards) cta->tmem_shadow = calloc(TMEM_COLUMNS * 4, sizeof *cta->tmem_shadow);
  }
  return cta->tmem != NULL;
}

// All tcgen05 operations of a kernel name one cta_group.
static int same_group(Warp *w, const Op *op, uint32_t pair) {
  if (!w->cta->tmem_group || w->cta->tmem_group == 1 + pair) return 1;
  fault(w, op, FAULT_TMEM, "cta_group::%u after cta_group::%u in the same kernel", 1 + pair,
        w->cta->tmem_group);
  return 0;
}

static int power_of_two_columns(uint32_t n) { return n >= 32 && n <= TMEM_COLUMNS && !(n & (n - 1)); }

// Issue granularity: both CTAs of a pair allocate together, and the first waits until the other has.
static Status alloc_with_peer(Warp *w, const Op *op) {
  Cta *cta = w->cta;
  const uint32_t peer = cta->rank ^ 1;
  const int alone = !(op->sub & 1) || peer >= w->launch->cluster_size;
  const int done = alone || cluster_of(w)->ctas[peer].tmem_allocs >= cta->tmem_allocs;
  cta->tmem_waiting = done ? 0 : 1 + w->id;
  return done ? ST_NEXT : block(w, op, &(Waiting){.kind = WAIT_TMEM});
}

// tcgen05.alloc. sub 1: cta_group::2. Refs: shared address that receives the TMEM address, columns. imm:
// offset.
Status exec_tc_alloc(Warp *w, const Op *op, uint32_t mask) {
  if (w->cta->tmem_waiting == 1 + w->id) return alloc_with_peer(w, op);
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t lane = first_lane(mask), columns = REG32(w, refs[1])[lane], to = REG32(w, refs[0])[lane] +
      (uint32_t)op->imm;
  Cta *cta = w->cta, *target = shared_target(w, op, to, 4, 4, 0);
  if (!target || !uniform(w, op, refs[0], mask, 32, "the address") ||
      !uniform(w, op, refs[1], mask, 32, "the columns")) return ST_FAULT;
  if (!power_of_two_columns(columns))
    return fault(w, op, FAULT_TMEM, "tcgen05.alloc of %u columns: a power of two from 32 to 512 is wanted",
                 columns);
  if (cta->relinquished)
    return fault(w, op, FAULT_TMEM, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
  if (!same_group(w, op, op->sub & 1)) return ST_FAULT;
  if (cta->tmem_last_columns && columns > cta->tmem_last_columns)
    return fault(w, op, FAULT_TMEM, "tcgen05.alloc of %u columns after one of %u: later ones must not be "
                 "larger", columns, cta->tmem_last_columns);
  tmem_make(cta);
  uint32_t column = 0;
  for (; column < TMEM_COLUMNS; column += columns) {
    uint32_t used = 0;
    for (uint32_t i = column; i < column + columns; i++)
      used |= (uint32_t)(cta->tmem_allocated[i / 64] >> (i % 64) & 1);
    if (!used) break;
  }
  if (column == TMEM_COLUMNS) return block(w, op, &(Waiting){.kind = WAIT_TMEM});
  cta->tmem_group = 1 + (op->sub & 1);
  cta->tmem_last_columns = columns;
  set_allocated(cta, column, columns, 1);
  cta->tmem_alloc_size[column] = (uint16_t)columns;
  cta->tmem_in_use += columns;
  memcpy(target->smem + (to & SMEM_OFFSET), &column, 4);
  if (w->launch->hazards) {
    Agent x = agent_of(w, op);
    if (!smem_touch(target, to & SMEM_OFFSET, 4, 1, &x)) return ST_FAULT;
  }
  cta->tmem_allocs++;
  if (op->sub & 1) wake(cluster_of(w), NULL, WAIT_TMEM, NULL, 0);
  return alloc_with_peer(w, op);
}

// tcgen05.dealloc. Refs: TMEM address, columns. Everything that used the columns must be ordered before.
Status exec_tc_dealloc(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t lane = first_lane(mask), column = REG32(w, refs[0])[lane], columns = REG32(w, refs[1])[lane];
  Cta *cta = w->cta;
  if (!same_group(w, op, op->sub & 1) || !uniform(w, op, refs[0], mask, 32, "the TMEM address") ||
      !uniform(w, op, refs[1], mask, 32, "the columns")) return ST_FAULT;
  if (column >= TMEM_COLUMNS || !power_of_two_columns(columns) || cta->tmem_alloc_size[column] != columns ||
      !allocated(cta, column, columns))
    return fault(w, op, FAULT_TMEM, "tcgen05.dealloc of %u columns at 0x%x, which is no allocation", columns,
                 column);
  if (w->launch->hazards) {
    Agent x = agent_of(w, op);
    for (uint32_t q = 0; q < 4; q++)
      if (!tmem_touch(cta, q, column, columns, ALL16, 1, &x)) return ST_FAULT;
  }
  cta->tmem_alloc_size[column] = 0;
  set_allocated(cta, column, columns, 0);
  cta->tmem_in_use -= columns;
  wake(cluster_of(w), cta, WAIT_TMEM, NULL, 0);
  return ST_NEXT;
}

Status exec_tc_relinquish(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  w->cta->relinquished = 1;
  return same_group(w, op, op->sub & 1) ? ST_NEXT : ST_FAULT;
}

static int tmem_check(Warp *w, const Op *op, const Cta *cta, uint32_t column, uint32_t count,
                      const char *what) {
  if (column + count <= TMEM_COLUMNS && cta->tmem && allocated(cta, column, count)) return 1;
  fault(w, op, FAULT_TMEM, "%s touches TMEM columns %u..%u of CTA rank %u, which are not all allocated",
        what, column, column + count - 1,
        cta->rank);
  return 0;
}

// ---------------------------------------------------------------- tcgen05.ld, tcgen05.st
enum { SHAPE_32X32B, SHAPE_16X64B, SHAPE_16X128B, SHAPE_16X256B, SHAPE_16X32BX2 };
typedef struct { uint32_t lane, column, shape, repeat, registers, columns, pack, split; } TmemAccess;

// Where register `r` of lane `l` lies (PTX ISA, "Matrix fragments of tcgen05.ld/st").
static inline uint32_t tmem_cell(const TmemAccess *t, uint32_t r, uint32_t l) {
  uint32_t row = 0, col = 0;
  switch (t->shape) {
    case SHAPE_32X32B: row = l, col = r; break;
    case SHAPE_16X64B: row = l / 4 + 8 * (l % 2), col = l / 2 % 2 + 2 * r; break;
    case SHAPE_16X128B: row = l / 4 + 8 * (r % 2), col = l % 4 + 4 * (r / 2); break;
    case SHAPE_16X256B: row = l / 4 + 8 * (r / 2 % 2), col = l % 4 * 2 + r % 2 + 8 * (r / 4); break;
    case SHAPE_16X32BX2: row = l % 16, col = r + (l / 16 ? t->split : 0); break;
  }
  return (t->column + col) * TMEM_LANES + t->lane + row;
}

// sub [2:0] shape, [11:4] repeat (xN), [12] pack or unpack, imm offset, imm2 the half split.
static int tmem_access(Warp *w, const Op *op, uint32_t address, const char *what, TmemAccess *t) {
  static const uint8_t REGISTERS[] = {1, 1, 2, 4, 1}, COLUMNS[] = {1, 2, 4, 8, 1};
  *t = (TmemAccess){.shape = op->sub & 7, .repeat = op->sub >> 4 & 0xff, .pack = op->sub >> 12 & 1,
                    .split = (uint32_t)op->imm2,
                    .lane = address >> 16, .column = address & 0xffff};
  t->registers = REGISTERS[t->shape] * t->repeat;
  t->columns = COLUMNS[t->shape] * t->repeat * (1 + t->pack) + (t->shape == SHAPE_16X32BX2 ? t->split : 0);
  const uint32_t quarter = w->id % 4;
  if (t->lane / 32 != quarter || t->lane % (t->shape == SHAPE_32X32B ? 32 : 16)) {
    fault(w, op, FAULT_TMEM, "%s at TMEM lane %u: warp %u reaches lanes %u..%u only", what, t->lane, w->id,
          32 * quarter, 32 * quarter + 31);
    return 0;
  }
  return tmem_check(w, op, w->cta, t->column, t->columns, what);
}

static uint32_t half_mask(const TmemAccess *t) {
  return t->shape == SHAPE_32X32B ? ALL16 : t->lane % 32 ? 0xff00u : 0xffu;
}

static void tmem_load(Warp *w, const Op *op, const TmemAccess *t) {
  const int32_t *refs = w->launch->program->refs + op->args + 1;
  const uint32_t *tmem = w->cta->tmem;
  for (uint32_t r = 0; r < t->registers; r++) {
    uint32_t *to = REG32(w, refs[r]);
    if (t->shape == SHAPE_32X32B && !t->pack) {
      memcpy(to, tmem + (size_t)(t->column + r) * TMEM_LANES + t->lane, LANES * 4);
      continue;
    }
    for (uint32_t l = 0; l < LANES; l++)
      to[l] = t->pack ? (tmem[tmem_cell(t, 2 * r, l)] & 0xffff) | tmem[tmem_cell(t, 2 * r + 1, l)] << 16
          : tmem[tmem_cell(t, r, l)];
  }
  w->launch->result->tmem_load_bytes += (uint64_t)t->registers * LANES * 4;
}

static void set_pending(Warp *w, const Op *op, uint32_t n, int value) {
  WarpState *s = state(w);
  const int32_t *refs = w->launch->program->refs + op->args + 1;
  for (uint32_t r = 0; r < n; r++)
    if (value) s->pending[refs[r] / 64] |= 1ull << (refs[r] % 64);
    else s->pending[refs[r] / 64] &= ~(1ull << (refs[r] % 64));
}

// tcgen05.ld. Refs: address, registers. They arrive at tcgen05.wait::ld, or before it.
Status exec_tc_ld(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  WarpState *s = state(w);
  TmemAccess t;
  if (!uniform(w, op, refs[0], mask, 32, "the TMEM address")) return ST_FAULT;
  if (!tmem_access(w, op, REG32(w, refs[0])[first_lane(mask)] + (uint32_t)op->imm, "tcgen05.ld", &t))
    return ST_FAULT;
  if (w->launch->hazards) {
    Agent x = tensor_agent(w, op);
    x.comp = (uint16_t)warp_comp(w, C_TMEM_LD);
    x.epoch = s->ld.open;
    if (!tmem_touch(w->cta, t.lane / 32, t.column, t.columns, half_mask(&t), 0, &x)) return ST_FAULT;
  }
  Async *a = async_new(w->launch, A_TMEM_LD, w, op);
  a->tmem.address = t.lane << 16 | t.column;
  a->next = s->tmem_ld;
  s->tmem_ld = a;
  s->npending++;
  set_pending(w, op, t.registers, 1);
  const uint32_t policy = w->launch->desc->policy;
  if (policy == 0 || (policy == 2 && next_random(w->launch) & 1)) {
    tmem_load(w, op, &t);
    a->tmem.done = 1;
  }
  return ST_NEXT;
}

// tcgen05.st. Refs: address, registers. Written at once; ordered for others by tcgen05.wait::st.
Status exec_tc_st(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  WarpState *s = state(w);
  TmemAccess t;
  if (!uniform(w, op, refs[0], mask, 32, "the TMEM address")) return ST_FAULT;
  if (!tmem_access(w, op, REG32(w, refs[0])[first_lane(mask)] + (uint32_t)op->imm, "tcgen05.st", &t))
    return ST_FAULT;
  if (w->launch->hazards) {
    Agent x = tensor_agent(w, op);
    x.comp = (uint16_t)warp_comp(w, C_TMEM_ST);
    x.epoch = s->st.open;
    if (!tmem_touch(w->cta, t.lane / 32, t.column, t.columns, half_mask(&t), 1, &x)) return ST_FAULT;
  }
  uint32_t *tmem = w->cta->tmem;
  for (uint32_t r = 0; r < t.registers; r++) {
    const uint32_t *from = REG32(w, refs[1 + r]);
    if (t.shape == SHAPE_32X32B && !t.pack) {
      memcpy(tmem + (size_t)(t.column + r) * TMEM_LANES + t.lane, from, LANES * 4);
      continue;
    }
    for (uint32_t l = 0; l < LANES; l++) {
      if (t.pack) {
        tmem[tmem_cell(&t, 2 * r, l)] = from[l] & 0xffff;
        tmem[tmem_cell(&t, 2 * r + 1, l)] = from[l] >> 16;
      } else {
        tmem[tmem_cell(&t, r, l)] = from[l];
      }
    }
  }
  w->launch->result->tmem_store_bytes += (uint64_t)t.registers * LANES * 4;
  return ST_NEXT;
}

Status tmem_loads_arrive(Warp *w) {
  WarpState *s = state(w);
  while (s->tmem_ld) {
    Async *a = s->tmem_ld;
    TmemAccess t;
    s->tmem_ld = a->next;
    if (!tmem_access(w, a->op, a->tmem.address, "tcgen05.ld", &t)) return ST_FAULT;
    if (!a->tmem.done) tmem_load(w, a->op, &t);
    set_pending(w, a->op, t.registers, 0);
    async_free(w->launch, a);
  }
  s->npending = 0;
  return ST_NEXT;
}

// tcgen05.wait. sub 0: ::ld, 1: ::st.
Status exec_tc_wait(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  WarpState *s = state(w);
  Groups *g = op->sub ? &s->st : &s->ld;
  if (!op->sub && tmem_loads_arrive(w) == ST_FAULT) return ST_FAULT;
  tensor_waited(w, op->sub ? C_TMEM_ST : C_TMEM_LD, g->open);
  g->open++;
  return ST_NEXT;
}

// tcgen05.fence. sub 1: ::after_thread_sync, else ::before_thread_sync.
Status exec_tc_fence(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  tensor_fence(w, (int)op->sub);
  return ST_NEXT;
}

Status exec_tc_cp(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  return fault(w, op, FAULT_UNSUPPORTED, "tcgen05.cp is not implemented");
}

// ---------------------------------------------------------------- tcgen05.mma: decoding
typedef struct {
  // m rows and n columns of the whole product; depth: elements of one K step
  uint32_t m, n, depth, pair, element;
  Format fa, fb;
  int neg_a, neg_b, mn_a, mn_b;
  uint32_t rows;                    // of A in one CTA
} Shape;

// PTX ISA, "Instruction descriptor": [1:0] sparsity, 3 saturate, [5:4] D type, [9:7] A, [12:10] B, 13/14
// negate, 15/16 MN-major, [22:17] N/8, [28:24] M/16.
static const char *shape_of(uint32_t idesc, uint32_t pair, uint32_t tf32, Shape *s) {
  *s = (Shape){.m = (idesc >> 24 & 31) * 16, .n = (idesc >> 17 & 63) * 8, .pair = pair, .element = tf32 ? 4
               : 2, .fa = idesc >> 7 & 7,
               .fb = idesc >> 10 & 7, .neg_a = idesc >> 13 & 1, .neg_b = idesc >> 14 & 1,
                   .mn_a = idesc >> 15 & 1, .mn_b = idesc >> 16 & 1};
  s->depth = 32 / s->element;
  s->rows = pair ? s->m / 2 : s->m;
  if (idesc & 0xf) return "asks for sparsity or saturation, which is not implemented";
  if ((idesc >> 4 & 3) != 1) return "asks for an accumulator that is not f32, which is not implemented";
  if (tf32 ? s->fa != F_TF32 || s->fb != F_TF32 : s->fa > F_BF16 || s->fb > F_BF16)
    return "has a type that does not belong to its kind";
  if (pair ? s->m != 128 && s->m != 256 : s->m != 64 && s->m != 128)
    return "has an M that its cta_group does not have";
  uint32_t step = pair ? 32 : s->m == 64 ? 8 : 16;
  if (!s->n || s->n > 256 || s->n % step) return "has an N that its M does not have";
  return NULL;
}

// PTX ISA, "Shared memory descriptor": [13:0] address/16, [29:16] leading offset/16, [45:32] stride
// offset/16, [48:46] 0b001, [51:49] base offset, 52 leading offset absolute, [63:61] swizzle.
static const char *layout_of(uint64_t desc, int mn_major, uint32_t element, Layout *l) {
  static const int8_t MODE[8] = {0, -1, 3, -1, 2, -1, 1, -1};
  *l = (Layout){.start = (uint32_t)(desc & 0x3fff) << 4, .leading = (uint32_t)(desc >> 16 & 0x3fff) << 4,
                .stride = (uint32_t)(desc >> 32 & 0x3fff) << 4, .mn_major = (uint32_t)mn_major,
                    .element = element};
  int mode = MODE[desc >> 61];
  if ((desc >> 46 & 7) != 1) return "does not have 0b001 in bits 48:46";
  if (desc >> 49 & 7) return "has a base offset, which is not implemented";
  if (desc >> 52 & 1) return "has an absolute leading offset, which is not implemented";
  if (mode < 0) return "has a swizzle mode that is not implemented";
  l->swizzle = (uint32_t)mode;
  return NULL;
}

// The CTA of the pair with rank parity `odd`.
static Cta *pair_cta(Cta *cta, uint32_t odd) { return &cta->cluster->ctas[(cta->rank & ~1u) | odd]; }

// ---------------------------------------------------------------- tcgen05.mma: checks at issue
// Lanes that the product's rows take in each quarter, as sixteenths; PTX ISA, "Data path layout".
static uint32_t quarter_mask(const Shape *s) { return s->rows == 64 && !s->pair ? 0xffu : ALL16; }
static uint32_t d_columns(const Shape *s) { return s->pair && s->rows == 64 ? s->n / 2 : s->n; }

static int check_accumulator(Cta *cta, const Async *a, const Shape *s, const Agent *x) {
  const uint32_t column = a->mma.d & 0xffff, mask = quarter_mask(s) << (a->mma.d >> 16 & 16 ? 8 : 0);
  if (!tmem_check(x->warp, x->op, cta, column, d_columns(s), "tcgen05.mma")) return 0;
  if (!cta->tmem_shadow) return 1;
  // the K steps of one tile write the same columns again: nothing new to check until the pipe's epoch or the
  // issuer changes
  if (cta->last_d == a->mma.d && cta->last_d_epoch == x->epoch && cta->last_d_comp == x->comp &&
      cta->last_d_columns == d_columns(s) &&
      cta->last_d_warp == state(x->warp)->index)
    return 1;
  for (uint32_t q = 0; q < 4; q++) {
    if (a->mma.accumulate && !tmem_touch(cta, q, column, d_columns(s), mask, 0, x)) return 0;
    if (!tmem_touch(cta, q, column, d_columns(s), mask, 1, x)) return 0;
  }
  cta->last_d = a->mma.d, cta->last_d_epoch = x->epoch, cta->last_d_comp = x->comp,
      cta->last_d_columns = d_columns(s);
  cta->last_d_warp = state(x->warp)->index;
  return 1;
}

static Status check_mma(Async *a, const Shape *s) {
  Warp *w = a->warp;
  Layout la, lb;
  const char *wrong = a->mma.a_tmem ? NULL : layout_of(a->mma.a, s->mn_a, s->element, &la);
  if (wrong) return fault(w, a->op, FAULT_DESCRIPTOR, "the descriptor of A %s", wrong);
  if ((wrong = layout_of(a->mma.b, s->mn_b, s->element, &lb)))
    return fault(w, a->op, FAULT_DESCRIPTOR, "the descriptor of B %s", wrong);
  Agent x = agent_of(w, a->op);
  x.comp = (uint16_t)warp_comp(w, C_PIPE);
  x.epoch = w->cta->pipe_epoch;
  x.async = x.fifo = 1;
  Agent t = tensor_agent(w, a->op);
  t.comp = x.comp, t.epoch = x.epoch, t.async = t.fifo = 1;
  for (uint32_t i = 0; i <= s->pair; i++) {
    Cta *cta = s->pair ? pair_cta(w->cta, i) : w->cta;
    if (!a->mma.a_tmem && !operand_check(cta, &la, s->rows, s->depth, "A", &x)) return ST_FAULT;
    if (!operand_check(cta, &lb, s->pair ? s->n / 2 : s->n, s->depth, "B", &x)) return ST_FAULT;
    if (a->mma.a_tmem) {
      uint32_t column = (uint32_t)a->mma.a & 0xffff;
      if (!tmem_check(w, a->op, cta, column, 8, "tcgen05.mma (operand A)")) return ST_FAULT;
      for (uint32_t q = 0; q < 4 && cta->tmem_shadow; q++)
        if (!tmem_touch(cta, q, column, 8, quarter_mask(s), 0, &t)) return ST_FAULT;
    }
    if (!check_accumulator(cta, a, s, &t)) return ST_FAULT;
  }
  return ST_NEXT;
}

// tcgen05.mma. sub 0: cta_group::2, 1: A in TMEM, 2: kind::tf32, 3: scale-input-d given, 4:
// disable-output-lane given.
// Refs: D, A (descriptor or TMEM address), B, instruction descriptor, enable-input-d, scale, lane masks (4 or
// 8).
// imm: offset of D; imm2: offset of A in TMEM.
Status exec_tc_mma(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t pair = op->sub & 1, in_tmem = op->sub >> 1 & 1;
  if (!same_group(w, op, pair)) return ST_FAULT;
  EACH_LANE(l, mask) {
    Async *a = async_new(w->launch, A_MMA, w, op);
    a->mma.d = REG32(w, refs[0])[l] + (uint32_t)op->imm;
    a->mma.a_tmem = in_tmem;
    a->mma.a = in_tmem ? REG32(w, refs[1])[l] + (uint32_t)op->imm2 : REG64(w, refs[1])[l];
    a->mma.b = REG64(w, refs[2])[l];
    a->mma.idesc = REG32(w, refs[3])[l];
    a->mma.accumulate = w->pred[refs[4]] >> l & 1;
    a->mma.pair = pair;
    a->mma.scale = op->sub & 8 ? REG32(w, refs[5])[l] : 0;
    for (uint32_t i = 0; op->sub & 16 && i < (pair ? 8 : 4); i++)
      a->mma.disable[i] = REG32(w, refs[6 + i])[l];
    Shape s;
    const char *wrong = shape_of(a->mma.idesc, pair, op->sub >> 2 & 1, &s);
    if (wrong)
      return fault(w, op, FAULT_DESCRIPTOR, "the instruction descriptor 0x%x %s", a->mma.idesc, wrong);
    if (pair && (w->cta->rank ^ 1) >= w->launch->cluster_size)
      return fault(w, op, FAULT_ILLEGAL, "cta_group::2 in a cluster of %u", w->launch->cluster_size);
    if (in_tmem && (s.rows != 128 || s.mn_a || s.element != 2))
      return fault(w, op, FAULT_UNSUPPORTED, "A in TMEM with %u rows a CTA, or another type than f16 and "
                   "bf16, is not implemented", s.rows);
    if (a->mma.d >> 16 & ~16u || (a->mma.d >> 16 && s.rows != 64) || (in_tmem && a->mma.a >> 16))
      return fault(w, op, FAULT_TMEM, "tcgen05.mma with a TMEM address at lane %u", a->mma.d >> 16
                   ? a->mma.d >> 16 : (uint32_t)a->mma.a >> 16);
    if (check_mma(a, &s) == ST_FAULT) return ST_FAULT;
    lanes_share_waits(w);
    if (w->launch->hazards) clock_join(cluster_of(w), w->cta->pipe, state(w)->clock);
    if (async_issue(a) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

// tcgen05.commit. sub 0: cta_group::2, 1: multicast, 2: shared::cta address. Refs: mbarrier, CTA mask. imm:
// offset.
Status exec_tc_commit(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  Cta *cta = w->cta;
  if (!same_group(w, op, op->sub & 1)) return ST_FAULT;
  EACH_LANE(l, mask) {
    uint32_t address = REG32(w, refs[0])[l] + (uint32_t)op->imm;
    if (!shared_target(w, op, address, 8, 8, 1)) return ST_FAULT;
    Async *a = async_new(w->launch, A_COMMIT, w, op);
    a->arrive.offset = address & SMEM_OFFSET;
    a->arrive.multicast = op->sub & 2 ? REG32(w, refs[1])[l] & 0xffff : 1u << (address >> SMEM_RANK_SHIFT);
    if (!a->arrive.multicast || a->arrive.multicast >> w->launch->cluster_size)
      return fault(w, op, FAULT_MEMORY, "tcgen05.commit to CTA mask 0x%x of a cluster of %u",
                   a->arrive.multicast, w->launch->cluster_size);
    if (w->launch->hazards) {
      Cluster *c = cta->cluster;
      clock_g(c, cta->pipe)[warp_comp(w, C_PIPE)] = cta->pipe_epoch++;    // of this warp alone
      a->clock = clock_new(c);
      memcpy(clock_g(c, a->clock), clock_g(c, cta->pipe), c->stride * sizeof *c->clocks);
    }
    if (async_issue(a) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

// ---------------------------------------------------------------- tcgen05.mma: the product
static _Thread_local float panel_a[MERGE * 16 * 128] __attribute__((aligned(64)));
static _Thread_local float panel_b[2 * MERGE * 16 * 128] __attribute__((aligned(64)));
static _Thread_local float result[256 * 128] __attribute__((aligned(64)));

static void unpack_tmem(float *out, const Cta *cta, uint32_t column, Format f, int negate) {
  for (uint32_t c = 0; c < 8; c++) {
    const uint32_t *from = cta->tmem + (size_t)(column + c) * TMEM_LANES;
    for (uint32_t m = 0; m < TMEM_LANES; m++) {
      uint32_t low = from[m] << 16, high = from[m] & 0xffff0000u;
      if (f == F_BF16) {
        memcpy(&out[(2 * c) * 128 + m], &low, 4);
        memcpy(&out[(2 * c + 1) * 128 + m], &high, 4);
      } else {
        _Float16 h[2];
        memcpy(h, &from[m], 4);
        out[(2 * c) * 128 + m] = (float)h[0];
        out[(2 * c + 1) * 128 + m] = (float)h[1];
      }
    }
  }
  for (uint32_t i = 0; negate && i < 16 * 128; i++) out[i] *= -1.0f;
}

// B's panel: [n][k] if K-major, [k][n] if MN-major, N over both CTAs of a pair.
static void gather_b(Async *const *step, uint32_t steps, const Shape *s, Cta *const *ctas, uint32_t b_n,
                     uint32_t b_k) {
  const uint32_t part = s->pair ? s->n / 2 : s->n;
  for (uint32_t i = 0; i < steps; i++) {
    Layout l;
    layout_of(step[i]->mma.b, s->mn_b, s->element, &l);
    for (uint32_t c = 0; c <= s->pair; c++)
      unpack_operand(panel_b + (size_t)c * part * b_n + (size_t)i * s->depth * b_k, b_k, b_n, ctas[c]->smem,
                     &l, s->fb, part, s->neg_b);
  }
}

static void gather_a(Async *const *step, uint32_t steps, const Shape *s, const Cta *cta) {
  for (uint32_t i = 0; i < steps; i++) {
    float *to = panel_a + (size_t)i * s->depth * s->rows;
    if (step[i]->mma.a_tmem) {
      unpack_tmem(to, cta, (uint32_t)step[i]->mma.a & 0xffff, s->fa, s->neg_a);
      continue;
    }
    Layout l;
    layout_of(step[i]->mma.a, s->mn_a, s->element, &l);
    unpack_operand(to, s->rows, 1, cta->smem, &l, s->fa, s->rows, s->neg_a);
  }
}

// Lane and column of D's element (row, column n) in one CTA; PTX ISA, "Data path layout": M = 128 or 256
// fills the lanes; 64 rows of one CTA take half of each quarter; 64 rows of a pair's CTA take lanes 0-63 for
// the lower half of N, 64-127 for the upper.
static uint32_t d_lane(const Shape *s, uint32_t row, uint32_t n) {
  if (s->rows == 128) return row;
  return s->pair ? row + (n >= s->n / 2 ? 64 : 0) : row / 16 * 32 + row % 16;
}

static void product_indirect(Async *a, const Shape *s, Cta *cta, uint32_t depth, uint32_t b_n, uint32_t b_k,
                             uint32_t half) {
  float *tmem = (float *)cta->tmem + (size_t)(a->mma.d & 0xffff) * TMEM_LANES + (a->mma.d >> 16);
  const float scale = 1.0f / (float)(1u << (a->mma.scale & 31));
  panel_product(result, s->rows, panel_a, s->rows, panel_b, b_n, b_k, s->rows, s->n, depth, 0);
  for (uint32_t n = 0; n < s->n; n++)
    for (uint32_t r = 0; r < s->rows; r++) {
      uint32_t lane = d_lane(s, r, n), column = d_columns(s) < s->n ? n % (s->n / 2) : n;
      if (a->mma.disable[half * 4 + lane / 32] >> (lane % 32) & 1) continue;
      float *d = &tmem[(size_t)column * TMEM_LANES + lane];
      *d = result[(size_t)n * s->rows + r] + (a->mma.accumulate ? *d * scale : 0);
    }
}

static int has_masks(const Async *a) {
  uint32_t any = a->mma.scale;
  for (int i = 0; i < 8; i++) any |= a->mma.disable[i];
  return any != 0;
}

static int mergeable(const Async *first, const Async *next) {
  return next && next->kind == A_MMA && next->mma.d == first->mma.d && next->mma.idesc == first->mma.idesc &&
         next->mma.a_tmem == first->mma.a_tmem && next->mma.pair == first->mma.pair &&
             next->mma.accumulate && !has_masks(next) &&
         (next->op->sub & 4) == (first->op->sub & 4);
}

static void multiply(Async *const *step, uint32_t steps) {
  Async *a = step[0];
  Shape s;
  shape_of(a->mma.idesc, a->mma.pair, a->op->sub >> 2 & 1, &s);
  Cta *ctas[2] = {s.pair ? pair_cta(a->cta, 0) : a->cta, s.pair ? pair_cta(a->cta, 1) : NULL};
  const uint32_t depth = steps * s.depth, b_n = s.mn_b ? 1 : depth, b_k = s.mn_b ? s.n : 1;
  gather_b(step, steps, &s, ctas, b_n, b_k);
  for (uint32_t i = 0; i <= s.pair; i++) {
    gather_a(step, steps, &s, ctas[i]);
    if (s.rows == 128 && !has_masks(a))
      panel_product((float *)ctas[i]->tmem + (size_t)(a->mma.d & 0xffff) * TMEM_LANES, TMEM_LANES, panel_a,
                    128, panel_b, b_n, b_k, 128, s.n,
                    depth, (int)a->mma.accumulate);
    else
      product_indirect(a, &s, ctas[i], depth, b_n, b_k, i);
  }
  a->warp->launch->result->mma_flops += 2ull * s.m * s.n * depth;
}

// The last commits of a CTA may complete after its threads have left: at its own barriers nobody can tell,
// and kernels in use end that way. An arrival at another CTA that has left is an error.
static Status run_commit(Async *a) {
  Status s = ST_NEXT;
  for (uint32_t r = 0; r < a->warp->launch->cluster_size && s == ST_NEXT; r++)
    if (a->arrive.multicast >> r & 1 && !(r == a->cta->rank && a->cta->exited)) {
      Cta *cta = &a->cta->cluster->ctas[r];
      Mbarrier *b = mbar_find(a->warp, a->op, cta, a->arrive.offset);
      if (!b) return ST_FAULT;
      if (r != a->cta->rank) b->last_commit = b->phase + 1;
      s = mbar_arrive(a->warp, a->op, cta, a->arrive.offset, 1, 0, a->clock, 0);
    }
  return s;
}

Status run_tensor(Async *a) {
  Launch *launch = a->warp->launch;
  Status s = ST_NEXT;
  Async *step[MERGE] = {a};
  uint32_t n = 1;
  if (a->kind == A_COMMIT) {
    async_unlink(a);
    s = run_commit(a);
  } else {
    while (n < MERGE && !has_masks(a) && mergeable(a, step[n - 1]->next)) {
      step[n] = step[n - 1]->next;
      n++;
    }
    for (uint32_t i = 0; i < n; i++) async_unlink(step[i]);
    multiply(step, n);
  }
  for (uint32_t i = 0; i < n; i++) async_free(launch, step[i]);
  return s;
}
