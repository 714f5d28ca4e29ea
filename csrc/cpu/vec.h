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

template <typename Real, int kCount>
struct VecOfCount {
  typedef Real type __attribute__((vector_size(kCount * sizeof(Real))));
};

// Folds the upper half onto the lower one until two are left.
template <typename Real, int kCount, typename Combine, int... kIndex>
TK_INLINE Real fold(typename VecOfCount<Real, kCount>::type x, Combine&& combine,
                    std::integer_sequence<int, kIndex...>) {
  if constexpr (kCount == 2) {
    return combine(x[0], x[1]);
  } else {
    constexpr int kHalf = kCount / 2;
    typename VecOfCount<Real, kHalf>::type low = __builtin_shufflevector(x, x, kIndex...);
    typename VecOfCount<Real, kHalf>::type high =
        __builtin_shufflevector(x, x, (kIndex + kHalf)...);
    return fold<Real, kHalf>(combine(low, high), combine,
                             std::make_integer_sequence<int, kHalf / 2>());
  }
}

template <typename Real, typename Combine>
TK_INLINE Real horizontal(Vec<Real> x, Combine&& combine) {
  return fold<Real, kLanes<Real>>(x, combine, std::make_integer_sequence<int, kLanes<Real> / 2>());
}

template <typename Real>
TK_INLINE Real horizontal_sum(Vec<Real> x) {
  return horizontal<Real>(x, [](auto a, auto b) { return a + b; });
}

template <typename Real>
TK_INLINE Real horizontal_max(Vec<Real> x) {
  return horizontal<Real>(x, [](auto a, auto b) { return b > a ? b : a; });
}

}  // namespace tk::cpu::TK_ISA
