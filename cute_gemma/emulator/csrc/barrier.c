// mbarriers, named barriers, cluster barriers, fences and the grid dependency.
#include "global.h"
#include "hazard.h"
#include "trace.h"
#include <string.h>

// ---------------------------------------------------------------- mbarrier objects
static Mbarrier *lookup(Cta *cta, uint32_t offset) {
  uint32_t index = offset % 8 || offset >= cta->launch->smem_end ? 0 : cta->mbar_index[offset / 8];
  return index ? &cta->mbars[index - 1] : NULL;
}

Mbarrier *mbar_find(Warp *w, const Op *op, Cta *cta, uint32_t offset) {
  Mbarrier *b = lookup(cta, offset);
  if (!b || !b->valid) {
    fault(w, op, FAULT_BARRIER, "uses the mbarrier at 0x%x of CTA rank %u, which %s", offset, cta->rank,
          b ? "mbarrier.inval has ended" : "no mbarrier.init has made");
    return NULL;
  }
  if (cta->exited) {
    fault(w, op, FAULT_MEMORY, "uses the mbarrier at 0x%x of CTA rank %u, whose threads have all exited",
          offset, cta->rank);
    return NULL;
  }
  return b;
}

// A thread may use a barrier only after its initialisation, as ordered by some other barrier or a cluster
// barrier.
static int after_init(Warp *w, const Op *op, const Cta *cta, const Mbarrier *b) {
  if (warp_ordered(w, b->init_comp, b->init_epoch)) {
    const uint32_t comp = warp_comp(w, C_WARP);
    if (w->launch->hazards)
      clock_g(cta->cluster, b->used)[comp] = clock_g(cta->cluster, state(w)->clock)[comp];
    return 1;
  }
  char who[128];
  comp_name(cluster_of(w), b->init_comp, b->init_epoch, who, sizeof who);
  fault(w, op, FAULT_RACE, "uses the mbarrier at 0x%x of CTA rank %u, which %s initialised at PTX line %u, "
        "with nothing that orders the two",
        b->offset, cta->rank, who, b->init_line);
  return 0;
}

static Status complete_phase(Warp *w, const Op *op, Cta *cta, Mbarrier *b) {
  if (tracing) trace_arrive(&b->stamp);
  if (b->pending || b->tx) return ST_NEXT;
  if (b->inflight)
    return fault(w, op, FAULT_BARRIER, "phase %u of the mbarrier at 0x%x of CTA rank %u completes while %u "
                 "asynchronous copies that "
                 "signal it are in flight: its expect_tx counts too few bytes", b->phase, b->offset,
                     cta->rank, b->inflight);
  if (tracing) trace_complete(&b->stamp);
  b->phase++;
  b->pending = b->expected;
  if (w->launch->hazards) {
    Cluster *c = cta->cluster;
    memcpy(clock_g(c, b->done), clock_g(c, b->cur), c->stride * sizeof *c->clocks);
    clock_g(c, b->done)[b->comp] = b->phase;
    clock_g(c, b->cur)[b->comp] = b->phase;
  }
  wake(cta->cluster, cta, WAIT_MBAR, b, 0);
  return ST_NEXT;
}

static Status add_tx(Warp *w, const Op *op, Cta *cta, Mbarrier *b, int64_t tx) {
  int64_t sum = b->tx + tx;
  if (sum > MBAR_MAX_COUNT || sum < -MBAR_MAX_COUNT)
    return fault(w, op, FAULT_BARRIER, "the tx-count of the mbarrier at 0x%x of CTA rank %u becomes %lld, "
                 "outside +-(2^20-1)", b->offset,
                 cta->rank, (long long)sum);
  b->tx = (int32_t)sum;
  return ST_NEXT;
}

// Strict checks: some thread sees that a phase is complete before the next one has an arrival. The PTX ISA does
// not ask for it; compute-sanitizer does.
static int phase_waited_for(Warp *w, const Op *op, const Cta *cta, const Mbarrier *b) {
  if (w->launch->hazards != HAZARDS_STRICT || b->phase == b->first_phase || b->observed >= b->phase) return 1;
  fault(w, op, FAULT_BARRIER, "advice: an arrival in phase %u of the mbarrier at 0x%x of CTA rank %u, while "
        "no thread has waited for phase %u", b->phase, b->offset, cta->rank, b->phase - 1);
  return 0;
}

