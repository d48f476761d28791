// Control flow of a warp: which lanes run next, branches, divergence and convergence.
#include <stdio.h>
#include "alu.h"

#define OP(name) op_##name,
#define CONTROL(name) 0,
const OpFn op_table[OP_COUNT] = {
#include "alu.def"
  0,
#undef OP
#undef CONTROL
#define OP(name) engine_exec,
#include "engine.def"
};
#undef OP

void interp_start(Warp *w, const Program *p, const WarpStart *s) {
  u32 threads = s->block[0] * s->block[1] * s->block[2], first = w->id * LANES;
  u32 count = threads - first < LANES ? threads - first : LANES;
  w->program = p;
  w->refs = p->refs;
  w->bank[1] = (uint8_t *)p->consts;
  w->live = count == LANES ? FULL : (1u << count) - 1;
  w->split[0] = (Split){0, w->live, 0};
  w->nsplit = 1;
  w->current = 0;
  w->rotate = 0;
  w->steps = 0;
  w->left = 0;
  memset(w->pred, 0, 4 * p->npreds);
  w->pred[1] = FULL;
  for (int axis = 0; axis < 3; axis++) {
    if (p->tid[axis] >= 0) {
      u32 *row = REG32(w, p->tid[axis]);
      for (u32 l = 0; l < LANES; l++) {
        u32 t = first + l;
        row[l] = axis == 0   ? t % s->block[0]
                 : axis == 1 ? t / s->block[0] % s->block[1]
                             : t / (s->block[0] * s->block[1]);
      }
    }
    const int32_t refs[3] = {p->ctaid[axis], p->clusterid[axis], p->cluster_ctaid[axis]};
    const u32 values[3] = {s->ctaid[axis], s->clusterid[axis], s->cluster_ctaid[axis]};
    for (int k = 0; k < 3; k++)
      if (refs[k] >= 0) for (int l = 0; l < LANES; l++) REG32(w, refs[k])[l] = values[k];
  }
  const int32_t refs[5] = {p->laneid, p->warpid, p->cluster_ctarank, p->smid, p->smem_window};
  const u32 values[5] = {0, w->id, s->cluster_ctarank, s->smid, s->cluster_ctarank << SMEM_RANK_SHIFT};
  for (int k = 0; k < 5; k++)
    if (refs[k] >= 0) for (u32 l = 0; l < LANES; l++) REG32(w, refs[k])[l] = k == 0 ? l : values[k];
}

void interp_wake(Warp *w, int split) { w->split[split].wait = 0; }

static void release(Warp *w, int index) {
  w->split[index].mask = 0;
  w->split[index].wait = 0;
  while (w->nsplit > 0 && !w->split[w->nsplit - 1].mask) w->nsplit--;
}

static void fork_split(Warp *w, u32 pc, u32 mask) {
  int index = 0;
  while (index < w->nsplit && w->split[index].mask) index++;
  if (index == w->nsplit) w->nsplit++;
  w->split[index] = (Split){pc, mask, 0};
}

static inline u32 first_lane(u32 mask) { return (u32)__builtin_ctz(mask); }

// The lanes that have to stand at this operation before it runs.
static u32 required_lanes(const Warp *w, const Op *op, u32 mask) {
  if (op->flags & OP_ALIGNED) return w->live;
  return REG32(w, w->refs[op->args])[first_lane(mask)] & w->live;
}

static int converged(const Warp *w, const Split *s) {
  return !(required_lanes(w, w->program->ops + s->pc, s->mask) & ~s->mask);
}

static Status report_divergence(Warp *w) {
  char where[512];
  size_t used = 0;
  const Split *lowest = 0;
  for (int i = 0; i < w->nsplit; i++) {
    const Split *s = w->split + i;
    if (!s->mask) continue;
    if (!lowest || s->pc < lowest->pc) { lowest = s; w->current = i; }
    if (used < sizeof where - 64)
      used += (size_t)snprintf(where + used, sizeof where - used, "%s lanes %08x at PTX line %u",
                               used ? "," : "", s->mask, w->program->ops[s->pc].line);
  }
  const Op *op = w->program->ops + lowest->pc;
  return fault(w, op, FAULT_DIVERGENCE, "%s instruction needs lanes %08x together, but they cannot meet:%s",
               op->flags & OP_ALIGNED ? "an .aligned" : "a .sync", required_lanes(w, op, lowest->mask),
               where);
}

