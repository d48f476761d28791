// Vector clocks, and the shadows of shared memory and TMEM that they are checked against.
#include "hazard.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---------------------------------------------------------------- clocks
static uint32_t round16(uint32_t n) { return (n + 15) & ~15u; }

int clocks_init(Cluster *c) {
  c->comp_cap = round16(C_PER_WARP * c->nwarps + 1 + 32 * c->launch->cluster_size);
  c->stride = c->comp_cap + round16(3 * c->nwarps);
  c->clock_cap = c->nwarps + 96 * c->launch->cluster_size;
  c->clocks = calloc((size_t)c->clock_cap * c->stride, sizeof *c->clocks);
  c->free_clocks = malloc(c->clock_cap * sizeof *c->free_clocks);
  return c->clocks && c->free_clocks;
}

void clocks_reset(Cluster *c) {
  memset(c->clocks, 0, (size_t)c->nclocks * c->stride * sizeof *c->clocks);
  c->nclocks = c->nfree = 0;
  c->ncomps = C_PER_WARP * c->nwarps + 1;
  for (uint32_t i = 0; i < c->nextra; i++) c->extra[i].count = c->extra[i].writes = 0;
  c->nextra_used = 0;
  c->extra_free = 0;
}

static void clocks_grow(Cluster *c, uint32_t clock_cap, uint32_t comp_cap) {
  uint32_t stride = comp_cap + round16(3 * c->nwarps);
  uint32_t *grown = calloc((size_t)clock_cap * stride, sizeof *grown);
  for (uint32_t i = 0; i < c->nclocks; i++) {
    memcpy(grown + (size_t)i * stride, clock_g(c, i), c->comp_cap * sizeof *grown);
    memcpy(grown + (size_t)i * stride + comp_cap, clock_a(c, i), round16(3 * c->nwarps) * sizeof *grown);
  }
  free(c->clocks);
  c->clocks = grown;
  c->stride = stride;
  c->comp_cap = comp_cap;
  if (clock_cap > c->clock_cap) c->free_clocks = realloc(c->free_clocks, clock_cap * sizeof *c->free_clocks);
  c->clock_cap = clock_cap;
}

ClockId clock_new(Cluster *c) {
  if (c->nfree) {
    ClockId id = c->free_clocks[--c->nfree];
    memset(clock_g(c, id), 0, c->stride * sizeof *c->clocks);
    return id;
  }
  if (c->nclocks == c->clock_cap) clocks_grow(c, 2 * c->clock_cap, c->comp_cap);
  return c->nclocks++;
}

void clock_free(Cluster *c, ClockId id) {
  if (id != NO_CLOCK) c->free_clocks[c->nfree++] = id;
}

uint16_t comp_new(Cluster *c) {
  if (c->ncomps == c->comp_cap) clocks_grow(c, c->clock_cap, 2 * c->comp_cap);
  return (uint16_t)c->ncomps++;
}

void clock_join(Cluster *c, ClockId into, ClockId from) {
  if (from == NO_CLOCK || into == NO_CLOCK) return;
  uint32_t *restrict d = clock_g(c, into);
  const uint32_t *restrict s = clock_g(c, from);
  for (uint32_t i = 0; i < c->stride; i++) d[i] = d[i] > s[i] ? d[i] : s[i];
}

void clock_publish(Warp *w) {
  Cluster *c = cluster_of(w);
  clock_g(c, state(w)->clock)[warp_comp(w, C_WARP)]++;
}

ClockId clock_snapshot(Warp *w) {
  if (!w->launch->hazards) return NO_CLOCK;
  lanes_share_waits(w);
  Cluster *c = cluster_of(w);
  ClockId id = clock_new(c);
  memcpy(clock_g(c, id), clock_g(c, state(w)->clock), c->stride * sizeof *c->clocks);
  clock_publish(w);
  return id;
}

void clock_release(Warp *w, ClockId into) {
  if (!w->launch->hazards) return;
  lanes_share_waits(w);
  clock_join(cluster_of(w), into, state(w)->clock);
  clock_publish(w);
}

