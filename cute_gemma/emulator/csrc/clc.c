// clusterlaunchcontrol: a running cluster takes over the work of one that has not started.
#include "hazard.h"
#include <string.h>

// The response, opaque to programs: coordinates of the first CTA of the cluster that was cancelled, and 1; or
// zeros.
typedef struct { uint32_t ctaid[3], cancelled; } Response;

// clusterlaunchcontrol.try_cancel. sub 1: to every CTA of the cluster. Refs: address, mbarrier.
// imm: their offsets (low, high).
Status exec_clc_try_cancel(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  EACH_LANE(l, mask) {
    const uint32_t to = REG32(w, refs[0])[l] + (uint32_t)op->imm;
    const uint32_t mbar = REG32(w, refs[1])[l] + (uint32_t)((uint64_t)op->imm >> 32);
    if (!shared_target(w, op, to, 16, 16, 0) || !shared_target(w, op, mbar, 8, 8, 0)) return ST_FAULT;
    Async *a = async_new(w->launch, A_CLC, w, op);
    a->copy.smem = to & SMEM_OFFSET, a->copy.mbar = mbar & SMEM_OFFSET;
    a->copy.multicast = op->sub & 1 ? (1u << w->launch->cluster_size) - 1 : 1u << w->cta->rank;
    for (uint32_t r = 0; r < w->launch->cluster_size; r++) {
      if (!(a->copy.multicast >> r & 1)) continue;
      Cta *cta = &cluster_of(w)->ctas[r];
      Agent x = agent_of(w, op);
      x.async = 1;
      if (mbar_copy_issued(w, op, cta, a->copy.mbar, &x) == ST_FAULT) return ST_FAULT;
      if (w->launch->hazards && !smem_touch(cta, a->copy.smem, 16, 1, &x)) return ST_FAULT;
    }
    if (async_issue(a) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

Status run_clc(Async *a) {
  Launch *launch = a->warp->launch;
  const LaunchDesc *d = launch->desc;
  Response response = {{0, 0, 0}, 0};
  async_unlink(a);
  if (launch->next_cluster < launch->nclusters) {
    const uint32_t id = launch->next_cluster++, nx = d->grid[0] / d->cluster[0], ny = d->grid[1] /
        d->cluster[1];
    response = (Response){{id % nx * d->cluster[0], id / nx % ny * d->cluster[1], id / (nx * ny) *
                           d->cluster[2]}, 1};
    launch->ncluster_done++;      // it never runs
  }
  for (uint32_t r = 0; r < launch->cluster_size; r++) {
    if (!(a->copy.multicast >> r & 1)) continue;
    Cta *cta = &a->cta->cluster->ctas[r];
    memcpy(cta->smem + a->copy.smem, &response, sizeof response);
    if (mbar_copy_done(a->warp, a->op, cta, a->copy.mbar, sizeof response) == ST_FAULT) return ST_FAULT;
  }
  async_free(launch, a);
  return ST_NEXT;
}

// clusterlaunchcontrol.query_cancel. sub 0: is_canceled (refs: response, predicate); 1-3: x, y, z; 4: all
// four words (refs: response, registers).
Status exec_clc_query(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  EACH_LANE(l, mask) {
    uint32_t words[4];
    memcpy(words, (const uint8_t *)reg(w, refs[0]) + 16 * l, sizeof words);
    if (!op->sub) {
      w->pred[refs[1]] = (w->pred[refs[1]] & ~(1u << l)) | (uint32_t)(words[3] != 0) << l;
      continue;
    }
    for (uint32_t i = 0; i < (op->sub == 4 ? 4u : 1u); i++)
      REG32(w, refs[1 + i])[l] = words[op->sub == 4 ? i : op->sub - 1];
  }
  return ST_NEXT;
}
