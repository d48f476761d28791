// A record of who ran, waited and copied when, for a timeline. Time is logical: a warp-instruction takes one unit, a warp
// that is woken goes on no earlier than what woke it, and asynchronous operations take nominal times (trace.c).
#ifndef CUTE_GEMMA_TRACE_H
#define CUTE_GEMMA_TRACE_H
#include "engine.h"

typedef struct Trace Trace;
extern _Thread_local Trace *tracing;        // NULL: nothing is recorded

void trace_begin(const LaunchDesc *desc);
void trace_end(LaunchResult *result);       // hands the events over
void trace_start(Warp *w);
void trace_now(Warp *w);                    // the time is that of this warp
void trace_wait(Warp *w, const Op *op);     // its current split goes to sleep
void trace_wake(Warp *w, int split, uint32_t line);
void trace_exit(Warp *w);
void trace_issue(const Async *a);
void trace_run(const Async *a);             // the time is that of its completion
#endif
