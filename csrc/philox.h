// Philox4x32-10: which weights dropout keeps, a pure function of (seed, b, h, i, j).
// 64 neighbouring columns are 16 counters of 4 words: column j is word (j >> 4) & 3 of counter
// (j >> 6) * 16 + (j & 15). See docs/attention.md and philox.py. Salmon et al. 2011.
#pragma once

#include <cstdint>

#include "inline.h"

namespace tk {

constexpr int kPhiloxColumns = 64;
constexpr int kPhiloxLanes = 16;

TK_INLINE uint32_t keep_threshold(double p) {
  const double scaled = p * 4294967296.0;
  return scaled >= 4294967295.0 ? 0xffffffffu : static_cast<uint32_t>(scaled);
}

// words[64]: those of columns j0 .. j0 + 63 of row i; j0 is a multiple of 64.
TK_INLINE void philox_row(uint64_t seed, uint32_t b, uint32_t h, uint32_t i, uint32_t j0,
                          uint32_t* words) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  uint32_t *x0 = words, *x1 = words + 16, *x2 = words + 32, *x3 = words + 48;
  for (uint32_t lane = 0; lane < kPhiloxLanes; ++lane) {
    x0[lane] = (j0 >> 6) * 16 + lane;
    x1[lane] = i;
    x2[lane] = h;
    x3[lane] = b;
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int lane = 0; lane < kPhiloxLanes; ++lane) {
      const uint64_t product0 = uint64_t{kMultiplier0} * x0[lane];
      const uint64_t product1 = uint64_t{kMultiplier1} * x2[lane];
      x0[lane] = static_cast<uint32_t>(product1 >> 32) ^ x1[lane] ^ key0;
      x1[lane] = static_cast<uint32_t>(product1);
      x2[lane] = static_cast<uint32_t>(product0 >> 32) ^ x3[lane] ^ key1;
      x3[lane] = static_cast<uint32_t>(product0);
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

}  // namespace tk
