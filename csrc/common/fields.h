// The table of fields: the options of a call, in the order of the operators' arguments. The
// schemas, the operators' parameters, the readers of both bindings, the number-valued members of
// ScoreParams and `_C.FIELDS` derive from it. A test compares it with its Python form:
// ScoreOptions, ResolvedMask and Layout, which hold the fields of the three parts.
//
//   NUMBER(type, kind, name, layouts)
//   TENSOR(name, elements, memory, shape, layouts)   1|X: 1, or X and broadcast from 1
//
// S is the number of sequences: B, or that of the packed sequences.
#pragma once

#include <cstdint>
#include <optional>

#define TK_SCORE_FIELDS(NUMBER, TENSOR)                                                       \
  NUMBER(std::optional<double>, "float?", scale, "dense varlen cache")                        \
  NUMBER(double, "float", softcap, "dense varlen cache")                                      \
  NUMBER(double, "float", dropout_p, "dense varlen")                                          \
  NUMBER(int64_t, "SymInt", dropout_row, "dense")                                             \
  NUMBER(int64_t, "SymInt", dropout_column, "dense")                                          \
  NUMBER(int64_t, "SymInt", dropout_head, "dense")                                            \
  TENSOR(bias, kValues, kStrided, "(1|B, 1|H_q, 1|M, 1|N)", "dense")                          \
  TENSOR(alibi_slopes, kStatistics, kContiguous, "(1|S, H_q)", "dense varlen cache")          \
  NUMBER(int64_t, "SymInt", alibi_offset, "dense varlen cache")                               \
  TENSOR(relative_bias, kStatistics, kContiguous, "(1|H_q, distances)", "dense varlen cache") \
  TENSOR(relative_keys, kInputs, kContiguous, "(1|H_q, distances, D)", "dense varlen cache")  \
  TENSOR(seed, kInt64, kContiguous, "()", "dense varlen")

#define TK_MASK_FIELDS(NUMBER, TENSOR)                                       \
  NUMBER(int64_t, "SymInt", diagonal_low, "dense varlen cache")              \
  NUMBER(int64_t, "SymInt", diagonal_high, "dense varlen cache")             \
  NUMBER(bool, "bool", bottom_right, "dense varlen cache")                   \
  TENSOR(key_start, kInt64, kContiguous, "(B)", "dense cache")               \
  TENSOR(key_end, kInt64, kContiguous, "(B)", "dense cache")                 \
  TENSOR(q_low, kInt64, kContiguous, "(tests, 1|B, 1|H_q, M)", "dense")      \
  TENSOR(q_high, kInt64, kContiguous, "(tests, 1|B, 1|H_q, M)", "dense")     \
  TENSOR(k_position, kInt64, kContiguous, "(tests, 1|B, 1|H_q, N)", "dense") \
  TENSOR(dense, kBool, kStrided, "(1|B, 1|H_q, 1|M, 1|N)", "dense")          \
  TENSOR(blocks, kBool, kStrided, "(1|H_q, rows, columns)", "dense")         \
  NUMBER(int64_t, "SymInt", block_size, "dense")                             \
  TENSOR(selected, kInt32, kContiguous, "(1|B, 1|H_q, M, count)", "dense")   \
  NUMBER(int64_t, "SymInt", selected_size, "dense")

#define TK_LAYOUT_FIELDS(NUMBER, TENSOR)                                     \
  TENSOR(cu_seqlens_q, kIndex, kContiguous, "(S + 1)", "varlen")             \
  TENSOR(cu_seqlens_k, kIndex, kContiguous, "(S + 1)", "varlen")             \
  NUMBER(int64_t, "SymInt", max_seqlen_q, "varlen")                          \
  NUMBER(int64_t, "SymInt", max_seqlen_k, "varlen")                          \
  TENSOR(cache_seqlens, kIndex, kContiguous, "(B)", "cache")                 \
  TENSOR(block_table, kIndex, kContiguous, "(S, pages)", "varlen cache")     \
  TENSOR(k_scale, kFloat32, kStrided, "(entries, H_kv, positions)", "cache") \
  TENSOR(v_scale, kFloat32, kStrided, "(entries, H_kv, positions)", "cache")

// Options whose gradients the backward pass computes on demand.
#define TK_DIFFERENTIABLE(OPTION) OPTION(bias) OPTION(relative_bias) OPTION(relative_keys)

#define TK_FIELDS(NUMBER, TENSOR) \
  TK_SCORE_FIELDS(NUMBER, TENSOR) \
  TK_MASK_FIELDS(NUMBER, TENSOR)  \
  TK_LAYOUT_FIELDS(NUMBER, TENSOR)

#define TK_NO_FIELD(...)

namespace tk {

// Type of a number in the kernels' params, where nothing is optional.
template <typename Argument>
struct Number {
  using Param = Argument;
};
template <>
struct Number<std::optional<double>> {
  using Param = double;
};

// Element types of a tensor.
enum class Elements : uint8_t {
  kValues,      // q's dtype or float32
  kInputs,      // q's dtype
  kStatistics,  // float32, or float64 for float64 inputs
  kFloat32,
  kInt32,
  kInt64,
  kBool,
  kIndex,  // int32; in direct calls also int64
};

// The strides that kernels accept. Operators copy other tensors, direct calls decline them. The CPU
// copies index tensors in any case.
enum class Memory : uint8_t { kContiguous, kStrided };

struct Field {
  const char *name, *kind, *shape, *layouts;
};

#define TK_NUMBER(type, kind, name, layouts) {#name, kind, "", layouts},
#define TK_TENSOR(name, elements, memory, shape, layouts) {#name, "Tensor?", shape, layouts},
constexpr Field kFields[] = {TK_FIELDS(TK_NUMBER, TK_TENSOR)};
#undef TK_NUMBER
#undef TK_TENSOR

}  // namespace tk
