// The product of small tiles that all of attention consists of. A tuned micro-kernel slots in here.
#pragma once

#include "vec.h"

namespace tk::cpu::TK_ISA {

// Accumulators fill the register file: kStripRows x kStripVectors of them, one row of b, one of a.
#if defined(__AVX512F__)
constexpr int kStripRows = 6, kStripVectors = 4;  // 24 + 4 + 1 of 32 registers
#elif defined(__AVX2__)
constexpr int kStripRows = 6, kStripVectors = 2;  // 12 + 2 + 1 of 16
#else
constexpr int kStripRows = 4, kStripVectors = 2;  // 8 + 2 + 1 of 16
#endif

// An operand read one element at a time, so that it may just as well be transposed.
template <typename Real>
struct Left {
  const Real* data;
  int64_t row_stride;
  int64_t depth_stride;
};

enum class Into : uint8_t { kFresh, kSum };

template <typename Real, int kRows, int kVectors>
__attribute__((noinline)) void multiply_strip(Left<Real> a, const Real* b, int64_t ldb, Real* c,
                                              int64_t ldc, int64_t depth, Into into) {
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
  // Adding to c last keeps chains of additions short: errors grow with depth and with the number of
  // tiles, not with their product.
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      Real* to = c + r * ldc + n * W;
      store(to, into == Into::kSum ? load(to) + sum[r][n] : sum[r][n]);
    }
  }
}

template <typename Real, int kVectors, int kRows = kStripRows>
TK_INLINE void multiply_rows(int64_t rows, Left<Real> a, const Real* b, int64_t ldb, Real* c,
                             int64_t ldc, int64_t depth, Into into) {
  for (; rows >= kRows; rows -= kRows, a.data += kRows * a.row_stride, c += kRows * ldc) {
    multiply_strip<Real, kRows, kVectors>(a, b, ldb, c, ldc, depth, into);
  }
  if constexpr (kRows > 1) {
    if (rows > 0) {
      multiply_rows<Real, kVectors, kRows - 1>(rows, a, b, ldb, c, ldc, depth, into);
    }
  }
}

template <typename Real, int kVectors = kStripVectors>
TK_INLINE void multiply_columns(int64_t rows, int64_t columns, Left<Real> a, const Real* b,
                                int64_t ldb, Real* c, int64_t ldc, int64_t depth, Into into) {
  constexpr int64_t kColumns = kVectors * kLanes<Real>;
  for (; columns >= kColumns; columns -= kColumns, b += kColumns, c += kColumns) {
    multiply_rows<Real, kVectors>(rows, a, b, ldb, c, ldc, depth, into);
  }
  if constexpr (kVectors > 1) {
    if (columns > 0) {
      multiply_columns<Real, kVectors - 1>(rows, columns, a, b, ldb, c, ldc, depth, into);
    }
  }
}

// c (rows x columns, leading dimension ldc) = or += a (rows x depth) b (depth x columns, ldb).
// columns is a multiple of the vector's lanes.
template <typename Real>
void multiply(int64_t rows, int64_t columns, int64_t depth, Left<Real> a, const Real* b,
              int64_t ldb, Real* c, int64_t ldc, Into into) {
  multiply_columns<Real>(rows, columns, a, b, ldb, c, ldc, depth, into);
}

}  // namespace tk::cpu::TK_ISA
