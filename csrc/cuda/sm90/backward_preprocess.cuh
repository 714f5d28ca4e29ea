// What each query brings into the backward pass beside q and do: lse and delta, of a tile of rows
// side by side, so that one copy brings both.
#pragma once

#include "cuda/common/score_gradient.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace tk::cuda::sm90 {

struct BackwardArguments : Arguments<BackwardParams> {
  float* terms;    // (tiles, 2, block_m): lse in powers of 2, +inf for rows that see nothing or are
                   // not there; delta = rowsum(do o) - dlse
  float* dq_sums;  // (tiles, groups, numbers / 4, 128, 4): as a group's threads hold them
  int* turns;      // (tiles, groups): how many blocks of keys have added; null: in any order
  int* begun;      // how many blocks have begun
  int row_tiles;   // of the longest sequence
  TensorMap q, k, v, d_o, dk, dv;
};

// Which keys a block of threads has.
struct KeyWork {
  int b, h_kv, n;  // n: number of the block of keys
};

// Number of a tile of queries. Packed sequences share a head's tiles; each has one more than its
// rows fill.
template <int kM>
TK_DEVICE int tile_of(const BackwardArguments& a, const Sequence& s, int h, int block) {
  const BackwardParams& p = a.params;
  const int H_q = static_cast<int>(p.H_q), M = static_cast<int>(p.M);
  if (!a.varlen.cu_seqlens_q) return (s.b * H_q + h) * ((M + kM - 1) / kM) + block;
  return h * (M / kM + static_cast<int>(a.varlen.B)) + s.first_q / kM + s.b + block;
}

// In shared memory.
template <int kM>
struct Terms {
  static constexpr int kBytes = 2 * kM * sizeof(float);
  float* data;

  TK_DEVICE_METHOD const float* lse() const { return data; }
  TK_DEVICE_METHOD const float* delta() const { return data + kM; }
};

// A warp for each row of all tiles.
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
    const int64_t at = statistics_offset(p, seq, h) + i;
    const float natural = static_cast<const float*>(p.lse)[at];
    if (natural != -INFINITY) lse = natural * kLog2E;
    delta = delta_of<Element>(p, seq, h, i, at);
  }
  if (lane_index() != 0) return;
  float* const to = a.terms + int64_t{tile_of<kM>(a, seq, h, i / kM)} * 2 * kM + i % kM;
  to[0] = lse;
  to[kM] = delta;
}

}  // namespace tk::cuda::sm90
