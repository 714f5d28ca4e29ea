// The two products of decoding, read in place from the rows of k and v. Vectors run along a row,
// and a row in registers serves several queries. One row is prefetched for each row read:
// arithmetic overlaps with memory only while cache lines keep arriving.
#pragma once

#include "cpu/engine/prefetch.h"
#include "cpu/engine/vec_convert.h"

namespace tk::cpu::TK_ISA {

// Rows of whole vectors, `stride` elements apart. While row r is read, the row `distance` bytes
// ahead is prefetched, or from row `tail` (a multiple of 16) on the one `tail_distance` bytes
// ahead: the next contiguous run. Prefetches may go past the last row.
template <typename Storage>
struct Rows {
  const Storage* data;
  int64_t stride;
  int64_t distance, tail, tail_distance;

  TK_INLINE_METHOD const Storage* row(int64_t r) const { return data + r * stride; }
  TK_INLINE_METHOD Rows from(int64_t r) const {
    return {row(r), stride, distance, tail - r, tail_distance};
  }
  TK_INLINE_METHOD int64_t prefetch_distance(int64_t r) const {
    return r < tail ? distance : tail_distance;
  }
};

// Converts a row to the compute dtype, in the order of ConvertedRow; width is a multiple of kChunk.
template <typename Storage, typename Real>
TK_INLINE void convert_row(const Storage* row, int64_t width, Real* to) {
  constexpr int kParts = ConvertedRow<Storage>::kParts;
  for (int64_t c = 0; c < width; c += kChunk<Storage>, row += kChunk<Storage>) {
    Vec<Real> x[kParts];
    ConvertedRow<Storage>::load(row, x);
    for (int part = 0; part < kParts; ++part) store(to + c + part * kLanes<Real>, x[part]);
  }
}

// Position of element c in the order of ConvertedRow.
template <typename Storage>
TK_INLINE int64_t converted_index(int64_t c) {
  if constexpr (kInOrder<Storage>) return c;
  constexpr int64_t kParts = ConvertedRow<Storage>::kParts, kSize = kChunk<Storage>;
  return c / kSize * kSize + c % kParts * (kSize / kParts) + c % kSize / kParts;
}

// s[n][r] = k[r] . q[n] for kQueries rows of q (kQueries x width); lds is the leading dimension of
// s. keys is a multiple of kLanes, width of kChunk.
template <int kQueries, typename Storage, typename Real>
void multiply_rows(Rows<Storage> k, int64_t keys, const Real* q, int64_t width, Real* s,
                   int64_t lds) {
  constexpr int W = kLanes<Real>, kParts = ConvertedRow<Storage>::kParts;
  constexpr int kKeys = W / kQueries;           // their sums fill a vector
  constexpr int kStep = kKeys < 4 ? kKeys : 4;  // more rows would run out of address registers
  for (int64_t r = 0; r < keys; r += kKeys) {
    Vec<Real> sum[W] = {};
#pragma GCC unroll 4
    for (int m0 = 0; m0 < kKeys; m0 += kStep) {
      const int64_t ahead = k.prefetch_distance(r + m0);
      for (int64_t d = 0; d < width; d += kParts * W) {
#pragma GCC unroll 4
        for (int m = m0; m < m0 + kStep; ++m) {
          const Storage* from = k.row(r + m) + d;
          Vec<Real> key[kParts];
          prefetch_to_l2(from, ahead);
          ConvertedRow<Storage>::load(from, key);
#pragma GCC unroll 4
          for (int n = 0; n < kQueries; ++n) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
              sum[n * kKeys + m] += key[part] * load(q + n * width + d + part * W);
            }
          }
        }
      }
    }
    const Vec<Real> totals = row_sums<Real>(sum);
#pragma GCC unroll 4
    for (int n = 0; n < kQueries; ++n) {
      __builtin_memcpy(s + n * lds + r, reinterpret_cast<const Real*>(&totals) + n * kKeys,
                       kKeys * sizeof(Real));
    }
  }
}

