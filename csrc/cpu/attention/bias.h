// Additive bias of a tile of scores. The bias is queries x keys and the tile keys x queries: it is
// transposed in registers, in squares of one vector per row.
#pragma once

#include <algorithm>

#include "cpu/attention/score_tile.h"
#include "cpu/engine/prefetch.h"
#include "cpu/engine/vec_convert.h"

namespace tk::cpu::TK_ISA {

// Offset of the bias of one lane's query and the tile's first key.
TK_INLINE int64_t bias_offset(const Problem& p, const Block& block, int64_t lane) {
  const Strided& bias = p.score.bias;
  return row_offset(bias, block.b, block.head(lane), block.query(lane)) +
         block.key(0) * bias.stride[3];
}

// Reads one row of bias; keys past N get 0.
template <typename Real>
TK_INLINE void read_bias(const Problem& p, const Block& block, int64_t lane, Real* row) {
  const int64_t valid = std::min(p.N - block.key(0), block.keys);
  read_row(p.score.bias_dtype, p.score.bias.data, bias_offset(p, block, lane),
           p.score.bias.stride[3], valid, row);
  for (int64_t c = valid; c < block.keys; ++c) row[c] = 0;
}

// Prefetches the bias of the next tile, one row at a time between computations. The rows are too
// far apart for the hardware prefetcher, and requested all at once they would wait for each other.
// They go to L2: rows whose pitch is a power of two would compete for one set of L1.
struct BiasPrefetch {
  const char* data = nullptr;
  int64_t stride = 0, rows = 0, bytes = 0;

  TK_INLINE_METHOD void prefetch_row(int64_t row) const {
    if (row >= rows) return;
    for (int64_t n = 0; n < bytes; n += kLineBytes) prefetch_to_l2(data + row * stride, n);
  }
};

TK_INLINE BiasPrefetch next_bias(const Problem& p, const Block& block) {
  const Strided& bias = p.score.bias;
  if (!bias.data || bias.stride[2] == 0 || bias.stride[3] != 1) return {};
  const int64_t size = size_of(p.score.bias_dtype);
  const int64_t ahead = block.next_i * bias.stride[2] + block.next_j;
  return {static_cast<const char*>(bias.data) + (bias_offset(p, block, 0) + ahead) * size,
          bias.stride[2] * size, block.queries, block.keys * size};
}

// s = scale s + bias for one vector of queries. bfloat16 is transposed in pairs of keys.
template <typename Stored, typename Real, int64_t kQueries>
TK_INLINE void add_rows(const Stored* const (&rows)[kLanes<Real>], int64_t keys, Real scale,
                        Real* s) {
  constexpr bool kPairs = std::is_same_v<Stored, BFloat16>;
  using Element = std::conditional_t<kPairs, uint32_t, Real>;
  constexpr int64_t W = kLanes<Real>, kKeys = kPairs ? 2 : 1;  // keys per Element
  for (int64_t r0 = 0; r0 < keys; r0 += W * kKeys) {
    Vec<Element> square[W];
#pragma GCC unroll 16
    for (int64_t lane = 0; lane < W; ++lane) {
      if constexpr (kPairs) {
        square[lane] = load(reinterpret_cast<const uint32_t*>(rows[lane] + r0));
      } else {
        Vec<Real> row[1];
        ConvertedRow<Stored>::load(rows[lane] + r0, row);
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

// s = scale s + bias, read in place from rows of Stored.
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
void add_bias_converted(const Problem& p, const Block& block, Real scale, Real* s) {
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

// s = scale s + bias, for a bias of any dtype and strides.
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
  add_bias_converted<Real, kQueries>(p, block, scale, s);
}

}  // namespace tk::cpu::TK_ISA