// fence.acq_rel and stronger: a relaxed arrival after it releases what came before it, and what a relaxed
// wait before it saw comes before what follows.
void clock_fence(Warp *w) {
  if (!w->launch->hazards) return;
  lanes_share_waits(w);
  WarpState *s = state(w);
  if (s->observed != NO_CLOCK) {
    clock_acquire(w, s->observed);
    memset(clock_g(cluster_of(w), s->observed), 0, cluster_of(w)->stride * sizeof *cluster_of(w)->clocks);
  }
  if (s->fenced == NO_CLOCK) s->fenced = clock_new(cluster_of(w));
  clock_join(cluster_of(w), s->fenced, s->clock);
  clock_publish(w);
}

void clock_release_relaxed(Warp *w, ClockId into) {
  if (!w->launch->hazards) return;
  WarpState *s = state(w);
  uint32_t *started = &clock_g(cluster_of(w), into)[warp_comp(w, C_WARP)];
  if (!*started) *started = 1;
  uint32_t *inits = &clock_g(cluster_of(w), into)[warp_comp(w, C_INIT)];
  if (*inits < s->fenced_inits) *inits = s->fenced_inits;
  clock_join(cluster_of(w), into, s->fenced);
}

void clock_acquire_relaxed(Warp *w, ClockId from) {
  if (!w->launch->hazards) return;
  WarpState *s = state(w);
  if (s->observed == NO_CLOCK) s->observed = clock_new(cluster_of(w));
  clock_join(cluster_of(w), s->observed, from);
}

void clock_acquire(Warp *w, ClockId from) {
  if (!w->launch->hazards) return;
  clock_join(cluster_of(w), state(w)->clock, from);
  lanes_meet(w);
}

void clock_proxy_fence(Warp *w, int shared, int global) {
  if (!w->launch->hazards) return;
  Cluster *c = cluster_of(w);
  const uint32_t *g = clock_g(c, state(w)->clock);
  uint32_t *a = clock_a(c, state(w)->clock), *in_global = clock_global(c, state(w)->clock);
  for (uint32_t i = 0; shared && i < 2 * c->nwarps; i++) a[i] = a[i] > g[i] ? a[i] : g[i];
  for (uint32_t i = 0; global && i < c->nwarps; i++) in_global[i] = in_global[i] > g[i] ? in_global[i] : g[i];
  clock_publish(w);
}

int warp_ordered(Warp *w, uint32_t comp, uint32_t epoch) {
  return !w->launch->hazards || clock_g(cluster_of(w), state(w)->clock)[comp] >= epoch;
}

Agent agent_of(Warp *w, const Op *op) {
  Agent x = {.warp = w, .op = op, .line = op->line, .comp = (uint16_t)warp_comp(w, C_WARP)};
  if (!w->launch->hazards) return x;
  Cluster *c = cluster_of(w);
  x.g = clock_g(c, state(w)->clock);
  x.a = clock_a(c, state(w)->clock);
  x.epoch = x.g[x.comp];
  return x;
}

// ---------------------------------------------------------------- tcgen05 fences
// PTX ISA, "tcgen05.fence": without strict checks a wait alone orders a warp's tcgen05 operations for what it
// releases, and an acquire alone orders those of others before its own; widely used kernels leave the fences
// out.
Agent tensor_agent(Warp *w, const Op *op) {
  Agent x = agent_of(w, op);
  if (w->launch->hazards != HAZARDS_STRICT) return x;
  x.unfenced = x.g;
  x.g = clock_g(cluster_of(w), state(w)->tensor_clock);
  return x;
}

void tensor_waited(Warp *w, uint32_t kind, uint32_t epoch) {
  if (!w->launch->hazards) return;
  const ClockId id = w->launch->hazards != HAZARDS_STRICT ? state(w)->clock : state(w)->tensor_clock;
  clock_g(cluster_of(w), id)[warp_comp(w, kind)] = epoch;
}

