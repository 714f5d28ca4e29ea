// Backward preprocess: lse and delta of each row, interleaved by tile so that one bulk copy loads
// both; cleared sums of dq.
#pragma once

#include "cuda/common/preprocess_tile.cuh"
#include "cuda/common/score_gradient.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace tk::cuda::sm90 {

struct BackwardArguments : Arguments<BackwardParams> {
  float* row_stats;    // (tiles, 5, block_m): lse in base 2, and delta = rowsum(do o) - dlse; lse,
                       // and delta; the rounding error of lse. lse is +inf for fully masked and
                       // padding rows.
  float* dq_sums;      // (tiles, parts, elements / 4, 32, 4): in accumulator order of a warp
  int* dq_semaphore;   // (tiles, parts): additions of key blocks so far; null in non-deterministic
                       // mode
  int* block_counter;  // CTAs started so far, see program_of
  int row_tiles;       // of a head: tiles_of
  int row_programs;    // query tiles of all heads
  TileOrder order;     // of the key blocks
  Divisor by_sharing;  // query heads per key head
  Divisor by_splits;   // CTAs that share a key block
  float* key_sums;     // (CTAs, consumer warps, elements of dk and dv / 4, 32, 4), if they share
  TensorMap q, k, v, d_o, dk, dv;
};

// One tile of row statistics in shared memory. lse is in base 2, unless that of some row is large
// or scores are natural logarithms: TileInfo::natural_lse.
template <int kM>
struct RowStats {
  static constexpr int kBytes = 2 * kM * sizeof(float);
  static constexpr int kStored = 5 * kM;  // numbers of a tile in BackwardArguments::row_stats
  float* data;

  TK_DEVICE_METHOD const float* lse() const { return data; }
  TK_DEVICE_METHOD const float* delta() const { return data + kM; }
};

// Writes the row statistics of one query tile of one head, padding rows of the last tile included,
// and clears what the backward pass adds to: the sums of dq of this tile, in kDqParts parts, and
// the counters. kVWidth bounds the width of o and do.
template <typename Element, int kM, int kDqParts, int kDqElements, int kVWidth>
TK_KERNEL((PreprocessTile<Element, kM, kVWidth>::kThreads), 1)
backward_preprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Tile = PreprocessTile<Element, kM, kVWidth>;
  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x);
  const auto [seq, h, block] = query_tile_of<kM>(a, a.row_tiles, program);
  if (program == 0 && threadIdx.x == 0 && a.dq_semaphore) *a.block_counter = 0;
  if (block * kM >= seq.M) return;
  const int64_t tile = query_tile<kM>(a, a.row_tiles, seq, h, block);
  Tile::template clear<kDqParts * kDqElements>(a.dq_sums + tile * kDqParts * kDqElements);
  if (threadIdx.x < kDqParts && a.dq_semaphore) {
    a.dq_semaphore[tile * kDqParts + threadIdx.x] = 0;
  }
  float* const row_stats = a.row_stats + tile * RowStats<kM>::kStored;
  const auto store = [&](int row, float lse, float lse_rest, float delta) {
    float* const to = row_stats + row;
    to[0] = lse * kLog2E;
    to[kM] = delta;
    to[2 * kM] = lse;
    to[3 * kM] = delta;
    to[4 * kM] = lse_rest;
  };
  Tile::for_each_row(p, seq, h, block * kM, store);
}

}  // namespace tk::cuda::sm90
