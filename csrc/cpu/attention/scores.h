// Elementwise operations on a tile of scores between the two products: scale, softcap, bias, mask.
// Shared by the forward pass, the backward pass and decoding.
#pragma once

#include <algorithm>

#include "cpu/attention/relative_bias.h"
#include "cpu/attention/score_tile.h"
#include "cpu/engine/vec_math.h"

namespace tk::cpu::TK_ISA {

// Score of a masked key; lse of a fully masked query.
template <typename Real>
constexpr Real kHidden = -static_cast<Real>(__builtin_inf());

// s = cap tanh(s / cap); slope = the derivative 1 - tanh^2, unless null.
template <typename Real>
void apply_softcap(Real cap, Real* s, Real* slope, int64_t count) {
  for_each_vector(s, count, [&](Vec<Real> x, int64_t c) {
    const Vec<Real> t = tanh<Real>(x / cap);
    if (slope) store(slope + c, Real{1} - t * t);
    return cap * t;
  });
}

template <typename Real, int64_t kQueries>
void add_alibi(const Problem& p, const Block& block, Real* s) {
  Real slope[kQueries] = {}, distance[kQueries] = {};
  const Real* const slopes =
      static_cast<const Real*>(p.score.alibi_slopes) + block.b * p.score.alibi_stride;
  for (int64_t lane = 0; lane < block.queries; ++lane) {
    slope[lane] = slopes[block.head(lane)];
    distance[lane] = static_cast<Real>(block.key(0) - block.query(lane) - p.score.alibi_offset);
  }
  for (int64_t r = 0; r < block.keys; ++r) {
    for_each_vector(s + r * kQueries, kQueries, [&](Vec<Real> x, int64_t c) {
      const Vec<Real> d = load(distance + c) + static_cast<Real>(r);
      return x - load(slope + c) * (d < 0 ? -d : d);
    });
  }
}

// Hides masked scores. Each lane has its visible keys as bits, which are tested one key at a time
// across all lanes.
template <typename Real, int64_t kQueries>
void apply_element_mask(const Problem& p, const Block& block, Real* s) {
  using Int = IntOf<Real>;
  constexpr int64_t kBits = 8 * sizeof(Int);
  Int words[kBlock / kBits][kQueries] = {};
  for (int64_t lane = 0; lane < block.queries; ++lane) {
    const uint64_t visible = visible_bits(p.mask, p.N, block.b, block.head(lane), block.query(lane),
                                          block.j0, block.cursors);
    const uint64_t bits = visible >> block.first;
    for (int64_t n = 0; n < kBlock / kBits; ++n) {
      words[n][lane] = static_cast<Int>(bits >> (n * kBits));
    }
  }
  for (int64_t r = 0; r < block.keys; ++r) {
    const Int bit = static_cast<Int>(uint64_t{1} << (r % kBits));
    for_each_vector(s + r * kQueries, kQueries, [&](Vec<Real> x, int64_t c) {
      return (load(words[r / kBits] + c) & bit) != 0 ? x : broadcast(kHidden<Real>);
    });
  }
}

// Hides masked scores where the visible keys of each query are an interval.
template <typename Real, int64_t kQueries>
void apply_interval_mask(const Problem& p, const Block& block, Real* s) {
  using Int = IntOf<Real>;
  Int begin[kQueries] = {}, end[kQueries] = {};
  for (int64_t lane = 0; lane < block.queries; ++lane) {
    const KeyInterval keys = row_interval(p.mask, p.N, block.b, block.query(lane));
    begin[lane] = static_cast<Int>(std::clamp<int64_t>(keys.begin - block.key(0), 0, kBlock));
    end[lane] = static_cast<Int>(std::clamp<int64_t>(keys.end - block.key(0), 0, kBlock));
  }
  for (int64_t r = 0; r < block.keys; ++r) {
    const Int row = static_cast<Int>(r);
    for_each_vector(s + r * kQueries, kQueries, [&](Vec<Real> x, int64_t c) {
      return ((load(begin + c) <= row) & (row < load(end + c))) ? x : broadcast(kHidden<Real>);
    });
  }
}

// The scale is deferred to the softmax, where it costs nothing, if no score option comes between
// the product and the softmax. A scale near the limits of float is applied to the product:
// times a scale that rounds to 0, a masked score (-inf) would be NaN.
TK_INLINE bool scale_is_deferred(const Problem& p) {
  return p.score.softcap == 0 && !p.score.bias.data && !p.score.alibi_slopes &&
         !p.score.relative_bias && p.score.scale > 1e-37 && p.score.scale < 1e37;
}

// True if the derivative of a score with respect to its scaled product is not 1.
TK_INLINE bool is_capped(const Problem& p) { return p.score.softcap != 0; }

// Factors that convert the scores of a tile to natural logarithms and to base 2. They include a
// deferred scale.
template <typename Real>
struct ScoreUnit {
  Real natural, log2;
};

template <typename Real>
TK_INLINE ScoreUnit<Real> score_unit(const Problem& p) {
  constexpr double kLog2E = 1.4426950408889634;
  const double scale = scale_is_deferred(p) ? p.score.scale : 1.0;
  return {static_cast<Real>(scale), static_cast<Real>(scale * kLog2E)};
}

// True if finish_scores has anything to do.
TK_INLINE bool needs_finishing(const Problem& p, const Block& block) {
  return !scale_is_deferred(p) || block.visible != Visible::kFull;
}

// s: k q^T on entry; on return the scores of docs/attention.md, except for a deferred scale.
// `slope` (a tile) receives the derivative if there is one; may be null.
template <typename Real, int64_t kQueries>
void finish_scores(const Problem& p, const Block& block, Real* s, Real* slope) {
  if (!scale_is_deferred(p)) {
    const int64_t count = block.keys * kQueries;
    Real scale = static_cast<Real>(p.score.scale);
    if (p.score.softcap != 0 || !(p.score.bias.data || p.score.relative_bias)) {
      for_each_vector(s, count, [&](Vec<Real> x, int64_t) { return x * scale; });
      scale = 1;
    }
    if (p.score.softcap != 0) {
      apply_softcap(static_cast<Real>(p.score.softcap), s, slope, count);
    }
    if (p.score.bias.data) {
      add_bias<Real, kQueries>(p, block, scale, s);
      scale = 1;
    }
    if (p.score.relative_bias) add_relative_bias<Real, kQueries>(p, block, scale, s);
    if (p.score.alibi_slopes) add_alibi<Real, kQueries>(p, block, s);
  }
  if (block.visible != Visible::kFull) {
    block.element_mask ? apply_element_mask<Real, kQueries>(p, block, s)
                       : apply_interval_mask<Real, kQueries>(p, block, s);
  }
}

}  // namespace tk::cpu::TK_ISA
