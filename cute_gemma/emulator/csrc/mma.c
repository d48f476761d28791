// Operand unpacking and a register-blocked product: 64 rows by 4 columns of the result stay in registers.
#pragma GCC optimize("O3")
#include "mma.h"
#include "half.h"
#include <string.h>

typedef float V __attribute__((vector_size(64), aligned(4)));
typedef uint32_t U __attribute__((vector_size(64), aligned(4)));

static inline uint32_t swizzled(uint32_t at, uint32_t mode) {
  static const uint32_t MASK[4] = {0, 0x10, 0x30, 0x70};
  return at ^ (at >> 3 & MASK[mode]);
}

// PTX ISA, "Canonical layouts": atoms of 8 rows (or 8 k) by the swizzle width; without swizzle the width is
// 16 bytes, and the MN-major form swaps the roles of the two offsets.
uint32_t layout_chunk(const Layout *l, uint32_t row, uint32_t k) {
  uint32_t width = 16u << l->swizzle, at;
  row += l->first;
  if (!l->mn_major) {
    uint32_t kb = k * l->element;
    at = row % 8 * width + row / 8 * l->stride + (l->swizzle ? kb : kb / 16 * l->leading + kb % 16);
  } else {
    uint32_t mb = row * l->element;
    at = l->swizzle ? mb % width + mb / width * l->leading + k % 8 * width + k / 8 * l->stride
                    : mb % 16 + mb / 16 * l->stride + k % 8 * 16 + k / 8 * l->leading;
  }
  return swizzled(l->start + at, l->swizzle);
}

static inline float from_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline void unpack_chunk(float *restrict out, const uint8_t *restrict p, Format f) {
  if (f == F_BF16) {
    uint16_t v[8];
    memcpy(v, p, 16);
    for (int i = 0; i < 8; i++) out[i] = from_bits((uint32_t)v[i] << 16);
  } else if (f == F_F16) {
    uint16_t v[8];
    memcpy(v, p, 16);
    for (int i = 0; i < 8; i++) out[i] = half_value(v[i], 0);
  } else {                        // tf32: the low 13 bits are ignored
    uint32_t v[4];
    memcpy(v, p, 16);
    for (int i = 0; i < 4; i++) out[i] = from_bits(v[i] & 0xffffe000u);
  }
}

// Sixteen rows of one K-major bf16 chunk, transposed: out[k * ld + row].
static inline void transpose_bf16(float *out, uint32_t ld, const uint8_t *const *row) {
  for (int pair = 0; pair < 4; pair++) {
    U v;
    for (int r = 0; r < 16; r++) {
      uint32_t x;
      memcpy(&x, row[r] + 4 * pair, 4);
      v[r] = x;
    }
    U low = v << 16, high = v & 0xffff0000u;
    memcpy(out + (size_t)(2 * pair) * ld, &low, sizeof low);
    memcpy(out + (size_t)(2 * pair + 1) * ld, &high, sizeof high);
  }
}

void unpack_operand(float *out, uint32_t ld_k, uint32_t ld_row, const uint8_t *smem, const Layout *l,
                    Format f, uint32_t rows, int negate) {
  const uint32_t per = 16 / l->element, depth = 32 / l->element;
  float chunk[8];
  if (l->mn_major) {
    for (uint32_t k = 0; k < depth; k++)
      for (uint32_t r = 0; r < rows; r += per) {
        const uint8_t *p = smem + layout_chunk(l, r, k);
        if (ld_row == 1) {
          unpack_chunk(out + (size_t)k * ld_k + r, p, f);
          continue;
        }
        unpack_chunk(chunk, p, f);
        for (uint32_t i = 0; i < per; i++) out[(size_t)k * ld_k + (size_t)(r + i) * ld_row] = chunk[i];
      }
  } else {
    for (uint32_t k = 0; k < depth; k += per)
      for (uint32_t r = 0; r < rows;) {
        if (f == F_BF16 && ld_row == 1 && r + 16 <= rows) {
          const uint8_t *p[16];
          for (uint32_t i = 0; i < 16; i++) p[i] = smem + layout_chunk(l, r + i, k);
          transpose_bf16(out + (size_t)k * ld_k + r, ld_k, p);
          r += 16;
          continue;
        }
        const uint8_t *p = smem + layout_chunk(l, r, k);
        if (ld_k == 1) {
          unpack_chunk(out + (size_t)r * ld_row + k, p, f);
        } else {
          unpack_chunk(chunk, p, f);
          for (uint32_t i = 0; i < per; i++) out[(size_t)(k + i) * ld_k + (size_t)r * ld_row] = chunk[i];
        }
        r++;
      }
  }
  if (!negate) return;
  for (uint32_t k = 0; k < depth; k++)
    for (uint32_t r = 0; r < rows; r++) out[(size_t)k * ld_k + (size_t)r * ld_row] *= -1.0f;
}

#define LOAD(p) (*(const V *)(p))
#define STORE(p, v) (*(V *)(p) = (v))

