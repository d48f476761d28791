// The engine's own structures: clusters, barriers, queued asynchronous operations, clocks and shadows.
#ifndef CUTE_GEMMA_ENGINE_H
#define CUTE_GEMMA_ENGINE_H
#include "emu.h"

#define SMEM_OFFSET 0xffffffu
// PTX ISA, "Tensor Memory Addressing": 512 columns of 128 lanes of 32 bits
#define TMEM_COLUMNS 512
#define TMEM_LANES 128
#define NAMED_BARRIERS 16           // PTX ISA, barrier{.cta}: sixteen barriers per CTA
#define MBAR_MAX_COUNT ((1 << 20) - 1)   // PTX ISA, mbarrier: pending count and tx-count stay within 2^20-1
#define GRANULE 16u                 // bytes of shared memory under one shadow

typedef struct Cluster Cluster;
typedef struct Async Async;

// ---------------------------------------------------------------- happens-before clocks (hazard.c)
// A clock holds, for every component (below), the last epoch that is ordered before its owner: `g` for the
// generic proxy; `a` for what has also been made visible to the async proxy. A component counts the epochs of
// one agent.
// components of a warp; component index = kind * warps in the cluster + warp
enum {
  C_WARP, C_CP_ASYNC,               // what the generic proxy writes comes first: `a` covers only these two
  // mbarrier.init; acquires from other clusters
  C_BULK_READ, C_BULK_WRITE, C_TMEM_LD, C_TMEM_ST, C_WGMMA, C_INIT, C_REMOTE, C_PIPE, C_PER_WARP
};
typedef uint32_t ClockId;           // index into Cluster.clocks
#define NO_CLOCK 0xffffffffu

typedef struct {
  uint32_t wepoch, repoch;          // epoch of the last write and of the last read
  uint32_t wline, rline;            // PTX lines of them
  uint16_t wcomp, rcomp;            // their components
  // the sixteenths (bytes, or pairs of TMEM lanes) they touched; 0: no such access
  uint16_t wmask, rmask;
  uint16_t init;                    // sixteenths that anything has written
  uint16_t gen;                     // the CTA that this entry belongs to; an older one means untouched
  uint8_t tag;                      // swizzle mode + 1 when TMA wrote it, else 0
  // bit 0, 1: an mbarrier lives in the lower, upper half; 2: the read was a strong one
  uint8_t barrier;
  uint16_t more;                    // index + 1 of further accesses in Cluster.extra
} Shadow;

typedef struct { uint32_t epoch, line; uint16_t comp, mask; uint8_t strong; } Access;
typedef struct { Access *item; uint16_t count, cap, writes, next_free; } Extra;   // writes first, then reads

typedef struct {                    // who touches memory, for the checks
  const uint32_t *g, *a;            // its clocks
  const uint32_t *unfenced;         // strict checks: g without the need for tcgen05 fences
  uint32_t epoch, line;
  uint16_t comp;
  uint8_t async;                    // accesses through the async proxy
  uint8_t fifo;                     // ordered after every earlier epoch of its own component
  uint8_t tag;
  uint8_t apart;                    // what other lanes of the warp wrote is hidden from it
  uint8_t strong;                   // volatile, relaxed, release, acquire or atomic: no race with another such
  Warp *warp; const Op *op;
} Agent;

// ---------------------------------------------------------------- barriers (barrier.c)
// timeline: the latest arrival of this phase; when the last one was complete
typedef struct { uint64_t cur, done; } Stamp;

typedef struct {                    // an mbarrier
  uint32_t offset;                  // in shared memory; 0: this entry is free
  uint32_t expected, pending, phase;     // phase counts completed phases
  int32_t tx;
  uint32_t inflight;                // asynchronous copies issued for the current phase
  // the last phase that copies were issued for; the last one that a warp saw complete
  uint32_t last_copy, observed;
  uint32_t last_commit;             // the last phase that a commit of another CTA signalled
  ClockId cur, done;                // joined from arrivals so far; the same at the last completion
  ClockId used;                     // each warp's latest use
  Stamp stamp;
  uint16_t comp;                    // component: its epoch is the number of completed phases
  uint16_t init_comp; uint32_t init_epoch, init_line;
  uint32_t first_phase;             // of this initialisation
  uint8_t valid;
} Mbarrier;

