// Decode schedule: assigns each CTA an equal contiguous run of key tiles.
//
// A unit is one tile of queries: a key/value head of one sequence, and 16 * warps_m of the query
// rows that share it. Its keys are divided into tiles of block_n. The tiles of all units, unit
// after unit, form one sequence, and each CTA owns an equal contiguous run of it, or a run of whole
// units where these take less than 5% longer. The cache_seqlens are known only on the device, so
// every warp computes their sum itself. Should they change between two warps, results are wrong,
// but indices stay within bounds. A CTA whose run begins or ends within a unit writes a partial
// result. There are two slots for partial results per CTA; decode_combine.cuh combines them.
#pragma once

#include "common/params.h"
#include "cuda/common/divisor.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/rows.cuh"

namespace tk::cuda {

// `total` tiles (or units), divided into contiguous runs, one per CTA.
struct DecodeRuns {
  int total, blocks;  // total >= blocks >= 1
  int share, rest;    // total / blocks and its remainder: the first `rest` runs have one more

  TK_DEVICE_METHOD static DecodeRuns of(int total, int blocks) {
    const unsigned share = static_cast<unsigned>(total) / static_cast<unsigned>(blocks);
    return {total, blocks, static_cast<int>(share), total - static_cast<int>(share) * blocks};
  }

  TK_DEVICE_METHOD int longest() const { return share + (rest > 0); }
  // begin_of(blocks) is the total.
  TK_DEVICE_METHOD int begin_of(int n) const { return n * share + min(n, rest); }
  // The run that has x.
  TK_DEVICE_METHOD int block_of(int x) const {
    const bool longer = x < rest * (share + 1);
    const unsigned from = longer ? x : x - rest, length = share + longer;
    return min(static_cast<int>(from / length), blocks - 1);
  }
};

// The CTAs that process the first and the last tile of a unit.
struct alignas(8) DecodeOwners {
  int first, last;
};

struct DecodeArguments {
  ForwardParams params;  // N is the capacity of the cache
  KVCache cache;
  ScoreScale score;
  int warps_m, warps_n;  // warps along the queries and along the keys, powers of 2
  int row_tiles;         // query tiles per key/value head
  int group;             // query heads per key/value head
  int units;             // of a sequence: H_kv row_tiles
  int blocks;            // CTAs in the grid
  int low, high;         // diagonals; those of N = 0 keys if they are aligned bottom right
  DecodeRuns unit_runs;  // of the units of all sequences
  Divisor by_M, by_H_q, by_group, by_rows, by_row_tiles, by_page_size;
  float* o;              // (2 blocks, 16 warps_m, width)
  float* m;              // (2 blocks, 16 warps_m): maximum of the scores, natural logarithm
  float* l;              // (2 blocks, 16 warps_m): sum of exp(score - m)
  DecodeOwners* owners;  // (B, units)

  TK_DEVICE_METHOD int rows() const { return DecodeTile::kQueries * warps_m; }
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

// Clamps the bound of a key range to 0 <= bound <= N.
TK_DEVICE int clamp_key(int64_t bound, int N) {
  return bound < 0 ? 0 : bound < N ? static_cast<int>(bound) : N;
}

TK_DEVICE DecodeSequence decode_sequence(const DecodeArguments& a, int b, int block_n) {
  const Problem& p = a.params;
  const int M = static_cast<int>(p.M);
  DecodeSequence s;
  s.b = b;
  // cache_seqlens are on the device and not validated: clamped to the capacity.
  s.N = static_cast<int>(p.N);
  if (a.cache.cache_seqlens) s.N = max(0, min(a.cache.cache_seqlens[b], s.N));
  const int shift = a.cache.bottom_right ? s.N : 0, limit = static_cast<int>(kMaxIndex);
  s.low = min(a.low + shift, limit);
  s.high = min(a.high + shift, limit);
  s.begin = max(p.mask.key_start ? clamp_key(p.mask.key_start[b], s.N) : 0, s.low);
  s.end = min(p.mask.key_end ? clamp_key(p.mask.key_end[b], s.N) : s.N, M + s.high);
  s.first = static_cast<int>(static_cast<unsigned>(min(s.begin, s.N)) / block_n);
  s.tiles = max(1, ceil_divide(s.end, block_n) - s.first);
  return s;
}

// Sum over the lanes of a warp.
TK_DEVICE int warp_sum(int x) {
  for (int distance = 1; distance < kWarp; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Maximum over the lanes of a warp.
TK_DEVICE int warp_max(int x) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    x = max(x, __shfl_xor_sync(~0u, x, distance));
  }
  return x;
}

// Inclusive prefix sum over the lanes of a warp.
TK_DEVICE int prefix_sum(int x) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int before = __shfl_up_sync(~0u, x, distance);
    if (lane_index() >= distance) x += before;
  }
  return x;
}

// The values of another lane.
TK_DEVICE DecodeSequence from_lane(const DecodeSequence& s, int lane) {
  const auto of = [&](int x) { return __shfl_sync(~0u, x, lane); };
  return {of(s.b),     of(s.N),   of(s.low),   of(s.high),
          of(s.begin), of(s.end), of(s.first), of(s.tiles)};
}

