// Backward pass with relative keys: each gradient by a kernel that recomputes ds of its tiles.
//
//   dv_j = sum_i z p_ij do_i,  dk_j = sum_i da_ij q_i              CTA: block of keys
//   dq_i = sum_j da_ij (k_j + r_e),  e = i + offset - j            CTA: block of queries
//   dr_e = sum of da_ij q_i over i - j + offset = e, and over      CTA: band of distances
//          the sequences and heads that share r
//
// A tile of da is stored twice: by key and by distance. In the second form the sums over e are
// matrix products. Every sum has a fixed order. docs/attention.md, section 3.
#pragma once

#include "cuda/sm80/relative_gradient.cuh"

namespace tk::cuda {

template <typename Element, int kWidth>
TK_KERNEL((RelativeWarp<Element, kWidth>::kThreads), 1)
relative_dkdv_kernel(const __grid_constant__ BackwardArguments a) {
  using Warp = RelativeWarp<Element, kWidth>;
  constexpr int kBlock = Warp::kTile.block_m;
  constexpr Major kMN = Major::kMN;

  const BackwardParams& p = a.params;
  const int H_kv = static_cast<int>(p.H_kv), group = static_cast<int>(p.H_q) / H_kv;
  const int program = static_cast<int>(blockIdx.x), h_kv = program / a.blocks % H_kv;
  const Sequence seq = sequence_of(a, program / a.blocks / H_kv);
  const int j0 = program % a.blocks * kBlock, j1 = j0 + kBlock;
  if (j0 >= seq.N) return;

  TK_SHARED_MEMORY(memory);
  const RelativeOperands<Element, kWidth> operands{reinterpret_cast<Element*>(memory)};
  const Warp warp;
  typename Warp::Keys dk, dv;
  dk.clear();
  dv.clear();
  for (int h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    const auto visible = [&](int m) {
      return tile_visible(p, seq, h, m * kBlock, min((m + 1) * kBlock, seq.M), j0, j1);
    };
    BlockIterator iterator(query_blocks(seq, j0, j1, kBlock), visible);
    for (Block block = iterator.next(); block.index >= 0; block = iterator.next()) {
      typename Warp::Scores s, dp;
      differentiate_scores<GradientsOf::kProducts>(a, seq, h, block.index * kBlock, j0, block.full,
                                                   operands, warp, s, dp);
      store_shared(operands.p(), warp.row_m, warp.column_m, s);
      store_shared(operands.ds(), warp.row_m, warp.column_m, dp);
      __syncthreads();  // p and ds are written
      add_product<kMN, kMN, kBlock>(dv, operands.p(), warp.row_n, operands.d_o(), warp.column_n);
      add_product<kMN, kMN, kBlock>(dk, operands.ds(), warp.row_n, operands.q(), warp.column_n);
    }
  }

  const auto dk_rows = rows_of<Element>(p.dk, seq.at, h_kv, seq.first_k, p.D);
  const auto dv_rows = rows_of<Element>(p.dv, seq.at, h_kv, seq.first_k, p.D_v);
  const float scale = a.score.scale;
  store_rows(dk_rows, dk, j0 + warp.row_n, warp.column_n, seq.N, scale);
  store_rows(dv_rows, dv, j0 + warp.row_n, warp.column_n, seq.N, 1.0f);
}

template <typename Element, int kWidth>
TK_KERNEL((RelativeWarp<Element, kWidth>::kThreads), 1)
relative_dq_kernel(const __grid_constant__ BackwardArguments a) {
  using Warp = RelativeWarp<Element, kWidth>;
  constexpr int kBlock = Warp::kTile.block_m;
  constexpr Major kK = Major::kK, kMN = Major::kMN;

  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), H_q = static_cast<int>(p.H_q);
  const int h = program / a.blocks % H_q, i0 = program % a.blocks * kBlock;
  const Sequence seq = sequence_of(a, program / a.blocks / H_q);
  if (i0 >= seq.M) return;
  const int i1 = min(i0 + kBlock, seq.M);

  TK_SHARED_MEMORY(memory);
  const RelativeOperands<Element, kWidth> operands{reinterpret_cast<Element*>(memory)};
  const auto keys = relative_keys_of<Element>(a, seq, h);
  const Warp warp;
  typename Warp::Queries dq;
  dq.clear();
  const auto visible = [&](int n) {
    return tile_visible(p, seq, h, i0, i1, n * kBlock, (n + 1) * kBlock);
  };
  BlockIterator iterator(key_blocks(seq, i0, i1, kBlock), visible);
  for (Block block = iterator.next(); block.index >= 0; block = iterator.next()) {
    const int j0 = block.index * kBlock;
    typename Warp::Scores s, dp;
    differentiate_scores<GradientsOf::kProducts>(a, seq, h, i0, j0, block.full, operands, warp, s,
                                                 dp);
    __syncthreads();  // v and do have been read
    const auto band = operands.band();
    band.template start_load<Warp::kThreads>(keys, i0, j0);
    store_shared(operands.ds(), warp.row_m, warp.column_m, dp);
    store_by_distance(operands.ds_by_distance(), warp.row_m, warp.column_m, dp);
    wait_copies<0>();
    __syncthreads();  // the band has arrived; ds is written
    add_product<kK, kMN, kBlock>(dq, operands.ds(), warp.row_q, operands.k(), warp.column_q);
    add_product<kK, kMN, 2 * kBlock>(dq, operands.ds_by_distance(), warp.row_q, band.tile(),
                                     warp.column_q);
  }
  const auto rows = rows_of<Element>(p.dq, seq.at, h, seq.first_q, p.D);
  store_rows(rows, dq, i0 + warp.row_q, warp.column_q, seq.M, a.score.scale);
}

