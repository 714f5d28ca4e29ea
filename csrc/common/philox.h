// Philox4x32-7 (Salmon et al. 2011): random bits for dropout, a pure function of (seed, b, h, i,
// j).
//
// 64 consecutive columns use 8 counters of 4 words of 2 halves. Column j is half (j >> 3) & 1 of
// word (j >> 4) & 3 of counter (j >> 6) * 8 + (j & 7). See docs/attention.md and philox.py.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace tk {

constexpr int kPhiloxColumns = 64;
constexpr int kPhiloxCounters = 8;  // per kPhiloxColumns columns
constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMultiplier[2] = {0xD2511F53, 0xCD9E8D57};

// Threshold for 16-bit random numbers: a weight is kept if its number is at least this.
TK_INLINE uint32_t keep_threshold(double p) {
  const double scaled = p * 65536 + 0.5;
  return scaled >= 65535 ? 0xffffu : static_cast<uint32_t>(scaled);
}

// Factor of kept weights: 1 / the probability that keep_threshold keeps one. p = 1 drops all.
TK_INLINE double keep_factor(double p) { return p < 1 ? 65536.0 / (65536 - keep_threshold(p)) : 0; }

// Key of one round.
struct PhiloxKey {
  uint32_t word[2];
};

TK_INLINE void philox_keys(uint64_t seed, PhiloxKey (&keys)[kPhiloxRounds]) {
  constexpr uint32_t kStep[2] = {0x9E3779B9, 0xBB67AE85};
  keys[0] = {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}};
  for (int round = 1; round < kPhiloxRounds; ++round) {
    for (int n = 0; n < 2; ++n) keys[round].word[n] = keys[round - 1].word[n] + kStep[n];
  }
}

}  // namespace tk
