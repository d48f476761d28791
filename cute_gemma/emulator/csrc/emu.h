// The contract between the interpreter (registers, arithmetic, control flow: interp.c, alu.c) and the engine
// (memories, barriers, asynchronous operations, scheduling, hazards: memory.c, barrier.c, tma.c, tensor.c,
// sched.c, hazard.c).
#ifndef CUTE_GEMMA_EMU_H
#define CUTE_GEMMA_EMU_H
#include <stddef.h>
#include <stdint.h>

#define LANES 32
#define FULL 0xffffffffu
#define SLOT 64                 // bytes: the unit in which register references count

// ---------------------------------------------------------------- program (made by lowering.py)
typedef enum {
#define OP(name) OP_##name,
#include "alu.def"              // interpreter's operations
  OP_ENGINE_FIRST,              // every code above this one is the engine's
#include "engine.def"           // engine's operations
#undef OP
  OP_COUNT
} OpCode;

enum {                          // Op.flags
  OP_PRED_NEG = 1,              // run in the lanes where the guard predicate is false
  // touches a register that some path leaves in flight: ask engine_pending first
  OP_PENDING = 2,
  OP_ALIGNED = 4,               // .aligned: waits until all live lanes of the warp are here
  OP_SYNC = 8,                  // .sync: args[0] is the member mask; waits until its live lanes are here
};

typedef struct {
  uint16_t code;                // OpCode
  uint8_t flags;
  uint8_t nargs;                // number of references in args, at most 255 (a tcgen05.ld.x128 has 129)
  int32_t guard;                // index of the guard predicate, -1 for none
  uint32_t args;                // first of its references in Program.refs
  uint32_t sub;                 // modifiers, packed as the operation's lowering says
  int32_t target;               // branch target (index of an Op), -1 for none
  uint32_t line;                // PTX line, for reports
  int64_t imm, imm2;
} Op;

typedef struct {
  const Op *ops; uint32_t nops;
  // register references: >= 0 warp register file, < 0 constant bank; predicates are plain indices
  const int32_t *refs;
  // constant bank: immediates broadcast to 32 lanes, launch-uniform values; SLOT-aligned
  const uint8_t *consts;
  uint32_t reg_bytes;           // register file of one warp
  uint32_t npreds;
  // where the launch puts a warp's own special values, as register references (-1: unused by this kernel)
  int32_t tid[3], ctaid[3], laneid, warpid, clusterid[3], cluster_ctaid[3], cluster_ctarank, smid;
  // cluster_ctarank << SMEM_RANK_SHIFT: what shared-memory addresses of this CTA start from
  int32_t smem_window;
} Program;

// ---------------------------------------------------------------- addresses
// A shared address is (rank in cluster << 24) | offset, in shared::cta and shared::cluster alike. A generic
// address of shared memory is SHARED_WINDOW | that. Global and parameter addresses are the process's own.
#define SMEM_RANK_SHIFT 24
#define SMEM_RESERVED 1024      // offset of the first byte a CTA may use: the system's part comes first
#define SHARED_WINDOW 0x7a00000000000000ull
#define SHARED_WINDOW_MASK 0xffffffff00000000ull      // address & mask == SHARED_WINDOW: in shared memory

// ---------------------------------------------------------------- a warp as the interpreter sees it
// Lanes that share a pc. wait: the engine's reason, 0 = runnable; WAIT_CONVERGE is the interpreter's own
// (lanes wait for the rest of the warp). An entry keeps its index while it lives; mask 0 marks a free entry,
// and nsplit bounds those in use.
#define WAIT_CONVERGE 0xffffffffu
typedef struct { uint32_t pc, mask, wait; } Split;

typedef struct Cta Cta;
typedef struct Launch Launch;
typedef struct Warp {
  uint8_t *bank[2];             // [0] register file, [1] constants
  uint32_t *pred;               // predicate registers as 32-lane masks
  Split split[LANES]; int nsplit;   // live lanes; empty when the warp has exited
  int current;                  // index of the split that runs: what an operation that blocks marks
  uint32_t rotate;              // the interpreter's: splits take turns when one uses up its budget
  const Program *program; const int32_t *refs;      // set by interp_start
  // interp_steps: executed by the end of this call, less what is left of it
  uint64_t steps; const uint32_t *left;
  uint64_t skew, run_start;                         // the timeline's
  uint32_t live;                // lanes that have not exited
  uint32_t id;                  // index in the CTA
  Cta *cta; Launch *launch;
  uint64_t *counts;             // executions of each Op by warps of this id, over the launch
  void *engine;                 // the engine's own state of this warp
} Warp;

// Registers hold one value a lane. b16 sits in the low half of a 32-bit lane with the upper half zero; b64
// takes 256 bytes.
static inline void *reg(const Warp *w, int32_t ref) {
  return w->bank[ref < 0] + (size_t)(ref & 0x7fffffff) * SLOT;
}
#define REG32(w, ref) ((uint32_t *)reg(w, ref))
#define REG64(w, ref) ((uint64_t *)reg(w, ref))
#define REGF(w, ref) ((float *)reg(w, ref))

