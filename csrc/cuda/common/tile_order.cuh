// Order in which tiles are processed: row blocks of the forward pass on Hopper, key blocks of the
// backward pass, and the query tiles of a key block.
#pragma once

#include <algorithm>
#include <bit>

#include "cuda/common/divisor.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/rows.cuh"

namespace tk::cuda {

// Order of the tiles of all heads. Heads are divided into groups whose data fit in L2 (L2 swizzle).
// Within a group the tiles of all heads at step 0 come first, then those at step 1.
class TileOrder {
 public:
  TileOrder() = default;
  // Arguments: heads over all batch entries, and of one; steps of a head; heads per group.
  TileOrder(int64_t heads, int64_t heads_of_entry, int64_t steps, int64_t group_heads)
      : heads_(static_cast<int>(heads)),
        steps_(static_cast<int>(steps)),
        group_heads_(static_cast<int>(group_heads)),
        by_heads_of_entry_(heads_of_entry),
        by_group_tiles_(group_heads * steps),
        by_group_heads_(group_heads),
        by_last_heads_((heads - 1) % group_heads + 1) {}

  TK_DEVICE_METHOD int count() const { return heads_ * steps_; }
  TK_DEVICE_METHOD int steps() const { return steps_; }

  // Position of tile n.
  struct Position {
    int entry, h, step;  // batch entry, head
  };
  TK_DEVICE_METHOD Position position(int n) const {
    const auto [group, within] = by_group_tiles_.divide(n);
    const int first = group * group_heads_;
    const bool last = heads_ - first < group_heads_;
    const auto [step, head] = (last ? by_last_heads_ : by_group_heads_).divide(within);
    const auto [entry, h] = by_heads_of_entry_.divide(first + head);
    return {entry, h, step};
  }

 private:
  int heads_ = 1, steps_ = 1, group_heads_ = 1;
  Divisor by_heads_of_entry_, by_group_tiles_, by_group_heads_, by_last_heads_;
};

// Heads per group of a TileOrder, if one head has `bytes` in L2: they fill at most half of 50 MB,
// and their number is a power of two, which divides most numbers of heads. A last group of fewer
// heads has too few tiles at a time to keep all multiprocessors busy.
inline int64_t grouped_heads(int64_t bytes) {
  constexpr uint64_t kCacheBytes = uint64_t{24} << 20;
  return static_cast<int64_t>(
      std::bit_floor(kCacheBytes / static_cast<uint64_t>(std::max<int64_t>(bytes, 1))));
}

// Order of the backward pass over the key blocks of all key heads. Under a causal mask the first
// key blocks, which most queries see, begin first. CTAs of a head share its q, do and sums of dq;
// with few heads in a group the long first blocks of the last group would run alone at the end.
inline TileOrder backward_order(const Problem& p, int64_t entries, int64_t key_blocks,
                                int64_t queries) {
  constexpr int64_t kLeastHeads = 16;
  const int64_t heads = entries * p.H_kv, sharing = p.H_q / p.H_kv;
  const int64_t fitting = grouped_heads(queries * sharing * (6 * p.D + 2 * p.D_v));
  return {heads, p.H_kv, key_blocks, std::min(std::max(fitting, kLeastHeads), heads)};
}

// CTAs that share each of `key_blocks` (of all heads), where these alone would leave
// multiprocessors idle: each takes every n-th of up to `query_tiles`. If some key blocks have fewer
// tiles than others, twice as many CTAs fill the gaps. Of the key blocks that are launched some may
// not exist (varlen); they bound the number too, because their sums are allocated.
inline int64_t key_block_splits(int64_t key_blocks, int64_t launched, int64_t query_tiles,
                                bool uneven, int64_t multiprocessors) {
  constexpr int64_t kLeastTiles = 4;  // of a CTA: fewer would not pay for its start and its end
  const int64_t blocks = std::max(key_blocks, (launched + 1) / 2);
  const int64_t idle = (uneven ? 2 : 1) * multiprocessors / blocks;
  const int64_t splits = std::max<int64_t>(std::min(idle, query_tiles / kLeastTiles), 1);
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(splits)));
}

// Tiles of `size` rows of one head. Varlen sequences share them: sequence b begins at tile
// cu_seqlens[b] / size + b, so that each has one more than its whole tiles, and none overlap.
inline int64_t tiles_of(int64_t rows, int64_t size, const Varlen& varlen) {
  if (!varlen.cu_seqlens_q) return (rows + size - 1) / size;
  return varlen.B > 0 ? rows / size + varlen.B : 0;
}