// Joins splits that stand at the same pc. Those that wait for the engine keep their entry.
static void merge(Warp *w) {
  for (int i = 0; i < w->nsplit; i++) {
    Split *a = w->split + i;
    if (!a->mask || (a->wait && a->wait != WAIT_CONVERGE)) continue;
    for (int j = i + 1; j < w->nsplit; j++) {
      Split *b = w->split + j;
      if (!b->mask || b->pc != a->pc || (b->wait && b->wait != WAIT_CONVERGE)) continue;
      a->mask |= b->mask;
      a->wait = 0;
      b->mask = 0;
      b->wait = 0;
    }
  }
  while (w->nsplit > 0 && !w->split[w->nsplit - 1].mask) w->nsplit--;
}

// The split to run: the lowest pc, or, after one used up its budget or yielded, the next in turn. -1: all
// wait, and the engine will wake one; -2: all wait for each other.
static int pick(Warp *w, int turn) {
  int best = -1, waits_for_engine = 0;
  for (int i = 0; i < w->nsplit; i++) {
    Split *s = w->split + i;
    if (!s->mask) continue;
    if (s->wait == WAIT_CONVERGE && converged(w, s)) s->wait = 0;
    if (s->wait) { waits_for_engine |= s->wait != WAIT_CONVERGE; continue; }
    if (turn) {
      int distance = (i - w->current - 1 + LANES) % LANES,
          best_distance = (best - w->current - 1 + LANES) % LANES;
      if (best < 0 || distance < best_distance) best = i;
    } else if (best < 0 || s->pc < w->split[best].pc) {
      best = i;
    }
  }
  return best >= 0 ? best : w->nsplit && !waits_for_engine ? -2 : -1;
}

// The nearest pc ahead at which another split waits to be joined.
static u32 next_stop(const Warp *w, int current) {
  u32 stop = 0xffffffff, pc = w->split[current].pc;
  for (int i = 0; i < w->nsplit; i++) {
    const Split *s = w->split + i;
    if (i != current && s->mask && (!s->wait || s->wait == WAIT_CONVERGE) && s->pc > pc && s->pc < stop)
      stop = s->pc;
  }
  return stop;
}

// Checks before an operation with flags: 1 go on, 0 this split waits for others, -1 fault.
static int gate(Warp *w, const Op *op, Split *s, u32 mask) {
  if (op->flags & (OP_ALIGNED | OP_SYNC)) {
    if (op->flags & OP_SYNC) {
      u32 members = REG32(w, w->refs[op->args])[first_lane(mask)];
      if (mask & ~members) {
        fault(w, op, FAULT_DIVERGENCE,
              "lanes %08x run an instruction whose member mask %08x leaves some of them out", mask, members);
        return -1;
      }
    }
    if (required_lanes(w, op, mask) & ~s->mask) {
      s->wait = WAIT_CONVERGE;
      return 0;
    }
  }
  if (op->flags & OP_PENDING && engine_pending(w, op, mask) == ST_FAULT) return -1;
  return 1;
}

// Splits the lanes at a branch; `indexed` lanes go to targets of their own. Returns how many ways they went.
static int branch_indexed(Warp *w, const Op *op, Split *s, u32 mask) {
  const int32_t *r = w->refs + op->args;
  const u32 *index = REG32(w, r[0]);
  u32 rest = mask;
  s->mask &= ~mask;
  s->pc++;
  while (rest) {
    u32 value = index[first_lane(rest)], group = 0;
    for (int l = 0; l < LANES; l++) if (rest >> l & 1 && index[l] == value) group |= 1u << l;
    if (value >= (u32)op->nargs - 1) return -1;
    rest &= ~group;
    if (!s->mask) {
      s->mask = group;
      s->pc = (u32)r[1 + value];
    } else fork_split(w, (u32)r[1 + value], group);
  }
  return 1;
}