// ---------------------------------------------------------------- interpreter -> engine
typedef enum {
  ST_NEXT,      // done: go to the next Op
  ST_BLOCK,     // cannot run yet: leave this split at the same pc; the engine marked it waiting
  ST_YIELD,     // done, and end this warp's turn
  ST_FAULT      // fault() was called: stop the launch
} Status;
// an operation above OP_ENGINE_FIRST, for the lanes in mask
Status engine_exec(Warp *w, const Op *op, uint32_t mask);
// ST_FAULT if a register of op is still in flight
Status engine_pending(Warp *w, const Op *op, uint32_t mask);
// nanoseconds, for %clock, %clock64 and %globaltimer
uint64_t engine_time(Warp *w);
// bar.warp.sync orders what these lanes did
void engine_warp_sync(Warp *w, uint32_t mask);
void engine_exit(Warp *w, uint32_t mask);                     // lanes in mask leave the kernel

// ---------------------------------------------------------------- engine -> interpreter
typedef enum { RUN_BUDGET, RUN_BLOCKED, RUN_YIELD, RUN_DONE, RUN_FAULT } RunResult;
// Runs the warp until every split waits (RUN_BLOCKED), the budget of instructions is used up, or it yields,
// exits or faults. Splits run lowest pc first and merge when their pcs meet; a waiting split lets the others
// go on.
RunResult interp_run(Warp *w, uint32_t budget);
void interp_wake(Warp *w, int split);                         // clears split[].wait
// Starts a warp whose bank[0] (reg_bytes, SLOT-aligned), pred (npreds words), id, cta, launch and counts are
// set: fills bank[1], program, pc, lanes, predicates and special registers.
typedef struct {
  uint32_t block[3], ctaid[3], clusterid[3], cluster_ctaid[3], cluster_ctarank, smid;
} WarpStart;
void interp_start(Warp *w, const Program *p, const WarpStart *s);
// executed so far
static inline uint64_t interp_steps(const Warp *w) { return w->steps - (w->left ? *w->left : 0); }

// ---------------------------------------------------------------- faults: the first one is kept
typedef enum {
  FAULT_UNSUPPORTED, FAULT_MEMORY, FAULT_MISALIGNED, FAULT_UNINITIALISED, FAULT_RACE, FAULT_PROXY_FENCE,
  FAULT_ASYNC_REGISTER, FAULT_TMEM, FAULT_BARRIER, FAULT_DESCRIPTOR, FAULT_DEADLOCK, FAULT_LEAK, FAULT_PDL,
  FAULT_DIVERGENCE, FAULT_ILLEGAL
} FaultKind;
Status fault(Warp *w, const Op *op, FaultKind kind, const char *fmt, ...);   // always returns ST_FAULT

// ---------------------------------------------------------------- the launch, as engine.py fills it
// LaunchDesc.hazards beyond on and off. Scoreboard: on, but touching a result of tcgen05.ld waits for it, as the
// hardware does
#define HAZARDS_STRICT 2
#define HAZARDS_SCOREBOARD 3
// global memory the launch may touch
typedef struct { uint64_t base, size; uint32_t writable, index; } Region;
typedef struct {
  const Program *program;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t static_smem, dynamic_smem;      // bytes
  // offset at which dynamic shared memory starts; memory ends dynamic_smem later
  uint32_t dynamic_base;
  const uint8_t *params; uint32_t param_bytes;
  const Region *regions; uint32_t nregions;
  uint32_t arch;                           // 100 or 90
  uint32_t resident;                       // most CTAs at once (the SM count of the modelled card)
  uint32_t policy;                         // 0 eager, 1 lazy, 2 random
  uint64_t seed;
  // 0: off, 1: on, 2: strict (advice becomes a fault), HAZARDS_SCOREBOARD
  uint32_t hazards;
  uint32_t programmatic;                   // launched with programmatic stream serialization (PDL)
  // 1: approximate instructions sit at the edge of their documented error
  uint32_t approx_edge;
  void (*progress)(uint64_t ctas_done, uint64_t ctas);
  const volatile uint32_t *stop;           // ends the launch when it becomes nonzero; or NULL
  uint64_t trace_limit;                    // events of a timeline to record at most; 0: no timeline
  // an opaque footprint of the launch before (for PDL checks), or NULL
  const void *previous;
} LaunchDesc;

typedef struct {
  uint32_t fault, line, warp, cta[3];      // fault: 0 none, else FaultKind + 1
  char message[4096];
  uint64_t warp_instructions;
  uint64_t *counts;                        // [warps per CTA][nops], allocated by the caller
  uint64_t tma_load_bytes, tma_store_bytes, mma_flops, tmem_load_bytes, tmem_store_bytes;
  uint64_t smem_wavefronts, smem_ideal_wavefronts;
  uint64_t sectors_read, sectors_written;  // unique 32-byte sectors of global memory
  void *trace; uint64_t trace_count;       // TraceEvents; emu_free_trace
  // this launch's reads and writes, for the next launch's PDL check; emu_free_footprint
  void *footprint;
  uint32_t waited;                         // griddepcontrol.wait was executed
} LaunchResult;
int emu_run(const LaunchDesc *desc, LaunchResult *result);    // 0, or 1 when result->fault is set
void emu_free_footprint(void *footprint);

typedef enum { TRACE_RUN, TRACE_WAIT, TRACE_COPY, TRACE_TENSOR, TRACE_ARRIVE } TraceKind;
typedef struct { uint64_t start, end; uint32_t cta; uint16_t kind, warp; uint32_t line, unused; } TraceEvent;
void emu_free_trace(void *trace);
#endif
