// Checks of the shared memory that a matrix operand's descriptor reaches.
#include "operand.h"
#include "hazard.h"

int operand_check(Cta *cta, const Layout *l, uint32_t rows, uint32_t depth, const char *name,
                  const Agent *x) {
  const uint32_t per = 16 / l->element, end = cta->launch->smem_end;
  for (uint32_t k = 0; k < depth; k += l->mn_major ? 1 : per)
    for (uint32_t r = 0; r < rows; r += l->mn_major ? per : 1) {
      uint32_t at = layout_chunk(l, r, k);
      if (at < SMEM_RESERVED || at + 16 > end) {
        fault(x->warp, x->op, FAULT_MEMORY, "operand %s reaches shared memory offset 0x%x, outside "
              "0x%x..0x%x", name, at, SMEM_RESERVED, end);
        return 0;
      }
      if (!cta->smem_shadow) continue;
      Shadow *s = &cta->smem_shadow[at / GRANULE];
      if (!shadow_touch(cta, s, ALL16, 0, x)) return 0;
      if (s->tag && s->tag != l->swizzle + 1 && s->tag <= 4) {
        static const char *const MODE[] = {"no", "a 32-byte", "a 64-byte", "a 128-byte"};
        fault(x->warp, x->op, FAULT_DESCRIPTOR, "operand %s is read with %s swizzle at shared memory offset "
              "0x%x, where the copy at PTX line "
              "%u wrote with %s swizzle", name, MODE[l->swizzle], at, s->wline, MODE[s->tag - 1]);
        return 0;
      }
    }
  return 1;
}
