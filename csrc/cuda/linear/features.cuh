// Feature maps and their derivatives. Comparisons let NaN pass, which minima and maxima would drop.
#pragma once

#include "common/linear_params.h"
#include "cuda/platform/device.h"

namespace tk::cuda {

TK_DEVICE float feature(FeatureMap map, float x) {
  if (map == FeatureMap::kElu) return x > 0.0f ? x + 1.0f : expf(x);
  if (map == FeatureMap::kRelu) return x < 0.0f ? 0.0f : x;
  return x;
}

// y phi'(x)
TK_DEVICE float times_slope(FeatureMap map, float y, float x) {
  if (map == FeatureMap::kElu) return x > 0.0f ? y : y * expf(x);
  if (map == FeatureMap::kRelu) return x <= 0.0f ? 0.0f : y;
  return y;
}

}  // namespace tk::cuda
