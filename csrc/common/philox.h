// Philox2x32-7 (Salmon et al. 2011): random bits for dropout, a pure function of (seed, b, h, i,
// j).
//
// Queries i, i + 8 and keys j, j + 8 of a block of 16 x 16 share a counter, which yields two words
// of two halves: word (i >> 3) & 1, half (j >> 3) & 1. See docs/attention.md and philox.py.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace tk {

constexpr int kPhiloxBlock = 16;
constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMultiplier = 0xD256D193;
constexpr uint32_t kPhiloxKeyStep = 0x9E3779B9;  // from round to round

// Threshold for 16-bit random numbers: a weight is kept if its number is at least this.
TK_INLINE uint32_t keep_threshold(double p) {
  const double scaled = p * 65536 + 0.5;
  return scaled >= 65535 ? 0xffffu : static_cast<uint32_t>(scaled);
}

// Factor of kept weights: 1 / the probability that keep_threshold keeps one. p = 1 drops all.
TK_INLINE double keep_factor(double p) { return p < 1 ? 65536.0 / (65536 - keep_threshold(p)) : 0; }

struct PhiloxWords {
  uint32_t x[2];
};

TK_INLINE PhiloxWords philox(uint32_t key, PhiloxWords words) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product = uint64_t{kPhiloxMultiplier} * words.x[0];
    words = {
        {static_cast<uint32_t>(product >> 32) ^ key ^ words.x[1], static_cast<uint32_t>(product)}};
    key += kPhiloxKeyStep;
  }
  return words;
}

// Counters of one batch entry and head: (row + counter of i, counter of j), with `key`.
struct PhiloxHead {
  uint32_t key, row;
};

TK_INLINE PhiloxHead philox_head(uint64_t seed, uint32_t b, uint32_t h) {
  const PhiloxWords words = philox(static_cast<uint32_t>(seed), {{h, b}});
  return {words.x[0] ^ static_cast<uint32_t>(seed >> 32), words.x[1]};
}

// The counter of query or key n, which it shares with n + 8 or n - 8.
TK_INLINE uint32_t philox_counter(uint32_t n) { return n / 16 * 8 + n % 8; }

}  // namespace tk
