// Rows of results that lie transposed: o and dq are summed as columns, a query in each lane.
#pragma once

#include "convert.h"
#include "vec.h"

namespace tk::cpu::TK_ISA {

// In the upper halves; rounds as from_real does.
TK_INLINE Vec<uint32_t> to_bfloat16(Vec<float> x) {
  const auto bits = reinterpret_cast<Vec<uint32_t>>(x);
  const Vec<uint32_t> rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded;
}

// Columns c .. c + 2 kLanes - 1 of kLanes rows, by pairs of neighbours; `from` is their first
// column, and columns are `ld` apart.
TK_INLINE void turn_to_bfloat16(const float* from, int64_t ld, Vec<float> scale,
                                Vec<uint32_t> (&rows)[kLanes<float>]) {
  for (int64_t n = 0; n < kLanes<float>; ++n, from += 2 * ld) {
    const Vec<uint32_t> even = to_bfloat16(load(from) * scale);
    const Vec<uint32_t> odd = to_bfloat16(load(from + ld) * scale);
    rows[n] = (even >> 16) | (odd & 0xffff0000u);
  }
  transpose<uint32_t>(rows);
}

// Rows first .. first + count - 1 of one (b, h) slice of a result.
struct Target {
  DType dtype;
  Strided to;
  int64_t b, h, first, count, width;
};

template <int64_t kRows>
void write_turned_bfloat16(const Target& rows, const float* from, const float* scale) {
  constexpr int64_t W = kLanes<float>;
  for (int64_t r0 = 0; r0 < rows.count; r0 += W) {
    const int64_t count = rows.count - r0 < W ? rows.count - r0 : W;
    BFloat16* to =
        static_cast<BFloat16*>(rows.to.data) + row_offset(rows.to, rows.b, rows.h, rows.first + r0);
    for (int64_t c = 0; c < rows.width; c += 2 * W) {
      Vec<uint32_t> turned[W];
      turn_to_bfloat16(from + c * kRows + r0, kRows, load(scale + r0), turned);
      const int64_t left = rows.width - c;
      for (int64_t r = 0; r < count; ++r) {
        BFloat16* row = to + r * rows.to.stride[2] + c;
        if (left >= 2 * W) {
          __builtin_memcpy(row, &turned[r], kVectorBytes);
        } else {
          __builtin_memcpy(row, &turned[r], static_cast<size_t>(left) * sizeof(BFloat16));
        }
      }
    }
  }
}

// Writes the rows of `from` (padded x kRows: a row in each lane), times scale[row].
template <int64_t kRows, typename Real>
void write_turned(const Target& rows, const Real* from, int64_t padded, const Real* scale,
                  Real* scratch) {
  constexpr int64_t W = kLanes<Real>;
  if constexpr (sizeof(Real) == 4) {
    if (rows.dtype == DType::kBFloat16 && rows.to.stride[3] == 1 && padded % (2 * W) == 0) {
      return write_turned_bfloat16<kRows>(rows, from, scale);
    }
  }
  for (int64_t r = 0; r < rows.count; r += W) {
    for (int64_t c = 0; c < padded; c += W) {
      Vec<Real> square[W];
      for (int64_t n = 0; n < W; ++n) {
        square[n] = load(from + (c + n) * kRows + r) * load(scale + r);
      }
      transpose<Real>(square);
      for (int64_t n = 0; n < W; ++n) store(scratch + n * padded + c, square[n]);
    }
    for (int64_t n = 0; n < W && r + n < rows.count; ++n) {
      write_row(scratch + n * padded, rows.width, rows.dtype, rows.to.data,
                row_offset(rows.to, rows.b, rows.h, rows.first + r + n), rows.to.stride[3]);
    }
  }
}

}  // namespace tk::cpu::TK_ISA
