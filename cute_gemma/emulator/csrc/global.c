// Global memory: bounds, footprints, the check of programmatic launches, and the order of ordinary accesses
// of different CTAs:
// what one CTA writes and another reads needs a release and an acquire (PTX ISA, "Memory Consistency Model").
#include "global.h"
#include "hazard.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FootprintRegion *region_of(Launch *launch, uint64_t address, uint64_t bytes) {
  Footprint *f = launch->footprint;
  if (launch->last_region < f->n) {
    FootprintRegion *r = &f->region[launch->last_region];
    if (address - r->base < r->size && bytes <= r->size - (address - r->base)) return r;
  }
  uint32_t low = 0, high = f->n;
  while (low < high) {            // the last region that starts at or below the address
    uint32_t mid = (low + high) / 2;
    if (f->region[mid].base <= address) low = mid + 1; else high = mid;
  }
  // regions may overlap (views of one storage): look back over those that start below
  for (uint32_t i = low; i-- > 0 && low - i <= 16;) {
    FootprintRegion *r = &f->region[i];
    if (address - r->base < r->size && bytes <= r->size - (address - r->base)) {
      launch->last_region = i;
      return r;
    }
  }
  return NULL;
}

static int in_params(const Launch *launch, uint64_t address, uint64_t bytes) {
  uint64_t base = (uint64_t)launch->desc->params;
  return address >= base && address - base + bytes <= launch->desc->param_bytes;
}

int grid_waited(Warp *w) {
  Launch *launch = w->launch;
  if (!launch->desc->programmatic || !launch->previous) return 1;
  return launch->hazards ? warp_ordered(w, grid_comp(cluster_of(w)), 1) : (int)w->cta->grid_waited;
}

// Launches that may still run: after griddepcontrol.wait those that the one before has not waited for.
static int pdl_hazard(Warp *w, const Op *op, uint64_t address, uint64_t bytes, int write, int waited) {
  const Footprint *previous = w->launch->previous;
  for (const Footprint *f = waited && previous ? previous->before : previous; f; f = f->before) {
    int theirs = footprint_hit(f, address, bytes, 1) ? 1 : write && footprint_hit(f, address, bytes, 0) ? 2 : 0;
    if (!theirs) continue;
    const char *what = write ? "writes" : "reads", *did = theirs == 1 ? "wrote" : "read";
    if (f == previous)
      fault(w, op, FAULT_PDL, "%s global memory at 0x%llx, which the launch before %s, without "
            "griddepcontrol.wait before it", what, (unsigned long long)address, did);
    else
      fault(w, op, FAULT_PDL, "%s global memory at 0x%llx, which an earlier launch %s: it may still run, as no "
            "thread of those in between has waited for it", what, (unsigned long long)address, did);
    return 1;
  }
  return 0;
}


// ---------------------------------------------------------------- what is known of other clusters
static void learn(Knowledge *k, Snapshot *s) {
  for (uint32_t i = 0; i < k->n; i++) {
    const Snapshot *o = k->item[i];
    if (o == s) return;
    if (o->instance != s->instance || o->narrow != s->narrow) continue;
    int older = 1, newer = 1;
    for (uint32_t j = 0; j < s->words || j < o->words; j++) {
      const uint32_t mine = j < s->words ? s->v[j] : 0, theirs = j < o->words ? o->v[j] : 0;
      older &= mine <= theirs, newer &= mine >= theirs;
    }
    if (older) return;
    if (newer) {
      k->item[i] = s;
      return;
    }
  }
  if (k->n == k->cap) {
    k->cap = k->cap ? 2 * k->cap : 8;
    k->item = realloc(k->item, k->cap * sizeof *k->item);
  }
  k->item[k->n++] = s;
}

static Snapshot *snapshot_new(Launch *launch, uint32_t instance, uint32_t words) {
  GlobalSync *sync = launch->sync;
  Snapshot *s = malloc(sizeof *s + words * sizeof *s->v);
  *s = (Snapshot){.next = sync->snapshots, .instance = instance, .words = words};
  return sync->snapshots = s;
}

