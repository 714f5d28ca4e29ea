// The operators on a CUDA device, of the schemas in csrc/call.h; and, with TK_EMULATOR, the same on
// a CPU, where the emulator runs the kernels (csrc/cuda/emulator).
//
// Nothing here waits for the device or reads its memory, so that a CUDA graph can be captured.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <initializer_list>
#include <limits>
#include <tuple>

#include "../call.h"
#include "launch.h"

#ifndef TK_EMULATOR
// Weak: a torch without CUDA does not have it, nor tensors that would bring a call here.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
#endif

namespace {

using tk::Optional;
using tk::Tensor;

// Makes q's device the current one, and finds the stream that is current on it.
class OnDevice {
 public:
#ifdef TK_EMULATOR
  explicit OnDevice(const tk::Device& device) {
    STD_TORCH_CHECK(device.is_cpu(), "the emulator runs on the CPU");
  }
#else
  explicit OnDevice(const tk::Device& device) : guard_(checked(device).index) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream_));
  }
#endif

  void* stream() const { return stream_; }

 private:
#ifndef TK_EMULATOR
  static const tk::Device& checked(const tk::Device& device) {
    STD_TORCH_CHECK(device.type == aoti_torch_device_type_cuda(),
                    "these kernels run on a CUDA device");
    return device;
  }

  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void* stream_ = nullptr;
};

// Kernels read and write rows whose elements lie side by side.
Tensor as_rows(const Tensor& x) {
  const bool side_by_side = x.dim() != 4 || x.stride(3) == 1 || x.size(3) == 1;
  return side_by_side ? x : torch::stable::contiguous(x);
}

tk::cuda::Call launch_of(const tk::Call& call, const OnDevice& on) {
  return {call.packing.value_or(tk::Packing{}), call.longest_M, call.longest_N, call.seed,
          on.stream()};
}

// Freed while kernels use it, as torch's allocator gives it to later work of this stream only.
Tensor workspace(size_t bytes, const tk::Device& device) {
  const std::array<int64_t, 1> size{static_cast<int64_t>(bytes)};
  return tk::empty(size, tk::ScalarType::Byte, device);
}

// Of packed sequences no kernel sees the rows behind the last one; how many there are is known to
// the device alone.
void clear(const tk::Call& call, std::initializer_list<Tensor*> outputs) {
  if (!call.packing) return;
  for (Tensor* x : outputs) torch::stable::zero_(*x);
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, TK_OPTIONS) {
  const Tensor q_rows = as_rows(q), k_rows = as_rows(k), v_rows = as_rows(v);
  tk::Call call(q_rows, k_rows, v_rows, TK_OPTION_NAMES);
  const OnDevice on(call.device);
  tk::Forward pass(call, q);
  const tk::cuda::Call launch = launch_of(call, on);
  if (pass.params.mask.summary) {
    tk::cuda::summarize(pass.params, pass.summary.size(0), pass.summary.size(1), launch);
  }
  clear(call, {&pass.o});
  if (call.packing) torch::stable::fill_(pass.lse, -std::numeric_limits<double>::infinity());
  const Tensor scratch = workspace(tk::cuda::forward_workspace(pass.params, launch), call.device);
  tk::cuda::forward(pass.params, launch, scratch.data_ptr());
  return {pass.o, pass.lse, pass.summary};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(Tensor d_o, Optional dlse, Tensor q,
                                                              Tensor k, Tensor v, Tensor o,
                                                              Tensor lse, Optional block_summary,
                                                              TK_OPTIONS, bool bias_needs_grad,
                                                              bool deterministic) {
  const Tensor q_rows = as_rows(q), k_rows = as_rows(k), v_rows = as_rows(v);
  tk::Call call(q_rows, k_rows, v_rows, TK_OPTION_NAMES);
  const OnDevice on(call.device);
  const Tensor d_o_rows = as_rows(d_o), o_rows = as_rows(o);
  const tk::BackwardInputs inputs{d_o_rows, q, k, v, o_rows, lse, dlse, block_summary, bias};
  tk::Backward pass(call, inputs, bias_needs_grad);
  clear(call, {&pass.dq, &pass.dk, &pass.dv});
  const tk::cuda::Call launch = launch_of(call, on);
  const Tensor scratch = workspace(tk::cuda::backward_workspace(pass.params, launch), call.device);
  tk::cuda::backward(pass.params, launch, scratch.data_ptr(), deterministic);
  return {pass.dq, pass.dk, pass.dv, pass.dbias};
}

}  // namespace

#ifdef TK_EMULATOR
#define TK_IMPLEMENT(library) STABLE_TORCH_LIBRARY_IMPL(library, CPU, m)
TK_IMPLEMENT(TK_LIBRARY) {
#else
STABLE_TORCH_LIBRARY_IMPL(transformer_kernels, CUDA, m) {
#endif
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}
