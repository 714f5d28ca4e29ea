// Backward pass: a CTA owns block_n keys of one key/value head and iterates over the queries that
// see them, for every query head of the group (QueryTiles).
//
//   s = q k^T, dp = do v^T                 -> z p and da (score_gradient.cuh), to shared memory
//   dv += (z p)^T do, dk += da^T q         accumulated in registers
//   dq += da k                             atomic additions into a float32 workspace
//
// dq_postprocess_kernel scales dq and converts it to the element type. In deterministic mode the
// key blocks add to a query block in ascending order; each waits for the previous ones. CTAs are
// then numbered in the order in which they start, so that none waits for a CTA that has not
// started. docs/attention.md, section 3.
#pragma once

#include "cuda/common/preprocess_tile.cuh"
#include "cuda/common/score_gradient.cuh"
#include "cuda/common/store_rows.cuh"

namespace tk::cuda {

template <typename Element, int kWidth, Products kProducts = Products::kPlain>
constexpr BackwardTile kBackwardTile = backward_tile(kProducts, kArch, sizeof(Element), kWidth);

// The accumulators of one warp, and their first row and column within the tiles of the CTA.
template <typename Element, int kWidth, Products kProducts = Products::kPlain>
struct BackwardWarp {
  static constexpr BackwardTile kTile = kBackwardTile<Element, kWidth, kProducts>;
  static constexpr int kThreads = kTile.warps * kWarp;
  static constexpr int kDsStride = kTile.ds_stride();
  static constexpr int kBandDistances = kTile.band_distances();
  static constexpr int kColumnsM = kTile.warps / kTile.warps_m;
  static constexpr int kColumnsN = kTile.warps / kTile.warps_n;
  static constexpr int kColumnsQ = kTile.warps / kTile.warps_q;
  using Scores = Accumulator<kTile.block_m / kTile.warps_m / 16, kTile.block_n / kColumnsM / 8>;
  using Keys = Accumulator<kTile.block_n / kTile.warps_n / 16, kWidth / kColumnsN / 8>;
  using Queries = Accumulator<kTile.block_m / kTile.warps_q / 16, kWidth / kColumnsQ / 8>;

  // s, dp: (block_m, block_n); dk, dv: (block_n, width); dq: (block_m, width)
  int row_m = warp_index() / kColumnsM * Scores::kRows;
  int column_m = warp_index() % kColumnsM * Scores::kColumns;
  int row_n = warp_index() / kColumnsN * Keys::kRows;
  int column_n = warp_index() % kColumnsN * Keys::kColumns;
  int row_q = warp_index() / kColumnsQ * Queries::kRows;
  int column_q = warp_index() % kColumnsQ * Queries::kColumns;
};

// Shared memory of a CTA: k and v, then `stages` tiles of q and of do, then p and ds.
template <typename Element, int kWidth>
struct BackwardShared {
  static constexpr BackwardTile kTile = kBackwardTile<Element, kWidth>;
  static constexpr int kKeyElements = kTile.block_n * kWidth;
  static constexpr int kQueryElements = kTile.block_m * kWidth;
  using KeyTile = SharedTile<Element, kTile.block_n, kWidth>;
  using QueryTile = SharedTile<Element, kTile.block_m, kWidth>;
  using ScoreTile = SharedTile<Element, kTile.block_m, kTile.block_n>;

  Element* data;

  TK_DEVICE_METHOD KeyTile k() const { return {data}; }
  TK_DEVICE_METHOD KeyTile v() const { return {data + kKeyElements}; }
  TK_DEVICE_METHOD QueryTile q(int stage) const {
    return {data + 2 * kKeyElements + stage * kQueryElements};
  }
  TK_DEVICE_METHOD QueryTile d_o(int stage) const { return q(kTile.stages + stage); }
  TK_DEVICE_METHOD ScoreTile p() const { return {q(2 * kTile.stages).data}; }
  TK_DEVICE_METHOD ScoreTile ds() const { return {p().data + kTile.block_m * kTile.block_n}; }
};

template <typename Element, int kWidth, Products kProducts>
using PreprocessTileOf =
    PreprocessTile<Element, kBackwardTile<Element, kWidth, kProducts>.block_m, kWidth>;

// Writes lse and delta of the rows of one query block of one head. Without relative keys it also
// clears what the backward pass adds to: the sums of dq of this block, and the counters.
template <typename Element, int kWidth, Products kProducts>
TK_KERNEL((PreprocessTileOf<Element, kWidth, kProducts>::kThreads), 1)
backward_preprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Tile = PreprocessTileOf<Element, kWidth, kProducts>;
  constexpr int kBlockM = Tile::kBlockM;
  const BackwardParams& p = a.params;
  const auto [seq, h, block] = query_tile_of<kBlockM>(a, a.row_tiles, static_cast<int>(blockIdx.x));
  const int i0 = block * kBlockM;
  if (blockIdx.x == 0 && threadIdx.x == 0 && a.dq_semaphore) *a.block_counter = 0;
  if (i0 >= seq.M) return;
  if (a.dq_sums) {
    const int64_t tile = query_tile<kBlockM>(a, a.row_tiles, seq, h, block);
    Tile::template clear<kBlockM * kWidth>(a.dq_sums + tile * (kBlockM * kWidth));
    if (threadIdx.x == 0 && a.dq_semaphore) a.dq_semaphore[tile] = 0;
  }
  const int64_t offset = statistics_offset(p, seq, h) + i0;
  const auto store = [&](int row, float lse, float, float delta) {
    if (i0 + row >= seq.M) return;
    a.lse[offset + row] = lse;
    a.delta[offset + row] = delta;
  };
  Tile::for_each_row(p, seq, h, i0, store);
}

