// Vectors as wide as the registers of the instruction set, on compiler vector extensions.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/macros.h"

namespace tk::cpu::TK_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct VecOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};

template <typename Real>
using Vec = typename VecOf<Real>::type;

// Integer of the size of Real, for bit operations and comparisons.
template <typename Real>
using IntOf = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;

template <typename Real>
constexpr int kLanes = kVectorBytes / sizeof(Real);

template <typename Real>
TK_INLINE Vec<Real> load(const Real* p) {
  Vec<Real> x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}

template <typename Real>
TK_INLINE void store(Real* p, Vec<Real> x) {
  __builtin_memcpy(p, &x, sizeof(x));
}

template <typename Real>
TK_INLINE void clear(Real* x, int64_t count) {
  __builtin_memset(x, 0, static_cast<size_t>(count) * sizeof(Real));
}

template <typename Real>
TK_INLINE Vec<Real> broadcast(Real x) {
  return x - Vec<Real>{};
}

template <typename Real>
TK_INLINE bool any(Vec<IntOf<Real>> condition) {
  IntOf<Real> sum = 0;
  for (int lane = 0; lane < kLanes<Real>; ++lane) sum |= condition[lane];
  return sum != 0;
}

// x itself. The compiler cannot fuse the operation that computed it with the next one, which would
// skip its rounding.
template <typename Real>
TK_INLINE Vec<Real> rounded(Vec<Real> x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__SSE2__)
  asm("" : "+x"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// a b - c, in one operation if the instruction set has it.
template <typename Real>
TK_INLINE Vec<Real> multiply_subtract(Vec<Real> a, Vec<Real> b, Vec<Real> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4) return _mm512_fmsub_ps(a, b, c);
  if constexpr (sizeof(Real) == 8) return _mm512_fmsub_pd(a, b, c);
#elif defined(__FMA__)
  if constexpr (sizeof(Real) == 4) return _mm256_fmsub_ps(a, b, c);
  if constexpr (sizeof(Real) == 8) return _mm256_fmsub_pd(a, b, c);
#else
  return rounded<Real>(a * b) - c;
#endif
}

// Non-temporal store; p is aligned to a vector. A fully written line need not be read first, and
// evicts nothing. Other threads may read only after end_streams().
template <typename T>
TK_INLINE void stream(void* p, Vec<T> x) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(p), reinterpret_cast<__m512i>(x));
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(p), reinterpret_cast<__m256i>(x));
#elif defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(p), reinterpret_cast<__m128i>(x));
#else
  __builtin_memcpy(p, &x, sizeof(x));
#endif
}

TK_INLINE void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Ignores NaN in b, as std::max does; a NaN score shows up in the exponential instead.
template <typename Real>
TK_INLINE Vec<Real> max(Vec<Real> a, Vec<Real> b) {
  return b > a ? b : a;
}

// 0, 1, 2, ...
template <typename Real>
TK_INLINE Vec<Real> iota() {
  Vec<Real> x;
  for (int lane = 0; lane < kLanes<Real>; ++lane) x[lane] = static_cast<Real>(lane);
  return x;
}

// Reduces all lanes of x with op; every lane holds the result.
template <typename Real, int kHalf, typename Op, int... kLane>
TK_INLINE Vec<Real> reduce_halves(Vec<Real> x, Op op, std::integer_sequence<int, kLane...> lanes) {
  x = op(x, __builtin_shufflevector(x, x, (kLane ^ kHalf)...));
  if constexpr (kHalf > 1) return reduce_halves<Real, kHalf / 2>(x, op, lanes);
  return x;
}

template <typename Real, typename Op>
TK_INLINE Vec<Real> reduce(Vec<Real> x, Op op) {
  return reduce_halves<Real, kLanes<Real> / 2>(x, op,
                                               std::make_integer_sequence<int, kLanes<Real>>());
}

// Transposes a square of kLanes rows in place: swaps off-diagonal sub-squares, from the largest to
// single elements.
template <typename T, int kSquare, int... kLane>
TK_INLINE void swap_squares(Vec<T>* rows, std::integer_sequence<int, kLane...> lanes) {
  constexpr int W = kLanes<T>;
#pragma GCC unroll 16
  for (int r = 0; r < W; ++r) {
    if (r & kSquare) continue;
    const Vec<T> upper = rows[r], lower = rows[r + kSquare];
    rows[r] =
        __builtin_shufflevector(upper, lower, (kLane & kSquare ? W + kLane - kSquare : kLane)...);
    rows[r + kSquare] =
        __builtin_shufflevector(upper, lower, (kLane & kSquare ? W + kLane : kLane + kSquare)...);
  }
  if constexpr (kSquare > 1) swap_squares<T, kSquare / 2>(rows, lanes);
}

template <typename T>
TK_INLINE void transpose(Vec<T>* rows) {
  swap_squares<T, kLanes<T> / 2>(rows, std::make_integer_sequence<int, kLanes<T>>());
}

// Lane r of the result is the sum of rows[r]: a transpose that adds two rows as soon as they are
// swapped.
template <typename Real, int kSquare, int... kLane>
TK_INLINE Vec<Real> add_squares(Vec<Real>* rows, std::integer_sequence<int, kLane...> lanes) {
  constexpr int W = kLanes<Real>;
#pragma GCC unroll 8
  for (int r = 0; r < kSquare; ++r) {
    const Vec<Real> upper = rows[r], lower = rows[r + kSquare];
    rows[r] =
        __builtin_shufflevector(upper, lower, (kLane & kSquare ? W + kLane - kSquare : kLane)...) +
        __builtin_shufflevector(upper, lower, (kLane & kSquare ? W + kLane : kLane + kSquare)...);
  }
  if constexpr (kSquare > 1) return add_squares<Real, kSquare / 2>(rows, lanes);
  return rows[0];
}

template <typename Real>
TK_INLINE Vec<Real> row_sums(Vec<Real>* rows) {
  return add_squares<Real, kLanes<Real> / 2>(rows, std::make_integer_sequence<int, kLanes<Real>>());
}

// to (kColumns x kRows) = from (kRows x kColumns) transposed; both sizes are multiples of kLanes.
template <int64_t kRows, int64_t kColumns, typename T>
void transpose_tile(const T* from, T* to) {
  constexpr int64_t W = kLanes<T>;
  for (int64_t r = 0; r < kRows; r += W) {
    for (int64_t c = 0; c < kColumns; c += W) {
      Vec<T> square[W];
      for (int64_t n = 0; n < W; ++n) square[n] = load(from + (r + n) * kColumns + c);
      transpose<T>(square);
      for (int64_t n = 0; n < W; ++n) store(to + (c + n) * kRows + r, square[n]);
    }
  }
}

}  // namespace tk::cpu::TK_ISA
