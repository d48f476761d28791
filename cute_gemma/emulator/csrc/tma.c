// Bulk copies: tensor maps, boxes, swizzling, multicast, reductions; bulk groups. A load writes in one step;
// a store reads shared memory in one step and writes global memory in another.
#include "global.h"
#include "half.h"
#include "hazard.h"
#include "tma.h"
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------- tensor maps
// Layout of the 128 bytes as the DSL's host code packs them (found by probing it; CUtensorMap is opaque):
// bytes 0-7 address; 8-11 flags, [6:4] rank-1, [10:7] type, [12:11] interleave, [14:13] swizzle; 12-27
// strides/16, 28-31 their bits 35:32, four each; 32-51 sizes-1; 52-54 element strides-1, three bits each;
// 55-59 box sizes-1. Flags 18 (always set) and 21 (set for large strides and for 8-byte elements) change
// nothing that is visible here; others never occurred.
#define KNOWN_FLAGS 0x00247fffu
static const uint8_t ELEMENT_SIZE[16] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2};

static uint32_t read32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}

static const char *decode(const uint8_t *raw, TensorMap *m) {
  uint32_t flags = read32(raw + 8), high = read32(raw + 28);
  memset(m, 0, sizeof *m);
  memcpy(&m->address, raw, 8);
  m->rank = (flags >> 4 & 7) + 1;
  m->dtype = flags >> 7 & 15;
  m->size = ELEMENT_SIZE[m->dtype];
  m->swizzle = flags >> 13 & 3;
  if ((flags & 15) != 2) return "is not a tiled tensor map (was the address of one passed?)";
  if (flags & ~KNOWN_FLAGS) return "has flags that are not understood";
  if (flags >> 11 & 3) return "has an interleaved layout, which is not implemented";
  if (m->rank > 5) return "has more than five dimensions";
  if (!m->size) return "has an element type that is not implemented";
  m->stride[0] = m->size;
  m->box_bytes = m->size;
  for (uint32_t k = 0; k < m->rank; k++) {
    if (k) m->stride[k] = (read32(raw + 8 + 4 * k) | (uint64_t)(high >> (4 * (k - 1)) & 15) << 32) * 16;
    m->dim[k] = read32(raw + 32 + 4 * k) + 1;
    m->step[k] = ((read32(raw + 52) & 0xffffff) >> (3 * k) & 7) + 1;
    m->box[k] = raw[55 + k] + 1;
    m->box_bytes *= (m->box[k] + m->step[k] - 1) / m->step[k];
    if (m->step[k] != 1) return "has element strides, which are not implemented";
  }
  uint32_t inner = m->box[0] * m->size;
  if (m->address % 16) return "has a global address that is no multiple of 16";
  if (inner % 16) return "has an inner box size that is no multiple of 16 bytes";
  if (m->swizzle && inner > 16u << m->swizzle) return "has an inner box wider than its swizzle";
  return NULL;
}

static const TensorMap *tensor_map(Warp *w, const Op *op, uint64_t address, uint32_t dims) {
  Launch *launch = w->launch;
  MapCache *slot = &launch->map_cache[address / 64 % (sizeof launch->map_cache / sizeof *launch->map_cache)];
  if (address % 64) {
    fault(w, op, FAULT_MISALIGNED, "tensor map at 0x%llx, no multiple of 64", (unsigned long long)address);
    return NULL;
  }
  if (!global_check(w, op, address, 128, 0)) return NULL;
  if (global_written(launch, address, 128)) {       // it would want fence.proxy.tensormap
    fault(w, op, FAULT_UNSUPPORTED, "tensor maps that the launch itself writes are not implemented");
    return NULL;
  }
  if (slot->key != address || memcmp(slot->raw, (const void *)address, 128)) {
    slot->key = 0;
    const char *wrong = decode((const uint8_t *)address, &slot->map);
    if (wrong) {
      fault(w, op, FAULT_DESCRIPTOR, "the tensor map %s", wrong);
      return NULL;
    }
    memcpy(slot->raw, (const void *)address, 128);
    slot->key = address;
  }
  if (slot->map.rank != dims) {
    fault(w, op, FAULT_DESCRIPTOR, "a %u-dimensional copy with a tensor map of %u dimensions", dims,
          slot->map.rank);
    return NULL;
  }
  return &slot->map;
}

