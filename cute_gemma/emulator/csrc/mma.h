// Matrix products on panels of floats, for tcgen05.mma and wgmma.
#ifndef CUTE_GEMMA_MMA_H
#define CUTE_GEMMA_MMA_H
#include <stdint.h>

// PTX ISA, "Instruction descriptor": A and B formats of kind::f16 and tf32
typedef enum { F_F16, F_BF16, F_TF32 } Format;

// how a shared-memory descriptor lays out a matrix of `rows` (M or N) by one K step
typedef struct {
  uint32_t start, leading, stride;  // bytes
  uint32_t swizzle;                 // 0 none, 1: 32, 2: 64, 3: 128 bytes
  uint32_t mn_major;
  uint32_t element;                 // bytes
  uint32_t first;                   // added to every row
} Layout;

// Offset in shared memory of the 16-byte chunk that holds element (row, k); both at the chunk's start along
// its dimension.
uint32_t layout_chunk(const Layout *l, uint32_t row, uint32_t k);
// One K step (k = 32 bytes of it) as floats: out[k * ld_k + row * ld_row].
void unpack_operand(float *out, uint32_t ld_k, uint32_t ld_row, const uint8_t *smem, const Layout *l,
                    Format f, uint32_t rows, int negate);
// d[n * ld + m] = (accumulate ? d : 0) + sum over k of a[k * m_total + m] * b[n * b_n + k * b_k]; m a
// multiple of 16
void panel_product(float *d, uint32_t ld, const float *a, uint32_t m_total, const float *b, uint32_t b_n,
                   uint32_t b_k, uint32_t m,
                   uint32_t n, uint32_t k, int accumulate);
// A 16-row slice in registers, as wgmma and mma lay its fragments out: d[r][lane], r < n / 2, is row lane/4 +
// 8*(r/2%2), column 8*(r/4) + 2*(lane%4) + r%2. a: [k][16]. b: [k][n], n a multiple of 8.
void fragment_product(float *const *d, const float *a, const float *b, uint32_t n, uint32_t k,
                      int accumulate);
#endif
