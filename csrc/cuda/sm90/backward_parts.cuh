// Backward pass, shared parts of the two main loops: producer, score gradients, epilogue of dk and
// dv.
#pragma once

#include "cuda/common/masks.cuh"
#include "cuda/sm90/dropout_mask.cuh"
#include "cuda/sm90/epilogue.cuh"

namespace tk::cuda::sm90 {

// Shared-memory pipelines of the inputs. kRowWidth bounds the width of q and k, kRowVWidth of v and
// do.
template <typename Element_, int kRowWidth, int kRowVWidth>
struct BackwardPipelines {
  using Element = Element_;
  static constexpr int kWidth = hopper_backward_width(kRowWidth);
  static constexpr int kVWidth = hopper_backward_width(kRowVWidth);
  static constexpr HopperBackwardTile kTile = hopper_backward_tile(kWidth);
  static constexpr int kM = kTile.block_m, kN = kTile.block_n, kConsumers = kTile.kConsumers;

  using KPipeline = Pipeline<SharedTile<Element, kN, kWidth>, 1>;
  using VPipeline = Pipeline<SharedTile<Element, kN, kVWidth>, 1>;
  using QPipeline = Pipeline<SharedTile<Element, kM, kWidth>, kTile.stages>;
  using DoPipeline = Pipeline<SharedTile<Element, kM, kVWidth>, kTile.stages>;
  using RowStatsPipeline = Pipeline<RowStats<kM>, kTile.stages>;
  static constexpr int kPipelineTileBytes = KPipeline::kTileBytes + VPipeline::kTileBytes +
                                            QPipeline::kTileBytes + DoPipeline::kTileBytes +
                                            RowStatsPipeline::kTileBytes;
  static_assert(kPipelineTileBytes % kSwizzleAtomBytes == 0);  // a tile may follow
  static constexpr int kSyncBytes = KPipeline::kSyncBytes + VPipeline::kSyncBytes +
                                    QPipeline::kSyncBytes + DoPipeline::kSyncBytes +
                                    RowStatsPipeline::kSyncBytes;

  KPipeline k;
  VPipeline v;
  QPipeline q;
  DoPipeline d_o;
  RowStatsPipeline row_stats;

