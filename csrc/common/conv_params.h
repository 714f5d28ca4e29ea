// Parameters of the depthwise causal convolution: plain structs without torch types. Symbols as in
// docs/linear.md.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace tk {

constexpr int64_t kMinConvWidth = 2, kMaxConvWidth = 8;

// x is (entries, C, T); the three dimensions of a state are (B, C, W - 1).
struct ConvProblem {
  int64_t B, C, T, W;
  DType dtype, weight_dtype;
  bool silu;
  Strided x;
  const void* weight;  // (C, W), contiguous
  const void* bias;    // (C), contiguous, in the weight's dtype; null = zero
  Strided state;       // inputs before the first token; data null = zero
  // Packed sequences: sequence b has the tokens cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of the only
  // entry. Null = one sequence of T tokens per entry.
  const int32_t* cu_seqlens = nullptr;  // (B + 1)
};

struct ConvForwardParams : ConvProblem {
  Strided y;
  Strided end;  // the final state; may be the memory of `state`
};

struct ConvBackwardParams : ConvProblem {
  Strided d_y;
  Strided d_end;  // data null = zero
  Strided dx;
  void* dweight;   // (C, W), contiguous
  void* dbias;     // (C); null without bias
  Strided dstate;  // data null without a state
};

}  // namespace tk