void tensor_fence(Warp *w, int after) {
  if (w->launch->hazards != HAZARDS_STRICT) return;
  Cluster *c = cluster_of(w);
  WarpState *s = state(w);
  if (after) {
    clock_join(c, s->tensor_clock, s->clock);
    return;
  }
  for (uint32_t kind = C_TMEM_LD; kind <= C_TMEM_ST; kind++)
    clock_g(c, s->clock)[warp_comp(w, kind)] = clock_g(c, s->tensor_clock)[warp_comp(w, kind)];
}

// ---------------------------------------------------------------- lanes of one warp
// PTX ISA, "bar.warp.sync": it orders memory accesses among the threads that take part. The emulator runs
// lanes together, so what a missing one breaks is found by these rules alone: a bulk copy reads what other lanes
// wrote, or other lanes overwrite what only the lane that waited for the copy knows to have been read.
void lanes_share_waits(Warp *w) {
  WarpState *s = state(w);
  if (!s->bulk_read_held) return;
  uint32_t *known = &clock_g(cluster_of(w), s->clock)[warp_comp(w, C_BULK_READ)];
  if (*known < s->bulk_read_held) *known = s->bulk_read_held;
  s->bulk_read_held = 0;
}

void lanes_meet(Warp *w) {
  if (w->launch->hazards != HAZARDS_STRICT) return;
  WarpState *s = state(w);
  lanes_share_waits(w);
  s->writers = s->global_writers = s->acquirers = 0;
  s->acquires_met = s->acquires;
  s->met_epoch = s->synced_epoch = clock_g(cluster_of(w), s->clock)[warp_comp(w, C_WARP)];
  clock_publish(w);
}

void engine_warp_sync(Warp *w, uint32_t mask) {
  if (mask == w->live) {
    lanes_meet(w);
  } else if (w->launch->hazards) {
    state(w)->synced_epoch = clock_g(cluster_of(w), state(w)->clock)[warp_comp(w, C_WARP)];
    clock_publish(w);
  }
}

uint32_t lanes_hide(Warp *w, uint32_t lane, Agent *x) {
  const WarpState *s = state(w);
  uint32_t *visible = &clock_a(cluster_of(w), s->clock)[warp_comp(w, C_WARP)], was = *visible;
  x->apart = w->launch->hazards == HAZARDS_STRICT && (s->writers & ~(1u << lane)) && was > s->met_epoch;
  if (x->apart) *visible = s->met_epoch;
  return was;
}

void lanes_restore(Warp *w, uint32_t was) {
  clock_a(cluster_of(w), state(w)->clock)[warp_comp(w, C_WARP)] = was;
}

// ---------------------------------------------------------------- reports
void comp_name(const Cluster *c, uint32_t comp, uint32_t epoch, char *out, size_t size) {
  static const char *const kinds[] = {"", "cp.async of ", "a bulk copy (reading) of ",
                                      "a bulk copy (writing) of ",
                                      "tcgen05.ld of ", "tcgen05.st of ", "wgmma of ", "", "",
                                      "the tensor core for "};
  const uint32_t n = c->nwarps, per = c->nwarps / c->launch->cluster_size;
  if (comp < C_PER_WARP * n) {
    uint32_t index = comp % n;
    if (c->launch->cluster_size > 1)
      snprintf(out, size, "%swarp %u of CTA rank %u", kinds[comp / n], index % per, index / per);
    else
      snprintf(out, size, "%swarp %u", kinds[comp / n], index);
    return;
  }
  for (uint32_t r = 0; r < c->launch->cluster_size; r++)
    for (uint32_t i = 0; i < c->ctas[r].nmbars; i++)
      if (c->ctas[r].mbars[i].comp == comp) {
        snprintf(out, size, "an asynchronous copy that signals phase %u of the mbarrier at 0x%x of CTA rank "
                 "%u", epoch - 1,
                 c->ctas[r].mbars[i].offset, r);
        return;
      }
  snprintf(out, size, "an earlier asynchronous operation");
}