// Adds one tile to dk and dv, and returns its dq. The tile is query block `block` of head h, which
// is in stage `stage` of shared memory, and the keys from j0 on.
template <typename Element, int kWidth>
TK_DEVICE typename BackwardWarp<Element, kWidth>::Queries differentiate_tile(
    const BackwardArguments& a, const Sequence& seq, int h, const Block& block, int j0,
    const BackwardShared<Element, kWidth>& shared, int stage,
    const BackwardWarp<Element, kWidth>& warp, typename BackwardWarp<Element, kWidth>::Keys& dk,
    typename BackwardWarp<Element, kWidth>::Keys& dv) {
  using Warp = BackwardWarp<Element, kWidth>;
  constexpr int kBlockM = Warp::kTile.block_m, kBlockN = Warp::kTile.block_n;
  const int i0 = block.index * kBlockM;
  const int64_t statistics = statistics_offset(a.params, seq, h);
  const auto q_tile = shared.q(stage), do_tile = shared.d_o(stage);

  TileGradients<Element, Warp::Scores::kRows / 16> gradients{
      a, seq, h, i0 + warp.row_m, j0 + warp.column_m, block.full, {}};
  gradients.rows.load(a.lse + statistics, a.delta + statistics, i0 + warp.row_m, seq.M);
  typename Warp::Scores s, dp;
  s.clear();
  dp.clear();
  add_product<Major::kK, Major::kK, kWidth>(s, q_tile, warp.row_m, shared.k(), warp.column_m);
  add_product<Major::kK, Major::kK, kWidth>(dp, do_tile, warp.row_m, shared.v(), warp.column_m);
  gradients.template apply<GradientsOf::kProducts>(s, dp);
  store_shared(shared.p(), warp.row_m, warp.column_m, s);
  store_shared(shared.ds(), warp.row_m, warp.column_m, dp);
  __syncthreads();  // p and ds are written

  constexpr Major kMN = Major::kMN;
  add_product<kMN, kMN, kBlockM>(dv, shared.p(), warp.row_n, do_tile, warp.column_n);
  add_product<kMN, kMN, kBlockM>(dk, shared.ds(), warp.row_n, q_tile, warp.column_n);
  typename Warp::Queries dq;
  dq.clear();
  add_product<Major::kK, kMN, kBlockN>(dq, shared.ds(), warp.row_q, shared.k(), warp.column_q);
  return dq;
}

// Waits until the preceding key blocks that see query block i0 / block_m have added to its dq.
template <int kBlockM, int kBlockN>
TK_DEVICE void wait_for_preceding_keys(const BackwardArguments& a, const Sequence& seq, int h,
                                       int i0, int n, const int* semaphore) {
  const int i1 = min(i0 + kBlockM, seq.M);
  const auto visible = [&](int other) {
    return tile_visible(a.params, seq, h, i0, i1, other * kBlockN, (other + 1) * kBlockN);
  };
  BlockIterator keys(key_blocks(seq, i0, i1, kBlockN), visible);
  const int preceding = keys.before(n);
  if (threadIdx.x == 0) {
    while (load_acquire(semaphore) != preceding) {
    }
  }
  __syncthreads();
}

// Adds dq of query block `block` to its sums; in deterministic mode after the key blocks before n.
template <typename Element, int kWidth>
TK_DEVICE void accumulate_dq(const BackwardArguments& a, const Sequence& seq, int h, int block,
                             int n, const typename BackwardWarp<Element, kWidth>::Queries& dq) {
  using Warp = BackwardWarp<Element, kWidth>;
  constexpr int kBlockM = Warp::kTile.block_m, kN = Warp::Queries::kColumns / 8;
  const int64_t tile = query_tile<kBlockM>(a, a.row_tiles, seq, h, block);
  if (a.dq_semaphore) {
    wait_for_preceding_keys<kBlockM, Warp::kTile.block_n>(a, seq, h, block * kBlockM, n,
                                                          a.dq_semaphore + tile);
  }
  float* const sums = a.dq_sums + tile * (kBlockM * kWidth) + threadIdx.x;
  for_each_element<Warp::Queries::kRows / 16, kN>([&](int m, int c, int e) {
    add_to(sums + ((m * kN + c) * 4 + e) * Warp::kThreads, dq.x[m][c][e]);
  });
  if (a.dq_semaphore) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) add_release(a.dq_semaphore + tile, 1);
  }
}

