// Forward pass on Hopper. A producer warp loads tiles by TMA; each consumer warpgroup owns 64
// queries and iterates over the key blocks that they see:
//
//   s = q k^T                         next key block, overlapping o += p v of the current one
//   m' = max(m, max s), p = 2^(s - m'), l = l 2^(m - m') + sum p
//   o = o 2^(m - m')                  after p v, and only if m grew by more than 8 (softmax.cuh)
//
// Consumers issue their matrix products in ping-pong order, so that the products of one overlap the
// softmax of another. With two consumers, the first scores of a tile overlap the end of the tile
// before. See docs/hopper.md.
#pragma once

#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_producer.cuh"

namespace tk::cuda::sm90 {

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
    if (warp_index() == 0) ForwardProducer<Shape>(a, shared).run();
  } else {
    request_registers<kTile.registers>();
    ForwardConsumer<Shape>(a, shared, uniform_consumer_index()).run();
  }
}

}  // namespace tk::cuda::sm90