typedef struct {
  uint32_t expected, arrived;
  uint32_t any, some_false, count;  // the reduction so far: some true, some false, number of true lanes
  uint32_t result_any, result_all, result_count;
  ClockId cur, done;
  Stamp stamp;
  uint8_t counted;                  // came with an explicit thread count
  uint8_t reduces;                  // whether barrier.red comes to it
  uint32_t warps;                   // that have arrived
} NamedBarrier;

// ---------------------------------------------------------------- a warp, a CTA, a cluster
typedef enum { WAIT_NONE, WAIT_MBAR, WAIT_NAMED, WAIT_CLUSTER, WAIT_TMEM, WAIT_WGMMA,
              WAIT_REGISTERS } WaitKind;

typedef struct {                    // what a split waits for
  WaitKind kind; uint8_t woken;
  uint32_t line, id;                // WAIT_NAMED: the barrier; WAIT_WGMMA: the warpgroup
  Mbarrier *mbar; Cta *mbar_cta; uint32_t parity;    // WAIT_MBAR
} Waiting;

// a completion mechanism that counts groups (cp.async, wgmma, tcgen05.ld/st)
typedef struct {
  uint32_t open;                    // sequence number of the group that operations join now; starts at 1
  uint32_t used;                    // operations in it
  uint32_t done;                    // every group up to here is known to be complete
  uint32_t lanes;                   // lanes that have issued
} Groups;

#define BULK_RECENT 16               // more groups than these cannot be left pending by a wait
// Bulk groups, which belong to threads. An operation's epoch is the number of commits by the warp so far, plus
// one; 0 stands for no operation.
typedef struct {
  uint32_t open;                    // the epoch now
  uint32_t lanes;                   // lanes that have issued
  uint32_t current[LANES];          // first epoch of a lane's operations that are in no group yet
  uint32_t committed[LANES];        // groups of a lane so far
  uint32_t first[LANES][BULK_RECENT];    // first epoch of a lane's latest groups, by number modulo BULK_RECENT
  uint32_t unread[LANES], unwritten[LANES];   // first epoch that the lane has not waited for
} BulkGroups;

typedef struct {                    // Warp.engine
  Cluster *cluster;
  ClockId clock;
  uint32_t index;                   // in the cluster
  uint8_t ready, exited, cluster_arrived;
  uint32_t cluster_generation;
  Waiting wait[LANES];              // by split
  // by split: engine operations so far, and a wait that failed, to put the split to sleep when it comes
  // straight back to it
  uint64_t operations, serial[LANES];
  struct { const Op *op; uint32_t mask; uint64_t serial; } failed[LANES];
  Async *tmem_ld;                   // queued tcgen05.ld, newest first
  Async *wgmma_head, *wgmma_tail; uint32_t wgmma_queued; uint8_t wgmma_fenced;
  uint32_t npending; uint64_t *pending;   // registers in flight, one bit a SLOT
  BulkGroups bulk;
  Groups cp, wgmma, ld, st;
  uint32_t registers, setmaxnregs;  // a thread, as setmaxnreg counts them; how often it has run
  ClockId tensor_clock;             // strict checks: what a tcgen05.fence::after_thread_sync has ordered
  uint32_t acquires;                // of what other clusters released
  struct Snapshot *fenced_snapshot[2];      // by a fence of gpu or sys scope, of a narrower one
  // released by a fence; seen by relaxed reads, to be acquired by a fence
  struct Knowledge *fenced_known, *seen;
  uint32_t ok_instance, ok_epoch, ok_comp;   // a remote write that is known to be ordered
  uint32_t arrivals;                // queued arrivals at barriers of other CTAs
  ClockId fenced;                   // what a fence has made fit for a relaxed arrival to release
  ClockId observed;                 // what relaxed waits and reads have seen, for a fence to acquire
  uint32_t inits, fenced_inits;     // mbarrier.init so far; those before fence.mbarrier_init
  // strict checks: lanes that wrote shared and global memory since the lanes last met, the warp's epoch then,
  // and the bulk groups whose end only the lanes that waited know
  uint32_t writers, global_writers, met_epoch, bulk_read_held;
  uint32_t synced_epoch;            // met_epoch, or the epoch when some of the lanes last met
  // strict checks: lanes that have acquired what other clusters released since the lanes last met, and
  // `acquires` then; whether other lanes are reading now
  uint32_t acquirers, acquires_met; uint8_t reads_apart;
} WarpState;

