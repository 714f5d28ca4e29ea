// Online softmax: running maximum and denominator of one query in each lane.
//
// Weights are 2^(u (s - m)), with u = ScoreUnit::log2. One fused operation per score computes the
// exponent u s - round(u m); the rounding error becomes a factor of l and o, which cancels. Where
// that error could exceed 1/2, m is first subtracted from the scores, which is exact near m. The
// exponent of a visible key is therefore never far above kMaxLag, however large the scores are.
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

// Above this, u m is a multiple of 2. Without fused operations u s is rounded too, and that error
// does not cancel.
template <typename Real>
#if defined(__FMA__)
constexpr Real kLargestFused = static_cast<Real>(sizeof(Real) == 4 ? 0x1p24 : 0x1p53);
#else
constexpr Real kLargestFused = 64;
#endif

// True in lanes whose maximum m is subtracted from the scores.
template <typename Real>
TK_INLINE Vec<IntOf<Real>> is_large(Vec<Real> m, Real u) {
  const Vec<Real> x = m * u;
  return (x > kLargestFused<Real>) | (x < -kLargestFused<Real>);
}

// u m - round(u m), the error of exponents relative to m; 0 where m is subtracted from the scores.
template <typename Real>
TK_INLINE Vec<Real> rounding_of(Vec<Real> m, Real u) {
  const Vec<Real> error = multiply_subtract<Real>(m, broadcast(u), rounded<Real>(m * u));
  return is_large(m, u) ? Vec<Real>{} : error;
}

// lse of each query, and its rounding error; -inf and 0 for a fully masked one.
template <typename Real>
struct LogSumExp {
  Vec<Real> lse, rest;

  // Natural logarithm of l 2^(u m - error). Scaled scores are rounded as in the backward pass: the
  // weight of a score that is much larger than all others is then 1.
  TK_INLINE_METHOD LogSumExp(Vec<Real> m, Vec<Real> l, Vec<Real> error, ScoreUnit<Real> unit) {
    constexpr Real kLn2 = static_cast<Real>(0.6931471805599453);
    const Vec<Real> largest = rounded<Real>(m * unit.natural);
    const Vec<Real> log_l = log<Real>(l) - error * kLn2;
    const Vec<Real> sum = largest + log_l, added = sum - largest;  // Knuth's TwoSum
    lse = l == 0 ? broadcast(-static_cast<Real>(__builtin_inf())) : sum;
    rest = l == 0 ? Vec<Real>{} : (largest - (sum - added)) + (log_l - added);
  }
};

// m: running maximum of the scores, -inf before the first visible key. l: the sum of the weights.
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

  // For two vectors of columns. m = -inf, before the first visible key, counts as large.
  TK_INLINE_METHOD bool any_large(int64_t lane, Real u) const {
    return any<Real>(is_large(load(m + lane), u) | is_large(load(m + lane + kLanes<Real>), u));
  }

  TK_INLINE_METHOD LogSumExp<Real> log_sum_exp(int64_t lane, ScoreUnit<Real> unit) const {
    const Vec<Real> largest = load(m + lane);
    return {largest, load(l + lane), rounding_of(largest, unit.log2), unit};
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

// Updates the maxima of one vector of columns where they lag by more than `lag` in base 2, and
// rescales l. rescale_o(lane, factors) rescales o.
template <typename Real, int64_t kQueries, typename Rescale>
TK_INLINE void update_maxima(SoftmaxState<Real, kQueries>& state, int64_t lane, Vec<Real> largest,
                             Real u, Real lag, Rescale&& rescale_o) {
  const Vec<Real> m = load(state.m + lane);
  const auto lags = (largest - m) * u > lag;
  if (any<Real>(lags)) {
    const Vec<Real> new_max = lags ? largest : m;
    const Vec<Real> power = (m - new_max) * u + (rounding_of(new_max, u) - rounding_of(m, u));
    // Lanes with m = -inf have summed nothing: any finite factor is correct for zeros.
    const Vec<Real> factor = exp2<Real, Precision::kReal>(lags ? power : Vec<Real>{});
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

// Maxima of two vectors of columns, prepared for the exponents u s - base.
template <typename Real, int64_t kQueries>
struct ColumnBase {
  bool subtracted = false;  // from s, in place
  Vec<Real> base[2];

  TK_INLINE_METHOD ColumnBase(const SoftmaxState<Real, kQueries>& state, int64_t lane, Real u,
                              Real* s, int64_t rows) {
    Vec<Real> m[2];
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      m[n] = load(state.m + lane + n * kLanes<Real>);
      m[n] = m[n] == state.kMinusInfinity ? Vec<Real>{} : m[n];
      base[n] = rounded<Real>(m[n] * u);
    }
    if (!any<Real>(is_large(m[0], u) | is_large(m[1], u))) return;
    subtracted = true;
    for (int n = 0; n < 2; ++n) {
      base[n] = -rounding_of(m[n], u);
      for (int64_t r = 0; r < rows; ++r) {
        Real* const x = s + r * kQueries + n * kLanes<Real>;
        store(x, load(x) - m[n]);
      }
    }
  }
};

// Converts s (rows x kQueries, rows a multiple of 32) to weights and writes them to the operand
// tile of the next product. `keep`, if not null, holds the dropout bits. Meanwhile it prefetches
// that product's other operand and the next bias.
//
// If the tile does not overwrite s, maxima are computed only in a query's first block, where scores
// are large, and where the sum of a block's weights shows that they lag. The weights of that block
// are then recomputed.
template <typename Engine, typename Real, int64_t kQueries, typename Tile, typename Rescale>
void online_softmax(Real* s, int64_t rows, Real u, const uint64_t* keep,
                    SoftmaxState<Real, kQueries>& state, Rescale&& rescale_o, const Tile& tile,
                    PrefetchRange operand, const BiasPrefetch& bias) {
  using Base = ColumnBase<Real, kQueries>;
  constexpr int64_t W = kLanes<Real>;
  const int64_t steps = rows / 2 * (kQueries / (2 * W)), ahead = operand.bytes / steps;

  const auto update_max = [&](int64_t lane, Real lag) TK_INLINE_LAMBDA {
    Vec<Real> largest[2];
    column_maxima<Real, kQueries>(s + lane, rows, largest);
    for (int n = 0; n < 2; ++n) {
      update_maxima(state, lane + n * W, largest[n], u, lag, rescale_o);
    }
  };
  // Writes two vectors of columns to the tile, and their sums to `sum`.
  const auto exponentiate = [&](int64_t lane, const Base& base,
                                Vec<Real>(&sum)[2]) TK_INLINE_LAMBDA {
    int64_t step = lane / (2 * W) * (rows / 2);
    sum[0] = sum[1] = Vec<Real>{};
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
            weight[half][n] = exp2<Real, Engine::kPrecision>(
                multiply_subtract<Real>(load(s + at), broadcast(u), base.base[n]));
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
    if (Tile::kOverwrites || state.any_large(lane, u)) update_max(lane, kMaxLag);
    const Base base(state, lane, u, s + lane, rows);
    exponentiate(lane, base, sum);
    if (!Tile::kOverwrites && !base.subtracted &&
        any<Real>((sum[0] > kMaxWeightSum) | (sum[1] > kMaxWeightSum))) {
      update_max(lane, 0);
      exponentiate(lane, Base(state, lane, u, s + lane, rows), sum);
    }
    state.add_to_l(lane, sum);
  }
}

}  // namespace tk::cpu::TK_ISA