template <typename Element, int kWidth>
TK_KERNEL((BackwardWarp<Element, kWidth>::kThreads), 1)
backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Warp = BackwardWarp<Element, kWidth>;
  constexpr int kBlockM = Warp::kTile.block_m, kBlockN = Warp::kTile.block_n;
  constexpr int kThreads = Warp::kThreads, kStages = Warp::kTile.stages;

  const BackwardParams& p = a.params;
  TK_SHARED_MEMORY(memory);
  const int program = program_of(a.dq_semaphore ? a.block_counter : nullptr, memory);
  const auto [entry, h_kv, step] = a.order.position(program);
  const auto [b, n] = sequence_tile<kBlockN>(a.varlen.cu_seqlens_k, a.varlen.B, entry, step);
  const Sequence seq = sequence_of(a, b);
  const int j0 = n * kBlockN, j1 = j0 + kBlockN;
  if (j0 >= seq.N) return;

  const BackwardShared<Element, kWidth> shared{reinterpret_cast<Element*>(memory)};
  const LiveKeys live = live_keys_of(a, seq, h_kv);
  const auto k = rows_of<const Element>(p.k, seq.at, h_kv, seq.first_k, p.D);
  const auto v = rows_of<const Element>(p.v, seq.at, h_kv, seq.first_k, p.D_v);
  start_load<kThreads>(shared.k(), k, j0, false, live);
  start_load<kThreads>(shared.v(), v, j0, false, live);

  const Warp warp;
  typename Warp::Keys dk, dv;
  dk.clear();
  dv.clear();

  const QueryTiles tiles(query_blocks(seq, j0, j1, kBlockM), h_kv, a.by_sharing);
  const auto start = [&](const Block& block, int to) {
    const auto [m, h] = tiles.at(block.index);
    const auto q = rows_of<const Element>(p.q, seq.at, h, seq.first_q, p.D);
    const auto d_o = rows_of<const Element>(p.d_o, seq.at, h, seq.first_q, p.D_v);
    const LiveQueries live_queries{seq.M,
                                   block.full ? nullptr : a.lse + statistics_offset(p, seq, h)};
    const int first = m * kBlockM;
    const bool all = block.full && first + kBlockM <= seq.M;
    start_load<kThreads>(shared.q(to), q, first, all, live_queries);
    start_load<kThreads>(shared.d_o(to), d_o, first, all, live_queries);
  };
  const auto visible = [&](int tile) {
    const auto [m, h] = tiles.at(tile);
    return tile_visible(p, seq, h, m * kBlockM, min((m + 1) * kBlockM, seq.M), j0, j1);
  };
  BlockIterator iterator(tiles.range(), visible);
  int stage = 0;
  Block block = iterator.next();
  if (block.index >= 0) start(block, stage);
  while (block.index >= 0) {
    wait_copies<0>();
    __syncthreads();  // q and do have arrived; p, ds and the other stage have been read
    const Block next = iterator.next();
    if (kStages == 2 && next.index >= 0) start(next, stage ^ 1);
    const auto [m, h] = tiles.at(block.index);
    const auto dq = differentiate_tile(a, seq, h, {m, block.full}, j0, shared, stage, warp, dk, dv);
    accumulate_dq<Element, kWidth>(a, seq, h, m, n, dq);
    if (kStages == 1 && next.index >= 0) {
      __syncthreads();  // q and do have been read
      start(next, 0);
    }
    block = next;
    stage ^= kStages - 1;
  }
  wait_copies<0>();  // k and v are still being copied if no query sees them

  const auto dk_rows = rows_of<Element>(p.dk, seq.at, h_kv, seq.first_k, p.D);
  const auto dv_rows = rows_of<Element>(p.dv, seq.at, h_kv, seq.first_k, p.D_v);
  store_rows(dk_rows, dk, j0 + warp.row_n, warp.column_n, seq.N, a.score.scale);
  store_rows(dv_rows, dv, j0 + warp.row_n, warp.column_n, seq.N, 1.0f);
}

// Converts the sums of dq of one query block of one head to the element type.
template <typename Element, int kWidth>
TK_KERNEL((BackwardWarp<Element, kWidth>::kThreads), 1)
dq_postprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Warp = BackwardWarp<Element, kWidth>;
  constexpr int kBlockM = Warp::kTile.block_m, kN = Warp::Queries::kColumns / 8;
  const BackwardParams& p = a.params;
  const auto [seq, h, block] = query_tile_of<kBlockM>(a, a.row_tiles, static_cast<int>(blockIdx.x));
  const int i0 = block * kBlockM;
  if (i0 >= seq.M) return;

  const float* const sums =
      a.dq_sums + query_tile<kBlockM>(a, a.row_tiles, seq, h, block) * (kBlockM * kWidth) +
      threadIdx.x;
  typename Warp::Queries dq;
  for_each_element<Warp::Queries::kRows / 16, kN>(
      [&](int m, int c, int e) { dq.x[m][c][e] = sums[((m * kN + c) * 4 + e) * Warp::kThreads]; });
  const auto rows = rows_of<Element>(p.dq, seq.at, h, seq.first_q, p.D);
  const Warp warp;
  store_rows(rows, dq, i0 + warp.row_q, warp.column_q, seq.M, a.score.scale);
}

}  // namespace tk::cuda
