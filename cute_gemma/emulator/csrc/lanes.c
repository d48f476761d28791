// Strict checks: what lanes of one warp tell each other through shared memory. The emulator runs them together,
// so only this finds a missing bar.warp.sync (PTX ISA: it alone orders memory accesses within a warp; shfl.sync,
// vote.sync and elect.sync do not).
#include "hazard.h"
#include <stdlib.h>

struct LaneAccess {                 // of a word of shared memory, by the warp that came to it last
  uint32_t wepoch, repoch;          // its epochs of the last write and of the last read
  uint32_t writers, readers;        // lanes of all its accesses since the lanes last met
  uint16_t warp, gen;
};

// The word's owner forgets what came before its lanes last met.
static struct LaneAccess *entry(Warp *w, Cta *cta, uint32_t word) {
  struct LaneAccess *e = &cta->lane_accesses[word];
  const WarpState *s = state(w);
  if (e->gen != cta->gen || e->warp != s->index)
    *e = (struct LaneAccess){.warp = (uint16_t)s->index, .gen = cta->gen};
  if (e->wepoch <= s->synced_epoch) e->writers = 0;
  if (e->repoch <= s->synced_epoch) e->readers = 0;
  return e;
}

int lanes_touch(Warp *w, const Op *op, Cta *cta, uint32_t offset, uint32_t bytes, uint32_t who, int write) {
  if (!cta->lane_accesses)
    cta->lane_accesses = calloc(cta->launch->smem_end / 4 + 1, sizeof *cta->lane_accesses);
  const uint32_t now = clock_g(cluster_of(w), state(w)->clock)[warp_comp(w, C_WARP)];
  // Parts of words are left out: lanes may own neighbouring ones.
  for (uint32_t at = (offset + 3) & ~3u; at + 4 <= offset + bytes; at += 4) {
    struct LaneAccess *e = entry(w, cta, at / 4);
    const uint32_t others = write ? e->readers & ~who : e->writers & who ? 0 : e->writers;
    if (others) {
      fault(w, op, FAULT_RACE, "advice: shared memory at offset 0x%x of CTA rank %u: lane %u %s what lane %u "
            "of the warp %s, with no bar.warp.sync between", at, cta->rank, first_lane(who),
            write ? "writes" : "reads", first_lane(others), write ? "read" : "wrote");
      return 0;
    }
    if (write) e->wepoch = now, e->writers |= who;
    else e->repoch = now, e->readers |= who;
  }
  return 1;
}

uint32_t lanes_withhold(Warp *w, uint32_t lanes) {
  const WarpState *s = state(w);
  if (w->launch->hazards != HAZARDS_STRICT || !(s->writers & ~lanes)) return 0;
  uint32_t *own = &clock_g(cluster_of(w), s->clock)[warp_comp(w, C_WARP)];
  const uint32_t withheld = *own > s->met_epoch ? *own - s->met_epoch : 0;
  *own -= withheld;
  return withheld;
}

void lanes_give_back(Warp *w, uint32_t withheld) {
  if (withheld) clock_g(cluster_of(w), state(w)->clock)[warp_comp(w, C_WARP)] += withheld;
}
