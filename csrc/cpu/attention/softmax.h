// The online softmax: running maxima and denominators of one lane for each query.
#pragma once

#include "cpu/attention/dropout.h"
#include "cpu/engine/prefetch.h"

namespace tk::cpu::TK_ISA {

// The maximum that weights are relative to may lag behind the true one by this power of two, so
// that o is seldom rescaled.
constexpr int kLag = 8;

// What a block's weights may sum up to before the maximum is looked for: none is larger then.
constexpr int kMostWeight = 1 << kLag;

// m: in powers of two, -inf before the first visible key. l: the sum of 2^(score - m).
template <typename Real, int64_t kQueries>
struct SoftmaxState {
  static constexpr Real kNothing = -static_cast<Real>(__builtin_inf());
  Real m[kQueries];
  Real l[kQueries];

  void clear() {
    for (int64_t lane = 0; lane < kQueries; ++lane) {
      m[lane] = kNothing;
      l[lane] = 0;
    }
  }

  // Natural logarithm; -inf for a query that saw nothing. m is of any size: its product with the
  // logarithm of 2 is rounded only together with the rest.
  TK_INLINE_METHOD Vec<Real> lse(int64_t lane) const {
    constexpr Real kLn2 = static_cast<Real>(0.6931471805599453);
    constexpr Real kLn2Rest =
        static_cast<Real>(sizeof(Real) == 4 ? -1.9046542121259336e-9 : 2.3190468138462996e-17);
    const Vec<Real> largest = load(m + lane), sum = load(l + lane);
    const Vec<Real> rest = largest * kLn2Rest + log<Real>(sum);
    return sum == 0 ? broadcast(kNothing) : largest * kLn2 + rest;
  }
};

// The maximum of each column of s (rows x kQueries), for two vectors of columns.
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

// Raises the maxima of one vector of columns where they lag by more than `lag`; l follows, and o by
// shrink_o(lane, factors).
template <typename Real, int64_t kQueries, typename Shrink>
TK_INLINE void raise_maxima(SoftmaxState<Real, kQueries>& state, int64_t lane, Vec<Real> largest,
                            Real lag, Shrink&& shrink_o) {
  const Vec<Real> m = load(state.m + lane);
  const auto lags = largest > m + lag;
  if (any<Real>(lags)) {
    const Vec<Real> raised = lags ? largest : m;
    // Nothing was summed yet where m = -inf: any factor will do for zeros.
    const Vec<Real> shrink = exp2<Real, Precision::kReal>(lags ? m - raised : Vec<Real>{});
    store(state.m + lane, raised);
    store(state.l + lane, load(state.l + lane) * shrink);
    shrink_o(lane, shrink);
  }
}

// Memory that will be read soon.
struct Soon {
  const char* data;
  int64_t bytes;
};

// s (rows x kQueries, rows a multiple of 32) becomes weights 2^(to_log2 s - m), of which dropout
// keeps some, if `keep` is not null, on the way to the next product's tile. What follows, that
// product's other operand or a bias, is brought into the first-level cache meanwhile.
//
// Where the tile leaves s as it is, maxima are only looked for in a query's first block, and where
// the sum of a block's weights says that they lag: its weights are then computed again.
template <typename Engine, typename Real, int64_t kQueries, typename Tile, typename Shrink>
void online_softmax(const Real* s, int64_t rows, Real to_log2, const uint64_t* keep,
                    SoftmaxState<Real, kQueries>& state, Shrink&& shrink_o, const Tile& tile,
                    Soon operand, const BiasAhead& bias) {
  using State = SoftmaxState<Real, kQueries>;
  constexpr int64_t W = kLanes<Real>;
  const int64_t steps = rows / 2 * (kQueries / (2 * W)), ahead = operand.bytes / steps;

  const auto raise = [&](int64_t lane, Real lag) TK_INLINE_LAMBDA {
    Vec<Real> largest[2];
    column_maxima<Real, kQueries>(s + lane, rows, largest);
    for (int n = 0; n < 2; ++n) {
      raise_maxima(state, lane + n * W, largest[n] * to_log2, lag, shrink_o);
    }
  };
  // To the tile, and the sums of two vectors of columns to `sum`.
  const auto weigh = [&](int64_t lane, Vec<Real>(&sum)[2]) TK_INLINE_LAMBDA {
    int64_t step = lane / (2 * W) * (rows / 2);
    Vec<Real> m[2];
    for (int n = 0; n < 2; ++n) {
      m[n] = load(state.m + lane + n * W);
      m[n] = m[n] == State::kNothing ? Vec<Real>{} : m[n];
      sum[n] = Vec<Real>{};
    }
    for (int64_t group = 0; group < rows; group += kKeyGroup) {
      for (int64_t row = group; row < group + kKeyGroup / 2; ++row, ++step) {
        prefetch(operand.data, step * ahead, ahead);
        bias.fetch(step);
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
              weight[half][n] = keep_bits<Real>(bits_of<Real>(keep[r], column), weight[half][n]);
            }
          }
        }
        tile.put(row, lane, weight);
      }
    }
  };

  for (int64_t lane = 0; lane < kQueries; lane += 2 * W) {
    Vec<Real> sum[2];
    const bool begins = any<Real>((load(state.m + lane) == State::kNothing) |
                                  (load(state.m + lane + W) == State::kNothing));
    if (Tile::kOverwrites || begins) raise(lane, kLag);
    weigh(lane, sum);
    if (!Tile::kOverwrites && any<Real>((sum[0] > kMostWeight) | (sum[1] > kMostWeight))) {
      raise(lane, 0);
      weigh(lane, sum);
    }
    for (int n = 0; n < 2; ++n) {
      store(state.l + lane + n * W, load(state.l + lane + n * W) + sum[n]);
    }
  }
}

}  // namespace tk::cpu::TK_ISA
