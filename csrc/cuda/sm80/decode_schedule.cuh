// Decode schedule: assigns each CTA an equal contiguous run of key tiles.
//
// A unit is one tile of queries: a key/value head of one sequence, and 16 * warps_m of the query
// rows that share it. Its keys are divided into tiles of block_n. The tiles of all units, unit
// after unit, form one sequence, and each CTA owns an equal contiguous run of it. The cache_seqlens
// are known only on the device, so every warp computes their sums itself. Should they change
// between two warps, results are wrong, but indices stay within bounds. A CTA whose run begins or
// ends within a unit writes a partial result. There are two slots for partial results per CTA;
// decode_combine.cuh combines them.
#pragma once

#include "common/params.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/rows.cuh"

namespace tk::cuda {

struct DecodeArguments {
  ForwardParams params;  // N is the capacity of the cache
  KVCache cache;
  ScoreScale score;
  int warps_m;    // warps along the queries; warps / warps_m split the keys
  int row_tiles;  // query tiles per key/value head
  int block_n;
  int blocks;  // CTAs in the grid
  float* o;    // (2 blocks, 16 warps_m, width)
  float* m;    // (2 blocks, 16 warps_m): maximum of the scores, natural logarithm
  float* l;    // (2 blocks, 16 warps_m): sum of exp(score - m)

  TK_DEVICE_METHOD int rows() const { return DecodeTile::kQueries * warps_m; }
  TK_DEVICE_METHOD int units() const { return static_cast<int>(params.H_kv) * row_tiles; }
  // Added to the diagonals and the offsets of distances of a sequence with N keys.
  TK_DEVICE_METHOD int64_t shift(int N) const {
    return cache.bottom_right ? N - params.M : int64_t{0};
  }
};

// Query i sees keys max(begin, i + low) <= j < min(end, i + high + 1).
struct DecodeSequence {
  int b, N;
  int low, high;
  int begin, end;    // range of live keys
  int first, tiles;  // first tile of block_n keys, and their number; at least one

  TK_DEVICE_METHOD int row_begin(int i) const { return max(begin, i + low); }
  TK_DEVICE_METHOD int row_end(int i) const { return min(end, i + high + 1); }
};

TK_DEVICE DecodeSequence decode_sequence(const DecodeArguments& a, int b) {
  const Problem& p = a.params;
  const int M = static_cast<int>(p.M);
  DecodeSequence s;
  s.b = b;
  // cache_seqlens are on the device and not validated: clamped to the capacity.
  s.N = static_cast<int>(p.N);
  if (a.cache.cache_seqlens) s.N = max(0, min(a.cache.cache_seqlens[b], s.N));
  s.low = clamp_diagonal(p.mask.diagonal_low + a.shift(s.N));
  s.high = clamp_diagonal(p.mask.diagonal_high + a.shift(s.N));
  const int key_begin = p.mask.key_start ? max(clamp_diagonal(p.mask.key_start[b]), 0) : 0;
  const int key_end = p.mask.key_end ? min(clamp_diagonal(p.mask.key_end[b]), s.N) : s.N;
  s.begin = max(key_begin, s.low);
  s.end = min(key_end, M + s.high);
  s.first = min(s.begin, s.N) / a.block_n;
  s.tiles = max(1, (s.end + a.block_n - 1) / a.block_n - s.first);
  return s;
}

// Sum over the lanes of a warp.
TK_DEVICE int64_t warp_sum(int64_t x) {
  for (int distance = 1; distance < kWarp; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Inclusive prefix sum over the lanes of a warp.
TK_DEVICE int64_t prefix_sum(int64_t x) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t before = __shfl_up_sync(~0u, x, distance);
    if (lane_index() >= distance) x += before;
  }
  return x;
}

// Maps CTAs to runs of tiles. All lanes of a warp call its methods together.
class DecodeSchedule {
 public:
  TK_DEVICE_METHOD explicit DecodeSchedule(const DecodeArguments& a) : a_(a) {
    total_ = before(static_cast<int>(a.params.B));
    const int64_t parts = (total_ + kMinDecodeTiles - 1) / kMinDecodeTiles;
    blocks_ = parts < a.blocks ? parts : a.blocks;
  }

  // Number of tiles of all sequences before b.
  TK_DEVICE_METHOD int64_t before(int b) const {
    int64_t tiles = 0;
    for (int n = lane_index(); n < b; n += kWarp) tiles += decode_sequence(a_, n).tiles;
    return warp_sum(tiles) * a_.units();
  }

  // First tile of CTA n; begin_of(blocks()) is the number of tiles.
  TK_DEVICE_METHOD int64_t begin_of(int64_t n) const { return n * total_ / blocks_; }
  TK_DEVICE_METHOD int64_t blocks() const { return blocks_; }
  // The CTA that owns tile x.
  TK_DEVICE_METHOD int64_t block_of(int64_t x) const {
    return min(((x + 1) * blocks_ - 1) / total_, blocks_ - 1);
  }

  // The sequence of tile x; `begin` is set to the index of its first tile.
  TK_DEVICE_METHOD DecodeSequence at(int64_t x, int64_t& begin) const {
    const int B = static_cast<int>(a_.params.B);
    begin = 0;
    for (int first = 0;; first += kWarp) {
      const int b = first + lane_index();
      const int64_t tiles = b < B ? int64_t{decode_sequence(a_, b).tiles} * a_.units() : int64_t{0};
      const int64_t end = begin + prefix_sum(tiles);
      const unsigned ends_after = __ballot_sync(~0u, end > x);
      if (ends_after || first + kWarp >= B) {
        const int lane = ends_after ? __ffs(static_cast<int>(ends_after)) - 1 : 0;
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

// Slot for CTA n's partial result of a unit.
TK_DEVICE int64_t partial_slot(int64_t n, bool begins_unit) { return 2 * n + begins_unit; }

// Head and query of a row of a unit.
struct DecodeRow {
  int h, i;
  bool valid;  // false for the padding of the last tile
};

TK_DEVICE DecodeRow decode_row(const DecodeArguments& a, int unit, int r) {
  const int M = static_cast<int>(a.params.M);
  const int group = static_cast<int>(a.params.H_q / a.params.H_kv);
  const int n = unit % a.row_tiles * a.rows() + r;
  return {unit / a.row_tiles * group + n / M, n % M, n < group * M};
}

}  // namespace tk::cuda
