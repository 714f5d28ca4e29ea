// Arguments and shared memory of the forward kernel.
#pragma once

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
  static constexpr bool kSpareQuery = kTile.q_stages > 1;  // q has a stage for the next tile
  static_assert(kVWidth <= kWidth);                        // o is staged in the tile of q

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

}  // namespace tk::cuda::sm90
