// Gradient of a relative bias: ds summed along diagonals.
//
//   drelative_bias[h, e] = sum of ds_ij over i - j + offset = e, sequences and heads that share h
//
// Elements at the same place of tiles with equal i0 - j0 lie on the same diagonal. A CTA adds ds of
// such tiles in registers, and sums the diagonals of the total once, through shared memory. It owns
// a band: the tiles whose first element has one of block_m adjacent distances e. A sequence has at
// most one i0 - j0 in each band. relative_sum_kernel adds the sums of all CTAs in a fixed order.
// docs/attention.md, section 3.
#pragma once

#include "cuda/sm80/relative_tiles.cuh"

namespace tk::cuda {

// `blocks` is the number of bands. The CTAs, and so their sums, are (groups, tables, bands).
struct RelativeGradientArguments : BackwardArguments {
  int block_m, block_n, band_distances;  // of BackwardTile
  int tables;                            // 1 or H_q
  int groups;  // among which the sequences and heads that share a table are divided
  int sequences;
};

// The tiles of one sequence in a band.
template <int kBlockM, int kBlockN>
struct Strip {
  int diagonal;       // i0 - j0
  int first;          // distance of the tiles' first element, from the first one of the band
  BlockRange blocks;  // of keys

  TK_DEVICE_METHOD Strip(const RelativeGradientArguments& a, const Sequence& s, int band) {
    static_assert((kBlockM & (kBlockM - 1)) == 0 && kBlockN % kBlockM == 0);
    const int64_t begin =
        int64_t{band} * kBlockM - a.params.score.relative_offset - shift_of(a.varlen, s);
    const int64_t multiple = (begin + kBlockM - 1) & -kBlockM;
    const int64_t key_end = min(int64_t{s.N}, s.M - multiple);
    diagonal = clamp_diagonal(multiple);
    first = static_cast<int>(multiple - begin);
    blocks = {ceil_divide(max(-diagonal, 0), kBlockN),
              ceil_divide(clamp_diagonal(key_end), kBlockN)};
  }
};

// Adds the diagonals of `total` to the sums of the band; `first` as in Strip. Each sum belongs to
// one thread.
template <typename Warp>
TK_DEVICE void add_diagonals(const Warp& warp, const typename Warp::Scores& total, int first,
                             float* ds, float* sums) {
  constexpr int kBlockM = Warp::kTile.block_m, kBlockN = Warp::kTile.block_n;
  constexpr int kStride = Warp::kDsStride, kDistances = Warp::kBandDistances;
  __syncthreads();  // the last tiles have been read, and may be overwritten
  total.for_each_pair([&](int row, int column, float x, float y) {
    store_two(ds + (warp.row_m + row) * kStride + warp.column_m + column, x, y);
  });
  __syncthreads();  // ds is written
  for (int n = static_cast<int>(threadIdx.x); n < kDistances; n += Warp::kThreads) {
    const int diagonal = n - first - (kBlockN - 1);
    float sum = 0.0f;
    for (int row = 0; row < kBlockM; ++row) {
      const int column = row - diagonal;
      if (column >= 0 && column < kBlockN) sum += ds[row * kStride + column];
    }
    sums[n] += sum;
  }
}

template <typename Element, int kWidth, Products kProducts>
TK_KERNEL((BackwardWarp<Element, kWidth, kProducts>::kThreads), 1)
relative_gradient_kernel(const __grid_constant__ RelativeGradientArguments a) {
  using Warp = BackwardWarp<Element, kWidth, kProducts>;
  constexpr int kBlockM = Warp::kTile.block_m, kBlockN = Warp::kTile.block_n;
  constexpr int kDistances = Warp::kBandDistances;

  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), band = program % a.blocks;
  const int table = program / a.blocks % a.tables, group = program / a.blocks / a.tables;
  const int heads = a.tables == 1 ? static_cast<int>(p.H_q) : 1;  // that share the table
  float* const sums = a.distance_sums + int64_t{program} * kDistances;
  for (int n = static_cast<int>(threadIdx.x); n < kDistances; n += Warp::kThreads) sums[n] = 0.0f;

  TK_SHARED_MEMORY(memory);
  const GradientOperands<Element, kWidth, kProducts> operands{reinterpret_cast<Element*>(memory)};
  float* const ds = reinterpret_cast<float*>(memory);
  const Warp warp;
  typename Warp::Scores total;
  total.clear();
  int first = -1;  // of the tiles in `total`; -1 = none
  for (int64_t n = group; n < int64_t{a.sequences} * heads; n += a.groups) {
    const Sequence seq = sequence_of(a, static_cast<int>(n / heads));
    const int h = table + static_cast<int>(n % heads);
    const Strip<kBlockM, kBlockN> strip(a, seq, band);
    const auto visible = [&](int block) {
      const int j0 = block * kBlockN, i0 = j0 + strip.diagonal;
      return tile_visible(p, seq, h, i0, min(i0 + kBlockM, seq.M), j0, j0 + kBlockN);
    };
    BlockIterator iterator(strip.blocks, visible);
    for (Block block = iterator.next(); block.index >= 0; block = iterator.next()) {
      if (first >= 0 && first != strip.first) {
        add_diagonals(warp, total, first, ds, sums);
        total.clear();
      }
      first = strip.first;
      const int j0 = block.index * kBlockN;
      add_score_gradients(a, seq, h, j0 + strip.diagonal, j0, block.full, operands, warp, total);
    }
  }
  if (first >= 0) add_diagonals(warp, total, first, ds, sums);
}

// The sums of all CTAs for distance e of a table. A distance has `width` sums; this is that of
// `column`.
TK_DEVICE float sum_of_bands(const RelativeGradientArguments& a, int64_t table, int64_t e,
                             int width, int64_t column) {
  const int block_m = a.block_m, block_n = a.block_n;
  const int64_t first_band = max(e / block_m - 1, int64_t{0});
  const int64_t last_band = min((e + block_n - 1) / block_m, int64_t{a.blocks} - 1);
  float total = 0.0f;
  for (int group = 0; group < a.groups; ++group) {
    for (int64_t band = first_band; band <= last_band; ++band) {
      const int64_t program = (int64_t{group} * a.tables + table) * a.blocks + band;
      const int64_t within = e - band * block_m + block_n - 1;
      total += a.distance_sums[(program * a.band_distances + within) * width + column];
    }
  }
  return total;
}

constexpr int kRelativeSumThreads = 128;

// Adds the sums of all CTAs. One thread per element of drelative_bias.
static TK_KERNEL(kRelativeSumThreads, 1)
    relative_sum_kernel(const __grid_constant__ RelativeGradientArguments a) {
  const int64_t distances = a.params.score.distances;
  const int64_t at = int64_t{blockIdx.x} * kRelativeSumThreads + threadIdx.x;
  if (at >= distances * a.tables) return;
  static_cast<float*>(a.params.drelative_bias)[at] =
      sum_of_bands(a, at / distances, at % distances, 1, 0);
}

}  // namespace tk::cuda
