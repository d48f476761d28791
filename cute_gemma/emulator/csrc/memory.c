// Loads, stores and matrix moves: addresses are resolved and checked for all lanes, then the bytes are moved.
#include "hazard.h"
#include "global.h"
#include "memory.h"
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------- shared memory
// Something that a warp of the CTA did, if only to start, is ordered before here.
static int knows_started(const Warp *w, const Cta *cta) {
  if (!w->launch->hazards) return 1;
  const uint32_t *g = clock_g(cluster_of(w), state(w)->clock) + cta->rank * w->launch->nwarps;
  for (uint32_t i = 0; i < w->launch->nwarps; i++)
    if (g[i]) return 1;
  return 0;
}

Cta *shared_target(Warp *w, const Op *op, uint32_t address, uint32_t bytes, uint32_t align, int any_rank) {
  uint32_t rank = address >> SMEM_RANK_SHIFT, offset = address & SMEM_OFFSET;
  Cluster *c = cluster_of(w);
  if (rank >= c->launch->cluster_size || (!any_rank && rank != w->cta->rank)) {
    fault(w, op, FAULT_MEMORY, "shared address 0x%x names CTA rank %u; the %s is %u", address, rank,
          any_rank ? "cluster's size" : "CTA's own rank", any_rank ? c->launch->cluster_size : w->cta->rank);
    return NULL;
  }
  if (offset < SMEM_RESERVED || offset + bytes > c->launch->smem_end) {
    fault(w, op, FAULT_MEMORY, "shared address 0x%x, %u bytes: outside the CTA's shared memory, 0x%x..0x%x",
          address, bytes, SMEM_RESERVED,
          c->launch->smem_end);
    return NULL;
  }
  if (offset & (align - 1)) {
    fault(w, op, FAULT_MISALIGNED, "shared address 0x%x is no multiple of %u", address, align);
    return NULL;
  }
  Cta *cta = &c->ctas[rank];
  if (cta->exited) {
    fault(w, op, FAULT_MEMORY, "touches shared memory of CTA rank %u, whose threads have all exited", rank);
    return NULL;
  }
  if (rank == w->cta->rank || knows_started(w, cta)) return cta;
  fault(w, op, FAULT_RACE, "touches shared memory of CTA rank %u, which may not have started: a cluster "
        "barrier comes first", rank);
  return NULL;
}

int uniform(Warp *w, const Op *op, int32_t ref, uint32_t mask, uint32_t bits, const char *what) {
  const uint32_t first = first_lane(mask);
  EACH_LANE(l, mask) {
    if (bits == 64 ? REG64(w, ref)[l] == REG64(w, ref)[first] : REG32(w, ref)[l] == REG32(w, ref)[first])
      continue;
    fault(w, op, FAULT_DIVERGENCE, "lanes %u and %u do not agree on %s", first, l, what);
    return 0;
  }
  return 1;
}

// Wavefronts: in each group of lanes that together ask for 128 bytes, the largest number of distinct words in
// one bank.
void count_wavefronts(LaunchResult *r, const uint32_t *offset, uint32_t mask, uint32_t size) {
  uint32_t unit = size < 4 ? 4 : size, lanes = 128 / unit, banks = 128 / unit;
  for (uint32_t first = 0; first < LANES; first += lanes) {
    uint32_t word[LANES][4], used[LANES], worst = 0;
    memset(used, 0, banks * sizeof *used);
    for (uint32_t l = first; l < first + lanes; l++) {
      if (!(mask >> l & 1)) continue;
      uint32_t wd = offset[l] / unit, bank = wd % banks, n = used[bank], k = 0;
      while (k < (n < 4 ? n : 4) && word[bank][k] != wd) k++;
      if (k < (n < 4 ? n : 4)) continue;         // the same word: one broadcast
      if (n < 4) word[bank][n] = wd;
      used[bank] = n + 1;
      if (n + 1 > worst) worst = n + 1;
    }
    r->smem_wavefronts += worst;
    r->smem_ideal_wavefronts += worst != 0;
  }
}

