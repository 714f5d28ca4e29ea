// Bias by distance i + offset - j (docs/attention.md, section 2). A tile is keys x queries, and the
// table is in the order of the distance: the elements of one key are contiguous, in place.
#pragma once

#include <algorithm>

#include "cpu/attention/bias.h"

namespace tk::cpu::TK_ISA {

// Offset in the table of the tile's first key and the query of one lane. Those of later keys
// precede it.
TK_INLINE int64_t relative_index(const Problem& p, const Block& block, int64_t lane) {
  return block.query(lane) + p.score.relative_offset - block.key(0);
}

template <typename Real>
TK_INLINE const Real* relative_table(const Problem& p, int64_t head) {
  return static_cast<const Real*>(p.score.relative_bias) + head * p.score.relative_stride;
}

// Copies `count` elements of a table from element `first` on; those outside it are 0. They belong
// to rows past M and keys past N.
template <typename Real>
void copy_distances(const Problem& p, const Real* table, int64_t first, int64_t count, Real* to) {
  const int64_t begin = std::clamp<int64_t>(-first, 0, count);
  const int64_t end = std::clamp<int64_t>(p.score.distances - first, begin, count);
  for (int64_t n = 0; n < begin; ++n) to[n] = 0;
  for (int64_t n = begin; n < end; ++n) to[n] = table[first + n];
  for (int64_t n = end; n < count; ++n) to[n] = 0;
}

// s = scale s + relative bias, for queries of one head.
template <typename Real, int64_t kQueries>
void add_relative_of_head(const Problem& p, const Block& block, Real scale, Real* s) {
  Real copy[kBlock + kQueries];
  const int64_t last = block.keys - 1, first = relative_index(p, block, 0) - last;
  const int64_t count = last + kQueries;
  const Real* const table = relative_table<Real>(p, block.h);
  const bool in_place = first >= 0 && first + count <= p.score.distances;
  if (!in_place) copy_distances(p, table, first, count, copy);
  const Real* const elements = in_place ? table + first : copy;
  for (int64_t r = 0; r < block.keys; ++r) {
    const Real* const of_key = elements + last - r;
    for_each_vector(s + r * kQueries, kQueries,
                    [&](Vec<Real> x, int64_t c) { return x * scale + load(of_key + c); });
  }
}

// s = scale s + relative bias.
template <typename Real, int64_t kQueries>
void add_relative_bias(const Problem& p, const Block& block, Real scale, Real* s) {
  if (block.queries <= block.per_head) {
    return add_relative_of_head<Real, kQueries>(p, block, scale, s);
  }
  constexpr int64_t W = kLanes<Real>;
  for (int64_t lane0 = 0; lane0 < block.queries; lane0 += W) {
    Real copies[W][kBlock];
    const Real* rows[W];
    for (int64_t n = 0; n < W; ++n) {
      const int64_t lane = std::min(lane0 + n, block.queries - 1), last = block.keys - 1;
      copy_distances(p, relative_table<Real>(p, block.head(lane)),
                     relative_index(p, block, lane) - last, block.keys, copies[n]);
      std::reverse(copies[n], copies[n] + block.keys);
      rows[n] = copies[n];
    }
    add_rows<Real, Real, kQueries>(rows, block.keys, scale, s + lane0);
  }
}

}  // namespace tk::cpu::TK_ISA