// Strict checks: what lanes other than these wrote since the warp's lanes met is not released with it.
static Snapshot *take_snapshot(Warp *w, uint32_t lanes, int narrow) {
  Cluster *c = cluster_of(w);
  Snapshot *s = snapshot_new(w->launch, c->instance, c->nwarps + c->ncomps);
  s->narrow = (uint32_t)narrow;
  lanes_share_waits(w);
  memcpy(s->v, clock_global(c, state(w)->clock), c->nwarps * sizeof *s->v);
  memcpy(s->v + c->nwarps, clock_g(c, state(w)->clock), c->ncomps * sizeof *s->v);
  const WarpState *owner = state(w);
  uint32_t *own = &s->v[c->nwarps + warp_comp(w, C_WARP)];
  if (w->launch->hazards == HAZARDS_STRICT && owner->global_writers & ~lanes && *own > owner->met_epoch)
    *own = owner->met_epoch;
  clock_publish(w);
  return s;
}

static int visible(const Warp *w, const Remote *r) {
  const Cluster *c = cluster_of(w);
  return clock_g(c, state(w)->clock)[C_REMOTE * c->nwarps + r->warp] >= r->epoch;
}

static void learn_visible(const Warp *w, Knowledge *k) {
  const RemoteList *list = cluster_of(w)->remote;
  for (uint32_t i = 0; i < list->n; i++)
    if (visible(w, &list->item[i])) learn(k, list->item[i].snapshot);
}

static void acquire(Warp *w, Snapshot *s, uint32_t lanes) {
  Cluster *c = cluster_of(w);
  uint32_t *g = clock_g(c, state(w)->clock);
  if (s->instance == c->instance) {
    uint32_t *seen = clock_global(c, state(w)->clock);
    for (uint32_t i = 0; i < s->words; i++) {
      uint32_t *to = i < c->nwarps ? &seen[i] : &g[i - c->nwarps];
      *to = *to > s->v[i] ? *to : s->v[i];
    }
    return;
  }
  if (s->narrow) return;
  RemoteList *list = c->remote;
  for (uint32_t i = 0; i < list->n; i++)
    if (list->item[i].snapshot == s && visible(w, &list->item[i])) return;
  if (list->n == list->cap) {
    list->cap = list->cap ? 2 * list->cap : 16;
    list->item = realloc(list->item, list->cap * sizeof *list->item);
  }
  list->item[list->n++] = (Remote){s, state(w)->index, ++state(w)->acquires, 0};
  g[warp_comp(w, C_REMOTE)] = state(w)->acquires;
  if (lanes != w->live) state(w)->acquirers |= lanes;
}

// fence.proxy.async: what is known of other clusters' writes is known to the async proxy too.
void global_proxy_fence(Warp *w) {
  RemoteList *list = cluster_of(w)->remote;
  const uint32_t nwarps = cluster_of(w)->nwarps;
  for (uint32_t i = 0, n = list->n; i < n; i++) {
    const Remote r = list->item[i];
    if (!visible(w, &r) || (r.twin && visible(w, &list->item[r.twin - 1]))) continue;
    if (!memcmp(r.snapshot->v, r.snapshot->v + nwarps, nwarps * sizeof *r.snapshot->v)) continue;
    Snapshot *s = snapshot_new(w->launch, r.snapshot->instance, r.snapshot->words);
    memcpy(s->v, r.snapshot->v, s->words * sizeof *s->v);
    memcpy(s->v, s->v + nwarps, nwarps * sizeof *s->v);
    acquire(w, s, w->live);
    list->item[i].twin = list->n;
  }
}

