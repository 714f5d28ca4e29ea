// Online softmax: running maximum and denominator of one query in each lane.
#pragma once

#include "cpu/attention/dropout.h"
#include "cpu/engine/prefetch.h"

namespace tk::cpu::TK_ISA {

// The maximum in use may lag behind the true one by this power of two, so that o is seldom
// rescaled.
constexpr int kMaxLag = 8;

// A block whose weights sum to more than this triggers an update of the maximum. No weight is
// larger.
constexpr int kMaxWeightSum = 1 << kMaxLag;

// m: running maximum in base 2, -inf before the first visible key. l: the sum of 2^(score - m).
template <typename Real, int64_t kQueries>
struct SoftmaxState {
  static constexpr Real kMinusInfinity = -static_cast<Real>(__builtin_inf());
  Real m[kQueries];
  Real l[kQueries];

  void clear() {
    for (int64_t lane = 0; lane < kQueries; ++lane) {
      m[lane] = kMinusInfinity;
      l[lane] = 0;
    }
  }

  // For two vectors of columns.
  TK_INLINE_METHOD void add_to_l(int64_t lane, const Vec<Real> (&sum)[2]) {
    for (int n = 0; n < 2; ++n) {
      Real* const to = l + lane + n * kLanes<Real>;
      store(to, load(to) + sum[n]);
    }
  }

  // Natural logarithm; -inf for a fully masked query. m may be large: its product with ln 2 is
  // split in two, so that only the final sum is rounded.
  TK_INLINE_METHOD Vec<Real> lse(int64_t lane) const {
    constexpr Real kLn2 = static_cast<Real>(0.6931471805599453);
    constexpr Real kLn2Rest =
        static_cast<Real>(sizeof(Real) == 4 ? -1.9046542121259336e-9 : 2.3190468138462996e-17);
    const Vec<Real> largest = load(m + lane), sum = load(l + lane);
    const Vec<Real> rest = largest * kLn2Rest + log<Real>(sum);
    return sum == 0 ? broadcast(kMinusInfinity) : largest * kLn2 + rest;
  }
};

// Column maxima of s (rows x kQueries), for two vectors of columns.
template <typename Real, int64_t kQueries>
TK_INLINE void column_maxima(const Real* s, int64_t rows, Vec<Real> (&largest)[2]) {
  constexpr int kChains = 4;
  Vec<Real> chain[kChains][2];
#pragma GCC unroll 4
  for (int c = 0; c < kChains; ++c) {
    chain[c][0] = load(s + c * kQueries);
    chain[c][1] = load(s + c * kQueries + kLanes<Real>);
  }
  for (int64_t r = kChains; r < rows; r += kChains) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      const Real* from = s + (r + c) * kQueries;
      chain[c][0] = max<Real>(chain[c][0], load(from));
      chain[c][1] = max<Real>(chain[c][1], load(from + kLanes<Real>));
    }
  }
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n) {
    largest[n] =
        max<Real>(max<Real>(chain[0][n], chain[1][n]), max<Real>(chain[2][n], chain[3][n]));
  }
}

template <typename Real>
TK_INLINE bool any(Vec<IntOf<Real>> condition) {
  IntOf<Real> sum = 0;
  for (int lane = 0; lane < kLanes<Real>; ++lane) sum |= condition[lane];
  return sum != 0;
}

// Updates the maxima of one vector of columns where they lag by more than `lag`, and rescales l.
// rescale_o(lane, factors) rescales o.
template <typename Real, int64_t kQueries, typename Rescale>
TK_INLINE void update_maxima(SoftmaxState<Real, kQueries>& state, int64_t lane, Vec<Real> largest,
                             Real lag, Rescale&& rescale_o) {
  const Vec<Real> m = load(state.m + lane);
  const auto lags = largest > m + lag;
  if (any<Real>(lags)) {
    const Vec<Real> new_max = lags ? largest : m;
    // Lanes with m = -inf have summed nothing: any finite factor is correct for zeros.
    const Vec<Real> factor = exp2<Real, Precision::kReal>(lags ? m - new_max : Vec<Real>{});
    store(state.m + lane, new_max);
    store(state.l + lane, load(state.l + lane) * factor);
    rescale_o(lane, factor);
  }
}

