#ifndef CUTE_GEMMA_OPERAND_H
#define CUTE_GEMMA_OPERAND_H
#include "engine.h"
#include "mma.h"
// Bounds, order and swizzle of `rows` by `depth` elements; 0: it faulted.
int operand_check(Cta *cta, const Layout *l, uint32_t rows, uint32_t depth, const char *name, const Agent *x);
#endif
