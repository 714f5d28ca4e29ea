// Gradient of log_decay; docs/linear.md, section 3.
#pragma once

#include "cuda/linear/decay.cuh"
#include "cuda/linear/running_state.cuh"

namespace tk::cuda {

struct DecayGradientArguments {
  LinearProblem problem;
  Segments segments;         // each is a chunk
  float* gradient;           // (B, H_kv, N)
  const float* of_queries;   // phi(q) . dphi(q), (slices, B, H_q, N): summed over the slices
  const float* of_keys;      // phi(k) . dphi(k), (slices, B, H_kv, N)
  States states, gradients;  // S and dS at the boundaries
  int slices;
};

constexpr int kDecayGradientThreads = 128, kMaxTokens = 64;

// This warp's part of the sum of products of `size` elements, in float64: the terms cancel.
TK_DEVICE double part_of_dot_product(const float* x, const float* y, int size) {
  double sum = 0.0;
  for (int n = static_cast<int>(threadIdx.x); n < size; n += kDecayGradientThreads) {
    sum += static_cast<double>(x[n]) * static_cast<double>(y[n]);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  return sum;
}

// phi(q) . dphi(q) - phi(k) . dphi(k) of row `row`, summed over the heads of the group.
TK_DEVICE double products_of(const DecayGradientArguments& a, const Segment& s, int h, int row) {
  const LinearProblem& p = a.problem;
  const int group = static_cast<int>(p.H_q / p.H_kv);
  const int64_t batches = p.cu_seqlens ? 1 : p.B;
  double sum = 0.0;
  for (int n = 0; n < a.slices; ++n) {
    const int64_t entry = n * batches + s.at;
    for (int g = h * group; g < (h + 1) * group; ++g) {
      sum += static_cast<double>(a.of_queries[(entry * p.H_q + g) * p.N + row]);
    }
    sum -= static_cast<double>(a.of_keys[(entry * p.H_kv + h) * p.N + row]);
  }
  return sum;
}

// dlog_decay of one chunk and key head: the sum of the products of all later tokens and its own,
// plus <dS, S> + <dz, z> at the end of the chunk.
static TK_KERNEL(kDecayGradientThreads, 1)
    decay_gradient_kernel(const __grid_constant__ DecayGradientArguments a) {
  const LinearProblem& p = a.problem;
  const int heads = static_cast<int>(p.H_kv), program = static_cast<int>(blockIdx.x);
  const int h = program % heads, i = static_cast<int>(threadIdx.x);
  const Segment s = segment_of(a.segments, program / heads);
  if (!s.exists()) return;
  const int first = s.index * a.segments.length;
  const bool is_token = i < a.segments.length && first + i < s.tokens;

  TK_SHARED_MEMORY(memory);
  double* const products = reinterpret_cast<double*>(memory);  // (kMaxTokens)
  double* const changes = products + kMaxTokens;               // of each warp
  if (i < kMaxTokens) products[i] = is_token ? products_of(a, s, h, s.first + first + i) : 0.0;
  const int64_t end = s.boundary + s.index + 1;
  const int D = static_cast<int>(p.D);
  const double change =
      part_of_dot_product(a.states.matrix(p, end, h), a.gradients.matrix(p, end, h),
                          D * static_cast<int>(p.D_v)) +
      part_of_dot_product(a.states.vector(p, end, h), a.gradients.vector(p, end, h), D);
  if (lane_index() == 0) changes[warp_index()] = change;
  __syncthreads();  // the products and changes are written

  if (!is_token) return;
  double sum = 0.0;
  for (int w = 0; w < kDecayGradientThreads / kWarp; ++w) sum += changes[w];
  for (int n = kMaxTokens - 1; n >= i; --n) sum += products[n];
  const int row = s.first + first + i;
  const bool counts =
      visible_of(p, s).holds(first + i) && !(log_decay_of(p, s.at, h, row) < kSmallestLogDecay);
  a.gradient[(s.at * p.H_kv + h) * p.N + row] = counts ? static_cast<float>(sum) : 0.0f;
}

}  // namespace tk::cuda
