// Vector loads of any storage dtype, converted to the compute dtype.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "cpu/engine/convert.h"
#include "cpu/engine/vec.h"

namespace tk::cpu::TK_ISA {

// Loads kParts converted vectors at a time; the order of elements depends on the dtype.
template <typename Storage>
struct ConvertedRow {
  using Real = Storage;
  static constexpr int kParts = 1;

  TK_INLINE_METHOD static void load(const Storage* from, Vec<Real> (&x)[kParts]) {
    x[0] = TK_ISA::load(from);
  }
};

// Even elements first, then odd ones: a bfloat16 is the upper half of a float.
template <>
struct ConvertedRow<BFloat16> {
  using Real = float;
  static constexpr int kParts = 2;

  TK_INLINE_METHOD static void load(const BFloat16* from, Vec<Real> (&x)[kParts]) {
    const Vec<uint32_t> pairs = TK_ISA::load(reinterpret_cast<const uint32_t*>(from));
    x[0] = reinterpret_cast<Vec<Real>>(pairs << 16);
    x[1] = reinterpret_cast<Vec<Real>>(pairs & 0xffff0000u);
  }
};

template <>
struct ConvertedRow<Float16> {
  using Real = float;
  static constexpr int kParts = 1;

  TK_INLINE_METHOD static void load(const Float16* from, Vec<Real> (&x)[kParts]) {
#if defined(__AVX512F__)
    x[0] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    x[0] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    read_as(from, 1, kLanes<Real>, reinterpret_cast<Real*>(&x[0]));
#endif
  }
};

// An element of an int8 cache that is read beside queries of the compute dtype R.
template <typename R>
struct Int8 {
  int8_t value;
};

template <typename R>
struct ConvertedRow<Int8<R>> {
  using Real = R;
  static constexpr int kParts = 2;

  TK_INLINE_METHOD static void load(const Int8<R>* from, Vec<Real> (&x)[kParts]) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes<Real>)));
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part, from += kLanes<Real>) {
      Bytes bytes;
      __builtin_memcpy(&bytes, from, sizeof(bytes));
      x[part] = widened(bytes);
    }
  }

 private:
  template <typename Bytes>
  TK_INLINE_METHOD static Vec<Real> widened(Bytes x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(x) == 16) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(x)));
    }
#elif defined(__AVX2__)
    if constexpr (sizeof(x) == 8 && sizeof(Real) == 4) {
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(x))));
    }
#endif
    return __builtin_convertvector(__builtin_convertvector(x, Vec<IntOf<Real>>), Vec<Real>);
  }
};

// True if parts are consecutive elements, not every kParts-th one.
template <typename Storage>
constexpr bool kInOrder = false;
template <typename R>
constexpr bool kInOrder<Int8<R>> = true;

// Elements per load.
template <typename Storage>
constexpr int64_t kChunk =
    ConvertedRow<Storage>::kParts * kLanes<typename ConvertedRow<Storage>::Real>;

}  // namespace tk::cpu::TK_ISA