// ---------------------------------------------------------------- boxes
static inline uint32_t swizzled(uint32_t at, uint32_t mode) {
  static const uint32_t MASK[4] = {0, 0x10, 0x30, 0x70};       // 32, 64, 128 bytes
  return at ^ (at >> 3 & MASK[mode]);
}

// bytes before the first one in bounds; bytes in bounds
typedef struct { uint64_t global; uint32_t smem, skip, valid; } Row;

static uint32_t box_rows(const TensorMap *m) { return m->box_bytes / (m->box[0] * m->size); }

static Row box_row(const TensorMap *m, const Coord *c, uint32_t row) {
  Row r = {.smem = row * m->box[0] * m->size, .global = m->address};
  int inside = 1;
  for (uint32_t k = 1; k < m->rank; k++) {
    uint32_t within = k + 1 == m->rank ? row : row % m->box[k];
    int64_t at = (int64_t)c->at[k] + within;
    if (k + 1 < m->rank) row /= m->box[k];
    if (at < 0 || at >= (int64_t)m->dim[k]) inside = 0;
    else r.global += (uint64_t)at * m->stride[k];
  }
  int64_t low = c->at[0] < 0 ? 0 : c->at[0], high = (int64_t)c->at[0] + m->box[0];
  if (high > (int64_t)m->dim[0]) high = m->dim[0];
  if (!inside || low >= high) return r;
  r.global += (uint64_t)low * m->size;
  r.skip = (uint32_t)(low - c->at[0]) * m->size;
  r.valid = (uint32_t)(high - low) * m->size;
  return r;
}

static void fill_row(uint8_t *smem, uint32_t base, const TensorMap *m, const Row *r, const uint8_t *src) {
  const uint32_t inner = m->box[0] * m->size;
  if (r->valid == inner && (inner <= 128 || !m->swizzle) && (base + r->smem) % 128 == 0) {
    // bits 4-6, from bits 7-9: the same all along
    const uint32_t at = base + r->smem, flip = swizzled(at, m->swizzle) ^ at;
    for (uint32_t i = 0; i < inner; i += 16) memcpy(smem + ((at + i) ^ flip), src + i, 16);
    return;
  }
  for (uint32_t i = 0; i < inner; i += 16) {
    uint8_t *to = smem + swizzled(base + r->smem + i, m->swizzle);
    if (r->skip <= i && i + 16 <= r->skip + r->valid) {
      memcpy(to, src + (i - r->skip), 16);
      continue;
    }
    memset(to, 0, 16);
    uint32_t low = i > r->skip ? i : r->skip, high = i + 16 < r->skip + r->valid ? i + 16 : r->skip +
        r->valid;
    if (low < high) memcpy(to + (low - i), src + (low - r->skip), high - low);
  }
}

static Status load_box(Async *a, const TensorMap *m, Cta *const *to, uint32_t n) {
  for (uint32_t i = 0, rows = box_rows(m); i < rows; i++) {
    Row r = box_row(m, &a->copy.coord, i);
    if (r.valid && !global_check_async(a, r.global, r.valid, 0)) return ST_FAULT;
    for (uint32_t k = 0; k < n; k++) fill_row(to[k]->smem, a->copy.smem, m, &r, (const uint8_t *)r.global);
  }
  return ST_NEXT;
}

static void read_box(Async *a, const TensorMap *m) {
  const uint32_t inner = m->box[0] * m->size;
  a->copy.buffer = malloc(m->box_bytes);
  for (uint32_t i = 0; i < m->box_bytes; i += 16)
    memcpy(a->copy.buffer + i, a->cta->smem + swizzled(a->copy.smem + i, m->swizzle), 16);
  (void)inner;
}

