// Gradients of whole tiles with relative keys: shared by the kernels of relative_backward.cuh and
// by those for gradients of biases.
#pragma once

#include "cuda/sm80/relative_keys.cuh"
#include "cuda/sm80/tile_gradients.cuh"

namespace tk::cuda {

// Shared memory of a CTA: q and k; the band, or v and do; scratch memory, or p and ds, or ds in the
// order of keys and of distances. Tiles are square.
template <typename Element, int kWidth>
struct GradientOperands<Element, kWidth, Products::kRelative> {
  static constexpr BackwardTile kTile = kBackwardTile<Element, kWidth, Products::kRelative>;
  static constexpr int kBlock = kTile.block_m, kOperand = kBlock * kWidth;
  static_assert(kTile.block_n == kBlock);
  using Tile = SharedTile<Element, kBlock, kWidth>;
  using ScoreTile = SharedTile<Element, kBlock, kBlock>;
  using DistanceTile = SharedTile<Element, kBlock, 2 * kBlock>;

  Element* data;

  TK_DEVICE_METHOD Tile q() const { return {data}; }
  TK_DEVICE_METHOD Tile k() const { return {data + kOperand}; }
  TK_DEVICE_METHOD Tile v() const { return {data + 2 * kOperand}; }
  TK_DEVICE_METHOD Tile d_o() const { return {data + 3 * kOperand}; }
  TK_DEVICE_METHOD Band<Element, kBlock, kBlock, kWidth> band() const {
    return {data + 2 * kOperand};
  }
  TK_DEVICE_METHOD ScoreTile ds() const { return {data + 4 * kOperand}; }
  TK_DEVICE_METHOD ScoreTile p() const { return {ds().data + kBlock * kBlock}; }
  TK_DEVICE_METHOD DistanceTile ds_by_distance() const { return {p().data}; }
};

template <typename Element, int kWidth>
using RelativeOperands = GradientOperands<Element, kWidth, Products::kRelative>;
template <typename Element, int kWidth>
using RelativeWarp = BackwardWarp<Element, kWidth, Products::kRelative>;

// Computes z p and the gradient of the products, or of the scores, of one tile: the queries from i0
// on and the keys from j0 on. The operands stay in shared memory; the scratch memory has been read.
template <GradientsOf kOf, typename Element, int kWidth>
TK_DEVICE void differentiate_scores(const BackwardArguments& a, const Sequence& seq, int h, int i0,
                                    int j0, bool full,
                                    const RelativeOperands<Element, kWidth>& operands,
                                    const RelativeWarp<Element, kWidth>& warp,
                                    typename RelativeWarp<Element, kWidth>::Scores& s,
                                    typename RelativeWarp<Element, kWidth>::Scores& dp) {
  constexpr int kThreads = RelativeWarp<Element, kWidth>::kThreads;
  constexpr Major kK = Major::kK;
  const BackwardParams& p = a.params;
  const int h_kv = h / static_cast<int>(p.H_q / p.H_kv);
  const auto q = rows_of<const Element>(p.q, seq.at, h, seq.first_q, p.D);
  const auto k = rows_of<const Element>(p.k, seq.at, h_kv, seq.first_k, p.D);
  const auto v = rows_of<const Element>(p.v, seq.at, h_kv, seq.first_k, p.D_v);
  const auto d_o = rows_of<const Element>(p.d_o, seq.at, h, seq.first_q, p.D_v);
  const int64_t statistics = statistics_offset(p, seq, h);
  const LiveKeys live_keys = live_keys_of(a, seq, h_kv);
  const LiveQueries live_queries{seq.M, a.lse + statistics};
  const bool all_rows = full && i0 + operands.kBlock <= seq.M;
  __syncthreads();  // the previous tile has been read
  start_load<kThreads>(operands.q(), q, i0, all_rows, live_queries);
  start_load<kThreads>(operands.k(), k, j0, full, live_keys);
  const auto band = operands.band();
  band.template start_load<kThreads>(relative_keys_of<Element>(a, seq, h), i0, j0);
  wait_copies<0>();
  __syncthreads();  // q, k and the band have arrived
  band.template multiply<s.kColumns>(operands.q(), warp.row_m, warp.column_m);
  s.clear();
  add_product<kK, kK, kWidth>(s, operands.q(), warp.row_m, operands.k(), warp.column_m);
  band.add_products(s);

  __syncthreads();  // the band has been read
  start_load<kThreads>(operands.v(), v, j0, full, live_keys);
  start_load<kThreads>(operands.d_o(), d_o, i0, all_rows, live_queries);
  wait_copies<0>();
  __syncthreads();  // v and do have arrived
  dp.clear();
  add_product<kK, kK, kWidth>(dp, operands.d_o(), warp.row_m, operands.v(), warp.column_m);
  TileGradients<Element, 1> gradients{a, seq, h, i0 + warp.row_m, j0 + warp.column_m, full, {}};
  gradients.rows.load(a.lse + statistics, a.delta + statistics, i0 + warp.row_m, seq.M);
  gradients.template apply<kOf>(s, dp);
}

// Adds ds of one tile to `total`.
template <typename Element, int kWidth>
TK_DEVICE void add_score_gradients(const BackwardArguments& a, const Sequence& seq, int h, int i0,
                                   int j0, bool full,
                                   const RelativeOperands<Element, kWidth>& operands,
                                   const RelativeWarp<Element, kWidth>& warp,
                                   typename RelativeWarp<Element, kWidth>::Scores& total) {
  typename RelativeWarp<Element, kWidth>::Scores s, ds;
  differentiate_scores<GradientsOf::kScores>(a, seq, h, i0, j0, full, operands, warp, s, ds);
  for_each_element<1, ds.kColumns / 8>(
      [&](int m, int n, int e) { total.x[m][n][e] += ds.x[m][n][e]; });
}

// Stores ds in the order of distances: element (i, j) in column i - j + kBlock - 1, as in Band, and
// 0 in the columns that row i lacks.
template <typename Element, int kBlock, int kN>
TK_DEVICE void store_by_distance(const SharedTile<Element, kBlock, 2 * kBlock>& tile, int row,
                                 int column, const Accumulator<1, kN>& ds) {
  for_each_element<1, kN>([&](int m, int n, int e) {
    const int i = row + row_of(e), c = i - (column + 8 * n + column_of(e)) + kBlock - 1;
    *tile.at(i, c) = to_element<Element>(ds.x[m][n][e]);
    *tile.at(i, (c + kBlock) % (2 * kBlock)) = Element{};
  });
}

}  // namespace tk::cuda
