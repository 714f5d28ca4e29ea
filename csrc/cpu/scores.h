// What happens to a tile of scores between the two products: scale, softcap, bias, mask; and which
// weights dropout keeps. Forward, backward and decoding share every line.
//
// Tiles are transposed: a row holds one key's scores with kQueries queries, so that the softmax
// runs down columns, one query in each lane.
#pragma once

#include <algorithm>

#include "../mask.h"
#include "../philox.h"
#include "pack.h"
#include "vec_math.h"

namespace tk::cpu::TK_ISA {

static_assert(kBlock == kSummaryBlock && kBlock == kPhiloxColumns);

constexpr int64_t kKeyGroup = 32;  // a block's keys are computed in groups of so many

template <typename Real>
constexpr Real kHidden = -static_cast<Real>(__builtin_inf());

// `keys` keys, from the block's `first` on, against `queries` of the group's queries, which start
// with query i0 of head h. per_head queries of a head come before those of the next one.
struct Block {
  int64_t b, h, i0, j0;  // the block of keys begins with key j0
  int64_t queries, per_head;
  int64_t first, keys;  // whole groups
  Visible visible;
  bool flagged;  // dense, layout or segments hide some of it

  int64_t head(int64_t lane) const { return h + lane / per_head; }
  int64_t query(int64_t lane) const { return i0 + lane % per_head; }
  int64_t key(int64_t row) const { return j0 + first + row; }
};

// Sees what is visible, and leaves out keys before the first visible one and behind the last.
TK_INLINE void look(const Problem& p, Block& block) {
  const int64_t last_query = block.query(block.queries - 1);
  const int64_t i1 = block.queries > block.per_head ? block.per_head : last_query + 1;
  block.visible = Visible::kNone;
  block.flagged = false;
  for (int64_t h = block.h; h <= block.head(block.queries - 1); ++h) {
    // Keys beyond N count as hidden: a block that reaches over the end is never wholly visible.
    const Visible visible =
        block_visible(p.mask, p.N, block.b, h, block.i0, i1, block.j0, block.j0 + kBlock);
    if (h == block.h) {
      block.visible = visible;
    } else if (block.visible != visible) {
      block.visible = Visible::kSome;
    }
    block.flagged |= summary_entry(p.mask, block.b, h, block.i0, block.j0) != Visible::kAll;
  }
  const KeyInterval keys = block_interval(p.mask, p.N, block.b, block.i0, i1);
  block.first = keys.begin > block.j0 ? (keys.begin - block.j0) / kKeyGroup * kKeyGroup : 0;
  const int64_t end = keys.end - block.j0;
  block.keys = (end < kBlock ? round_up(end, kKeyGroup) : kBlock) - block.first;
  if (block.keys <= 0) block.visible = Visible::kNone;
}

TK_INLINE Block make_block(const Problem& p, int64_t b, int64_t h, int64_t i0, int64_t queries,
                           int64_t j0) {
  Block block{b, h, i0, j0, p.M - i0 < queries ? p.M - i0 : queries, queries, 0, 0, {}, {}};
  look(p, block);
  return block;
}

template <typename Real, typename Visit>
TK_INLINE void for_each_vector(Real* tile, int64_t count, Visit&& visit) {
#pragma GCC unroll 4
  for (int64_t c = 0; c < count; c += kLanes<Real>) store(tile + c, visit(load(tile + c), c));
}

// s = cap tanh(s / cap); slope = the derivative 1 - tanh^2, where it is asked for.
template <typename Real>
void apply_softcap(Real cap, Real* s, Real* slope, int64_t count) {
  for_each_vector(s, count, [&](Vec<Real> x, int64_t c) {
    const Vec<Real> t = tanh<Real>(x / cap);
    if (slope) store(slope + c, Real{1} - t * t);
    return cap * t;
  });
}

template <typename Real>
TK_INLINE void read_bias(const Problem& p, const Block& block, int64_t lane, Real* row) {
  const Strided& bias = p.score.bias;
  const int64_t j = block.key(0), columns = p.N - j < block.keys ? p.N - j : block.keys;
  for (int64_t c = columns; c < block.keys; ++c) row[c] = 0;
  read_row(
      p.score.bias_dtype, bias.data,
      row_offset(bias, block.b, block.head(lane), block.query(lane)) + block.j0 * bias.stride[3],
      bias.stride[3], columns, row);
}

template <typename Real, int64_t kQueries>
void add_bias(const Problem& p, const Block& block, Real* s) {
  constexpr int64_t W = kLanes<Real>;
  Real rows[W][kBlock];
  if (p.score.bias.stride[2] == 0 && block.queries <= block.per_head) {
    read_bias(p, block, 0, rows[0]);
    for (int64_t r = 0; r < block.keys; ++r) {
      for_each_vector(s + r * kQueries, kQueries,
                      [&](Vec<Real> x, int64_t) { return x + rows[0][r]; });
    }
    return;
  }
  for (int64_t lane0 = 0; lane0 < block.queries; lane0 += W) {
    for (int64_t lane = 0; lane < W; ++lane) {
      const int64_t known = lane0 + lane < block.queries ? lane0 + lane : block.queries - 1;
      read_bias(p, block, known, rows[lane]);
    }
    for (int64_t r0 = 0; r0 < block.keys; r0 += W) {
      Vec<Real> square[W];
      for (int64_t lane = 0; lane < W; ++lane) square[lane] = load(rows[lane] + r0);
      transpose<Real>(square);
      for (int64_t r = 0; r < W; ++r) {
        Real* to = s + (r0 + r) * kQueries + lane0;
        store(to, load(to) + square[r]);
      }
    }
  }
}

template <typename Real, int64_t kQueries>
void add_alibi(const Problem& p, const Block& block, Real* s) {
  Real slope[kQueries] = {}, distance[kQueries] = {};
  for (int64_t lane = 0; lane < block.queries; ++lane) {
    slope[lane] = static_cast<const Real*>(p.score.alibi_slopes)[block.head(lane)];
    distance[lane] = static_cast<Real>(block.key(0) - block.query(lane) - p.score.alibi_offset);
  }
  for (int64_t r = 0; r < block.keys; ++r) {
    for_each_vector(s + r * kQueries, kQueries, [&](Vec<Real> x, int64_t c) {
      const Vec<Real> d = load(distance + c) + static_cast<Real>(r);
      return x - load(slope + c) * (d < 0 ? -d : d);
    });
  }
}

// Every lane's visible keys as bits, tested one key at a time across the lanes.
template <typename Real, int64_t kQueries>
void hide_by_flags(const Problem& p, const Block& block, Real* s) {
  using Int = IntOf<Real>;
  constexpr int64_t kBits = 8 * sizeof(Int);
  Int words[kBlock / kBits][kQueries] = {};
  for (int64_t lane = 0; lane < block.queries; ++lane) {
    const uint64_t bits =
        visible_keys(p.mask, p.M, p.N, block.b, block.head(lane), block.query(lane), block.j0) >>
        block.first;
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

// The same where each query's visible keys are an interval.
template <typename Real, int64_t kQueries>
void hide_by_intervals(const Problem& p, const Block& block, Real* s) {
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

// What scores are multiplied by to become powers of two. While nothing comes between the product
// and the softmax, the scale waits for it and costs nothing.
TK_INLINE bool scale_waits(const Problem& p) {
  return p.score.softcap == 0 && !p.score.bias.data && !p.score.alibi_slopes && p.score.scale > 0;
}

TK_INLINE double score_to_log2(const Problem& p) {
  constexpr double kLog2E = 1.4426950408889634;
  return scale_waits(p) ? p.score.scale * kLog2E : kLog2E;
}

// s: k q^T on entry, the scores of docs/attention.md on return, but for a scale that waits. `slope`
// (a tile) takes the softcap's derivative and may be null.
template <typename Real, int64_t kQueries>
void finish_scores(const Problem& p, const Block& block, Real* s, Real* slope) {
  if (!scale_waits(p)) {
    const int64_t count = block.keys * kQueries;
    const Real scale = static_cast<Real>(p.score.scale);
    for_each_vector(s, count, [&](Vec<Real> x, int64_t) { return x * scale; });
    if (p.score.softcap != 0) {
      apply_softcap(static_cast<Real>(p.score.softcap), s, slope, count);
    }
    if (p.score.bias.data) add_bias<Real, kQueries>(p, block, s);
    if (p.score.alibi_slopes) add_alibi<Real, kQueries>(p, block, s);
  }
  if (block.visible != Visible::kAll) {
    block.flagged ? hide_by_flags<Real, kQueries>(p, block, s)
                  : hide_by_intervals<Real, kQueries>(p, block, s);
  }
}

// factor (keys x kQueries) = 1 / (1 - p) where a weight is kept, 0 where it is dropped.
template <typename Real, int64_t kQueries>
void dropout_factors(const Problem& p, const Block& block, Real* factor) {
  const uint32_t threshold = keep_threshold(p.dropout.p);
  const Real kept = p.dropout.p < 1 ? static_cast<Real>(1 / (1 - p.dropout.p)) : Real{0};
  uint32_t head[kQueries], query[kQueries];
  for (int64_t lane = 0; lane < kQueries; ++lane) {
    head[lane] = static_cast<uint32_t>(block.head(lane));
    query[lane] = static_cast<uint32_t>(block.query(lane));
  }
  for (int64_t lane0 = 0; lane0 < kQueries; lane0 += kPhiloxLanes) {
    for (int64_t counter = 0; counter < kPhiloxCounters; ++counter) {
      uint32_t x[4][kPhiloxLanes];
      for (int64_t lane = 0; lane < kPhiloxLanes; ++lane) {
        x[0][lane] = static_cast<uint32_t>(block.j0 / kBlock * kPhiloxCounters + counter);
        x[1][lane] = query[lane0 + lane];
        x[2][lane] = head[lane0 + lane];
        x[3][lane] = static_cast<uint32_t>(block.b);
      }
      philox(p.dropout.seed, x);
      for (int64_t word = 0; word < 4; ++word) {
        const int64_t r = word * kPhiloxCounters + counter - block.first;
        if (r < 0 || r >= block.keys) continue;
        Real* to = factor + r * kQueries + lane0;
        for (int64_t lane = 0; lane < kPhiloxLanes; ++lane) {
          to[lane] = x[word][lane] >= threshold ? kept : Real{0};
        }
      }
    }
  }
}

}  // namespace tk::cpu::TK_ISA
