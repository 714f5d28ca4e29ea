// dbias: ds summed over the broadcast dimensions of the bias. A bias that does not broadcast is
// handled by backward.h, which writes ds directly. Otherwise this separate pass iterates over tiles
// of the bias, so that no two threads add to the same element and the order of summation is fixed.
#pragma once

#include "cpu/attention/score_gradient.h"
#include "cpu/engine/transpose_store.h"

namespace tk::cpu::TK_ISA {

// Partial sums of a bias that broadcasts along queries (or keys): one per block of queries (or
// keys).
template <typename Real>
struct BiasGradient {
  int64_t rows, columns;  // of the partial sums: M or head_blocks, N or key_blocks
  bool sum_rows, sum_columns;
  Real* partial;  // (bias B, bias H, rows, columns), if folds()

  bool folds() const { return sum_rows || sum_columns; }
};

template <typename Engine>
auto lay_out_bias_gradient(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                           Arena& arena) {
  using Real = typename Engine::Real;
  BiasGradient<Real> g{};
  g.sum_rows = p.bias_size[2] == 1;
  g.sum_columns = p.bias_size[3] == 1;
  g.rows = g.sum_rows ? w.head_blocks : p.M;
  g.columns = g.sum_columns ? w.key_blocks : p.N;
  const int64_t slices = p.bias_size[0] * p.bias_size[1];
  g.partial = allocate<Real>(arena, g.folds() ? slices * g.rows * g.columns : 0);
  return g;
}

// Stores or adds ds of rows r and r + 16 to a tile of kBlock keys x kBlock queries. The product in
// ds is not fused with the addition: sums are those of the ds that is stored.
template <typename Real>
TK_INLINE void put_in_tile(int64_t r, int64_t lane, const Vec<Real> (&ds)[2][2], Real* tile,
                           WriteMode mode) {
  for (int half = 0; half < 2; ++half) {
    for (int n = 0; n < 2; ++n) {
      Real* to = tile + (r + half * kKeyGroup / 2) * kBlock + lane + n * kLanes<Real>;
      store(to,
            mode == WriteMode::kAccumulate ? load(to) + rounded<Real>(ds[half][n]) : ds[half][n]);
    }
  }
}

// Writes a tile of ds (keys x queries, followed by scratch of the same size) to dbias, for a bias
// that broadcasts along neither queries nor keys. A gradient larger than the caches is streamed.
template <typename Real>
void write_ds(const BackwardParams& p, int64_t bias_b, int64_t bias_h, int64_t i0, int64_t j0,
              Real* tile) {
  constexpr int64_t kLarge = 1 << 21;  // elements
  const int64_t* size = p.bias_size;
  const bool large = size[0] * size[1] * size[2] * size[3] >= kLarge;
  Real ones[kBlock];
  for (Real& x : ones) x = 1;
  write_transposed<kBlock>(
      {p.score.bias_dtype, p.dbias, bias_b, bias_h, i0, std::min(p.M - i0, kBlock),
       std::min(p.N - j0, kBlock), j0, large ? StorePolicy::kStreamed : StorePolicy::kCached},
      tile, kBlock, ones, tile + kBlock * kBlock);
}

// tile (keys x queries): sum of ds over every (b, h) that reads this tile of the bias.
template <typename Engine>
void sum_score_gradients(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                         const BackwardScratch<Engine>& t, int64_t bias_b, int64_t bias_h,
                         int64_t i0, int64_t j0, typename Engine::Real* tile) {
  using Real = typename Engine::Real;
  clear(tile, kBlock * kBlock);
  const int64_t b0 = p.bias_size[0] == 1 ? 0 : bias_b, b1 = p.bias_size[0] == 1 ? p.B : b0 + 1;
  const int64_t h0 = p.bias_size[1] == 1 ? 0 : bias_h, h1 = p.bias_size[1] == 1 ? p.H_q : h0 + 1;
  for (int64_t b = b0; b < b1; ++b) {
    for (int64_t h = h0; h < h1; ++h) {
      const Block block = make_block(p, b, h, i0, kBlock, j0);
      if (block.visible == Visible::kEmpty) continue;
      const int64_t q_per_kv = p.H_q / p.H_kv, slot = b * p.H_kv + h / q_per_kv;
      const int64_t query_block = h % q_per_kv * w.head_blocks + i0 / kBlock;
      score_gradient(
          p, w, t, slot, j0 / kBlock, query_block, block,
          [&](int64_t row, int64_t lane, const Vec<Real>(&)[2][2], const Vec<Real>(&ds)[2][2])
              TK_INLINE_LAMBDA {
                put_in_tile(row, lane, ds, tile + block.first * kBlock, WriteMode::kAccumulate);
              });
    }
  }
}

// Sums the columns of tile (queries x keys) into the first column, or the rows into the first row.
template <typename Real>
void fold_tile(const BiasGradient<Real>& g, Real* tile) {
  if (g.sum_columns) {
    for (int64_t r = 0; r < kBlock; ++r) {
      for (int64_t c = 1; c < kBlock; ++c) tile[r * kBlock] += tile[r * kBlock + c];
    }
  }
  if (g.sum_rows) {
    for (int64_t r = 1; r < kBlock; ++r) {
      for (int64_t c = 0; c < kBlock; ++c) tile[c] += tile[r * kBlock + c];
    }
  }
}

// Writes a folded tile (queries x keys) to the partial sums of bias slice `slice`.
template <typename Real>
void write_partial(const BackwardParams& p, const BiasGradient<Real>& g, int64_t slice, int64_t i0,
                   int64_t j0, const Real* tile) {
  const int64_t row0 = g.sum_rows ? i0 / kBlock : i0, column0 = g.sum_columns ? j0 / kBlock : j0;
  const int64_t rows = g.sum_rows ? 1 : std::min(p.M - i0, kBlock);
  const int64_t columns = g.sum_columns ? 1 : std::min(p.N - j0, kBlock);
  for (int64_t r = 0; r < rows; ++r, tile += kBlock) {
    Real* to = g.partial + (slice * g.rows + row0 + r) * g.columns + column0;
    for (int64_t c = 0; c < columns; ++c) to[c] = tile[c];
  }
}

// Sums the partial sums of one element of the bias.
template <typename Real>
void write_folded(const BackwardParams& p, const BiasGradient<Real>& g, int64_t slice, int64_t r,
                  int64_t c) {
  const int64_t r0 = g.sum_rows ? 0 : r, r1 = g.sum_rows ? g.rows : r + 1;
  const int64_t c0 = g.sum_columns ? 0 : c, c1 = g.sum_columns ? g.columns : c + 1;
  Real sum = 0;
  for (int64_t row = r0; row < r1; ++row) {
    for (int64_t column = c0; column < c1; ++column) {
      sum += g.partial[(slice * g.rows + row) * g.columns + column];
    }
  }
  const int64_t b = slice / p.bias_size[1], h = slice % p.bias_size[1];
  write_row(&sum, 1, Real{1}, p.score.bias_dtype, p.dbias.data,
            row_offset(p.dbias, b, h, r) + c * p.dbias.stride[3], 1);
}

template <typename Engine>
void bias_gradient(const BackwardParams& p, const BackwardWorkspace<Engine>& w,
                   const Workers& workers, Arena& arena) {
  const auto g = lay_out_bias_gradient(p, w, arena);
  const int64_t slices = p.bias_size[0] * p.bias_size[1];
  const int64_t tiles = w.head_blocks * w.key_blocks;
  for_each(workers, slices * tiles, [&](int64_t worker, int64_t item) {
    [[maybe_unused]] const typename Engine::Session session;
    const BackwardScratch<Engine> t = scratch_of(p, w, worker);
    const int64_t slice = item / tiles, m = item % tiles / w.key_blocks, n = item % w.key_blocks;
    const int64_t b = slice / p.bias_size[1], h = slice % p.bias_size[1];
    sum_score_gradients(p, w, t, b, h, m * kBlock, n * kBlock, t.ds);
    if (g.folds()) {
      auto* const transposed = t.ds + kBlock * kBlock;
      transpose_tile<kBlock, kBlock>(t.ds, transposed);
      fold_tile(g, transposed);
      write_partial(p, g, slice, m * kBlock, n * kBlock, transposed);
    } else {
      write_ds(p, b, h, m * kBlock, n * kBlock, t.ds);
      end_streams();
    }
  });
  if (!g.folds()) return;
  for_each(workers, slices * p.bias_size[2], [&](int64_t, int64_t item) {
    for (int64_t c = 0; c < p.bias_size[3]; ++c) {
      write_folded(p, g, item / p.bias_size[2], item % p.bias_size[2], c);
    }
  });
}

}  // namespace tk::cpu::TK_ISA