static Status write_box(Async *a, const TensorMap *m) {
  for (uint32_t i = 0, rows = box_rows(m); i < rows; i++) {
    Row r = box_row(m, &a->copy.coord, i);
    if (!r.valid) continue;
    if (!global_check_async(a, r.global, r.valid, 1)) return ST_FAULT;
    const uint8_t *src = a->copy.buffer + r.smem + r.skip;
    if (!a->copy.reduce) memcpy((void *)r.global, src, r.valid);
    else if (reduce_row(a, m, (uint8_t *)r.global, src, r.valid) == ST_FAULT) return ST_FAULT;
  }
  a->warp->launch->result->tma_store_bytes += m->box_bytes;
  return ST_NEXT;
}

// ---------------------------------------------------------------- reductions into global memory
#define REDUCE_INT(T)                                                        \
  do {                                                                       \
    T x, y;                                                                  \
    memcpy(&x, to, sizeof x), memcpy(&y, from, sizeof y);                    \
    x = kind == 1 ? (T)(x + y) : kind == 2 ? (x < y ? x : y) : kind == 3 ? (x > y ? x : y) \
      : kind == 6 ? (T)(x & y) : kind == 7 ? (T)(x | y) : (T)(x ^ y);        \
    memcpy(to, &x, sizeof x);                                                \
  } while (0)

static void reduce_half(uint8_t *to, const uint8_t *from, uint32_t kind, int bf16) {
  uint16_t x, y;
  memcpy(&x, to, 2), memcpy(&y, from, 2);
  const float a = half_value(x, bf16), b = half_value(y, bf16);
  x = half_round(kind == 1 ? a + b : kind == 2 ? (a < b ? a : b) : a > b ? a : b, bf16);
  memcpy(to, &x, 2);
}

// kind: 1 add, 2 min, 3 max, 6 and, 7 or, 8 xor. PTX ISA, "cp.reduce.async.bulk.tensor": types of each.
Status reduce_row(Async *a, const TensorMap *m, uint8_t *to, const uint8_t *from, uint32_t bytes) {
  const uint32_t kind = a->copy.reduce;
  const int half = m->dtype == 6 || m->dtype == 10, single = m->dtype == 7;
  if ((kind == 4 || kind == 5) || (half && kind > 3) || (single && kind != 1) || (m->size == 1) ||
      (m->dtype == 1) || m->dtype > 10 ||
      m->dtype == 8 || m->dtype == 9)
    return fault(a->warp, a->op, FAULT_UNSUPPORTED, "a reduction of kind %u on a tensor map of type %u is "
                 "not implemented", kind, m->dtype);
  for (uint32_t i = 0; i < bytes; i += m->size, to += m->size, from += m->size) {
    if (half) {
      reduce_half(to, from, kind, m->dtype == 10);
    } else if (single) {
      float x, y;
      memcpy(&x, to, 4), memcpy(&y, from, 4);
      x += y;
      memcpy(to, &x, 4);
    } else if (m->dtype == 2) REDUCE_INT(uint32_t);
    else if (m->dtype == 3) REDUCE_INT(int32_t);
    else if (m->dtype == 4) REDUCE_INT(uint64_t);
    else REDUCE_INT(int64_t);
  }
  return ST_NEXT;
}

// ---------------------------------------------------------------- copies into shared memory
// Destinations of a copy: (CTA of the data, CTA of the barrier). With multicast, data and signal go to the
// same offsets in each CTA of the mask; with cta_group::2 the signal goes to the CTA of the pair that the
// barrier's address names.
static uint32_t destinations(Async *a, Cta **data, Cta **barrier) {
  Cluster *c = a->cta->cluster;
  uint32_t n = 0;
  if (!a->copy.multicast) {
    data[0] = a->copy.other;
    barrier[0] = &c->ctas[a->copy.mbar >> SMEM_RANK_SHIFT];
    return 1;
  }
  for (uint32_t r = 0; r < c->launch->cluster_size; r++) {
    if (!(a->copy.multicast >> r & 1)) continue;
    data[n] = &c->ctas[r];
    barrier[n++] = &c->ctas[a->copy.pair ? (r & ~1u) | (a->copy.mbar >> SMEM_RANK_SHIFT & 1) : r];
  }
  return n;
}