// A tile: its sequence, its unit within the sequence, and its index within the unit.
struct DecodePlace {
  DecodeSequence s;
  int unit, tile;
};

// Maps CTAs to runs of tiles, or of units. All lanes of a warp call its methods together.
class DecodeSchedule {
 public:
  DecodeRuns runs;
  bool whole;  // the runs are of units, which are not divided

  TK_DEVICE_METHOD DecodeSchedule(const DecodeArguments& a, int block_n)
      : a_(a), block_n_(block_n), B_(static_cast<int>(a.params.B)) {
    // Backwards: in the end the lanes hold the first 32 sequences.
    int tiles = 0, most = 0;  // sum and maximum over the sequences
#pragma unroll 1
    for (int first = (B_ - 1) & -kWarp; first >= 0; first -= kWarp) {
      first_ = of_lane(first);
      tiles += first + lane_index() < B_ ? first_.tiles : 0;
      most = max(most, first_.tiles);
    }
    tiles = warp_sum(tiles) * a.units;
    runs = DecodeRuns::of(tiles, min(ceil_divide(tiles, kMinDecodeTiles), a.blocks));
    const int longest = runs.longest();
    whole = a.unit_runs.longest() * warp_max(most) <= longest + longest / 20;
    if (whole) runs = a.unit_runs;
  }

  // The place of x, which counts tiles, or units where these are whole.
  TK_DEVICE_METHOD DecodePlace at(int x) const {
    DecodeSequence s = first_;
#pragma unroll 1
    for (int first = 0, begin = 0;; first += kWarp) {
      if (first > 0) s = of_lane(first);
      const int tiles = first + lane_index() >= B_ ? 0 : whole ? 1 : s.tiles;
      const int end = begin + prefix_sum(tiles * a_.units);
      const unsigned ends_after = __ballot_sync(~0u, end > x);
      if (ends_after || first + kWarp >= B_) {
        const int lane = ends_after ? __ffs(static_cast<int>(ends_after)) - 1 : 0;
        const unsigned n = __shfl_sync(~0u, tiles, lane);
        const unsigned distance = x - __shfl_sync(~0u, end - tiles * a_.units, lane);
        const int unit = static_cast<int>(distance / n), tile = static_cast<int>(distance % n);
        return {from_lane(s, lane), min(unit, a_.units - 1), tile};
      }
      begin = __shfl_sync(~0u, end, kWarp - 1);
    }
  }

 private:
  const DecodeArguments& a_;
  int block_n_, B_;
  DecodeSequence first_;

  // The sequence of the lane among 32 from `first` on; the last one for lanes beyond it.
  TK_DEVICE_METHOD DecodeSequence of_lane(int first) const {
    return decode_sequence(a_, min(first + lane_index(), B_ - 1), block_n_);
  }
};

// Slot for CTA n's partial result of a unit.
TK_DEVICE int partial_slot(int n, bool begins_unit) { return 2 * n + begins_unit; }

// The part of a unit that one CTA processes.
struct DecodePart {
  int unit;
  int first, last;  // tiles first <= n < last of the sequence
  int partial;      // slot of the partial result; -1 if the part is the whole unit
};

// Calls process(sequence, part) for each part of the calling CTA's run, and stores the owners of
// the units that begin in it.
template <typename Process>
TK_DEVICE void for_each_part(const DecodeArguments& a, int block_n, const Process& process) {
  const DecodeSchedule schedule(a, block_n);
  const int block = static_cast<int>(blockIdx.x);
  if (block >= schedule.runs.blocks) return;
  int x = schedule.runs.begin_of(block);
  const int last = schedule.runs.begin_of(block + 1);
  auto [s, unit, first] = schedule.at(x);
  for (;;) {
    const int end = schedule.whole ? s.tiles : min(first + last - x, s.tiles);
    const bool ends = end == s.tiles;
    const int partial = first == 0 && ends ? -1 : partial_slot(block, first == 0);
    process(s, DecodePart{unit, first, end, partial});
    if (first == 0 && threadIdx.x == 0) {
      const int last_owner = ends ? block : schedule.runs.block_of(x + s.tiles - 1);
      a.owners[s.b * a.units + unit] = {block, last_owner};
    }
    x += schedule.whole ? 1 : end - first;
    if (x >= last) return;
    first = 0;
    if (++unit == a.units) {
      unit = 0;
      s = decode_sequence(a, min(s.b + 1, static_cast<int>(a.params.B) - 1), block_n);
    }
    __syncthreads();  // the shared memory of the part has been read
  }
}

// Head and query of a row of a unit.
struct DecodeRow {
  int h, i;
  bool valid;  // false for the padding of the last tile
};

TK_DEVICE DecodeRow decode_row(const DecodeArguments& a, int unit, int r) {
  const auto [h_kv, tile] = a.by_row_tiles.divide(unit);
  const int n = tile * a.rows() + r;
  const auto [h, i] = a.by_M.divide(n);
  return {h_kv * a.group + h, i, h < a.group};
}

}  // namespace tk::cuda
