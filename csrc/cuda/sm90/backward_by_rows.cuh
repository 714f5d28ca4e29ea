// Backward main loop for widths up to 128: each of two consumers owns 64 keys with their dk and dv.
//
//   s = k q^T, dp = v do^T             keys in rows, so that p and ds are left operands
//   p = 2^(s - lse), ds = p (dp - delta)
//   dv += p do, dk += ds q             p and ds from registers
//   dq = ds^T k                        ds of both consumers, from shared memory; half of dq each
//
// dq is accumulated into global memory by TMA reduction, while s of the next tile is in flight: the
// fence before it would otherwise delay the products.
#pragma once

#include "cuda/sm90/backward_parts.cuh"

namespace tk::cuda::sm90 {

template <typename Element, int kWidth>
struct ShapeByRows : BackwardPipelines<Element, kWidth, kWidth> {
  using Pipelines = BackwardPipelines<Element, kWidth, kWidth>;
  using Pipelines::kM, Pipelines::kN, Pipelines::kConsumers, Pipelines::kTile,
      Pipelines::kDqElements;
  static_assert(kN == kConsumers * kWarpgroupRows);

  // Each consumer computes a 64 x 64 part of dq: a half of its rows, or of its columns.
  static constexpr int kDqColumns = 64;
  static_assert(kM * kWidth == kConsumers * kWarpgroupRows * kDqColumns);
  TK_DEVICE_METHOD static int dq_row(int consumer) { return kM == 64 ? 0 : consumer * 64; }
  TK_DEVICE_METHOD static int dq_column(int consumer) { return kM == 64 ? consumer * 64 : 0; }

  using DsTile = SharedTile<Element, kN, kM>;
  static constexpr int kDqBytes = kDqElements * sizeof(float);  // per warp
  static constexpr int kTilesBytes =
      Pipelines::kPipelineTileBytes + 2 * DsTile::kBytes + Pipelines::kDqParts * kDqBytes;
  static constexpr int kBytes = kSwizzleAtomBytes + kTilesBytes + Pipelines::kSyncBytes;
  static_assert(kBytes == kTile.bytes(kWidth, kWidth));

  float* dq;

  TK_DEVICE_METHOD explicit ShapeByRows(unsigned char* shared)
      : ShapeByRows(SharedCursor{shared, shared + kTilesBytes}) {}

  TK_DEVICE_METHOD DsTile ds(bool second_buffer) const {
    return {first_ds_.data + (second_buffer ? kN * kM : 0)};
  }

 private:
  TK_DEVICE_METHOD explicit ShapeByRows(SharedCursor cursor)
      : Pipelines(cursor), first_ds_(cursor.tile<DsTile>()) {
    cursor.tile<DsTile>();
    dq = reinterpret_cast<float*>(cursor.tiles);
  }

