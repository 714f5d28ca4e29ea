// Decay within a chunk: sums of log-decays, and exponentials of their differences.
#pragma once

#include "common/linear_params.h"
#include "cpu/engine/operand.h"
#include "cpu/engine/vec.h"
#include "cpu/linear/features.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kChunk = 64;  // tokens

// exp() of it is 0, also as a factor of the largest number. Smaller log-decays, such as -inf, count
// as it: differences of their sums are finite. As SMALLEST_LOG_DECAY in linear/reference.py.
template <typename Real>
constexpr double kSmallestLogDecay = sizeof(Real) == 4 ? -200.0 : -800.0;

// G_i = sum of log_decay over the tokens up to i of a chunk, as high + low: with rounded sums,
// small differences of large sums would lose their bits.
template <typename Real>
struct ChunkDecay {
  alignas(64) Real high[kChunk];
  alignas(64) Real low[kChunk];
  alignas(64) Real from_start[kChunk];  // exp(G_i)
  alignas(64) Real to_end[kChunk];      // exp(G_C - G_i), C the last token
  double total = 0;                     // G_C

  // Of `count` tokens; those that are not visible(i) do not decay the state.
  template <typename Visible>
  void read(const Real* log_decay, int64_t stride, int64_t count, Visible&& visible) {
    total = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
      if (i < count && visible(i)) {
        const double step = static_cast<double>(log_decay[i * stride]);
        total += step < kSmallestLogDecay<Real> ? kSmallestLogDecay<Real> : step;
      }
      high[i] = static_cast<Real>(total);
      low[i] = static_cast<Real>(total - static_cast<double>(high[i]));
    }
    for (int64_t i = 0; i < kChunk; i += kLanes<Real>) {
      const Vec<Real> start = exp<Real>(load(high + i));
      store(from_start + i, start + start * load(low + i));
      store(to_end + i, exp<Real>(between(kChunk - 1, i)));
    }
  }

  // G_i - G_j for the lanes j .. j + kLanes - 1.
  TK_INLINE_METHOD Vec<Real> between(int64_t i, int64_t j) const {
    return (broadcast(high[i]) - load(high + j)) + (broadcast(low[i]) - load(low + j));
  }
};

}  // namespace tk::cpu::TK_ISA