// What happened to the split that ran.
typedef enum { GO_ON, RESELECT, STOPPED } Step;

static Step control(Warp *w, const Op *op, Split *s, u32 mask, RunResult *result) {
  u32 all = s->mask;
  switch (op->code) {
    case OP_BRA:
      if (mask == all) { s->pc = (u32)op->target; return w->nsplit > 1 ? RESELECT : GO_ON; }
      s->mask = all & ~mask;
      s->pc++;
      fork_split(w, (u32)op->target, mask);
      return RESELECT;
    case OP_BRX:
      if (branch_indexed(w, op, s, mask) > 0) return RESELECT;
      fault(w, op, FAULT_ILLEGAL, "brx.idx index is past the end of its table");
      *result = RUN_FAULT;
      return STOPPED;
    case OP_EXIT:
      w->live &= ~mask;
      s->pc++;
      s->mask = all & ~mask;
      if (!s->mask) release(w, w->current);
      engine_exit(w, mask);
      return RESELECT;
    default:
      fault(w, op, FAULT_ILLEGAL, "trap");
      *result = RUN_FAULT;
      return STOPPED;
  }
}

// Runs split `current` until another has to be chosen.
static Step run_split(Warp *w, u32 *left, int sticky, RunResult *result) {
  Split *s = w->split + w->current;
  const Op *ops = w->program->ops;
  uint64_t *counts = w->counts;
  u32 stop = w->nsplit > 1 ? next_stop(w, w->current) : 0xffffffff;
  for (;;) {
    if (UNLIKELY(!*left)) { *result = RUN_BUDGET; return STOPPED; }
    const u32 pc = s->pc;
    if (UNLIKELY(pc == stop)) return RESELECT;
    const Op *op = ops + pc;
    u32 mask = s->mask;
    if (op->guard >= 0) {
      mask &= op->flags & OP_PRED_NEG ? ~w->pred[op->guard] : w->pred[op->guard];
      if (!mask) { counts[pc]++; s->pc++; --*left; continue; }
    }
    if (UNLIKELY(op->flags & ~OP_PRED_NEG)) {
      int go = gate(w, op, s, mask);
      if (go < 0) { *result = RUN_FAULT; return STOPPED; }
      if (go == 0) return RESELECT;
    }
    if (op->code >= OP_BRA && op->code <= OP_TRAP) {
      counts[pc]++;
      --*left;
      Step step = control(w, op, s, mask, result);
      if (step == GO_ON || (step == RESELECT && sticky && op->code == OP_BRA && s->mask == mask)) {
        if (w->nsplit > 1) stop = next_stop(w, w->current);
        continue;
      }
      return step;
    }
    Status status = op_table[op->code](w, op, mask);
    if (status == ST_NEXT) { counts[pc]++; s->pc++; --*left; continue; }
    if (status == ST_BLOCK) return RESELECT;
    if (status == ST_FAULT) { *result = RUN_FAULT; return STOPPED; }
    counts[pc]++;
    s->pc++;
    *result = RUN_YIELD;
    return STOPPED;
  }
}

static RunResult run(Warp *w, u32 *budget) {
  RunResult result = RUN_DONE;
  int turn = (int)w->rotate;
  w->rotate = 0;
  while (w->nsplit) {
    if (w->nsplit > 1) merge(w);
    int choice = pick(w, turn);
    if (choice == -1) return RUN_BLOCKED;
    if (choice == -2) { report_divergence(w); return RUN_FAULT; }
    w->current = choice;
    if (run_split(w, budget, turn, &result) == STOPPED) {
      w->rotate = (result == RUN_BUDGET || result == RUN_YIELD) && w->nsplit > 1;
      return result;
    }
    if (turn && w->split[choice].mask && w->split[choice].wait) turn = 0;
  }
  return RUN_DONE;
}

RunResult interp_run(Warp *w, uint32_t budget) {
  w->steps += budget;
  w->left = &budget;
  RunResult result = run(w, &budget);
  w->steps -= budget;
  w->left = 0;
  return result;
}
