// Conversion of eight 16-bit numbers to float, and the accumulation of tensor cores. Internal.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/platform/element.h"

namespace tk::emulator {

typedef float Row __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));

// Passed by reference, because the ABI for vector arguments depends on the target. The upper 16
// bits of each element of `halves` are zero.
inline void to_row(Row& row, const Bits& halves, cuda::BFloat16) {
  row = reinterpret_cast<Row>(halves << 16);
}

// After the shift the exponent is 112 too small, for subnormal numbers too.
inline void to_row(Row& row, const Bits& halves, cuda::Half) {
  const Bits magnitude = halves & 0x7fffu, sign = (halves & 0x8000u) << 16;
  const Row finite = reinterpret_cast<Row>(magnitude << 13) * 0x1p112f;
  const Bits special = magnitude << 13 | 0x7f800000u;
  const Bits is_special = reinterpret_cast<Bits>(magnitude >= 0x7c00u);
  row = reinterpret_cast<Row>(sign | (special & is_special) |
                              (reinterpret_cast<Bits>(finite) & ~is_special));
}

// c + terms, truncated towards zero as tensor cores do.
inline float add_truncating(float c, float terms) {
  const double exact = double{c} + double{terms};
  const float rounded = static_cast<float>(exact);
  const double beyond = rounded < 0 ? exact - rounded : rounded - exact;
  uint32_t bits;
  memcpy(&bits, &rounded, sizeof bits);
  bits -= beyond > 0;
  float cut;
  memcpy(&cut, &bits, sizeof cut);
  return cut;
}

// Loads eight contiguous 16-bit numbers.
inline void load_row(Row& row, const void* eight, bool bfloat16) {
  uint16_t halves[8];
  memcpy(halves, eight, sizeof halves);
  Bits bits;
  for (int n = 0; n < 8; ++n) bits[n] = halves[n];
  if (bfloat16) {
    to_row(row, bits, cuda::BFloat16{});
  } else {
    to_row(row, bits, cuda::Half{});
  }
}

}  // namespace tk::emulator