// Checks the lanes' accesses, those of one granule together.
static int shared_hazards(Warp *w, const Op *op, const Resolved *r, uint32_t mask, uint32_t bytes, int write,
                          int strong) {
  if (write) {
    state(w)->writers |= mask;
    if (!(mask & ~state(w)->bulk.lanes)) lanes_share_waits(w);
  }
  Agent x = agent_of(w, op);
  if (strong) x.tag = TAG_STRONG, x.strong = 1;
  // ldmatrix and stmatrix move every row between all lanes
  const int together = op->code == OP_LDMATRIX || op->code == OP_STMATRIX;
  const int apart = w->launch->hazards == HAZARDS_STRICT && !strong;
  Cta *cta = NULL;
  uint32_t granule = 0, bits = 0;
  EACH_LANE(l, mask) {
    if (apart && !lanes_touch(w, op, r->cta[l], r->offset[l], bytes, together ? FULL : 1u << l, write))
      return 0;
    for (uint32_t at = r->offset[l], end = at + bytes; at < end; at = (at | (GRANULE - 1)) + 1) {
      uint32_t stop = (at | (GRANULE - 1)) + 1, n = (stop < end ? stop : end) - at;
      if (bits && (r->cta[l] != cta || at / GRANULE != granule)) {
        Shadow *s = &cta->smem_shadow[granule];
        if (!shadow_touch(cta, s, bits, write, &x)) return 0;
        bits = 0;
      }
      cta = r->cta[l];
      granule = at / GRANULE;
      bits |= ((1u << n) - 1) << (at % GRANULE);
    }
  }
  if (!bits) return 1;
  Shadow *s = &cta->smem_shadow[granule];
  return shadow_touch(cta, s, bits, write, &x);
}

// ---------------------------------------------------------------- resolving addresses
static int global_runs(Warp *w, const Op *op, const uint64_t *address, uint32_t mask, uint32_t bytes,
                       int write, Strength how, Resolved *out) {
  const int waited = grid_waited(w);
  uint64_t run = 0, run_bytes = 0;
  EACH_LANE(l, mask) {
    uint64_t a = address[l] + (uint64_t)op->imm;
    if (a & (bytes - 1)) {
      fault(w, op, FAULT_MISALIGNED, "lane %u: global address 0x%llx is no multiple of %u", l,
            (unsigned long long)a, bytes);
      return 0;
    }
    out->at[l] = (uint8_t *)a;
    if (a == run + run_bytes) {
      run_bytes += bytes;
      continue;
    }
    if (run_bytes && a >= run && a + bytes <= run + run_bytes) continue;
    if (run_bytes && !global_access(w, op, run, run_bytes, write, waited, how)) return 0;
    run = a, run_bytes = bytes;
  }
  return !run_bytes || global_access(w, op, run, run_bytes, write, waited, how);
}

// Strict checks (PTX ISA, "bar.warp.sync"): what some lanes acquired is hidden from reads by others until the
// lanes have met.
static int resolve_global(Warp *w, const Op *op, const uint64_t *address, uint32_t mask, uint32_t bytes,
                          int write, Strength how, Resolved *out) {
  WarpState *s = state(w);
  if (write) s->global_writers |= mask;
  if (write || w->launch->hazards != HAZARDS_STRICT || !s->acquirers || !(mask & ~s->acquirers))
    return global_runs(w, op, address, mask, bytes, write, how, out);
  uint32_t *known = &clock_g(cluster_of(w), s->clock)[warp_comp(w, C_REMOTE)], was = *known;
  *known = s->acquires_met;
  s->ok_instance = 0;
  s->reads_apart = 1;
  const int ok = global_runs(w, op, address, mask, bytes, write, how, out);
  s->reads_apart = 0;
  *known = was;
  return ok;
}

static int resolve_shared(Warp *w, const Op *op, uint32_t l, uint32_t address, uint32_t bytes, int any_rank,
                          Resolved *out) {
  Cta *cta = shared_target(w, op, address, bytes, bytes, any_rank);
  if (!cta) return 0;
  out->cta[l] = cta;
  out->offset[l] = address & SMEM_OFFSET;
  out->at[l] = cta->smem + out->offset[l];
  return 1;
}

// Pointers for every lane of an access of `bytes` bytes; checks bounds, alignment, races. Returns 0 when it
// faulted.
int resolve(Warp *w, const Op *op, int32_t address, uint32_t mask, uint32_t bytes, int write, int strong,
            Resolved *out) {
  const uint32_t space = op->sub & 3;
  const Strength how = strong ? STRONG : op->code == OP_LD && op->sub >> 14 & 1 ? READ_ONLY : WEAK;
  uint32_t shared = 0;
  out->shared = 0;
  if (space == SPACE_GLOBAL) return resolve_global(w, op, REG64(w, address), mask, bytes, write, how, out);
  if (space == SPACE_GENERIC) {
    const uint64_t *a = REG64(w, address);
    EACH_LANE(l, mask) {
      uint64_t at = a[l] + (uint64_t)op->imm;
      if ((at & SHARED_WINDOW_MASK) != SHARED_WINDOW) continue;
      shared |= 1u << l;
      if (!resolve_shared(w, op, l, (uint32_t)at, bytes, 1, out)) return 0;
    }
    if (mask & ~shared && !resolve_global(w, op, a, mask & ~shared, bytes, write, how, out)) return 0;
  } else {
    const uint32_t *a = REG32(w, address);
    shared = mask;
    EACH_LANE(l, mask)
      if (!resolve_shared(w, op, l, a[l] + (uint32_t)op->imm, bytes, space == SPACE_CLUSTER, out)) return 0;
  }
  out->shared = shared;
  if (!shared) return 1;
  count_wavefronts(w->launch->result, out->offset, shared, bytes);
  return !w->launch->hazards || shared_hazards(w, op, out, shared, bytes, write, strong);
}

