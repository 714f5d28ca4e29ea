// CUDA implementations of the operators declared in csrc/bindings/tensor_args.h. With TK_EMULATOR
// they run on the CPU, in the emulator of csrc/cuda/emulator.
//
// Nothing here synchronises with the device or reads its memory, so that CUDA graphs can capture
// it.
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

tk::cuda::LaunchArgs launch_of(const tk::AttentionArgs& args, const OnDevice& on) {
  return {args.varlen.value_or(tk::Varlen{}), args.max_seqlen_q, args.max_seqlen_k, args.seed,
          on.stream()};
}

// Declares all tensors that the kernels may access.
void declare_accesses(const OnDevice& on, const tk::AttentionArgs& args,
                      std::vector<Optional> tensors, bool deterministic) {
  tensors.insert(tensors.end(), args.owned.begin(), args.owned.end());
  tensors.insert(tensors.end(), {args.key_start, args.key_end, args.q_segments, args.k_segments,
                                 args.dense, args.layout, args.cu_seqlens_q, args.cu_seqlens_k});
  on.declare_accesses(tensors, deterministic);
}

// Packed sequences: zeroes the outputs, because no kernel writes trailing padding, and only the
// device knows its length.
void zero_if_varlen(const tk::AttentionArgs& args, std::initializer_list<Tensor*> outputs) {
  if (!args.varlen) return;
  for (Tensor* x : outputs) torch::stable::zero_(*x);
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, TK_OPTIONS) {
  const Tensor q_rows = as_rows(q), k_rows = as_rows(k), v_rows = as_rows(v);
  tk::AttentionArgs args(q_rows, k_rows, v_rows, TK_OPTION_NAMES);
  const OnDevice on(args.device);
  tk::ForwardPass pass(args, q);
  const tk::cuda::LaunchArgs launch = launch_of(args, on);
  const Tensor scratch = workspace(tk::cuda::forward_workspace(pass.params, launch), args.device);
  declare_accesses(
      on, args, {q_rows, k_rows, v_rows, bias, pass.o, pass.lse, pass.block_mask, scratch}, true);
  if (pass.params.mask.block_mask) {
    tk::cuda::fill_block_mask(pass.params, pass.block_mask.size(0), pass.block_mask.size(1),
                              launch);
  }
  zero_if_varlen(args, {&pass.o});
  if (args.varlen) torch::stable::fill_(pass.lse, -std::numeric_limits<double>::infinity());
  tk::cuda::forward(pass.params, launch, scratch.data_ptr());
  return {pass.o, pass.lse, pass.block_mask};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(Tensor d_o, Optional dlse, Tensor q,
                                                              Tensor k, Tensor v, Tensor o,
                                                              Tensor lse, Optional block_mask,
                                                              TK_OPTIONS, bool bias_needs_grad,
                                                              bool deterministic) {
  const Tensor q_rows = as_rows(q), k_rows = as_rows(k), v_rows = as_rows(v);
  tk::AttentionArgs args(q_rows, k_rows, v_rows, TK_OPTION_NAMES);
  const OnDevice on(args.device);
  const Tensor d_o_rows = as_rows(d_o), o_rows = as_rows(o);
  const tk::BackwardInputs inputs{d_o_rows, q, k, v, o_rows, lse, dlse, block_mask, bias};
  tk::BackwardPass pass(args, inputs, bias_needs_grad);
  zero_if_varlen(args, {&pass.dq, &pass.dk, &pass.dv});
  const tk::cuda::LaunchArgs launch = launch_of(args, on);
  const Tensor scratch = workspace(tk::cuda::backward_workspace(pass.params, launch), args.device);
  declare_accesses(on, args,
                   {q_rows, k_rows, v_rows, bias, o_rows, d_o_rows, block_mask, pass.dq, pass.dk,
                    pass.dv, pass.dbias, scratch},
                   deterministic);
  tk::cuda::backward(pass.params, launch, scratch.data_ptr(), deterministic);
  return {pass.dq, pass.dk, pass.dv, pass.dbias};
}

#ifndef TK_EMULATOR
// True if the Hopper kernels are built, enabled and supported by the device.
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
