// Backward pass, shared parts of the main loops: producer, score gradients, epilogue of dk and
// dv.
#pragma once

#include "cuda/common/dropout.cuh"
#include "cuda/common/masks.cuh"
#include "cuda/sm90/backward_preprocess.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/exp2_polynomial.cuh"

namespace tk::cuda::sm90 {

// Shared-memory pipelines of the inputs. kRowWidth bounds the width of q and k, kRowVWidth of v and
// do.
template <typename Element_, int kRowWidth, int kRowVWidth>
struct BackwardPipelines {
  using Element = Element_;
  static constexpr int kWidth = kRowWidth, kVWidth = kRowVWidth;
  static constexpr HopperBackwardTile kTile = hopper_backward_tile(kWidth);
  static constexpr int kM = kTile.block_m, kN = kTile.block_n, kConsumers = kTile.kConsumers;
  static constexpr int kProducerRegisters = kTile.producer_registers(),
                       kRegisters = kTile.registers();
  static constexpr int kDqParts = kTile.kConsumerWarps, kDqElements = kM * kWidth / kDqParts;

  // dk and dv of a consumer: those of 64 keys, or half of the columns if there are only 64.
  static constexpr bool kByColumns = kN == kWarpgroupRows;
  static constexpr int kDkColumns = kByColumns ? kWidth / kConsumers : kWidth,
                       kDvColumns = kByColumns ? kVWidth / kConsumers : kVWidth;
  TK_DEVICE_METHOD static int key_row(int consumer) {
    return kByColumns ? 0 : consumer * kWarpgroupRows;
  }
  TK_DEVICE_METHOD static int dk_column(int consumer) {
    return kByColumns ? consumer * kDkColumns : 0;
  }
  TK_DEVICE_METHOD static int dv_column(int consumer) {
    return kByColumns ? consumer * kDvColumns : 0;
  }

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

// Index of a part of dq of a tile, in dq_sums and dq_semaphore.
template <typename Shape>
TK_DEVICE int64_t dq_part(const TileInfo& info, int part) {
  return int64_t{info.tile} * Shape::kDqParts + part;
}

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

// Producer: loads k and v once, then every query tile of this CTA that sees some of these keys.
template <typename Shape>
TK_DEVICE void load(const BackwardArguments& a, const Shape& shared, const KeyBlock& key_block) {
  using Element = typename Shape::Element;
  constexpr int kM = Shape::kM, kN = Shape::kN;
  const BackwardParams& p = a.params;
  const Sequence seq = sequence_of(a, key_block.b);
  const int j0 = key_block.n * kN, j1 = j0 + kN;
  const bool is_varlen = a.varlen.cu_seqlens_q != nullptr;

  const QueryTiles tiles(query_blocks(seq, j0, j1, kM), key_block.h_kv, a.by_sharing,
                         key_block.split, a.by_splits.divisor());
  const auto visible = [&](int n) {
    const auto [m, h] = tiles.at(n);
    return tile_visible(p, seq, h, m * kM, min((m + 1) * kM, seq.M), j0, j1);
  };
  BlockIterator iterator(tiles.range(), visible);
  Block block = iterator.next();
  const typename Shape::KPipeline::State kv_state;
  typename Shape::QPipeline::State state;

  // Dead keys may hold NaN, and 0 x NaN in a matrix product is NaN: they are loaded as zeros.
  const LiveKeys live_keys = live_keys_of(a, seq, key_block.h_kv);
  const bool has_dead_keys = has_dead_rows(live_keys, j0, is_varlen ? j1 : min(j1, seq.N));
  if (elect_one()) {
    // last: no query sees this block
    TileInfo info(key_block.n, 0, false, block.index < 0);
    info.tile = key_block.program;
    shared.k.tile_info(kv_state) = info;
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
    const auto [m, h] = tiles.at(block.index);
    const int i0 = m * kM;
    TileInfo info(m, h, block.full, false);
    info.tile = query_tile<kM>(a, a.row_tiles, seq, h, m);
    if (a.dq_semaphore) {
      info.set_preceding_blocks(preceding_key_blocks<Shape>(a, seq, h, i0, key_block.n));
    }
    const float* const row_stats = a.row_stats + int64_t{info.tile} * RowStats<kM>::kStored;
    block = iterator.next();
    if (block.index < 0) info.set_last();
    shared.row_stats.wait_empty(state);
    if (!a.score.plain ||
        any_row(i0, i0 + kM, [&](int i) { return is_large(row_stats[i - i0]); })) {
      info.set_natural_lse();
    }
    if (elect_one()) {
      shared.row_stats.tile_info(state) = info;
      mbarrier_arrive_expect(shared.row_stats.full(state), RowStats<kM>::kBytes);
      const float* const from = info.natural_lse() ? row_stats + 2 * kM : row_stats;
      load_bulk(shared.row_stats.tile(state).data, from, RowStats<kM>::kBytes,
                shared.row_stats.full(state));
    }
    const auto is_live = [&](int i) { return i < seq.M && row_stats[i - i0] < INFINITY; };
    const bool zero_dead_rows =
        !(info.full() && i0 + kM <= seq.M) &&
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

// Consumer: waits for k and v. Returns true if no query tile follows.
template <typename Shape>
TK_DEVICE bool wait_for_keys(const Shape& shared) {
  const typename Shape::KPipeline::State kv_state;
  shared.k.wait_full(kv_state);
  shared.v.wait_full(kv_state);
  return shared.k.tile_info(kv_state).last();
}

// Consumer: waits for the row statistics of a query tile. Returns its TileInfo, warp-uniform as is
// `state`.
template <typename Shape>
TK_DEVICE TileInfo wait_for_queries(const Shape& shared, typename Shape::QPipeline::State& state) {
  state.make_uniform();
  shared.row_stats.wait_full(state);
  return uniform(shared.row_stats.tile_info(state));
}

// Policy of the kernels without dropout.
struct NoDropout {
  struct KeepAll {
    static constexpr bool kDropsWeights = false;
  };

  TK_DEVICE_METHOD NoDropout(const BackwardArguments&, const KeyBlock&) {}
  template <int>
  TK_DEVICE_METHOD KeepAll mask(const TileInfo&, int, int) const {
    return {};
  }
};

// Policy of the kernels with dropout: every consumer warp draws the mask of its own elements, while
// it would wait for the products.
class WithDropout {
 public:
  TK_DEVICE_METHOD WithDropout(const BackwardArguments& a, const KeyBlock& key_block)
      : dropout_(a.dropout), b_(key_block.b) {}

  // Mask of a warp's 16 keys from j0 on, and of 8 kN queries from i0 on.
  template <int kN>
  TK_DEVICE_METHOD DropoutMask<RowsAre::kKeys, 1, kN> mask(const TileInfo& info, int i0, int j0) {
    if (info.h != h_) head_ = philox_head(dropout_, b_, h_ = info.h);
    DropoutMask<RowsAre::kKeys, 1, kN> mask;
    mask.draw(dropout_, head_, i0, j0);
    return mask;
  }

 private:
  const Dropout& dropout_;
  int b_, h_ = -1;
  PhiloxHead head_{};
};

// Score gradients of a warp's 16 keys from j0 on, and of 8 kN queries from `column` of the tile on:
// first the weights, then the gradients, so that products with the weights can start in between.
template <typename Shape, int kN, typename Keep>
class ScoreGradients {
 public:
  TK_DEVICE_METHOD ScoreGradients(const BackwardArguments& a, const KeyBlock& key_block,
                                  const TileInfo& info, const RowStats<Shape::kM>& row_stats,
                                  int column, int j0, const Keep& keep)
      : a_(a),
        key_block_(key_block),
        info_(info),
        i0_(info.index * Shape::kM + column),
        j0_(j0),
        lse_(row_stats.lse() + column + column_of(0)),
        delta_(row_stats.delta() + column + column_of(0)),
        keep_(keep) {}

  // Replaces s by the weights without dropout. s and dp are the latest two products.
  TK_DEVICE_METHOD void weights(Accumulator<1, kN>& s, Accumulator<1, kN>& dp) const {
    const BackwardParams& p = a_.params;
    wait_gemm<1>(s);
    if (!a_.score.plain) {
      wait_gemm<0>(dp);
      subtract_delta(dp);
      return weights_of_scores(s, dp);
    }
    if (!info_.full()) {
      apply_mask<RowsAre::kKeys>(s, p, sequence_of(a_, key_block_.b), info_.h, i0_, j0_);
    }
    const float scale = a_.score.scale, unit = scale * kLog2E;
    const auto fused = [&](float x, float lse) { return fmaf(x, unit, -lse); };
    if (info_.natural_lse()) {
      for_each_query(lse_, [&](int n, int e, float lse) {
        s.x[0][n][e] = minus_lse(s.x[0][n][e], scale, lse);
      });
      exponentiate<true, false>(s, lse_rest(), exact_exponent);
    } else if (info_.full()) {
      exponentiate<false, kHasPolynomials>(s, lse_, fused);
    } else {
      exponentiate<true, kHasPolynomials>(s, lse_, fused);
    }
  }

  // Replaces dp by da. kPending is the number of products issued after dp.
  template <int kPending>
  TK_DEVICE_METHOD void gradients(const Accumulator<1, kN>& s, Accumulator<1, kN>& dp) const {
    wait_gemm<kPending>(dp);
    if (a_.score.plain) subtract_delta(dp);
    if (info_.full()) {
      for_each_element<1, kN>([&](int m, int n, int e) { dp.x[m][n][e] *= s.x[m][n][e]; });
      return;
    }
    for_each_element<1, kN>([&](int m, int n, int e) {
      // do may hold NaN in rows that see none of these keys.
      float& x = dp.x[m][n][e];
      x = is_hidden_weight(s.x[m][n][e]) ? 0.0f : s.x[m][n][e] * x;
    });
  }

  // Applies dropout to the weights, without its factor.
  TK_DEVICE_METHOD void drop(Accumulator<1, kN>& s) const {
    if constexpr (kHasDropout) {
      for_each_element<1, kN>([&](int m, int n, int e) {
        if (!keep_(0, n, e))
          s.x[m][n][e] = 0.0f;  // a conditional expression would use more registers
      });
    }
  }

 private:
  static constexpr bool kHasDropout = Keep::kDropsWeights;

  // The rounding errors of lse, from the lane's first query on, in global memory.
  TK_DEVICE_METHOD const float* lse_rest() const {
    const int64_t first = info_.tile * int64_t{RowStats<Shape::kM>::kStored} + 4 * Shape::kM;
    return a_.row_stats + first + (i0_ - info_.index * Shape::kM) + column_of(0);
  }

  // Calls visit(n, e, statistic) for every element, with a statistic of its query.
  template <typename Visit>
  TK_DEVICE_METHOD static void for_each_query(const float* of_queries, const Visit& visit) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(of_queries + 8 * n);
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(n, e, e % 2 ? pair.y : pair.x);
    }
  }

  // At width 64 the exponentials take twice as much of the time of the products as at width 128, so
  // that three of eight are computed by multiply-adds. Masked tiles have them, too: the bits of a
  // result do not depend on how the mask is written.
  static constexpr bool kHasPolynomials = Shape::kWidth <= 64;

  template <bool kSomeHidden, bool kPolynomials, typename Exponent>
  TK_DEVICE_METHOD void exponentiate(Accumulator<1, kN>& s, const float* of_queries,
                                     const Exponent& exponent) const {
    for_each_query(of_queries, [&](int n, int e, float of_query) {
      float& x = s.x[0][n][e];
      const bool hidden = kSomeHidden && x == -INFINITY;
      x = exponent(x, of_query);
      x = kPolynomials && (4 * n + e) % 8 < 3 ? exp2_polynomial(x) : exp2_approx(x);
      if (hidden) x = kHiddenWeight;
    });
  }

  TK_DEVICE_METHOD void subtract_delta(Accumulator<1, kN>& dp) const {
    for_each_query(delta_, [&](int n, int e, float delta) {
      float& x = dp.x[0][n][e];
      if constexpr (kHasDropout) {
        x = fmaf(x, keep_(0, n, e) ? a_.dropout.factor : 0.0f, -delta);
      } else {
        x -= delta;
      }
    });
  }

  // Weights of scores with options, whose derivatives multiply dp.
  TK_DEVICE_METHOD void weights_of_scores(Accumulator<1, kN>& s, Accumulator<1, kN>& dp) const {
    const Sequence seq = sequence_of(a_, key_block_.b);
    const Scores scores = scores_of(a_, seq, info_.h);
    const float *const lse = lse_ - column_of(0), *const rest = lse_rest() - column_of(0);
    const auto differentiate = [&](int row, int query, float& product, float& gradient) {
      const int i = i0_ + query, j = j0_ + row;
      const Score one = score(scores, product, i, j);
      const float weight = exp2_approx(exact_exponent(one.value - lse[query], rest[query]));
      product = is_visible(a_.params, seq, info_.h, i, j) ? weight : kHiddenWeight;
      gradient *= one.derivative;
    };
    for_each_in_memory(differentiate, s, dp);
  }

  const BackwardArguments& a_;
  const KeyBlock& key_block_;
  const TileInfo& info_;
  const int i0_, j0_;
  const float *const lse_, *const delta_;  // of the lane's first query
  const Keep& keep_;
};

// A lane's first float4 in a warp's part of the sums of dq, dk or dv. The others follow at
// multiples of kFloat4Step, which are immediate operands.
template <typename Float>
TK_DEVICE Float* first_float4(Float* part) {
  return part + 4 * lane_index();
}
constexpr int kFloat4Step = 4 * kWarp;

// Calls visit(to, float4) for every four accumulator elements of a thread, with their place in a
// warp's part.
template <int kN, typename Visit>
TK_DEVICE void for_each_float4(const Accumulator<1, kN>& sums, float* part, const Visit& visit) {
  float* const first = first_float4(part);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float (&x)[4] = sums.x[0][n];
    visit(first + n * kFloat4Step, make_float4(x[0], x[1], x[2], x[3]));
  }
}

// A warp's part of key_sums, of one CTA: dk, then dv.
template <typename Shape>
TK_DEVICE float* key_sums(const BackwardArguments& a, int64_t program, int warp) {
  constexpr int kElements = 16 * (Shape::kDkColumns + Shape::kDvColumns);
  return a.key_sums + (program * Shape::kTile.kConsumerWarps + warp) * kElements;
}

// Stores dk and dv of a consumer, staged through the tiles of k and v. If CTAs share the key block
// it stores its sums instead. Called at the end.
template <typename Shape, int kN, int kVN>
TK_DEVICE void epilogue(const BackwardArguments& a, const Shape& shared, const KeyBlock& key_block,
                        Accumulator<1, kN>& dk, Accumulator<1, kVN>& dv, int consumer) {
  using Element = typename Shape::Element;
  const BackwardParams& p = a.params;
  const typename Shape::KPipeline::State kv_state;
  if (a.by_splits.divisor() > 1) {
    // Read from shared memory, because registers are scarce in the main loop.
    const int program = shared.k.tile_info(kv_state).tile;
    float* const sums = key_sums<Shape>(a, program, consumer_warp_index());
    const auto store_sum = [](float* to, const float4& x) { *reinterpret_cast<float4*>(to) = x; };
    for_each_float4(dk, sums, store_sum);
    for_each_float4(dv, sums + 16 * Shape::kDkColumns, store_sum);
    wait_stores_read<0>();  // of dq
    return;
  }
  const Sequence seq = sequence_of(a, key_block.b);
  for_each_element<1, kN>([&](int m, int n, int e) { dk.x[m][n][e] *= a.score.scale; });
  for_each_element<1, kVN>([&](int m, int n, int e) { dv.x[m][n][e] *= a.dropout.factor; });
  const int row = Shape::key_row(consumer), j0 = key_block.n * Shape::kN + row;
  const auto dk_rows =
      output_of<Element>(a, a.dk, p.dk, seq.at, key_block.h_kv, seq.first_k, seq.N, p.D);
  const auto dv_rows =
      output_of<Element>(a, a.dv, p.dv, seq.at, key_block.h_kv, seq.first_k, seq.N, p.D_v);
  store(dk, dk_rows, j0, shared.k.tile(kv_state), row, Shape::dk_column(consumer));
  store(dv, dv_rows, j0, shared.v.tile(kv_state), row, Shape::dv_column(consumer));
  wait_stores_read<0>();  // of dk, dv and dq
}

// Accumulates a part of dq into dq_sums, from the registers of a warp. `turn` is the number of
// additions to this part before it, in deterministic mode.
template <typename Shape, int kN>
TK_DEVICE void add_dq(const BackwardArguments& a, const TileInfo& info, int part_in_tile, int turn,
                      const Accumulator<1, kN>& dq) {
  const int64_t part = dq_part<Shape>(info, part_in_tile);
  if (a.dq_semaphore) {
    if (lane_index() == 0) {
      while (load_acquire(a.dq_semaphore + part) != turn) {
      }
    }
    __syncwarp();
  }
  for_each_float4(dq, a.dq_sums + part * Shape::kDqElements,
                  [](float* to, const float4& x) { add_to(to, x); });
  if (a.dq_semaphore) {
    __threadfence();
    __syncwarp();
    if (lane_index() == 0) add_release(a.dq_semaphore + part, 1);
  }
}

}  // namespace tk::cuda::sm90