// First tile of varlen sequence b. The offsets are on the device and not validated: negative ones
// count as 0.
template <int kSize>
TK_DEVICE int first_tile(const int32_t* cu_seqlens, int b) {
  return max(cu_seqlens[b], 0) / kSize + b;
}

// A tile of one sequence; one past its rows does not exist.
struct SequenceTile {
  int b, block;
};

// Tile `tile` of a head: of dense sequence b (null cu_seqlens), or of the last varlen sequence that
// begins at or before it. Warp-collective.
template <int kSize>
TK_DEVICE SequenceTile sequence_tile(const int32_t* cu_seqlens, int64_t sequences, int b,
                                     int tile) {
  if (!cu_seqlens) return {b, tile};
  int first = 0;
  // It is one of `count` sequences from `first` on. Each lane tests the first of `step` of them.
  for (int count = static_cast<int>(sequences); count > 1;) {
    const int step = ceil_divide(count, kWarp), at = lane_index() * step;
    const bool begins = at < count && first_tile<kSize>(cu_seqlens, first + at) <= tile;
    const int last = max(31 - __clz(static_cast<int>(__ballot_sync(~0u, begins))), 0) * step;
    first += last;
    count = min(step, count - last);
  }
  const int block = tile - first_tile<kSize>(cu_seqlens, first);
  return {first, block < 0 ? static_cast<int>(kMaxIndex / kSize) : block};
}

// Index of a query tile among those of all heads, of which each has `row_tiles`.
template <int kM, typename Params>
TK_DEVICE int query_tile(const Arguments<Params>& a, int row_tiles, const Sequence& s, int h,
                         int block) {
  const int first = a.varlen.cu_seqlens_q ? s.first_q / kM + s.b : 0;
  return (s.at * static_cast<int>(a.params.H_q) + h) * row_tiles + first + block;
}

// The query tile with an index; one past the rows of its sequence does not exist.
struct QueryTile {
  Sequence seq;
  int h, block;
};
template <int kM, typename Params>
TK_DEVICE QueryTile query_tile_of(const Arguments<Params>& a, int row_tiles, int index) {
  const int head = index / row_tiles, H_q = static_cast<int>(a.params.H_q);
  const auto [b, block] =
      sequence_tile<kM>(a.varlen.cu_seqlens_q, a.varlen.B, head / H_q, index - head * row_tiles);
  return {sequence_of(a, b), head % H_q, block};
}

// The key block of one CTA of the backward pass.
struct KeyBlock {
  int program;     // number of the CTA
  int b, h_kv, n;  // sequence, key head, index of the key block
  int split;       // number of the CTA among those that share the key block

  template <int kSize>
  TK_DEVICE_METHOD static KeyBlock of(int program, const TileOrder& order, const Divisor& splits,
                                      const Varlen& varlen) {
    const auto [n, split] = splits.divide(program);
    const auto [entry, h_kv, step] = order.position(n);
    const auto [b, block] = sequence_tile<kSize>(varlen.cu_seqlens_k, varlen.B, entry, step);
    return {program, b, h_kv, block, split};
  }
};

// The query tiles of one CTA of the backward pass, of the `blocks` that see its key block, for
// every query head that shares the key head: the last block of all heads first, and of these tiles
// every `splits`-th from `split` on.
//
// In this order no CTA waits for long in deterministic mode, where key blocks accumulate into dq in
// ascending order. The last queries that see a key block are later, or the same, for the key block
// after it. So each begins with tiles that the key blocks before it do not see, or add to first.
class QueryTiles {
 public:
  TK_DEVICE_METHOD QueryTiles(BlockRange blocks, int h_kv, const Divisor& by_sharing, int split = 0,
                              int splits = 1)
      : last_block_(blocks.last - 1),
        tiles_(max(blocks.last - blocks.first, 0) * by_sharing.divisor()),
        first_h_(h_kv * by_sharing.divisor()),
        split_(split),
        splits_(splits),
        by_sharing_(by_sharing) {}

  TK_DEVICE_METHOD BlockRange range() const { return {0, ceil_divide(tiles_ - split_, splits_)}; }

  struct Tile {
    int block, h;
  };
  TK_DEVICE_METHOD Tile at(int n) const {
    const auto [from_last, head] = by_sharing_.divide(n * splits_ + split_);
    return {last_block_ - from_last, first_h_ + head};
  }

 private:
  int last_block_, tiles_, first_h_, split_, splits_;
  const Divisor& by_sharing_;
};

}  // namespace tk::cuda
