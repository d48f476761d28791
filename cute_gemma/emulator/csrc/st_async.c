// st.async: a store to a CTA of the cluster that completes on an mbarrier there.
#include "hazard.h"
#include <string.h>

// sub: log2 of an element's bytes [1:0], elements [4:2]. Refs: address, mbarrier, values. imm: offsets of the
// two (low, high).
Status exec_st_async(Warp *w, const Op *op, uint32_t mask) {
  const int32_t *refs = w->launch->program->refs + op->args;
  const uint32_t size = 1u << (op->sub & 3), count = op->sub >> 2 & 7, bytes = size * count;
  EACH_LANE(l, mask) {
    const uint32_t to = REG32(w, refs[0])[l] + (uint32_t)op->imm;
    const uint32_t mbar = REG32(w, refs[1])[l] + (uint32_t)((uint64_t)op->imm >> 32);
    Cta *cta = shared_target(w, op, to, bytes, bytes, 1);
    if (!cta || !shared_target(w, op, mbar, 8, 8, 1)) return ST_FAULT;
    if (to >> SMEM_RANK_SHIFT != mbar >> SMEM_RANK_SHIFT)
      return fault(w, op, FAULT_BARRIER, "st.async to CTA rank %u with an mbarrier of rank %u: both must be "
                   "in one CTA", to >> SMEM_RANK_SHIFT, mbar >> SMEM_RANK_SHIFT);
    Async *a = async_new(w->launch, A_ST_ASYNC, w, op);
    a->store.cta = cta, a->store.bytes = bytes;
    a->store.smem = to & SMEM_OFFSET, a->store.mbar = mbar & SMEM_OFFSET;
    for (uint32_t i = 0; i < count; i++) {
      const void *value = size == 4 ? (const void *)&REG32(w, refs[2 + i])[l] : &REG64(w, refs[2 + i])[l];
      memcpy(a->store.data + size * i, value, size);
    }
    Agent x = agent_of(w, op);
    if (mbar_copy_issued(w, op, cta, a->store.mbar, &x) == ST_FAULT) return ST_FAULT;
    if (w->launch->hazards && !smem_touch(cta, a->store.smem, bytes, 1, &x)) return ST_FAULT;
    if (async_issue(a) == ST_FAULT) return ST_FAULT;
  }
  return ST_NEXT;
}

Status run_st_async(Async *a) {
  async_unlink(a);
  memcpy(a->store.cta->smem + a->store.smem, a->store.data, a->store.bytes);
  Status status = mbar_copy_done(a->warp, a->op, a->store.cta, a->store.mbar, a->store.bytes);
  async_free(a->warp->launch, a);
  return status;
}
