// Schemas of attention_forward, attention_backward and attention_describe, and their CPU
// implementations; isa(), for a library without module.cpp.
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/namespace.h"
#include "bindings/operator_call.h"
#include "cpu/driver/call.h"
#include "cpu/driver/dense.h"
#include "cpu/driver/isa_dispatch.h"

namespace {

using tk::Optional;
using tk::Tensor;

void launch(int64_t count, void (*body)(void*, int64_t), void* context) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) body(context, worker);
  });
}

// Returns the memory to which the layout of the call then refers.
tk::Indices read_values(tk::OperatorCall& call) {
  STD_TORCH_CHECK(call.device.is_cpu(), "the tensors must be on the CPU");
  tk::Reason reason;
  auto indices = tk::read_values(call.problem, call.layout, call.options, reason);
  STD_TORCH_CHECK(reason.empty(), reason);
  return indices;
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(Tensor q, Tensor k,
                                                     Tensor v TK_FIELD_PARAMETERS) {
  tk::OperatorCall call({q, k, v TK_FIELD_NAMES});
  const tk::Indices indices = read_values(call);
  tk::ForwardPass pass(call, q);
  tk::run(pass.params, call.layout);
  return {pass.o, pass.row_stats, pass.block_mask};
}

// The CPU kernels are always deterministic.
tk::BackwardResults attention_backward(Tensor d_o, Optional dlse, Tensor q, Tensor k, Tensor v,
                                       Tensor o, Tensor row_stats,
                                       Optional block_mask TK_FIELD_PARAMETERS TK_WANTED_PARAMETERS,
                                       bool) {
  tk::OperatorCall call({q, k, v TK_FIELD_NAMES});
  const tk::Indices indices = read_values(call);
  tk::BackwardPass pass(call, {d_o, o, row_stats, dlse, block_mask}, q, k, v, {TK_WANTED_NAMES});
  tk::run(pass.params, call.layout);
  return pass.results();
}

std::string attention_describe(Tensor q, Tensor k,
                               Tensor v TK_FIELD_PARAMETERS TK_WANTED_PARAMETERS) {
  tk::OperatorCall call({q, k, v TK_FIELD_NAMES});
  const tk::Indices indices = read_values(call);
  static_cast<void>(tk::Wanted{TK_WANTED_NAMES});  // the choice does not depend on them
  return tk::describe(call.problem, call.layout);
}

}  // namespace

tk::cpu::Workers tk::workers() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()), &launch};
}

TK_DEFINE(TK_LIBRARY, m) {
  m.def(tk::forward_schema().c_str());
  m.def(tk::backward_schema().c_str());
  m.def(tk::describe_schema().c_str());
  m.def("isa() -> str");
}

TK_IMPLEMENT(TK_LIBRARY, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_describe", TORCH_BOX(&attention_describe));
}

TK_IMPLEMENT(TK_LIBRARY, CompositeExplicitAutograd, m) { m.impl("isa", TORCH_BOX(&tk::cpu::isa)); }
