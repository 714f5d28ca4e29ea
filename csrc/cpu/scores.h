// What happens to a tile of scores between the two products: scale, softcap, bias, mask; and which
// weights dropout keeps. Forward and backward share every line.
#pragma once

#include "../mask.h"
#include "../philox.h"
#include "pack.h"
#include "vec_math.h"

namespace tk::cpu::TK_ISA {

static_assert(kBlock == kSummaryBlock && kBlock == kPhiloxColumns);

// Queries i0 .. i0 + rows - 1 against keys j0 .. j0 + kBlock - 1; tiles are kBlock x kBlock.
struct Block {
  int64_t b, h, i0, j0, rows;
  Visible visible;
};

TK_INLINE Block make_block(const Problem& p, int64_t b, int64_t h, int64_t i0, int64_t j0) {
  const int64_t i1 = i0 + kBlock < p.M ? i0 + kBlock : p.M;
  // Columns beyond N count as hidden: a block that reaches over the end is never wholly visible.
  return {b, h, i0, j0, i1 - i0, block_visible(p.mask, p.N, b, h, i0, i1, j0, j0 + kBlock)};
}

template <typename Real, typename Visit>
TK_INLINE void for_each_vector(Real* row, Visit&& visit) {
#pragma GCC unroll 4
  for (int64_t c = 0; c < kBlock; c += kLanes<Real>) store(row + c, visit(load(row + c), c));
}

// s = cap tanh(s / cap); slope = the derivative 1 - tanh^2, where it is asked for.
template <typename Real>
TK_INLINE void apply_softcap(Real cap, Real* row, Real* slope) {
  for_each_vector(row, [&](Vec<Real> s, int64_t c) {
    const Vec<Real> t = tanh<Real>(s / cap);
    if (slope) store(slope + c, Real{1} - t * t);
    return cap * t;
  });
}

template <typename Real>
TK_INLINE void add_bias(const Problem& p, const Block& block, int64_t i, Real* row) {
  const Strided& bias = p.score.bias;
  const int64_t columns = p.N - block.j0 < kBlock ? p.N - block.j0 : kBlock;
  const int64_t offset = row_offset(bias, block.b, block.h, i) + block.j0 * bias.stride[3];
  Real added[kBlock];
  read_row(p.score.bias_dtype, bias.data, offset, bias.stride[3], columns, added);
  for (int64_t c = 0; c < columns; ++c) row[c] += added[c];
}

template <typename Real>
TK_INLINE void add_alibi(const Problem& p, const Block& block, int64_t i, Real* row) {
  const Real slope = static_cast<const Real*>(p.score.alibi_slopes)[block.h];
  const Real first = static_cast<Real>(block.j0 - i - p.score.alibi_offset);
  for_each_vector(row, [&](Vec<Real> s, int64_t c) {
    const Vec<Real> d = iota<Real>() + (first + static_cast<Real>(c));
    return s - slope * (d < 0 ? -d : d);
  });
}

template <typename Real>
TK_INLINE void hide(const Problem& p, const Block& block, int64_t i, Real* row) {
  constexpr Real kHidden = -static_cast<Real>(__builtin_inf());
  const KeyInterval keys = row_interval(p.mask, p.N, block.b, i);
  for (int64_t c = 0; c < kBlock; ++c) {
    const int64_t j = block.j0 + c;
    row[c] = (j >= keys.begin) & (j < keys.end) ? row[c] : kHidden;
  }
  if (!needs_flags(p.mask)) return;
  const int64_t columns = p.N - block.j0 < kBlock ? p.N - block.j0 : kBlock;
  uint8_t flags[kBlock];
  row_flags(p.mask, p.M, p.N, block.b, block.h, i, block.j0, columns, flags);
  for (int64_t c = 0; c < columns; ++c) row[c] = flags[c] ? row[c] : kHidden;
}

// s: q k^T on entry, the scores of docs/attention.md on return. `slope` (a tile) takes the
// softcap's derivative and may be null.
template <typename Real>
void finish_scores(const Problem& p, const Block& block, Real* s, Real* slope) {
  const Real scale = static_cast<Real>(p.score.scale);
  for (int64_t r = 0; r < block.rows; ++r, s += kBlock) {
    const int64_t i = block.i0 + r;
    for_each_vector(s, [&](Vec<Real> x, int64_t) { return x * scale; });
    if (p.score.softcap != 0) {
      apply_softcap(static_cast<Real>(p.score.softcap), s, slope ? slope + r * kBlock : nullptr);
    }
    if (p.score.bias.data) add_bias(p, block, i, s);
    if (p.score.alibi_slopes) add_alibi(p, block, i, s);
    if (block.visible != Visible::kAll) hide(p, block, i, s);
  }
}

// factor = 1 / (1 - p) where a weight is kept, 0 where it is dropped.
template <typename Real>
void dropout_factors(const Problem& p, const Block& block, Real* factor) {
  const uint32_t threshold = keep_threshold(p.dropout.p);
  const Real kept = p.dropout.p < 1 ? static_cast<Real>(1 / (1 - p.dropout.p)) : Real{0};
  for (int64_t r = 0; r < block.rows; ++r, factor += kBlock) {
    uint32_t words[kPhiloxColumns];
    philox_row(p.dropout.seed, static_cast<uint32_t>(block.b), static_cast<uint32_t>(block.h),
               static_cast<uint32_t>(block.i0 + r), static_cast<uint32_t>(block.j0), words);
    for (int64_t c = 0; c < kBlock; ++c) factor[c] = words[c] >= threshold ? kept : Real{0};
  }
}

}  // namespace tk::cpu::TK_ISA
