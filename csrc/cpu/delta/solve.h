// Solution of the triangular system of a chunk, by substitution in the compute dtype.
#pragma once

#include "cpu/engine/vec.h"
#include "cpu/linear/decay.h"

namespace tk::cpu::TK_ISA {

// Rows at a time, of kSolveVectors vectors: accumulators, a row of u, and factors from memory.
#if defined(__AVX512F__)
constexpr int kSolveRows = 8, kSolveVectors = 2;  // 16 + 2 of 32 registers
#else
constexpr int kSolveRows = 4, kSolveVectors = 2;  // 8 + 2 + 1 of 16
#endif

// See solve(); kVectors vectors of columns.
template <bool kTransposed, int kVectors, typename Real>
TK_INLINE void solve_columns(int64_t count, const Real* x, const Real* beta, int64_t ld, Real* r,
                             Real* u) {
  constexpr int64_t W = kLanes<Real>, R = kSolveRows;
  const auto token = [&](int64_t n) { return kTransposed ? count - 1 - n : n; };
  const auto weight = [&](int64_t i, int64_t j) {
    return broadcast(kTransposed ? x[j * kChunk + i] : x[i * kChunk + j]);
  };
  for (int64_t first = 0; first < count; first += R) {
    Vec<Real> sum[R][kVectors];
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[m][v] = load(r + token(first + m) * ld + v * W);
    }
    for (int64_t n = 0; n < first; ++n) {
      const int64_t j = token(n);
      Vec<Real> known[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) known[v] = load(u + j * ld + v * W);
#pragma GCC unroll 8
      for (int m = 0; m < R; ++m) {
        const Vec<Real> a = weight(token(first + m), j);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[m][v] -= a * known[v];
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      const int64_t i = token(first + m);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const Vec<Real> solved = sum[m][v] * beta[i];
        store(r + i * ld + v * W, sum[m][v]);
        store(u + i * ld + v * W, solved);
#pragma GCC unroll 8
        for (int l = m + 1; l < R; ++l) sum[l][v] -= weight(token(first + l), i) * solved;
      }
    }
  }
}

// r_i -= sum of X_ij u_j over the tokens j before i, with u = beta r; or kTransposed, of X_ji u_j
// over the tokens after i. X has leading dimension kChunk, r and u (count x columns) have ld;
// columns is a multiple of a vector.
template <bool kTransposed, typename Real>
void solve(int64_t count, int64_t columns, const Real* x, const Real* beta, int64_t ld, Real* r,
           Real* u) {
  constexpr int64_t W = kLanes<Real>;
  int64_t c = 0;
  for (; c + kSolveVectors * W <= columns; c += kSolveVectors * W) {
    solve_columns<kTransposed, kSolveVectors>(count, x, beta, ld, r + c, u + c);
  }
  for (; c < columns; c += W) solve_columns<kTransposed, 1>(count, x, beta, ld, r + c, u + c);
}

}  // namespace tk::cpu::TK_ISA
