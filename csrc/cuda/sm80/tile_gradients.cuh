// ds of whole tiles, summed in registers: shared by the kernels for gradients of biases.
#pragma once

#include "cuda/sm80/backward.cuh"

namespace tk::cuda {

// Shared memory of a CTA: k, v, q and do of one tile. With relative keys: relative_tiles.cuh.
template <typename Element, int kWidth, Products kProducts = Products::kPlain>
struct GradientOperands {
  static constexpr BackwardTile kTile = kBackwardTile<Element, kWidth>;
  using KeyTile = SharedTile<Element, kTile.block_n, kWidth>;
  using QueryTile = SharedTile<Element, kTile.block_m, kWidth>;

  Element* data;

  TK_DEVICE_METHOD KeyTile k() const { return {data}; }
  TK_DEVICE_METHOD KeyTile v() const { return {data + kTile.block_n * kWidth}; }
  TK_DEVICE_METHOD QueryTile q() const { return {data + 2 * kTile.block_n * kWidth}; }
  TK_DEVICE_METHOD QueryTile d_o() const { return {q().data + kTile.block_m * kWidth}; }
};

// Adds ds of one tile to `total`: the queries from i0 on and the keys from j0 on.
template <typename Element, int kWidth>
TK_DEVICE void add_score_gradients(const BackwardArguments& a, const Sequence& seq, int h, int i0,
                                   int j0, bool full,
                                   const GradientOperands<Element, kWidth>& operands,
                                   const BackwardWarp<Element, kWidth>& warp,
                                   typename BackwardWarp<Element, kWidth>::Scores& total) {
  using Warp = BackwardWarp<Element, kWidth>;
  constexpr int kThreads = Warp::kThreads;
  const BackwardParams& p = a.params;
  const int h_kv = h / static_cast<int>(p.H_q / p.H_kv);
  const auto q = rows_of<const Element>(p.q, seq.at, h, seq.first_q, p.D);
  const auto k = rows_of<const Element>(p.k, seq.at, h_kv, seq.first_k, p.D);
  const auto v = rows_of<const Element>(p.v, seq.at, h_kv, seq.first_k, p.D_v);
  const auto d_o = rows_of<const Element>(p.d_o, seq.at, h, seq.first_q, p.D_v);
  const int64_t statistics = statistics_offset(p, seq, h);
  const LiveKeys live_keys = live_keys_of(a, seq, h_kv);
  const LiveQueries live_queries{seq.M, a.lse + statistics};
  const bool all_rows = full && i0 + Warp::kTile.block_m <= seq.M;
  __syncthreads();  // the previous tiles have been read
  start_load<kThreads>(operands.k(), k, j0, full, live_keys);
  start_load<kThreads>(operands.v(), v, j0, full, live_keys);
  start_load<kThreads>(operands.q(), q, i0, all_rows, live_queries);
  start_load<kThreads>(operands.d_o(), d_o, i0, all_rows, live_queries);
  wait_copies<0>();
  __syncthreads();  // the operands have arrived

  typename Warp::Scores s, dp;
  s.clear();
  dp.clear();
  add_product<Major::kK, Major::kK, kWidth>(s, operands.q(), warp.row_m, operands.k(),
                                            warp.column_m);
  add_product<Major::kK, Major::kK, kWidth>(dp, operands.d_o(), warp.row_m, operands.v(),
                                            warp.column_m);
  TileGradients<Element, Warp::Scores::kRows / 16> gradients{
      a, seq, h, i0 + warp.row_m, j0 + warp.column_m, full, {}};
  gradients.rows.load(a.lse + statistics, a.delta + statistics, i0 + warp.row_m, seq.M);
  gradients.template apply<GradientsOf::kScores>(s, dp);
  for_each_element<Warp::Scores::kRows / 16, Warp::Scores::kColumns / 8>(
      [&](int m, int n, int e) { total.x[m][n][e] += dp.x[m][n][e]; });
}

}  // namespace tk::cuda
