// Vectorized exp, 2^x, log and tanh: argument reduction by powers of two, then a polynomial.
#pragma once

#if defined(__AVX512DQ__)
#include <immintrin.h>
#endif

#include "cpu/engine/vec.h"

namespace tk::cpu::TK_ISA {

// On |r| <= ln(2)/2 the first omitted term is below half an ulp: r^8/8! = 5e-9, r^14/14! = 4e-18.
template <typename Real>
constexpr int kExpDegree = sizeof(Real) == 4 ? 7 : 13;

template <typename Real>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.428606765330187e-06f;
  static constexpr float kSmallestPower = -125.0f;  // from here on 2^x is a normal number
  static constexpr int kMantissaBits = 23, kExponentBias = 127;
};

template <>
struct ExpConstants<double> {
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 0.6931471803691238, kLn2Low = 1.9082149292705877e-10;
  static constexpr double kSmallestPower = -1021.0;
  static constexpr int kMantissaBits = 52, kExponentBias = 1023;
};

// exp(x) = power * (1 + rest), if |x| is small enough for power = 2^n to be a normal number.
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

// exp(x); 0 where it is below the normal numbers, infinity where it is above; NaN stays NaN.
template <typename Real>
TK_INLINE Vec<Real> exp(Vec<Real> x) {
  constexpr Real kLn2 = static_cast<Real>(0.6931471805599453);
  constexpr Real kSmallest = ExpConstants<Real>::kSmallestPower * kLn2;
  constexpr Real kLargest = (ExpConstants<Real>::kExponentBias + Real{0.5}) * kLn2;
  const Vec<Real> low = broadcast(kSmallest), high = broadcast(kLargest);
  const Vec<Real> inside = x < kSmallest ? low : x > kLargest ? high : x;
  const SplitExp<Real> e = split_exp<Real>(inside);
  const Vec<Real> y = e.power * e.rest + e.power;
  const Vec<Real> infinity = broadcast(static_cast<Real>(__builtin_inf()));
  return x < kSmallest ? Vec<Real>{} : x > kLargest ? infinity : y;
}

// Accuracy of 2^x: well below half precision's rounding, or to the last bits of Real.
enum class Precision : uint8_t { kHalf, kReal };

// Minimax polynomials (Remez, relative error) of 2^x on [0, 1], lowest power first.
template <typename Real, Precision kPrecision>
struct Exp2Series;

template <>
struct Exp2Series<float, Precision::kHalf> {  // 2.6e-6; half an ulp of float16 is 2.4e-4
  static constexpr float kTerms[] = {1.000002593f, 0.6930038345f, 0.2414427571f, 0.05201146030f,
                                     0.01353416807f};
};
template <>
struct Exp2Series<float, Precision::kReal> {  // 1.9e-9
  static constexpr float kTerms[] = {1.000000002f,    0.6931469838f,   0.2402298363f,
                                     0.05548334198f,  0.009678841007f, 0.001243968775f,
                                     0.0002170225568f};
};
template <>
struct Exp2Series<double, Precision::kReal> {  // 3.1e-18
  static constexpr double kTerms[] = {
      0.9999999999999999969,    0.6931471805599462346,     0.2402265069590547136,
      0.05550410866571114055,   0.00961812909879262171,    0.001333355866157575735,
      0.0001540351144649055245, 0.00001525319024883124339, 1.320819349574712152e-6,
      1.025445737901455022e-7,  6.554457162654839149e-9,   6.272434464802889565e-10};
};

// 2^x = 2^floor(x) 2^(x - floor(x)), for x up to the largest exponent. Flushes subnormal results to
// 0; NaN stays NaN.
template <typename Real, Precision kPrecision>
TK_INLINE Vec<Real> exp2(Vec<Real> x) {
  constexpr auto& kTerms = Exp2Series<Real, kPrecision>::kTerms;
  constexpr int kDegree = sizeof(kTerms) / sizeof(Real) - 1;
#if defined(__AVX512DQ__)
  Vec<Real> r;
  if constexpr (sizeof(Real) == 4) {
    r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  } else {
    r = _mm512_reduce_pd(x, _MM_FROUND_TO_NEG_INF);
  }
#else
  using C = ExpConstants<Real>;
  using Bits = Vec<std::make_unsigned_t<IntOf<Real>>>;  // wraps if x is -inf or NaN
  const Vec<Real> shifted = (x - Real{0.5}) + C::kRound;
  const Vec<Real> r = x - (shifted - C::kRound);
#endif
  Vec<Real> series = broadcast(kTerms[kDegree]);
#pragma GCC unroll 16
  for (int k = kDegree - 1; k >= 0; --k) series = series * r + kTerms[k];
#if defined(__AVX512DQ__)
  if constexpr (sizeof(Real) == 4) {
    return _mm512_scalef_ps(series, x);
  } else {
    return _mm512_scalef_pd(series, x);
  }
#else
  const Bits power = reinterpret_cast<Bits>(shifted) - reinterpret_cast<Bits>(broadcast(C::kRound));
  const Vec<Real> y =
      reinterpret_cast<Vec<Real>>(reinterpret_cast<Bits>(series) + (power << C::kMantissaBits));
  return x < C::kSmallestPower ? Vec<Real>{} : y;
#endif
}

// log(x) of a normal number x > 0; -inf for 0; NaN stays NaN. With x = 2^n f and f near 1, log(f) =
// 2 artanh(z), z = (f - 1) / (f + 1), |z| < 0.172.
template <typename Real>
TK_INLINE Vec<Real> log(Vec<Real> x) {
  using C = ExpConstants<Real>;
  using Ints = Vec<IntOf<Real>>;
  constexpr Real kLn2 = static_cast<Real>(0.6931471805599453);
  constexpr Real kSqrt2 = static_cast<Real>(1.4142135623730951);
  constexpr int kTerms = sizeof(Real) == 4 ? 4 : 10;  // of the odd series, after the first term
  constexpr IntOf<Real> kOne = IntOf<Real>{C::kExponentBias} << C::kMantissaBits;
  const Ints bits = reinterpret_cast<Ints>(x);
  const Ints exponent = (bits >> C::kMantissaBits) - C::kExponentBias;
  const Vec<Real> mantissa =
      reinterpret_cast<Vec<Real>>((bits & ((IntOf<Real>{1} << C::kMantissaBits) - 1)) | kOne);
  const auto large = mantissa > kSqrt2;
  const Vec<Real> f = large ? mantissa * Real{0.5} : mantissa;
  const Vec<Real> n = __builtin_convertvector(large ? exponent + 1 : exponent, Vec<Real>);
  const Vec<Real> z = (f - Real{1}) / (f + Real{1}), square = z * z;
  Vec<Real> series = broadcast(Real{1} / (2 * kTerms + 1));
#pragma GCC unroll 10
  for (int k = kTerms - 1; k >= 0; --k) series = series * square + Real{1} / (2 * k + 1);
  const Vec<Real> y = n * kLn2 + Real{2} * z * series;
  const Vec<Real> special = x == 0 ? broadcast(-static_cast<Real>(__builtin_inf())) : x;
  return x > 0 ? y : special;
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