int is_shared(const Op *op, const Resolved *r, uint32_t lane) {
  const uint32_t space = op->sub & 3;
  return space == SPACE_SHARED || space == SPACE_CLUSTER || (space == SPACE_GENERIC &&
                                                             (r->shared >> lane & 1));
}

// ---------------------------------------------------------------- flags
static ClockId *flag_of(Cta *cta, uint32_t offset) {
  if (!cta->flags) cta->flags = calloc(cta->launch->smem_end / 4 + 1, sizeof *cta->flags);
  return &cta->flags[offset / 4];
}

void strong_write(Warp *w, const Op *op, const Resolved *r, uint32_t mask, uint32_t how) {
  EACH_LANE(l, mask) {
    if (!is_shared(op, r, l)) {
      global_release(w, (uint64_t)r->at[l], how, mask);
      continue;
    }
    if (how == WITH_FENCE && state(w)->fenced == NO_CLOCK) continue;
    ClockId *flag = flag_of(r->cta[l], r->offset[l]);
    if (!*flag) *flag = 1 + clock_new(cluster_of(w));
    if (how == WITH_FENCE) clock_release_relaxed(w, *flag - 1);
    else clock_release(w, *flag - 1);
  }
}

void strong_read(Warp *w, const Op *op, const Resolved *r, uint32_t mask, uint32_t how) {
  EACH_LANE(l, mask) {
    if (!is_shared(op, r, l)) {
      global_acquire(w, (uint64_t)r->at[l], how, mask);
      continue;
    }
    if (!r->cta[l]->flags) continue;
    const ClockId *flag = flag_of(r->cta[l], r->offset[l]);
    if (!*flag) continue;
    if (how == WITH_FENCE) clock_acquire_relaxed(w, *flag - 1);
    else clock_acquire(w, *flag - 1);
  }
}

// ---------------------------------------------------------------- ld, st
static void load_small(Warp *w, const Op *op, int32_t dst, const Resolved *r, uint32_t mask, uint32_t size,
                       uint32_t step) {
  const int is_signed = op->sub >> 11 & 1, wide = (op->sub >> 12 & 3) == 2, half = (op->sub >> 12 & 3) == 0;
  EACH_LANE(l, mask) {
    const uint8_t *p = r->at[l] + step * size;
    int64_t v = size == 1 ? (is_signed ? (int64_t)(int8_t)*p : *p)
                          : (is_signed ? (int64_t)*(const int16_t *)p : (int64_t)*(const uint16_t *)p);
    if (wide) REG64(w, dst)[l] = (uint64_t)v;
    else REG32(w, dst)[l] = half ? (uint32_t)v & 0xffff : (uint32_t)v;
  }
}

Status exec_ld(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t log = op->sub >> 2 & 7, count = op->sub >> 5 & 15, size = 1u << log, sem = op->sub >> 9 & 3;
  Resolved r;
  if (!resolve(w, op, refs[0], mask, size * count, 0, sem != 0, &r)) return ST_FAULT;
  if (size == 4) {
    uint32_t *d[8];
    for (uint32_t j = 0; j < count; j++) d[j] = REG32(w, refs[1 + j]);
    EACH_LANE(l, mask) for (uint32_t j = 0; j < count; j++) d[j][l] = ((const uint32_t *)r.at[l])[j];
  } else if (size == 8) {
    EACH_LANE(l, mask)
      for (uint32_t j = 0; j < count; j++) REG64(w, refs[1 + j])[l] = ((const uint64_t *)r.at[l])[j];
  } else if (size == 16) {
    EACH_LANE(l, mask) memcpy((uint8_t *)reg(w, refs[1]) + 16 * l, r.at[l], 16);
  } else {
    for (uint32_t j = 0; j < count; j++) load_small(w, op, refs[1 + j], &r, mask, size, j);
  }
  if (sem && w->launch->hazards) strong_read(w, op, &r, mask, sem);
  // a strong load of memory that others write is a poll: let them run
  return sem && (op->sub & 3) != SPACE_SHARED ? ST_YIELD : ST_NEXT;
}

