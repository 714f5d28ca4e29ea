// Decay within a chunk: sums of log-decays, and exponentials of their differences.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/linear/segments.cuh"

namespace tk::cuda {

// exp() of it is 0, also as a factor of the largest number. Smaller log-decays, such as -inf, count
// as it: differences of their sums are finite. As SMALLEST_LOG_DECAY in linear/reference.py.
constexpr float kSmallestLogDecay = -200.0f;

// The log-decay of a row of batch entry `at`, in key head h.
TK_DEVICE float log_decay_of(const LinearProblem& p, int at, int h, int row) {
  const int64_t* const stride = p.log_decay.stride;
  return static_cast<const float*>(
      p.log_decay.data)[at * stride[0] + h * stride[1] + row * stride[2]];
}

// NaN stays NaN.
TK_DEVICE float bounded(float log_decay) {
  return log_decay < kSmallestLogDecay ? kSmallestLogDecay : log_decay;
}

// exp2(x) of a float64 number, as the product of the exponentials of two float32 ones.
TK_DEVICE float exp2_of(double x) {
  const auto high = static_cast<float>(x);
  return exp2f(high) * exp2f(static_cast<float>(x - static_cast<double>(high)));
}

// In shared memory. G_i is the sum of the log-decays up to token i of the chunk in units of log(2),
// as high + low: rounded to one number, small differences of large sums would lose their bits.
template <int kTokens>
struct ChunkDecay {
  double total;  // G of the last token
  float kept;    // factor of the state
  float high[kTokens], low[kTokens];
  float from_start[kTokens];  // exp2(G_i)
  float to_end[kTokens];      // exp2(total - G_i)

  // Called by one warp for the chunk that begins at token `first`. Hidden keys do not decay.
  TK_DEVICE_METHOD void read(const LinearProblem& p, const Segment& s, int h, int first,
                             const TokenRange& visible) {
    constexpr int kEach = kTokens / kWarp;
    constexpr double kLog2E = 1.4426950408889634;
    const int own = lane_index() * kEach;
    double sums[kEach], sum = 0.0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = first + own + e;
      if (visible.holds(i)) sum += bounded(log_decay_of(p, s.at, h, s.first + i)) * kLog2E;
      sums[e] = sum;
    }
    double until = sum;  // including the tokens of earlier lanes
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const double x = __shfl_up_sync(~0u, until, distance);
      if (lane_index() >= distance) until += x;
    }
    const double all = __shfl_sync(~0u, until, kWarp - 1);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const double g = until - sum + sums[e];
      high[own + e] = static_cast<float>(g);
      low[own + e] = static_cast<float>(g - static_cast<double>(high[own + e]));
      from_start[own + e] = exp2_of(g);
      to_end[own + e] = exp2_of(all - g);
    }
    if (lane_index() == 0) {
      total = all;
      kept = exp2_of(all);
    }
  }

  // Decay between the tokens i and j, of which j is the earlier one.
  TK_DEVICE_METHOD float between(int i, int j) const {
    return exp2f((high[i] - high[j]) + (low[i] - low[j]));
  }
};

}  // namespace tk::cuda
