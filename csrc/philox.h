// Philox4x32-10: which weights dropout keeps, a pure function of (seed, b, h, i, j).
// 64 neighbouring columns are 16 counters of 4 words: column j is word (j >> 4) & 3 of counter
// (j >> 6) * 16 + (j & 15). See docs/attention.md and philox.py. Salmon et al. 2011.
#pragma once

#include <cstdint>

#include "inline.h"

namespace tk {

constexpr int kPhiloxColumns = 64;
constexpr int kPhiloxCounters = 16;  // for kPhiloxColumns columns
constexpr int kPhiloxLanes = 16;     // computed at a time

TK_INLINE uint32_t keep_threshold(double p) {
  const double scaled = p * 4294967296.0;
  return scaled >= 4294967295.0 ? 0xffffffffu : static_cast<uint32_t>(scaled);
}

// x[word][lane]: kPhiloxLanes counters on entry, of words {counter, i, h, b}; the random words on
// return.
TK_INLINE void philox(uint64_t seed, uint32_t (&x)[4][kPhiloxLanes]) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int lane = 0; lane < kPhiloxLanes; ++lane) {
      const uint64_t product0 = uint64_t{kMultiplier0} * x[0][lane];
      const uint64_t product1 = uint64_t{kMultiplier1} * x[2][lane];
      x[0][lane] = static_cast<uint32_t>(product1 >> 32) ^ x[1][lane] ^ key0;
      x[1][lane] = static_cast<uint32_t>(product1);
      x[2][lane] = static_cast<uint32_t>(product0 >> 32) ^ x[3][lane] ^ key1;
      x[3][lane] = static_cast<uint32_t>(product0);
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

}  // namespace tk
