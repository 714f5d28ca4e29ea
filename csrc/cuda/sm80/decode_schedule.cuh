// Which keys a block of decoding takes.
//
// A unit is what is summed for one tile of queries: one key head of one sequence, and 16 warps_m of
// the queries that share it. Its keys come in tiles of block_n. All tiles of all units lie in one
// line, unit after unit, and each block takes an equal stretch of it, whatever the cache_seqlens
// are: on the device alone they are known, so every warp adds them up for itself. A block that
// begins or ends within a unit leaves a partial result, of which there are two places for each
// block; decode_combine.cuh adds them.
#pragma once

#include "common/kv_cache.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/rows.cuh"

namespace tk::cuda {

struct DecodeArguments {
  ForwardParams params;  // N is what the cache has room for
  KVCache cache;
  int warps_m;    // warps that have queries of their own; the others share them, and split the keys
  int row_tiles;  // of a key head's queries
  int block_n;
  int blocks;  // of the grid
  float* o;    // (2 blocks, 16 warps_m, width)
  float* lse;  // (2 blocks, 16 warps_m)

  TK_DEVICE_METHOD int rows() const { return DecodeTile::kQueries * warps_m; }
  TK_DEVICE_METHOD int units() const { return static_cast<int>(params.H_kv) * row_tiles; }
};

// Query i sees keys max(0, i + low) <= j < min(N, i + high + 1).
struct DecodeSequence {
  int b, N;
  int low, high;
  int begin, end;    // what some query sees
  int first, tiles;  // of block_n keys; at least one

  TK_DEVICE_METHOD int row_begin(int i) const { return i + low; }
  TK_DEVICE_METHOD int row_end(int i) const { return min(N, i + high + 1); }
};

TK_DEVICE DecodeSequence decode_sequence(const DecodeArguments& a, int b) {
  const Problem& p = a.params;
  const int M = static_cast<int>(p.M);
  DecodeSequence s;
  s.b = b;
  s.N = max(0, min(a.cache.cache_seqlens[b], static_cast<int>(p.N)));  // nobody has looked at it
  s.low = cut(p.mask.diagonal_low + s.N - M);
  s.high = cut(p.mask.diagonal_high + s.N - M);
  s.begin = max(0, s.row_begin(0));
  s.end = s.row_end(M - 1);
  s.first = min(s.begin, s.N) / a.block_n;
  s.tiles = max(1, (s.end + a.block_n - 1) / a.block_n - s.first);
  return s;
}

// Sums over the warp's lanes, and over those up to each.
TK_DEVICE int64_t warp_sum(int64_t x) {
  for (int distance = 1; distance < kWarp; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}
TK_DEVICE int64_t running_sum(int64_t x) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t before = __shfl_up_sync(~0u, x, distance);
    if (lane_index() >= distance) x += before;
  }
  return x;
}

// Every lane of a warp calls these together.
class DecodeSchedule {
 public:
  TK_DEVICE_METHOD explicit DecodeSchedule(const DecodeArguments& a) : a_(a) {
    total_ = before(static_cast<int>(a.params.B));
    const int64_t parts = (total_ + kLeastDecodeTiles - 1) / kLeastDecodeTiles;
    blocks_ = parts < a.blocks ? parts : a.blocks;
  }

  // Tiles of all units of sequences before b.
  TK_DEVICE_METHOD int64_t before(int b) const {
    int64_t tiles = 0;
    for (int n = lane_index(); n < b; n += kWarp) tiles += decode_sequence(a_, n).tiles;
    return warp_sum(tiles) * a_.units();
  }

  // Where block n begins; that of `blocks` is where all ends.
  TK_DEVICE_METHOD int64_t begin_of(int64_t n) const { return n * total_ / blocks_; }
  TK_DEVICE_METHOD int64_t blocks() const { return blocks_; }
  // The block that has tile x.
  TK_DEVICE_METHOD int64_t block_of(int64_t x) const { return ((x + 1) * blocks_ - 1) / total_; }

  // The sequence that has tile x, and where in the line its first one is.
  TK_DEVICE_METHOD DecodeSequence at(int64_t x, int64_t& begin) const {
    const int B = static_cast<int>(a_.params.B);
    begin = 0;
    for (int first = 0;; first += kWarp) {
      const int b = first + lane_index();
      const int64_t tiles = b < B ? int64_t{decode_sequence(a_, b).tiles} * a_.units() : int64_t{0};
      const int64_t end = begin + running_sum(tiles);
      const unsigned behind = __ballot_sync(~0u, end > x);
      if (behind || first + kWarp >= B) {
        const int lane = behind ? __ffs(static_cast<int>(behind)) - 1 : 0;
        begin = __shfl_sync(~0u, end - tiles, lane);
        return decode_sequence(a_, first + lane);
      }
      begin = __shfl_sync(~0u, end, kWarp - 1);
    }
  }

 private:
  const DecodeArguments& a_;
  int64_t total_, blocks_;
};

// A unit's place for what block n leaves of it, where the block does not have all of it.
TK_DEVICE int64_t partial_of(int64_t n, bool begins_the_unit) { return 2 * n + begins_the_unit; }

// Row r of a unit is query i of head h.
struct DecodeRow {
  int h, i;
  bool there;
};

TK_DEVICE DecodeRow decode_row(const DecodeArguments& a, int unit, int r) {
  const int M = static_cast<int>(a.params.M);
  const int group = static_cast<int>(a.params.H_q / a.params.H_kv);
  const int n = unit % a.row_tiles * a.rows() + r;
  return {unit / a.row_tiles * group + n / M, n % M, n < group * M};
}

}  // namespace tk::cuda
