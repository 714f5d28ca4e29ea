// The operators of the depthwise causal convolution: schemas, and their CPU implementations.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/namespace.h"
#include "bindings/tensors.h"
#include "common/conv_params.h"
#include "common/workspace.h"
#include "cpu/driver/dense.h"
#include "cpu/driver/isa_dispatch.h"
#include "cpu/driver/varlen.h"

namespace {

using tk::Device;
using tk::Optional;
using tk::ScalarType;
using tk::Strided;
using tk::Tensor;

#define TK_CONV_FIELDS "Tensor x, Tensor weight, Tensor? bias, "
constexpr const char* kForwardSchema =
    "conv_forward(" TK_CONV_FIELDS
    "Tensor? state, Tensor? cu_seqlens, bool silu) -> (Tensor y, Tensor state_end)";
constexpr const char* kBackwardSchema =
    "conv_backward(Tensor d_y, Tensor? dstate_end, " TK_CONV_FIELDS
    "Tensor? state, Tensor? cu_seqlens, bool silu) -> "
    "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dstate)";
constexpr const char* kStepsSchema =
    "conv_steps(" TK_CONV_FIELDS "Tensor(a!) state, bool silu) -> Tensor y";
#undef TK_CONV_FIELDS

// Checked arguments, and copies of what kernels read as contiguous: the weights, and the offsets,
// which another thread may write later.
struct Call {
  Tensor x, weight;
  Optional bias, state;
  Device device;
  tk::ConvProblem problem{};
  std::vector<int32_t> starts;

  Call(Tensor x_, Tensor weight_, Optional bias_, Optional state_, const Optional& cu_seqlens,
       bool silu)
      : x(std::move(x_)),
        weight(std::move(weight_)),
        bias(std::move(bias_)),
        state(std::move(state_)),
        device(tk::device_of(x)) {
    tk::ConvProblem& p = problem;
    STD_TORCH_CHECK(device.is_cpu(), "the tensors must be on the CPU");
    STD_TORCH_CHECK(x.dim() == 3 && weight.dim() == 2,
                    "x must have three dimensions, and weight two");
    p.B = x.size(0), p.C = x.size(1), p.T = x.size(2), p.W = weight.size(1), p.silu = silu;
    STD_TORCH_CHECK(p.W >= tk::kMinConvWidth && p.W <= tk::kMaxConvWidth,
                    "weight must have 2 to 8 columns");
    p.dtype = dtype_of(x, "x"), p.weight_dtype = dtype_of(weight, "weight");
    p.x = tk::strided(tk::view(x, device));
    p.weight = contiguous(weight, "weight", {p.C, p.W});
    if (bias) p.bias = contiguous(*bias, "bias", {p.C});
    if (cu_seqlens) read_offsets(*cu_seqlens);
    if (state) p.state = strided(*state, "state", {p.B, p.C, p.W - 1});
  }

  // The view of a tensor of x's dtype.
  Strided strided(const Tensor& of, const char* name, std::initializer_list<int64_t> sizes) const {
    STD_TORCH_CHECK(of.scalar_type() == x.scalar_type(), name, " has the wrong dtype");
    STD_TORCH_CHECK(tk::unchecked_view(of).has_size(sizes), name, " has the wrong shape");
    return tk::strided(tk::view(of, device));
  }

  Tensor empty(std::initializer_list<int64_t> sizes, const Tensor& like) const {
    return tk::empty({sizes.begin(), sizes.size()}, like.scalar_type(), device);
  }

  // Uninitialised, with the layout of x. Kernels do not write tokens after the last sequence.
  Tensor empty_like_x() const {
    Tensor y = tk::empty_like_layout(x, 1, device);
    if (!starts.empty() && starts.back() < problem.T) torch::stable::zero_(y);
    return y;
  }

 private:
  static tk::DType dtype_of(const Tensor& of, const char* name) {
    const tk::Element element = tk::unchecked_view(of).element;
    STD_TORCH_CHECK(element <= tk::Element::kFloat64, name,
                    " must be float16, bfloat16, float32 or float64");
    return static_cast<tk::DType>(element);
  }

  // The memory of a tensor of the weight's dtype, which a contiguous one replaces.
  const void* contiguous(Tensor& of, const char* name, std::initializer_list<int64_t> sizes) const {
    STD_TORCH_CHECK(of.scalar_type() == weight.scalar_type(), name, " has the wrong dtype");
    STD_TORCH_CHECK(tk::unchecked_view(of).has_size(sizes), name, " has the wrong shape");
    of = tk::checked_contiguous(of);
    return tk::view(of, device).data;
  }

