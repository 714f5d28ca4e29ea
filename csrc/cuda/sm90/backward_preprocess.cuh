// Backward preprocess: lse and delta for each row, interleaved by tile so that one bulk copy loads
// both.
#pragma once

#include "cuda/common/score_gradient.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace tk::cuda::sm90 {

struct BackwardArguments : Arguments<BackwardParams> {
  float* row_stats;  // (tiles, 2, 2, block_m): lse in base 2, and delta = rowsum(do o) - dlse; lse,
                     // and delta. lse is +inf for fully masked and padding rows.
  float* dq_sums;    // (tiles, consumers, elements / 4, 128, 4): in accumulator order
  int* dq_semaphore;   // (tiles, consumers): key blocks already accumulated into dq; null in
                       // non-deterministic mode
  int* block_counter;  // CTAs started so far, see program_of
  int row_tiles;       // of the longest sequence
  TensorMap q, k, v, d_o, dk, dv;
};

// The key block of one CTA.
struct KeyBlock {
  int b, h_kv, n;  // n: index of the key block
};

// Workspace index of a query tile. Varlen sequences share the tiles of a head, with one spare tile
// per sequence for its partial last tile.
template <int kM>
TK_DEVICE int tile_of(const BackwardArguments& a, const Sequence& s, int h, int block) {
  const BackwardParams& p = a.params;
  const int H_q = static_cast<int>(p.H_q), M = static_cast<int>(p.M);
  if (!a.varlen.cu_seqlens_q) return (s.b * H_q + h) * ((M + kM - 1) / kM) + block;
  return h * (M / kM + static_cast<int>(a.varlen.B)) + s.first_q / kM + s.b + block;
}

// One tile of row statistics in shared memory. lse is in base 2, unless that of some row is large
// or scores are natural logarithms: TileInfo::natural_lse.
template <int kM>
struct RowStats {
  static constexpr int kBytes = 2 * kM * sizeof(float);
  float* data;

  TK_DEVICE_METHOD const float* lse() const { return data; }
  TK_DEVICE_METHOD const float* delta() const { return data + kM; }
};

constexpr int kPreprocessThreads = 256;

// One CTA per query tile and head, padding rows of the last tile included. kVWidth bounds the width
// of o and do; so many lanes share a row that each loads 16 bytes of both.
template <typename Element, int kM, int kVWidth>
TK_KERNEL(kPreprocessThreads, 1)
backward_preprocess_kernel(const __grid_constant__ BackwardArguments a) {
  constexpr int kLanes = kVWidth < 256 ? kVWidth / 8 : kWarp;
  constexpr int kRows = kPreprocessThreads / kLanes, kSteps = kM / kRows;  // kRows at a time
  static_assert(kM % kRows == 0);
  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), H_q = static_cast<int>(p.H_q);
  const int h = program / a.row_tiles % H_q, block = program % a.row_tiles;
  const Sequence seq = sequence_of(a, program / a.row_tiles / H_q);
  if (block * kM >= seq.M) return;
  const auto o = rows_of<const Element>(p.o, seq.at, h, seq.first_q, p.D_v);
  const auto d_o = rows_of<const Element>(p.d_o, seq.at, h, seq.first_q, p.D_v);
  const int first = static_cast<int>(threadIdx.x) / kLanes;  // row of the first step
  float delta[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = block * kM + step * kRows + first;
    delta[step] = row_product<kLanes>(o, d_o, i, i < seq.M);
  }
  if (static_cast<int>(threadIdx.x) % kLanes != 0) return;
  const int64_t offset = statistics_offset(p, seq, h) + block * kM;
  float* const tile = a.row_stats + int64_t{tile_of<kM>(a, seq, h, block)} * 4 * kM;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int row = step * kRows + first;
    float lse = INFINITY;
    if (block * kM + row < seq.M) {
      const float natural = static_cast<const float*>(p.lse)[offset + row];
      if (natural != -INFINITY) lse = natural;
      if (p.dlse) delta[step] -= static_cast<const float*>(p.dlse)[offset + row];
    }
    float* const to = tile + row;
    to[0] = lse * kLog2E;
    to[kM] = delta[step];
    to[2 * kM] = lse;
    to[3 * kM] = delta[step];
  }
}

}  // namespace tk::cuda::sm90
