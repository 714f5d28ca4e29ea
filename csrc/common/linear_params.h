// Parameters of linear attention and of the delta rule: plain structs without torch types. Symbols
// as in docs/linear.md.
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

// The sequences of a call, and the dtype of its inputs.
struct SequenceParams {
  int64_t B, M, N;
  DType dtype;
  // Packed sequences: sequence b has the rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1 of the only
  // batch entry, which has `rows` of them. Null = one sequence of M queries and N keys per entry.
  const int32_t* cu_seqlens = nullptr;  // (B + 1)
  int64_t rows = 0;
  const int64_t* key_start = nullptr;  // (B); null = 0
  const int64_t* key_end = nullptr;    // (B); null = N
};

// Tensors are (B, H, L, width); log_decay is (B, H_kv, N), in the compute dtype.
struct LinearProblem : SequenceParams {
  int64_t H_q, H_kv, D, D_v;
  FeatureMap feature_map;
  bool causal;     // M = N
  bool normalize;  // divides by phi(q) z + eps
  double eps;
  Strided q, k, v;
  Strided log_decay;  // data null = no decay
  StateMemory initial;
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

// The gated delta rule. M = N tokens; H_v is a multiple of H_k. Tensors are (B, H, N, width), with
// H_k heads of q and k; log_decay (B, H_v, N, gates) and beta (B, H_v, N) are in the compute dtype,
// as states (B, H_v, D, D_v), which are contiguous.
struct DeltaProblem : SequenceParams {
  int64_t H_k, H_v, D, D_v;
  int64_t gates;  // 1, or D: a gate for each channel of k
  double scale;
  bool l2norm;
  Strided q, k, v, log_decay, beta;
  const void* initial;  // null = zero
};

struct DeltaForwardParams : DeltaProblem {
  Strided o;
  void* end;  // the final state
};

struct DeltaBackwardParams : DeltaProblem {
  Strided d_o, dq, dk, dv;
  const void* d_end;  // null = zero
  // Contiguous, in the compute dtype.
  void *dlog_decay, *dbeta;
  void* d_initial;  // null = no initial state
};

}  // namespace tk
