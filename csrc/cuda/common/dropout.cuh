// Dropout masks from Philox counters: docs/attention.md, section 7.
//
// A counter has the numbers of queries i, i + 8 and keys j, j + 8 of a block of 16 x 16. One lane
// holds these four weights in two adjacent 8-column tiles of an accumulator, whether its rows are
// queries or keys: no number is computed twice.
#pragma once

#include "common/philox.h"
#include "cuda/common/mma.cuh"

namespace tk::cuda {

TK_DEVICE PhiloxHead philox_head(const Dropout& dropout, int b, int h) {
  if (!dropout.seed) return {};
  return tk::philox_head(static_cast<uint64_t>(*dropout.seed), static_cast<uint32_t>(b),
                         dropout.first_head + static_cast<uint32_t>(h));
}

// Random numbers of the weights that a lane holds of an accumulator, whose first element is query
// i0 and key j0, multiples of 16.
template <RowsAre kRows>
class DropoutNumbers {
 public:
  TK_DEVICE_METHOD DropoutNumbers(const Dropout& dropout, const PhiloxHead& head, int i0, int j0)
      : key_(head.key) {
    const auto row = static_cast<uint32_t>(row_of(0)), column = static_cast<uint32_t>(column_of(0));
    const uint32_t query = head.row + (dropout.first_row + static_cast<uint32_t>(i0)) / 2;
    const uint32_t key = (dropout.first_column + static_cast<uint32_t>(j0)) / 2;
    row_ = (kQueriesInRows ? query : key) + row;
    column_ = (kQueriesInRows ? key : query) + column;
  }

  // Those of elements e and e + 2 of the 8-column tiles (m, n) and (m, n + 1); n is even, e 0 or 1.
  TK_DEVICE_METHOD PhiloxWords words(int m, int n, int e) const {
    const uint32_t row = row_ + static_cast<uint32_t>(8 * m);
    const uint32_t column = column_ + static_cast<uint32_t>(4 * n + e);
    return philox(key_, {{kQueriesInRows ? row : column, kQueriesInRows ? column : row}});
  }

  // The word of element e of tile n, and the half of that word.
  TK_DEVICE_METHOD static constexpr int word_of(int n, int e) {
    return kQueriesInRows ? e / 2 : n % 2;
  }
  TK_DEVICE_METHOD static constexpr int half_of(int n, int e) {
    return kQueriesInRows ? n % 2 : e / 2;
  }

 private:
  static constexpr bool kQueriesInRows = kRows == RowsAre::kQueries;
  uint32_t key_, row_, column_;
};

// Dropout mask of the elements that a lane holds of an accumulator; at first it keeps all.
template <RowsAre kRows, int kM, int kN>
struct DropoutMask {
  using Numbers = DropoutNumbers<kRows>;
  static constexpr bool kDropsWeights = true;
  static_assert(kN % 2 == 0);

  TK_DEVICE_METHOD void draw(const Dropout& dropout, const PhiloxHead& head, int i0, int j0) {
    const Numbers numbers(dropout, head, i0, j0);
#pragma unroll
    for (int counter = 0; counter < kM * kN; ++counter) {
      const int m = counter / kN, n = counter % kN / 2 * 2, e = counter % 2;
      const PhiloxWords words = numbers.words(m, n, e);
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const int at = 2 * counter + word;
        dropped_[at / 16] |=
            below(words.x[word], dropout.threshold) >> at % 16 & kHalves >> at % 16;
      }
    }
  }

  // True if the weight is kept. The arguments are compile-time constants in unrolled loops.
  TK_DEVICE_METHOD bool operator()(int m, int n, int e) const {
    const int at = 2 * (m * kN + n / 2 * 2 + e % 2) + Numbers::word_of(n, e);
    return (dropped_[at / 16] >> (15 + 16 * Numbers::half_of(n, e) - at % 16) & 1) == 0;
  }

 private:
  static constexpr uint32_t kHalves = 0x80008000;  // the upper bit of each half

  // The upper bit of each half: 1 if the half is below the threshold, where threshold + ~half has a
  // carry. The carry is the majority of the upper bits and the carry into them.
  TK_DEVICE_METHOD static uint32_t below(uint32_t word, uint32_t threshold) {
    const uint32_t a = ~word, b = threshold * 0x10001u;
    const uint32_t sum = (a & ~kHalves) + (b & ~kHalves);
    return (a & b) | (sum & (a | b));
  }

  uint32_t dropped_[(kM * kN + 7) / 8] = {};
};

// z p, without the factor of kept weights: sets dropped weights to 0. Queries are in rows.
template <int kM, int kN>
TK_DEVICE void drop(Accumulator<kM, kN>& p, const Dropout& of_call, const PhiloxHead& head, int i0,
                    int j0) {
  using Numbers = DropoutNumbers<RowsAre::kQueries>;
  static_assert(kN % 2 == 0);
  // Reads stay in the branch with dropout: hoisted, they would occupy registers of the main loop.
  const auto& dropout =
      *reinterpret_cast<const Dropout*>(opaque(reinterpret_cast<uint64_t>(&of_call)));
  const Numbers numbers(dropout, head, i0, j0);
  const uint32_t threshold = dropout.threshold << 16;
#pragma unroll
  for (int counter = 0; counter < kM * kN; ++counter) {
    const int m = counter / kN, first = counter % kN / 2 * 2, parity = counter % 2;
    const PhiloxWords words = numbers.words(m, first, parity);
#pragma unroll
    for (int n = first; n < first + 2; ++n) {
#pragma unroll
      for (int e = parity; e < 4; e += 2) {
        const uint32_t word = words.x[Numbers::word_of(n, e)];
        if ((Numbers::half_of(n, e) ? word : word << 16) < threshold) p.x[m][n][e] = 0.0f;
      }
    }
  }
}

}  // namespace tk::cuda