static void place(const Cta *cta, const Shadow *s, uint32_t mask, char *out, size_t size) {
  if (s >= cta->smem_shadow && s < cta->smem_shadow + (cta->launch->smem_end + GRANULE - 1) / GRANULE) {
    uint32_t at = (uint32_t)(s - cta->smem_shadow) * GRANULE + (uint32_t)__builtin_ctz(mask);
    snprintf(out, size, "shared memory at offset 0x%x of CTA rank %u", at, cta->rank);
  } else {
    uint32_t i = (uint32_t)(s - cta->tmem_shadow);
    snprintf(out, size, "TMEM column %u, lanes %u-%u, of CTA rank %u", i / 4, i % 4 * 32, i % 4 * 32 + 31,
             cta->rank);
  }
}

static const char *missing(const Cluster *c, uint32_t comp) {
  if (c->launch->hazards == HAZARDS_STRICT && (comp / c->nwarps == C_TMEM_LD || comp / c->nwarps ==
                                               C_TMEM_ST))
    return "tcgen05.wait and tcgen05.fence::before_thread_sync (advice) by that warp, then a barrier, must "
        "come between";
  switch (comp / c->nwarps) {
    case C_CP_ASYNC: return "cp.async.wait_group, or an mbarrier that cp.async.mbarrier.arrive signals, must "
        "come between";
    case C_BULK_READ: return "cp.async.bulk.wait_group[.read] by that warp, then a barrier (bar.warp.sync for "
        "its own lanes), must come between";
    case C_BULK_WRITE: return "cp.async.bulk.wait_group by that warp, then a barrier, must come between";
    case C_TMEM_LD: return "tcgen05.wait::ld by that warp, before the barrier or arrive that hands the TMEM "
        "on, must come between";
    case C_TMEM_ST: return "tcgen05.wait::st by that warp, before the barrier or arrive that hands the TMEM "
        "on, must come between";
    case C_WGMMA: return "wgmma.wait_group by that warp must come between";
    case C_PIPE: return "waiting for an mbarrier that a later tcgen05.commit by that warp signals must come "
        "between";
  }
  return comp < C_PER_WARP * c->nwarps ? "a barrier must come between" : "waiting for that phase must come "
      "between";
}

static int conflict(Cta *cta, Shadow *s, uint32_t mask, int write, const Agent *x, uint16_t comp,
                    uint32_t epoch,
                    uint32_t line, int other_write) {
  const Cluster *c = cta->cluster;
  char where[96], who[128];
  place(cta, s, mask, where, sizeof where);
  comp_name(c, comp, epoch, who, sizeof who);
  if (x->unfenced && x->unfenced[comp] >= epoch) {
    fault(x->warp, x->op, FAULT_RACE, "advice: %s: %s what %s %s at PTX line %u; they are ordered, but no "
          "tcgen05.fence::after_thread_sync "
          "follows the wait that orders them", where, write ? "writes" : "reads", who, other_write ? "wrote"
              : "read", line);
    return 0;
  }
  if (x->apart && comp == warp_comp(x->warp, C_WARP) && x->g[comp] >= epoch) {
    fault(x->warp, x->op, FAULT_RACE, "advice: %s: a bulk copy reads what other lanes of the warp wrote at PTX "
          "line %u, with no bar.warp.sync between", where, line);
    return 0;
  }
  const char *me = write ? "writes" : "reads", *did = other_write ? "wrote" : "read";
  if (x->async && generic_comp(c, comp) && x->g[comp] >= epoch)
    fault(x->warp, x->op, FAULT_PROXY_FENCE,
          "%s: %s through the async proxy what %s %s through the generic proxy at PTX line %u; they are "
              "ordered, but no "
          "fence.proxy.async comes between", where, me, who, did, line);
  else {
    char self[128];
    comp_name(c, x->comp, x->epoch, self, sizeof self);
    fault(x->warp, x->op, FAULT_RACE, "race in %s: %s %s what %s %s at PTX line %u, with nothing that orders "
          "the two; %s",
          where, self, me, who, did, line, missing(c, comp));
  }
  return 0;
}