Status mbar_arrive(Warp *w, const Op *op, Cta *cta, uint32_t offset, uint32_t count, int32_t tx,
                   ClockId clock, int drop) {
  Mbarrier *b = mbar_find(w, op, cta, offset);
  if (!b) return ST_FAULT;
  if (!count || count > MBAR_MAX_COUNT)
    return fault(w, op, FAULT_BARRIER, "an arrival with count %u, outside 1..2^20-1", count);
  if (tx && add_tx(w, op, cta, b, tx) == ST_FAULT) return ST_FAULT;
  if (count > b->pending)
    return fault(w, op, FAULT_BARRIER, "%u arrivals on the mbarrier at 0x%x of CTA rank %u, which expects %u "
                 "more of %u in phase %u", count,
                 offset, cta->rank, b->pending, b->expected, b->phase);
  if (!phase_waited_for(w, op, cta, b)) return ST_FAULT;
  if (w->launch->hazards) clock_join(cta->cluster, b->cur, clock);
  b->pending -= count;
  if (drop) b->expected -= count;
  return complete_phase(w, op, cta, b);
}

// Strict checks: the async proxy signals only barriers whose initialisation a fence.mbarrier_init or
// fence.proxy.async follows.
int mbar_init_fenced(Warp *w, const Op *op, const Cta *cta, const Mbarrier *b) {
  if (w->launch->hazards != HAZARDS_STRICT) return 1;
  const uint32_t index = b->init_comp % cta->cluster->nwarps, per = w->launch->nwarps;
  if (cta->cluster->ctas[index / per].states[index % per].fenced_inits >= b->init_epoch) return 1;
  fault(w, op, FAULT_PROXY_FENCE, "advice: signals the mbarrier at 0x%x of CTA rank %u, initialised at PTX "
        "line %u with no fence.mbarrier_init "
        "or fence.proxy.async after it", b->offset, cta->rank, b->init_line);
  return 0;
}

Status mbar_copy_issued(Warp *w, const Op *op, Cta *cta, uint32_t offset, Agent *agent) {
  Mbarrier *b = mbar_find(w, op, cta, offset);
  if (!b || !after_init(w, op, cta, b) || !mbar_init_fenced(w, op, cta, b)) return ST_FAULT;
  b->inflight++;
  b->last_copy = b->phase + 1;
  agent->comp = b->comp;
  agent->epoch = b->phase + 1;
  return ST_NEXT;
}

Status mbar_copy_done(Warp *w, const Op *op, Cta *cta, uint32_t offset, uint32_t bytes) {
  Mbarrier *b = mbar_find(w, op, cta, offset);
  if (!b || add_tx(w, op, cta, b, -(int64_t)bytes) == ST_FAULT) return ST_FAULT;
  b->inflight--;
  return complete_phase(w, op, cta, b);
}

// ---------------------------------------------------------------- mbarrier instructions
// Refs: address, count. imm: offset.
Status exec_mbar_init(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  EACH_LANE(l, mask) {
    uint32_t address = REG32(w, refs[0])[l] + (uint32_t)op->imm, count = REG32(w, refs[1])[l];
    Cta *cta = shared_target(w, op, address, 8, 8, 0);
    if (!cta) return ST_FAULT;
    uint32_t offset = address & SMEM_OFFSET;
    if (!count || count > MBAR_MAX_COUNT)
      return fault(w, op, FAULT_BARRIER, "mbarrier.init with count %u, outside 1..2^20-1", count);
    Mbarrier *b = lookup(cta, offset);
    if (b && b->valid)
      return fault(w, op, FAULT_BARRIER, "mbarrier.init on the mbarrier at 0x%x, which is in use: "
                   "mbarrier.inval comes first", offset);
    if (w->launch->hazards) {
      Agent x = agent_of(w, op);
      if (!smem_touch(cta, offset, 8, 1, &x)) return ST_FAULT;
      cta->smem_shadow[offset / GRANULE].barrier |= offset % GRANULE ? 2 : 1;
    }
    if (!b) {
      b = &cta->mbars[cta->nmbars++];
      *b = (Mbarrier){.offset = offset, .cur = NO_CLOCK, .done = NO_CLOCK};
      cta->mbar_index[offset / 8] = (uint16_t)cta->nmbars;
      if (w->launch->hazards) {
        b->used = clock_new(cta->cluster);
        b->cur = clock_new(cta->cluster);
        b->done = clock_new(cta->cluster);
        b->comp = comp_new(cta->cluster);
      }
    }
    b->first_phase = b->phase;
    b->valid = 1;
    b->expected = b->pending = count;
    b->tx = 0;
    b->inflight = 0;
    if (w->launch->hazards) {
      b->init_comp = (uint16_t)warp_comp(w, C_INIT);
      b->init_epoch = clock_g(cta->cluster, state(w)->clock)[b->init_comp] = ++state(w)->inits;
    }
    b->init_line = op->line;
    made_progress(w->launch);
  }
  return ST_NEXT;
}

