// 16-bit floating-point values as floats, and back, rounded to nearest even.
#ifndef CUTE_GEMMA_HALF_H
#define CUTE_GEMMA_HALF_H
#include <stdint.h>
#include <string.h>

static inline float half_value(uint16_t x, int bf16) {
  float f;
  if (bf16) {
    uint32_t u = (uint32_t)x << 16;
    memcpy(&f, &u, 4);
    return f;
  }
  _Float16 h;
  memcpy(&h, &x, 2);
  return (float)h;
}

static inline uint16_t half_round(float f, int bf16) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (bf16) return f != f ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
  _Float16 h = (_Float16)f;
  uint16_t x;
  memcpy(&x, &h, 2);
  return x;
}
#endif
