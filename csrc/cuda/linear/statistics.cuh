// Statistics of queries, which the backward pass needs: 1 / l and delta = do . o.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/linear/segments.cuh"

namespace tk::cuda {

// Contiguous float32 (B, H_q, M); null without normalization.
struct Statistics {
  const float* normalizer;  // l
  const float* delta;

  // Reads those of one chunk into shared memory; (1, 0) beyond the last query.
  template <int kTokens>
  TK_DEVICE_METHOD void read(const LinearProblem& p, const Segment& s, int h, int first,
                             float (&inverse)[kTokens], float (&deltas)[kTokens]) const {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= kTokens) return;
    const int64_t at = (s.at * p.H_q + h) * p.M + s.first + first + i;
    const bool is_query = first + i < s.tokens;
    inverse[i] = is_query ? 1.0f / normalizer[at] : 1.0f;
    deltas[i] = is_query ? delta[at] : 0.0f;
  }
};

struct DeltaArguments {
  Strided o, d_o;
  float* delta;
  int64_t rows;  // of all heads and batch entries
  int H_q, M, D_v;
};

constexpr int kDeltaWarps = 4;

// One warp for each row.
template <typename Element>
TK_KERNEL(kDeltaWarps* kWarp, 1)
delta_kernel(const __grid_constant__ DeltaArguments a) {
  const int64_t n = int64_t{blockIdx.x} * kDeltaWarps + warp_index();
  if (n >= a.rows) return;
  const int i = static_cast<int>(n % a.M), h = static_cast<int>(n / a.M % a.H_q);
  const int b = static_cast<int>(n / a.M / a.H_q);
  const Element* const o = rows_of<const Element>(a.o, b, h, 0, a.D_v).at(i);
  const Element* const d_o = rows_of<const Element>(a.d_o, b, h, 0, a.D_v).at(i);
  float sum = 0.0f;
  for (int c = lane_index(); c < a.D_v; c += kWarp) sum += to_float(o[c]) * to_float(d_o[c]);
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (lane_index() == 0) a.delta[n] = sum;
}

}  // namespace tk::cuda
