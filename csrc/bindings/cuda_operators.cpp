// The operators on a CUDA device, of the schemas in csrc/bindings/tensor_args.h; and, with
// TK_EMULATOR, the same on a CPU, where the emulator runs the kernels (csrc/cuda/emulator).
//
// Nothing here waits for the device or reads its memory, so that a CUDA graph can be captured.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <limits>
#include <tuple>
#include <vector>

#include "bindings/device_guard.h"
#include "bindings/tensor_args.h"
#include "cuda/dispatch.h"

namespace {

using tk::Optional;
using tk::Tensor;
using tk::cuda::as_rows;
using tk::cuda::OnDevice;
using tk::cuda::workspace;

tk::cuda::Call launch_of(const tk::Call& call, const OnDevice& on) {
  return {call.varlen.value_or(tk::Varlen{}), call.max_seqlen_q, call.max_seqlen_k, call.seed,
          on.stream()};
}

// All tensors of a call: what kernels may touch.
void expect(const OnDevice& on, const tk::Call& call, std::vector<Optional> tensors,
            bool deterministic) {
  tensors.insert(tensors.end(), call.kept.begin(), call.kept.end());
  tensors.insert(tensors.end(), {call.key_start, call.key_end, call.q_segments, call.k_segments,
                                 call.dense, call.layout, call.cu_seqlens_q, call.cu_seqlens_k});
  on.expect(tensors, deterministic);
}

// Of packed sequences no kernel sees the rows behind the last one; how many there are is known to
// the device alone.
void clear(const tk::Call& call, std::initializer_list<Tensor*> outputs) {
  if (!call.varlen) return;
  for (Tensor* x : outputs) torch::stable::zero_(*x);
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, TK_OPTIONS) {
  const Tensor q_rows = as_rows(q), k_rows = as_rows(k), v_rows = as_rows(v);
  tk::Call call(q_rows, k_rows, v_rows, TK_OPTION_NAMES);
  const OnDevice on(call.device);
  tk::Forward pass(call, q);
  const tk::cuda::Call launch = launch_of(call, on);
  const Tensor scratch = workspace(tk::cuda::forward_workspace(pass.params, launch), call.device);
  expect(on, call, {q_rows, k_rows, v_rows, bias, pass.o, pass.lse, pass.block_mask, scratch},
         true);
  if (pass.params.mask.block_mask) {
    tk::cuda::fill_block_mask(pass.params, pass.block_mask.size(0), pass.block_mask.size(1),
                              launch);
  }
  clear(call, {&pass.o});
  if (call.varlen) torch::stable::fill_(pass.lse, -std::numeric_limits<double>::infinity());
  tk::cuda::forward(pass.params, launch, scratch.data_ptr());
  return {pass.o, pass.lse, pass.block_mask};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(Tensor d_o, Optional dlse, Tensor q,
                                                              Tensor k, Tensor v, Tensor o,
                                                              Tensor lse, Optional block_mask,
                                                              TK_OPTIONS, bool bias_needs_grad,
                                                              bool deterministic) {
  const Tensor q_rows = as_rows(q), k_rows = as_rows(k), v_rows = as_rows(v);
  tk::Call call(q_rows, k_rows, v_rows, TK_OPTION_NAMES);
  const OnDevice on(call.device);
  const Tensor d_o_rows = as_rows(d_o), o_rows = as_rows(o);
  const tk::BackwardInputs inputs{d_o_rows, q, k, v, o_rows, lse, dlse, block_mask, bias};
  tk::Backward pass(call, inputs, bias_needs_grad);
  clear(call, {&pass.dq, &pass.dk, &pass.dv});
  const tk::cuda::Call launch = launch_of(call, on);
  const Tensor scratch = workspace(tk::cuda::backward_workspace(pass.params, launch), call.device);
  expect(on, call,
         {q_rows, k_rows, v_rows, bias, o_rows, d_o_rows, block_mask, pass.dq, pass.dk, pass.dv,
          pass.dbias, scratch},
         deterministic);
  tk::cuda::backward(pass.params, launch, scratch.data_ptr(), deterministic);
  return {pass.dq, pass.dk, pass.dv, pass.dbias};
}

#ifndef TK_EMULATOR
// Whether the Hopper kernels are built, enabled and supported by the device.
bool runs_hopper(int64_t device) {
  const OnDevice on({aoti_torch_device_type_cuda(), static_cast<int32_t>(device)});
  return tk::cuda::runs_hopper();
}
#endif

}  // namespace

TK_CUDA_OPERATORS(m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

#ifndef TK_EMULATOR
STABLE_TORCH_LIBRARY_FRAGMENT(transformer_kernels, m) { m.def("runs_hopper(int device) -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(transformer_kernels, CompositeExplicitAutograd, m) {
  m.impl("runs_hopper", TORCH_BOX(&runs_hopper));
}
#endif
