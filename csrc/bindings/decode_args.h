// The tensors of `attention_decode` as the kernels' params, on any device; see call.h.
#pragma once

#include "bindings/tensor_args.h"
#include "common/kv_cache.h"

// The tensors of `KeyCache` in problem.py, in its order, and the numbers of `ops.decode_numbers`.
#define TK_DECODE_OPTIONS                                                                      \
  ::tk::Tensor lengths, ::tk::Optional block_table, ::tk::Optional alibi_slopes, double scale, \
      double softcap, int64_t diagonal_low, int64_t diagonal_high

#define TK_DECODE_OPTION_NAMES \
  lengths, block_table, alibi_slopes, scale, softcap, diagonal_low, diagonal_high

#define TK_DECODE_SCHEMA                                                                         \
  "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, "                  \
  "Tensor? block_table, Tensor? alibi_slopes, float scale, float softcap, SymInt diagonal_low, " \
  "SymInt diagonal_high) -> (Tensor o, Tensor lse)"

namespace tk {

// With its outputs, allocated and not computed. What lengths and the table hold is not looked at.
struct DecodeCall {
  DecodeCall(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, TK_DECODE_OPTIONS);

  Device device;
  Tensor lengths;
  Optional block_table, alibi_slopes;
  KeyCache cache{};
  Tensor o, lse;
  ForwardParams params{};
};

}  // namespace tk
