// Persistent tile scheduler: maps a CTA to a sequence of (batch, head, row block) tiles.
#pragma once

#include "cuda/common/rows.cuh"

namespace tk::cuda::sm90 {

// Tile order. Heads are grouped so that the keys and values of one group fit in L2 (L2 swizzle).
// Within a group, row blocks run longest first: under a causal mask the last rows see the most
// keys.
struct TileScheduler {
  int heads;          // over all sequences
  int blocks;         // row blocks of the longest sequence
  int swizzle_heads;  // heads per L2 swizzle group

  TK_DEVICE_METHOD int count() const { return heads * blocks; }
};

struct WorkTile {
  int b, h, i0;
};

// Calls visit(tile) for each nonempty tile of this CTA: every gridDim.x-th one. CTA-uniform.
template <typename Params, typename Visit>
TK_DEVICE void for_each_tile(const Arguments<Params>& a, const TileScheduler& scheduler,
                             int block_m, const Visit& visit) {
  const int H_q = static_cast<int>(a.params.H_q),
            tiles_per_group = scheduler.swizzle_heads * scheduler.blocks;
  for (int n = static_cast<int>(blockIdx.x); n < scheduler.count();
       n += static_cast<int>(gridDim.x)) {
    const int first = n / tiles_per_group * scheduler.swizzle_heads, within = n % tiles_per_group;
    const int heads = min(scheduler.swizzle_heads, scheduler.heads - first);
    const int head = first + within % heads, i0 = (scheduler.blocks - 1 - within / heads) * block_m;
    const WorkTile tile{head / H_q, head % H_q, i0};
    if (i0 < sequence_of(a, tile.b).M) visit(tile);
  }
}

}  // namespace tk::cuda::sm90
