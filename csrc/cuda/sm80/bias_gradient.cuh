// The gradient of a bias: ds summed over the dimensions in which it broadcasts.
//
// A block takes block_m x block_n elements of the bias and computes ds of every tile that they are
// added to: over batch entries and heads that share them and, where the bias has one row, over all
// rows. A bias without a key dimension needs no tiles, because a row of ds sums to dlse.
// docs/attention.md, section 3.
#pragma once

#include "cuda/sm80/backward.cuh"

namespace tk::cuda {

struct BiasGradientArguments : BackwardArguments {
  int own_b, own_h, own_m;  // sizes of the bias; own_m is 1 or M
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

template <typename Element, int kWidth>
TK_KERNEL((BackwardParts<Element, kWidth>::kThreads), 1)
bias_gradient_kernel(const __grid_constant__ BiasGradientArguments a) {
  using Parts = BackwardParts<Element, kWidth>;
  constexpr int kBlockM = Parts::kTile.block_m, kBlockN = Parts::kTile.block_n;
  constexpr int kThreads = Parts::kThreads;

  const BackwardParams& p = a.params;
  const int B = static_cast<int>(p.B), H_q = static_cast<int>(p.H_q), M = static_cast<int>(p.M);
  const int N = static_cast<int>(p.N), group = H_q / static_cast<int>(p.H_kv);
  const int all_rows = ceil_divide(M, kBlockM), row_blocks = a.own_m == 1 ? 1 : all_rows;
  const int program = static_cast<int>(blockIdx.x);
  const int own = program / a.blocks / row_blocks;
  const int first_row = program / a.blocks % row_blocks, j0 = program % a.blocks * kBlockN;

  TK_SHARED_MEMORY(memory);
  const SharedTile<Element, kBlockN, kWidth> k_tile{reinterpret_cast<Element*>(memory)};
  const SharedTile<Element, kBlockN, kWidth> v_tile{k_tile.data + kBlockN * kWidth};
  const SharedTile<Element, kBlockM, kWidth> q_tile{v_tile.data + kBlockN * kWidth};
  const SharedTile<Element, kBlockM, kWidth> do_tile{q_tile.data + kBlockM * kWidth};
  const int row = warp_index() / Parts::kColumnsM * Parts::Scores::kRows;
  const int column = warp_index() % Parts::kColumnsM * Parts::Scores::kColumns;

  typename Parts::Scores total;
  total.clear();
  for (int b = own / a.own_h; b < B; b += a.own_b) {
    const Sequence seq = sequence_of(a, b);
    const LiveKeys used = live_keys_of(a, seq);
    for (int h = own % a.own_h; h < H_q; h += a.own_h) {
      const auto q = rows_of<const Element>(p.q, b, h, 0, p.D);
      const auto k = rows_of<const Element>(p.k, b, h / group, 0, p.D);
      const auto v = rows_of<const Element>(p.v, b, h / group, 0, p.D_v);
      const auto d_o = rows_of<const Element>(p.d_o, b, h, 0, p.D_v);
      const int64_t at = statistics_offset(p, seq, h);
      for (int block = first_row; block < all_rows; block += row_blocks) {
        const int i0 = block * kBlockM;
        const Visible visible = tile_visible(p, seq, h, i0, min(i0 + kBlockM, M), j0, j0 + kBlockN);
        if (visible == Visible::kNone) continue;
        const UsedQueries there{M, a.lse + at};
        __syncthreads();  // the tiles before are read
        start_load<kThreads>(k_tile, k, j0, false, used);
        start_load<kThreads>(v_tile, v, j0, false, used);
        start_load<kThreads>(q_tile, q, i0, false, there);
        start_load<kThreads>(do_tile, d_o, i0, false, there);
        wait_copies<0>();
        __syncthreads();

        typename Parts::Scores s, dp;
        s.clear();
        dp.clear();
        add_product<Major::kK, Major::kK, kWidth>(s, q_tile, row, k_tile, column);
        add_product<Major::kK, Major::kK, kWidth>(dp, do_tile, row, v_tile, column);
        TileGradients<Element, Parts::Scores::kRows / 16> gradients{
            a, seq, h, i0 + row, j0 + column, visible == Visible::kAll, {}};
        gradients.terms.load(a.lse + at, a.delta + at, i0 + row, M);
        gradients.template apply<GradientsOf::kScores>(s, dp);
        for_each_element<Parts::Scores::kRows / 16, Parts::Scores::kColumns / 8>(
            [&](int m, int n, int e) { total.x[m][n][e] += dp.x[m][n][e]; });
      }
    }
  }

  const int64_t* const stride = p.dbias.stride;
  const int64_t first = own / a.own_h * stride[0] + own % a.own_h * stride[1];
  if (a.own_m != 1 || M == 1) {
    total.for_each([&](int i, int j, float x) {
      i += first_row * kBlockM + row;
      j += j0 + column;
      if (i < M && j < N) store_bias(p, first + i * stride[2] + j * stride[3], x);
    });
    return;
  }
  // One row: every warp's columns, through shared memory.
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(memory);  // (rows of warps, block_n)
#pragma unroll
  for (int n = 0; n < Parts::Scores::kColumns / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = 0.0f;
#pragma unroll
      for (int m = 0; m < Parts::Scores::kRows / 16; ++m) {
        sum += total.x[m][n][e] + total.x[m][n][e + 2];
      }
      for (int distance = 4; distance < kWarp; distance *= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
      }
      if (lane_index() < 4) {
        sums[warp_index() / Parts::kColumnsM * kBlockN + column + 8 * n + column_of(e)] = sum;
      }
    }
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < kBlockN && j0 + c < N; c += kThreads) {
    float sum = 0.0f;
    for (int w = 0; w < Parts::kTile.warps_m; ++w) sum += sums[w * kBlockN + c];
    store_bias(p, first + (j0 + c) * stride[3], sum);
  }
}

constexpr int kColumnThreads = 128;

// Of a bias without a key dimension: dlse, summed. A block for each element.
static TK_KERNEL(kColumnThreads, 1)
    bias_column_kernel(const __grid_constant__ BiasGradientArguments a) {
  const BackwardParams& p = a.params;
  const int B = static_cast<int>(p.B), H_q = static_cast<int>(p.H_q), M = static_cast<int>(p.M);
  const int program = static_cast<int>(blockIdx.x);
  const int own_i = program % a.own_m, own_h = program / a.own_m % a.own_h;
  const int own_b = program / a.own_m / a.own_h;
  const float* const dlse = static_cast<const float*>(p.dlse);
  const int rows = M / a.own_m, heads = H_q / a.own_h;
  const int64_t terms = dlse ? int64_t{B / a.own_b} * heads * rows : 0;
  float sum = 0.0f;
  for (int64_t n = threadIdx.x; n < terms; n += kColumnThreads) {
    const int64_t b = own_b + n / rows / heads * a.own_b, h = own_h + n / rows % heads * a.own_h;
    const int64_t at = (b * p.H_q + h) * p.lse_stride + own_i + n % rows * a.own_m;
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
  store_bias(p, own_b * stride[0] + own_h * stride[1] + own_i * stride[2], total);
}

}  // namespace tk::cuda
