// CUDA implementation of attention_decode, also for the emulator; see cuda_operators.cpp.
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
  tk::DecodeArgs args(q_rows, k_rows, v_rows, TK_DECODE_OPTION_NAMES);
  const tk::cuda::OnDevice on(args.device);
  const Tensor scratch = tk::cuda::workspace(tk::cuda::decode_workspace(args.params), args.device);
  on.declare_accesses({q_rows, k_rows, v_rows, args.cache_seqlens, args.block_table,
                       args.alibi_slopes, args.o, args.lse, scratch},
                      true);
  tk::cuda::decode(args.params, args.cache, scratch.data_ptr(), on.stream());
  return {args.o, args.lse};
}

}  // namespace

TK_CUDA_OPERATORS(m) { m.impl("attention_decode", TORCH_BOX(&attention_decode)); }