// What ends the barrier comes after every other use of it.
static int last_use(Warp *w, const Op *op, const Mbarrier *b) {
  Cluster *c = cluster_of(w);
  for (uint32_t i = 0; w->launch->hazards && i < c->nwarps; i++) {
    if (clock_g(c, b->used)[i] <= clock_g(c, state(w)->clock)[i]) continue;
    char who[128];
    comp_name(c, i, 0, who, sizeof who);
    fault(w, op, FAULT_RACE, "mbarrier.inval on the mbarrier at 0x%x, which %s uses with nothing that orders "
          "the two", b->offset, who);
    return 0;
  }
  return 1;
}

Status exec_mbar_inval(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  EACH_LANE(l, mask) {
    uint32_t address = REG32(w, refs[0])[l] + (uint32_t)op->imm;
    Cta *cta = shared_target(w, op, address, 8, 8, 0);
    Mbarrier *b = cta ? mbar_find(w, op, cta, address & SMEM_OFFSET) : NULL;
    if (!b || !after_init(w, op, cta, b) || !last_use(w, op, b)) return ST_FAULT;
    if (b->inflight)
      return fault(w, op, FAULT_BARRIER, "mbarrier.inval on the mbarrier at 0x%x while %u asynchronous "
                   "copies that signal it are in flight",
                   b->offset, b->inflight);
    b->valid = 0;
    b->phase += (b->phase - b->first_phase) & 1;      // a later init starts at an even phase again
    if (w->launch->hazards)
      cta->smem_shadow[b->offset / GRANULE].barrier &= (uint8_t)~(b->offset % GRANULE ? 2 : 1);
  }
  return ST_NEXT;
}

Status run_arrive(Async *a) {
  async_unlink(a);
  state(a->warp)->arrivals--;
  if (a->arrive.cta->remote != NO_CLOCK && a->clock != NO_CLOCK) {
    const Cluster *c = cluster_of(a->warp);
    const uint32_t comp = warp_comp(a->warp, C_WARP), epoch = clock_g(c, a->clock)[comp];
    uint32_t *latest = &clock_g(c, a->arrive.cta->remote)[comp];
    if (*latest < epoch) *latest = epoch;
  }
  Status s = mbar_arrive(a->warp, a->op, a->arrive.cta, a->arrive.offset, a->arrive.count, a->arrive.tx,
                         a->clock, (int)a->arrive.drop);
  async_free(a->warp->launch, a);
  return s;
}

