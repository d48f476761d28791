// Global memory: bounds, footprints, and the order between CTAs (global.c).
#ifndef CUTE_GEMMA_GLOBAL_H
#define CUTE_GEMMA_GLOBAL_H
#include "engine.h"
#include "footprint.h"

typedef struct SectorAccess {       // the last write to, or read of, a sector in this launch
  uint32_t instance, epoch;         // which cluster, and when by its clock
  uint32_t mask;                    // bytes
  uint16_t comp;
} SectorAccess;

typedef struct Snapshot {           // what a release made known: the clock of a cluster at that time
  struct Snapshot *next;            // all of the launch, to free them
  // v: for each warp, what it wrote that the async proxy sees too; then the clock
  // narrow: released with .cta or .cluster scope, so that no other cluster acquires it
  uint32_t instance, narrow, words, v[];
} Snapshot;
typedef struct Knowledge { uint32_t n, cap; Snapshot **item; } Knowledge;

typedef struct { uint64_t address; Knowledge known; } SyncVariable;
typedef struct GlobalSync {         // addresses through which CTAs synchronise
  uint32_t n, cap; SyncVariable *table;     // open addressing
  Snapshot *snapshots;
} GlobalSync;

// known to whoever has `epoch` of that warp's C_REMOTE; twin: index + 1 of the same behind a proxy fence
typedef struct { Snapshot *snapshot; uint32_t warp, epoch, twin; } Remote;
typedef struct RemoteList { uint32_t n, cap; Remote *item; } RemoteList;

// of strong accesses: WITH_FENCE: relaxed, so that a fence before (after) it releases (acquires); NARROW: of
// .cta or .cluster scope
typedef enum { WITH_FENCE = 1, WIDE, NARROW } Order;
// read-only: ld.global.nc
typedef enum { WEAK, STRONG, READ_ONLY, ASYNC } Strength;

int global_access(Warp *w, const Op *op, uint64_t address, uint64_t bytes, int write, int waited,
                  Strength how);
// order of an asynchronous access, at its issue; x: who, as its clock knows it
int global_order(const Agent *x, uint64_t address, uint64_t bytes, int write);
// 1 if this launch has written any of the bytes (as far as sectors remember)
int global_written(Launch *launch, uint64_t address, uint64_t bytes);
void global_proxy_fence(Warp *w);
void global_release(Warp *w, uint64_t address, Order how, uint32_t lanes);
void global_acquire(Warp *w, uint64_t address, Order how, uint32_t lanes);
void global_fence(Warp *w, uint32_t lanes, int narrow);
void global_sync_free(Launch *launch);
void remote_free(Cluster *c);
#endif
