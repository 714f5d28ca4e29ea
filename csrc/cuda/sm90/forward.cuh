// Forward pass on Hopper. A producer warp loads tiles by TMA; each consumer warpgroup owns 64
// queries and iterates over the key blocks that they see:
//
//   s = q k^T                         next key block, overlapping o += p v of the current one
//   m' = max(m, max s), p = 2^(s - m'), l = l 2^(m - m') + sum p
//   o = o 2^(m - m')                  after p v, and only if m grew by more than 8 (softmax.cuh)
//
// Consumers issue their matrix products in ping-pong order, so that the products of one overlap the
// softmax of another. See docs/hopper.md.
#pragma once

#include "cuda/common/dropout.cuh"
#include "cuda/common/masks.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/tile_scheduler.cuh"

namespace tk::cuda::sm90 {

struct ForwardArguments : Arguments<ForwardParams> {
  TileScheduler scheduler;
  TensorMap q, k, v, o;
};

template <typename Element_, int kWidth, int kVWidth>
struct ForwardShape {
  using Element = Element_;
  static constexpr HopperForwardTile kTile = hopper_forward_tile(kWidth);
  static constexpr int kM = kTile.block_m(), kN = kTile.block_n;
  static_assert(kVWidth <= kWidth);  // o is staged in the tile of q

  using QPipeline = Pipeline<SharedTile<Element, kM, kWidth>, kTile.q_stages, WorkTile>;
  using KPipeline = Pipeline<SharedTile<Element, kN, kWidth>, kTile.stages>;
  using VPipeline = Pipeline<SharedTile<Element, kN, kVWidth>, kTile.stages>;
  using OTile = SharedTile<Element, kM, kVWidth>;
  static constexpr int kTileBytes =
      QPipeline::kTileBytes + KPipeline::kTileBytes + VPipeline::kTileBytes;
  static constexpr int kBytes = kSwizzleAtomBytes + kTileBytes + QPipeline::kSyncBytes +
                                KPipeline::kSyncBytes + VPipeline::kSyncBytes;
  static_assert(kBytes == kTile.bytes(kWidth, kVWidth));

  QPipeline q;
  KPipeline k;
  VPipeline v;

  TK_DEVICE_METHOD explicit ForwardShape(unsigned char* shared)
      : ForwardShape(SharedCursor{shared, shared + kTileBytes}) {}

 private:
  TK_DEVICE_METHOD explicit ForwardShape(SharedCursor cursor)
      : q(cursor.pipeline<QPipeline>()),
        k(cursor.pipeline<KPipeline>()),
        v(cursor.pipeline<VPipeline>()) {}
};

// One thread's position in each pipeline.
template <typename Shape>
struct ForwardPipelineStates {
  typename Shape::QPipeline::State q;
  typename Shape::KPipeline::State k;
  typename Shape::VPipeline::State v;
};

// Producer: loads q, k and v of every tile of this CTA.
template <typename Shape>
TK_DEVICE void load(const ForwardArguments& a, const Shape& shared) {
  constexpr int kM = Shape::kM, kN = Shape::kN;
  const ForwardParams& p = a.params;
  const bool is_varlen = a.varlen.cu_seqlens_q != nullptr;
  ForwardPipelineStates<Shape> state;
  for_each_tile(a, a.scheduler, kM, [&](const WorkTile& tile) {
    const Sequence seq = sequence_of(a, tile.b);
    const int h_kv = tile.h / static_cast<int>(p.H_q / p.H_kv);
    const int i0 = tile.i0, i1 = min(i0 + kM, seq.M);
    const LiveKeys live_keys = live_keys_of(a, seq, h_kv);
    const auto load_k = [&](const Block& block, bool last) {
      shared.k.wait_empty(state.k);
      if (elect_one()) {
        shared.k.tile_info(state.k) = {block.index, tile.h, block.full, last};
        fill_by_tma(shared.k, state.k, a.k, seq.first_k + block.index * kN, h_kv, seq.at);
      }
      state.k.next();
    };
    const auto load_v = [&](const Block& block) {
      // Dead values may hold NaN, and 0 x NaN in p v is NaN: they are loaded as zeros.
      const int j0 = block.index * kN, j1 = is_varlen ? j0 + kN : min(j0 + kN, seq.N);
      shared.v.wait_empty(state.v);
      if (!block.full && has_dead_rows(live_keys, j0, j1)) {
        using Element = typename Shape::Element;
        const auto v = rows_of<const Element>(p.v, seq.at, h_kv, seq.first_k, p.D_v);
        fill_live_rows(shared.v, state.v, v, j0, live_keys);
      } else if (elect_one()) {
        fill_by_tma(shared.v, state.v, a.v, seq.first_k + j0, h_kv, seq.at);
      }
      state.v.next();
    };

    const auto visible = [&](int n) {
      return tile_visible(p, seq, tile.h, i0, i1, n * kN, (n + 1) * kN);
    };
    BlockIterator iterator(key_blocks(seq, i0, i1, kN), visible);
    Block block = iterator.next();
    Block next = block.index >= 0 ? iterator.next() : block;
    if (block.index >= 0) load_k(block, next.index < 0);
    shared.q.wait_empty(state.q);
    if (elect_one()) {
      shared.q.tile_info(state.q) = {tile.b, tile.h, i0, block.index >= 0};
      fill_by_tma(shared.q, state.q, a.q, seq.first_q + i0, tile.h, seq.at);
    }
    state.q.next();
    while (block.index >= 0) {
      const Block after = next.index >= 0 ? iterator.next() : next;
      if (next.index >= 0) load_k(next, after.index < 0);
      load_v(block);
      block = next;
      next = after;
    }
  });
  shared.q.wait_empty(state.q);
  if (elect_one()) {
    shared.q.tile_info(state.q) = WorkTile::none();
    mbarrier_arrive(shared.q.full(state.q));
  }
}

// Ping-pong scheduler: one consumer at a time issues its matrix products.
template <int kConsumers>
struct PingPong {
  int consumer;

