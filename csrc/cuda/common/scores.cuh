// Scores from products q k^T: scale, softcap, bias, ALiBi, relative bias. docs/attention.md,
// section 2.
#pragma once

#include "cuda/common/mma.cuh"

namespace tk::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// True if scores are more than scaled products.
inline bool has_score_options(const ScoreParams& s) {
  return s.softcap != 0 || s.alibi_slopes || s.bias.data || s.relative_bias;
}

// True if the softmax works on unscaled products, with the scale folded into the exponent (exp2).
// This holds for 16-bit types without score options. Otherwise scores are natural logarithms. A
// negative scale would turn maxima into minima, and with one that rounds to 0 a masked score (-inf)
// would become NaN.
inline bool has_plain_scores(const Problem& p) {
  const bool halves = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  return halves && p.score.scale > 1e-37 && p.score.scale < 1e37 && !has_score_options(p.score);
}

inline ScoreScale score_scale_of(const Problem& p) {
  return {has_plain_scores(p), has_score_options(p.score), static_cast<float>(p.score.scale)};
}

// Score options of one head.
struct Scores {
  float scale;
  float softcap;
  float slope;
  int alibi_offset;
  const void* bias;  // bias of this head; null = none
  int64_t bias_stride[2];
  DType bias_dtype;
  int M, N;
  const float* relative_bias;  // table of this head; null = none
  uint32_t relative_offset, distances;
};

// The options that all heads share. `shift` is added to the offsets of distances.
TK_DEVICE Scores shared_scores(const ScoreParams& given, int64_t shift, int M, int N) {
  Scores x{};
  x.scale = static_cast<float>(given.scale);
  x.softcap = static_cast<float>(given.softcap);
  x.alibi_offset = clamp_diagonal(given.alibi_offset + shift);
  x.M = M;
  x.N = N;
  x.relative_offset = static_cast<uint32_t>(given.relative_offset + shift);
  x.distances = static_cast<uint32_t>(given.distances);
  return x;
}

TK_DEVICE float alibi_slope(const ScoreParams& given, int b, int h) {
  if (!given.alibi_slopes) return 0.0f;
  const int stride = static_cast<int>(given.alibi_stride);  // options.cpp limits the elements
  return static_cast<const float*>(given.alibi_slopes)[b * stride + h];
}

TK_DEVICE const float* relative_table(const ScoreParams& given, int h) {
  if (!given.relative_bias) return nullptr;
  return static_cast<const float*>(given.relative_bias) + h * given.relative_stride;
}

template <typename Params>
TK_DEVICE Scores scores_of(const Arguments<Params>& a, const Sequence& s, int h) {
  const ScoreParams& given = a.params.score;
  Scores x = shared_scores(given, shift_of(a.varlen, s), s.M, s.N);
  x.slope = alibi_slope(given, s.b, h);
  x.relative_bias = relative_table(given, h);
  x.bias_dtype = given.bias_dtype;
  if (given.bias.data) {
    const int64_t* const stride = given.bias.stride;
    const int64_t bytes = given.bias_dtype == DType::kFloat32 ? 4 : 2;
    x.bias = static_cast<const char*>(given.bias.data) + (s.b * stride[0] + h * stride[1]) * bytes;
    x.bias_stride[0] = stride[2];
    x.bias_stride[1] = stride[3];
  }
  return x;
}

TK_DEVICE float bias_at(const Scores& x, int i, int j) {
  const int64_t at = i * x.bias_stride[0] + j * x.bias_stride[1];
  switch (x.bias_dtype) {
    case DType::kFloat16:
      return to_float(static_cast<const Half*>(x.bias)[at]);
    case DType::kBFloat16:
      return to_float(static_cast<const BFloat16*>(x.bias)[at]);
    default:
      return static_cast<const float*>(x.bias)[at];
  }
}

// 0 for distances that the table lacks: sequences may be longer than their bounds.
TK_DEVICE float relative_bias_at(const Scores& x, int i, int j) {
  const uint32_t at = static_cast<uint32_t>(i - j) + x.relative_offset;
  return at < x.distances ? x.relative_bias[at] : 0.0f;
}

struct Score {
  float value;
  float derivative;  // with respect to the scaled product
};

// Rounded before a maximum or lse is subtracted: fused with that, two equal scores would differ.
TK_DEVICE Score score(const Scores& x, float product, int i, int j) {
  Score s{__fmul_rn(product, x.scale), 1.0f};
  if (x.softcap != 0.0f) {
    const float t = tanhf(s.value / x.softcap);
    s = {__fmul_rn(x.softcap, t), 1.0f - t * t};
  }
  if (i < x.M && j < x.N) {
    if (x.bias) s.value += bias_at(x, i, j);
    if (x.relative_bias) s.value += relative_bias_at(x, i, j);
  }
  if (x.slope != 0.0f) {
    s.value -= x.slope * fabsf(static_cast<float>(i + x.alibi_offset - j));
  }
  return s;
}

template <int kM, int kN>
TK_DEVICE void scale_products(float scale, Accumulator<kM, kN>& products) {
  for_each_element<kM, kN>(
      [&](int m, int n, int e) { products.x[m][n][e] = __fmul_rn(products.x[m][n][e], scale); });
}

// Replaces products by scores.
template <int kM, int kN, typename Params>
TK_DEVICE void apply(Accumulator<kM, kN>& products, const Arguments<Params>& a, const Sequence& seq,
                     int h, int i0, int j0) {
  if (!a.score.has_options) return scale_products(a.score.scale, products);
  const Scores x = scores_of(a, seq, h);
  const auto to_score = [&](int row, int column, float& s) {
    s = score(x, s, i0 + row, j0 + column).value;
  };
  for_each_in_memory(to_score, products);
}

// 2^(unit (s - base)), exact however large s and base are.
TK_DEVICE float weight(float s, float base, float unit) { return exp2_approx((s - base) * unit); }

// The same with one operation less. The rounding of unit * base is a relative error of the weight:
// 16-bit types tolerate it while |unit * base| <= kLargestFused, where it is below 2^-13.
constexpr float kLargestFused = 1024.0f;

template <typename Element>
TK_DEVICE float fused_weight(float s, float base, float unit) {
  if constexpr (sizeof(Element) == 2) {
    return exp2_approx(fmaf(s, unit, -base * unit));
  } else {
    return weight(s, base, unit);
  }
}

}  // namespace tk::cuda
