// Warp specialization: warpgroup 0 of a CTA is the producer, the others are consumers.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/platform/sm90_ptx.h"

namespace tk::cuda::sm90 {

constexpr int kWarpgroupThreads = 128, kWarpgroupRows = 64;
constexpr int kWarpgroupWarps = kWarpgroupThreads / kWarp;

// Index of the calling thread's consumer warpgroup, from 0.
TK_DEVICE int consumer_index() { return static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1; }
// The same index, broadcast by a shuffle so that the compiler knows it to be warp-uniform. Values
// derived from it then need no per-lane registers. Called by whole warps.
TK_DEVICE int uniform_consumer_index() { return __shfl_sync(~0u, consumer_index(), 0); }
// Index of the calling warp among the warps of all consumers.
TK_DEVICE int consumer_warp_index() { return warp_index() - kWarpgroupWarps; }
TK_DEVICE int warp_in_warpgroup() { return warp_index() % kWarpgroupWarps; }
TK_DEVICE bool is_warpgroup_leader() { return threadIdx.x % kWarpgroupThreads == 0; }

// Named barrier ids. kPingPongBarrier and kConsumerBarrier are the first of one id per consumer.
constexpr int kPingPongBarrier = 1, kConsumerBarrier = 4, kAllConsumersBarrier = 7;

TK_DEVICE void consumer_sync() {
  named_barrier_sync(kConsumerBarrier + consumer_index(), kWarpgroupThreads);
}

}  // namespace tk::cuda::sm90
