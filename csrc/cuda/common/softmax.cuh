// Online softmax: running maximum and denominator of each row. docs/attention.md, section 5.
#pragma once

#include "cuda/common/scores.cuh"

namespace tk::cuda {

// Reductions over the four lanes that hold a row.
TK_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
TK_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// lse of a row, and its rounding error. By default the row is fully masked.
struct LogSumExp {
  float lse = -INFINITY, rest = 0.0f;
};

TK_DEVICE LogSumExp log_sum_exp(float m, float l) {
  const float log_l = logf(l), lse = m + log_l, added = lse - m;  // Knuth's TwoSum
  return {lse, (m - (lse - added)) + (log_l - added)};
}

TK_DEVICE void store_lse(const ForwardParams& p, int64_t row, const LogSumExp& x) {
  static_cast<float*>(p.lse)[row] = x.lse;
  if (p.lse_rest) static_cast<float*>(p.lse_rest)[row] = x.rest;
}

// o and l are rescaled only if the true maximum exceeds m by more than this, in powers of 2.
// Rescaling multiplies every element of o, and without a threshold some row of a warp nearly always
// has a new maximum.
constexpr float kRescaleThreshold = 8.0f;

// Softmax state of 16 kM rows; a lane holds two rows of every 16.
template <int kM>
struct SoftmaxState {
  float m[kM][2];  // maximum, in the unit of the scores; -inf before the first visible key
  float l[kM][2];  // denominator: the sum over this lane's columns
  bool large;      // an m of this lane exceeds kLargestFused, as a power of 2

  TK_DEVICE_METHOD void clear() {
    large = false;
    for_each_row([&](int k, int half) {
      m[k][half] = -INFINITY;
      l[k][half] = 0.0f;
    });
  }

  // Replaces scores by weights relative to m; updates m and l, and rescales o. Multiplication by
  // `unit` converts scores to powers of 2.
  template <typename Element, int kN, int kColumns>
  TK_DEVICE_METHOD void update(Accumulator<kM, kN>& s, Accumulator<kM, kColumns>& o, float unit) {
    update_max<Element>(s, unit,
                        [&](int k, int half, float factor) { multiply(o, k, half, factor); });
    exponentiate<Element>(s, unit);
  }

  // Updates m if a score of the warp exceeds it by more than kRescaleThreshold. In that case l is
  // rescaled, and rescale(k, half, factor) is called for every row to rescale the caller's sums.
  template <typename Element, int kN, typename Rescale>
  TK_DEVICE_METHOD void update_max(const Accumulator<kM, kN>& s, float unit,
                                   const Rescale& rescale) {
    float largest[kM][2];
    bool rescales = false;
    for_each_row([&](int k, int half) {
      float x = -INFINITY;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        x = fmaxf(x, fmaxf(s.x[k][n][2 * half], s.x[k][n][2 * half + 1]));
      }
      largest[k][half] = quad_max(x);
      rescales |= (largest[k][half] - m[k][half]) * unit > kRescaleThreshold;
    });
    if (!__any_sync(~0u, rescales)) return;
    for_each_row([&](int k, int half) {
      const float before = m[k][half];
      m[k][half] = fmaxf(before, largest[k][half]);
      const float factor = weight(before, base(k, half), unit);
      large |= sizeof(Element) == 2 && fabsf(base(k, half) * unit) > kLargestFused;
      l[k][half] *= factor;
      rescale(k, half, factor);
    });
  }

  // Replaces scores by weights relative to m, and adds them to l.
  template <typename Element, int kN>
  TK_DEVICE_METHOD void exponentiate(Accumulator<kM, kN>& s, float unit) {
    if (large) subtract_max(s);
    for_each_row([&](int k, int half) {
      const float from = large ? 0.0f : base(k, half);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s.x[k][n][e] = fused_weight<Element>(s.x[k][n][e], from, unit);
          l[k][half] += s.x[k][n][e];
        }
      }
    });
  }

  // Calls visit(k, half, share, lse) for every row after the last key; lse is a LogSumExp. o is to
  // be multiplied by `share`, which includes `factor`. Multiplication by `unit` converts scores to
  // natural logarithms.
  template <typename Visit>
  TK_DEVICE_METHOD void finish(float factor, float unit, const Visit& visit) const {
    for_each_row([&](int k, int half) {
      const float sum = quad_sum(l[k][half]);
      const bool empty = m[k][half] == -INFINITY && sum == 0.0f;
      LogSumExp lse;
      if (!empty) lse = log_sum_exp(__fmul_rn(m[k][half], unit), sum);
      visit(k, half, empty ? 0.0f : factor / sum, lse);
    });
  }

  template <int kColumns>
  TK_DEVICE_METHOD static void multiply(Accumulator<kM, kColumns>& o, int k, int half,
                                        float factor) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      o.x[k][n][2 * half] *= factor;
      o.x[k][n][2 * half + 1] *= factor;
    }
  }

 private:
  template <int kN>
  TK_DEVICE_METHOD void subtract_max(Accumulator<kM, kN>& s) const {
    for_each_row([&](int k, int half) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        s.x[k][n][2 * half] -= base(k, half);
        s.x[k][n][2 * half + 1] -= base(k, half);
      }
    });
  }

  // Calls visit(k, half) for row 16 k + 8 half + lane / 4.
  template <typename Visit>
  TK_DEVICE_METHOD static void for_each_row(const Visit& visit) {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) visit(r / 2, r % 2);
  }

  TK_DEVICE_METHOD float base(int k, int half) const {
    return m[k][half] == -INFINITY ? 0.0f : m[k][half];
  }
};

}  // namespace tk::cuda
