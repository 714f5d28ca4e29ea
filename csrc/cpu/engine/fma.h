// FMA engine: multiplies with vector multiply-adds, in float or double.
#pragma once

#include "cpu/engine/operand.h"
#include "cpu/engine/vec_math.h"

namespace tk::cpu::TK_ISA {

// Register blocking: kStripRows x kStripVectors accumulators, one row of b, one element of a.
#if defined(__AVX512F__)
constexpr int kStripRows = 6, kStripVectors = 4;  // 24 + 4 + 1 of 32 registers
#elif defined(__AVX2__)
constexpr int kStripRows = 6, kStripVectors = 2;  // 12 + 2 + 1 of 16
#else
constexpr int kStripRows = 4, kStripVectors = 2;  // 8 + 2 + 1 of 16
#endif

// Read element by element, so that either dimension may be contiguous.
template <typename Real>
struct FmaLeft {
  const Real* data;
  int64_t row_stride;
  int64_t depth_stride;
};

template <typename Real>
struct FmaRight {
  const Real* data;
  int64_t ld;
};

template <typename Real, int kRows, int kVectors>
__attribute__((noinline)) void multiply_strip(FmaLeft<Real> a, const Real* b, int64_t ldb, Real* c,
                                              int64_t ldc, int64_t depth, WriteMode mode) {
  constexpr int W = kLanes<Real>;
  Vec<Real> sum[kRows][kVectors] = {};
  for (int64_t d = 0; d < depth; ++d) {
    Vec<Real> right[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) right[n] = load(b + d * ldb + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<Real> left = broadcast(a.data[r * a.row_stride + d * a.depth_stride]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) sum[r][n] += left * right[n];
    }
  }
  // Adding to c last keeps addition chains short: errors grow with depth plus the number of tiles,
  // not with their product.
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      Real* to = c + r * ldc + n * W;
      store(to, mode == WriteMode::kAccumulate ? load(to) + sum[r][n] : sum[r][n]);
    }
  }
}

template <typename Real, int kVectors, int kRows = kStripRows>
TK_INLINE void multiply_rows(int64_t rows, FmaLeft<Real> a, const Real* b, int64_t ldb, Real* c,
                             int64_t ldc, int64_t depth, WriteMode mode) {
  for (; rows >= kRows; rows -= kRows, a.data += kRows * a.row_stride, c += kRows * ldc) {
    multiply_strip<Real, kRows, kVectors>(a, b, ldb, c, ldc, depth, mode);
  }
  if constexpr (kRows > 1) {
    if (rows > 0) {
      multiply_rows<Real, kVectors, kRows - 1>(rows, a, b, ldb, c, ldc, depth, mode);
    }
  }
}

template <typename Real, int kVectors = kStripVectors>
TK_INLINE void multiply_columns(int64_t rows, int64_t columns, FmaLeft<Real> a, const Real* b,
                                int64_t ldb, Real* c, int64_t ldc, int64_t depth, WriteMode mode) {
  constexpr int64_t kColumns = kVectors * kLanes<Real>;
  for (; columns >= kColumns; columns -= kColumns, b += kColumns, c += kColumns) {
    multiply_rows<Real, kVectors>(rows, a, b, ldb, c, ldc, depth, mode);
  }
  if constexpr (kVectors > 1) {
    if (columns > 0) {
      multiply_columns<Real, kVectors - 1>(rows, columns, a, b, ldb, c, ldc, depth, mode);
    }
  }
}

// kForwardQueries: queries per block of the forward pass.
template <typename Number, int64_t kForwardQueries = 64>
struct Fma {
  using Real = Number;
  using Left = FmaLeft<Real>;
  using Right = FmaRight<Real>;
  using Product = Term<Left, Right>;
  static constexpr const char* kName = "fma";
  static constexpr int64_t kQueries = kForwardQueries;
  static constexpr int64_t kGroup = 8;   // query blocks that share a chunk of keys
  static constexpr int kPending = 1;     // products per update of o
  static constexpr int64_t kPass = 64;   // queries whose scores the backward pass holds
  static constexpr int64_t kSquare = 1;  // blocks per side that share an update of dq, dk, dv
  // The backward pass computes a whole number of units of queries, and sums over a number of them
  // that is a multiple of kDepthUnit.
  static constexpr int64_t kQueryUnit = 2 * kLanes<Real>, kDepthUnit = 1;
  static constexpr int64_t kWidth = kLanes<Real>;
  static constexpr bool kStreamsLeft = false;  // no non-temporal loads of left operands
  static constexpr Precision kPrecision = Precision::kReal;
  static constexpr bool kSplits = false;
  static constexpr int64_t kElementBytes = sizeof(Real);

