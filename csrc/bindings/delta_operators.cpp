// The operators of the gated delta rule: schemas, checks of the arguments, and their CPU
// implementations. Python derives the schemas from transformer_kernels/linear/delta/types.py; a
// test compares both.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/namespace.h"
#include "bindings/tensors.h"
#include "cpu/driver/linear.h"
#include "cpu/driver/varlen.h"

namespace {

using tk::Optional;
using tk::ScalarType;
using tk::strided;
using tk::Tensor;
using tk::View;

#define TK_DELTA_INPUTS "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, "
#define TK_DELTA_OPTIONS "Tensor? S, Tensor? cu_seqlens, float scale, bool l2norm"

// Arguments of a call, checked; copied where kernels need contiguous tensors.
struct DeltaCall {
  Tensor q, k, v, log_decay, beta;
  Optional S, cu_seqlens;
  double scale;
  bool l2norm;
  ScalarType inputs{}, real{};
  tk::Device device{};
  tk::DeltaProblem problem{};
  std::vector<int32_t> starts{};

  View read(const Tensor& x, const char* name, ScalarType dtype,
            std::initializer_list<int64_t> sizes) const {
    STD_TORCH_CHECK(tk::unchecked_view(x).has_size(sizes), name, " has the wrong shape");
    STD_TORCH_CHECK(x.scalar_type() == dtype, name, " has the wrong dtype");
    return tk::view(x, device);
  }

  // Data of an optional contiguous state.
  void* read_state(Optional& x, const char* name) const {
    if (!x) return nullptr;
    x = tk::checked_contiguous(*x);
    return read(*x, name, real, {problem.B, problem.H_v, problem.D, problem.D_v}).data;
  }