// ---------------------------------------------------------------- shadow entries
static Extra *extra_new(Cluster *c, Shadow *s) {
  if (c->extra_free) {
    s->more = c->extra_free;
    c->extra_free = c->extra[s->more - 1].next_free;
  } else {
    if (c->nextra_used == c->nextra) {
      uint32_t n = c->nextra ? 2 * c->nextra : 256;
      if (n > 65535) n = 65535;
      if (n == c->nextra) return NULL;
      c->extra = realloc(c->extra, n * sizeof *c->extra);
      memset(c->extra + c->nextra, 0, (n - c->nextra) * sizeof *c->extra);
      c->nextra = n;
    }
    s->more = (uint16_t)++c->nextra_used;
  }
  Extra *e = &c->extra[s->more - 1];
  e->count = e->writes = 0;
  return e;
}

static void extra_add(Extra *e, Access a, int write) {
  if (e->count == e->cap) {
    e->cap = e->cap ? (uint16_t)(2 * e->cap) : 8;
    e->item = realloc(e->item, e->cap * sizeof *e->item);
  }
  if (write) {
    e->item[e->count++] = e->item[e->writes];
    e->item[e->writes++] = a;
  } else {
    e->item[e->count++] = a;
  }
}

static void extra_remove(Extra *e, uint32_t i) {
  if (i < e->writes) {
    e->item[i] = e->item[--e->writes];
    e->item[e->writes] = e->item[--e->count];
  } else {
    e->item[i] = e->item[--e->count];
  }
}

// An entry that holds several accesses: exact to the sixteenth.
static int extra_touch(Cta *cta, Shadow *s, uint32_t mask, int write, const Agent *x) {
  Cluster *c = cta->cluster;
  Extra *e = &c->extra[s->more - 1];
  for (uint32_t i = 0; i < (write ? e->count : e->writes); i++) {
    const Access *o = &e->item[i];
    if ((o->mask & mask) && !(o->strong && x->strong) && !access_before(c, x, o->comp, o->epoch,
        i < e->writes))
      return conflict(cta, s, o->mask & mask, write, x, o->comp, o->epoch, o->line, i < e->writes);
  }
  for (uint32_t i = e->count; i-- > (write ? 0 : e->writes);) {
    Access *o = &e->item[i];
    int same = o->comp == x->comp && o->epoch == x->epoch;
    // a concurrent reader stays
    if (!write && !same && !access_before(c, x, o->comp, o->epoch, 0)) continue;
    o->mask &= (uint16_t)~mask;
    if (!o->mask) extra_remove(e, i);
  }
  extra_add(e, (Access){x->epoch, x->line, x->comp, (uint16_t)mask, x->strong}, write);
  if (write) s->init |= (uint16_t)mask;
  if (write && e->count == 1) {
    s->wcomp = x->comp, s->wepoch = x->epoch, s->wline = x->line, s->wmask = (uint16_t)mask, s->rmask = 0;
    e->next_free = c->extra_free;
    c->extra_free = s->more;
    s->more = 0;
  }
  return 1;
}

static int spill(Cta *cta, Shadow *s, uint32_t mask, int write, const Agent *x) {
  Extra *e = extra_new(cta->cluster, s);
  if (!e) {                       // out of entries: keep the newest access only (misses races, invents none)
    if (write)
      s->wcomp = x->comp, s->wepoch = x->epoch, s->wline = x->line, s->wmask = (uint16_t)mask,
          s->init |= (uint16_t)mask;
    else s->rcomp = x->comp, s->repoch = x->epoch, s->rline = x->line, s->rmask = (uint16_t)mask;
    return 1;
  }
  if (s->wmask) extra_add(e, (Access){s->wepoch, s->wline, s->wcomp, s->wmask, s->tag == TAG_STRONG}, 1);
  if (s->rmask) extra_add(e, (Access){s->repoch, s->rline, s->rcomp, s->rmask, s->barrier >> 2}, 0);
  return extra_touch(cta, s, mask, write, x);
}