// The distances of a band, and the columns of a warp: dr of one tile has 2 block rows.
template <typename Element, int kWidth>
using DistanceSums = Accumulator<2, RelativeWarp<Element, kWidth>::Queries::kColumns / 8>;

// Adds dr to the sums of the band, (band_distances, kWidth) in float32.
template <typename Element, int kWidth>
TK_DEVICE void add_distances(const RelativeWarp<Element, kWidth>& warp,
                             const DistanceSums<Element, kWidth>& dr, int first, float* sums) {
  constexpr int kDistances = 2 * RelativeWarp<Element, kWidth>::kTile.block_m - 1;
  __syncthreads();  // other elements of dr have been added here
  dr.for_each_pair([&](int row, int column, float x, float y) {
    const int c = 2 * warp.row_q + row;
    if (c >= kDistances) return;
    float* const to = sums + int64_t{first + c} * kWidth + warp.column_q + column;
    to[0] += x;
    to[1] += y;
  });
}

// Arguments as for relative_gradient_kernel; the rows of `distance_sums` have kWidth elements.
template <typename Element, int kWidth>
TK_KERNEL((RelativeWarp<Element, kWidth>::kThreads), 1)
relative_keys_gradient_kernel(const __grid_constant__ RelativeGradientArguments a) {
  using Warp = RelativeWarp<Element, kWidth>;
  constexpr int kBlock = Warp::kTile.block_m;
  constexpr int kSums = Warp::kBandDistances * kWidth;
  constexpr Major kMN = Major::kMN;

  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), band = program % a.blocks;
  const int table = program / a.blocks % a.tables, group = program / a.blocks / a.tables;
  const int heads = a.tables == 1 ? static_cast<int>(p.H_q) : 1;  // that share the keys
  float* const sums = a.distance_sums + int64_t{program} * kSums;
  for (int n = static_cast<int>(threadIdx.x); n < kSums; n += Warp::kThreads) sums[n] = 0.0f;

  TK_SHARED_MEMORY(memory);
  const RelativeOperands<Element, kWidth> operands{reinterpret_cast<Element*>(memory)};
  const Warp warp;
  DistanceSums<Element, kWidth> dr;
  dr.clear();
  int first = -1;  // of the tiles in dr; -1 = none
  for (int64_t n = group; n < int64_t{a.sequences} * heads; n += a.groups) {
    const Sequence seq = sequence_of(a, static_cast<int>(n / heads));
    const int h = table + static_cast<int>(n % heads);
    const Strip<kBlock, kBlock> strip(a, seq, band);
    const auto visible = [&](int block) {
      const int j0 = block * kBlock, i0 = j0 + strip.diagonal;
      return tile_visible(p, seq, h, i0, min(i0 + kBlock, seq.M), j0, j0 + kBlock);
    };
    BlockIterator iterator(strip.blocks, visible);
    for (Block block = iterator.next(); block.index >= 0; block = iterator.next()) {
      if (first >= 0 && first != strip.first) {
        add_distances<Element, kWidth>(warp, dr, first, sums);
        dr.clear();
      }
      first = strip.first;
      const int j0 = block.index * kBlock;
      typename Warp::Scores s, dp;
      differentiate_scores<GradientsOf::kProducts>(a, seq, h, j0 + strip.diagonal, j0, block.full,
                                                   operands, warp, s, dp);
      store_by_distance(operands.ds_by_distance(), warp.row_m, warp.column_m, dp);
      __syncthreads();  // ds is written
      add_product<kMN, kMN, kBlock>(dr, operands.ds_by_distance(), 2 * warp.row_q, operands.q(),
                                    warp.column_q);
    }
  }
  if (first >= 0) add_distances<Element, kWidth>(warp, dr, first, sums);
}

// Adds the sums of all CTAs. One thread per element of drelative_keys.
template <typename Element, int kWidth>
TK_KERNEL(kRelativeSumThreads, 1)
relative_keys_sum_kernel(const __grid_constant__ RelativeGradientArguments a) {
  const BackwardParams& p = a.params;
  const int64_t distances = p.score.distances;
  const int64_t at = int64_t{blockIdx.x} * kRelativeSumThreads + threadIdx.x;
  if (at >= distances * a.tables * p.D) return;
  const int64_t table = at / p.D / distances, e = at / p.D % distances;
  const float total = sum_of_bands(a, table, e, kWidth, at % p.D);
  static_cast<Element*>(p.drelative_keys)[at] = to_element<Element>(total * a.score.scale);
}

}  // namespace tk::cuda
