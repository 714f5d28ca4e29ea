// Schemas of attention_forward and attention_backward, and their CPU implementations.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

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

// Reads the values of the seed and of cu_seqlens, of which AttentionArgs holds pointers only.
// Returns the memory of the offsets that args.varlen refers to.
std::vector<int32_t> read_values(tk::AttentionArgs& args) {
  STD_TORCH_CHECK(args.device.is_cpu(), "the tensors must be on the CPU");
  tk::Problem& p = args.problem;
  if (args.seed) p.dropout.seed = static_cast<uint64_t>(*args.seed);
  if (!args.varlen) return {};
  std::vector<int32_t> offsets = tk::copy_offsets(*args.varlen);
  STD_TORCH_CHECK(tk::fits(*args.varlen, p.M, p.N),
                  "cu_seqlens must start at 0, not decrease, and end within the rows");
  return offsets;
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, TK_OPTIONS) {
  tk::AttentionArgs args(q, k, v, TK_OPTION_NAMES);
  const std::vector<int32_t> offsets = read_values(args);
  tk::ForwardPass pass(args, q);
  args.varlen ? tk::run_forward(pass.params, *args.varlen) : tk::run_forward(pass.params);
  return {pass.o, pass.lse, pass.block_mask};
}

// The CPU kernels are always deterministic.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(Tensor d_o, Optional dlse, Tensor q,
                                                              Tensor k, Tensor v, Tensor o,
                                                              Tensor lse, Optional block_mask,
                                                              TK_OPTIONS, bool bias_needs_grad,
                                                              bool) {
  tk::AttentionArgs args(q, k, v, TK_OPTION_NAMES);
  const std::vector<int32_t> offsets = read_values(args);
  const tk::BackwardInputs inputs{d_o, q, k, v, o, lse, dlse, block_mask, bias};
  tk::BackwardPass pass(args, inputs, bias_needs_grad);
  args.varlen ? tk::run_backward(pass.params, *args.varlen) : tk::run_backward(pass.params);
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
