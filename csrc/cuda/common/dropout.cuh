// Dropout masks from Philox counters: docs/attention.md, section 7.
//
// 64 keys share 8 counters. The columns 2 t, 2 t + 1 that a lane holds of eight adjacent 8-column
// tiles are exactly those of two counters, so that no random number is computed twice.
#pragma once

#include "common/philox.h"
#include "cuda/common/mma.cuh"

namespace tk::cuda {

struct Words {
  uint32_t x[4];
};

TK_DEVICE Words philox(uint64_t seed, uint32_t counter, uint32_t i, uint32_t h, uint32_t b) {
  PhiloxKey keys[kPhiloxRounds];
  philox_keys(seed, keys);
  constexpr uint32_t kMultiplier0 = kPhiloxMultiplier[0], kMultiplier1 = kPhiloxMultiplier[1];
  Words w{{counter, i, h, b}};
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint32_t high0 = __umulhi(kMultiplier0, w.x[0]);
    const uint32_t high1 = __umulhi(kMultiplier1, w.x[2]);
    w = {{high1 ^ w.x[1] ^ keys[round].word[0], kMultiplier1 * w.x[2],
          high0 ^ w.x[3] ^ keys[round].word[1], kMultiplier0 * w.x[0]}};
  }
  return w;
}

// One bit for each of a counter's 8 random numbers: 1 if its weight is kept.
TK_DEVICE uint32_t kept_of(const Dropout& dropout, int counter, int i, int h, int b) {
  const Words w =
      philox(static_cast<uint64_t>(*dropout.seed), static_cast<uint32_t>(counter),
             static_cast<uint32_t>(i), static_cast<uint32_t>(h), static_cast<uint32_t>(b));
  uint32_t kept = 0;
#pragma unroll
  for (int half = 0; half < 8; ++half) {
    const uint32_t word = w.x[half / 2];
    const uint32_t number = half % 2 ? word >> 16 : word & 0xffff;
    kept |= static_cast<uint32_t>(number >= dropout.threshold) << half;
  }
  return kept;
}

// Dropout mask of the elements that a lane holds of an accumulator. Element e of tile
// (m, g kGroup + n) is kept if bit 8 (4 (m kGroups + g) + e) + n is 1. The accumulator's first
// element is query i0 and key j0, a multiple of 16.
template <int kM, int kN>
struct DropoutMask {
  static constexpr int kGroup = kN < 8 ? kN : 8;  // 8-column tiles within the same 64 keys
  static constexpr int kGroups = kN / kGroup;
  static_assert(kN % kGroup == 0 && kM * kGroups * 4 <= 8);
  uint64_t bits = 0;

  TK_DEVICE_METHOD explicit DropoutMask(uint64_t all) : bits(all) {}
  TK_DEVICE_METHOD DropoutMask(const Dropout& dropout, int b, int h, int i0, int j0) {
    const int row = i0 + lane_index() / 4, first_tile = j0 / 8 % 8;
#pragma unroll 1
    for (int n = 0; n < kM * kGroups * 4; ++n) {
      const int group = n / 4 % kGroups, m = n / 4 / kGroups, e = n % 4;
      const int counter = (j0 / 8 + group * kGroup) / 8 * 8 + lane_index() % 4 * 2 + e % 2;
      const uint32_t kept = kept_of(dropout, counter, row + 16 * m + e / 2 * 8, h, b);
      bits |= static_cast<uint64_t>((kept >> (kGroup < 8 ? first_tile : 0)) & 0xff) << 8 * n;
    }
  }

  // The arguments are compile-time constants in unrolled loops.
  TK_DEVICE_METHOD bool operator()(int m, int n, int e) const {
    return (bits >> (8 * (4 * (m * kGroups + n / kGroup) + e) + n % kGroup) & 1) != 0;
  }
};

// z p, without the factor of kept weights: sets dropped weights to 0.
template <int kM, int kN>
TK_DEVICE void drop(Accumulator<kM, kN>& p, const Dropout& dropout, int b, int h, int i0, int j0) {
  const DropoutMask<kM, kN> kept(dropout, b, h, i0, j0);
  for_each_element<kM, kN>([&](int m, int n, int e) {
    if (!kept(m, n, e)) p.x[m][n][e] = 0.0f;
  });
}

}  // namespace tk::cuda
