// exp and tanh on vectors: argument reduction by powers of two, then the Taylor series.
#pragma once

#include "vec.h"

namespace tk::cpu::TK_ISA {

// On |r| <= ln(2)/2 the first term left out is below half an ulp: r^8/8! = 5e-9, r^14/14! = 4e-18.
template <typename Real>
constexpr int kExpDegree = sizeof(Real) == 4 ? 7 : 13;

template <typename Real>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.428606765330187e-06f;
  static constexpr float kSmallest = -87.0f;  // exp is a normal number from here on
  static constexpr int kMantissaBits = 23, kExponentBias = 127;
};

template <>
struct ExpConstants<double> {
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 0.6931471803691238, kLn2Low = 1.9082149292705877e-10;
  static constexpr double kSmallest = -708.0;
  static constexpr int kMantissaBits = 52, kExponentBias = 1023;
};

// exp(x) = power * (1 + rest), |x| small enough for power = 2^n to be a normal number.
template <typename Real>
struct SplitExp {
  Vec<Real> power;
  Vec<Real> rest;
};

template <typename Real>
TK_INLINE SplitExp<Real> split_exp(Vec<Real> x) {
  using C = ExpConstants<Real>;
  using Ints = Vec<IntOf<Real>>;
  constexpr Real kLog2E = static_cast<Real>(1.4426950408889634);
  const Vec<Real> shifted = x * kLog2E + C::kRound;
  const Vec<Real> n = shifted - C::kRound;
  const Vec<Real> r = (x - n * C::kLn2High) - n * C::kLn2Low;
  // 1 + r/2 (1 + r/3 (1 + ...)), times r.
  Vec<Real> series = broadcast(Real{1});
#pragma GCC unroll 16
  for (int k = kExpDegree<Real>; k >= 2; --k) series = series * r * (Real{1} / k) + Real{1};
  // The low bits of `shifted` are n itself.
  const Ints bits = reinterpret_cast<Ints>(shifted) - reinterpret_cast<Ints>(broadcast(C::kRound)) +
                    C::kExponentBias;
  return {reinterpret_cast<Vec<Real>>(bits << C::kMantissaBits), series * r};
}

// exp(x) for x <= 0, about 1 ulp; 0 below the normal numbers, NaN stays NaN.
template <typename Real>
TK_INLINE Vec<Real> exp_of_nonpositive(Vec<Real> x) {
  const SplitExp<Real> e = split_exp<Real>(x);
  const Vec<Real> y = e.power * e.rest + e.power;
  return x < ExpConstants<Real>::kSmallest ? Vec<Real>{} : y;
}

// tanh(x) = m / (m + 2) with m = exp(2x) - 1, without cancellation near 0.
template <typename Real>
TK_INLINE Vec<Real> tanh(Vec<Real> x) {
  constexpr Real kSaturated = 40;  // exp(-40) is below every ulp
  Vec<Real> y = Real{2} * x;
  y = y > kSaturated ? broadcast(kSaturated) : y;
  y = y < -kSaturated ? broadcast(-kSaturated) : y;
  const SplitExp<Real> e = split_exp<Real>(y);
  const Vec<Real> m = e.power * e.rest + (e.power - Real{1});
  return m / (m + Real{2});
}

}  // namespace tk::cpu::TK_ISA
