// Converts the arguments of `attention_decode` to kernel params, on any device; see tensor_args.h.
#pragma once

#include "bindings/tensor_args.h"
#include "common/kv_cache.h"

// The tensors of `KVCache` in problem/types.py, in its order, then the scalar arguments of
// `decode_scalar_args` in backends/schema.py.
#define TK_DECODE_OPTIONS                                                              \
  ::tk::Tensor cache_seqlens, ::tk::Optional block_table, ::tk::Optional alibi_slopes, \
      double scale, double softcap, int64_t diagonal_low, int64_t diagonal_high

#define TK_DECODE_OPTION_NAMES \
  cache_seqlens, block_table, alibi_slopes, scale, softcap, diagonal_low, diagonal_high

#define TK_DECODE_SCHEMA                                                                         \
  "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, "            \
  "Tensor? block_table, Tensor? alibi_slopes, float scale, float softcap, SymInt diagonal_low, " \
  "SymInt diagonal_high) -> (Tensor o, Tensor lse)"

namespace tk {

// Arguments of attention_decode, with its outputs allocated but not computed. The values of
// cache_seqlens and block_table are not read here.
struct DecodeArgs {
  DecodeArgs(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, TK_DECODE_OPTIONS);

  Device device;
  Tensor cache_seqlens;
  Optional block_table, alibi_slopes;
  KVCache cache{};
  Tensor o, lse;
  ForwardParams params{};
};

}  // namespace tk
