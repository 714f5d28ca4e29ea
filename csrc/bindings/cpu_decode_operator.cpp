// The schema of `attention_decode`, and the operator on a CPU.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "bindings/decode_args.h"
#include "cpu/driver/decode.h"

namespace {

using tk::Optional;
using tk::Tensor;

std::tuple<Tensor, Tensor> attention_decode(Tensor q, Tensor k_cache, Tensor v_cache,
                                            TK_DECODE_OPTIONS) {
  tk::DecodeCall call(q, k_cache, v_cache, TK_DECODE_OPTION_NAMES);
  STD_TORCH_CHECK(call.device.is_cpu(), "these kernels run on the CPU");
  STD_TORCH_CHECK(tk::fits(call.cache, call.params.B, call.params.N),
                  "cache_seqlens must lie within the cache, and lead only to pages that there are");
  tk::run_decode(call.params, call.cache);
  return {call.o, call.lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_kernels, m) { m.def(TK_DECODE_SCHEMA); }

STABLE_TORCH_LIBRARY_IMPL(transformer_kernels, CPU, m) {
  m.impl("attention_decode", TORCH_BOX(&attention_decode));
}
