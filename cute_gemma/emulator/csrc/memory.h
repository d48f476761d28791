// What memory.c and atomic.c share.
#ifndef CUTE_GEMMA_MEMORY_H
#define CUTE_GEMMA_MEMORY_H
#include "engine.h"

// sub bits [1:0] of loads, stores and atomics
enum { SPACE_GLOBAL, SPACE_SHARED, SPACE_CLUSTER, SPACE_GENERIC };
typedef struct {                    // where each lane's access goes
  uint8_t *at[LANES];
  Cta *cta[LANES];                  // shared memory only
  uint32_t offset[LANES];
  uint32_t shared;                  // lanes whose address is in shared memory
} Resolved;

int is_shared(const Op *op, const Resolved *r, uint32_t lane);
int resolve(Warp *w, const Op *op, int32_t address, uint32_t mask, uint32_t bytes, int write, int strong,
            Resolved *out);
// a strong write releases and a strong read acquires; relaxed ones with the help of a fence. how: an Order
void strong_write(Warp *w, const Op *op, const Resolved *r, uint32_t mask, uint32_t how);
void strong_read(Warp *w, const Op *op, const Resolved *r, uint32_t mask, uint32_t how);
void count_wavefronts(LaunchResult *r, const uint32_t *offset, uint32_t mask, uint32_t size);
#endif
