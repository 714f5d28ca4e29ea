// The online softmax: a running maximum and denominator for each row. docs/attention.md, section 5.
#pragma once

#include "cuda/common/scores.cuh"

namespace tk::cuda {

// Four lanes hold a row.
TK_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
TK_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The maximum that weights are relative to may lag behind the true one by this power of 2: bringing
// o to a new one is a product for each of its elements, and without a lag some row of a warp nearly
// always has a new one.
constexpr float kLag = 8.0f;

// Of 16 kM rows; a lane holds two of every 16.
template <int kM>
struct SoftmaxState {
  float m[kM][2];  // in the scores' unit; -inf before the first visible key
  float l[kM][2];  // this lane's share

  TK_DEVICE_METHOD void clear() {
    for_each_row([&](int k, int half) {
      m[k][half] = -INFINITY;
      l[k][half] = 0.0f;
    });
  }

  // Scores become weights relative to m, and o and l are brought to it.
  template <typename Element, int kN, int kColumns>
  TK_DEVICE_METHOD void update(Accumulator<kM, kN>& s, Accumulator<kM, kColumns>& o, float unit) {
    update_max<Element>(s, unit,
                        [&](int k, int half, float factor) { multiply(o, k, half, factor); });
    exponentiate<Element>(s, unit);
  }

  // Raises m where scores of the warp are too far above it, and brings l to it. Then what was
  // summed with weights is to be multiplied: rescale(k, half, factor), for every row.
  template <typename Element, int kN, typename Rescale>
  TK_DEVICE_METHOD void update_max(const Accumulator<kM, kN>& s, float unit,
                                   const Rescale& rescale) {
    float largest[kM][2];
    bool is_far = false;
    for_each_row([&](int k, int half) {
      float x = -INFINITY;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        x = fmaxf(x, fmaxf(s.x[k][n][2 * half], s.x[k][n][2 * half + 1]));
      }
      largest[k][half] = quad_max(x);
      is_far |= (largest[k][half] - m[k][half]) * unit > kLag;
    });
    if (!__any_sync(~0u, is_far)) return;
    for_each_row([&](int k, int half) {
      const float before = m[k][half];
      m[k][half] = fmaxf(before, largest[k][half]);
      const float factor = weight<Element>(before, base(k, half), unit);
      l[k][half] *= factor;
      rescale(k, half, factor);
    });
  }

  // Scores become weights relative to m, and are added to l.
  template <typename Element, int kN>
  TK_DEVICE_METHOD void exponentiate(Accumulator<kM, kN>& s, float unit) {
    for_each_row([&](int k, int half) {
      const float from = base(k, half);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s.x[k][n][e] = weight<Element>(s.x[k][n][e], from, unit);
          l[k][half] += s.x[k][n][e];
        }
      }
    });
  }

  // When all keys are summed: visit(k, half, share, lse), for every row. o is to be multiplied by
  // the share, which includes `factor`; `unit` is a score's, in natural logarithms.
  template <typename Visit>
  TK_DEVICE_METHOD void finish(float factor, float unit, const Visit& visit) const {
    for_each_row([&](int k, int half) {
      const float sum = quad_sum(l[k][half]);
      const bool empty = m[k][half] == -INFINITY && sum == 0.0f;
      const float lse = empty ? -INFINITY : m[k][half] * unit + logf(sum);
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
  // visit(k, half): row 8 half + lane / 4 of the k-th 16.
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