Status exec_st(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t log = op->sub >> 2 & 7, count = op->sub >> 5 & 15, size = 1u << log, sem = op->sub >> 9 & 3;
  Resolved r;
  if (!resolve(w, op, refs[0], mask, size * count, 1, sem != 0, &r)) return ST_FAULT;
  if (sem && w->launch->hazards) strong_write(w, op, &r, mask, sem);
  if (size == 4) {
    const uint32_t *d[8];
    for (uint32_t j = 0; j < count; j++) d[j] = REG32(w, refs[1 + j]);
    EACH_LANE(l, mask) for (uint32_t j = 0; j < count; j++) ((uint32_t *)r.at[l])[j] = d[j][l];
  } else if (size == 8) {
    EACH_LANE(l, mask)
      for (uint32_t j = 0; j < count; j++) ((uint64_t *)r.at[l])[j] = REG64(w, refs[1 + j])[l];
  } else if (size == 16) {
    EACH_LANE(l, mask) memcpy(r.at[l], (const uint8_t *)reg(w, refs[1]) + 16 * l, 16);
  } else {
    for (uint32_t j = 0; j < count; j++)
      EACH_LANE(l, mask) memcpy(r.at[l] + j * size, &REG32(w, refs[1 + j])[l], size);
  }
  made_progress(w->launch);
  return ST_NEXT;
}

// ---------------------------------------------------------------- ldmatrix, stmatrix
static int matrix_rows(Warp *w, const Op *op, const uint32_t *address, uint32_t n, int write, Resolved *r) {
  uint32_t rows = n * 8 == 32 ? FULL : (1u << n * 8) - 1;
  EACH_LANE(l, rows)
    if (!resolve_shared(w, op, l, address[l] + (uint32_t)op->imm, 16, 0, r)) return 0;
  count_wavefronts(w->launch->result, r->offset, rows, 16);
  return !w->launch->hazards || shared_hazards(w, op, r, rows, 16, write, 0);
}

// sub [2:0]: matrices (1, 2, 4); [3]: transposed. Refs: address, registers. PTX ISA, "ldmatrix": lane l holds
// elements 2*(l%4) and the next one of row l/4; transposed, of column l/4.
Status exec_ldmatrix(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t n = op->sub & 7, trans = op->sub >> 3 & 1;
  Resolved r;
  if (!matrix_rows(w, op, REG32(w, refs[0]), n, 0, &r)) return ST_FAULT;
  uint32_t out[4][LANES];
  for (uint32_t m = 0; m < n; m++)
    for (uint32_t l = 0; l < LANES; l++) {
      uint32_t pair = l % 4 * 2, line = l / 4;
      const uint16_t *row = (const uint16_t *)r.at[m * 8 + line];
      out[m][l] = trans ? ((const uint16_t *)r.at[m * 8 + pair])[line] |
          (uint32_t)((const uint16_t *)r.at[m * 8 + pair + 1])[line] << 16
                        : row[pair] | (uint32_t)row[pair + 1] << 16;
    }
  for (uint32_t m = 0; m < n; m++) memcpy(REG32(w, refs[1 + m]), out[m], sizeof out[m]);
  return ST_NEXT;
}

Status exec_stmatrix(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t n = op->sub & 7, trans = op->sub >> 3 & 1;
  Resolved r;
  if (!matrix_rows(w, op, REG32(w, refs[0]), n, 1, &r)) return ST_FAULT;
  for (uint32_t m = 0; m < n; m++)
    for (uint32_t l = 0; l < LANES; l++) {
      uint32_t pair = l % 4 * 2, line = l / 4, v = REG32(w, refs[1 + m])[l];
      if (trans) {
        ((uint16_t *)r.at[m * 8 + pair])[line] = (uint16_t)v;
        ((uint16_t *)r.at[m * 8 + pair + 1])[line] = (uint16_t)(v >> 16);
      } else {
        ((uint32_t *)r.at[m * 8 + line])[l % 4] = v;
      }
    }
  return ST_NEXT;
}

// mapa.shared::cluster. sub 1: 64-bit generic addresses. Refs: result, address, rank. A rank the cluster does
// not have gives an address that no access accepts.
Status exec_mapa(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  EACH_LANE(l, mask) {
    const uint32_t rank = REG32(w, refs[2])[l] < w->launch->cluster_size ? REG32(w, refs[2])[l] : 0xff;
    if (op->sub & 1)
      REG64(w, refs[0])[l] = (REG64(w, refs[1])[l] & ~0xff000000ull) + ((uint64_t)rank << SMEM_RANK_SHIFT);
    else
      REG32(w, refs[0])[l] = (REG32(w, refs[1])[l] & SMEM_OFFSET) | rank << SMEM_RANK_SHIFT;
  }
  return ST_NEXT;
}

// Prefetches move nothing here. sub 1: the address must hold a tensor map (prefetch.tensormap).
Status exec_prefetch(Warp *w, const Op *op, uint32_t mask) {
  (void)w, (void)op, (void)mask;
  return ST_NEXT;
}