// 64 x 4 results. Sixteen independent accumulators hide the latency of the multiply-add.
static void block_64x4(float *d, uint32_t ld, const float *a, uint32_t m_total, const float *b, uint32_t b_n,
                       uint32_t b_k, uint32_t k,
                       int accumulate) {
  V c[4][4];
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 4; i++) c[j][i] = accumulate ? LOAD(d + (size_t)j * ld + 16 * i) : (V){0};
  for (uint32_t s = 0; s < k; s++) {
    const float *as = a + (size_t)s * m_total, *bs = b + (size_t)s * b_k;
    V a0 = LOAD(as), a1 = LOAD(as + 16), a2 = LOAD(as + 32), a3 = LOAD(as + 48);
    for (int j = 0; j < 4; j++) {
      float x = bs[(size_t)j * b_n];
      c[j][0] += a0 * x;
      c[j][1] += a1 * x;
      c[j][2] += a2 * x;
      c[j][3] += a3 * x;
    }
  }
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 4; i++) STORE(d + (size_t)j * ld + 16 * i, c[j][i]);
}

static void block_16x1(float *d, const float *a, uint32_t m_total, const float *b, uint32_t b_k, uint32_t k,
                       int accumulate) {
  V c = accumulate ? LOAD(d) : (V){0};
  for (uint32_t s = 0; s < k; s++) c += LOAD(a + (size_t)s * m_total) * b[(size_t)s * b_k];
  STORE(d, c);
}

void panel_product(float *d, uint32_t ld, const float *a, uint32_t m_total, const float *b, uint32_t b_n,
                   uint32_t b_k, uint32_t m,
                   uint32_t n, uint32_t k, int accumulate) {
  uint32_t i = 0;
  for (; i + 64 <= m; i += 64) {
    uint32_t j = 0;
    for (; j + 4 <= n; j += 4)
      block_64x4(d + (size_t)j * ld + i, ld, a + i, m_total, b + (size_t)j * b_n, b_n, b_k, k, accumulate);
    for (; j < n; j++)
      for (uint32_t q = 0; q < 64; q += 16)
        block_16x1(d + (size_t)j * ld + i + q, a + i + q, m_total, b + (size_t)j * b_n, b_k, k, accumulate);
  }
  for (; i < m; i += 16)
    for (uint32_t j = 0; j < n; j++)
      block_16x1(d + (size_t)j * ld + i, a + i, m_total, b + (size_t)j * b_n, b_k, k, accumulate);
}

typedef float Q __attribute__((vector_size(16), aligned(4)));
#define SPREAD(q) __builtin_shufflevector(q, q, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3)

// Sixteen columns (fewer than that: eight) of the slice. b: per k, eight columns as four even ones, then four
// odd ones.
static inline void fragment_block(float *const *d, const float *a, const float *b, uint32_t n, uint32_t k,
                                  int accumulate, uint32_t groups) {
  V c[2][4][2];
  for (uint32_t g = 0; g < groups; g++)
    for (int r = 0; r < 4; r++)
      for (int h = 0; h < 2; h++) c[g][r][h] = accumulate ? LOAD(d[4 * g + r] + 16 * h) : (V){0};
  for (uint32_t s = 0; s < k; s++) {
    V x[2][2];
    for (int i = 0; i < 4; i++) x[i / 2][i % 2] = LOAD(a + 64 * s + 16 * i);
    for (uint32_t g = 0; g < groups; g++)
      for (int odd = 0; odd < 2; odd++) {
        Q q = *(const Q *)(b + (size_t)s * n + 8 * g + 4 * odd);
        V y = SPREAD(q);
        for (int half = 0; half < 2; half++)
          for (int h = 0; h < 2; h++) c[g][2 * half + odd][h] += x[half][h] * y;
      }
  }
  for (uint32_t g = 0; g < groups; g++)
    for (int r = 0; r < 4; r++)
      for (int h = 0; h < 2; h++) STORE(d[4 * g + r] + 16 * h, c[g][r][h]);
}

void fragment_product(float *const *d, const float *a, const float *b, uint32_t n, uint32_t k,
                      int accumulate) {
  static _Thread_local float rows[64 * 64], columns[64 * 256];
  for (uint32_t s = 0; s < k; s++) {
    for (uint32_t l = 0; l < 64; l++) rows[64 * s + l] = a[16 * s + l % 32 / 4 + l / 32 * 8];
    for (uint32_t j = 0; j < n; j += 8)
      for (uint32_t q = 0; q < 4; q++) {
        columns[(size_t)s * n + j + q] = b[(size_t)s * n + j + 2 * q];
        columns[(size_t)s * n + j + 4 + q] = b[(size_t)s * n + j + 2 * q + 1];
      }
  }
  uint32_t j = 0;
  for (; j + 16 <= n; j += 16) fragment_block(d + j / 2, rows, columns + j, n, k, accumulate, 2);
  if (j < n) fragment_block(d + j / 2, rows, columns + j, n, k, accumulate, 1);
}
