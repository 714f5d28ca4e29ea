// The backward pass: a block takes block_n keys of one key head and walks over the queries that see
// them, in every query head that shares it.
//
//   s = q k^T, dp = do v^T                 -> z p and da, by gradients.cuh, into shared memory
//   dv += (z p)^T do, dk += da^T q         stay in registers
//   dq += da k                             leaves by atomic additions, into float32
//
// dq is brought into its place by a kernel of its own. In deterministic mode the key blocks that
// add to a block of queries do so in their order, and wait for each other. So that none waits for
// one that has not begun, blocks then are numbered as they begin. docs/attention.md, section 3.
#pragma once

#include "cuda/common/score_gradient.cuh"

namespace tk::cuda {

template <typename Element, int kWidth>
constexpr BackwardTile kBackwardTile = backward_tile(kArch, sizeof(Element), kWidth);

// What a warp has of the tiles.
template <typename Element, int kWidth>
struct BackwardParts {
  static constexpr BackwardTile kTile = kBackwardTile<Element, kWidth>;
  static constexpr int kThreads = kTile.warps * kWarp;
  static constexpr int kColumnsM = kTile.warps / kTile.warps_m;
  static constexpr int kColumnsN = kTile.warps / kTile.warps_n;
  static constexpr int kColumnsQ = kTile.warps / kTile.warps_q;
  using Scores = Accumulator<kTile.block_m / kTile.warps_m / 16, kTile.block_n / kColumnsM / 8>;
  using Keys = Accumulator<kTile.block_n / kTile.warps_n / 16, kWidth / kColumnsN / 8>;
  using Queries = Accumulator<kTile.block_m / kTile.warps_q / 16, kWidth / kColumnsQ / 8>;
};

// The tile of dq_sums, and of turns, of a block of queries. Packed sequences share a head's tiles;
// each has one more than its rows fill.
template <typename Element, int kWidth>
TK_DEVICE int64_t query_tile(const BackwardArguments& a, const Sequence& s, int h, int block) {
  constexpr int kBlockM = kBackwardTile<Element, kWidth>.block_m;
  const BackwardParams& p = a.params;
  if (!a.varlen.cu_seqlens_q) {
    return (s.b * p.H_q + h) * ((p.M + kBlockM - 1) / kBlockM) + block;
  }
  return h * (p.M / kBlockM + a.varlen.B) + s.first_q / kBlockM + s.b + block;
}

template <typename Element, int kWidth>
TK_KERNEL((BackwardParts<Element, kWidth>::kThreads), 1)
backward_kernel(const __grid_constant__ BackwardArguments a) {
  using Parts = BackwardParts<Element, kWidth>;
  constexpr BackwardTile kTile = Parts::kTile;
  constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kThreads = Parts::kThreads;
  constexpr int kStages = kTile.stages;

  const BackwardParams& p = a.params;
  const int H_kv = static_cast<int>(p.H_kv), group = static_cast<int>(p.H_q) / H_kv;
  TK_SHARED_MEMORY(memory);
  const int program = program_of(a.turns ? a.begun : nullptr, memory);
  const int h_kv = program / a.blocks % H_kv;
  const Sequence seq = sequence_of(a, program / a.blocks / H_kv);
  const int n = program % a.blocks, j0 = n * kBlockN, j1 = j0 + kBlockN;
  if (j0 >= seq.N) return;

  const SharedTile<Element, kBlockN, kWidth> k_tile{reinterpret_cast<Element*>(memory)};
  const SharedTile<Element, kBlockN, kWidth> v_tile{k_tile.data + kBlockN * kWidth};
  using QueryTile = SharedTile<Element, kBlockM, kWidth>;
  Element* const q_tiles = v_tile.data + kBlockN * kWidth;
  Element* const do_tiles = q_tiles + kStages * kBlockM * kWidth;
  const SharedTile<Element, kBlockM, kBlockN> p_tile{do_tiles + kStages * kBlockM * kWidth};
  const SharedTile<Element, kBlockM, kBlockN> ds_tile{p_tile.data + kBlockM * kBlockN};

  const LiveKeys used = live_keys_of(a, seq);
  const auto k = rows_of<const Element>(p.k, seq.at, h_kv, seq.first_k, p.D);
  const auto v = rows_of<const Element>(p.v, seq.at, h_kv, seq.first_k, p.D_v);
  start_load<kThreads>(k_tile, k, j0, false, used);
  start_load<kThreads>(v_tile, v, j0, false, used);

  const int warp = warp_index();
  const int row_m = warp / Parts::kColumnsM * Parts::Scores::kRows;
  const int column_m = warp % Parts::kColumnsM * Parts::Scores::kColumns;
  const int row_n = warp / Parts::kColumnsN * Parts::Keys::kRows;
  const int column_n = warp % Parts::kColumnsN * Parts::Keys::kColumns;
  const int row_q = warp / Parts::kColumnsQ * Parts::Queries::kRows;
  const int column_q = warp % Parts::kColumnsQ * Parts::Queries::kColumns;
  typename Parts::Keys dk, dv;
  dk.clear();
  dv.clear();

  int stage = 0;
  for (int h = h_kv * group; h < (h_kv + 1) * group; ++h) {
    const auto q = rows_of<const Element>(p.q, seq.at, h, seq.first_q, p.D);
    const auto d_o = rows_of<const Element>(p.d_o, seq.at, h, seq.first_q, p.D_v);
    const int64_t at = statistics_offset(p, seq, h);
    const auto start = [&](const Block& block, int to) {
      const UsedQueries there{seq.M, block.full ? nullptr : a.lse + at};
      const int first = block.index * kBlockM;
      const bool all = block.full && first + kBlockM <= seq.M;
      start_load<kThreads>(QueryTile{q_tiles + to * kBlockM * kWidth}, q, first, all, there);
      start_load<kThreads>(QueryTile{do_tiles + to * kBlockM * kWidth}, d_o, first, all, there);
    };
    const auto visible = [&](int m) {
      return tile_visible(p, seq, h, m * kBlockM, min((m + 1) * kBlockM, seq.M), j0, j1);
    };
    BlockIterator iterator(query_blocks(seq, j0, j1, kBlockM), visible);
    Block block = iterator.next();
    if (kStages == 1) __syncthreads();  // the head before has read its tiles
    if (block.index >= 0) start(block, stage);

    while (block.index >= 0) {
      const int i0 = block.index * kBlockM;
      const QueryTile q_tile{q_tiles + stage * kBlockM * kWidth};
      const QueryTile do_tile{do_tiles + stage * kBlockM * kWidth};
      wait_copies<0>();
      __syncthreads();  // q and do are there; p, ds and the other stage are read
      const Block next = iterator.next();
      if (kStages == 2 && next.index >= 0) start(next, stage ^ 1);

      typename Parts::Scores s, dp;
      s.clear();
      dp.clear();
      add_product<Major::kK, Major::kK, kWidth>(s, q_tile, row_m, k_tile, column_m);
      add_product<Major::kK, Major::kK, kWidth>(dp, do_tile, row_m, v_tile, column_m);
      TileGradients<Element, Parts::Scores::kRows / 16> gradients{
          a, seq, h, i0 + row_m, j0 + column_m, block.full, {}};
      gradients.terms.load(a.lse + at, a.delta + at, i0 + row_m, seq.M);
      gradients.template apply<GradientsOf::kProducts>(s, dp);
      store_shared(p_tile, row_m, column_m, s);
      store_shared(ds_tile, row_m, column_m, dp);
      __syncthreads();  // p and ds are there

      constexpr Major kAsRows = Major::kK, kAsColumns = Major::kMN;
      add_product<kAsColumns, kAsColumns, kBlockM>(dv, p_tile, row_n, do_tile, column_n);
      add_product<kAsColumns, kAsColumns, kBlockM>(dk, ds_tile, row_n, q_tile, column_n);
      typename Parts::Queries dq;
      dq.clear();
      add_product<kAsRows, kAsColumns, kBlockN>(dq, ds_tile, row_q, k_tile, column_q);

      const int64_t tile = query_tile<Element, kWidth>(a, seq, h, block.index);
      if (a.turns) {
        const auto of_keys = [&](int other) {
          return tile_visible(p, seq, h, i0, min(i0 + kBlockM, seq.M), other * kBlockN,
                              (other + 1) * kBlockN);
        };
        BlockIterator keys(key_blocks(seq, i0, min(i0 + kBlockM, seq.M), kBlockN), of_keys);
        const int turn = keys.before(n);
        if (threadIdx.x == 0) {
          while (load_acquire(a.turns + tile) != turn) {
          }
        }
        __syncthreads();
      }
      float* const sums = a.dq_sums + tile * (kBlockM * kWidth) + threadIdx.x;
      constexpr int kN = Parts::Queries::kColumns / 8;
      for_each_element<Parts::Queries::kRows / 16, kN>([&](int m, int c, int e) {
        add_to(sums + ((m * kN + c) * 4 + e) * kThreads, dq.x[m][c][e]);
      });
      if (a.turns) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) add_release(a.turns + tile, 1);
      }
      if (kStages == 1 && next.index >= 0) {
        __syncthreads();  // q and do are read
        start(next, 0);
      }
      block = next;
      stage ^= kStages - 1;
    }
  }
  wait_copies<0>();  // of k and v, where no query sees them

  const auto dk_rows = rows_of<Element>(p.dk, seq.at, h_kv, seq.first_k, p.D);
  const auto dv_rows = rows_of<Element>(p.dv, seq.at, h_kv, seq.first_k, p.D_v);
  const float scale = static_cast<float>(p.score.scale);
  dk.for_each_pair([&](int row, int column, float x, float y) {
    const int j = j0 + row_n + row;
    if (j < seq.N) dk_rows.store_pair(j, column_n + column, x * scale, y * scale);
  });
  dv.for_each_pair([&](int row, int column, float x, float y) {
    const int j = j0 + row_n + row;
    if (j < seq.N) dv_rows.store_pair(j, column_n + column, x, y);
  });
}

