// ds summed along diagonals: the gradient of a relative bias, for each head. The sums of a tile are
// added to those of its split, and those of the splits in order, so that no two threads add to the
// same element and the order of summation is fixed.
#pragma once

#include "cpu/attention/backward_workspace.h"

namespace tk::cpu::TK_ISA {

// Adds ds of rows r and r + 16 of a tile of keys x queries to the tile's sums by distance.
template <typename Real>
TK_INLINE void add_to_diagonals(int64_t r, int64_t lane, const Vec<Real> (&ds)[2][2], Real* sums) {
  for (int half = 0; half < 2; ++half) {
    for (int n = 0; n < 2; ++n) {
      Real* to = sums + kBlock - 1 - (r + half * kKeyGroup / 2) + lane + n * kLanes<Real>;
      store(to, load(to) + ds[half][n]);
    }
  }
}

// Adds the sums of a tile to those of its split.
template <typename Engine>
void add_tile_diagonals(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                        const BackwardScratch<Engine>& t, int64_t slot, int64_t split,
                        const Block& block) {
  const int64_t first = block.i0 + p.N - 1 - block.key(0) - (kBlock - 1);
  auto* const to = w.diagonals_of(slot, split, block.h % (p.H_q / p.H_kv)) + kBlock + first;
  for (int64_t n = 0; n < 2 * kBlock; ++n) to[n] += t.diagonals[n];
}

template <typename Engine>
void clear_diagonals(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t slot,
                     int64_t split) {
  clear(w.diagonals_of(slot, split, 0), p.H_q / p.H_kv * w.padded_distances);
}

// Writes the sums of the query heads that share key head `head`.
template <typename Engine>
void write_distance_sums(const BackwardParams& p, const BackwardWorkspace<Engine>& w, int64_t slot,
                         int64_t head) {
  using Real = typename Engine::Real;
  const int64_t group = p.H_q / p.H_kv, distances = p.M + p.N - 1;
  Real* to = static_cast<Real*>(p.distance_sums) + head * group * distances;
  for (int64_t h = 0; h < group; ++h, to += distances) {
    for (int64_t n = 0; n < distances; ++n) to[n] = w.diagonals_of(slot, 0, h)[kBlock + n];
    for (int64_t split = 1; split < w.splits; ++split) {
      const Real* const sums = w.diagonals_of(slot, split, h) + kBlock;
      for (int64_t n = 0; n < distances; ++n) to[n] += sums[n];
    }
  }
}

}  // namespace tk::cpu::TK_ISA