// Memory to prefetch into L1.
struct PrefetchRange {
  const char* data;
  int64_t bytes;
};

// Converts s (rows x kQueries, rows a multiple of 32) to weights 2^(to_log2 s - m) and writes them
// to the operand tile of the next product. `keep`, if not null, holds the dropout bits. Meanwhile
// it prefetches that product's other operand and the next bias.
//
// If the tile does not overwrite s, maxima are computed only in a query's first block, and where
// the sum of a block's weights shows that they lag. The weights of that block are then recomputed.
template <typename Engine, typename Real, int64_t kQueries, typename Tile, typename Rescale>
void online_softmax(const Real* s, int64_t rows, Real to_log2, const uint64_t* keep,
                    SoftmaxState<Real, kQueries>& state, Rescale&& rescale_o, const Tile& tile,
                    PrefetchRange operand, const BiasPrefetch& bias) {
  using State = SoftmaxState<Real, kQueries>;
  constexpr int64_t W = kLanes<Real>;
  const int64_t steps = rows / 2 * (kQueries / (2 * W)), ahead = operand.bytes / steps;

  const auto update_max = [&](int64_t lane, Real lag) TK_INLINE_LAMBDA {
    Vec<Real> largest[2];
    column_maxima<Real, kQueries>(s + lane, rows, largest);
    for (int n = 0; n < 2; ++n) {
      update_maxima(state, lane + n * W, largest[n] * to_log2, lag, rescale_o);
    }
  };
  // Writes two vectors of columns to the tile, and their sums to `sum`.
  const auto exponentiate = [&](int64_t lane, Vec<Real>(&sum)[2]) TK_INLINE_LAMBDA {
    int64_t step = lane / (2 * W) * (rows / 2);
    Vec<Real> m[2];
    for (int n = 0; n < 2; ++n) {
      m[n] = load(state.m + lane + n * W);
      m[n] = m[n] == State::kMinusInfinity ? Vec<Real>{} : m[n];
      sum[n] = Vec<Real>{};
    }
    for (int64_t group = 0; group < rows; group += kKeyGroup) {
      for (int64_t row = group; row < group + kKeyGroup / 2; ++row, ++step) {
        prefetch(operand.data, step * ahead, ahead);
        bias.prefetch_row(step);
        Vec<Real> weight[2][2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
          for (int n = 0; n < 2; ++n) {
            const int64_t r = row + half * kKeyGroup / 2, column = lane + n * W;
            const int64_t at = r * kQueries + column;
            weight[half][n] = exp2<Real, Engine::kPrecision>(load(s + at) * to_log2 - m[n]);
            sum[n] += weight[half][n];
            if (keep) {
              weight[half][n] = mask_lanes<Real>(lane_bits<Real>(keep[r], column), weight[half][n]);
            }
          }
        }
        tile.put(row, lane, weight);
      }
    }
  };

  for (int64_t lane = 0; lane < kQueries; lane += 2 * W) {
    Vec<Real> sum[2];
    const bool starts = any<Real>((load(state.m + lane) == State::kMinusInfinity) |
                                  (load(state.m + lane + W) == State::kMinusInfinity));
    if (Tile::kOverwrites || starts) update_max(lane, kMaxLag);
    exponentiate(lane, sum);
    if (!Tile::kOverwrites && any<Real>((sum[0] > kMaxWeightSum) | (sum[1] > kMaxWeightSum))) {
      update_max(lane, 0);
      exponentiate(lane, sum);
    }
    state.add_to_l(lane, sum);
  }
}

}  // namespace tk::cpu::TK_ISA
