// CUDA implementations of the operators declared in csrc/bindings/cpu_operators.cpp.
//
// Nothing here synchronises with the device or reads its memory, so that CUDA graphs can capture
// it.
#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/cuda_tensors.h"
#include "bindings/device_guard.h"
#include "bindings/operator_call.h"
#include "cuda/dispatch.h"

namespace {

using tk::Optional;
using tk::Tensor;
using tk::cuda::as_rows;
using tk::cuda::OnDevice;
using tk::cuda::workspace;

tk::cuda::LaunchArgs launch_of(const tk::OperatorCall& call, const OnDevice& on) {
  STD_TORCH_CHECK(!call.options.selected, "selected is not supported by the CUDA kernels");
  const tk::LayoutParams& layout = call.layout;
  STD_TORCH_CHECK(!layout.has_packed_pages(),
                  "block_table is not supported in a varlen call by the CUDA kernels");
  return tk::cuda::launch_args(layout, call.options, on.stream());
}

// Declares all tensors that the kernels may access.
void declare_accesses(const OnDevice& on, const tk::OperatorCall& call,
                      std::initializer_list<Optional> others, bool deterministic) {
  std::vector<Optional> tensors = call.arguments.tensors();
  tensors.insert(tensors.end(), others);
  on.declare_accesses(tensors, deterministic);
}

// Packed sequences: zeroes the outputs, because no kernel writes trailing padding, and only the
// device knows its length.
void zero_if_varlen(const tk::OperatorCall& call, std::initializer_list<Tensor*> outputs) {
  if (call.layout.kind != tk::LayoutKind::kVarlen) return;
  for (Tensor* x : outputs) torch::stable::zero_(*x);
}

void decode(tk::OperatorCall& call, tk::ForwardPass& pass, const OnDevice& on) {
  STD_TORCH_CHECK(!call.problem.is_int8, "int8 caches are not supported by the CUDA kernels");
  const Tensor scratch = workspace(tk::cuda::decode_workspace(pass.params), call.device);
  declare_accesses(on, call, {pass.o, pass.row_stats, scratch}, true);
  tk::cuda::decode(pass.params, call.layout.cache, scratch.data_ptr(), on.stream());
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(Tensor q, Tensor k,
                                                     Tensor v TK_FIELD_PARAMETERS) {
  tk::OperatorCall call({as_rows(q), as_rows(k), as_rows(v) TK_FIELD_NAMES});
  const OnDevice on(call.device);
  tk::ForwardPass pass(call, q);
  if (call.layout.kind == tk::LayoutKind::kCache) {
    decode(call, pass, on);
    return {pass.o, pass.row_stats, pass.block_mask};
  }
  const tk::cuda::LaunchArgs launch = launch_of(call, on);
  const Tensor scratch = workspace(tk::cuda::forward_workspace(pass.params, launch), call.device);
  declare_accesses(on, call, {pass.o, pass.row_stats, pass.block_mask, scratch}, true);
  if (pass.params.mask.block_mask) {
    tk::cuda::fill_block_mask(pass.params, pass.block_mask.size(0), pass.block_mask.size(1),
                              launch);
  }
  zero_if_varlen(call, {&pass.o});
  if (call.layout.kind == tk::LayoutKind::kVarlen) {
    Tensor lse = torch::stable::select(pass.row_stats, 0, 0);
    torch::stable::zero_(pass.row_stats);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  }
  tk::cuda::forward(pass.params, launch, scratch.data_ptr());
  return {pass.o, pass.row_stats, pass.block_mask};
}

tk::BackwardResults attention_backward(Tensor d_o, Optional dlse, Tensor q, Tensor k, Tensor v,
                                       Tensor o, Tensor row_stats,
                                       Optional block_mask TK_FIELD_PARAMETERS TK_WANTED_PARAMETERS,
                                       bool deterministic) {
  tk::OperatorCall call({as_rows(q), as_rows(k), as_rows(v) TK_FIELD_NAMES});
  const OnDevice on(call.device);
  tk::BackwardPass pass(call, {as_rows(d_o), as_rows(o), row_stats, dlse, block_mask}, q, k, v,
                        {TK_WANTED_NAMES});
  zero_if_varlen(call, {&pass.dq, &pass.dk, &pass.dv});
  const tk::cuda::LaunchArgs launch = launch_of(call, on);
  const Tensor scratch = workspace(tk::cuda::backward_workspace(pass.params, launch), call.device);
  const tk::SavedTensors& saved = pass.saved;
  declare_accesses(
      on, call,
      {saved.d_o, saved.o, saved.row_stats, saved.dlse, saved.block_mask, pass.dq, pass.dk, pass.dv,
       pass.dbias, pass.drelative_bias, pass.drelative_keys, scratch},
      deterministic);
  tk::cuda::backward(pass.params, launch, scratch.data_ptr(), deterministic);
  return pass.results();
}

// Outputs are allocated for their strides; nothing is computed.
std::string attention_describe(Tensor q, Tensor k,
                               Tensor v TK_FIELD_PARAMETERS TK_WANTED_PARAMETERS) {
  tk::OperatorCall call({as_rows(q), as_rows(k), as_rows(v) TK_FIELD_NAMES});
  const OnDevice on(call.device);
  const tk::ForwardPass pass(call, q);
  if (call.layout.kind == tk::LayoutKind::kCache) return tk::cuda::describe_decode(pass.params);
  const tk::SavedTensors saved{pass.o, pass.o, pass.row_stats, {}, pass.block_mask};
  const tk::BackwardPass backward(call, saved, q, k, v, {TK_WANTED_NAMES});
  return tk::cuda::describe(pass.params, backward.params, launch_of(call, on));
}

// True if the Hopper kernels are built, enabled and supported by the device.
bool runs_hopper(int64_t device) {
  const OnDevice on(device);
  return tk::cuda::runs_hopper();
}

}  // namespace

TK_CUDA_OPERATORS(m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_describe", TORCH_BOX(&attention_describe));
}

TK_DEFINE_MORE(TK_LIBRARY, m) { m.def("runs_hopper(int device) -> bool"); }

TK_IMPLEMENT(TK_LIBRARY, CompositeExplicitAutograd, m) {
  m.impl("runs_hopper", TORCH_BOX(&runs_hopper));
}