struct Cta {
  uint32_t id[3], rank, live_warps, exited;
  Cluster *cluster; Launch *launch;
  Warp *warps; WarpState *states;
  uint8_t *smem; Shadow *smem_shadow;
  ClockId *flags;                   // by word: 1 + the clock of what strong writes released; or NULL
  struct LaneAccess *lane_accesses;          // strict checks (lanes.c): of the words of shared memory
  uint32_t *tmem; Shadow *tmem_shadow;       // tmem[column * 128 + lane]; shadow [column * 4 + quarter]
  uint64_t tmem_allocated[TMEM_COLUMNS / 64]; uint32_t tmem_in_use, relinquished;
  uint16_t tmem_alloc_size[TMEM_COLUMNS];    // columns of the allocation that starts here
  uint16_t *mbar_index; Mbarrier *mbars; uint32_t nmbars, mbar_cap;  // mbar_index[offset / 8] = index + 1
  NamedBarrier named[NAMED_BARRIERS];
  ClockId pipe; uint32_t pipe_epoch;         // the tensor pipe: clock of what was issued, current epoch
  ClockId remote;                   // strict checks: other CTAs' warps' latest arrivals at its mbarriers
  uint16_t gen;
  Async *pipe_head, *pipe_tail;              // queued tensor operations, in order
  uint32_t free_registers;                   // of the CTA's pool, given up by setmaxnreg.dec
  // tmem_group: 1 + whether allocations are for a pair; 0: none yet
  uint32_t grid_waited, tmem_group, tmem_last_columns;
  // allocations so far; 1 + the warp whose last one waits for the peer CTA's, or 0
  uint32_t tmem_allocs, tmem_waiting;
  uint32_t last_d, last_d_epoch, last_d_comp, last_d_columns, last_d_warp;   // the accumulator checked last
};

struct Cluster {
  Launch *launch; Cta *ctas; uint32_t id[3], active;
  uint32_t nwarps, live_warps;
  Warp **ready; uint32_t ready_head, ready_count;    // ring of the warps that can run
  Async *queue_head, *queue_tail;            // unordered operations, oldest first
  uint32_t queued;                           // all that is pending, pipes too
  uint32_t arrived, generation; ClockId cluster_cur, cluster_done; Stamp cluster_stamp;
  // clocks
  uint32_t *clocks, nclocks, clock_cap, stride, ncomps, comp_cap;
  ClockId *free_clocks; uint32_t nfree;
  Extra *extra; uint32_t nextra, nextra_used; uint16_t extra_free;
  uint64_t seq;
  uint32_t instance;                         // number of this cluster in the launch, from 1
  struct RemoteList *remote;
};

// ---------------------------------------------------------------- queued operations
typedef enum {
  A_TMA_LOAD, A_TMA_STORE, A_BULK_LOAD, A_BULK_STORE, A_BULK_DSMEM, A_ARRIVE, A_CP_ASYNC, A_MMA, A_COMMIT,
      A_TMEM_CP, A_TMEM_LD,
  A_WGMMA, A_CLC, A_ST_ASYNC
} AsyncKind;