// What a warp did before it releases comes before what others do once they have acquired: its arrivals at
// other CTAs' barriers are no longer under way.
static Status deliver_arrivals(Warp *w) {
  if (!state(w)->arrivals) return ST_NEXT;
  for (Async *a = cluster_of(w)->queue_head, *next; a; a = next) {
    next = a->next;
    if (a->kind == A_ARRIVE && a->warp == w && async_run(a) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

// mbarrier.arrive[_drop][.expect_tx] and the arrive part of their .noComplete forms.
// sub bit 0: any CTA of the cluster; 1: a 64-bit state is wanted; 2: expect_tx; 3: drop; 4: relaxed; 5:
// noComplete.
// Refs: address, count, tx, state (64 bits). imm: offset.
static Status arrive(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t sub = op->sub;
  EACH_LANE(l, mask) {
    uint32_t address = REG32(w, refs[0])[l] + (uint32_t)op->imm, count = REG32(w, refs[1])[l];
    int32_t tx = sub & 4 ? (int32_t)REG32(w, refs[2])[l] : 0;
    Cta *cta = shared_target(w, op, address, 8, 8, sub & 1);
    Mbarrier *b = cta ? mbar_find(w, op, cta, address & SMEM_OFFSET) : NULL;
    if (!b || !after_init(w, op, cta, b)) return ST_FAULT;
    if (sub & 32 && count >= b->pending)
      return fault(w, op, FAULT_BARRIER, "a .noComplete arrival completes phase %u of the mbarrier at 0x%x",
                   b->phase, b->offset);
    if (sub & 2) REG64(w, refs[3])[l] = (uint64_t)b->phase << 32 | b->pending;
    if (cta == w->cta || tx) {          // expect_tx must come before the copies of its own thread complete
      if (!(sub & 16) && deliver_arrivals(w) == ST_FAULT) return ST_FAULT;
      if (!(sub & 16)) lanes_share_waits(w);
      if (mbar_arrive(w, op, cta, address & SMEM_OFFSET, count, tx, sub & 16 ? state(w)->fenced
                      : state(w)->clock, (int)(sub & 8)) == ST_FAULT)
        return ST_FAULT;
      if (w->launch->hazards && !(sub & 16)) clock_publish(w);
      continue;
    }
    if (deliver_arrivals(w) == ST_FAULT) return ST_FAULT;
    Async *a = async_new(w->launch, A_ARRIVE, w, op);
    state(w)->arrivals++;
    a->clock = sub & 16 ? NO_CLOCK : clock_snapshot(w);
    a->arrive.cta = cta, a->arrive.offset = address & SMEM_OFFSET, a->arrive.count = count,
        a->arrive.drop = sub & 8;
    if (async_issue(a) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

Status exec_mbar_arrive(Warp *w, const Op *op, uint32_t mask) {
  const uint32_t withheld = lanes_withhold(w, mask);
  const Status s = arrive(w, op, mask);
  lanes_give_back(w, withheld);
  return s;
}

// mbarrier.expect_tx (imm2 = 1) and mbarrier.complete_tx (imm2 = -1). sub bit 0: any CTA. Refs: address, tx.
Status exec_mbar_tx(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  EACH_LANE(l, mask) {
    uint32_t address = REG32(w, refs[0])[l] + (uint32_t)op->imm;
    Cta *cta = shared_target(w, op, address, 8, 8, op->sub & 1);
    Mbarrier *b = cta ? mbar_find(w, op, cta, address & SMEM_OFFSET) : NULL;
    if (!b || !after_init(w, op, cta, b)) return ST_FAULT;
    if (add_tx(w, op, cta, b, op->imm2 * (int64_t)REG32(w, refs[1])[l]) == ST_FAULT) return ST_FAULT;
    if (op->imm2 < 0 && complete_phase(w, op, cta, b) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

static void observe(Warp *w, Mbarrier *b, uint32_t sub) {
  if (b->phase > b->observed) b->observed = b->phase;
  if (sub & 4) clock_acquire_relaxed(w, b->done);
  else clock_acquire(w, b->done);
}

// test_wait and try_wait. sub bit 0: parity form; 1: may suspend (try_wait); 2: relaxed. Refs: predicate,
// address, state or parity.
// A wait that fails returns false once; a warp that comes straight back to it sleeps until the phase
// completes.
Status exec_mbar_wait(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  WarpState *s = state(w);
  uint32_t passed = 0, address0 = 0;
  int uniform = 1;
  Waiting what = {.kind = WAIT_MBAR};
  EACH_LANE(l, mask) {
    uint32_t address = REG32(w, refs[1])[l] + (uint32_t)op->imm;
    if (what.mbar && address == address0 && op->sub & 1 && REG32(w, refs[2])[l] == what.parity) {
      passed |= passed >> first_lane(mask) & 1 ? 1u << l : 0;
      continue;
    }
    if (what.mbar) uniform = 0;
    Cta *cta = shared_target(w, op, address, 8, 8, 0);
    Mbarrier *b = cta ? mbar_find(w, op, cta, address & SMEM_OFFSET) : NULL;
    if (!b || !after_init(w, op, cta, b)) return ST_FAULT;
    uint32_t parity = op->sub & 1 ? REG32(w, refs[2])[l] : (uint32_t)(REG64(w, refs[2])[l] >> 32);
    if (op->sub & 1 && parity > 1)
      return fault(w, op, FAULT_BARRIER, "waits for parity %u, which is neither 0 nor 1", parity);
    if (!(op->sub & 1) && b->phase - parity > 1)
      return fault(w, op, FAULT_BARRIER, "waits with a state of phase %u of the mbarrier at 0x%x, which is "
                   "in phase %u: only the current phase and the one before can be waited for", parity,
                   b->offset, b->phase);
    if (op->sub & 1 ? (b->phase & 1) != parity : b->phase != parity) {
      passed |= 1u << l;
      observe(w, b, op->sub);
    }
    if (!what.mbar) what.mbar = b, what.mbar_cta = cta, what.parity = parity, address0 = address;
  }
  if (!passed && uniform) {
    const uint64_t serial = s->serial[w->current];
    const int again = s->failed[w->current].op == op && s->failed[w->current].mask == mask &&
        s->failed[w->current].serial + 1 == serial;
    s->failed[w->current].op = op, s->failed[w->current].mask = mask, s->failed[w->current].serial = serial;
    if (again) return block(w, op, &what);
  }
  w->pred[refs[0]] = (w->pred[refs[0]] & ~mask) | passed;
  if (tracing && passed) trace_pass(w, op, &what.mbar->stamp);
  return passed || uniform ? ST_NEXT : ST_YIELD;
}

// ---------------------------------------------------------------- bar, barrier
static void named_complete(Warp *w, NamedBarrier *b, uint32_t id) {
  b->result_any = b->any, b->result_all = !b->some_false, b->result_count = b->count;
  b->arrived = b->any = b->some_false = b->count = 0;
  b->expected = b->warps = 0;
  if (tracing) trace_complete(&b->stamp);
  if (w->launch->hazards) {
    Cluster *c = cluster_of(w);
    if (b->done == NO_CLOCK) b->done = clock_new(c);
    memcpy(clock_g(c, b->done), clock_g(c, b->cur), c->stride * sizeof *c->clocks);
  }
  wake(cluster_of(w), w->cta, WAIT_NAMED, NULL, id);
}

static void named_results(Warp *w, const Op *op, const NamedBarrier *b, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t kind = op->sub & 3, red = op->sub >> 4 & 3;
  if (kind != 2) return;
  if (red == 2) {
    EACH_LANE(l, mask) REG32(w, refs[4])[l] = b->result_count;
  } else {
    uint32_t value = (red ? b->result_any : b->result_all) ? mask : 0;
    w->pred[refs[3]] = (w->pred[refs[3]] & ~mask) | value;
  }
}

// sub [1:0]: 0 sync, 1 arrive, 2 red; [2] a thread count is given; [5:4] red: 0 and, 1 or, 2 popc.
// Refs: barrier, thread count, source predicate, result predicate, result register.
Status exec_bar(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  Waiting *slot = &state(w)->wait[w->current];
  const uint32_t id = REG32(w, refs[0])[first_lane(mask)], kind = op->sub & 3;
  if (!uniform(w, op, refs[0], mask, 32, "the barrier") ||
      (op->sub & 4 && !uniform(w, op, refs[1], mask, 32, "the thread count"))) return ST_FAULT;
  if (id >= NAMED_BARRIERS)
    return fault(w, op, FAULT_BARRIER, "barrier %u: there are %u", id, NAMED_BARRIERS);
  NamedBarrier *b = &w->cta->named[id];
  if (slot->kind == WAIT_NAMED && slot->woken && slot->line == op->line) {
    slot->kind = WAIT_NONE;
    if (tracing) trace_pass(w, op, &b->stamp);
    clock_acquire(w, b->done);
    named_results(w, op, b, mask);
    return ST_NEXT;
  }
  if (deliver_arrivals(w) == ST_FAULT) return ST_FAULT;
  const int counted = (op->sub & 4) != 0;
  uint32_t threads = counted ? REG32(w, refs[1])[first_lane(mask)] : w->cta->live_warps * LANES;
  if (!threads || threads % LANES || threads > w->launch->nwarps * LANES)
    return fault(w, op, FAULT_BARRIER, "barrier %u with %u threads, which is no multiple of 32 within the "
                 "CTA's %u", id, threads,
                 w->launch->nwarps * LANES);
  if (b->arrived && (counted || b->counted) && b->expected != threads)
    return fault(w, op, FAULT_BARRIER, "barrier %u with %u threads, while others came to it with %u", id,
                 threads, b->expected);
  if (b->arrived && b->reduces != (kind == 2))
    return fault(w, op, FAULT_BARRIER, "barrier %u: barrier.red together with barrier.sync or .arrive", id);
  if (b->warps >> w->id & 1)
    return fault(w, op, FAULT_BARRIER, "barrier %u: the warp comes to it a second time before it is complete",
                 id);
  b->expected = threads;
  b->counted = (uint8_t)counted;
  b->reduces = kind == 2;
  b->warps |= 1u << w->id;
  if (tracing) trace_arrive(&b->stamp);
  if (w->launch->hazards) {
    if (b->cur == NO_CLOCK) b->cur = clock_new(cluster_of(w));
    clock_release(w, b->cur);
  }
  if (kind == 2) {
    uint32_t p = w->pred[refs[2]] & mask;
    b->any |= p != 0;
    b->some_false |= p != mask;
    b->count += (uint32_t)__builtin_popcount(p);
  }
  b->arrived += LANES;
  if (b->arrived > threads)
    return fault(w, op, FAULT_BARRIER, "barrier %u: %u threads arrive where %u are expected", id, b->arrived,
                 threads);
  if (b->arrived == threads) {
    named_complete(w, b, id);
    if (kind == 1) return ST_NEXT;
    if (tracing) trace_pass(w, op, &b->stamp);
    clock_acquire(w, b->done);
    named_results(w, op, b, mask);
    return ST_NEXT;
  }
  if (kind == 1) return ST_NEXT;
  return block(w, op, &(Waiting){.kind = WAIT_NAMED, .id = id});
}

// ---------------------------------------------------------------- barrier.cluster
static void cluster_complete(Cluster *c) {
  if (tracing) trace_complete(&c->cluster_stamp);
  c->arrived = 0;
  c->generation++;
  if (c->launch->hazards)
    memcpy(clock_g(c, c->cluster_done), clock_g(c, c->cluster_cur), c->stride * sizeof *c->clocks);
  wake(c, NULL, WAIT_CLUSTER, NULL, 0);
}

// sub bit 0: wait, else arrive; bit 1: relaxed arrive.
Status exec_bar_cluster(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  Cluster *c = cluster_of(w);
  WarpState *s = state(w);
  if (!(op->sub & 1)) {
    if (s->cluster_arrived)
      return fault(w, op, FAULT_BARRIER, "barrier.cluster.arrive a second time without barrier.cluster.wait");
    s->cluster_arrived = 1;
    s->cluster_generation = c->generation;
    if (tracing) trace_arrive(&c->cluster_stamp);
    if (op->sub & 2) clock_release_relaxed(w, c->cluster_cur);
    else {
      if (deliver_arrivals(w) == ST_FAULT) return ST_FAULT;
      clock_release(w, c->cluster_cur);
    }
    if (++c->arrived == c->live_warps) cluster_complete(c);
    return ST_NEXT;
  }
  if (!s->cluster_arrived)
    return fault(w, op, FAULT_BARRIER, "barrier.cluster.wait without barrier.cluster.arrive");
  if (s->cluster_generation == c->generation) return block(w, op, &(Waiting){.kind = WAIT_CLUSTER});
  s->cluster_arrived = 0;
  if (tracing) trace_pass(w, op, &c->cluster_stamp);
  clock_acquire(w, c->cluster_done);
  return ST_NEXT;
}

static void registers_left(Warp *w);

// Threads that have exited no longer count at barriers that name no thread count.
void barriers_warp_exit(Warp *w) {
  Cluster *c = cluster_of(w);
  Cta *cta = w->cta;
  WarpState *s = state(w);
  if (s->cluster_arrived && s->cluster_generation == c->generation) c->arrived--;
  if (c->live_warps && c->arrived == c->live_warps) cluster_complete(c);
  for (uint32_t id = 0; id < NAMED_BARRIERS; id++) {
    NamedBarrier *b = &cta->named[id];
    if (!b->arrived || b->counted) continue;
    b->expected = cta->live_warps * LANES;
    if (b->arrived == b->expected) named_complete(w, b, id);
  }
  if (!cta->live_warps) cta->exited = 1;
  if (w->launch->hazards && bulk_unread(&s->bulk))
    fault(w, NULL, FAULT_LEAK, "the warp exits while bulk copies may still read shared memory: "
          "cp.async.bulk.wait_group[.read] comes first");
  if (w->launch->hazards && s->wgmma_head)
    fault(w, NULL, FAULT_LEAK, "the warp exits while wgmma.mma_async may still read shared memory: "
          "wgmma.wait_group comes first");
  if (w->launch->hazards) registers_left(w);
}

// ---------------------------------------------------------------- fences, grid dependency, the rest
// sub: 1 fence.proxy.async (what the generic proxy did becomes visible to the async proxy), 5 and 6 the same
// for shared or global memory alone; 2 fence.mbarrier_init, 3 a memory fence, 4 one of .cta or
// .cluster scope; 0 orders nothing here.
Status exec_fence(Warp *w, const Op *op, uint32_t mask) {
  const int shared = op->sub == 1 || op->sub == 5, global = op->sub == 1 || op->sub == 6;
  if (shared || global) clock_proxy_fence(w, shared, global);
  if (global && w->launch->hazards) global_proxy_fence(w);
  if (shared || op->sub == 2) state(w)->fenced_inits = state(w)->inits;
  if (op->sub == 3 || op->sub == 4) clock_fence(w);
  if ((op->sub == 3 || op->sub == 4) && w->launch->hazards) global_fence(w, mask, op->sub == 4);
  return ST_NEXT;
}

Status exec_grid_wait(Warp *w, const Op *op, uint32_t mask) {
  (void)op, (void)mask;
  if (w->launch->hazards) clock_g(cluster_of(w), state(w)->clock)[grid_comp(cluster_of(w))] = 1;
  w->cta->grid_waited = 1;
  w->launch->result->waited = 1;
  return ST_NEXT;
}

Status exec_nothing(Warp *w, const Op *op, uint32_t mask) {
  (void)op, (void)mask;
  state(w)->serial[w->current]--;             // who only sleeps between two waits has done nothing
  return ST_NEXT;
}

// All warps of a warpgroup run the same setmaxnreg, and meet before the next one.
static int registers_agree(Warp *w, const Op *op) {
  const WarpState *s = state(w);
  const uint32_t first = w->id & ~3u, nwarps = w->launch->nwarps;
  for (uint32_t i = first; i < first + 4 && i < nwarps; i++) {
    const WarpState *o = &w->cta->states[i];
    const int other = o->setmaxnregs > s->setmaxnregs && o->registers != (uint32_t)op->imm;
    const char *wrong = o->setmaxnregs < s->setmaxnregs ? "has not run the one before"
        : other ? "asked for another number" : NULL;
    if (!wrong) continue;
    fault(w, op, FAULT_ILLEGAL, "setmaxnreg is for all warps of a warpgroup alike: warp %u %s", i, wrong);
    return 0;
  }
  return 1;
}

// A warp that leaves has run setmaxnreg as often as those of its warpgroup that have left.
static void registers_left(Warp *w) {
  const uint32_t first = w->id & ~3u;
  for (uint32_t i = first; i < first + 4 && i < w->launch->nwarps; i++)
    if (w->cta->states[i].exited && w->cta->states[i].setmaxnregs != state(w)->setmaxnregs) {
      fault(w, NULL, FAULT_ILLEGAL, "setmaxnreg is for all warps of a warpgroup alike: this warp ran %u of "
            "them, warp %u %u", state(w)->setmaxnregs, i, w->cta->states[i].setmaxnregs);
      return;
    }
}

// setmaxnreg. imm: registers a thread; sub: 1 for .inc, which waits until other warps have given up enough.
Status exec_setmaxnreg(Warp *w, const Op *op, uint32_t mask) {
  (void)mask;
  WarpState *s = state(w);
  const uint32_t wanted = (uint32_t)op->imm;
  if (w->launch->hazards && !registers_agree(w, op)) return ST_FAULT;
  if (op->sub ? wanted < s->registers : wanted > s->registers) {
    if (op->sub || w->launch->nwarps * LANES >= 256)
      return fault(w, op, FAULT_ILLEGAL, "setmaxnreg.%s to %u registers, from at most %u", op->sub ? "inc"
                   : "dec", wanted, s->registers);
    s->setmaxnregs++;
    return ST_NEXT;
  }
  if (op->sub) {
    const uint32_t more = (wanted - s->registers) * LANES;
    if (more > w->cta->free_registers) return block(w, op, &(Waiting){.kind = WAIT_REGISTERS});
    w->cta->free_registers -= more;
  } else {
    w->cta->free_registers += (s->registers - wanted) * LANES;
    wake(cluster_of(w), w->cta, WAIT_REGISTERS, NULL, 0);
  }
  s->registers = wanted;
  s->setmaxnregs++;
  return ST_NEXT;
}
