// Keys by distance: s_ij += q_i · r_e, where e = i + offset - j (docs/attention.md, section 2).
//
// For a group of kKeyGroup queries from i0 on, a tile of keys from j0 on needs the products with a
// band of keys + kKeyGroup - 1 distances. Panels hold r in descending order of the distance: the
// row of query i0 + l of the product then has the terms of consecutive keys next to each other,
//
//   g = q x^T,   s_jl += g[l][j - j0 + kKeyGroup - 1 - l]
//
// and is added like a bias, transposed in registers. Bands begin at whole panels, because i0, j0
// and the panels are multiples of kKeyGroup.
#pragma once

#include <algorithm>

#include "cpu/attention/scores.h"
#include "cpu/engine/arena.h"
#include "cpu/engine/workers.h"

namespace tk::cpu::TK_ISA {

// Distances of a tile of keys and a group of queries.
constexpr int64_t kBand = kBlock + kKeyGroup;

// Packed keys by distance. Row t of the panels is that of pairs with j - i = t - shift.
struct DistancePanels {
  PanelLayout layout;      // of kKeyGroup distances
  int64_t count = 0;       // panels of one table; 0 without relative keys
  int64_t shift = 0;       // M - 1, rounded up
  int64_t tables = 0;      // 1 or H_q
  char* panels = nullptr;  // (tables, count)

  explicit operator bool() const { return count > 0; }

  char* panel(int64_t h, int64_t n) const {
    return panels + static_cast<size_t>((tables == 1 ? 0 : h) * count + n) * layout.bytes;
  }
  // First panel of the band of queries i0 .. i0 + kKeyGroup - 1 and keys from j0 on.
  int64_t first_panel(int64_t i0, int64_t j0) const {
    return (j0 - i0 + shift - (kKeyGroup - 1)) / kKeyGroup;
  }
};

template <typename Engine>
DistancePanels lay_out_distances(const Problem& p, unsigned uses, Arena& arena) {
  DistancePanels x{};
  if (!p.score.relative_keys) return x;
  x.layout = Engine::layout(uses, kKeyGroup, p.D);
  x.count = (round_up(p.M, kKeyGroup) + round_up(p.N, kKeyGroup)) / kKeyGroup;
  x.shift = round_up(p.M, kKeyGroup) - 1;
  x.tables = p.score.relative_keys_stride == 0 ? 1 : p.H_q;
  x.panels = allocate<char>(arena, x.tables * x.count * static_cast<int64_t>(x.layout.bytes));
  return x;
}

// Packs panel n of table h. Distances that no pair has, or that the diagonals hide, become zero.
template <typename Engine>
void pack_distances(const Problem& p, const DistancePanels& x, int64_t h, int64_t n, void* scratch,
                    bool* finite) {
  const ScoreParams& score = p.score;
  const int64_t last = score.distances - 1, rows = score.distances;
  const auto* const table = static_cast<const char*>(score.relative_keys) +
                            (h * score.relative_keys_stride + last * p.D) * size_of(p.dtype);
  // Its row 0 has the largest distance, and is row `first` of the panels.
  const Strided descending{const_cast<char*>(table), {0, 0, -p.D, 1}};
  const int64_t first = score.relative_offset - last + x.shift;
  const auto is_live = [&](int64_t row) {
    const int64_t diagonal = row + first - x.shift;
    return row >= 0 && diagonal >= p.mask.diagonal_low && diagonal <= p.mask.diagonal_high;
  };
  pack_panel<Engine>(x.layout, Slice{p.dtype, descending, 0, 0, rows, p.D}, n * kKeyGroup - first,
                     is_live, scratch, x.panel(h, n), finite);
}

// scratch_of(worker): memory for the rows of a panel.
template <typename Engine, typename Scratch>
void pack_all_distances(const Problem& p, const DistancePanels& x, const Workers& workers,
                        bool* finite, Scratch&& scratch_of) {
  if (!x) return;
  for_each(workers, x.tables * x.count, [&](int64_t worker, int64_t item) {
    pack_distances<Engine>(p, x, item / x.count, item % x.count, scratch_of(worker), finite);
  });
}

// Products of packed queries with their bands of distances; scratch of one worker. Bands of
// neighbouring key blocks overlap by one panel for each group of queries, which is kept in `held`.
template <typename Real>
struct Bands {
  Real* g;     // (kKeyGroup, kBand)
  Real* held;  // (groups, kKeyGroup, kKeyGroup)
};

template <typename Real>
void copy_square(const Real* from, int64_t from_ld, Real* to, int64_t to_ld) {
  for (int64_t l = 0; l < kKeyGroup; ++l, from += from_ld, to += to_ld) {
    __builtin_memcpy(to, from, kKeyGroup * sizeof(Real));
  }
}

// Adds the products of a tile's queries with its keys by distance to s (keys x kQueries). Row
// `row0` of the packed queries is the tile's first query.
template <typename Engine, int64_t kQueries, typename Real>
void add_relative_keys(const DistancePanels& x, const PanelLayout& q, const char* q_panel,
                       int64_t row0, int64_t width, const Block& block, const Bands<Real>& bands,
                       Real* s) {
  constexpr int64_t W = kLanes<Real>;
  Real* const g = bands.g;
  for (int64_t group = 0; group < block.queries; group += kKeyGroup) {
    const int64_t first = x.first_panel(block.i0 + group, block.key(0));
    Real* const held = bands.held + group * kKeyGroup;
    if (block.continues) copy_square(held, kKeyGroup, g, kBand);
    for (int64_t n = block.continues ? 1 : 0; n <= block.keys / kKeyGroup; ++n) {
      const typename Engine::Product product{
          Engine::left(q, q_panel, row0 + group),
          Engine::right_t(x.layout, x.panel(block.h, first + n), 0), width};
      Engine::template multiply<Accuracy::kFull>(kKeyGroup, kKeyGroup, &product, 1,
                                                 g + n * kKeyGroup, kBand, WriteMode::kOverwrite);
    }
    copy_square(g + block.keys, kBand, held, kKeyGroup);
    for (int64_t l = 0; l < kKeyGroup; l += W) {
      const Real* rows[W];
      for (int64_t n = 0; n < W; ++n) rows[n] = g + (l + n) * kBand + kKeyGroup - 1 - (l + n);
      add_rows<Real, Real, kQueries>(rows, block.keys, Real{1}, s + group + l);
    }
  }
}

}  // namespace tk::cpu::TK_ISA