// ---------------------------------------------------------------- addresses that synchronise
static SyncVariable *slot_of(GlobalSync *sync, uint64_t address) {
  uint64_t at = (address >> 2) * 0x9e3779b97f4a7c15ull >> 20;
  for (;; at++) {
    SyncVariable *v = &sync->table[at & (sync->cap - 1)];
    if (!v->address || v->address == address) return v;
  }
}

static SyncVariable *variable(Launch *launch, uint64_t address, int make) {
  if (!launch->sync) {
    if (!make) return NULL;
    launch->sync = calloc(1, sizeof *launch->sync);
  }
  GlobalSync *sync = launch->sync;
  if (make && 2 * sync->n >= sync->cap) {
    GlobalSync old = *sync;
    sync->cap = old.cap ? 2 * old.cap : 64;
    sync->table = calloc(sync->cap, sizeof *sync->table);
    for (uint32_t i = 0; i < old.cap; i++)
      if (old.table[i].address) *slot_of(sync, old.table[i].address) = old.table[i];
    free(old.table);
  }
  if (!sync->cap) return NULL;
  SyncVariable *v = slot_of(sync, address);
  if (v->address || !make) return v->address ? v : NULL;
  v->address = address;
  sync->n++;
  return v;
}

// A strong write to `address`.
void global_release(Warp *w, uint64_t address, Order how, uint32_t lanes) {
  WarpState *s = state(w);
  if (how == WITH_FENCE && !s->fenced_snapshot[0] && !s->fenced_snapshot[1]) return;
  SyncVariable *v = variable(w->launch, address & ~3ull, 1);
  if (how == WITH_FENCE) {
    for (int narrow = 0; narrow < 2; narrow++)
      if (s->fenced_snapshot[narrow]) learn(&v->known, s->fenced_snapshot[narrow]);
    for (uint32_t i = 0; i < s->fenced_known->n; i++) learn(&v->known, s->fenced_known->item[i]);
    return;
  }
  learn(&v->known, take_snapshot(w, lanes, how == NARROW));
  if (how == WIDE) learn_visible(w, &v->known);
}

// A strong read of `address`.
void global_acquire(Warp *w, uint64_t address, Order how, uint32_t lanes) {
  SyncVariable *v = variable(w->launch, address & ~3ull, 0);
  for (uint32_t i = 0; v && i < v->known.n; i++)
    if (how == WITH_FENCE) learn(state(w)->seen, v->known.item[i]);
    else if (how == WIDE || v->known.item[i]->instance == cluster_of(w)->instance)
      acquire(w, v->known.item[i], lanes);
}

void global_fence(Warp *w, uint32_t lanes, int narrow) {
  WarpState *s = state(w);
  if (!w->launch->sync) w->launch->sync = calloc(1, sizeof *w->launch->sync);
  uint32_t left = 0;
  for (uint32_t i = 0; i < s->seen->n; i++) {
    Snapshot *item = s->seen->item[i];
    if (narrow && item->instance != cluster_of(w)->instance) s->seen->item[left++] = item;
    else acquire(w, item, lanes);
  }
  s->seen->n = left;
  if (!narrow) {
    s->fenced_known->n = 0;
    learn_visible(w, s->fenced_known);
  }
  s->fenced_snapshot[narrow] = take_snapshot(w, lanes, narrow);
}

void global_sync_free(Launch *launch) {
  GlobalSync *sync = launch->sync;
  if (!sync) return;
  for (uint32_t i = 0; i < sync->cap; i++) free(sync->table[i].known.item);
  while (sync->snapshots) {
    Snapshot *s = sync->snapshots;
    sync->snapshots = s->next;
    free(s);
  }
  free(sync->table);
  free(sync);
}