  struct Session {};  // no setup

  // Rows serve as left operands, transposed or not, and as right ones; only kRightT needs a copy.
  static PanelLayout layout(unsigned uses, int64_t rows, int64_t width) {
    const int64_t padded = round_up(width, kWidth);
    const size_t size = static_cast<size_t>(rows * padded) * sizeof(Real);
    const size_t right_t = uses & (kLeft | kLeftT | kRight) ? size : 0;
    return {uses, rows, padded, 0, 0, 0, right_t, uses & kRightT ? right_t + size : right_t};
  }

  // Rows are unpacked into the panel, of which they are part, unless it holds only the transposed
  // copy.
  using Stored = Real;
  static constexpr bool kReadsInPlace = false;
  static Real* unpack_to(const PanelLayout& panel, char* to, Real* scratch) {
    return panel.right_t == 0 && panel.uses & kRightT ? scratch : reinterpret_cast<Real*>(to);
  }

  static void pack(const PanelLayout& panel, const PanelRows<Real>& rows, char* to) {
    pack(panel, rows.data, rows.stride, to);  // they are not read in place
  }
  static void pack(const PanelLayout& panel, const Real* rows, int64_t stride, char* to) {
    if (!(panel.uses & kRightT)) return;
    Real* columns = reinterpret_cast<Real*>(to + panel.right_t);
    for (int64_t r = 0; r < panel.rows; r += kWidth) {
      for (int64_t c = 0; c < panel.width; c += kWidth) {
        Vec<Real> square[kWidth];
        for (int64_t n = 0; n < kWidth; ++n) square[n] = load(rows + (r + n) * stride + c);
        transpose<Real>(square);
        for (int64_t n = 0; n < kWidth; ++n) store(columns + (c + n) * panel.rows + r, square[n]);
      }
    }
  }

  // The panel from row `row` on.
  static Left left(const PanelLayout& panel, const char* from, int64_t row) {
    return {reinterpret_cast<const Real*>(from) + row * panel.width, panel.width, 1};
  }
  static Left left_t(const PanelLayout& panel, const char* from, int64_t row) {
    return {reinterpret_cast<const Real*>(from) + row * panel.width, 1, panel.width};
  }
  static Right right(const PanelLayout& panel, const char* from) {
    return {reinterpret_cast<const Real*>(from), panel.width};
  }
  // Columns are the rows of the panel from `row` on.
  static Right right_t(const PanelLayout& panel, const char* from, int64_t row) {
    return {reinterpret_cast<const Real*>(from + panel.right_t) + row, panel.rows};
  }

  // The operand from `depth` on.
  static Right from_depth(Right b, int64_t depth) { return {b.data + depth * b.ld, b.ld}; }

  // Operand tile between two products: overwrites the scores in place.
  template <unsigned kUses, int64_t kRows, int64_t kColumns>
  struct Tile {
    static constexpr bool kOverwrites = true;
    static constexpr size_t kBytes = 0;
    Real* values;

    Tile(Real* over, char*) : values(over) {}

    // x[m][n]: row `row` + 16 m, the n-th vector from `column` on; row % 32 < 16.
    TK_INLINE_METHOD void put(int64_t row, int64_t column, const Vec<Real> (&x)[2][2]) const {
      for (int m = 0; m < 2; ++m) {
        for (int n = 0; n < 2; ++n) {
          store(values + (row + 16 * m) * kColumns + column + n * kLanes<Real>, x[m][n]);
        }
      }
    }
    Left left() const { return {values, kColumns, 1}; }
    Right right() const { return {values, kColumns}; }
  };

  // c (rows x columns, leading dimension ldc) = or += the sum of the terms. columns is a multiple
  // of kWidth.
  template <Accuracy>
  static void multiply(int64_t rows, int64_t columns, const Product* terms, int count, Real* c,
                       int64_t ldc, WriteMode mode, LoadPolicy = LoadPolicy::kCached) {
    for (int n = 0; n < count; ++n, mode = WriteMode::kAccumulate) {
      multiply_columns<Real>(rows, columns, terms[n].a, terms[n].b.data, terms[n].b.ld, c, ldc,
                             terms[n].depth, mode);
    }
  }
};

}  // namespace tk::cpu::TK_ISA
