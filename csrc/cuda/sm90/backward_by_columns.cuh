// Backward main loop for widths above 128: two consumers share 64 keys. Each owns half of the
// columns of dk, dv and dq; the scores are split by queries:
//
//   s = k q^T, dp = v do^T             32 queries per consumer
//   p = 2^(s - lse), ds = p (dp - delta)
//   --- barrier: p and ds of all queries are in shared memory
//   dq = ds^T k, dv += p do, dk += ds q     half of the columns each
//   dq is accumulated into global memory from registers, while dv and dk are in flight
//
// p and ds are double-buffered: one consumer may write the next tile while the other still reads
// this one, so one barrier per query tile suffices.
#pragma once

#include "cuda/sm90/backward_parts.cuh"

namespace tk::cuda::sm90 {

template <typename Element, int kRowWidth, int kRowVWidth>
struct ShapeByColumns : BackwardPipelines<Element, kRowWidth, kRowVWidth> {
  using Pipelines = BackwardPipelines<Element, kRowWidth, kRowVWidth>;
  using Pipelines::kM, Pipelines::kN, Pipelines::kConsumers, Pipelines::kTile, Pipelines::kWidth,
      Pipelines::kVWidth, Pipelines::kDqElements;
  static_assert(kM == 64 && kN == kWarpgroupRows);

  static constexpr int kDqColumns = kWidth / kConsumers;
  TK_DEVICE_METHOD static int dq_row(int) { return 0; }
  TK_DEVICE_METHOD static int dq_column(int consumer) { return consumer * kDqColumns; }

  using ScoreTile = SharedTile<Element, kN, kM>;
  struct ScoreTiles {
    ScoreTile p, ds;
  };
  static constexpr int kScoreTileElements = kN * kM;
  static constexpr int kTilesBytes = Pipelines::kPipelineTileBytes + 4 * ScoreTile::kBytes;
  static constexpr int kBytes = kSwizzleAtomBytes + kTilesBytes + Pipelines::kSyncBytes;
  static_assert(kBytes == kTile.bytes(kWidth, kVWidth));

  TK_DEVICE_METHOD explicit ShapeByColumns(unsigned char* shared)
      : ShapeByColumns(SharedCursor{shared, shared + kTilesBytes}) {}

  TK_DEVICE_METHOD ScoreTiles score_tiles(bool second_buffer) const {
    Element* const from = first_ + (second_buffer ? 2 * kScoreTileElements : 0);
    return {{from}, {from + kScoreTileElements}};
  }

 private:
  TK_DEVICE_METHOD explicit ShapeByColumns(SharedCursor cursor)
      : Pipelines(cursor), first_(cursor.tile<ScoreTile>().data) {}

  Element* first_;
};

template <typename Masks, typename Element, int kRowWidth, int kRowVWidth>
TK_DEVICE void backward_mainloop(const BackwardArguments& a,
                                 const ShapeByColumns<Element, kRowWidth, kRowVWidth>& shared,
                                 const KeyBlock& key_block) {
  using Shape = ShapeByColumns<Element, kRowWidth, kRowVWidth>;
  constexpr int kAll = Shape::kConsumers * kWarpgroupThreads,
                kQueries = Shape::kM / Shape::kConsumers;
  const int consumer = uniform_consumer_index(), warp_row = warp_in_warpgroup() * 16;
  const int query = consumer * kQueries, j0 = key_block.n * Shape::kN;
  const int k_column = Shape::dk_column(consumer), v_column = Shape::dv_column(consumer);
  typename Shape::QPipeline::State state;
  const auto k = shared.k.tile({});
  const auto v = shared.v.tile({});

  Accumulator<1, Shape::kDkColumns / 8> dk;
  Accumulator<1, Shape::kDvColumns / 8> dv;
  dk.clear();
  dv.clear();
  Masks masks(a, key_block);
  bool last = wait_for_keys(shared), second_buffer = false;
  while (!last) {
    shared.row_stats.wait_full(state);
    const TileInfo info = shared.row_stats.tile_info(state);
    last = info.last();
    Accumulator<1, kQueries / 8> s, dp;
    shared.q.wait_full(state);
    start_gemm_nt(s, k, 0, shared.q.tile(state), query);
    shared.d_o.wait_full(state);
    start_gemm_nt(dp, v, 0, shared.d_o.tile(state), query);
    const int i0 = info.index * Shape::kM + query;
    const auto keep = masks.template mask<kQueries / 8>(info, i0, j0 + warp_row);
    const ScoreGradients<Shape, kQueries / 8, std::remove_cv_t<decltype(keep)>> scores(
        a, key_block, info, shared.row_stats.tile(state), query, j0 + warp_row, keep);
    scores.weights(s, dp);
    scores.template gradients<0>(s, dp);
    scores.drop(s);
    release(shared.row_stats, state);
    const auto [p_tile, ds_tile] = shared.score_tiles(second_buffer);
    store_rounded(p_tile, warp_row, query, s);
    store_rounded(ds_tile, warp_row, query, dp);
    fence_async();
    named_barrier_sync(kAllConsumersBarrier, kAll);  // p and ds are complete

    Accumulator<1, Shape::kDqColumns / 8> dq;
    start_gemm_tn<Shape::kN>(dq, ds_tile, 0, k, k_column);
    start_gemm_nn<Shape::kM>(dv, p_tile, 0, shared.d_o.tile(state), v_column);
    start_gemm_nn<Shape::kM>(dk, ds_tile, 0, shared.q.tile(state), k_column);
    wait_gemm<2>(dq);
    add_dq<Shape>(a, info, consumer_warp_index(), info.preceding_blocks(), dq);
    wait_gemm<0>(dv);
    wgmma_hold(registers_of(dk));
    release(shared.q, state);
    release(shared.d_o, state);
    state.next();
    second_buffer = !second_buffer;
  }

  // The epilogue overwrites k with dk. Waiting for a wgmma is not specified to cover the parts of
  // the other warps of the warpgroup, which may still read k.
  consumer_sync();
  epilogue(a, shared, key_block, dk, dv, consumer);
}

}  // namespace tk::cuda::sm90
