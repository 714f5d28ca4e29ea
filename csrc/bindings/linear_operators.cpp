// The operators of linear attention: schemas, and their CPU implementations.
#include <cstdint>
#include <tuple>
#include <vector>

#include "bindings/linear_call.h"
#include "bindings/namespace.h"
#include "cpu/driver/linear.h"
#include "cpu/driver/varlen.h"

namespace {

using tk::Optional;
using tk::Tensor;

// Checks the values of cu_seqlens, and copies them: another thread may write the tensor later.
std::vector<int32_t> read_values(tk::LinearCall& call) {
  STD_TORCH_CHECK(call.device.is_cpu(), "the tensors must be on the CPU");
  tk::LinearProblem& p = call.problem;
  if (!p.cu_seqlens) return {};
  std::vector<int32_t> starts(p.cu_seqlens, p.cu_seqlens + p.B + 1);
  STD_TORCH_CHECK(tk::are_valid_offsets(starts.data(), p.B, p.rows),
                  "cu_seqlens must start at 0, not decrease, and end within the rows");
  p.cu_seqlens = starts.data();
  return starts;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_forward(TK_LINEAR_PARAMETERS) {
  tk::LinearCall call(TK_LINEAR_ARGUMENTS);
  const std::vector<int32_t> starts = read_values(call);
  tk::LinearForwardPass pass(call);
  tk::run_linear_forward(pass.params);
  return {pass.o, pass.normalizer, pass.S, pass.z};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_backward(
    Tensor d_o, Optional dS_end, Optional dz_end, Tensor o, Tensor normalizer, TK_LINEAR_PARAMETERS,
    bool log_decay_needs_grad) {
  tk::LinearCall call(TK_LINEAR_ARGUMENTS);
  const std::vector<int32_t> starts = read_values(call);
  tk::LinearBackwardPass pass(call, {d_o, dS_end, dz_end, o, normalizer}, log_decay_needs_grad);
  tk::run_linear_backward(pass.params);
  return pass.results();
}

Tensor linear_steps(TK_LINEAR_STEP_PARAMETERS) {
  tk::LinearCall call(tk::with_own_state(TK_LINEAR_STEP_ARGUMENTS));
  STD_TORCH_CHECK(call.device.is_cpu(), "the tensors must be on the CPU");
  tk::LinearStepsPass pass(call);
  tk::run_linear_steps(pass.params);
  return pass.o;
}

}  // namespace

TK_DEFINE_MORE(TK_LIBRARY, m) {
  m.def(tk::linear_forward_schema().c_str());
  m.def(tk::linear_backward_schema().c_str());
  m.def(tk::linear_steps_schema().c_str());
}

TK_IMPLEMENT(TK_LIBRARY, CPU, m) {
  m.impl("linear_forward", TORCH_BOX(&linear_forward));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
  m.impl("linear_steps", TORCH_BOX(&linear_steps));
}
