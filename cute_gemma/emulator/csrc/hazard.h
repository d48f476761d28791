// Happens-before checks: vector clocks in the manner of FastTrack (Flanagan and Freund, PLDI 2009), with a
// second clock for what has been made visible to the async proxy (PTX ISA, "Memory Consistency Model:
// Proxies").
#ifndef CUTE_GEMMA_HAZARD_H
#define CUTE_GEMMA_HAZARD_H
#include "engine.h"

#define ALL16 0xffffu
#define TAG_STRONG 0x80             // Shadow.tag: the last write was a strong one
#define R_STRONG 4                  // Shadow.barrier: the last read was a strong one

static inline uint32_t *clock_g(const Cluster *c, ClockId id) { return c->clocks + (size_t)id * c->stride; }
static inline uint32_t *clock_a(const Cluster *c, ClockId id) { return clock_g(c, id) + c->comp_cap; }
// epochs of C_WARP whose writes to global memory are visible to the async proxy
static inline uint32_t *clock_global(const Cluster *c, ClockId id) { return clock_a(c, id) + 2 * c->nwarps; }
static inline uint32_t warp_comp(const Warp *w, uint32_t kind) {
  return kind * w->cta->cluster->nwarps + state(w)->index;
}
static inline uint32_t grid_comp(const Cluster *c) { return C_PER_WARP * c->nwarps; }
// both are what the tensor core of one CTA does: it keeps the order of issue
static inline int same_pipe(const Cluster *c, uint32_t x, uint32_t y) {
  const uint32_t from = C_PIPE * c->nwarps, per = c->launch->nwarps;
  return x == y || (x >= from && y >= from && x < from + c->nwarps && y < from + c->nwarps &&
                    (x - from) / per == (y - from) / per);
}
static inline int generic_comp(const Cluster *c, uint32_t comp) { return comp < 2 * c->nwarps; }

int clocks_init(Cluster *c);
void clocks_reset(Cluster *c);
ClockId clock_new(Cluster *c);                            // all zero
void clock_free(Cluster *c, ClockId id);
void clock_join(Cluster *c, ClockId into, ClockId from);
ClockId clock_snapshot(Warp *w);                          // NO_CLOCK with hazards off
uint16_t comp_new(Cluster *c);
// later accesses of the warp are not part of what it released
void clock_publish(Warp *w);
void clock_release(Warp *w, ClockId into);                // into |= warp's clock, then publish
void clock_acquire(Warp *w, ClockId from);
void clock_acquire_relaxed(Warp *w, ClockId from);        // for a fence to acquire
void clock_fence(Warp *w);
void clock_release_relaxed(Warp *w, ClockId into);
void clock_proxy_fence(Warp *w, int shared, int global);

Agent agent_of(Warp *w, const Op *op);                    // the warp's own accesses through the generic proxy
// the same for TMEM; strict checks want tcgen05 fences
Agent tensor_agent(Warp *w, const Op *op);
void tensor_fence(Warp *w, int after);                    // tcgen05.fence::before/after_thread_sync
// strict checks: bar.warp.sync and barriers make known to all lanes of a warp what one of them did or waited
// for
void lanes_meet(Warp *w);
void lanes_share_waits(Warp *w);
// an access to shared memory by the lanes `who`, together; 0: it faulted
int lanes_touch(Warp *w, const Op *op, Cta *cta, uint32_t offset, uint32_t bytes, uint32_t who, int write);
// while lanes release: takes from the warp's clock what others wrote since all met; returns what to give back
uint32_t lanes_withhold(Warp *w, uint32_t lanes);
void lanes_give_back(Warp *w, uint32_t withheld);
// what x sees while other lanes' unordered writes are hidden from it; returns what to restore
uint32_t lanes_hide(Warp *w, uint32_t lane, Agent *x);
void lanes_restore(Warp *w, uint32_t was);
void tensor_waited(Warp *w, uint32_t kind, uint32_t epoch);       // tcgen05.wait: kind C_TMEM_LD or C_TMEM_ST
int shadow_slow(Cta *cta, Shadow *s, uint32_t mask, int write, const Agent *x);
int smem_touch(Cta *cta, uint32_t offset, uint32_t bytes, int write, const Agent *x);     // 0: it faulted
int tmem_touch(Cta *cta, uint32_t quarter, uint32_t column, uint32_t count, uint32_t mask, int write,
               const Agent *x);
void comp_name(const Cluster *c, uint32_t comp, uint32_t epoch, char *out, size_t size);
int warp_ordered(Warp *w, uint32_t comp, uint32_t epoch);  // 1 with hazards off

// Whether an earlier access is ordered before x. What the generic proxy wrote has to be visible to the async
// proxy too.
static inline int access_before(const Cluster *c, const Agent *x, uint32_t comp, uint32_t epoch,
                                int other_write) {
  if (x->fifo && same_pipe(c, comp, x->comp)) return 1;
  if (x->async && other_write && generic_comp(c, comp)) return x->a[comp] >= epoch;
  return x->g[comp] >= epoch;
}

// One shadow entry. The common cases are decided here; whatever is left, conflicts included, goes to
// shadow_slow.
static inline int shadow_touch(Cta *cta, Shadow *s, uint32_t mask, int write, const Agent *x) {
  if (s->gen == cta->gen && !s->more && !s->barrier) {
    const int mine = s->wcomp == x->comp && s->wepoch == x->epoch;
    if (write) {
      if (mine && !(s->rmask & mask)) {
        s->wmask |= (uint16_t)mask;
        s->init |= (uint16_t)mask;
        s->wline = x->line;
        return 1;
      }
      if (mask == ALL16 && (!s->wmask || access_before(cta->cluster, x, s->wcomp, s->wepoch, 1)) &&
          (!s->rmask || access_before(cta->cluster, x, s->rcomp, s->repoch, 0))) {
        *s = (Shadow){.wepoch = x->epoch, .wline = x->line, .wcomp = x->comp, .wmask = ALL16, .init = ALL16,
                      .gen = s->gen, .tag = x->tag};
        return 1;
      }
    } else if (!(mask & ~(uint32_t)s->init)) {
      const int again = s->rcomp == x->comp && s->repoch == x->epoch;
      if (again && !(mask & ~(uint32_t)s->rmask)) return 1;
      if (!x->strong && (!s->rmask || again) && (mine || access_before(cta->cluster, x, s->wcomp, s->wepoch,
          1))) {
        s->rmask |= (uint16_t)mask;
        s->rcomp = x->comp, s->repoch = x->epoch, s->rline = x->line;
        return 1;
      }
    }
  }
  return shadow_slow(cta, s, mask, write, x);
}
#endif
