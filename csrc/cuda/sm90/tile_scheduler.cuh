// Persistent tile scheduler of the forward pass, whose CTAs process many (batch, head, row block)
// tiles.
#pragma once

#include "cuda/common/rows.cuh"
#include "cuda/common/tile_order.cuh"

namespace tk::cuda::sm90 {

// One tile of queries. The producer of a CTA takes it and publishes it to the consumers.
struct WorkTile {
  int b, h, i0;   // b = -1: there are no more tiles
  bool any_keys;  // false if no query of the tile sees a key

  TK_DEVICE_METHOD static WorkTile none() { return {-1, 0, 0, false}; }
  TK_DEVICE_METHOD bool is_none() const { return b < 0; }
};

// Assignment of the tiles of the forward pass. A tile is a row block of a query head. Row blocks
// run longest first: under a causal mask the last rows see the most keys.
//
// CTA n starts with tile n. If tiles differ in their visible keys, a CTA that has finished one
// takes the next tile that no other has taken, by a counter in global memory. Otherwise it takes
// every gridDim.x-th tile.
class TileScheduler {
 public:
  // Arguments: order of the tiles; query heads per key head; the tiles taken after the first of
  // each CTA, initially 0 (null: no counter).
  TileScheduler(const TileOrder& order, int64_t sharing, int* taken)
      : order_(order), taken_(taken), by_sharing_(sharing) {}

  TK_DEVICE_METHOD int count() const { return order_.count(); }

  // Position of tile n.
  struct Position {
    int entry, h, block;  // batch entry, query head, row block of the entry
  };
  TK_DEVICE_METHOD Position position(int n) const {
    const auto [entry, h, step] = order_.position(n);
    return {entry, h, order_.steps() - 1 - step};
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
  TileOrder order_;
  int* taken_;
  Divisor by_sharing_;
};

// Order of the forward pass over the row blocks of all query heads. A group shares the keys and
// values of its key heads.
inline TileOrder forward_order(const Problem& p, int64_t entries, int64_t row_blocks,
                               int64_t keys) {
  const int64_t heads = entries * p.H_q, sharing = p.H_q / p.H_kv;
  const int64_t fitting = grouped_heads(keys * (p.D + p.D_v) * 2) * sharing;
  return {heads, p.H_q, row_blocks, std::clamp(fitting, sharing, heads)};
}

// Rows of the first row block of a dense call that are before the first query: the last block ends
// with the last query, up to 15 rows. So under a causal mask the partial block is the one that sees
// the fewest keys. Multiples of 16 keep the rows of a warp together: results do not depend on it.
TK_DEVICE int rows_before(int M, int block_m) {
  return (ceil_divide(M, block_m) * block_m - M) / 16 * 16;
}

// Strips of `rows` queries each, from i0 on, that see no key from j0 on.
TK_DEVICE int dead_strips(const Sequence& s, int i0, int j0, int rows) {
  return max(j0 - s.high - i0, 0) / rows;
}

// Calls visit(tile) for each nonempty tile of this CTA. Called by one warp.
template <int kM, typename Params, typename Visit>
TK_DEVICE void for_each_tile(const Arguments<Params>& a, const TileScheduler& scheduler,
                             const Visit& visit) {
  // Varlen rows before the first belong to another sequence, and options would read them.
  const bool from_end = !a.varlen.cu_seqlens_q && a.score.plain && !a.params.mask.block_mask;
  for (int n = static_cast<int>(blockIdx.x); n < scheduler.count(); n = scheduler.next(n)) {
    const auto [entry, h, at] = scheduler.position(n);
    const auto [b, block] = sequence_tile<kM>(a.varlen.cu_seqlens_q, a.varlen.B, entry, at);
    const int M = sequence_of(a, b).M, i0 = block * kM - (from_end ? rows_before(M, kM) : 0);
    if (i0 < M) visit(WorkTile{b, h, i0, false});
  }
}

}  // namespace tk::cuda::sm90
