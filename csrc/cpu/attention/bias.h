// The bias of a tile of scores. Its rows are queries and the tile's are keys: it is transposed on
// the way, a square of as many rows as a vector has lanes at a time.
#pragma once

#include <algorithm>

#include "cpu/attention/score_tile.h"
#include "cpu/engine/vec_convert.h"

namespace tk::cpu::TK_ISA {

// The bias's columns for the tile's keys, for one lane's query.
TK_INLINE int64_t bias_offset(const Problem& p, const Block& block, int64_t lane) {
  const Strided& bias = p.score.bias;
  return row_offset(bias, block.b, block.head(lane), block.query(lane)) +
         block.key(0) * bias.stride[3];
}

// Keys behind the last one have a bias of 0.
template <typename Real>
TK_INLINE void read_bias(const Problem& p, const Block& block, int64_t lane, Real* row) {
  const int64_t known = std::min(p.N - block.key(0), block.keys);
  read_row(p.score.bias_dtype, p.score.bias.data, bias_offset(p, block, lane),
           p.score.bias.stride[3], known, row);
  for (int64_t c = known; c < block.keys; ++c) row[c] = 0;
}

// The rows of bias of the tile that is likely to follow. They lie far apart, which no processor
// foresees, and are prefetched one by one while others are computed with: all at once they would
// wait for each other. They go to the second-level cache: rows of a power of two bytes would all
// want one set of the first level.
struct BiasAhead {
  const char* data = nullptr;
  int64_t stride = 0, rows = 0, bytes = 0;

  TK_INLINE_METHOD void fetch(int64_t row) const {
    if (row >= rows) return;
    for (int64_t n = 0; n < bytes; n += 64) __builtin_prefetch(data + row * stride + n, 0, 2);
  }
};

TK_INLINE BiasAhead bias_ahead(const Problem& p, const Block& block) {
  const Strided& bias = p.score.bias;
  if (!bias.data || bias.stride[2] == 0 || bias.stride[3] != 1) return {};
  const int64_t size = size_of(p.score.bias_dtype);
  const int64_t ahead = block.next_i * bias.stride[2] + block.next_j;
  return {static_cast<const char*>(bias.data) + (bias_offset(p, block, 0) + ahead) * size,
          bias.stride[2] * size, block.queries, block.keys * size};
}

// s = scale s + bias for the queries of one vector of lanes. Pairs of bfloat16 are transposed as
// one.
template <typename Stored, typename Real, int64_t kQueries>
TK_INLINE void add_rows(const Stored* const (&rows)[kLanes<Real>], int64_t keys, Real scale,
                        Real* s) {
  constexpr bool kPairs = std::is_same_v<Stored, BFloat16>;
  using Element = std::conditional_t<kPairs, uint32_t, Real>;
  constexpr int64_t W = kLanes<Real>, kKeys = kPairs ? 2 : 1;  // keys of an Element
  for (int64_t r0 = 0; r0 < keys; r0 += W * kKeys) {
    Vec<Element> square[W];
#pragma GCC unroll 16
    for (int64_t lane = 0; lane < W; ++lane) {
      if constexpr (kPairs) {
        square[lane] = load(reinterpret_cast<const uint32_t*>(rows[lane] + r0));
      } else {
        Vec<Real> row[1];
        Wide<Stored>::load(rows[lane] + r0, row);
        square[lane] = row[0];
      }
    }
    transpose<Element>(square);
#pragma GCC unroll 16
    for (int64_t n = 0; n < W; ++n) {
      Real* to = s + (r0 + n * kKeys) * kQueries;
      if constexpr (kPairs) {
        const auto even = reinterpret_cast<Vec<Real>>(square[n] << 16);
        const auto odd = reinterpret_cast<Vec<Real>>(square[n] & 0xffff0000u);
        store(to, load(to) * scale + even);
        store(to + kQueries, load(to + kQueries) * scale + odd);
      } else {
        store(to, load(to) * scale + square[n]);
      }
    }
  }
}

// The same, from rows of Stored where they lie.
template <typename Stored, typename Real, int64_t kQueries>
void add_bias_in_place(const Problem& p, const Block& block, Real scale, Real* s) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t lane0 = 0; lane0 < block.queries; lane0 += W) {
    const Stored* rows[W];
    for (int64_t n = 0; n < W; ++n) {
      rows[n] = static_cast<const Stored*>(p.score.bias.data) +
                bias_offset(p, block, std::min(lane0 + n, block.queries - 1));
    }
    add_rows<Stored, Real, kQueries>(rows, block.keys, scale, s + lane0);
  }
}

template <typename Real, int64_t kQueries>
void add_bias_of_any_kind(const Problem& p, const Block& block, Real scale, Real* s) {
  constexpr int64_t W = kLanes<Real>;
  for (int64_t lane0 = 0; lane0 < block.queries; lane0 += W) {
    Real copies[W][kBlock];
    const Real* rows[W];
    for (int64_t n = 0; n < W; ++n) {
      read_bias(p, block, std::min(lane0 + n, block.queries - 1), copies[n]);
      rows[n] = copies[n];
    }
    add_rows<Real, Real, kQueries>(rows, block.keys, scale, s + lane0);
  }
}

// s = scale s + bias.
template <typename Real, int64_t kQueries>
void add_bias(const Problem& p, const Block& block, Real scale, Real* s) {
  const Strided& bias = p.score.bias;
  const DType dtype = p.score.bias_dtype;
  if (bias.stride[2] == 0 && block.queries <= block.per_head) {
    Real row[kBlock];
    read_bias(p, block, 0, row);
    for (int64_t r = 0; r < block.keys; ++r) {
      for_each_vector(s + r * kQueries, kQueries,
                      [&](Vec<Real> x, int64_t) { return x * scale + row[r]; });
    }
    return;
  }
  const bool in_place = bias.stride[3] == 1 && block.key(block.keys) <= p.N;
  if constexpr (sizeof(Real) == 4) {
    if (in_place && dtype == DType::kBFloat16) {
      return add_bias_in_place<BFloat16, Real, kQueries>(p, block, scale, s);
    }
    if (in_place && dtype == DType::kFloat16) {
      return add_bias_in_place<Float16, Real, kQueries>(p, block, scale, s);
    }
  }
  if (in_place && dtype == kDTypeOf<Real>) {
    return add_bias_in_place<Real, Real, kQueries>(p, block, scale, s);
  }
  add_bias_of_any_kind<Real, kQueries>(p, block, scale, s);
}

}  // namespace tk::cpu::TK_ISA