// ---------------------------------------------------------------- order of accesses
// `proxy`: x, a write through the generic proxy, has to be visible to the async proxy too.
static int remote_ordered(const Agent *me, const SectorAccess *x, int proxy) {
  Warp *w = me->warp;
  Cluster *c = cluster_of(w);
  WarpState *s = state(w);
  if (x->instance == c->instance)
    return (proxy ? clock_global(c, s->clock) : clock_g(c, s->clock))[x->comp] >= x->epoch;
  if (!proxy && s->ok_instance == x->instance && s->ok_comp == x->comp && s->ok_epoch >= x->epoch) return 1;
  for (uint32_t i = 0; i < c->remote->n; i++) {
    const Remote *r = &c->remote->item[i];
    const uint32_t at = (proxy ? 0 : c->nwarps) + x->comp;
    if (r->snapshot->instance != x->instance || r->snapshot->words <= at || r->snapshot->v[at] < x->epoch ||
        !visible(w, r))
      continue;
    if (!proxy) s->ok_instance = x->instance, s->ok_comp = x->comp, s->ok_epoch = r->snapshot->v[at];
    return 1;
  }
  return 0;
}

static int unordered(const Agent *me, uint64_t address, const SectorAccess *x, int write, int wrote) {
  const Cluster *c = cluster_of(me->warp);
  const LaunchDesc *d = c->launch->desc;
  const uint32_t id = x->instance - 1, nx = d->grid[0] / d->cluster[0], ny = d->grid[1] / d->cluster[1];
  const uint32_t kind = x->comp / c->nwarps, index = x->comp % c->nwarps, per = c->launch->nwarps;
  char who[128];
  if (kind < C_PER_WARP)
    snprintf(who, sizeof who, "%swarp %u of cluster (%u,%u,%u), CTA rank %u,", kind ? "a bulk copy of " : "",
             index % per, id % nx, id / nx % ny, id / (nx * ny), index / per);
  else snprintf(who, sizeof who, "a bulk copy of cluster (%u,%u,%u)", id % nx, id / nx % ny, id / (nx * ny));
  const char *did = wrote ? "wrote" : "read";
  if (state(me->warp)->reads_apart) {
    fault(me->warp, me->op, FAULT_RACE, "advice: reads global memory at 0x%llx, which %s wrote in this launch: "
          "another lane of the warp may have acquired it, but no bar.warp.sync follows that",
          (unsigned long long)address, who);
    return 0;
  }
  if (me->async && wrote && !kind && remote_ordered(me, x, 0)) {
    fault(me->warp, me->op, FAULT_PROXY_FENCE, "%s global memory at 0x%llx through the async proxy, which %s "
          "wrote through the generic proxy in this launch; they are ordered, but no fence.proxy.async comes "
          "between", write ? "writes" : "reads", (unsigned long long)address, who);
    return 0;
  }
  fault(me->warp, me->op, FAULT_RACE, "%s global memory at 0x%llx, which %s %s in this launch, with nothing "
        "that orders the two: %s%s must come between", write ? "writes" : "reads",
        (unsigned long long)address, who, did,
        kind >= C_PER_WARP ? "a wait for its mbarrier and " : kind ? "cp.async.bulk.wait_group and " : "",
        x->instance == c->instance ? "a barrier"
        : "a release (or a fence and a relaxed write) there and an acquire here");
  return 0;
}

// bytes of [low, high) in a sector
static uint32_t sector_bytes(uint64_t sector, uint64_t low, uint64_t high) {
  uint64_t first = low > sector ? low - sector : 0, last = high < sector + SECTOR ? high - sector : SECTOR;
  return (last - first == SECTOR ? FULL : (1u << (last - first)) - 1) << first;
}

