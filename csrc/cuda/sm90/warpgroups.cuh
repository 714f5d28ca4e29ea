// The warpgroups of a block: the first one loads, `groups` of a tile compute.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/platform/sm90_ptx.h"

namespace tk::cuda::sm90 {

constexpr int kGroupThreads = 128, kGroupRows = 64;
constexpr int kGroupWarps = kGroupThreads / kWarp;

// Of those that compute.
TK_DEVICE int group_index() { return static_cast<int>(threadIdx.x) / kGroupThreads - 1; }
// By a whole warp, from whose shuffle the compiler knows that it is the same for all lanes: what is
// computed from it takes no registers of theirs.
TK_DEVICE int uniform_group_index() { return __shfl_sync(~0u, group_index(), 0); }
TK_DEVICE int group_warp() { return warp_index() % kGroupWarps; }
TK_DEVICE bool is_first_of_group() { return threadIdx.x % kGroupThreads == 0; }

// Named barriers: one for each group's turn, one for its threads, one for all that compute.
constexpr int kTurn = 1, kGroup = 4, kAllGroups = 7;

TK_DEVICE void group_sync() { named_barrier_sync(kGroup + group_index(), kGroupThreads); }

}  // namespace tk::cuda::sm90
