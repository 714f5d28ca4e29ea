// Converts operator arguments to kernel params, on any device. Only this directory includes torch
// headers, and only the stable ABI, so that one build serves every later torch release.
//
// transformer_kernels/problem reports errors of the caller; the checks here ensure memory safety
// only. Tensor values are not read: they may be on a GPU, and not yet computed.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "common/params.h"
#include "common/tensor_view.h"

// The optional tensors, in the order of `TensorArgs` in problem/types.py, then the scalar arguments
// of `scalar_args` in backends/schema.py.
#define TK_OPTIONS                                                                                 \
  ::tk::Optional bias, ::tk::Optional alibi_slopes, ::tk::Optional seed, ::tk::Optional key_start, \
      ::tk::Optional key_end, ::tk::Optional q_segments, ::tk::Optional k_segments,                \
      ::tk::Optional dense, ::tk::Optional layout, ::tk::Optional cu_seqlens_q,                    \
      ::tk::Optional cu_seqlens_k, double scale, double softcap, double dropout_p,                 \
      int64_t diagonal_low, int64_t diagonal_high, int64_t block_size, int64_t alibi_offset,       \
      bool bottom_right, int64_t max_seqlen_q, int64_t max_seqlen_k

#define TK_OPTION_NAMES                                                                   \
  bias, alibi_slopes, seed, key_start, key_end, q_segments, k_segments, dense, layout,    \
      cu_seqlens_q, cu_seqlens_k, scale, softcap, dropout_p, diagonal_low, diagonal_high, \
      block_size, alibi_offset, bottom_right, max_seqlen_q, max_seqlen_k

#define TK_OPTIONS_SCHEMA                                                                       \
  "Tensor? bias, Tensor? alibi_slopes, Tensor? seed, Tensor? key_start, Tensor? key_end, "      \
  "Tensor? q_segments, Tensor? k_segments, Tensor? dense, Tensor? layout, "                     \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale, "                                   \
  "float softcap, float dropout_p, SymInt diagonal_low, SymInt diagonal_high, int block_size, " \
  "SymInt alibi_offset, bool bottom_right, SymInt max_seqlen_q, SymInt max_seqlen_k"

#define TK_FORWARD_SCHEMA                                              \
  "attention_forward(Tensor q, Tensor k, Tensor v, " TK_OPTIONS_SCHEMA \
  ") -> (Tensor o, Tensor lse, Tensor block_mask)"

#define TK_BACKWARD_SCHEMA                                                                \
  "attention_backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, " \
  "Tensor lse, Tensor? block_mask, " TK_OPTIONS_SCHEMA                                    \
  ", bool bias_needs_grad, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"

namespace tk {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

struct Device {
  int32_t type;
  int32_t index;  // 0 for a CPU

  bool is_cpu() const;
};

Device device_of(const Tensor& x);
bool is_on(const Tensor& x, const Device& device);

// Data pointer. Raises an error if the storage does not hold all elements, as after
// `x.untyped_storage().resize_(0)`, by which sharded training frees memory.
void* data_of(const Tensor& x);

// Views of a 4-D tensor on this device. Raises an error for other tensors and dtypes.
View view(const Tensor& x, const Device& device);
Strided strided(const Tensor& x, const Device& device);

// Data pointers of a contiguous int64 tensor of this shape, and of a bool tensor with this number
// of dimensions. Raise an error for other tensors.
const int64_t* integers(const Tensor& x, std::initializer_list<int64_t> shape,
                        const Device& device);
const uint8_t* booleans(const Tensor& x, int64_t dimensions, const Device& device);

// x, or a contiguous copy. Raises an error as data_of does.
Tensor checked_contiguous(const Tensor& x);
Optional checked_contiguous(const Optional& x);

// dtype of softmax statistics and sums: float32, or float64 for float64 inputs.
ScalarType statistics_dtype(const Tensor& q);

// Uninitialised tensors; on a CPU filled with NaN after want_poison(true).
Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                     ScalarType dtype, const Device& device);
Tensor empty(std::span<const int64_t> sizes, ScalarType dtype, const Device& device);
// Uninitialised (B, H, L, width), with the memory order of x's heads and sequence.
Tensor empty_like_layout(const Tensor& x, int64_t width, const Device& device);

// Arguments of attention_forward or attention_backward. Owns every tensor that the params point to.
// The values of the seed and of cu_seqlens are not read here.
struct AttentionArgs {
  AttentionArgs(const Tensor& q, const Tensor& k, const Tensor& v, TK_OPTIONS);

  Device device;
  Problem problem{};
  std::optional<Varlen> varlen;
  int64_t max_seqlen_q, max_seqlen_k;  // M and N without packed sequences
  const int64_t* seed = nullptr;       // null without dropout
  std::vector<Tensor> owned;           // tensors without a member of their own
  Optional key_start, key_end, q_segments, k_segments, dense, layout, cu_seqlens_q, cu_seqlens_k;

 private:
  void set_mask(int64_t low, int64_t high, int64_t block_size);
  void set_scores(const Optional& bias, const Optional& slopes);
  void set_dropout(double p, const Optional& seed);
  void set_varlen(bool bottom_right);
};

// Params of a forward pass, with its outputs allocated but not computed.
struct ForwardPass {
  ForwardPass(AttentionArgs& args, const Tensor& q);

  Tensor o, lse;
  Tensor block_mask;  // empty if params.mask.block_mask is null
  ForwardParams params{};
};

struct BackwardInputs {
  const Tensor &d_o, &q, &k, &v, &o, &lse;
  const Optional &dlse, &block_mask, &bias;
};

// Params of a backward pass, with its outputs allocated but not computed.
struct BackwardPass {
  BackwardPass(AttentionArgs& args, const BackwardInputs& x, bool bias_needs_grad);

  Tensor dq, dk, dv;
  Tensor dbias;  // empty unless bias_needs_grad
  BackwardParams params{};
};

}  // namespace tk