// Only the latest write and the latest read of a sector are remembered: misses races, invents none.
static int order(const Agent *me, FootprintRegion *r, uint64_t address, uint64_t bytes, int write,
                 Strength how) {
  const uint64_t start = r->base - r->base % SECTOR;
  const SectorAccess now = {.instance = cluster_of(me->warp)->instance, .comp = me->comp,
                            .epoch = me->epoch};
  SectorAccess **mine = &r->last[write + 2 * me->strong];
  if (!r->writable && !write) return 1;
  // pages that nothing touches cost nothing
  if (!*mine) *mine = calloc(r->words * 64, sizeof **mine);
  for (uint64_t s = address - (address - start) % SECTOR; s < address + bytes; s += SECTOR) {
    const uint64_t at = (s - start) / SECTOR;
    const uint32_t mask = sector_bytes(s, address, address + bytes);
    for (int kind = me->strong ? 1 : 3; kind >= 0; kind--) {       // two strong ones do not race
      const int wrote = kind & 1;
      const SectorAccess *x = r->last[kind] && (write || wrote) ? &r->last[kind][at] : NULL;
      if (!x || !(x->mask & mask)) continue;
      const int proxy = me->async && wrote && x->comp < cluster_of(me->warp)->nwarps;
      // one bulk group of a warp: kernels in use let all its lanes store the same bytes
      const int own = x->instance == now.instance && x->comp == now.comp && x->epoch == now.epoch;
      if (!own && !remote_ordered(me, x, proxy)) return unordered(me, address, x, write, wrote);
      if (how != READ_ONLY) continue;
      fault(me->warp, me->op, FAULT_RACE, "ld.global.nc of 0x%llx, which this launch writes: it is for "
            "memory that is read-only", (unsigned long long)address);
      return 0;
    }
    SectorAccess *old = &(*mine)[at];
    const int same = old->instance == now.instance && old->comp == now.comp && old->epoch == now.epoch;
    const uint32_t before = same ? old->mask : 0;
    *old = now;
    old->mask = before | mask;
  }
  return 1;
}

int global_order(const Agent *x, uint64_t address, uint64_t bytes, int write) {
  FootprintRegion *r = x->warp->launch->hazards ? region_of(x->warp->launch, address, bytes) : NULL;
  return !r || order(x, r, address, bytes, write, ASYNC);      // what lies outside is reported when it runs
}

int global_written(Launch *launch, uint64_t address, uint64_t bytes) {
  FootprintRegion *r = region_of(launch, address, bytes);
  if (!r) return 0;
  const uint64_t start = r->base - r->base % SECTOR;
  for (int kind = 1; kind < 4; kind += 2)
    for (uint64_t s = address - (address - start) % SECTOR; r->last[kind] && s < address + bytes; s += SECTOR)
      if (r->last[kind][(s - start) / SECTOR].mask & sector_bytes(s, address, address + bytes)) return 1;
  return 0;
}

// ---------------------------------------------------------------- the access
int global_access(Warp *w, const Op *op, uint64_t address, uint64_t bytes, int write, int waited,
                  Strength how) {
  Launch *launch = w->launch;
  FootprintRegion *r = region_of(launch, address, bytes);
  if (!r) {
    if (!write && in_params(launch, address, bytes)) return 1;
    fault(w, op, FAULT_MEMORY, "%s %llu bytes of global memory at 0x%llx, outside every tensor of the "
          "launch", write ? "writes" : "reads",
          (unsigned long long)bytes, (unsigned long long)address);
    return 0;
  }
  if (write && !r->writable) {
    fault(w, op, FAULT_MEMORY, "writes global memory at 0x%llx, which is read-only",
          (unsigned long long)address);
    return 0;
  }
  if (pdl_hazard(w, op, address, bytes, write, waited)) return 0;
  footprint_mark(r, address, bytes, write);
  if (!launch->hazards || how == ASYNC) return 1;
  Agent x = agent_of(w, op);
  x.strong = how == STRONG;
  return order(&x, r, address, bytes, write, how);
}

int global_check(Warp *w, const Op *op, uint64_t address, uint64_t bytes, int write) {
  return global_access(w, op, address, bytes, write, grid_waited(w), WEAK);
}

int global_check_async(const Async *a, uint64_t address, uint64_t bytes, int write) {
  return global_access(a->warp, a->op, address, bytes, write, a->grid_waited, ASYNC);
}

void remote_free(Cluster *c) {
  if (!c->remote) return;
  free(c->remote->item);
  free(c->remote);
}