  TK_DEVICE_METHOD void begin() const {
    if (consumer == kConsumers - 1) signal_next();
  }
  TK_DEVICE_METHOD void wait() const {
    named_barrier_sync(kPingPongBarrier + consumer, 2 * kWarpgroupThreads);
  }
  TK_DEVICE_METHOD void signal_next() const {
    named_barrier_arrive(kPingPongBarrier + (consumer + 1) % kConsumers, 2 * kWarpgroupThreads);
  }
};

// Accumulators of one consumer over all key blocks.
template <typename Shape>
struct ForwardAccumulators {
  static constexpr int kColumns = Shape::OTile::kWidth / 8;
  Accumulator<1, kColumns> o;
  SoftmaxState<1> softmax;

  TK_DEVICE_METHOD void rescale(const float (&factor)[2]) {
    for (int half = 0; half < 2; ++half) softmax.multiply(o, 0, half, factor[half]);
  }
};

// Main loop of a consumer over the key blocks seen by rows [row, row + 64) of the tile. i0 is the
// first query of the calling warp.
template <typename Shape>
TK_DEVICE void forward_mainloop(const ForwardArguments& a, const Shape& shared,
                                ForwardPipelineStates<Shape>& state, const WorkTile& tile, int row,
                                int i0, const PingPong<Shape::kTile.consumers>& ping_pong,
                                ForwardAccumulators<Shape>& acc) {
  using Element = typename Shape::Element;
  constexpr int kN = Shape::kN;
  const ForwardParams& p = a.params;
  const bool plain = a.score.plain;
  const float unit = plain ? a.score.scale * kLog2E : kLog2E;

  Accumulator<1, kN / 8> s;
  Fragment<Element> weights[kN / 16];
  float rescale[2];
  const auto finish_scores = [&](const TileInfo& block) {
    const int j0 = block.index * kN;
    if (!plain) apply(s, a, sequence_of(a, tile.b), tile.h, i0, j0);
    if (!block.full()) apply_mask(s, p, sequence_of(a, tile.b), tile.h, i0, j0);
    rescale[0] = rescale[1] = 1.0f;
    acc.softmax.template update_max<Element>(
        s, unit, [&](int, int half, float factor) { rescale[half] = factor; });
    acc.softmax.template exponentiate<Element>(s, unit);
    if (a.dropout.seed) drop(s, a.dropout, tile.b, tile.h, i0, j0);
  };
  const auto round_weights = [&] {
#pragma unroll
    for (int k = 0; k < kN / 16; ++k) to_a(weights[k], s, 0, k);
  };
  const auto release = [](const auto& pipeline, auto& position) {
    __syncwarp();  // all lanes have read the TileInfo
    if (lane_index() == 0) pipeline.release(position);
    position.next();
  };

  shared.k.wait_full(state.k);
  TileInfo block = shared.k.tile_info(state.k);
  start_gemm_nt(s, shared.q.tile(state.q), row, shared.k.tile(state.k));
  wait_gemm<0>(s);
  release(shared.k, state.k);
  finish_scores(block);
  round_weights();
  while (!block.last()) {
    shared.k.wait_full(state.k);
    block = shared.k.tile_info(state.k);
    ping_pong.wait();
    start_gemm_nt(s, shared.q.tile(state.q), row, shared.k.tile(state.k));
    shared.v.wait_full(state.v);
    start_gemm_nn(acc.o, weights, shared.v.tile(state.v));
    ping_pong.signal_next();
    wait_gemm<1>(s);
    release(shared.k, state.k);
    finish_scores(block);
    wait_gemm<0>(acc.o);
    release(shared.v, state.v);
    if (rescale[0] != 1.0f || rescale[1] != 1.0f) acc.rescale(rescale);
    round_weights();
  }
  shared.v.wait_full(state.v);
  start_gemm_nn(acc.o, weights, shared.v.tile(state.v));
  wait_gemm<0>(acc.o);
  release(shared.v, state.v);
}

// Stores o and lse of rows [row, row + 64) of the tile. o is staged in the tile of q.
template <typename Shape>
TK_DEVICE void epilogue(const ForwardArguments& a, const Shape& shared,
                        const ForwardPipelineStates<Shape>& state, const WorkTile& tile, int row,
                        int i0, ForwardAccumulators<Shape>& acc) {
  using Element = typename Shape::Element;
  const ForwardParams& p = a.params;
  const Sequence seq = sequence_of(a, tile.b);
  float* const lse = static_cast<float*>(p.lse) + statistics_offset(p, seq, tile.h);
  const float unit = a.score.plain ? a.score.scale : 1.0f;
  acc.softmax.finish(a.dropout.factor, unit, [&](int, int half, float share, float x) {
    acc.softmax.multiply(acc.o, 0, half, share);
    const int i = i0 + row_of(2 * half);
    if (i < seq.M && lane_index() % 4 == 0) lse[i] = x;
  });
  const auto o = output_of<Element>(a, a.o, p.o, seq.at, tile.h, seq.first_q, seq.M, p.D_v);
  store(acc.o, o, tile.i0 + row, typename Shape::OTile{shared.q.tile(state.q).data}, row);
}

template <typename Element, int kWidth, int kVWidth>
TK_KERNEL(hopper_forward_tile(kWidth).threads(), 1)
forward_kernel(const __grid_constant__ ForwardArguments a) {
  using Shape = ForwardShape<Element, kWidth, kVWidth>;
  constexpr HopperForwardTile kTile = Shape::kTile;
  TK_SHARED_MEMORY(memory);
  const Shape shared(align_shared(memory, kSwizzleAtomBytes));
  if (threadIdx.x == 0) {
    shared.q.init(kTile.consumers);
    shared.k.init(kTile.consumers * kWarpgroupWarps);
    shared.v.init(kTile.consumers * kWarpgroupWarps);
    fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < kWarpgroupThreads) {
    release_registers<kTile.producer_registers>();
    if (warp_index() == 0) load(a, shared);
  } else {
    request_registers<kTile.registers>();
    const int consumer = uniform_consumer_index();
    const int row = consumer * kWarpgroupRows;
    const PingPong<kTile.consumers> ping_pong{consumer};
    ForwardPipelineStates<Shape> state;
    ping_pong.begin();
    while (true) {
      shared.q.wait_full(state.q);
      const WorkTile tile = shared.q.tile_info(state.q);
      if (tile.is_none()) return;
      const int i0 = tile.i0 + row + warp_in_warpgroup() * 16;
      ForwardAccumulators<Shape> acc;
      acc.o.clear();
      acc.softmax.clear();
      if (tile.any_keys) forward_mainloop(a, shared, state, tile, row, i0, ping_pong, acc);
      epilogue(a, shared, state, tile, row, i0, acc);
      if (is_warpgroup_leader()) shared.q.release(state.q);
      state.q.next();
    }
  }
}

}  // namespace tk::cuda::sm90
