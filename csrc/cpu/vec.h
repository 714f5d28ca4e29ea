// The vector type: as wide as the instruction set's registers, arithmetic by the compiler.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "../inline.h"

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

// Integers as wide as Real, for its bits and for comparisons.
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
TK_INLINE Vec<Real> broadcast(Real x) {
  return x - Vec<Real>{};
}

// NaN in b is kept out, as in std::max: a NaN score shows up in the exponential instead.
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

// The square matrix of kLanes rows, transposed: squares off the diagonal change places, from the
// largest to single elements.
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

}  // namespace tk::cpu::TK_ISA
