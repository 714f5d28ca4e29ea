// Which weights dropout keeps: docs/attention.md, section 7.
//
// 64 keys share 8 counters, and a lane's columns 2 t, 2 t + 1 of eight neighbouring 8-column tiles
// are just those of two counters: no half of a word is computed twice.
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

// Which of a counter's 8 numbers keep their weight, in as many bits.
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

// Bit 8 (4 (m groups + g) + e) + n of the result: whether element e of tile (m, g kGroup + n) of an
// accumulator is kept, of which the first element is (i0, j0); j0 is a multiple of 16.
template <int kM, int kN>
struct Kept {
  static constexpr int kGroup = kN < 8 ? kN : 8;  // 8-column tiles that are of the same 64 keys
  static constexpr int kGroups = kN / kGroup;
  static_assert(kN % kGroup == 0 && kM * kGroups * 4 <= 8);
  uint64_t bits = 0;

  TK_DEVICE_METHOD explicit Kept(uint64_t all) : bits(all) {}
  TK_DEVICE_METHOD Kept(const Dropout& dropout, int b, int h, int i0, int j0) {
    const int row = i0 + lane_index() / 4, first_tile = j0 / 8 % 8;
#pragma unroll 1
    for (int n = 0; n < kM * kGroups * 4; ++n) {
      const int group = n / 4 % kGroups, m = n / 4 / kGroups, e = n % 4;
      const int counter = (j0 / 8 + group * kGroup) / 8 * 8 + lane_index() % 4 * 2 + e % 2;
      const uint32_t kept = kept_of(dropout, counter, row + 16 * m + e / 2 * 8, h, b);
      bits |= static_cast<uint64_t>((kept >> (kGroup < 8 ? first_tile : 0)) & 0xff) << 8 * n;
    }
  }

  // The arguments are constants where loops are unrolled.
  TK_DEVICE_METHOD bool operator()(int m, int n, int e) const {
    return (bits >> (8 * (4 * (m * kGroups + n / kGroup) + e) + n % kGroup) & 1) != 0;
  }
};

// z p: weights that are dropped become 0; the others are still to be multiplied by the factor.
template <int kM, int kN>
TK_DEVICE void drop(Accumulator<kM, kN>& p, const Dropout& dropout, int b, int h, int i0, int j0) {
  const Kept<kM, kN> kept(dropout, b, h, i0, j0);
  for_each_element<kM, kN>([&](int m, int n, int e) {
    if (!kept(m, n, e)) p.x[m][n][e] = 0.0f;
  });
}

}  // namespace tk::cuda
