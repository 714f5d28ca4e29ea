// 2^x by multiply-adds, for a share of the exponentials where the special function units would be
// the bottleneck.
#pragma once

#include "cuda/platform/sm80_ptx.h"

namespace tk::cuda::sm90 {

// 2^x for x < 127 with a relative error of 7.5e-5, which is less than that of rounding to 16 bits;
// 0 for x < -126.5; NaN for NaN. x is split into an integer and a fraction between -1/2 and 1/2,
// whose power is a minimax polynomial.
TK_DEVICE float exp2_polynomial(float x) {
  x = max_or_nan(x, -127.0f);
  // A sum with this number is rounded to an integer; its lower bits are the exponent of 2^integer.
  constexpr float kRound = 1.5f * (1 << 23) + 127;
  const float sum = x + kRound, f = x - (sum - kRound);
  const float p = fmaf(fmaf(fmaf(0.05517167f, f, 0.24261112f), f, 0.69326099f), f, 0.99992807f);
  return p * __uint_as_float(__float_as_uint(sum) << 23);
}

}  // namespace tk::cuda::sm90
