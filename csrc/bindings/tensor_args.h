// An operator's tensors as the kernels' params, on any device. This and the operators' files alone
// see torch headers (stable ABI, so that one build serves every later torch). What a caller may get
// wrong is checked in validate.py; here stands only what memory safety needs. Values of tensors are
// not read: they may be on a GPU, and not there yet.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "common/params.h"
#include "common/tensor_view.h"

// The optional tensors, in the order of `TensorArgs` in problem.py, and the numbers of
// `ops.numbers`.
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

// Checked: four dimensions, a dtype that attention takes, on this device.
View view(const Tensor& x, const Device& device);
Strided strided(const Tensor& x, const Device& device);

// Contiguous int64 of this shape, and bool of so many dimensions; checked.
const int64_t* integers(const Tensor& x, std::initializer_list<int64_t> shape,
                        const Device& device);
const uint8_t* booleans(const Tensor& x, int64_t dimensions, const Device& device);

Optional contiguous(const Optional& x);

// Of the dtype of softmax statistics and of sums.
ScalarType statistics_dtype(const Tensor& q);

// Of unspecified content; on a CPU poisoned if that is wanted.
Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                     ScalarType dtype, const Device& device);
Tensor empty(std::span<const int64_t> sizes, ScalarType dtype, const Device& device);
// (B, H, L, width) with x's order of heads and sequence in memory.
Tensor empty_like_layout(const Tensor& x, int64_t width, const Device& device);

// Everything that a call's params point to lives as long as this. Dropout's seed and what
// cu_seqlens hold are left to those who may read them.
struct Call {
  Call(const Tensor& q, const Tensor& k, const Tensor& v, TK_OPTIONS);

  Device device;
  Problem problem{};
  std::optional<Varlen> varlen;
  int64_t max_seqlen_q, max_seqlen_k;  // of packed sequences; M and N if there are none
  const int64_t* seed = nullptr;       // null without dropout
  std::vector<Tensor> kept;
  Optional key_start, key_end, q_segments, k_segments, dense, layout, cu_seqlens_q, cu_seqlens_k;

 private:
  void set_mask(int64_t low, int64_t high, int64_t block_size);
  void set_scores(const Optional& bias, const Optional& slopes);
  void set_dropout(double p, const Optional& seed);
  void set_varlen(bool bottom_right);
};

// A pass with its outputs, all of them allocated and none computed.
struct Forward {
  Forward(Call& call, const Tensor& q);

  Tensor o, lse;
  Tensor block_mask;  // empty where params.mask.block_mask is null
  ForwardParams params{};
};

struct BackwardInputs {
  const Tensor &d_o, &q, &k, &v, &o, &lse;
  const Optional &dlse, &block_mask, &bias;
};

struct Backward {
  Backward(Call& call, const BackwardInputs& x, bool bias_needs_grad);

  Tensor dq, dk, dv;
  Tensor dbias;  // empty unless it is wanted
  BackwardParams params{};
};

}  // namespace tk
