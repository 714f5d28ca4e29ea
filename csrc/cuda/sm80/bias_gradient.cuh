// Bias gradient: ds summed over the dimensions in which the bias broadcasts.
//
// A CTA owns block_m x block_n elements of the bias. It recomputes ds of every tile that adds to
// them: all batch entries and heads that share them and, if the bias has one row, all rows. A bias
// without a key dimension needs no tiles, because a row of ds sums to dlse.
// docs/attention.md, section 3.
#pragma once

#include "cuda/sm80/relative_tiles.cuh"

namespace tk::cuda {

struct BiasGradientArguments : BackwardArguments {
  int bias_B, bias_H, bias_M;  // sizes of the bias; bias_M is 1 or M
};

TK_DEVICE void store_bias(const BackwardParams& p, int64_t at, float x) {
  switch (p.score.bias_dtype) {
    case DType::kFloat16:
      static_cast<Half*>(p.dbias.data)[at] = to_element<Half>(x);
      break;
    case DType::kBFloat16:
      static_cast<BFloat16*>(p.dbias.data)[at] = to_element<BFloat16>(x);
      break;
    default:
      static_cast<float*>(p.dbias.data)[at] = x;
  }
}

// Stores the columns of a bias with one row: `total` summed over all rows of the CTA. `first` is
// the offset of the row in dbias; `sums` is shared memory, (warps_m, block_n).
template <typename Warp>
TK_DEVICE void store_bias_row(const BackwardParams& p, int64_t first, int j0, const Warp& warp,
                              const typename Warp::Scores& total, float* sums) {
  constexpr int kBlockN = Warp::kTile.block_n;
  __syncthreads();  // the last tiles have been read, and may be overwritten
#pragma unroll
  for (int n = 0; n < Warp::Scores::kColumns / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = 0.0f;
#pragma unroll
      for (int m = 0; m < Warp::Scores::kRows / 16; ++m) {
        sum += total.x[m][n][e] + total.x[m][n][e + 2];
      }
      for (int distance = 4; distance < kWarp; distance *= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
      if (lane_index() < 4) {
        sums[warp_index() / Warp::kColumnsM * kBlockN + warp.column_m + 8 * n + column_of(e)] = sum;
      }
    }
  }
  __syncthreads();
  const int N = static_cast<int>(p.N);
  for (int c = static_cast<int>(threadIdx.x); c < kBlockN && j0 + c < N; c += Warp::kThreads) {
    float sum = 0.0f;
    for (int w = 0; w < Warp::kTile.warps_m; ++w) sum += sums[w * kBlockN + c];
    store_bias(p, first + (j0 + c) * p.dbias.stride[3], sum);
  }
}

template <typename Element, int kWidth, Products kProducts>
TK_KERNEL((BackwardWarp<Element, kWidth, kProducts>::kThreads), 1)
bias_gradient_kernel(const __grid_constant__ BiasGradientArguments a) {
  using Warp = BackwardWarp<Element, kWidth, kProducts>;
  constexpr int kBlockM = Warp::kTile.block_m, kBlockN = Warp::kTile.block_n;

  const BackwardParams& p = a.params;
  const int B = static_cast<int>(p.B), H_q = static_cast<int>(p.H_q), M = static_cast<int>(p.M);
  const int N = static_cast<int>(p.N);
  const int all_rows = ceil_divide(M, kBlockM), row_blocks = a.bias_M == 1 ? 1 : all_rows;
  const int program = static_cast<int>(blockIdx.x);
  const int bias_head = program / a.blocks / row_blocks;  // of bias_B * bias_H
  const int first_row = program / a.blocks % row_blocks, j0 = program % a.blocks * kBlockN;

  TK_SHARED_MEMORY(memory);
  const GradientOperands<Element, kWidth, kProducts> operands{reinterpret_cast<Element*>(memory)};
  const Warp warp;
  typename Warp::Scores total;
  total.clear();
  for (int b = bias_head / a.bias_H; b < B; b += a.bias_B) {
    const Sequence seq = sequence_of(a, b);
    for (int h = bias_head % a.bias_H; h < H_q; h += a.bias_H) {
      for (int block = first_row; block < all_rows; block += row_blocks) {
        const int i0 = block * kBlockM;
        const Visible visible = tile_visible(p, seq, h, i0, min(i0 + kBlockM, M), j0, j0 + kBlockN);
        if (visible == Visible::kEmpty) continue;
        add_score_gradients(a, seq, h, i0, j0, visible == Visible::kFull, operands, warp, total);
      }
    }
  }

  const int64_t* const stride = p.dbias.stride;
  const int64_t first = bias_head / a.bias_H * stride[0] + bias_head % a.bias_H * stride[1];
  if (a.bias_M == 1 && M != 1) {
    store_bias_row(p, first, j0, warp, total, reinterpret_cast<float*>(memory));
    return;
  }
  total.for_each([&](int i, int j, float x) {
    i += first_row * kBlockM + warp.row_m;
    j += j0 + warp.column_m;
    if (i < M && j < N) store_bias(p, first + i * stride[2] + j * stride[3], x);
  });
}

constexpr int kColumnThreads = 128;

// Gradient of a bias without a key dimension: dlse summed over the rows that share an
// element. One CTA per element.
static TK_KERNEL(kColumnThreads, 1)
    bias_column_kernel(const __grid_constant__ BiasGradientArguments a) {
  const BackwardParams& p = a.params;
  const int B = static_cast<int>(p.B), H_q = static_cast<int>(p.H_q), M = static_cast<int>(p.M);
  const int program = static_cast<int>(blockIdx.x);
  const int bias_i = program % a.bias_M, bias_h = program / a.bias_M % a.bias_H;
  const int bias_b = program / a.bias_M / a.bias_H;
  const float* const dlse = static_cast<const float*>(p.dlse);
  const int rows = M / a.bias_M, heads = H_q / a.bias_H;
  const int64_t count = dlse ? int64_t{B / a.bias_B} * heads * rows : 0;
  float sum = 0.0f;
  for (int64_t n = threadIdx.x; n < count; n += kColumnThreads) {
    const int64_t b = bias_b + n / rows / heads * a.bias_B;
    const int64_t h = bias_h + n / rows % heads * a.bias_H;
    const int64_t at = (b * p.H_q + h) * p.lse_stride + bias_i + n % rows * a.bias_M;
    if (a.lse[at] < INFINITY) sum += dlse[at];
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  TK_SHARED_MEMORY(memory);
  float* const sums = reinterpret_cast<float*>(memory);
  if (lane_index() == 0) sums[warp_index()] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0.0f;
  for (int w = 0; w < kColumnThreads / kWarp; ++w) total += sums[w];
  const int64_t* const stride = p.dbias.stride;
  store_bias(p, bias_b * stride[0] + bias_h * stride[1] + bias_i * stride[2], total);
}

}  // namespace tk::cuda
