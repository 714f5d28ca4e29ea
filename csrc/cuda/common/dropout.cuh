// Dropout masks from Philox counters: docs/attention.md, section 7.
//
// 64 keys share 8 counters. The columns 2 t, 2 t + 1 that a lane holds of eight adjacent 8-column
// tiles are exactly those of two counters, so that no random number is computed twice.
#pragma once

#include "common/philox.h"
#include "cuda/common/mma.cuh"

namespace tk::cuda {

// The words of a counter: 8 random numbers of 16 bits, number n in half n % 2 of word n / 2.
struct PhiloxWords {
  uint32_t x[4];
};

// Reads from it stay in the branch with dropout: hoisted out of it, values would occupy registers
// of the main loop. Which offsets are read from it was found by trial; test_compiled.py
// bounds what the kernels spill.
TK_DEVICE const Dropout& in_memory(const Dropout& dropout) {
  return *reinterpret_cast<const Dropout*>(opaque(reinterpret_cast<uint64_t>(&dropout)));
}

// Random numbers of the weights of one batch entry and head.
class DropoutNumbers {
 public:
  TK_DEVICE_METHOD DropoutNumbers(const Dropout& dropout, int b, int h)
      : threshold_(dropout.threshold),
        addend_((0x10000 - dropout.threshold) << 15),
        first_row_(dropout.first_row),
        first_counter_(in_memory(dropout).first_counter),
        h_(in_memory(dropout).first_head + static_cast<uint32_t>(h)),
        b_(static_cast<uint32_t>(b)) {
    philox_keys(static_cast<uint64_t>(*dropout.seed), keys_);
  }

  // The numbers of the head h heads further on.
  TK_DEVICE_METHOD DropoutNumbers of_head(int h) const {
    DropoutNumbers numbers = *this;
    numbers.h_ += static_cast<uint32_t>(h);
    return numbers;
  }

  // Keeps derived values in registers, for a loop over counters that is not unrolled: the compiler
  // would derive them anew for each.
  TK_DEVICE_METHOD void keep_derived() {
    addend_ = static_cast<uint32_t>(opaque(static_cast<int>(addend_)));
#pragma unroll
    for (int n = 0; n < 2 * kPhiloxRounds; ++n) {
      uint32_t& word = keys_[n / 2].word[n % 2];
      word = static_cast<uint32_t>(opaque(static_cast<int>(word)));
    }
  }

  // Likewise, for a converged warp: the compiler needs fewer instructions with broadcast keys than
  // with opaque ones.
  TK_DEVICE_METHOD void broadcast_keys() {
#pragma unroll
    for (int n = 0; n < 2 * kPhiloxRounds; ++n) {
      uint32_t& word = keys_[n / 2].word[n % 2];
      word = __shfl_sync(~0u, word, 0);
    }
  }

  TK_DEVICE_METHOD PhiloxWords words(int counter, int i) const {
    PhiloxWords w{{first_counter_ + static_cast<uint32_t>(counter),
                   first_row_ + static_cast<uint32_t>(i), h_, b_}};
#pragma unroll
    for (int round = 0; round < kPhiloxRounds; ++round) {
      // One instruction each, for both halves of the product.
      const uint64_t product0 = uint64_t{kPhiloxMultiplier[0]} * w.x[0];
      const uint64_t product1 = uint64_t{kPhiloxMultiplier[1]} * w.x[2];
      w = {{static_cast<uint32_t>(product1 >> 32) ^ w.x[1] ^ keys_[round].word[0],
            static_cast<uint32_t>(product1),
            static_cast<uint32_t>(product0 >> 32) ^ w.x[3] ^ keys_[round].word[1],
            static_cast<uint32_t>(product0)}};
    }
    return w;
  }

  // True if the weight of number n is kept.
  TK_DEVICE_METHOD bool is_kept(const PhiloxWords& w, int n) const {
    return (n % 2 ? w.x[n / 2] : w.x[n / 2] << 16) >= threshold_ << 16;
  }

  // A bit for each of the 8 numbers: 1 if its weight is kept.
  TK_DEVICE_METHOD uint32_t kept(const PhiloxWords& w) const {
    uint32_t bits = 0;
#pragma unroll
    for (int n = 3; n >= 0; --n) {
      append(bits, w.x[n]);
      append(bits, w.x[n] << 16 | w.x[n] >> 16);
    }
    return bits;
  }

 private:
  // Appends the bit of the number in the upper half of `word`. number + 2^16 - threshold has bit 16
  // if the weight is kept: after a shift by 15 the sign, which a funnel shift appends. The lower
  // half of `word` cannot carry into it.
  TK_DEVICE_METHOD void append(uint32_t& bits, uint32_t word) const {
    const uint32_t sum = (word >> 1) + addend_;
    bits = bits << 1 | sum >> 31;
  }

  PhiloxKey keys_[kPhiloxRounds];
  uint32_t threshold_, addend_, first_row_, first_counter_, h_, b_;
};

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
    DropoutNumbers numbers(dropout, b, h);
    numbers.keep_derived();
    const int row = i0 + lane_index() / 4, first_tile = j0 / 8 % 8;
#pragma unroll 1
    for (int n = 0; n < kM * kGroups * 4; ++n) {
      const int group = n / 4 % kGroups, m = n / 4 / kGroups, e = n % 4;
      const int counter = (j0 / 8 + group * kGroup) / 8 * 8 + lane_index() % 4 * 2 + e % 2;
      const uint32_t kept = numbers.kept(numbers.words(counter, row + 16 * m + e / 2 * 8));
      bits |= static_cast<uint64_t>((kept >> (kGroup < 8 ? first_tile : 0)) & 0xff) << 8 * n;
    }
  }

  // The arguments are compile-time constants in unrolled loops.
  TK_DEVICE_METHOD bool operator()(int m, int n, int e) const {
    return (bits >> (8 * (4 * (m * kGroups + n / kGroup) + e) + n % kGroup) & 1) != 0;
  }
};

// z p, without the factor of kept weights: sets dropped weights to 0. j0 is a multiple of 64 if kN
// is one of 8, otherwise of 16.
template <int kM, int kN>
TK_DEVICE void drop(Accumulator<kM, kN>& p, const Dropout& dropout, int b, int h, int i0, int j0) {
  if constexpr (kN % 8 == 0) {
    const DropoutNumbers numbers(dropout, b, h);
#pragma unroll
    for (int n = 0; n < kM * (kN / 8) * 4; ++n) {
      const int m = n / 4 % kM, group = n / 4 / kM, e = n % 4;
      const auto words = numbers.words(j0 / 8 + 8 * group + column_of(e), i0 + 16 * m + row_of(e));
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        if (!numbers.is_kept(words, tile)) p.x[m][8 * group + tile][e] = 0.0f;
      }
    }
  } else {
    constexpr int kPart = kN % 4 == 0 ? 4 : 2;  // within the same 64 keys
#pragma unroll
    for (int part = 0; part < kN; part += kPart) {
      const DropoutMask<kM, kPart> kept(dropout, b, h, i0, j0 + 8 * part);
      for_each_element<kM, kPart>([&](int m, int n, int e) {
        if (!kept(m, n, e)) p.x[m][part + n][e] = 0.0f;
      });
    }
  }
}

}  // namespace tk::cuda
