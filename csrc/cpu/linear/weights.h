// The triangle of weights within a chunk: queries x keys, zero above the diagonal. Its products
// leave the square above the diagonal out, of four squares of kHalf tokens.
#pragma once

#include "cpu/engine/vec.h"
#include "cpu/linear/decay.h"
#include "cpu/linear/scan.h"

namespace tk::cpu::TK_ISA {

constexpr int64_t kHalf = kChunk / 2;

// c (count x count, leading dimension kChunk) = a b^T, where rows of a are queries and rows of b
// keys. The square above the diagonal is not written.
template <typename Engine>
void multiply_triangle(int64_t count, const Block<Engine>& a, const Block<Engine>& b,
                       typename Engine::Real* c) {
  const int64_t depth = a.width();
  multiply<Engine>(count, kHalf, {{a.left(), b.right_t(), depth}}, c, kChunk);
  if (count == kHalf) return;
  multiply<Engine>(kHalf, kHalf, {{a.left(kHalf), b.right_t(kHalf), depth}},
                   c + kHalf * kChunk + kHalf, kChunk);
}

// c = weights x + a b, by queries.
template <typename Engine>
void multiply_by_weights(int64_t count, const Block<Engine>& weights, const Block<Engine>& x,
                         const Block<Engine>& a, const Block<Engine>& b, typename Engine::Real* c) {
  const int64_t columns = x.width(), depth = a.width();
  for (int64_t r = 0; r < count; r += kHalf) {
    multiply<Engine>(kHalf, columns,
                     {{weights.left(r), x.right(), r + kHalf}, {a.left(r), b.right(), depth}},
                     c + r * columns, columns);
  }
}

// c += weights^T x, by keys; half of the queries at a time, which see no later half of the keys.
template <typename Engine>
void add_by_transposed_weights(int64_t count, const Block<Engine>& weights, const Block<Engine>& x,
                               typename Engine::Real* c) {
  for (int64_t depth = 0; depth < count; depth += kHalf) {
    multiply<Engine>(depth + kHalf, x.width(),
                     {{weights.left_t(depth), Engine::from_depth(x.right(), depth), kHalf}}, c,
                     x.width(), WriteMode::kAccumulate);
  }
}

// Row i of the triangle from column j on: plus `bias`, times the decay from j to i, zero for later
// tokens. decay null = none.
template <typename Real>
TK_INLINE Vec<Real> weight(Vec<Real> x, const ChunkDecay<Real>* decay, int64_t i, int64_t j,
                           Real bias) {
  const auto is_later = iota<Real>() > static_cast<Real>(i - j);
  x += bias;
  if (decay) {
    const Vec<Real> between = decay->between(i, j);
    x *= exp<Real>(is_later ? Vec<Real>{} : between);
  }
  return is_later ? Vec<Real>{} : x;
}

// Turns the first `count` rows of products (kChunk columns) into weights. bias null = zero; sums
// (not null) receives the sum of each row.
template <typename Real>
void finish_weights(int64_t count, const ChunkDecay<Real>* decay, const Real* bias, Real* weights,
                    Real* sums) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t r = 0; r < count; r += W) {
    Vec<Real> sum[W];
    for (int64_t n = 0; n < W; ++n) {
      const int64_t i = r + n;
      Real* const row = weights + i * kChunk;
      const Real added = bias ? bias[i] : Real{0};
      sum[n] = Vec<Real>{};
      for (int64_t j = 0; j < count; j += W) {
        const Vec<Real> x = j > i ? Vec<Real>{} : weight(load(row + j), decay, i, j, added);
        store(row + j, x);
        sum[n] += x;
      }
    }
    if (sums) store(sums + r, row_sums<Real>(sum));
  }
}

// sums[i] (not null) += row i . x, of `count` rows
template <typename Real>
void add_products(const Real* rows, int64_t count, int64_t padded, const Real* x, Real* sums) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t r = 0; r < count; r += W) {
    Vec<Real> sum[W];
    for (int64_t n = 0; n < W; ++n) {
      sum[n] = Vec<Real>{};
      for (int64_t c = 0; c < padded; c += W) {
        sum[n] += load(rows + (r + n) * padded + c) * load(x + c);
      }
    }
    store(sums + r, load(sums + r) + row_sums<Real>(sum));
  }
}

}  // namespace tk::cpu::TK_ISA