static int uninitialised(Cta *cta, Shadow *s, uint32_t mask, const Agent *x) {
  char where[96];
  place(cta, s, mask & ~(uint32_t)s->init, where, sizeof where);
  fault(x->warp, x->op, FAULT_UNINITIALISED, "reads %s, which nothing has written", where);
  return 0;
}

int shadow_slow(Cta *cta, Shadow *s, uint32_t mask, int write, const Agent *x) {
  const Cluster *c = cta->cluster;
  if (s->gen != cta->gen) *s = (Shadow){.gen = cta->gen};
  if (s->barrier && mask & ((s->barrier & 1 ? 0xffu : 0) | (s->barrier & 2 ? 0xff00u : 0))) {
    fault(x->warp, x->op, FAULT_BARRIER, "%s the bytes of the mbarrier at offset 0x%x of CTA rank %u; "
          "mbarrier.inval comes first",
          write ? "writes" : "reads", (uint32_t)(s - cta->smem_shadow) * GRANULE + (mask & 0xff &&
              s->barrier & 1 ? 0 : 8), cta->rank);
    return 0;
  }
  if (!write && (mask & ~(uint32_t)s->init)) return uninitialised(cta, s, mask, x);
  if (s->more) {
    if (write) s->tag = x->tag;
    return extra_touch(cta, s, mask, write, x);
  }
  const int strong_write = x->strong && s->tag == TAG_STRONG, strong_read = x->strong && s->barrier &
      R_STRONG;
  if ((s->wmask & mask) && !strong_write && !access_before(c, x, s->wcomp, s->wepoch, 1))
    return conflict(cta, s, s->wmask & mask, write, x, s->wcomp, s->wepoch, s->wline, 1);
  if (write) {
    if ((s->rmask & mask) && !strong_read && !access_before(c, x, s->rcomp, s->repoch, 0))
      return conflict(cta, s, s->rmask & mask, write, x, s->rcomp, s->repoch, s->rline, 0);
    s->rmask &= (uint16_t)~mask;
    if (!s->rmask) s->barrier &= (uint8_t)~R_STRONG;
    int same = s->wcomp == x->comp && s->wepoch == x->epoch;
    if (!same && (s->wmask & ~mask)) {
      int done = spill(cta, s, mask, write, x);
      s->tag = x->tag;
      return done;
    }
    s->tag = x->tag;
    s->wmask = (uint16_t)((same ? s->wmask : 0) | mask);
    s->wcomp = x->comp, s->wepoch = x->epoch, s->wline = x->line;
    s->init |= (uint16_t)mask;
    return 1;
  }
  if (!s->rmask || (s->rcomp == x->comp && s->repoch == x->epoch)) s->rmask |= (uint16_t)mask;
  else if (!(s->rmask & ~mask) && access_before(c, x, s->rcomp, s->repoch, 0)) s->rmask = (uint16_t)mask;
  else return spill(cta, s, mask, write, x);
  s->rcomp = x->comp, s->repoch = x->epoch, s->rline = x->line;
  s->barrier = (uint8_t)((s->barrier & ~R_STRONG) | (x->strong ? R_STRONG : 0));
  return 1;
}

int smem_touch(Cta *cta, uint32_t offset, uint32_t bytes, int write, const Agent *x) {
  for (uint32_t end = offset + bytes; offset < end;) {
    uint32_t next = (offset | (GRANULE - 1)) + 1, low = offset % GRANULE;
    uint32_t n = (next < end ? next : end) - offset;
    if (!shadow_touch(cta, &cta->smem_shadow[offset / GRANULE], ((1u << n) - 1) << low, write, x)) return 0;
    offset = next;
  }
  return 1;
}

int tmem_touch(Cta *cta, uint32_t quarter, uint32_t column, uint32_t count, uint32_t mask, int write,
               const Agent *x) {
  for (uint32_t i = 0; i < count; i++)
    if (!shadow_touch(cta, &cta->tmem_shadow[(column + i) * 4 + quarter], mask, write, x)) return 0;
  return 1;
}