// dq from its sums: a block of queries of one head.
template <typename Element, int kWidth>
TK_KERNEL((BackwardParts<Element, kWidth>::kThreads), 1)
dq_postprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Parts = BackwardParts<Element, kWidth>;
  constexpr int kBlockM = Parts::kTile.block_m, kN = Parts::Queries::kColumns / 8;
  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), H_q = static_cast<int>(p.H_q);
  const int h = program / a.blocks % H_q, block = program % a.blocks, i0 = block * kBlockM;
  const Sequence seq = sequence_of(a, program / a.blocks / H_q);
  if (i0 >= seq.M) return;

  const float* const sums =
      a.dq_sums + query_tile<Element, kWidth>(a, seq, h, block) * (kBlockM * kWidth) + threadIdx.x;
  typename Parts::Queries dq;
  for_each_element<Parts::Queries::kRows / 16, kN>(
      [&](int m, int c, int e) { dq.x[m][c][e] = sums[((m * kN + c) * 4 + e) * Parts::kThreads]; });
  const auto rows = rows_of<Element>(p.dq, seq.at, h, seq.first_q, p.D);
  const float scale = static_cast<float>(p.score.scale);
  const int first_row = i0 + warp_index() / Parts::kColumnsQ * Parts::Queries::kRows;
  const int first_column = warp_index() % Parts::kColumnsQ * Parts::Queries::kColumns;
  dq.for_each_pair([&](int row, int column, float x, float y) {
    const int i = first_row + row;
    if (i < seq.M) rows.store_pair(i, first_column + column, x * scale, y * scale);
  });
}

}  // namespace tk::cuda
