// Feature maps: phi of rows, and the product of a gradient with its derivative.
#pragma once

#include "common/linear_params.h"
#include "cpu/engine/vec_math.h"

namespace tk::cpu::TK_ISA {

template <FeatureMap kMap, typename Real>
TK_INLINE Vec<Real> feature(Vec<Real> x) {
  if constexpr (kMap == FeatureMap::kElu) {
    const Vec<Real> y = exp<Real>(x > 0 ? Vec<Real>{} : x);
    return x > 0 ? x + Real{1} : y;
  }
  if constexpr (kMap == FeatureMap::kRelu) return x < 0 ? Vec<Real>{} : x;
  return x;
}

// The derivative of phi, from phi itself.
template <FeatureMap kMap, typename Real>
TK_INLINE Vec<Real> slope(Vec<Real> y) {
  const Vec<Real> one = broadcast(Real{1});
  if constexpr (kMap == FeatureMap::kElu) return y < 1 ? y : one;
  if constexpr (kMap == FeatureMap::kRelu) return y > 0 ? one : Vec<Real>{};
  return one;
}

// visit<map>() with the feature map of the problem as a constant.
template <typename Visit>
TK_INLINE void with_map(FeatureMap map, Visit&& visit) {
  switch (map) {
    case FeatureMap::kElu:
      return visit.template operator()<FeatureMap::kElu>();
    case FeatureMap::kRelu:
      return visit.template operator()<FeatureMap::kRelu>();
    case FeatureMap::kIdentity:
      return visit.template operator()<FeatureMap::kIdentity>();
  }
}

// Applies phi to `width` of `padded` elements, a multiple of a vector, and clears the others.
template <typename Real>
void map_row(FeatureMap map, int64_t width, int64_t padded, Real* row) {
  with_map(map, [&]<FeatureMap kMap>() {
    for (int64_t c = 0; c < padded; c += kLanes<Real>)
      store(row + c, feature<kMap, Real>(load(row + c)));
  });
  for (int64_t c = width; c < padded; ++c) row[c] = Real{0};
}

// Multiplies a row of gradients by the derivative of phi at `features`.
template <typename Real>
void multiply_by_slope(FeatureMap map, const Real* features, int64_t padded, Real* gradient) {
  if (map == FeatureMap::kIdentity) return;
  with_map(map, [&]<FeatureMap kMap>() {
    for (int64_t c = 0; c < padded; c += kLanes<Real>) {
      store(gradient + c, load(gradient + c) * slope<kMap, Real>(load(features + c)));
    }
  });
}

}  // namespace tk::cpu::TK_ISA