  DsTile first_ds_;
};

// Accumulates a warp's part of dq into dq_sums. Called by one lane.
template <typename Shape>
TK_DEVICE void add_dq(const BackwardArguments& a, const TileInfo& info, const float* from) {
  const int64_t part = dq_part<Shape>(info, consumer_warp_index());
  if (a.dq_semaphore) {
    while (load_acquire(a.dq_semaphore + part) != info.preceding_blocks()) {
    }
    fence_async_global();
  }
  add_bulk(a.dq_sums + part * Shape::kDqElements, from, Shape::kDqBytes);
  commit_stores();
  if (a.dq_semaphore) {
    wait_stores<0>();
    fence_async_global();
    add_release(a.dq_semaphore + part, 1);
  }
}

template <typename Masks, typename Element, int kWidth>
TK_DEVICE void backward_mainloop(const BackwardArguments& a,
                                 const ShapeByRows<Element, kWidth>& shared,
                                 const KeyBlock& key_block) {
  using Shape = ShapeByRows<Element, kWidth>;
  constexpr int kM = Shape::kM, kAll = Shape::kConsumers * kWarpgroupThreads;
  // The product of dv runs while ds is computed, if the weights fit in registers besides s and dp.
  constexpr bool kEarlyDv = kM == 64;
  const int consumer = uniform_consumer_index(), row = consumer * kWarpgroupRows,
            warp_row = row + warp_in_warpgroup() * 16;
  const int j0 = key_block.n * Shape::kN;
  typename Shape::QPipeline::State state;
  const auto k = shared.k.tile({}), v = shared.v.tile({});
  float* const own_dq = shared.dq + consumer_warp_index() * Shape::kDqElements;

  Accumulator<1, kWidth / 8> dk, dv;
  dk.clear();
  dv.clear();
  Masks masks(a, key_block);
  bool last = wait_for_keys(shared), second_buffer = false;
  TileInfo dq_info;  // of the tile whose dq is in shared memory
  dq_info.tile = -1;
  const auto add_previous_dq = [&] {
    fence_async();
    __syncwarp();  // all lanes have stored their dq
    // The same lane waits for the copy below.
    if (dq_info.tile >= 0 && elect_one()) add_dq<Shape>(a, dq_info, own_dq);
  };
  while (!last) {
    const TileInfo info = wait_for_queries(shared, state);
    last = info.last();
    Accumulator<1, kM / 8> s, dp;
    shared.q.wait_full(state);
    start_gemm_nt(s, k, row, shared.q.tile(state));
    add_previous_dq();  // while s is in flight
    shared.d_o.wait_full(state);
    start_gemm_nt(dp, v, row, shared.d_o.tile(state));
    const auto keep = masks.template mask<kM / 8>(info, info.index * kM, j0 + warp_row);
    const ScoreGradients<Shape, kM / 8, std::remove_cv_t<decltype(keep)>> scores(
        a, key_block, info, shared.row_stats.tile(state), 0, j0 + warp_row, keep);
    Fragment<Element> weights[kM / 16], ds[kM / 16];
    const auto start_dv = [&] {
      Accumulator<1, kM / 8> dropped = s;
      scores.drop(dropped);
#pragma unroll
      for (int m = 0; m < kM / 16; ++m) to_a(weights[m], dropped, 0, m);
      start_gemm_nn(dv, weights, shared.d_o.tile(state));
    };
    scores.weights(s, dp);
    if constexpr (kEarlyDv) {
      start_dv();
      scores.template gradients<1>(s, dp);
    } else {
      scores.template gradients<0>(s, dp);
    }
    release(shared.row_stats, state);
#pragma unroll
    for (int m = 0; m < kM / 16; ++m) to_a(ds[m], dp, 0, m);
    if constexpr (!kEarlyDv) start_dv();
    const auto ds_tile = shared.ds(second_buffer);
    store_fragments<kM / 16>(ds_tile, warp_row, 0, [&](int m) { return ds[m]; });
    fence_async();
    if (elect_one()) wait_stores_read<0>();
    named_barrier_sync(kAllConsumersBarrier, kAll);  // ds is complete; previous dq was read

    Accumulator<1, Shape::kDqColumns / 8> dq;
    start_gemm_tn<Shape::kN>(dq, ds_tile, Shape::dq_row(consumer), k, Shape::dq_column(consumer));
    start_gemm_nn(dk, ds, shared.q.tile(state));
    wait_gemm<1>(dq);
    wgmma_hold(registers_of(dv));
    release(shared.d_o, state);
    for_each_float4(dq, own_dq,
                    [](float* to, const float4& x) { *reinterpret_cast<float4*>(to) = x; });
    dq_info = info;
    wait_gemm<0>(dk);
    release(shared.q, state);
    state.next();
    second_buffer = !second_buffer;
  }
  add_previous_dq();
  // The epilogue overwrites k, which the other consumer reads for its last dq.
  named_barrier_sync(kAllConsumersBarrier, kAll);

  epilogue(a, shared, key_block, dk, dv, consumer);
}

}  // namespace tk::cuda::sm90