  void read_offsets(const Tensor& cu_seqlens) {
    STD_TORCH_CHECK(cu_seqlens.scalar_type() == ScalarType::Int, "cu_seqlens has the wrong dtype");
    STD_TORCH_CHECK(x.size(0) == 1 && cu_seqlens.dim() == 1 && cu_seqlens.size(0) > 0,
                    "packed sequences have one batch entry, and cu_seqlens one dimension");
    const Tensor offsets = tk::checked_contiguous(cu_seqlens);
    const auto* const from = static_cast<const int32_t*>(tk::view(offsets, device).data);
    starts.assign(from, from + offsets.size(0));
    problem.B = offsets.size(0) - 1;
    STD_TORCH_CHECK(tk::are_valid_offsets(starts.data(), problem.B, problem.T),
                    "cu_seqlens must start at 0, not decrease, and end within the tokens of x");
    problem.cu_seqlens = starts.data();
  }
};

tk::ConvForwardParams forward_params(const Call& call, const Tensor& y, const Tensor& end) {
  return {call.problem, tk::strided(tk::unchecked_view(y)), tk::strided(tk::unchecked_view(end))};
}

template <typename Params, typename Pass>
void run(const Params& params, Pass pass) {
  const tk::cpu::Workers threads = tk::workers();
  const tk::Workspace workspace(tk::cpu::conv_kernels().workspace(params, threads));
  pass(params, threads, workspace.data());
}

std::tuple<Tensor, Tensor> conv_forward(Tensor x, Tensor weight, Optional bias, Optional state,
                                        Optional cu_seqlens, bool silu) {
  const Call call(x, weight, bias, state, cu_seqlens, silu);
  const tk::ConvProblem& p = call.problem;
  const Tensor y = call.empty_like_x(), end = call.empty({p.B, p.C, p.W - 1}, x);
  run(forward_params(call, y, end), tk::cpu::conv_kernels().forward);
  return {y, end};
}

// The gradient of an option that is not given has no elements.
std::tuple<Tensor, Tensor, Tensor, Tensor> conv_backward(Tensor d_y, Optional dstate_end, Tensor x,
                                                         Tensor weight, Optional bias,
                                                         Optional state, Optional cu_seqlens,
                                                         bool silu) {
  const Call call(x, weight, bias, state, cu_seqlens, silu);
  const tk::ConvProblem& p = call.problem;
  const auto sizes = {p.B, p.C, p.W - 1};
  const Tensor dx = call.empty_like_x(), dweight = call.empty({p.C, p.W}, weight);
  const Tensor dbias = call.empty({bias ? p.C : 0}, weight);
  const Tensor dstate = state ? call.empty(sizes, x) : call.empty({0}, x);
  tk::ConvBackwardParams params{};
  static_cast<tk::ConvProblem&>(params) = p;
  params.d_y = call.strided(d_y, "d_y", {x.size(0), p.C, p.T});
  if (dstate_end) params.d_end = call.strided(*dstate_end, "dstate_end", sizes);
  params.dx = tk::strided(tk::unchecked_view(dx));
  params.dweight = dweight.data_ptr();
  if (bias) params.dbias = dbias.data_ptr();
  if (state) params.dstate = tk::strided(tk::unchecked_view(dstate));
  run(params, tk::cpu::conv_kernels().backward);
  return {dx, dweight, dbias, dstate};
}

Tensor conv_steps(Tensor x, Tensor weight, Optional bias, Tensor state, bool silu) {
  const Call call(x, weight, bias, state, {}, silu);
  const Tensor y = call.empty_like_x();
  run(forward_params(call, y, state), tk::cpu::conv_kernels().forward);
  return y;
}

}  // namespace

TK_DEFINE_MORE(TK_LIBRARY, m) {
  m.def(kForwardSchema);
  m.def(kBackwardSchema);
  m.def(kStepsSchema);
}

TK_IMPLEMENT(TK_LIBRARY, CPU, m) {
  m.impl("conv_forward", TORCH_BOX(&conv_forward));
  m.impl("conv_backward", TORCH_BOX(&conv_backward));
  m.impl("conv_steps", TORCH_BOX(&conv_steps));
}
