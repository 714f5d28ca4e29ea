// Combines the partial results that several CTAs wrote for one unit of decoding.
// docs/attention.md, section 5.
//
//   m = max_c m_c,  l = sum_c exp(m_c - m) l_c,  o = sum_c exp(m_c - m) l_c / l o_c
#pragma once

#include "cuda/common/softmax.cuh"
#include "cuda/sm80/decode_schedule.cuh"

namespace tk::cuda {

constexpr int kCombineWarps = 4;

TK_DEVICE float warp_max(float x) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  }
  return x;
}

// One CTA per row of o. Warp w adds the partial results w, w + kCombineWarps, ...
template <typename Element, int kWidth>
TK_KERNEL(kCombineWarps* kWarp, 1)
decode_combine_kernel(const __grid_constant__ DecodeArguments a) {
  constexpr int kColumns = (kWidth + kWarp - 1) / kWarp;  // columns per lane
  const Problem& p = a.params;
  const auto [n_head, i] = a.by_M.divide(static_cast<int>(blockIdx.x));
  const auto [b, h] = a.by_H_q.divide(n_head);
  const auto [h_kv, member] = a.by_group.divide(h);
  const auto [tile, r] = a.by_rows.divide(member * static_cast<int>(p.M) + i);
  const DecodeOwners owners = a.owners[b * a.units + h_kv * a.row_tiles + tile];
  if (owners.first == owners.last) return;  // a single CTA has written the final result
  // Within bounds even if lengths changed during the kernel before.
  const int first = max(owners.first, 0), last = min(owners.last, a.blocks - 1);
  const auto partial_row = [&, r = r](int n) { return partial_slot(n, n == first) * a.rows() + r; };

  TK_SHARED_MEMORY(memory);
  float* const o_sums = reinterpret_cast<float*>(memory);  // (kCombineWarps, kWidth)
  float* const sums = o_sums + kCombineWarps * kWidth;     // (kCombineWarps)
  float largest = -INFINITY;
  for (int n = first + lane_index(); n <= last; n += kWarp) {
    largest = fmaxf(largest, a.m[partial_row(n)]);
  }
  largest = warp_max(largest);
  const float base = largest == -INFINITY ? 0.0f : largest;
  float sum = 0.0f, o[kColumns] = {};
#pragma unroll 4
  for (int n = first + warp_index(); n <= last; n += kCombineWarps) {
    const int at = partial_row(n);
    const float share = exp2_approx((a.m[at] - base) * kLog2E) * a.l[at];
    sum += share;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = lane_index() + c * kWarp;
      if (column < p.D_v) o[c] += share * a.o[at * kWidth + column];
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    o_sums[warp_index() * kWidth + lane_index() + c * kWarp] = o[c];
  }
  if (lane_index() == 0) sums[warp_index()] = sum;
  __syncthreads();  // the sums of all warps are written

  sum = 0.0f;
  for (int n = 0; n < kCombineWarps; ++n) sum += sums[n];
  const bool empty = largest == -INFINITY && sum == 0.0f;
  const auto o_rows = rows_of<Element>(a.params.o, b, h, 0, p.D_v);
  for (int c = static_cast<int>(threadIdx.x); c < o_rows.width; c += kCombineWarps * kWarp) {
    float x = 0.0f;
    for (int n = 0; n < kCombineWarps; ++n) x += o_sums[n * kWidth + c];
    o_rows.at(i)[c] = to_element<Element>(empty ? 0.0f : x / sum);
  }
  if (threadIdx.x == 0) {
    LogSumExp lse;
    if (!empty) lse = log_sum_exp(largest, sum);
    store_lse(a.params, (b * p.H_q + h) * p.lse_stride + i, lse);
  }
}

}  // namespace tk::cuda
