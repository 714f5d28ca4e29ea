// The operators' schema, and the operators on a CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "bindings/tensor_args.h"
#include "cpu/driver/dense.h"
#include "cpu/driver/varlen.h"

namespace {

using tk::Optional;
using tk::Tensor;

void launch(int64_t count, void (*body)(void*, int64_t), void* context) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) body(context, worker);
  });
}

// What stands in tensors, of which `Call` knows no more than where they are.
void read_values(tk::Call& call) {
  STD_TORCH_CHECK(call.device.is_cpu(), "these kernels run on the CPU");
  tk::Problem& p = call.problem;
  if (call.seed) p.dropout.seed = static_cast<uint64_t>(*call.seed);
  STD_TORCH_CHECK(!call.varlen || tk::fits(*call.varlen, p.M, p.N),
                  "cu_seqlens must start at 0, never fall, and end within the rows");
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, TK_OPTIONS) {
  tk::Call call(q, k, v, TK_OPTION_NAMES);
  read_values(call);
  tk::Forward pass(call, q);
  call.varlen ? tk::run_forward(pass.params, *call.varlen) : tk::run_forward(pass.params);
  return {pass.o, pass.lse, pass.block_mask};
}

// Deterministic whether or not it is asked for.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(Tensor d_o, Optional dlse, Tensor q,
                                                              Tensor k, Tensor v, Tensor o,
                                                              Tensor lse, Optional block_mask,
                                                              TK_OPTIONS, bool bias_needs_grad,
                                                              bool) {
  tk::Call call(q, k, v, TK_OPTION_NAMES);
  read_values(call);
  const tk::BackwardInputs inputs{d_o, q, k, v, o, lse, dlse, block_mask, bias};
  tk::Backward pass(call, inputs, bias_needs_grad);
  call.varlen ? tk::run_backward(pass.params, *call.varlen) : tk::run_backward(pass.params);
  return {pass.dq, pass.dk, pass.dv, pass.dbias};
}

}  // namespace

tk::cpu::Workers tk::workers() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()), &launch};
}

STABLE_TORCH_LIBRARY(transformer_kernels, m) {
  m.def(TK_FORWARD_SCHEMA);
  m.def(TK_BACKWARD_SCHEMA);
}

STABLE_TORCH_LIBRARY_IMPL(transformer_kernels, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}