// What the copy reads or writes in global memory, ordered as of its issue.
static int global_side(Async *a, const Agent *x, int write) {
  if (!a->warp->launch->hazards || a->kind == A_BULK_DSMEM) return 1;
  if (a->kind == A_BULK_LOAD || a->kind == A_BULK_STORE)
    return global_order(x, a->copy.global, a->copy.bytes, write);
  for (uint32_t i = 0, rows = box_rows(&a->copy.map); i < rows; i++) {
    Row r = box_row(&a->copy.map, &a->copy.coord, i);
    if (r.valid && !global_order(x, r.global, r.valid, write)) return 0;
  }
  return 1;
}

static Status issue_load(Async *a, uint32_t bytes, uint32_t tag) {
  Cta *data[16], *barrier[16];
  uint32_t n = destinations(a, data, barrier);
  Warp *w = a->warp;
  a->copy.bytes = bytes;
  if (state(w)->bulk.lanes >> a->lane & 1) lanes_share_waits(w);
  for (uint32_t k = 0; k < n; k++) {
    Agent x = agent_of(w, a->op);
    x.async = 1;
    x.tag = (uint8_t)tag;
    if (mbar_copy_issued(w, a->op, barrier[k], a->copy.mbar & SMEM_OFFSET, &x) == ST_FAULT) return ST_FAULT;
    if (w->launch->hazards && !smem_touch(data[k], a->copy.smem, bytes, 1, &x)) return ST_FAULT;
    if (w->launch->hazards && a->kind == A_BULK_DSMEM &&
        !smem_touch(w->cta, a->copy.other_smem, bytes, 0, &x)) return ST_FAULT;
    if (n > 1) x.epoch = 0;                     // whoever knows of one of its barriers knows that it has read
    if (!k && !global_side(a, &x, 0)) return ST_FAULT;
  }
  return async_issue(a);
}

static Status finish_load(Async *a) {
  Cta *data[16], *barrier[16];
  uint32_t n = destinations(a, data, barrier);
  Warp *w = a->warp;
  async_unlink(a);
  if (a->kind == A_TMA_LOAD) {
    if (load_box(a, &a->copy.map, data, n) == ST_FAULT) return ST_FAULT;
  } else {
    if (a->kind == A_BULK_LOAD && !global_check_async(a, a->copy.global, a->copy.bytes, 0)) return ST_FAULT;
    if (a->kind == A_BULK_DSMEM && a->cta->exited)
      return fault(w, a->op, FAULT_LEAK, "the CTA ends while a bulk copy to CTA rank %u still reads its "
                   "shared memory", a->copy.other->rank);
    const uint8_t *from = a->kind == A_BULK_LOAD ? (const uint8_t *)a->copy.global : a->cta->smem +
        a->copy.other_smem;
    for (uint32_t k = 0; k < n; k++) memcpy(data[k]->smem + a->copy.smem, from, a->copy.bytes);
  }
  w->launch->result->tma_load_bytes += a->copy.bytes;  // read once, however many CTAs receive it
  for (uint32_t k = 0; k < n; k++)
    if (mbar_copy_done(w, a->op, barrier[k], a->copy.mbar & SMEM_OFFSET, a->copy.bytes) == ST_FAULT)
      return ST_FAULT;
  async_free(w->launch, a);
  return ST_NEXT;
}

static int multicast_ok(Warp *w, const Op *op, uint32_t ranks) {
  if (ranks && !(ranks >> w->launch->cluster_size)) return 1;
  fault(w, op, FAULT_MEMORY, "multicast to CTA mask 0x%x of a cluster of %u", ranks, w->launch->cluster_size);
  return 0;
}

// Without multicast, the barrier is in the CTA that receives the data; with cta_group::2, in its pair.
static int barrier_fits(Warp *w, const Op *op, uint32_t to, uint32_t mbar, uint32_t pair) {
  if ((to >> SMEM_RANK_SHIFT | pair) == (mbar >> SMEM_RANK_SHIFT | pair)) return 1;
  fault(w, op, FAULT_BARRIER, "a copy to CTA rank %u with an mbarrier of rank %u: both must be in one CTA",
        to >> SMEM_RANK_SHIFT, mbar >> SMEM_RANK_SHIFT);
  return 0;
}

