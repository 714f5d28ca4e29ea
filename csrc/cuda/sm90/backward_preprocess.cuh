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

// One warp per row, padding rows of the last tile included.
template <typename Element, int kM>
TK_KERNEL(kTermWarps* kWarp, 1)
backward_preprocess_kernel(const __grid_constant__ BackwardArguments a) {
  const BackwardParams& p = a.params;
  const int program = static_cast<int>(blockIdx.x), H_q = static_cast<int>(p.H_q);
  const int blocks = a.row_tiles * kM / kTermWarps;
  const int h = program / blocks % H_q;
  const Sequence seq = sequence_of(a, program / blocks / H_q);
  const int i = program % blocks * kTermWarps + warp_index();
  if (i / kM * kM >= seq.M) return;
  float lse = INFINITY, delta = 0.0f;
  if (i < seq.M) {
    const int64_t offset = statistics_offset(p, seq, h) + i;
    const float natural = static_cast<const float*>(p.lse)[offset];
    if (natural != -INFINITY) lse = natural;
    delta = delta_of<Element>(p, seq, h, i, offset);
  }
  if (lane_index() != 0) return;
  float* const to = a.row_stats + int64_t{tile_of<kM>(a, seq, h, i / kM)} * 4 * kM + i % kM;
  to[0] = lse * kLog2E;
  to[kM] = delta;
  to[2 * kM] = lse;
  to[3 * kM] = delta;
}

}  // namespace tk::cuda::sm90
