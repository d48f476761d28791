// Footprints: unique sectors read and written, kept for the next launch's check of programmatic dependent
// launch.
#include "footprint.h"
#include <stdlib.h>

static int by_base(const void *a, const void *b) {
  const FootprintRegion *x = a, *y = b;
  return x->base < y->base ? -1 : x->base > y->base;
}

Footprint *footprint_new(const LaunchDesc *desc) {
  Footprint *f = calloc(1, sizeof *f);
  f->region = calloc(desc->nregions + 1, sizeof *f->region);
  for (uint32_t i = 0; i < desc->nregions; i++) {
    const Region *g = &desc->regions[i];
    if (!g->size) continue;
    FootprintRegion *r = &f->region[f->n++];
    *r = (FootprintRegion){.base = g->base, .size = g->size, .words = (g->size + 2 * SECTOR) / SECTOR / 64 +
                           1, .writable = g->writable};
    r->bits[0] = calloc(r->words, sizeof(uint64_t));
    r->bits[1] = calloc(r->words, sizeof(uint64_t));
  }
  qsort(f->region, f->n, sizeof *f->region, by_base);
  return f;
}

void footprint_count(const Footprint *f, uint64_t *read, uint64_t *written) {
  uint64_t n[2] = {0, 0};
  for (uint32_t i = 0; i < f->n; i++)
    for (int k = 0; k < 2; k++)
      for (uint64_t j = 0; j < f->region[i].words; j++)
        n[k] += (uint64_t)__builtin_popcountll(f->region[i].bits[k][j]);
  *read = n[0];
  *written = n[1];
}

int footprint_hit(const Footprint *f, uint64_t address, uint64_t bytes, int written) {
  for (uint32_t i = 0; i < f->n; i++) {
    const FootprintRegion *r = &f->region[i];
    uint64_t low = address > r->base ? address : r->base;
    uint64_t high = address + bytes < r->base + r->size ? address + bytes : r->base + r->size;
    if (low >= high) continue;
    uint64_t shift = r->base % SECTOR, last = (high - 1 - r->base + shift) / SECTOR;
    for (uint64_t s = (low - r->base + shift) / SECTOR; s <= last; s++)
      if (r->bits[written][s / 64] >> (s % 64) & 1) return 1;
  }
  return 0;
}

void footprint_forget_order(Footprint *f) {
  for (uint32_t i = 0; i < f->n; i++)
    for (int kind = 0; kind < 4; kind++) {
      free(f->region[i].last[kind]);
      f->region[i].last[kind] = NULL;
    }
}

void emu_free_footprint(void *footprint) {
  Footprint *f = footprint;
  if (!f) return;
  for (uint32_t i = 0; i < f->n; i++) free(f->region[i].bits[0]), free(f->region[i].bits[1]);
  free(f->region);
  free(f);
}
