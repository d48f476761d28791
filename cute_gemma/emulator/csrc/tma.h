#ifndef CUTE_GEMMA_TMA_H
#define CUTE_GEMMA_TMA_H
#include "engine.h"
Status reduce_row(Async *a, const TensorMap *m, uint8_t *to, const uint8_t *from, uint32_t bytes);
#endif
