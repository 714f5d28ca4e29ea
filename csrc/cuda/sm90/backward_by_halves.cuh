// Backward main loop for q and k of 192 columns and v of 128: as in backward_by_rows.cuh, each of
// two consumers owns 64 keys with their dk and dv. These take 160 registers, so that the scores of
// a query tile are computed in halves, and dq by panels of 64 columns:
//
//   for each half of the queries, 32:
//     s = k q^T, dp = v do^T             keys in rows
//     p = 2^(s - lse), dv += p do        p from registers
//     ds = p (dp - delta)                to shared memory
//   --- barrier: ds of both consumers is complete
//   dq = ds^T k                          of the third panel, the part of the consumer's own keys
//   dk += ds q                           half of the queries; dq is accumulated meanwhile
//   dq = ds^T k                          a panel of 64 columns each
//   dk += ds q                           the other half; dq is accumulated meanwhile
//
// ds is double-buffered. dq is accumulated into global memory from registers.
#pragma once

#include "cuda/sm90/backward_parts.cuh"

namespace tk::cuda::sm90 {

template <typename Element, int kRowWidth, int kRowVWidth>
struct ShapeByHalves : BackwardPipelines<Element, kRowWidth, kRowVWidth> {
  using Pipelines = BackwardPipelines<Element, kRowWidth, kRowVWidth>;
  using Pipelines::kM, Pipelines::kN, Pipelines::kConsumers, Pipelines::kTile, Pipelines::kWidth,
      Pipelines::kVWidth;
  static constexpr int kDqColumns = 64, kPanels = kWidth / kDqColumns;
  static_assert(kM == 64 && kN == kConsumers * kWarpgroupRows && kPanels == kConsumers + 1);

  // A part of dq is 16 rows of a panel.
  static constexpr int kDqParts = kPanels * kWarpgroupWarps, kDqElements = 16 * kDqColumns;
  TK_DEVICE_METHOD static int dq_row(int) { return 0; }
  TK_DEVICE_METHOD static int dq_column(int panel) { return panel * kDqColumns; }

  using DsTile = SharedTile<Element, kN, kM>;
  static constexpr int kTilesBytes = Pipelines::kPipelineTileBytes + 2 * DsTile::kBytes;
  static constexpr int kBytes = kSwizzleAtomBytes + kTilesBytes + Pipelines::kSyncBytes;
  static_assert(kBytes == kTile.bytes(kWidth, kVWidth));

  TK_DEVICE_METHOD explicit ShapeByHalves(unsigned char* shared)
      : ShapeByHalves(SharedCursor{shared, shared + kTilesBytes}) {}

  TK_DEVICE_METHOD DsTile ds(bool second_buffer) const {
    return {first_ds_.data + (second_buffer ? kN * kM : 0)};
  }

 private:
  TK_DEVICE_METHOD explicit ShapeByHalves(SharedCursor cursor)
      : Pipelines(cursor), first_ds_(cursor.tile<DsTile>()) {}

  DsTile first_ds_;
};

template <typename Masks, typename Element, int kRowWidth, int kRowVWidth>
TK_DEVICE void backward_mainloop(const BackwardArguments& a,
                                 const ShapeByHalves<Element, kRowWidth, kRowVWidth>& shared,
                                 const KeyBlock& key_block) {
  using Shape = ShapeByHalves<Element, kRowWidth, kRowVWidth>;
  constexpr int kAll = Shape::kConsumers * kWarpgroupThreads, kHalf = Shape::kM / 2;
  const int consumer = uniform_consumer_index(), row = consumer * kWarpgroupRows,
            warp_row = row + warp_in_warpgroup() * 16;
  const int j0 = key_block.n * Shape::kN;
  typename Shape::QPipeline::State state;
  const auto k = shared.k.tile({});
  const auto v = shared.v.tile({});

  Accumulator<1, Shape::kWidth / 8> dk;
  Accumulator<1, Shape::kVWidth / 8> dv;
  dk.clear();
  dv.clear();
  Masks masks(a, key_block);
  bool last = wait_for_keys(shared), second_buffer = false;
  while (!last) {
    const TileInfo info = wait_for_queries(shared, state);
    last = info.last();
    const auto q = shared.q.tile(state);
    const auto d_o = shared.d_o.tile(state);
    const auto ds_tile = shared.ds(second_buffer);
    shared.q.wait_full(state);
    shared.d_o.wait_full(state);
#pragma unroll
    for (int query = 0; query < Shape::kM; query += kHalf) {
      Accumulator<1, kHalf / 8> s, dp;
      start_gemm_nt(s, k, row, q, query);
      start_gemm_nt(dp, v, row, d_o, query);
      const int i0 = info.index * Shape::kM + query;
      const auto keep = masks.template mask<kHalf / 8>(info, i0, j0 + warp_row);
      const ScoreGradients<Shape, kHalf / 8, std::remove_cv_t<decltype(keep)>> scores(
          a, key_block, info, shared.row_stats.tile(state), query, j0 + warp_row, keep);
      Fragment<Element> weights[kHalf / 16];
      scores.weights(s, dp);
      Accumulator<1, kHalf / 8> dropped = s;
      scores.drop(dropped);
#pragma unroll
      for (int m = 0; m < kHalf / 16; ++m) to_a(weights[m], dropped, 0, m);
      start_gemm_nn(dv, weights, d_o, query);
      scores.template gradients<1>(s, dp);
      store_rounded(ds_tile, warp_row, query, dp);
    }
    release(shared.row_stats, state);
    fence_async();
    named_barrier_sync(kAllConsumersBarrier, kAll);  // ds is complete

    Accumulator<1, Shape::kDqColumns / 8> dq;
    start_gemm_tn<kWarpgroupRows>(dq, ds_tile, 0, k, Shape::kConsumers * Shape::kDqColumns, row);
    start_gemm_nn<kHalf>(dk, ds_tile, row, q, 0, 0);
    wait_gemm<1>(dq);
    wgmma_hold(registers_of(dv));
    release(shared.d_o, state);
    add_dq<Shape>(a, info, Shape::kConsumers * kWarpgroupWarps + warp_in_warpgroup(),
                  info.preceding_blocks() * Shape::kConsumers + consumer, dq);
    start_gemm_tn<Shape::kN>(dq, ds_tile, 0, k, consumer * Shape::kDqColumns);
    start_gemm_nn<kHalf>(dk, ds_tile, row, q, 0, kHalf);
    wait_gemm<1>(dq);
    add_dq<Shape>(a, info, consumer_warp_index(), info.preceding_blocks(), dq);
    wait_gemm<0>(dk);
    release(shared.q, state);
    state.next();
    second_buffer = !second_buffer;
  }

  // The epilogue overwrites k, which the other consumer reads for its last dq.
  named_barrier_sync(kAllConsumersBarrier, kAll);
  epilogue(a, shared, key_block, dk, dv, consumer);
}

}  // namespace tk::cuda::sm90