typedef struct {                    // a decoded tensor map
  uint64_t address, stride[5];      // bytes; stride[0] = element size
  uint32_t rank, dim[5], box[5], step[5], size, swizzle, box_bytes, dtype;
} TensorMap;
typedef struct { uint64_t key; uint8_t raw[128]; TensorMap map; } MapCache;   // key: its address, 0: none

typedef struct { int32_t at[5]; } Coord;

struct Async {
  AsyncKind kind; Async *prev, *next; uint64_t seq;
  Warp *warp; const Op *op; Cta *cta; uint32_t lane; int grid_waited;
  ClockId clock;                    // snapshot that an arrival carries
  union {
    struct {                        // copies
      TensorMap map; Coord coord; uint32_t smem, mbar, multicast, pair, bytes, reduce, group, step;
      uint64_t global; uint8_t *buffer; Cta *other; uint32_t other_smem;
    } copy;
    struct { Cta *cta; uint32_t offset, count; int32_t tx; uint32_t multicast, drop; } arrive;
    struct { uint64_t a, b; uint32_t d, idesc, a_tmem, accumulate, pair, scale, disable[8]; } mma;
    struct { uint32_t address, done; } tmem;
    struct { uint64_t a, b; uint32_t accumulate, group; } wgmma;
    struct { Cta *cta; uint32_t smem, mbar, bytes; uint8_t data[16]; } store;
  };
};

struct Launch {
  const LaunchDesc *desc; LaunchResult *result; const Program *program;
  uint32_t nwarps, cluster_size, nclusters, next_cluster, ncluster_done;
  uint32_t smem_end;                // first offset past the CTA's shared memory
  Cluster *slots; uint32_t nslots;
  Async *free_async; struct AsyncBlock *blocks;
  uint64_t rng;
  struct Footprint *footprint; const struct Footprint *previous;
  uint32_t last_region;
  struct GlobalSync *sync;
  uint64_t progress, turns;
  uint32_t hazards;
  MapCache map_cache[64];
};

static inline WarpState *state(const Warp *w) { return (WarpState *)w->engine; }
static inline Cluster *cluster_of(const Warp *w) { return w->cta->cluster; }
static inline uint32_t first_lane(uint32_t mask) { return (uint32_t)__builtin_ctz(mask); }
#define EACH_LANE(l, mask) \
  for (uint32_t _m = (mask), l; _m && (l = (uint32_t)__builtin_ctz(_m), 1); _m &= _m - 1)

// sched.c
uint64_t next_random(Launch *launch);
Async *async_new(Launch *launch, AsyncKind kind, Warp *w, const Op *op);
void async_free(Launch *launch, Async *a);
Status async_issue(Async *a);                       // queues it, or runs it at once under the eager policy
void async_unlink(Async *a);
// completes it (frees it, or leaves it queued for its next step)
Status async_run(Async *a);
// puts the current split to sleep; returns ST_BLOCK
Status block(Warp *w, const Op *op, const Waiting *what);
void wake(Cluster *c, const Cta *cta, WaitKind kind, const void *what, uint32_t id);   // cta NULL: any
void made_progress(Launch *launch);

// memory.c
// 0: a fault, since the lanes do not agree on an operand of `bits` that is the warp's
int uniform(Warp *w, const Op *op, int32_t ref, uint32_t mask, uint32_t bits, const char *what);
int global_check(Warp *w, const Op *op, uint64_t address, uint64_t bytes, int write);    // 0 when it faulted
int grid_waited(Warp *w);            // griddepcontrol.wait is ordered before here, or nothing needs it
// as of when it was issued
int global_check_async(const Async *a, uint64_t address, uint64_t bytes, int write);
// NULL: fault
Cta *shared_target(Warp *w, const Op *op, uint32_t address, uint32_t bytes, uint32_t align, int any_rank);
Status exec_ld(Warp *, const Op *, uint32_t), exec_st(Warp *, const Op *, uint32_t), exec_atom(Warp *,
    const Op *, uint32_t);
