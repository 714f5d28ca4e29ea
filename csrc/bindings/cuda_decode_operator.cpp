// `attention_decode` on a CUDA device, or emulated; see operators.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "bindings/decode_args.h"
#include "bindings/device_guard.h"
#include "cuda/dispatch.h"

namespace {

using tk::Optional;
using tk::Tensor;

std::tuple<Tensor, Tensor> attention_decode(Tensor q, Tensor k_cache, Tensor v_cache,
                                            TK_DECODE_OPTIONS) {
  const Tensor q_rows = tk::cuda::as_rows(q), k_rows = tk::cuda::as_rows(k_cache),
               v_rows = tk::cuda::as_rows(v_cache);
  tk::DecodeCall call(q_rows, k_rows, v_rows, TK_DECODE_OPTION_NAMES);
  const tk::cuda::OnDevice on(call.device);
  const Tensor scratch = tk::cuda::workspace(tk::cuda::decode_workspace(call.params), call.device);
  on.expect({q_rows, k_rows, v_rows, call.cache_seqlens, call.block_table, call.alibi_slopes,
             call.o, call.lse, scratch},
            true);
  tk::cuda::decode(call.params, call.cache, scratch.data_ptr(), on.stream());
  return {call.o, call.lse};
}

}  // namespace

TK_CUDA_OPERATORS(m) { m.impl("attention_decode", TORCH_BOX(&attention_decode)); }
