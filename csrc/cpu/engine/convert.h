// Conversion of rows between storage dtypes and the compute dtype. Branch-free, so that loops
// vectorize. Rounds to nearest even; keeps subnormals and NaN.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <type_traits>

#include "common/macros.h"
#include "common/params.h"

namespace tk::cpu::TK_ISA {

// The kernels of avx512_bf16 are compiled for bfloat16 only.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool kOnlyBFloat16 = true;
#else
constexpr bool kOnlyBFloat16 = false;
#endif

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename Stored>
constexpr DType kDTypeOf = std::is_same_v<Stored, Float16>    ? DType::kFloat16
                           : std::is_same_v<Stored, BFloat16> ? DType::kBFloat16
                           : std::is_same_v<Stored, float>    ? DType::kFloat32
                                                              : DType::kFloat64;

TK_INLINE int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

template <typename To, typename From>
TK_INLINE To bit_cast(From x) {
  To y;
  static_assert(sizeof(x) == sizeof(y));
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}

TK_INLINE float to_real(float x) { return x; }
TK_INLINE double to_real(double x) { return x; }
TK_INLINE float to_real(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }
TK_INLINE float to_real(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, magnitude = x.bits & 0x7fffu;
  // The exponent bias grows by 112; infinity and NaN get 112 more, which keeps all exponent bits
  // set.
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = magnitude >= 0x7c00u ? normal + (112u << 23) : normal;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t bits = magnitude < 0x0400u ? bit_cast<uint32_t>(subnormal) : special;
  return bit_cast<float>(bits | sign);
}

TK_INLINE void from_real(double x, float& y) { y = static_cast<float>(x); }
TK_INLINE void from_real(double x, double& y) { y = x; }
TK_INLINE void from_real(double x, BFloat16& y) {
  const uint32_t bits = bit_cast<uint32_t>(static_cast<float>(x));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  y.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}
TK_INLINE void from_real(double x, Float16& y) {
  const uint32_t bits = bit_cast<uint32_t>(static_cast<float>(x));
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves the rounded bits of a subnormal at the low end of the sum.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  y.bits = static_cast<uint16_t>(half | sign);
}

// Eight float16 at a time; F16C instructions give the same results as the scalar code.
constexpr int64_t kHalves = 8;

TK_INLINE void read_halves(const Float16* from, float* to) {
#if defined(__F16C__)
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  for (int64_t c = 0; c < kHalves; ++c) to[c] = to_real(from[c]);
#endif
}

TK_INLINE void write_halves(const float* from, Float16* to) {
#if defined(__F16C__)
  const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
#else
  for (int64_t c = 0; c < kHalves; ++c) from_real(from[c], to[c]);
#endif
}

template <typename Storage, typename Real>
TK_INLINE void read_as(const Storage* from, int64_t stride, int64_t count, Real* to) {
  if (stride == 1) {
    int64_t c = 0;
    if constexpr (std::is_same_v<Storage, Float16> && sizeof(Real) == 4) {
      for (; c + kHalves <= count; c += kHalves) read_halves(from + c, to + c);
    }
    for (; c < count; ++c) to[c] = static_cast<Real>(to_real(from[c]));
  } else {
    for (int64_t c = 0; c < count; ++c) to[c] = static_cast<Real>(to_real(from[c * stride]));
  }
}

template <typename Storage, typename Real>
TK_INLINE void write_as(const Real* from, int64_t count, Real factor, Storage* to, int64_t stride) {
  if (stride == 1) {
    int64_t c = 0;
    if constexpr (std::is_same_v<Storage, Float16> && sizeof(Real) == 4) {
      for (; c + kHalves <= count; c += kHalves) {
        Real scaled[kHalves];
        for (int64_t n = 0; n < kHalves; ++n) scaled[n] = from[c + n] * factor;
        write_halves(scaled, to + c);
      }
    }
    for (; c < count; ++c) from_real(from[c] * factor, to[c]);
  } else {
    for (int64_t c = 0; c < count; ++c) from_real(from[c] * factor, to[c * stride]);
  }
}

// Reads `count` elements from element `offset` of an array of the given dtype.
template <typename Real>
void read_row(DType dtype, const void* base, int64_t offset, int64_t stride, int64_t count,
              Real* to) {
  switch (dtype) {
    case DType::kFloat16:
      return read_as(static_cast<const Float16*>(base) + offset, stride, count, to);
    case DType::kBFloat16:
      return read_as(static_cast<const BFloat16*>(base) + offset, stride, count, to);
    case DType::kFloat32:
      return read_as(static_cast<const float*>(base) + offset, stride, count, to);
    case DType::kFloat64:
      return read_as(static_cast<const double*>(base) + offset, stride, count, to);
  }
}

// Writes `count` elements times `factor`.
template <typename Real>
void write_row(const Real* from, int64_t count, Real factor, DType dtype, void* base,
               int64_t offset, int64_t stride) {
  switch (dtype) {
    case DType::kFloat16:
      return write_as(from, count, factor, static_cast<Float16*>(base) + offset, stride);
    case DType::kBFloat16:
      return write_as(from, count, factor, static_cast<BFloat16*>(base) + offset, stride);
    case DType::kFloat32:
      return write_as(from, count, factor, static_cast<float*>(base) + offset, stride);
    case DType::kFloat64:
      return write_as(from, count, factor, static_cast<double*>(base) + offset, stride);
  }
}

TK_INLINE int64_t row_offset(const Strided& x, int64_t b, int64_t h, int64_t i) {
  return b * x.stride[0] + h * x.stride[1] + i * x.stride[2];
}

}  // namespace tk::cpu::TK_ISA