// o[n] += sum over r of weights[n][r] v[r], in strips of kChunks chunks of columns. All rows are on
// one side of `tail`: a test per row would cost a tenth of the loop.
template <int kQueries, int kChunks, typename Storage, typename Real>
TK_INLINE void add_columns(Rows<Storage> v, int64_t keys, const Real* weights, int64_t ldw, Real* o,
                           int64_t ldo, int64_t width) {
  constexpr int W = kLanes<Real>, kParts = ConvertedRow<Storage>::kParts;
  constexpr int64_t kColumns = kChunks * kChunk<Storage>;
  const int64_t ahead = v.prefetch_distance(0);
  for (; width >= kColumns; width -= kColumns, v.data += kColumns, o += kColumns) {
    Vec<Real> sum[kQueries][kChunks][kParts] = {};
    for (int64_t r = 0; r < keys; ++r) {
      Vec<Real> value[kChunks][kParts];
#pragma GCC unroll 8
      for (int c = 0; c < kChunks; ++c) {
        const Storage* from = v.row(r) + c * kChunk<Storage>;
        prefetch_to_l2(from, ahead);
        ConvertedRow<Storage>::load(from, value[c]);
      }
#pragma GCC unroll 4
      for (int n = 0; n < kQueries; ++n) {
        const Vec<Real> weight = broadcast(weights[n * ldw + r]);
#pragma GCC unroll 8
        for (int c = 0; c < kChunks; ++c) {
#pragma GCC unroll 2
          for (int part = 0; part < kParts; ++part) sum[n][c][part] += weight * value[c][part];
        }
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < kQueries; ++n) {
#pragma GCC unroll 8
      for (int c = 0; c < kChunks * kParts; ++c) {
        Real* to = o + n * ldo + c * W;
        store(to, load(to) + sum[n][c / kParts][c % kParts]);
      }
    }
  }
  if constexpr (kChunks > 1) {
    if (width > 0) add_columns<kQueries, kChunks / 2>(v, keys, weights, ldw, o, ldo, width);
  }
}

// out[r] = sum over n of weights[n][r] rows[n] for `keys` keys, or added to out; leading dimensions
// ldw, and `width` (a multiple of kLanes) of rows and out.
template <int kQueries, typename Real>
void multiply_outer(const Real* weights, int64_t ldw, const Real* rows, int64_t width, int64_t keys,
                    bool adds, Real* out) {
  constexpr int W = kLanes<Real>, kSums = kVectorBytes == 64 ? 16 : 8;
  constexpr int kVectors = kSums / kQueries < 8 ? kSums / kQueries : 8;
  const auto strip = [&](int64_t c, auto vectors) {
    Vec<Real> row[kQueries][vectors()];
    for (int n = 0; n < kQueries; ++n) {
      for (int m = 0; m < vectors(); ++m) row[n][m] = load(rows + n * width + c + m * W);
    }
    for (int64_t r = 0; r < keys; ++r) {
      Real* const to = out + r * width + c;
      for (int m = 0; m < vectors(); ++m) {
        Vec<Real> sum = adds ? load(to + m * W) : Vec<Real>{};
        for (int n = 0; n < kQueries; ++n) sum += weights[n * ldw + r] * row[n][m];
        store(to + m * W, sum);
      }
    }
  };
  int64_t c = 0;
  for (; c + kVectors * W <= width; c += kVectors * W) {
    strip(c, std::integral_constant<int, kVectors>());
  }
  for (; c < width; c += W) strip(c, std::integral_constant<int, 1>());
}

// o (kQueries x width) += weights v, with leading dimensions ldw and ldo. keys is a multiple of
// kRows, few enough for v to be in L1 when the next columns are read.
template <int kQueries, typename Storage, typename Real>
void add_rows(Rows<Storage> v, int64_t keys, const Real* weights, int64_t ldw, Real* o, int64_t ldo,
              int64_t width) {
  constexpr int64_t kRows = 16;
  constexpr int kSums = kVectorBytes == 64 ? 16 : 8;  // half of the registers
  constexpr int kVectors = kSums / kQueries < 8 ? kSums / kQueries : 8;
  constexpr int kChunks = kVectors / ConvertedRow<Storage>::kParts;
  for (int64_t r = 0; r < keys; r += kRows) {
    add_columns<kQueries, kChunks>(v.from(r), kRows, weights + r, ldw, o, ldo, width);
  }
}

}  // namespace tk::cpu::TK_ISA
