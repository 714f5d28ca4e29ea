// Stores accumulators that hold queries in lanes (o, dq, ds) as row-major output.
#pragma once

#include "cpu/engine/convert.h"
#include "cpu/engine/vec.h"

namespace tk::cpu::TK_ISA {

// kCached: the output is read again soon. kStreamed: non-temporal stores, for outputs larger than
// the cache.
enum class StorePolicy : uint8_t { kCached, kStreamed };

// Output rows first .. first + count - 1 of one (b, h), `width` columns from `column` on.
struct Target {
  DType dtype;
  Strided to;
  int64_t b, h, first, count, width, column = 0;
  StorePolicy policy = StorePolicy::kCached;

  int64_t offset(int64_t row) const {
    return row_offset(to, b, h, first + row) + column * to.stride[3];
  }
};

// bfloat16 in the upper 16 bits; rounds as from_real does.
TK_INLINE Vec<uint32_t> to_bfloat16(Vec<float> x) {
  const auto bits = reinterpret_cast<Vec<uint32_t>>(x);
  const Vec<uint32_t> rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return x != x ? bits | 0x400000u : rounded;
}

#if defined(__F16C__)
constexpr bool kHasFloat16 = true;

// float16 in the lower 16 bits.
TK_INLINE Vec<uint32_t> to_float16(Vec<float> x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
#if defined(__AVX512F__)
  return reinterpret_cast<Vec<uint32_t>>(_mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, kNearest)));
#else
  return reinterpret_cast<Vec<uint32_t>>(_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, kNearest)));
#endif
}
#else
constexpr bool kHasFloat16 = false;
TK_INLINE Vec<uint32_t> to_float16(Vec<float>) { return Vec<uint32_t>{}; }
#endif

// Element type of the transpose: 16-bit outputs are transposed as pairs of neighbouring columns.
template <typename Stored, typename Real>
using TransposeElement = std::conditional_t<std::is_same_v<Stored, Real>, Real, uint32_t>;

// Scales, converts and transposes kLanes rows, as many columns as fill one vector of Stored. `from`
// is the first column; columns are `ld` apart.
template <typename Stored, typename Real>
TK_INLINE void transpose_columns(const Real* from, int64_t ld, Vec<Real> scale,
                                 Vec<TransposeElement<Stored, Real>> (&rows)[kLanes<Real>]) {
  for (int64_t n = 0; n < kLanes<Real>; ++n) {
    if constexpr (std::is_same_v<Stored, Real>) {
      rows[n] = load(from + n * ld) * scale;
    } else {
      const Vec<Real> even = load(from + 2 * n * ld) * scale;
      const Vec<Real> odd = load(from + (2 * n + 1) * ld) * scale;
      rows[n] = std::is_same_v<Stored, BFloat16>
                    ? (to_bfloat16(even) >> 16) | (to_bfloat16(odd) & 0xffff0000u)
                    : to_float16(even) | (to_float16(odd) << 16);
    }
  }
  transpose<TransposeElement<Stored, Real>>(rows);
}

// True if a vector at `to` may be stored non-temporally.
template <typename Stored>
TK_INLINE bool is_aligned(const Stored* to) {
  return reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0;
}

template <int64_t kRows, typename Stored, typename Real>
void write_transposed_as(const Target& rows, const Real* from, const Real* scale) {
  constexpr int64_t W = kLanes<Real>, kColumns = kVectorBytes / sizeof(Stored);
  for (int64_t r0 = 0; r0 < rows.count; r0 += W) {
    const int64_t count = rows.count - r0 < W ? rows.count - r0 : W;
    Stored* to = static_cast<Stored*>(rows.to.data) + rows.offset(r0);
    for (int64_t c = 0; c < rows.width; c += kColumns) {
      Vec<TransposeElement<Stored, Real>> transposed[W];
      transpose_columns<Stored>(from + c * kRows + r0, kRows, load(scale + r0), transposed);
      const int64_t left = rows.width - c;
      for (int64_t r = 0; r < count; ++r) {
        Stored* row = to + r * rows.to.stride[2] + c;
        if (left < kColumns) {
          __builtin_memcpy(row, &transposed[r], static_cast<size_t>(left) * sizeof(Stored));
        } else if (rows.policy == StorePolicy::kStreamed && is_aligned(row)) {
          stream<TransposeElement<Stored, Real>>(row, transposed[r]);
        } else {
          __builtin_memcpy(row, &transposed[r], kVectorBytes);
        }
      }
    }
  }
}

// Writes `from` (padded x kRows, a row in each lane) times scale[row] to the output rows.
template <int64_t kRows, typename Real>
void write_transposed(const Target& rows, const Real* from, int64_t padded, const Real* scale,
                      Real* scratch) {
  constexpr int64_t W = kLanes<Real>;
  if (rows.to.stride[3] == 1) {
    if (rows.dtype == kDTypeOf<Real>) return write_transposed_as<kRows, Real>(rows, from, scale);
    if constexpr (sizeof(Real) == 4) {
      const bool pairs = padded % (2 * W) == 0;
      if (pairs && rows.dtype == DType::kBFloat16) {
        return write_transposed_as<kRows, BFloat16>(rows, from, scale);
      }
      if (pairs && rows.dtype == DType::kFloat16 && kHasFloat16) {
        return write_transposed_as<kRows, Float16>(rows, from, scale);
      }
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
      write_row(scratch + n * padded, rows.width, Real{1}, rows.dtype, rows.to.data,
                rows.offset(r + n), rows.to.stride[3]);
    }
  }
}

}  // namespace tk::cpu::TK_ISA
