// Schedules of the CTAs: the persistent tile scheduler of the forward pass, whose CTAs process many
// (batch, head, row block) tiles, and the key block of a CTA of the backward pass.
#pragma once

#include <algorithm>
#include <bit>

#include "cuda/common/divisor.h"
#include "cuda/common/rows.cuh"

namespace tk::cuda::sm90 {

// One tile of queries. The producer of a CTA takes it and publishes it to the consumers.
struct WorkTile {
  int b, h, i0;   // b = -1: there are no more tiles
  bool any_keys;  // false if no query of the tile sees a key

  TK_DEVICE_METHOD static WorkTile none() { return {-1, 0, 0, false}; }
  TK_DEVICE_METHOD bool is_none() const { return b < 0; }
};

// Order and assignment of the tiles. Heads are grouped so that the keys and values of one group fit
// in L2 (L2 swizzle). Within a group, row blocks run longest first: under a causal mask the last
// rows see the most keys.
//
// CTA n starts with tile n. If tiles differ in their visible keys, a CTA that has finished one
// takes the next tile that no other has taken, by a counter in global memory. Otherwise it takes
// every gridDim.x-th tile.
class TileScheduler {
 public:
  // Arguments: query heads over all sequences, and of one; query heads per key head; row blocks of
  // the longest sequence; heads per L2 swizzle group; the tiles taken after the first of each CTA,
  // initially 0 (null: no counter).
  TileScheduler(int64_t heads, int64_t H_q, int64_t sharing, int64_t blocks, int64_t swizzle_heads,
                int* taken)
      : heads_(static_cast<int>(heads)),
        blocks_(static_cast<int>(blocks)),
        swizzle_heads_(static_cast<int>(swizzle_heads)),
        taken_(taken),
        by_H_q_(H_q),
        by_sharing_(sharing),
        by_group_tiles_(swizzle_heads * blocks),
        by_group_heads_(swizzle_heads),
        by_last_heads_((heads - 1) % swizzle_heads + 1) {}

  TK_DEVICE_METHOD int count() const { return heads_ * blocks_; }

  // Position of tile n.
  struct Position {
    int b, h, block;  // sequence, query head, row block
  };
  TK_DEVICE_METHOD Position position(int n) const {
    const auto [group, within] = by_group_tiles_.divide(n);
    const int first = group * swizzle_heads_;
    const bool last = heads_ - first < swizzle_heads_;
    const auto [from_last, head] = (last ? by_last_heads_ : by_group_heads_).divide(within);
    const auto [b, h] = by_H_q_.divide(first + head);
    return {b, h, blocks_ - 1 - from_last};
  }

  TK_DEVICE_METHOD int key_head(int h) const { return by_sharing_.divide(h).quotient; }

  // The tile that this CTA processes after tile n. Called by one warp.
  TK_DEVICE_METHOD int next(int n) const {
    const int ctas = static_cast<int>(gridDim.x);
    if (!taken_) return n + ctas;
    const int drawn = threadIdx.x % kWarp == 0 ? atomicAdd(taken_, 1) : 0;
    return ctas + __shfl_sync(~0u, drawn, 0);
  }

 private:
  int heads_, blocks_, swizzle_heads_;
  int* taken_;
  Divisor by_H_q_, by_sharing_, by_group_tiles_, by_group_heads_, by_last_heads_;
};

// The key block of one CTA of the backward pass.
struct KeyBlock {
  int b, h_kv, n;  // n: index of the key block

  // That of CTA `program`. Under a causal mask the first key blocks of a head, which most queries
  // see, begin first.
  TK_DEVICE_METHOD static KeyBlock of(int program, int blocks, int H_kv) {
    return {program / blocks / H_kv, program / blocks % H_kv, program % blocks};
  }
};

// Query heads per L2 swizzle group: their keys and values fill at most half of a 50 MB L2. The key
// heads of a group are a power of two, which divides most numbers of heads: a last group of fewer
// heads has too few tiles at a time to keep all multiprocessors busy.
inline int swizzle_heads_of(const Problem& p, int64_t keys, int64_t heads) {
  constexpr uint64_t kCacheBytes = uint64_t{24} << 20;
  const int64_t sharing = p.H_q / p.H_kv, bytes = std::max<int64_t>(keys, 1) * (p.D + p.D_v) * 2;
  const auto fitting =
      static_cast<int64_t>(std::bit_floor(kCacheBytes / static_cast<uint64_t>(bytes)));
  return static_cast<int>(std::clamp(fitting * sharing, sharing, heads));
}

// Calls visit(tile) for each nonempty tile of this CTA. Called by one warp.
template <typename Params, typename Visit>
TK_DEVICE void for_each_tile(const Arguments<Params>& a, const TileScheduler& scheduler,
                             int block_m, const Visit& visit) {
  for (int n = static_cast<int>(blockIdx.x); n < scheduler.count(); n = scheduler.next(n)) {
    const auto [b, h, block] = scheduler.position(n);
    const WorkTile tile{b, h, block * block_m, false};
    if (tile.i0 < sequence_of(a, b).M) visit(tile);
  }
}

}  // namespace tk::cuda::sm90
