// CUDA implementations of the operators declared in linear_operators.cpp.
//
// Nothing here synchronises with the device or reads its memory, so that CUDA graphs can capture
// it.
#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/cuda_tensors.h"
#include "bindings/device_guard.h"
#include "bindings/linear_call.h"
#include "cuda/linear/dispatch.h"

namespace {

using tk::Optional;
using tk::Tensor;
using tk::cuda::as_rows;
using tk::cuda::OnDevice;
using tk::cuda::workspace;

// Replaces a tensor by one whose rows have unit stride.
void use_rows(Tensor& x, tk::Strided& strided) {
  x = as_rows(x);
  strided = tk::strided(tk::unchecked_view(x));
}

void use_rows(tk::LinearCall& call, tk::LinearProblem& p) {
  use_rows(call.arguments.q, p.q);
  use_rows(call.arguments.k, p.k);
  use_rows(call.arguments.v, p.v);
}

// Declares all tensors that the kernels may access.
void declare_accesses(const OnDevice& on, const tk::LinearCall& call,
                      std::initializer_list<Optional> others) {
  std::vector<Optional> tensors = call.arguments.tensors();
  tensors.insert(tensors.end(), others);
  on.declare_accesses(tensors, true);
}

// Packed sequences: zeroes the outputs, because no kernel writes trailing padding, and only the
// device knows its length.
void zero_if_packed(const tk::LinearProblem& p, std::initializer_list<Tensor*> outputs) {
  if (!p.cu_seqlens) return;
  for (Tensor* x : outputs) torch::stable::zero_(*x);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_forward(TK_LINEAR_PARAMETERS) {
  tk::LinearCall call(TK_LINEAR_ARGUMENTS);
  const OnDevice on(call.device);
  tk::LinearForwardPass pass(call);
  use_rows(call, pass.params);
  zero_if_packed(pass.params, {&pass.o});
  const Tensor scratch = workspace(tk::cuda::linear_workspace(pass.params), call.device);
  declare_accesses(on, call, {pass.o, pass.normalizer, pass.S, pass.z, scratch});
  tk::cuda::linear_forward(pass.params, scratch.data_ptr(), on.stream());
  return {pass.o, pass.normalizer, pass.S, pass.z};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_backward(
    Tensor d_o, Optional dS_end, Optional dz_end, Tensor o, Tensor normalizer, TK_LINEAR_PARAMETERS,
    bool log_decay_needs_grad) {
  tk::LinearCall call(TK_LINEAR_ARGUMENTS);
  const OnDevice on(call.device);
  tk::LinearBackwardPass pass(call, {d_o, dS_end, dz_end, o, normalizer}, log_decay_needs_grad);
  tk::LinearSaved& saved = pass.saved;
  use_rows(call, pass.params);
  use_rows(saved.d_o, pass.params.d_o);
  use_rows(saved.o, pass.params.o);
  zero_if_packed(pass.params, {&pass.dq, &pass.dk, &pass.dv, &pass.dlog_decay});
  const Tensor scratch = workspace(tk::cuda::linear_workspace(pass.params), call.device);
  declare_accesses(on, call,
                   {saved.d_o, saved.dS_end, saved.dz_end, saved.o, saved.normalizer, pass.dq,
                    pass.dk, pass.dv, pass.dlog_decay, pass.dS, pass.dz, scratch});
  tk::cuda::linear_backward(pass.params, scratch.data_ptr(), on.stream());
  return pass.results();
}

Tensor linear_steps(TK_LINEAR_STEP_PARAMETERS) {
  tk::LinearCall call(tk::with_own_state(TK_LINEAR_STEP_ARGUMENTS));
  const OnDevice on(call.device);
  tk::LinearStepsPass pass(call);
  use_rows(call, pass.params);
  declare_accesses(on, call, {pass.o});
  tk::cuda::linear_steps(pass.params, on.stream());
  return pass.o;
}

}  // namespace

TK_CUDA_OPERATORS(m) {
  m.impl("linear_forward", TORCH_BOX(&linear_forward));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
  m.impl("linear_steps", TORCH_BOX(&linear_steps));
}
