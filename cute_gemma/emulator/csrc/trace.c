#include "trace.h"
#include <stdlib.h>
#include <string.h>

// Nominal rates, in units a warp-instruction takes: what gives the picture its proportions, not a prediction
// of speed.
#define BYTES_PER_UNIT 64           // of a copy
#define FLOPS_PER_UNIT 8192         // of a tensor core: 128 x 32 multiply-adds
#define OPEN 4096                   // queued operations that can be followed at once

_Thread_local Trace *tracing;

struct Trace {
  TraceEvent *events;
  uint64_t count, capacity, limit, now;
  struct { const Async *op; uint64_t when; } open[OPEN];
  uint64_t pipe_free[1024];         // by CTA, modulo: when its tensor pipe is done
};

static uint32_t cta_index(const Cta *cta, const LaunchDesc *d) {
  return cta->id[0] + d->grid[0] * (cta->id[1] + d->grid[1] * cta->id[2]);
}

static void record(const Cta *cta, const Launch *launch, TraceKind kind, uint32_t lane, uint32_t line,
                   uint64_t start, uint64_t end) {
  Trace *t = tracing;
  if (t->count == t->limit) return;
  if (t->count == t->capacity) {
    t->capacity = t->capacity ? 2 * t->capacity : 1024;
    t->events = realloc(t->events, t->capacity * sizeof *t->events);
  }
  t->events[t->count++] =
      (TraceEvent){start, end, cta_index(cta, launch->desc), (uint16_t)kind, (uint16_t)lane, line, 0};
}

void trace_begin(const LaunchDesc *desc) {
  tracing = NULL;
  if (!desc->trace_limit) return;
  tracing = calloc(1, sizeof *tracing);
  tracing->limit = desc->trace_limit;
}

void trace_end(LaunchResult *result) {
  result->trace = NULL;
  result->trace_count = 0;
  if (!tracing) return;
  result->trace = tracing->events;
  result->trace_count = tracing->count;
  free(tracing);
  tracing = NULL;
}

void emu_free_trace(void *trace) { free(trace); }

static uint64_t time_of(const Warp *w) { return interp_steps(w) + w->skew; }

void trace_now(Warp *w) { tracing->now = time_of(w); }

// A CTA starts when one leaves whose place it takes: at the time of the last event.
void trace_start(Warp *w) {
  w->skew = tracing->now - interp_steps(w);
  w->run_start = tracing->now;
}

static void end_run(Warp *w, uint32_t line) {
  const uint64_t now = time_of(w);
  if (now > w->run_start) record(w->cta, w->launch, TRACE_RUN, w->id, line, w->run_start, now);
  w->run_start = now;
}

void trace_wait(Warp *w, const Op *op) { end_run(w, op->line); }

void trace_arrive(Stamp *s) { if (tracing->now > s->cur) s->cur = tracing->now; }

void trace_complete(Stamp *s) {
  s->done = s->cur;
  s->cur = 0;
}

void trace_pass(Warp *w, const Op *op, const Stamp *s) {
  const uint64_t now = time_of(w);
  if (s->done <= now) return;
  end_run(w, op->line);
  record(w->cta, w->launch, TRACE_WAIT, w->id, op->line, now, s->done);
  w->skew += s->done - now;
  w->run_start = s->done;
}

void trace_exit(Warp *w) {
  tracing->now = time_of(w);
  end_run(w, 0);
}

static uint32_t slot_of(const Async *a) { return (uint32_t)((uintptr_t)a >> 6) * 0x9e3779b1u >> 20; }

void trace_issue(const Async *a) {
  Trace *t = tracing;
  for (uint32_t i = slot_of(a), n = 0; n < 16; n++, i = (i + 1) % OPEN)
    if (!t->open[i].op) {
      t->open[i].op = a;
      t->open[i].when = time_of(a->warp);
      return;
    }
}

void trace_run(const Async *a) {
  Trace *t = tracing;
  const LaunchDesc *d = a->warp->launch->desc;
  for (uint32_t i = slot_of(a), n = 0; n < 16; n++, i = (i + 1) % OPEN) {
    if (t->open[i].op != a) continue;
    uint64_t start = t->open[i].when, cost = 1;
    t->open[i].op = NULL;
    TraceKind kind = TRACE_COPY;
    if (a->kind == A_MMA || a->kind == A_COMMIT || a->kind == A_TMEM_CP) {
      kind = TRACE_TENSOR;
      uint64_t *pipe_free = t->pipe_free + cta_index(a->cta, d) % 1024;
      if (*pipe_free > start) start = *pipe_free;
      if (a->kind ==
          A_MMA) { // PTX ISA, instruction descriptor: N >> 3 in bits 17-22, M >> 4 in bits 24-28; K is 16
        const uint64_t n8 = a->mma.idesc >> 17 & 63, m16 = a->mma.idesc >> 24 & 31;
        cost = (2 * 16 * 8 * 16 * n8 * m16 + FLOPS_PER_UNIT - 1) / FLOPS_PER_UNIT;
      }
      *pipe_free = start + cost;
    } else if (a->kind == A_ARRIVE) {
      kind = TRACE_ARRIVE;
    } else {
      cost = (a->copy.bytes + BYTES_PER_UNIT - 1) / BYTES_PER_UNIT;
    }
    record(a->cta, a->warp->launch, kind, a->warp->id, a->op->line, start, start + cost);
    t->now = start + cost;
    return;
  }
}
