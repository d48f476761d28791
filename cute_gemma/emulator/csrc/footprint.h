// Which 32-byte sectors of global memory a launch read and wrote: one bitmap of each kind a region.
#ifndef CUTE_GEMMA_FOOTPRINT_H
#define CUTE_GEMMA_FOOTPRINT_H
#include "engine.h"

#define SECTOR 32u
// bits[written]; last[written + 2 * strong]: this launch's latest accesses, by sector
typedef struct { uint64_t base, size, words, *bits[2]; uint32_t writable;
                struct SectorAccess *last[4]; } FootprintRegion;
// before: the latest launch that may still run when this one has ended, as nobody has waited for it
typedef struct Footprint { uint32_t n; FootprintRegion *region; const struct Footprint *before; } Footprint;

Footprint *footprint_new(const LaunchDesc *desc);        // regions sorted by address
// who came to which sector matters within the launch only
void footprint_forget_order(Footprint *f);
void footprint_count(const Footprint *f, uint64_t *read, uint64_t *written);
// 1 if [address, address + bytes) touches a sector that f has in bits[written]
int footprint_hit(const Footprint *f, uint64_t address, uint64_t bytes, int written);

static inline void footprint_mark(FootprintRegion *r, uint64_t address, uint64_t bytes, int written) {
  uint64_t first = (address - r->base + r->base % SECTOR) / SECTOR, last = (address + bytes - 1 - r->base +
      r->base % SECTOR) / SECTOR;
  for (uint64_t i = first; i <= last;) {
    uint64_t end = i | 63, n = (end < last ? end : last) - i + 1;
    r->bits[written][i / 64] |= (n == 64 ? ~0ull : (1ull << n) - 1) << (i % 64);
    i += n;
  }
}
#endif
