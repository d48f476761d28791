// Global memory: bounds, footprints, and the order between CTAs (global.c).
#ifndef CUTE_GEMMA_GLOBAL_H
#define CUTE_GEMMA_GLOBAL_H
#include "engine.h"
#include "footprint.h"

typedef struct SectorWrite {        // the last ordinary write to a sector in this launch
  uint32_t instance, epoch;         // which cluster, and when by its clock
  uint32_t mask;                    // bytes
  uint16_t comp;
} SectorWrite;

typedef struct Snapshot {           // what a release made known: the clock of a cluster at that time
  struct Snapshot *next;            // all of the launch, to free them
  uint32_t instance, words, v[];
} Snapshot;
typedef struct Knowledge { uint32_t n, cap; Snapshot **item; } Knowledge;

typedef struct { uint64_t address; Knowledge known; } SyncVariable;
typedef struct GlobalSync {         // addresses through which CTAs synchronise
  uint32_t n, cap; SyncVariable *table;     // open addressing
  Snapshot *snapshots;
} GlobalSync;

// known to whoever has `epoch` of that warp's C_REMOTE
typedef struct { Snapshot *snapshot; uint32_t warp, epoch; } Remote;
typedef struct RemoteList { uint32_t n, cap; Remote *item; } RemoteList;

typedef enum { WEAK, STRONG, ASYNC } Strength;

int global_access(Warp *w, const Op *op, uint64_t address, uint64_t bytes, int write, int waited,
                  Strength how, const Async *a);
// order of an asynchronous read, at its issue
int global_read_box_order(Warp *w, const Op *op, uint64_t address, uint64_t bytes);
// anything in the region of `address` was written in this launch
int global_written(Launch *launch, uint64_t address);
void global_release(Warp *w, uint64_t address, int fenced_only, uint32_t lanes);
void global_acquire(Warp *w, uint64_t address, int needs_fence, uint32_t lanes);
void global_fence(Warp *w, uint32_t lanes);
void global_sync_free(Launch *launch);
void remote_free(Cluster *c);
#endif
