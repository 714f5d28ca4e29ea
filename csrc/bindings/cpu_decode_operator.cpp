// Schema of attention_decode, and its CPU implementation.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "bindings/decode_args.h"
#include "cpu/driver/decode.h"

namespace {

using tk::Optional;
using tk::Tensor;

std::tuple<Tensor, Tensor> attention_decode(Tensor q, Tensor k_cache, Tensor v_cache,
                                            TK_DECODE_OPTIONS) {
  tk::DecodeArgs args(q, k_cache, v_cache, TK_DECODE_OPTION_NAMES);
  STD_TORCH_CHECK(args.device.is_cpu(), "the tensors must be on the CPU");
  tk::KVCache& cache = args.cache;
  const auto indices =
      tk::copy_indices(cache, args.params.B, args.params.N, {cache.cache_seqlens, 1, 0},
                       {cache.block_table, cache.max_pages, 1});
  STD_TORCH_CHECK(
      indices,
      "cache_seqlens must be within the capacity, and block_table must hold existing pages");
  tk::run_decode(args.params, args.cache);
  return {args.o, args.lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_kernels, m) { m.def(TK_DECODE_SCHEMA); }

STABLE_TORCH_LIBRARY_IMPL(transformer_kernels, CPU, m) {
  m.impl("attention_decode", TORCH_BOX(&attention_decode));
}
