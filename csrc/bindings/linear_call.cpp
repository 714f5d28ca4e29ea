#include "bindings/linear_call.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <utility>

namespace tk {

namespace {

constexpr const char* kInputs =
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? S, Tensor? z, Tensor? cu_seqlens, "
    "Tensor? key_start, Tensor? key_end, int feature_map, bool causal, bool normalize, float eps";

DType dtype_of(const Tensor& x) {
  const Element element = unchecked_view(x).element;
  STD_TORCH_CHECK(element <= Element::kFloat64, "q must be float16, bfloat16, float32 or float64");
  return static_cast<DType>(element);
}

void check(const Tensor& x, const char* name, std::initializer_list<int64_t> sizes,
           ScalarType dtype) {
  STD_TORCH_CHECK(x.dim() == static_cast<int64_t>(sizes.size()) &&
                      std::equal(sizes.begin(), sizes.end(), x.sizes().begin()),
                  name, " has the wrong shape");
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " has the wrong dtype");
}

// Pointer to a contiguous tensor, which replaces x; null without a tensor.
void* contiguous(Optional& x, const char* name, std::initializer_list<int64_t> sizes,
                 ScalarType dtype, const Device& device) {
  if (!x) return nullptr;
  check(*x, name, sizes, dtype);
  x = checked_contiguous(*x);
  return view(*x, device).data;
}

void* contiguous(Tensor& x, const char* name, std::initializer_list<int64_t> sizes,
                 ScalarType dtype, const Device& device) {
  check(x, name, sizes, dtype);
  x = checked_contiguous(x);
  return view(x, device).data;
}

// (B, H_kv, N) as (B, H_kv, N, 1).
Strided strided_decay(const View& x) {
  Strided s{x.data, {}};
  for (int64_t d = 0; d < 3; ++d) s.stride[d] = x.is_empty() || x.size[d] == 1 ? 0 : x.stride[d];
  return s;
}

Tensor no_elements(ScalarType dtype, const Device& device) {
  return empty(std::array<int64_t, 1>{0}, dtype, device);
}

}  // namespace

std::string linear_forward_schema() {
  return std::string("linear_forward(") + kInputs +
         ") -> (Tensor o, Tensor normalizer, Tensor S_end, Tensor z_end)";
}

std::string linear_backward_schema() {
  return std::string(
             "linear_backward(Tensor d_o, Tensor? dS_end, Tensor? dz_end, Tensor o, Tensor "
             "normalizer, ") +
         kInputs +
         ", bool log_decay_needs_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, "
         "Tensor dS, Tensor dz)";
}

std::string linear_steps_schema() {
  return "linear_steps(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor(a!) S, Tensor(b!) "
         "z, int feature_map, bool normalize, float eps) -> Tensor o";
}

LinearCall::LinearCall(LinearArguments given)
    : arguments(std::move(given)), device(device_of(arguments.q)) {
  LinearArguments& a = arguments;
  LinearProblem& p = problem;
  const Tensor &q = a.q, &k = a.k, &v = a.v;
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
                  "q, k and v must have four dimensions");
  p.H_q = q.size(1), p.H_kv = k.size(1), p.M = q.size(2), p.N = k.size(2);
  p.D = q.size(3), p.D_v = v.size(3), p.dtype = dtype_of(q);
  const int64_t batch = q.size(0);
  check(k, "k", {batch, p.H_kv, p.N, p.D}, q.scalar_type());
  check(v, "v", {batch, p.H_kv, p.N, p.D_v}, q.scalar_type());
  STD_TORCH_CHECK(p.H_kv > 0 && p.H_q > 0 && p.H_q % p.H_kv == 0 && p.D > 0 && p.D_v > 0,
                  "the heads of q must be a positive multiple of those of k, and widths positive");
  STD_TORCH_CHECK(!a.causal || p.M == p.N, "causal linear attention needs as many queries as keys");
  STD_TORCH_CHECK(a.feature_map >= 0 && a.feature_map <= 2, "feature_map must be 0, 1 or 2");
  STD_TORCH_CHECK(a.eps > 0, "eps must be greater than 0");
  p.feature_map = static_cast<FeatureMap>(a.feature_map);
  p.causal = a.causal, p.normalize = a.normalize, p.eps = a.eps;
  p.q = strided(view(q, device)), p.k = strided(view(k, device)), p.v = strided(view(v, device));
  p.B = batch;
  if (a.cu_seqlens) {
    STD_TORCH_CHECK(batch == 1 && p.M == p.N && a.cu_seqlens->dim() == 1 &&
                        a.cu_seqlens->size(0) > 0 && !a.key_start && !a.key_end,
                    "packed sequences have one batch entry and no key range");
    p.B = a.cu_seqlens->size(0) - 1;
    p.rows = p.N;
    p.cu_seqlens = static_cast<const int32_t*>(
        contiguous(a.cu_seqlens, "cu_seqlens", {p.B + 1}, ScalarType::Int, device));
  }
  const ScalarType real = statistics_dtype(q);
  if (a.log_decay) {
    STD_TORCH_CHECK(a.causal, "log_decay requires causal");
    check(*a.log_decay, "log_decay", {batch, p.H_kv, p.N}, real);
    p.log_decay = strided_decay(view(*a.log_decay, device));
  }
  STD_TORCH_CHECK(a.S.has_value() == a.z.has_value(), "S and z must be given together");
  p.initial.S = contiguous(a.S, "S", {p.B, p.H_kv, p.D, p.D_v}, real, device);
  p.initial.z = contiguous(a.z, "z", {p.B, p.H_kv, p.D}, real, device);
  p.key_start = static_cast<const int64_t*>(
      contiguous(a.key_start, "key_start", {p.B}, ScalarType::Long, device));
  p.key_end = static_cast<const int64_t*>(
      contiguous(a.key_end, "key_end", {p.B}, ScalarType::Long, device));
}