Status exec_ldmatrix(Warp *, const Op *, uint32_t), exec_stmatrix(Warp *, const Op *, uint32_t);
Status exec_mapa(Warp *, const Op *, uint32_t), exec_prefetch(Warp *, const Op *, uint32_t);
Status exec_cp_async(Warp *, const Op *, uint32_t), exec_cp_commit(Warp *, const Op *, uint32_t);
Status exec_cp_wait(Warp *, const Op *, uint32_t), exec_cp_arrive(Warp *, const Op *, uint32_t);
Status run_cp_async(Async *a);

// barrier.c
Mbarrier *mbar_find(Warp *w, const Op *op, Cta *cta, uint32_t offset);     // NULL: fault
Status mbar_arrive(Warp *w, const Op *op, Cta *cta, uint32_t offset, uint32_t count, int32_t tx,
                   ClockId clock, int drop);
int mbar_init_fenced(Warp *w, const Op *op, const Cta *cta, const Mbarrier *b);
// stamps agent with (barrier, phase)
Status mbar_copy_issued(Warp *w, const Op *op, Cta *cta, uint32_t offset, Agent *agent);
Status mbar_copy_done(Warp *w, const Op *op, Cta *cta, uint32_t offset, uint32_t bytes);
Status run_arrive(Async *a);
Status exec_mbar_init(Warp *, const Op *, uint32_t), exec_mbar_inval(Warp *, const Op *, uint32_t);
Status exec_mbar_arrive(Warp *, const Op *, uint32_t), exec_mbar_tx(Warp *, const Op *, uint32_t);
Status exec_mbar_wait(Warp *, const Op *, uint32_t), exec_bar(Warp *, const Op *, uint32_t);
Status exec_bar_cluster(Warp *, const Op *, uint32_t), exec_fence(Warp *, const Op *, uint32_t);
Status exec_grid_wait(Warp *, const Op *, uint32_t), exec_nothing(Warp *, const Op *, uint32_t);
Status exec_setmaxnreg(Warp *, const Op *, uint32_t);
void barriers_warp_exit(Warp *w);

// tma.c
Status exec_tma_load(Warp *, const Op *, uint32_t), exec_tma_store(Warp *, const Op *, uint32_t);
Status exec_bulk_copy(Warp *, const Op *, uint32_t), exec_bulk_commit(Warp *, const Op *, uint32_t);
Status exec_bulk_wait(Warp *, const Op *, uint32_t);
Status run_copy(Async *a);
int bulk_unread(const BulkGroups *g);         // whether a copy may still read shared memory

// tensor.c
Status exec_tc_alloc(Warp *, const Op *, uint32_t), exec_tc_dealloc(Warp *, const Op *, uint32_t);
Status exec_tc_relinquish(Warp *, const Op *, uint32_t), exec_tc_mma(Warp *, const Op *, uint32_t);
Status exec_tc_commit(Warp *, const Op *, uint32_t), exec_tc_cp(Warp *, const Op *, uint32_t);
Status exec_tc_ld(Warp *, const Op *, uint32_t), exec_tc_st(Warp *, const Op *, uint32_t);
Status exec_tc_wait(Warp *, const Op *, uint32_t), exec_tc_fence(Warp *, const Op *, uint32_t);
Status tmem_loads_arrive(Warp *w);
Status run_tensor(Async *a);

// clc.c
Status exec_clc_try_cancel(Warp *, const Op *, uint32_t), exec_clc_query(Warp *, const Op *, uint32_t);
Status run_clc(Async *a);

// st_async.c
Status exec_st_async(Warp *, const Op *, uint32_t);
Status run_st_async(Async *a);

// wgmma.c
Status wgmma_arrive(Warp *w);
Status exec_wgmma(Warp *, const Op *, uint32_t), exec_wgmma_fence(Warp *, const Op *, uint32_t);
Status exec_wgmma_commit(Warp *, const Op *, uint32_t), exec_wgmma_wait(Warp *, const Op *, uint32_t);
#endif
