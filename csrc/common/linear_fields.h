// The table of fields of linear attention, as fields.h is that of attention: the options of a call,
// in the order of the operators' arguments. The schemas, the operators' parameters, the reader of
// the arguments and `_C.LINEAR_FIELDS` derive from it. A test compares it with its Python form:
// Inputs and Options in transformer_kernels/linear/types.py.
//
//   NUMBER(type, kind, name)
//   TENSOR(name, elements, memory, shape)
//   STATE(name, elements, memory, shape, kind)   linear_steps overwrites it; its kind there
//   PASS_NUMBER(type, kind, name, value)         no argument of linear_steps; its value there
//   PASS_TENSOR(name, elements, memory, shape)   no argument of linear_steps
//
// B is the number of sequences, and `entries` that of q's batch entries: 1 if they are packed.
#pragma once

#include "common/fields.h"

#define TK_LINEAR_ROWS(NUMBER, TENSOR, STATE, PASS_NUMBER, PASS_TENSOR) \
  TENSOR(log_decay, kStatistics, kStrided, (entries, H_kv, N))          \
  STATE(S, kStatistics, kContiguous, (B, H_kv, D, D_v), "Tensor(a!)")   \
  STATE(z, kStatistics, kContiguous, (B, H_kv, D), "Tensor(b!)")        \
  PASS_TENSOR(cu_seqlens, kIndex, kContiguous, (B + 1))                 \
  PASS_TENSOR(key_start, kInt64, kContiguous, (B))                      \
  PASS_TENSOR(key_end, kInt64, kContiguous, (B))                        \
  NUMBER(int64_t, "int", feature_map)                                   \
  NUMBER(bool, "bool", normalize)                                       \
  NUMBER(double, "float", eps)                                          \
  PASS_NUMBER(bool, "bool", causal, true)

#define TK_LINEAR_FIELDS(NUMBER, TENSOR) TK_LINEAR_ROWS(NUMBER, TENSOR, TENSOR, NUMBER, TENSOR)
#define TK_LINEAR_STEP_FIELDS(NUMBER, TENSOR, STATE) \
  TK_LINEAR_ROWS(NUMBER, TENSOR, STATE, TK_NO_FIELD, TK_NO_FIELD)

namespace tk {

#define TK_NUMBER(type, kind, name) {#name, kind, "", "passes steps"},
#define TK_TENSOR(name, elements, memory, shape, ...) {#name, "Tensor?", #shape, "passes steps"},
#define TK_STATE(name, elements, memory, shape, kind) {#name, kind, #shape, "passes steps"},
#define TK_PASS_NUMBER(type, kind, name, value) {#name, kind, "", "passes"},
#define TK_PASS_TENSOR(name, elements, memory, shape) {#name, "Tensor?", #shape, "passes"},
constexpr Field kLinearFields[] = {
    TK_LINEAR_ROWS(TK_NUMBER, TK_TENSOR, TK_TENSOR, TK_PASS_NUMBER, TK_PASS_TENSOR)};
constexpr Field kLinearStepFields[] = {TK_LINEAR_STEP_FIELDS(TK_NUMBER, TK_TENSOR, TK_STATE)};
#undef TK_NUMBER
#undef TK_TENSOR
#undef TK_STATE
#undef TK_PASS_NUMBER
#undef TK_PASS_TENSOR

}  // namespace tk
