// Global memory: bounds, footprints, the check of programmatic launches, and the order of ordinary accesses
// of different CTAs:
// what one CTA writes and another reads needs a release and an acquire (PTX ISA, "Memory Consistency Model").
#include "global.h"
#include "hazard.h"
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

static int pdl_hazard(Warp *w, const Op *op, uint64_t address, uint64_t bytes, int write) {
  Launch *launch = w->launch;
  int theirs = footprint_hit(launch->previous, address, bytes, 1) ? 1 : write &&
      footprint_hit(launch->previous, address, bytes, 0) ? 2 : 0;
  if (!theirs) return 0;
  fault(w, op, FAULT_PDL, "%s global memory at 0x%llx, which the launch before %s, without "
        "griddepcontrol.wait before it",
        write ? "writes" : "reads", (unsigned long long)address, theirs == 1 ? "wrote" : "read");
  return 1;
}


// ---------------------------------------------------------------- what is known of other clusters
static void learn(Knowledge *k, Snapshot *s) {
  for (uint32_t i = 0; i < k->n; i++) {
    const Snapshot *o = k->item[i];
    if (o == s) return;
    if (o->instance != s->instance) continue;
    int older = 1, newer = 1;
    for (uint32_t j = 0; j < s->words; j++) older &= s->v[j] <= o->v[j], newer &= s->v[j] >= o->v[j];
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

// Strict checks: what lanes other than these wrote since the warp's lanes met is not released with it.
static Snapshot *take_snapshot(Warp *w, uint32_t lanes) {
  Cluster *c = cluster_of(w);
  GlobalSync *sync = w->launch->sync;
  const uint32_t words = C_PER_WARP * c->nwarps;
  Snapshot *s = malloc(sizeof *s + words * sizeof *s->v);
  s->instance = c->instance;
  s->words = words;
  lanes_share_waits(w);
  memcpy(s->v, clock_g(c, state(w)->clock), words * sizeof *s->v);
  const WarpState *owner = state(w);
  uint32_t *own = &s->v[warp_comp(w, C_WARP)];
  if (w->launch->hazards == HAZARDS_STRICT && owner->global_writers & ~lanes && *own > owner->met_epoch)
    *own = owner->met_epoch;
  s->next = sync->snapshots;
  sync->snapshots = s;
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
    for (uint32_t i = 0; i < s->words; i++) g[i] = g[i] > s->v[i] ? g[i] : s->v[i];
    return;
  }
  RemoteList *list = c->remote;
  for (uint32_t i = 0; i < list->n; i++)
    if (list->item[i].snapshot == s && visible(w, &list->item[i])) return;
  if (list->n == list->cap) {
    list->cap = list->cap ? 2 * list->cap : 16;
    list->item = realloc(list->item, list->cap * sizeof *list->item);
  }
  list->item[list->n++] = (Remote){s, state(w)->index, ++state(w)->acquires};
  g[warp_comp(w, C_REMOTE)] = state(w)->acquires;
  if (lanes != w->live) state(w)->acquirers |= lanes;
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

// A strong write to `address`. fenced_only: it is relaxed, and releases what a fence before it covers.
void global_release(Warp *w, uint64_t address, int fenced_only, uint32_t lanes) {
  WarpState *s = state(w);
  if (fenced_only && !s->fenced_snapshot) return;
  SyncVariable *v = variable(w->launch, address & ~3ull, 1);
  if (fenced_only) {
    learn(&v->known, s->fenced_snapshot);
    for (uint32_t i = 0; i < s->fenced_known->n; i++) learn(&v->known, s->fenced_known->item[i]);
    return;
  }
  learn(&v->known, take_snapshot(w, lanes));
  learn_visible(w, &v->known);
}

// A strong read of `address`. needs_fence: it is relaxed, and acquires when a fence follows.
void global_acquire(Warp *w, uint64_t address, int needs_fence, uint32_t lanes) {
  SyncVariable *v = variable(w->launch, address & ~3ull, 0);
  for (uint32_t i = 0; v && i < v->known.n; i++)
    if (needs_fence) learn(state(w)->seen, v->known.item[i]);
    else acquire(w, v->known.item[i], lanes);
}

void global_fence(Warp *w, uint32_t lanes) {
  WarpState *s = state(w);
  if (!w->launch->sync) w->launch->sync = calloc(1, sizeof *w->launch->sync);
  for (uint32_t i = 0; i < s->seen->n; i++) acquire(w, s->seen->item[i], lanes);
  s->seen->n = s->fenced_known->n = 0;
  learn_visible(w, s->fenced_known);
  s->fenced_snapshot = take_snapshot(w, lanes);
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

// ---------------------------------------------------------------- order of ordinary accesses
static int remote_ordered(Warp *w, const SectorWrite *x) {
  Cluster *c = cluster_of(w);
  WarpState *s = state(w);
  if (x->instance == c->instance) return clock_g(c, s->clock)[x->comp] >= x->epoch;
  if (s->ok_instance == x->instance && s->ok_comp == x->comp && s->ok_epoch >= x->epoch) return 1;
  for (uint32_t i = 0; i < c->remote->n; i++) {
    const Remote *r = &c->remote->item[i];
    if (r->snapshot->instance != x->instance || r->snapshot->v[x->comp] < x->epoch || !visible(w, r))
      continue;
    s->ok_instance = x->instance, s->ok_comp = x->comp, s->ok_epoch = r->snapshot->v[x->comp];
    return 1;
  }
  return 0;
}

static int unordered(Warp *w, const Op *op, uint64_t address, const SectorWrite *x) {
  const LaunchDesc *d = w->launch->desc;
  const uint32_t id = x->instance - 1, nx = d->grid[0] / d->cluster[0], ny = d->grid[1] / d->cluster[1];
  const uint32_t index = x->comp % cluster_of(w)->nwarps, per = w->launch->nwarps, bulk = x->comp /
      cluster_of(w)->nwarps == C_BULK_WRITE;
  if (state(w)->reads_apart) {
    fault(w, op, FAULT_RACE, "advice: reads global memory at 0x%llx, which warp %u of cluster (%u,%u,%u), "
          "CTA rank %u, wrote in this launch: another lane of the warp may have acquired it, but no "
          "bar.warp.sync follows that", (unsigned long long)address, index % per, id % nx, id / nx % ny,
          id / (nx * ny), index / per);
    return 0;
  }
  fault(w, op, FAULT_RACE, "reads global memory at 0x%llx, which %swarp %u of cluster (%u,%u,%u), CTA rank "
        "%u, wrote in this launch, with nothing "
        "that orders the two: %sa release (or a fence and a relaxed write) there and an acquire here must "
            "come between", (unsigned long long)address,
        bulk ? "a bulk copy of " : "", index % per, id % nx, id / nx % ny, id / (nx * ny), index / per,
        bulk ? "cp.async.bulk.wait_group and " : "");
  return 0;
}

// bytes of [low, high) in a sector
static uint32_t sector_bytes(uint64_t sector, uint64_t low, uint64_t high) {
  uint64_t first = low > sector ? low - sector : 0, last = high < sector + SECTOR ? high - sector : SECTOR;
  return (last - first == SECTOR ? FULL : (1u << (last - first)) - 1) << first;
}

static int read_order(Warp *w, const Op *op, FootprintRegion *r, uint64_t address, uint64_t bytes) {
  const uint64_t start = r->base - r->base % SECTOR;
  for (uint64_t s = address - (address - start) % SECTOR; s < address + bytes; s += SECTOR) {
    const SectorWrite *x = &r->writes[(s - start) / SECTOR];
    if (x->mask & sector_bytes(s, address, address + bytes) && !remote_ordered(w, x))
      return unordered(w, op, address, x);
  }
  return 1;
}

static void note_write(Warp *w, FootprintRegion *r, uint64_t address, uint64_t bytes, Strength how,
                       const Async *a) {
  if (!r->writes) {
    if (how == STRONG) return;
    r->writes = calloc(r->words * 64, sizeof *r->writes);      // pages that nothing writes cost nothing
  }
  const Cluster *c = cluster_of(w);
  SectorWrite x = {.instance = c->instance, .comp = (uint16_t)warp_comp(w, how == ASYNC ? C_BULK_WRITE
      : C_WARP)};
  x.epoch = how == ASYNC ? a->copy.group : clock_g(c, state(w)->clock)[x.comp];
  const uint64_t start = r->base - r->base % SECTOR;
  for (uint64_t s = address - (address - start) % SECTOR; s < address + bytes; s += SECTOR) {
    SectorWrite *old = &r->writes[(s - start) / SECTOR];
    uint32_t mask = sector_bytes(s, address, address + bytes);
    if (how == STRONG) {
      old->mask &= ~mask;
      continue;
    }
    x.mask = old->instance == x.instance && old->comp == x.comp && old->epoch == x.epoch ? old->mask | mask
        : mask;
    *old = x;
  }
}

int global_written(Launch *launch, uint64_t address) {
  FootprintRegion *r = region_of(launch, address, 1);
  return r && r->writes;
}

int global_read_box_order(Warp *w, const Op *op, uint64_t address, uint64_t bytes) {
  FootprintRegion *r = region_of(w->launch, address, bytes);
  return !r || !r->writes || read_order(w, op, r, address, bytes);
}

// ---------------------------------------------------------------- the access
int global_access(Warp *w, const Op *op, uint64_t address, uint64_t bytes, int write, int waited,
                  Strength how, const Async *a) {
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
  if (!waited && pdl_hazard(w, op, address, bytes, write)) return 0;
  footprint_mark(r, address, bytes, write);
  if (!launch->hazards) return 1;
  if (write) note_write(w, r, address, bytes, how, a);
  else if (how == WEAK && r->writes) return read_order(w, op, r, address, bytes);
  return 1;
}

int global_check(Warp *w, const Op *op, uint64_t address, uint64_t bytes, int write) {
  return global_access(w, op, address, bytes, write, grid_waited(w), WEAK, NULL);
}

int global_check_async(const Async *a, uint64_t address, uint64_t bytes, int write) {
  return global_access(a->warp, a->op, address, bytes, write, a->grid_waited, ASYNC, a);
}

void remote_free(Cluster *c) {
  if (!c->remote) return;
  free(c->remote->item);
  free(c->remote);
}