  void check();
  void read_starts();
  Tensor new_state() const {
    const tk::DeltaProblem& p = problem;
    return tk::empty(std::array<int64_t, 4>{p.B, p.H_v, p.D, p.D_v}, real, device);
  }
};

void DeltaCall::check() {
  tk::DeltaProblem& p = problem;
  device = tk::device_of(q);
  STD_TORCH_CHECK(device.is_cpu(), "the tensors must be on the CPU");
  STD_TORCH_CHECK(q.dim() == 4 && v.dim() == 4 && log_decay.dim() == 4,
                  "q, v and log_decay must have four dimensions");
  const tk::Element element = tk::unchecked_view(q).element;
  STD_TORCH_CHECK(element <= tk::Element::kFloat64,
                  "q must be float16, bfloat16, float32 or float64");
  p.dtype = static_cast<tk::DType>(element);
  inputs = q.scalar_type(), real = tk::statistics_dtype(q);
  const int64_t entries = q.size(0), T = q.size(2);
  p.H_k = q.size(1), p.H_v = v.size(1), p.M = p.N = T, p.D = q.size(3), p.D_v = v.size(3);
  p.gates = log_decay.size(3), p.scale = scale, p.l2norm = l2norm;
  STD_TORCH_CHECK(p.H_k > 0 && p.H_v > 0 && p.H_v % p.H_k == 0 && p.D > 0 && p.D_v > 0,
                  "the heads of v must be a positive multiple of those of q, and widths positive");
  STD_TORCH_CHECK(p.gates == 1 || p.gates == p.D, "log_decay must have 1 or D gates");
  p.q = strided(tk::view(q, device));
  p.k = strided(read(k, "k", inputs, {entries, p.H_k, T, p.D}));
  p.v = strided(read(v, "v", inputs, {entries, p.H_v, T, p.D_v}));
  p.log_decay = strided(read(log_decay, "log_decay", real, {entries, p.H_v, T, p.gates}));
  p.beta = strided(read(beta, "beta", real, {entries, p.H_v, T}));
  p.B = entries;
  if (cu_seqlens) read_starts();
  p.initial = read_state(S, "S");
}

// Checks the values of cu_seqlens, and copies them: another thread may write the tensor later.
void DeltaCall::read_starts() {
  tk::DeltaProblem& p = problem;
  STD_TORCH_CHECK(p.B == 1 && cu_seqlens->dim() == 1 && cu_seqlens->size(0) > 0,
                  "packed sequences have one batch entry and a vector of offsets");
  cu_seqlens = tk::checked_contiguous(*cu_seqlens);
  p.B = cu_seqlens->size(0) - 1, p.rows = p.N;
  const View offsets = read(*cu_seqlens, "cu_seqlens", ScalarType::Int, {p.B + 1});
  const auto* const data = static_cast<const int32_t*>(offsets.data);
  starts.assign(data, data + p.B + 1);
  STD_TORCH_CHECK(tk::are_valid_offsets(starts.data(), p.B, p.rows),
                  "cu_seqlens must start at 0, not decrease, and end within the rows");
  p.cu_seqlens = starts.data();
}

template <typename Params>
Params params_of(const DeltaCall& call) {
  Params params{};
  static_cast<tk::DeltaProblem&>(params) = call.problem;
  return params;
}

std::tuple<Tensor, Tensor> delta_forward(Tensor q, Tensor k, Tensor v, Tensor log_decay,
                                         Tensor beta, Optional S, Optional cu_seqlens, double scale,
                                         bool l2norm) {
  DeltaCall call{q, k, v, log_decay, beta, std::move(S), std::move(cu_seqlens), scale, l2norm};
  call.check();
  auto params = params_of<tk::DeltaForwardParams>(call);
  Tensor o = tk::empty_like_layout(v, call.problem.D_v, call.device), end = call.new_state();
  params.o = strided(tk::unchecked_view(o));
  params.end = end.data_ptr();
  tk::run_delta_forward(params);
  return {o, end};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> delta_backward(
    Tensor d_o, Optional dS_end, Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta,
    Optional S, Optional cu_seqlens, double scale, bool l2norm) {
  DeltaCall call{q, k, v, log_decay, beta, std::move(S), std::move(cu_seqlens), scale, l2norm};
  call.check();
  const tk::DeltaProblem& p = call.problem;
  auto params = params_of<tk::DeltaBackwardParams>(call);
  const int64_t entries = q.size(0);
  params.d_o = strided(call.read(d_o, "d_o", call.inputs, {entries, p.H_v, p.N, p.D_v}));
  params.d_end = call.read_state(dS_end, "dS_end");
  Tensor dq = tk::empty_like_layout(q, p.D, call.device),
         dk = tk::empty_like_layout(k, p.D, call.device),
         dv = tk::empty_like_layout(v, p.D_v, call.device);
  Tensor dlog_decay = tk::empty(std::array<int64_t, 4>{entries, p.H_v, p.N, p.gates}, call.real,
                                call.device),
         dbeta = tk::empty(std::array<int64_t, 3>{entries, p.H_v, p.N}, call.real, call.device);
  Tensor dS =
      p.initial ? call.new_state() : tk::empty(std::array<int64_t, 1>{0}, call.inputs, call.device);
  params.dq = strided(tk::unchecked_view(dq)), params.dk = strided(tk::unchecked_view(dk));
  params.dv = strided(tk::unchecked_view(dv));
  params.dlog_decay = dlog_decay.data_ptr(), params.dbeta = dbeta.data_ptr();
  params.d_initial = p.initial ? dS.data_ptr() : nullptr;
  tk::run_delta_backward(params);
  return {dq, dk, dv, dlog_decay, dbeta, dS};
}

Tensor delta_steps(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor S,
                   double scale, bool l2norm) {
  STD_TORCH_CHECK(S.is_contiguous(), "S must be contiguous");
  DeltaCall call{q, k, v, log_decay, beta, S, std::nullopt, scale, l2norm};
  call.check();
  auto params = params_of<tk::DeltaForwardParams>(call);
  Tensor o = tk::empty_like_layout(v, call.problem.D_v, call.device);
  params.o = strided(tk::unchecked_view(o));
  params.end = call.S->data_ptr();
  tk::run_delta_steps(params);
  return o;
}

}  // namespace

TK_DEFINE_MORE(TK_LIBRARY, m) {
  m.def("delta_forward(" TK_DELTA_INPUTS TK_DELTA_OPTIONS ") -> (Tensor o, Tensor S_end)");
  m.def("delta_backward(Tensor d_o, Tensor? dS_end, " TK_DELTA_INPUTS TK_DELTA_OPTIONS
        ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, Tensor dbeta, Tensor dS)");
  m.def("delta_steps(" TK_DELTA_INPUTS "Tensor(a!) S, float scale, bool l2norm) -> Tensor o");
}

TK_IMPLEMENT(TK_LIBRARY, CPU, m) {
  m.impl("delta_forward", TORCH_BOX(&delta_forward));
  m.impl("delta_backward", TORCH_BOX(&delta_backward));
  m.impl("delta_steps", TORCH_BOX(&delta_steps));
}
