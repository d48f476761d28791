// A record of who ran, waited and copied when, for a timeline. Time is logical: a warp-instruction takes one
// unit, a warp goes on from a barrier no earlier than the last arrival there, and asynchronous operations
// take nominal times (trace.c).
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
void trace_arrive(Stamp *s);                // something comes to a barrier now
void trace_complete(Stamp *s);              // and was the last
void trace_pass(Warp *w, const Op *op,
                const Stamp *s); // the warp goes on, no earlier than the phase was complete
void trace_exit(Warp *w);
void trace_issue(const Async *a);
void trace_run(const Async *a);             // the time is that of its completion
#endif