// cp.async.bulk.tensor, global to shared. sub [2:0] dimensions, [3] multicast, [4] cta_group::2, [5]
// .shared::cta.
// Refs: destination, tensor map, mbarrier, CTA mask, coordinates. imm: offsets of destination (low) and
// mbarrier (high);
// imm2: offset of the tensor map.
Status exec_tma_load(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t dims = op->sub & 7;
  EACH_LANE(l, mask) {
    const TensorMap *m = tensor_map(w, op, REG64(w, refs[1])[l] + (uint64_t)op->imm2, dims);
    if (!m) return ST_FAULT;
    uint32_t to = REG32(w, refs[0])[l] + (uint32_t)op->imm, mbar = REG32(w, refs[2])[l] +
        (uint32_t)((uint64_t)op->imm >> 32);
    uint32_t ranks = op->sub & 8 ? REG32(w, refs[3])[l] & 0xffff : 0;
    if (op->sub & 8 && !multicast_ok(w, op, ranks)) return ST_FAULT;
    Cta *cta = shared_target(w, op, to, m->box_bytes, 128, !(op->sub & 32));
    if (!cta || !shared_target(w, op, mbar, 8, 8, !(op->sub & 32))) return ST_FAULT;
    if (!ranks && !barrier_fits(w, op, to, mbar, op->sub >> 4 & 1)) return ST_FAULT;
    Async *a = async_new(w->launch, A_TMA_LOAD, w, op);
    a->copy.map = *m;
    for (uint32_t k = 0; k < dims; k++) a->copy.coord.at[k] = (int32_t)REG32(w, refs[4 + k])[l];
    a->copy.smem = to & SMEM_OFFSET, a->copy.mbar = mbar, a->copy.other = cta;
    a->copy.multicast = ranks, a->copy.pair = op->sub >> 4 & 1;
    if (issue_load(a, m->box_bytes, m->swizzle + 1) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

// ---------------------------------------------------------------- copies out of shared memory
// Checks what a copy out of shared memory reads: 0 after a fault.
static int store_source(Async *a, uint32_t bytes, const Agent *x) {
  Cta *cta = a->warp->cta;
  const TensorMap *m = &a->copy.map;
  uint32_t inner = a->kind == A_TMA_STORE ? m->box[0] * m->size : 0;
  if (!inner || inner != (m->swizzle ? 16u << m->swizzle : inner))
    return smem_touch(cta, a->copy.smem, bytes, 0, x);
  for (uint32_t i = 0, rows = box_rows(m); i < rows; i++) {      // rows out of bounds are not read
    Row r = box_row(m, &a->copy.coord, i);
    uint32_t low = m->swizzle ? 0 : r.skip, n = m->swizzle ? inner : r.valid;
    if (r.valid && !smem_touch(cta, a->copy.smem + r.smem + low, n, 0, x)) return 0;
  }
  return 1;
}

static Status issue_store(Async *a, uint32_t bytes) {
  Warp *w = a->warp;
  WarpState *s = state(w);
  a->copy.group = s->bulk.open;
  a->copy.bytes = bytes;
  s->bulk.lanes |= 1u << a->lane;
  uint32_t *firsts[] = {&s->bulk.current[a->lane], &s->bulk.unread[a->lane], &s->bulk.unwritten[a->lane]};
  for (uint32_t i = 0; i < 3; i++)
    if (!*firsts[i]) *firsts[i] = a->copy.group;
  if (w->launch->hazards) {
    lanes_share_waits(w);
    Agent x = agent_of(w, a->op);
    x.async = 1;
    x.comp = (uint16_t)warp_comp(w, C_BULK_READ);
    x.epoch = a->copy.group;
    const uint32_t seen = lanes_hide(w, a->lane, &x);
    const int ordered = store_source(a, bytes, &x);
    lanes_restore(w, seen);
    if (!ordered) return ST_FAULT;
    x.comp = (uint16_t)warp_comp(w, C_BULK_WRITE);
    x.strong = a->copy.reduce != 0;             // its updates are atomic
    if (!global_side(a, &x, 1)) return ST_FAULT;
  }
  return async_issue(a);
}

static Status step_store(Async *a) {
  Warp *w = a->warp;
  if (!a->copy.step++) {
    if (a->kind == A_TMA_STORE) {
      read_box(a, &a->copy.map);
    } else {
      a->copy.buffer = malloc(a->copy.bytes);
      memcpy(a->copy.buffer, a->cta->smem + a->copy.smem, a->copy.bytes);
    }
    return ST_NEXT;
  }
  async_unlink(a);
  Status s = ST_NEXT;
  if (a->kind == A_TMA_STORE) {
    s = write_box(a, &a->copy.map);
  } else if (!global_check_async(a, a->copy.global, a->copy.bytes, 1)) {
    s = ST_FAULT;
  } else {
    memcpy((void *)a->copy.global, a->copy.buffer, a->copy.bytes);
    w->launch->result->tma_store_bytes += a->copy.bytes;
  }
  free(a->copy.buffer);
  async_free(w->launch, a);
  return s;
}

Status run_copy(Async *a) {
  return a->kind == A_TMA_STORE || a->kind == A_BULK_STORE ? step_store(a) : finish_load(a);
}

// cp.async.bulk.tensor and cp.reduce.async.bulk.tensor, shared to global. sub [2:0] dimensions, [6:3]
// reduction.
// Refs: tensor map, source, coordinates. imm: offset of the source; imm2: of the tensor map.
Status exec_tma_store(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t dims = op->sub & 7;
  EACH_LANE(l, mask) {
    const TensorMap *m = tensor_map(w, op, REG64(w, refs[0])[l] + (uint64_t)op->imm2, dims);
    if (!m) return ST_FAULT;
    uint32_t from = REG32(w, refs[1])[l] + (uint32_t)op->imm;
    if (!shared_target(w, op, from, m->box_bytes, 128, 0)) return ST_FAULT;
    Async *a = async_new(w->launch, A_TMA_STORE, w, op);
    a->copy.map = *m;
    for (uint32_t k = 0; k < dims; k++) a->copy.coord.at[k] = (int32_t)REG32(w, refs[2 + k])[l];
    a->copy.smem = from & SMEM_OFFSET;
    a->copy.reduce = op->sub >> 3 & 15;
    a->lane = l;
    if (issue_store(a, m->box_bytes) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

// cp.async.bulk. sub [1:0]: 0 global to shared, 1 shared to global, 2 shared to shared of another CTA; [3]
// multicast.
// Refs: destination, source, size, mbarrier, CTA mask. imm: offsets of destination (low) and mbarrier (high);
// imm2: of source.
Status exec_bulk_copy(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t kind = op->sub & 3;
  static const AsyncKind KIND[3] = {A_BULK_LOAD, A_BULK_STORE, A_BULK_DSMEM};
  EACH_LANE(l, mask) {
    uint32_t size = REG32(w, refs[2])[l], ranks = op->sub & 8 ? REG32(w, refs[4])[l] & 0xffff : 0;
    uint64_t global = kind == 0 ? REG64(w, refs[1])[l] + (uint64_t)op->imm2 : kind == 1 ? REG64(w,
        refs[0])[l] + (uint64_t)(int32_t)op->imm : 0;
    if (!size || size % 16 || global % 16)
      return fault(w, op, FAULT_MISALIGNED, "cp.async.bulk of %u bytes, global address 0x%llx: both must be "
                   "multiples of 16", size,
                   (unsigned long long)global);
    if (op->sub & 8 && !multicast_ok(w, op, ranks)) return ST_FAULT;
    Async *a = async_new(w->launch, KIND[kind], w, op);
    a->lane = l;
    a->copy.global = global;
    if (kind == 1) {
      uint32_t from = REG32(w, refs[1])[l] + (uint32_t)op->imm2;
      if (!shared_target(w, op, from, size, 16, 0)) return ST_FAULT;
      a->copy.smem = from & SMEM_OFFSET;
      if (issue_store(a, size) == ST_FAULT) return ST_FAULT;
      continue;
    }
    uint32_t to = REG32(w, refs[0])[l] + (uint32_t)op->imm, mbar = REG32(w, refs[3])[l] +
        (uint32_t)((uint64_t)op->imm >> 32);
    a->copy.other = shared_target(w, op, to, size, 16, 1);
    if (!a->copy.other || !shared_target(w, op, mbar, 8, 8, 1)) return ST_FAULT;
    if (!ranks && !barrier_fits(w, op, to, mbar, 0)) return ST_FAULT;
    a->copy.smem = to & SMEM_OFFSET, a->copy.mbar = mbar, a->copy.multicast = ranks;
    if (kind == 2) {
      uint32_t from = REG32(w, refs[1])[l] + (uint32_t)op->imm2;
      if (!shared_target(w, op, from, size, 16, 0)) return ST_FAULT;
      a->copy.other_smem = from & SMEM_OFFSET;
    }
    if (issue_load(a, size, 0) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

// ---------------------------------------------------------------- bulk groups
Status exec_bulk_commit(Warp *w, const Op *op, uint32_t mask) {
  (void)op;
  BulkGroups *g = &state(w)->bulk;
  EACH_LANE(l, mask) {
    g->first[l][g->committed[l]++ % BULK_RECENT] = g->current[l];
    g->current[l] = 0;
  }
  g->open++;
  return ST_NEXT;
}

// The first epoch that may be pending after a lane has waited for all but its `left` latest groups; 0: none.
static uint32_t still_pending(const BulkGroups *g, uint32_t lane, uint32_t left) {
  const uint32_t committed = g->committed[lane];
  for (uint32_t n = left < committed ? committed - left : 0; n < committed; n++)
    if (g->first[lane][n % BULK_RECENT]) return g->first[lane][n % BULK_RECENT];
  return g->current[lane];
}

// The last epoch that every lane has waited for, of those that have ended.
static uint32_t bulk_done(const BulkGroups *g, const uint32_t *pending) {
  uint32_t done = g->open - 1;
  EACH_LANE(l, g->lanes)
    if (pending[l] && pending[l] <= done) done = pending[l] - 1;
  return done;
}

int bulk_unread(const BulkGroups *g) {
  EACH_LANE(l, g->lanes)
    if (g->unread[l]) return 1;
  return 0;
}

// cp.async.bulk.wait_group[.read] imm. sub 1: .read (the sources may be overwritten; the writes may be still
// under way).
Status exec_bulk_wait(Warp *w, const Op *op, uint32_t mask) {
  BulkGroups *g = &state(w)->bulk;
  Cluster *c = cluster_of(w);
  const int written = !(op->sub & 1);
  if ((uint32_t)op->imm >= BULK_RECENT)
    return fault(w, op, FAULT_UNSUPPORTED, "cp.async.bulk.wait_group for all but %u groups: not implemented",
                 (uint32_t)op->imm);
  uint32_t pending[LANES] = {0};
  EACH_LANE(l, mask & g->lanes) {
    pending[l] = still_pending(g, l, (uint32_t)op->imm);
    if (g->unread[l] && (!pending[l] || g->unread[l] < pending[l])) g->unread[l] = pending[l];
    if (written && g->unwritten[l] && (!pending[l] || g->unwritten[l] < pending[l])) g->unwritten[l] = pending[l];
  }
  for (Async *a = c->queue_head, *next; a; a = next) {
    next = a->next;
    if (a->warp != w || (a->kind != A_TMA_STORE && a->kind != A_BULK_STORE) || !(mask >> a->lane & 1)) continue;
    if (pending[a->lane] && a->copy.group >= pending[a->lane]) continue;
    if (!a->copy.step && run_copy(a) == ST_FAULT) return ST_FAULT;
    if (written && run_copy(a) == ST_FAULT) return ST_FAULT;
  }
  if (w->launch->hazards) {
    uint32_t *known = &clock_g(c, state(w)->clock)[warp_comp(w, C_BULK_WRITE)];
    const uint32_t read = bulk_done(g, g->unread), wrote = bulk_done(g, g->unwritten);
    if (state(w)->bulk_read_held < read) state(w)->bulk_read_held = read;
    if (w->launch->hazards != HAZARDS_STRICT || g->lanes == w->live) lanes_share_waits(w);
    if (written && *known < wrote) *known = wrote;
  }
  return ST_NEXT;
}
