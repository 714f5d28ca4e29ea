// Parameters of linear attention: plain structs without torch types. Symbols as in docs/linear.md.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace tk {

// In the order of FEATURE_MAPS in transformer_kernels/linear/types.py.
enum class FeatureMap : uint8_t { kElu, kRelu, kIdentity };

// S (B, H_kv, D, D_v) and z (B, H_kv, D), contiguous, in the compute dtype; null = none.
struct StateMemory {
  void* S = nullptr;
  void* z = nullptr;

  explicit operator bool() const { return S != nullptr; }
};

// Tensors are (B, H, L, width); log_decay is (B, H_kv, N), in the compute dtype.
struct LinearProblem {
  int64_t B, H_q, H_kv, M, N, D, D_v;
  DType dtype;
  FeatureMap feature_map;
  bool causal;     // M = N
  bool normalize;  // divides by phi(q) z + eps
  double eps;
  Strided q, k, v;
  Strided log_decay;  // data null = no decay
  StateMemory initial;
  // Packed sequences: sequence b has the rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of the only
  // batch entry, which has `rows` of them. Null = one sequence of M queries and N keys per entry.
  const int32_t* cu_seqlens = nullptr;  // (B + 1)
  int64_t rows = 0;
  const int64_t* key_start = nullptr;  // (B); null = 0
  const int64_t* key_end = nullptr;    // (B); null = N
};

struct LinearForwardParams : LinearProblem {
  Strided o;
  void* normalizer;  // (B, H_q, M), contiguous, in the compute dtype
  StateMemory end;   // the final state
};

struct LinearBackwardParams : LinearProblem {
  Strided o, d_o;
  const void* normalizer;
  StateMemory d_end;  // null = zero
  Strided dq, dk, dv;
  void* dlog_decay;       // (B, H_kv, N), contiguous, in the compute dtype; null = not wanted
  StateMemory d_initial;  // null = no initial state
};

}  // namespace tk
