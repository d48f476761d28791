// Runs a launch: resident clusters side by side, warps in turn, queued asynchronous operations by the
// schedule policy.
#include "hazard.h"
#include "global.h"
#include "trace.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define QUANTUM 4096u               // instructions a warp runs before the next one has its turn
#define TURNS 256u                  // turns a cluster has before the next cluster
#define REGISTERS 65536u            // CUDA: 32-bit registers per SM
#define BUDGET_TURNS 64u            // what a turn without yielding counts as
#define LIVELOCK_TURNS 4000000ull   // turns of the whole launch without a barrier, copy, store or exit
enum { POLICY_EAGER, POLICY_LAZY, POLICY_RANDOM };

uint64_t next_random(Launch *launch) {      // splitmix64 (Steele, Lea and Flood, OOPSLA 2014)
  uint64_t z = (launch->rng += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

void made_progress(Launch *launch) { launch->progress++; }

// ---------------------------------------------------------------- faults
Status fault(Warp *w, const Op *op, FaultKind kind, const char *fmt, ...) {
  LaunchResult *r = w->launch->result;
  if (r->fault) return ST_FAULT;
  r->fault = (uint32_t)kind + 1;
  r->line = op ? op->line : 0;
  r->warp = w->id;
  memcpy(r->cta, w->cta->id, sizeof r->cta);
  va_list args;
  va_start(args, fmt);
  vsnprintf(r->message, sizeof r->message, fmt, args);
  va_end(args);
  return ST_FAULT;
}

// ---------------------------------------------------------------- sleeping and waking
Status block(Warp *w, const Op *op, const Waiting *what) {
  Waiting *slot = &state(w)->wait[w->current];
  *slot = *what;
  slot->woken = 0;
  slot->line = op->line;
  w->split[w->current].wait = (uint32_t)what->kind;
  if (tracing) trace_wait(w, op);
  return ST_BLOCK;
}

static void make_ready(Cluster *c, Warp *w) {
  WarpState *s = state(w);
  if (s->ready || s->exited) return;
  s->ready = 1;
  c->ready[(c->ready_head + c->ready_count++) % c->nwarps] = w;
}

void wake(Cluster *c, const Cta *cta, WaitKind kind, const void *what, uint32_t id) {
  for (uint32_t r = 0; r < c->launch->cluster_size; r++)
    for (uint32_t i = 0; i < c->launch->nwarps; i++) {
      if (kind != WAIT_MBAR && cta && cta != &c->ctas[r]) continue;
      Warp *w = &c->ctas[r].warps[i];
      WarpState *s = state(w);
      for (int k = 0; k < w->nsplit; k++) {
        if (w->split[k].wait != (uint32_t)kind || !w->split[k].mask) continue;
        if (kind == WAIT_MBAR ? (const void *)s->wait[k].mbar != what : (kind == WAIT_NAMED ||
            kind == WAIT_WGMMA) && s->wait[k].id != id) continue;
        s->wait[k].woken = 1;
        interp_wake(w, k);
        make_ready(c, w);
      }
    }
  made_progress(c->launch);
}

// ---------------------------------------------------------------- queued operations
struct AsyncBlock { struct AsyncBlock *next; Async items[64]; };

Async *async_new(Launch *launch, AsyncKind kind, Warp *w, const Op *op) {
  if (!launch->free_async) {
    struct AsyncBlock *b = malloc(sizeof *b);
    b->next = launch->blocks;
    launch->blocks = b;
    for (int i = 0; i < 64; i++) {
      b->items[i].next = launch->free_async;
      launch->free_async = &b->items[i];
    }
  }
  Async *a = launch->free_async;
  launch->free_async = a->next;
  memset(a, 0, sizeof *a);
  a->kind = kind;
  a->warp = w;
  a->op = op;
  a->cta = w->cta;
  a->clock = NO_CLOCK;
  a->grid_waited = grid_waited(w);
  a->seq = ++cluster_of(w)->seq;
  return a;
}

void async_free(Launch *launch, Async *a) {
  clock_free(a->cta->cluster, a->clock);
  a->next = launch->free_async;
  launch->free_async = a;
}

static int in_pipe(const Async *a) { return a->kind == A_MMA || a->kind == A_COMMIT || a->kind == A_TMEM_CP; }

void async_unlink(Async *a) {
  Cluster *c = a->cta->cluster;
  if (in_pipe(a)) {               // only ever the head
    a->cta->pipe_head = a->next;
    if (!a->next) a->cta->pipe_tail = NULL;
  } else {
    if (a->prev) a->prev->next = a->next; else c->queue_head = a->next;
    if (a->next) a->next->prev = a->prev; else c->queue_tail = a->prev;
  }
  c->queued--;
}

Status async_run(Async *a) {
  Launch *launch = a->warp->launch;
  launch->progress++;
  if (tracing) trace_run(a);
  switch (a->kind) {
    case A_TMA_LOAD: case A_TMA_STORE: case A_BULK_LOAD: case A_BULK_STORE: case A_BULK_DSMEM:
      return run_copy(a);
    case A_CP_ASYNC: return run_cp_async(a);
    case A_ARRIVE: return run_arrive(a);
    case A_CLC: return run_clc(a);
    case A_ST_ASYNC: return run_st_async(a);
    case A_MMA: case A_COMMIT: case A_TMEM_CP: return run_tensor(a);
    default: return fault(a->warp, a->op, FAULT_ILLEGAL, "internal: a queued operation of kind %d",
                          (int)a->kind);
  }
}

Status async_issue(Async *a) {
  Cluster *c = a->cta->cluster;
  a->prev = a->next = NULL;
  c->queued++;
  if (tracing) trace_issue(a);
  if (in_pipe(a)) {
    if (a->cta->pipe_tail) a->cta->pipe_tail->next = a; else a->cta->pipe_head = a;
    a->cta->pipe_tail = a;
  } else {
    a->prev = c->queue_tail;
    if (c->queue_tail) c->queue_tail->next = a; else c->queue_head = a;
    c->queue_tail = a;
  }
  if (c->launch->desc->policy != POLICY_EAGER) return ST_NEXT;
  while (c->queued) {
    Async *next = c->queue_head ? c->queue_head : NULL;
    for (uint32_t r = 0; r < c->launch->cluster_size && !next; r++) next = c->ctas[r].pipe_head;
    if (async_run(next) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

// Completes one operation (or one step of it): the oldest under the lazy policy, any legal one under the
// random policy.
// Returns 0 when nothing is queued.
static int complete_one(Cluster *c) {
  Launch *launch = c->launch;
  Async *pick = c->queue_head;
  if (!c->queued) return 0;
  if (launch->desc->policy == POLICY_RANDOM) {
    uint32_t seen = 0;
    pick = NULL;
    for (Async *a = c->queue_head; a; a = a->next)
      if (next_random(launch) % ++seen == 0) pick = a;
    for (uint32_t r = 0; r < launch->cluster_size; r++)
      if (c->ctas[r].pipe_head && next_random(launch) % ++seen == 0) pick = c->ctas[r].pipe_head;
  } else {
    for (uint32_t r = 0; r < launch->cluster_size; r++) {
      Async *head = c->ctas[r].pipe_head;
      if (head && (!pick || head->seq < pick->seq)) pick = head;
    }
  }
  async_run(pick);
  return 1;
}

// ---------------------------------------------------------------- operations
typedef Status (*Exec)(Warp *, const Op *, uint32_t);
static const Exec EXEC[] = {
    exec_ld, exec_st, exec_atom, exec_ldmatrix, exec_stmatrix, exec_mapa, exec_fence, exec_nothing,
        exec_setmaxnreg,
    exec_grid_wait, exec_nothing, exec_prefetch, exec_mbar_init, exec_mbar_inval, exec_mbar_arrive,
        exec_mbar_tx,
    exec_mbar_wait, exec_bar, exec_bar_cluster, exec_tma_load, exec_tma_store, exec_bulk_copy,
        exec_bulk_commit,
    exec_bulk_wait, exec_cp_async, exec_cp_commit, exec_cp_wait, exec_cp_arrive, exec_tc_alloc,
        exec_tc_dealloc,
    exec_tc_relinquish, exec_tc_mma, exec_tc_commit, exec_tc_cp, exec_tc_ld, exec_tc_st, exec_tc_wait,
        exec_tc_fence,
    exec_clc_try_cancel, exec_wgmma, exec_wgmma_fence, exec_wgmma_commit, exec_wgmma_wait, exec_clc_query,
    exec_st_async,
};

Status engine_exec(Warp *w, const Op *op, uint32_t mask) {
  uint32_t index = op->code - OP_ENGINE_FIRST - 1u;
  if (index >= sizeof EXEC / sizeof *EXEC || !EXEC[index])
    return fault(w, op, FAULT_UNSUPPORTED, "the engine does not implement operation %u", op->code);
  state(w)->operations++;
  state(w)->serial[w->current]++;
  if (tracing) trace_now(w);
  return EXEC[index](w, op, mask);
}

Status engine_pending(Warp *w, const Op *op, uint32_t mask) {
  WarpState *s = state(w);
  if (!s->npending) return ST_NEXT;
  if (op->code == OP_WGMMA) return ST_NEXT;    // they run in order, and may share registers
  if (!w->launch->hazards) {                   // as the hardware's scoreboard has it
    if (s->wgmma_head && wgmma_arrive(w) == ST_FAULT) return ST_FAULT;
    return tmem_loads_arrive(w);
  }
  const int32_t *refs = w->launch->program->refs + op->args;
  uint32_t slots = w->launch->program->reg_bytes / SLOT;
  for (uint32_t i = 0; i < op->nargs; i++) {
    if (refs[i] < 0 || (uint32_t)refs[i] >= slots) continue;
    if (!(s->pending[refs[i] / 64] >> (refs[i] % 64) & 1)) continue;
    if (w->launch->hazards == HAZARDS_SCOREBOARD && s->tmem_ld) return exec_tc_wait(w, &(Op){.sub = 0}, mask);
    return fault(w, op, FAULT_ASYNC_REGISTER, "uses a register that a tcgen05.ld or wgmma is still writing: "
                   "tcgen05.wait::ld (or wgmma.wait_group) must come first");
  }
  return ST_NEXT;
}

uint64_t engine_time(Warp *w) { return w->launch->turns * 1000 + state(w)->operations; }

void engine_exit(Warp *w, uint32_t mask) {
  WarpState *s = state(w);
  if (w->live & ~mask || s->exited) return;
  s->exited = 1;
  if (tracing) trace_exit(w);
  w->cta->live_warps--;
  cluster_of(w)->live_warps--;
  made_progress(w->launch);
  barriers_warp_exit(w);
}

// ---------------------------------------------------------------- clusters
static void warp_alloc(Launch *launch, Cta *cta, uint32_t i) {
  const Program *p = launch->program;
  Warp *w = &cta->warps[i];
  w->bank[0] = aligned_alloc(64, (p->reg_bytes + 127) & ~63u);
  memset(w->bank[0], 0, (p->reg_bytes + 127) & ~63u);
  w->bank[1] = (uint8_t *)p->consts;
  w->pred = calloc(p->npreds + 1, sizeof *w->pred);
  w->id = i;
  w->cta = cta;
  w->launch = launch;
  w->counts = launch->result->counts + (size_t)i * p->nops;
  w->engine = &cta->states[i];
  cta->states[i].pending = calloc(p->reg_bytes / SLOT / 64 + 1, sizeof(uint64_t));
  cta->states[i].fenced_known = calloc(1, sizeof(Knowledge));
  cta->states[i].seen = calloc(1, sizeof(Knowledge));
}

static void cta_alloc(Launch *launch, Cluster *c, uint32_t rank) {
  Cta *cta = &c->ctas[rank];
  cta->rank = rank;
  cta->cluster = c;
  cta->launch = launch;
  cta->warps = calloc(launch->nwarps, sizeof *cta->warps);
  cta->states = calloc(launch->nwarps, sizeof *cta->states);
  cta->smem = aligned_alloc(4096, (launch->smem_end + 8191) & ~4095u);
  cta->mbar_index = calloc(launch->smem_end / 8 + 1, sizeof *cta->mbar_index);
  // pages that no barrier uses cost nothing
  cta->mbars = calloc(launch->smem_end / 8 + 1, sizeof *cta->mbars);
  if (launch->hazards) cta->smem_shadow = calloc(launch->smem_end / GRANULE + 1, sizeof *cta->smem_shadow);
  for (uint32_t i = 0; i < launch->nwarps; i++) warp_alloc(launch, cta, i);
}

static void cluster_alloc(Launch *launch, Cluster *c) {
  c->launch = launch;
  c->nwarps = launch->nwarps * launch->cluster_size;
  c->ctas = calloc(launch->cluster_size, sizeof *c->ctas);
  c->ready = calloc(c->nwarps, sizeof *c->ready);
  for (uint32_t r = 0; r < launch->cluster_size; r++) cta_alloc(launch, c, r);
  c->remote = calloc(1, sizeof *c->remote);
  if (launch->hazards) clocks_init(c);
}

static void cluster_free(Cluster *c) {
  for (uint32_t r = 0; c->ctas && r < c->launch->cluster_size; r++) {
    Cta *cta = &c->ctas[r];
    for (uint32_t i = 0; i < c->launch->nwarps; i++) {
      free(cta->warps[i].bank[0]);
      free(cta->warps[i].pred);
      free(cta->states[i].pending);
      free(cta->states[i].fenced_known->item), free(cta->states[i].fenced_known);
      free(cta->states[i].seen->item), free(cta->states[i].seen);
    }
    free(cta->warps), free(cta->states), free(cta->smem), free(cta->smem_shadow), free(cta->tmem),
        free(cta->tmem_shadow), free(cta->lane_accesses), free(cta->flags);
    free(cta->mbar_index), free(cta->mbars);
  }
  for (uint32_t i = 0; i < c->nextra; i++) free(c->extra[i].item);
  remote_free(c);
  free(c->ctas), free(c->ready), free(c->clocks), free(c->free_clocks), free(c->extra);
}

static void cta_start(Cluster *c, Cta *cta, const uint32_t *first) {
  Launch *launch = c->launch;
  const LaunchDesc *d = launch->desc;
  const uint32_t *cl = d->cluster, r = cta->rank;
  WarpStart start = {.cluster_ctaid = {r % cl[0], r / cl[0] % cl[1], r / (cl[0] * cl[1])},
                     .cluster_ctarank = r,
                     .smid = (uint32_t)(c - launch->slots) * launch->cluster_size + r};
  for (int k = 0; k < 3; k++) {
    start.block[k] = d->block[k];
    start.clusterid[k] = first[k];
    cta->id[k] = start.ctaid[k] = first[k] * cl[k] + start.cluster_ctaid[k];
  }
  for (uint32_t i = 0; i < cta->nmbars; i++) cta->mbar_index[cta->mbars[i].offset / 8] = 0;
  cta->nmbars = 0;
  cta->exited = cta->tmem_in_use = cta->relinquished = cta->tmem_group = 0;
  cta->tmem_last_columns = cta->tmem_allocs = cta->tmem_waiting = 0;
  cta->grid_waited = cta->last_d_epoch = 0;
  cta->pipe_head = cta->pipe_tail = NULL;
  memset(cta->tmem_allocated, 0, sizeof cta->tmem_allocated);
  if (++cta->gen == 0) {
    cta->gen = 1;
    if (cta->smem_shadow)
      memset(cta->smem_shadow, 0, (launch->smem_end / GRANULE + 1) * sizeof *cta->smem_shadow);
    if (cta->tmem_shadow) memset(cta->tmem_shadow, 0, TMEM_COLUMNS * 4 * sizeof *cta->tmem_shadow);
    free(cta->lane_accesses);
    cta->lane_accesses = NULL;
  }
  free(cta->flags);
  cta->flags = NULL;
  cta->live_warps = launch->nwarps;
  cta->pipe_epoch = 1;
  memset(cta->named, 0, sizeof cta->named);
  for (int i = 0; i < NAMED_BARRIERS; i++) cta->named[i].cur = cta->named[i].done = NO_CLOCK;
  cta->pipe = launch->hazards ? clock_new(c) : NO_CLOCK;
  cta->remote = launch->hazards == HAZARDS_STRICT && launch->cluster_size > 1 ? clock_new(c) : NO_CLOCK;
  // as many registers as the threads of a CTA alone can have: what the compiler gave them is not known here
  const uint32_t threads = launch->nwarps * LANES, registers = threads < 256 ? 256 : REGISTERS / threads &
      ~7u;
  cta->free_registers = 0;
  for (uint32_t i = 0; i < launch->nwarps; i++) {
    Warp *w = &cta->warps[i];
    WarpState *s = &cta->states[i];
    uint64_t *pending = s->pending;
    Knowledge *fenced_known = s->fenced_known, *seen = s->seen;
    fenced_known->n = seen->n = 0;
    *s = (WarpState){.cluster = c, .pending = pending, .fenced_known = fenced_known, .seen = seen,
                     .index = r * launch->nwarps + i, .clock = NO_CLOCK, .fenced = NO_CLOCK,
                         .observed = NO_CLOCK,
                         .tensor_clock = NO_CLOCK,
                     .registers = registers,
                     .met_epoch = 1, .synced_epoch = 1,
                     .bulk.open = 1, .cp.open = 1, .wgmma.open = 1, .ld.open = 1, .st.open = 1};
    memset(pending, 0, (launch->program->reg_bytes / SLOT / 64 + 1) * sizeof *pending);
    if (launch->hazards == HAZARDS_STRICT) s->tensor_clock = clock_new(c);
    if (launch->hazards) {
      s->clock = clock_new(c);
      clock_g(c, s->clock)[warp_comp(w, C_WARP)] = 2;      // 1: it has started
    }
    interp_start(w, launch->program, &start);
    if (tracing) trace_start(w);
    make_ready(c, w);
  }
}

static void cluster_start(Launch *launch, Cluster *c) {
  const LaunchDesc *d = launch->desc;
  uint32_t n[3], id = launch->next_cluster++;
  for (int k = 0; k < 3; k++) n[k] = d->grid[k] / d->cluster[k];
  c->id[0] = id % n[0], c->id[1] = id / n[0] % n[1], c->id[2] = id / (n[0] * n[1]);
  c->active = 1;
  c->instance = id + 1;
  c->remote->n = 0;
  c->ready_head = c->ready_count = 0;
  c->live_warps = c->nwarps;
  c->arrived = c->generation = 0;
  c->cluster_cur = c->cluster_done = NO_CLOCK;
  if (launch->hazards) {
    clocks_reset(c);
    c->cluster_cur = clock_new(c);
    c->cluster_done = clock_new(c);
  }
  for (uint32_t r = 0; r < launch->cluster_size; r++) cta_start(c, &c->ctas[r], c->id);
}

// Strict checks: the CTA has to know of every arrival of another CTA's warps at its barriers, by a wait or a
// barrier, since it has no shared memory once it has left.
static int remote_arrivals_known(Cluster *c, Cta *cta) {
  if (cta->remote == NO_CLOCK) return 1;
  const uint32_t *latest = clock_g(c, cta->remote);
  for (uint32_t comp = 0; comp < c->nwarps; comp++) {
    int known = !latest[comp];
    for (uint32_t i = 0; i < c->launch->nwarps && !known; i++)
      known = clock_g(c, cta->states[i].clock)[comp] >= latest[comp];
    if (known) continue;
    fault(&cta->warps[0], NULL, FAULT_LEAK, "advice: the CTA may end before the last arrival of warp %u of "
          "CTA rank %u at one of its mbarriers: it waits for nothing that comes after that",
          comp % c->launch->nwarps, comp / c->launch->nwarps);
    return 0;
  }
  return 1;
}

// What must not be left behind when the last warp has gone.
static int cluster_leaks(Cluster *c) {
  for (uint32_t r = 0; r < c->launch->cluster_size; r++) {
    Cta *cta = &c->ctas[r];
    if (cta->tmem_in_use) {
      fault(&cta->warps[0], NULL, FAULT_LEAK, "the CTA ends with %u TMEM columns that no tcgen05.dealloc has "
            "freed",
            cta->tmem_in_use);
      return 1;
    }
    if (!remote_arrivals_known(c, cta)) return 1;
    for (uint32_t i = 0; c->launch->hazards && i < cta->nmbars; i++) {
      const Mbarrier *b = &cta->mbars[i];
      if (b->valid && b->last_copy > b->observed) {
        fault(&cta->warps[0], NULL, FAULT_LEAK, "the CTA ends without a wait for phase %u of the mbarrier at "
              "0x%x, which "
              "asynchronous copies into shared memory signal", b->last_copy - 1, b->offset);
        return 1;
      }
      // advice: kernels in use end with bytes that nobody waits for
      if (c->launch->hazards == HAZARDS_STRICT && b->valid && b->tx) {
        fault(&cta->warps[0], NULL, FAULT_LEAK, "advice: the CTA ends with %d bytes pending in phase %u of the "
              "mbarrier at 0x%x: no copy brings them", b->tx, b->phase, b->offset);
        return 1;
      }
      // A CTA that has left has no shared memory, and the arrival of a commit that came in time here may come
      // later: PTX ISA, "tcgen05.commit".
      if (c->launch->hazards == HAZARDS_STRICT && b->valid && b->last_commit > b->observed) {
        fault(&cta->warps[0], NULL, FAULT_LEAK, "advice: the CTA ends without a wait for phase %u of the "
              "mbarrier at 0x%x, which a tcgen05.commit of another CTA signals",
              b->last_commit - 1, b->offset);
        return 1;
      }
    }
  }
  return 0;
}

static void cluster_finish(Cluster *c) {
  Launch *launch = c->launch;
  while (!launch->result->fault && complete_one(c)) {}
  if (launch->result->fault || cluster_leaks(c)) return;
  c->active = 0;
  launch->ncluster_done++;
  made_progress(launch);
  if (launch->desc->progress)
    launch->desc->progress((uint64_t)launch->ncluster_done * launch->cluster_size,
                           (uint64_t)launch->nclusters * launch->cluster_size);
  if (launch->next_cluster < launch->nclusters) cluster_start(launch, c);
}

// Runs one cluster for a while. Returns 1 if anything but polling happened.
static int cluster_run(Cluster *c) {
  Launch *launch = c->launch;
  const int random = launch->desc->policy == POLICY_RANDOM;
  uint64_t before = launch->progress, last = before;
  uint32_t idle = 0;
  for (uint32_t turn = 0; turn < TURNS && c->active; turn++) {
    if (random && c->queued && next_random(launch) % 4 == 0) complete_one(c);
    while (!c->ready_count && c->live_warps && !launch->result->fault && complete_one(c)) {}
    if (launch->result->fault) return 1;
    if (!c->live_warps) {
      cluster_finish(c);
      return 1;
    }
    if (!c->ready_count) break;
    uint32_t at = random ? (uint32_t)(next_random(launch) % c->ready_count) : 0;
    uint32_t slot = (c->ready_head + at) % c->nwarps;
    Warp *w = c->ready[slot];
    c->ready[slot] = c->ready[c->ready_head];
    c->ready_head = (c->ready_head + 1) % c->nwarps;
    c->ready_count--;
    state(w)->ready = 0;
    launch->turns++;
    RunResult r = interp_run(w,
                             random ? 1 + (uint32_t)(next_random(launch) % (1u << next_random(launch) % 11))
                                 : QUANTUM);
    if (r == RUN_FAULT) return 1;
    if (r == RUN_BUDGET || r == RUN_YIELD) make_ready(c, w);
    if (r == RUN_BUDGET && !random) launch->turns += BUDGET_TURNS;
    if (launch->progress != last) {
      last = launch->progress;
      idle = 0;
    // everyone polls: let a copy complete, or else another cluster run
    } else if (++idle > 2 * c->nwarps) {
      idle = 0;
      if (!complete_one(c)) break;
    }
  }
  return launch->progress != before;
}

// ---------------------------------------------------------------- deadlock
static void describe_wait(const Warp *w, const Waiting *s, char *out, size_t size) {
  int n = snprintf(out, size, "\n  CTA (%u,%u,%u) warp %u, PTX line %u: ", w->cta->id[0], w->cta->id[1],
                   w->cta->id[2], w->id, s->line);
  if (n < 0 || (size_t)n >= size) return;
  out += n, size -= (size_t)n;
  if (s->kind == WAIT_MBAR) {
    const Mbarrier *b = s->mbar;
    snprintf(out, size, "mbarrier at 0x%x of CTA rank %u for parity %u: phase %u is incomplete with %u of %u "
             "arrivals and %d bytes pending",
             b->offset, s->mbar_cta->rank, s->parity, b->phase, b->pending, b->expected, b->tx);
  } else if (s->kind == WAIT_NAMED) {
    const NamedBarrier *b = &w->cta->named[s->id];
    snprintf(out, size, "barrier %u: %u of %u threads have arrived", s->id, b->arrived, b->expected);
  } else if (s->kind == WAIT_CLUSTER) {
    snprintf(out, size, "barrier.cluster.wait: %u of %u warps have arrived", w->cta->cluster->arrived,
             w->cta->cluster->nwarps);
  } else if (s->kind == WAIT_WGMMA) {
    snprintf(out, size, "wgmma.wait_group: other warps of warpgroup %u have not issued the operations",
             s->id);
  } else if (s->kind == WAIT_REGISTERS) {
    snprintf(out, size, "setmaxnreg.inc: %u registers are free in the CTA", w->cta->free_registers);
  } else if (w->cta->tmem_waiting == 1 + w->id) {
    snprintf(out, size, "tcgen05.alloc: the peer CTA has not come to it");
  } else {
    snprintf(out, size, "tcgen05.alloc: %u TMEM columns are in use", w->cta->tmem_in_use);
  }
}

static void report_stuck(Launch *launch, const char *what) {
  char text[3800];
  size_t used = 0;
  Warp *first = NULL;
  text[0] = 0;
  for (uint32_t i = 0; i < launch->nslots; i++)
    for (uint32_t k = 0; launch->slots[i].active && k < launch->slots[i].nwarps; k++) {
      Warp *w = &launch->slots[i].ctas[k / launch->nwarps].warps[k % launch->nwarps];
      for (int s = 0; s < w->nsplit && !state(w)->exited; s++) {
        if (!w->split[s].mask) continue;
        if (!first) first = w;
        char line[256];
        if (w->split[s].wait && w->split[s].wait != WAIT_CONVERGE)
          describe_wait(w, &state(w)->wait[s], line, sizeof line);
        else snprintf(line, sizeof line, "\n  CTA (%u,%u,%u) warp %u, PTX line %u: %s", w->cta->id[0],
                      w->cta->id[1], w->cta->id[2], w->id,
                      launch->program->ops[w->split[s].pc].line, w->split[s].wait
                          ? "waits for other lanes of the warp" : "runs (polling)");
        size_t n = strlen(line);
        if (used + n + 1 < sizeof text) memcpy(text + used, line, n + 1), used += n;
      }
    }
  if (first) fault(first, NULL, FAULT_DEADLOCK, "%s%s", what, text);
}

static void run_all(Launch *launch) {
  uint64_t last = launch->progress, last_turns = 0;
  while (launch->ncluster_done < launch->nclusters && !launch->result->fault) {
    uint64_t turns = launch->turns;
    int progress = 0;
    if (launch->desc->stop && *launch->desc->stop) {
      fault(&launch->slots[0].ctas[0].warps[0], NULL, FAULT_ILLEGAL, "interrupted");
      return;
    }
    for (uint32_t i = 0; i < launch->nslots && !launch->result->fault; i++)
      if (launch->slots[i].active) progress |= cluster_run(&launch->slots[i]);
    if (launch->result->fault) return;
    if (launch->progress != last) last = launch->progress, last_turns = launch->turns;
    if (!progress && launch->turns == turns)
      report_stuck(launch, "deadlock: every warp waits, and nothing is in flight");
    else if (launch->turns - last_turns > LIVELOCK_TURNS)
      report_stuck(launch, "livelock: warps poll, and nothing has changed for a long time");
  }
}

int emu_run(const LaunchDesc *desc, LaunchResult *result) {
  Launch launch = {.desc = desc, .result = result, .program = desc->program, .hazards = desc->hazards,
                   .rng = desc->seed * 0x2545f4914f6cdd1dull + 1, .previous = desc->previous};
  result->fault = 0;
  result->message[0] = 0;
  trace_begin(desc);
  launch.cluster_size = desc->cluster[0] * desc->cluster[1] * desc->cluster[2];
  launch.nwarps = (desc->block[0] * desc->block[1] * desc->block[2] + LANES - 1) / LANES;
  launch.nclusters = desc->grid[0] / desc->cluster[0] * (desc->grid[1] / desc->cluster[1]) *
      (desc->grid[2] / desc->cluster[2]);
  launch.smem_end = desc->dynamic_base + desc->dynamic_smem;
  if (launch.smem_end < SMEM_RESERVED + desc->static_smem)
    launch.smem_end = SMEM_RESERVED + desc->static_smem;
  launch.nslots = desc->resident / launch.cluster_size;
  if (launch.nslots > launch.nclusters) launch.nslots = launch.nclusters;
  if (!launch.nslots) launch.nslots = 1;
  launch.footprint = footprint_new(desc);
  launch.slots = calloc(launch.nslots, sizeof *launch.slots);
  for (uint32_t i = 0; i < launch.nslots && launch.nclusters; i++) {
    cluster_alloc(&launch, &launch.slots[i]);
    cluster_start(&launch, &launch.slots[i]);
  }
  run_all(&launch);
  for (uint32_t i = 0; i < launch.nslots; i++) cluster_free(&launch.slots[i]);
  free(launch.slots);
  global_sync_free(&launch);
  footprint_forget_order(launch.footprint);
  while (launch.blocks) {
    struct AsyncBlock *b = launch.blocks;
    launch.blocks = b->next;
    free(b);
  }
  const size_t n = (size_t)launch.nwarps * desc->program->nops;
  result->warp_instructions = 0;
  for (size_t i = 0; i < n; i++) result->warp_instructions += result->counts[i];
  footprint_count(launch.footprint, &result->sectors_read, &result->sectors_written);
  // A grid ends after each of its threads, and so after what one of them has waited for.
  if (launch.previous) launch.footprint->before = result->waited ? launch.previous->before : launch.previous;
  result->footprint = launch.footprint;
  trace_end(result);
  return result->fault != 0;
}