 protected:
  TK_DEVICE_METHOD explicit BackwardPipelines(SharedCursor& cursor)
      : k(cursor.pipeline<KPipeline>()),
        v(cursor.pipeline<VPipeline>()),
        q(cursor.pipeline<QPipeline>()),
        d_o(cursor.pipeline<DoPipeline>()),
        row_stats(cursor.pipeline<RowStatsPipeline>()) {}
};

// Weight of a hidden pair. The sign distinguishes it from a visible weight that underflows to +0.
constexpr float kHiddenWeight = -0.0f;
TK_DEVICE bool is_hidden_weight(float weight) { return __float_as_uint(weight) == 1u << 31; }

// Number of key blocks before block n that see part of a query tile. Warp-collective.
template <typename Shape>
TK_DEVICE int preceding_key_blocks(const BackwardArguments& a, const Sequence& seq, int h, int i0,
                                   int n) {
  constexpr int kN = Shape::kN;
  const int i1 = min(i0 + Shape::kM, seq.M);
  const auto visible = [&](int other) {
    return tile_visible(a.params, seq, h, i0, i1, other * kN, (other + 1) * kN);
  };
  return BlockIterator(key_blocks(seq, i0, i1, kN), visible).before(n);
}

// Producer: loads k and v once, then every query tile that sees some of these keys, head by head.
template <typename Shape>
TK_DEVICE void load(const BackwardArguments& a, const Shape& shared, const KeyBlock& key_block) {
  using Element = typename Shape::Element;
  constexpr int kM = Shape::kM, kN = Shape::kN;
  const BackwardParams& p = a.params;
  const Sequence seq = sequence_of(a, key_block.b);
  const int j0 = key_block.n * kN, j1 = j0 + kN, heads = static_cast<int>(p.H_q / p.H_kv);
  const bool is_varlen = a.varlen.cu_seqlens_q != nullptr;

  int h = key_block.h_kv * heads;
  const int last_h = h + heads - 1;
  const auto visible = [&](int m) {
    return tile_visible(p, seq, h, m * kM, min((m + 1) * kM, seq.M), j0, j1);
  };
  BlockIterator iterator(query_blocks(seq, j0, j1, kM), visible);
  const auto advance = [&] {
    Block block = iterator.next();
    while (block.index < 0 && h < last_h) {
      ++h;
      iterator.restart();
      block = iterator.next();
    }
    return block;
  };
  Block block = advance();
  const typename Shape::KPipeline::State kv_state;
  typename Shape::QPipeline::State state;

  // Dead keys may hold NaN, and 0 x NaN in a matrix product is NaN: they are loaded as zeros.
  const LiveKeys live_keys = live_keys_of(a, seq, key_block.h_kv);
  const bool has_dead_keys = has_dead_rows(live_keys, j0, is_varlen ? j1 : min(j1, seq.N));
  if (elect_one()) {
    // last: no query sees this block
    shared.k.tile_info(kv_state) = {key_block.n, h, false, block.index < 0};
    if (!has_dead_keys) {
      fill_by_tma(shared.k, kv_state, a.k, seq.first_k + j0, key_block.h_kv, seq.at);
    }
    fill_by_tma(shared.v, kv_state, a.v, seq.first_k + j0, key_block.h_kv, seq.at);
  }
  if (has_dead_keys) {
    __syncwarp();
    const auto k = rows_of<const Element>(p.k, seq.at, key_block.h_kv, seq.first_k, p.D);
    fill_live_rows(shared.k, kv_state, k, j0, live_keys);
  }

  while (block.index >= 0) {
    const int i0 = block.index * kM;
    TileInfo info{block.index, h, block.full, false, false, tile_of<kM>(a, seq, h, block.index)};
    if (a.dq_semaphore) {
      info.preceding_blocks = preceding_key_blocks<Shape>(a, seq, h, i0, key_block.n);
    }
    const float* const row_stats = a.row_stats + int64_t{info.tile} * 4 * kM;
    block = advance();
    info.last = block.index < 0;
    shared.row_stats.wait_empty(state);
    info.natural_lse = !has_plain_scores<Element>(p.score) ||
                       any_row(i0, i0 + kM, [&](int i) { return is_large(row_stats[i - i0]); });
    if (elect_one()) {
      shared.row_stats.tile_info(state) = info;
      mbarrier_arrive_expect(shared.row_stats.full(state), RowStats<kM>::kBytes);
      const float* const from = info.natural_lse ? row_stats + 2 * kM : row_stats;
      load_bulk(shared.row_stats.tile(state).data, from, RowStats<kM>::kBytes,
                shared.row_stats.full(state));
    }
    const auto is_live = [&](int i) { return i < seq.M && row_stats[i - i0] < INFINITY; };
    const bool zero_dead_rows =
        !(info.full && i0 + kM <= seq.M) &&
        has_dead_rows(is_live, i0, is_varlen ? i0 + kM : min(i0 + kM, seq.M));
    const auto load_rows = [&](auto& pipeline, const TensorMap& map, const Strided& x,
                               int64_t width) {
      pipeline.wait_empty(state);
      if (zero_dead_rows) {
        fill_live_rows(pipeline, state,
                       rows_of<const Element>(x, seq.at, info.h, seq.first_q, width), i0, is_live);
      } else if (elect_one()) {
        fill_by_tma(pipeline, state, map, seq.first_q + i0, info.h, seq.at);
      }
    };
    load_rows(shared.q, a.q, p.q, p.D);
    load_rows(shared.d_o, a.d_o, p.d_o, p.D_v);
    state.next();
  }
}

// Replaces s by the weights z p (without the dropout factor) and dp by da, for a warp's 16 keys. dp
// may still be in flight. The accumulators start at key j0 and at query `column` of the tile.
template <typename Shape, int kN, typename Keep>
TK_DEVICE void score_gradients(const BackwardArguments& a, const KeyBlock& key_block,
                               const TileInfo& info, const RowStats<Shape::kM>& row_stats,
                               int column, int j0, const Keep& keep, Accumulator<1, kN>& s,
                               Accumulator<1, kN>& dp) {
  constexpr bool kHasDropout = std::is_same_v<Keep, DropoutBits<kN>>;
  const BackwardParams& p = a.params;
  const bool plain = has_plain_scores<typename Shape::Element>(p.score);
  const int i0 = info.index * Shape::kM + column;
  const float *const lse = row_stats.lse() + column, *const delta = row_stats.delta() + column;
  wait_gemm<1>(s);
  if (plain) {
    if (!info.full) apply_mask<RowsAre::kKeys>(s, p, sequence_of(a, key_block.b), info.h, i0, j0);
    const auto to_weights = [&](const auto& exponent) {
      s.for_each([&](int, int query, float& x) {
        const bool hidden = !info.full && x == -INFINITY;
        x = exp2_approx(exponent(x, lse[query]));
        if (hidden) x = kHiddenWeight;
      });
    };
    const float scale = static_cast<float>(p.score.scale), unit = scale * kLog2E;
    if (info.natural_lse) {
      to_weights([&](float x, float its_lse) { return minus_lse(x, scale, its_lse) * kLog2E; });
    } else {
      to_weights([&](float x, float its_lse) { return fmaf(x, unit, -its_lse); });
    }
  }
  wait_gemm<0>(dp);
  for_each_element<1, kN>([&](int m, int n, int e) {
    float& x = dp.x[m][n][e];
    if constexpr (kHasDropout) x = keep(n, e) ? x * a.dropout.factor : 0.0f;
    x -= delta[8 * n + column_of(e)];
  });
  if (!plain) {
    const Sequence seq = sequence_of(a, key_block.b);
    const Scores scores = scores_of(a, seq, info.h);
    const auto exponentiate = [&](int row, int query, float& product, float& gradient) {
      const int i = i0 + query, j = j0 + row;
      const Score one = score(scores, product, i, j);
      const float weight = exp2_approx((one.value - lse[query]) * kLog2E);
      product = is_visible(p, seq, info.h, i, j) ? weight : kHiddenWeight;
      gradient *= one.derivative;
    };
    for_each_in_memory(exponentiate, s, dp);
  }
  for_each_element<1, kN>([&](int m, int n, int e) {
    // do may hold NaN in rows that see none of these keys.
    const bool hidden = !info.full && is_hidden_weight(s.x[m][n][e]);
    dp.x[m][n][e] = hidden ? 0.0f : s.x[m][n][e] * dp.x[m][n][e];
    if constexpr (kHasDropout) {
      if (!keep(n, e)) s.x[m][n][e] = 0.0f;  // a conditional expression would use more registers
    }
  });
}

// Stores 64 rows of dk and dv from `row` on, columns from k_column and v_column on, staged through
// the tiles of k and v. Called by a consumer.
template <typename Shape, int kN, int kVN>
TK_DEVICE void epilogue(const BackwardArguments& a, const Shape& shared, const KeyBlock& key_block,
                        Accumulator<1, kN>& dk, Accumulator<1, kVN>& dv, int row, int k_column = 0,
                        int v_column = 0) {
  using Element = typename Shape::Element;
  const BackwardParams& p = a.params;
  const Sequence seq = sequence_of(a, key_block.b);
  const float scale = static_cast<float>(p.score.scale);
  for_each_element<1, kN>([&](int m, int n, int e) { dk.x[m][n][e] *= scale; });
  for_each_element<1, kVN>([&](int m, int n, int e) { dv.x[m][n][e] *= a.dropout.factor; });
  const int j0 = key_block.n * Shape::kN + row;
  const auto dk_rows =
      output_of<Element>(a, a.dk, p.dk, seq.at, key_block.h_kv, seq.first_k, seq.N, p.D);
  const auto dv_rows =
      output_of<Element>(a, a.dv, p.dv, seq.at, key_block.h_kv, seq.first_k, seq.N, p.D_v);
  const typename Shape::KPipeline::State kv_state;
  store(dk, dk_rows, j0, shared.k.tile(kv_state), row, k_column);
  store(dv, dv_rows, j0, shared.v.tile(kv_state), row, v_column);
}

// Offset of a thread's n-th float4 in a consumer's part of dq.
TK_DEVICE int float4_offset(int n) {
  return (n * kWarpgroupThreads + static_cast<int>(threadIdx.x) % kWarpgroupThreads) * 4;
}

// Calls visit(offset, float4) for every four accumulator elements of a thread.
template <int kN, typename Visit>
TK_DEVICE void for_each_float4(const Accumulator<1, kN>& dq, const Visit& visit) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float (&x)[4] = dq.x[0][n];
    visit(float4_offset(n), make_float4(x[0], x[1], x[2], x[3]));
  }
}

}  // namespace tk::cuda::sm90