LinearForwardPass::LinearForwardPass(const LinearCall& call)
    : o(empty_like_layout(call.arguments.q, call.problem.D_v, call.device)) {
  const LinearProblem& p = call.problem;
  const ScalarType real = statistics_dtype(call.arguments.q);
  static_cast<LinearProblem&>(params) = p;
  const std::array<int64_t, 3> rows{call.arguments.q.size(0), p.H_q, p.M};
  normalizer = p.normalize ? empty(rows, real, call.device) : no_elements(real, call.device);
  S = empty(std::array<int64_t, 4>{p.B, p.H_kv, p.D, p.D_v}, real, call.device);
  z = empty(std::array<int64_t, 3>{p.B, p.H_kv, p.D}, real, call.device);
  params.o = strided(unchecked_view(o));
  params.normalizer = normalizer.data_ptr();
  params.end = {S.data_ptr(), z.data_ptr()};
}

LinearBackwardPass::LinearBackwardPass(const LinearCall& call, LinearSaved given,
                                       bool log_decay_needs_grad)
    : saved(std::move(given)),
      dq(empty_like_layout(call.arguments.q, call.problem.D, call.device)),
      dk(empty_like_layout(call.arguments.k, call.problem.D, call.device)),
      dv(empty_like_layout(call.arguments.v, call.problem.D_v, call.device)) {
  const LinearProblem& p = call.problem;
  const LinearArguments& a = call.arguments;
  const Device& device = call.device;
  const ScalarType real = statistics_dtype(a.q);
  const int64_t batch = a.q.size(0);
  static_cast<LinearProblem&>(params) = p;
  for (const auto& [name, x] : {std::pair{"d_o", &saved.d_o}, std::pair{"o", &saved.o}}) {
    check(*x, name, {batch, p.H_q, p.M, p.D_v}, a.q.scalar_type());
  }
  params.d_o = strided(view(saved.d_o, device)), params.o = strided(view(saved.o, device));
  if (p.normalize) {
    params.normalizer =
        contiguous(saved.normalizer, "normalizer", {batch, p.H_q, p.M}, real, device);
  }
  const auto S_sizes = {p.B, p.H_kv, p.D, p.D_v};
  const auto z_sizes = {p.B, p.H_kv, p.D};
  if (saved.dS_end || saved.dz_end) {
    // A missing one of the two is zero.
    if (!saved.dS_end) {
      saved.dS_end = torch::stable::new_zeros(*saved.dz_end, {S_sizes.begin(), S_sizes.size()});
    }
    if (!saved.dz_end) {
      saved.dz_end = torch::stable::new_zeros(*saved.dS_end, {z_sizes.begin(), z_sizes.size()});
    }
  }
  params.d_end = {contiguous(saved.dS_end, "dS_end", S_sizes, real, device),
                  contiguous(saved.dz_end, "dz_end", z_sizes, real, device)};
  params.dq = strided(unchecked_view(dq));
  params.dk = strided(unchecked_view(dk));
  params.dv = strided(unchecked_view(dv));
  dlog_decay = dS = dz = no_elements(a.q.scalar_type(), device);
  if (log_decay_needs_grad) {
    STD_TORCH_CHECK(a.log_decay, "log_decay_needs_grad requires log_decay");
    dlog_decay = empty(std::array<int64_t, 3>{batch, p.H_kv, p.N}, real, device);
    params.dlog_decay = dlog_decay.data_ptr();
  }
  if (p.initial) {
    dS = empty({S_sizes.begin(), S_sizes.size()}, real, device);
    dz = empty({z_sizes.begin(), z_sizes.size()}, real, device);
    params.d_initial = {dS.data_ptr(), dz.data_ptr()};
  }
}

LinearStepsPass::LinearStepsPass(const LinearCall& call)
    : o(empty_like_layout(call.arguments.q, call.problem.D_v, call.device)) {
  static_cast<LinearProblem&>(params) = call.problem;
  params.o = strided(unchecked_view(o));
  params.end = call.problem.initial;
}

}  // namespace tk
