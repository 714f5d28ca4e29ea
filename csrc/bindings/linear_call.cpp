#include "bindings/linear_call.h"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <initializer_list>
#include <utility>

namespace tk {

namespace {

DType dtype_of(const Tensor& x) {
  const Element element = unchecked_view(x).element;
  STD_TORCH_CHECK(element <= Element::kFloat64, "q must be float16, bfloat16, float32 or float64");
  return static_cast<DType>(element);
}

// Checks the tensors of a call.
struct Reader {
  const Device& device;
  ScalarType inputs, statistics;

  explicit Reader(const LinearCall& call)
      : device(call.device),
        inputs(call.arguments.q.scalar_type()),
        statistics(statistics_dtype(call.arguments.q)) {}

  ScalarType dtype(Elements elements) const {
    switch (elements) {
      case Elements::kStatistics:
        return statistics;
      case Elements::kInt64:
        return ScalarType::Long;
      case Elements::kBool:
        return ScalarType::Bool;
      case Elements::kIndex:
        return ScalarType::Int;
      default:
        return inputs;
    }
  }

  // The view of x, or of a tensor that replaces x if kernels need a contiguous one.
  View operator()(Tensor& x, const char* name, Elements elements, Memory memory,
                  std::initializer_list<int64_t> sizes) const {
    STD_TORCH_CHECK(unchecked_view(x).has_size(sizes), name, " has the wrong shape");
    STD_TORCH_CHECK(x.scalar_type() == dtype(elements), name, " has the wrong dtype");
    if (memory == Memory::kContiguous) x = checked_contiguous(x);
    return view(x, device);
  }

  View operator()(Optional& x, const char* name, Elements elements, Memory memory,
                  std::initializer_list<int64_t> sizes) const {
    return x ? (*this)(*x, name, elements, memory, sizes) : View{};
  }
};

Tensor no_elements(ScalarType dtype, const Device& device) {
  return empty(std::array<int64_t, 1>{0}, dtype, device);
}

void check_options(const LinearArguments& a, const LinearProblem& p) {
  STD_TORCH_CHECK(p.H_kv > 0 && p.H_q > 0 && p.H_q % p.H_kv == 0 && p.D > 0 && p.D_v > 0,
                  "the heads of q must be a positive multiple of those of k, and widths positive");
  STD_TORCH_CHECK(!a.causal || p.M == p.N, "causal linear attention needs as many queries as keys");
  STD_TORCH_CHECK(a.feature_map >= 0 && a.feature_map <= 2, "feature_map must be 0, 1 or 2");
  STD_TORCH_CHECK(a.eps > 0, "eps must be greater than 0");
  STD_TORCH_CHECK(!a.cu_seqlens || (a.q.size(0) == 1 && p.M == p.N && a.cu_seqlens->dim() == 1 &&
                                    a.cu_seqlens->size(0) > 0 && !a.key_start && !a.key_end),
                  "packed sequences have one batch entry and no key range");
  STD_TORCH_CHECK(a.causal || !a.log_decay, "log_decay requires causal");
  STD_TORCH_CHECK(a.S.has_value() == a.z.has_value(), "S and z must be given together");
}

}  // namespace

std::string linear_forward_schema() {
  return schema("linear_forward(Tensor q, Tensor k, Tensor v", kLinearFields,
                ") -> (Tensor o, Tensor normalizer, Tensor S_end, Tensor z_end)");
}

std::string linear_backward_schema() {
  return schema(
      "linear_backward(Tensor d_o, Tensor? dS_end, Tensor? dz_end, Tensor o, Tensor normalizer, "
      "Tensor q, Tensor k, Tensor v",
      kLinearFields,
      ", bool log_decay_needs_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, "
      "Tensor dS, Tensor dz)");
}

std::string linear_steps_schema() {
  return schema("linear_steps(Tensor q, Tensor k, Tensor v", kLinearStepFields, ") -> Tensor o");
}

LinearCall::LinearCall(LinearArguments given)
    : arguments(std::move(given)), device(device_of(arguments.q)) {
  LinearArguments& a = arguments;
  LinearProblem& p = problem;
  STD_TORCH_CHECK(a.q.dim() == 4 && a.k.dim() == 4 && a.v.dim() == 4,
                  "q, k and v must have four dimensions");
  p.H_q = a.q.size(1), p.H_kv = a.k.size(1), p.M = a.q.size(2), p.N = a.k.size(2);
  p.D = a.q.size(3), p.D_v = a.v.size(3), p.dtype = dtype_of(a.q);
  const int64_t entries = a.q.size(0), H_kv = p.H_kv, N = p.N, D = p.D, D_v = p.D_v;
  const Reader read(*this);
  p.q = strided(view(a.q, device));
  p.k = strided(read(a.k, "k", Elements::kInputs, Memory::kStrided, {entries, H_kv, N, D}));
  p.v = strided(read(a.v, "v", Elements::kInputs, Memory::kStrided, {entries, H_kv, N, D_v}));
  check_options(a, p);
  const int64_t B = p.B = a.cu_seqlens ? a.cu_seqlens->size(0) - 1 : entries;
  p.rows = a.cu_seqlens ? N : 0;
#define TK_SIZES(...) {__VA_ARGS__}
#define TK_NUMBER(type, kind, name, ...) p.name = static_cast<decltype(p.name)>(a.name);
#define TK_TENSOR(name, elements, memory, shape, ...) \
  const View name = read(a.name, #name, Elements::elements, Memory::memory, TK_SIZES shape);
  TK_LINEAR_FIELDS(TK_NUMBER, TK_TENSOR)
#undef TK_SIZES
#undef TK_NUMBER
#undef TK_TENSOR
  if (log_decay) p.log_decay = strided(log_decay);
  p.initial = {S.data, z.data};
  p.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data);
  p.key_start = static_cast<const int64_t*>(key_start.data);
  p.key_end = static_cast<const int64_t*>(key_end.data);
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
  const Reader read(call);
  const auto rows = [&](Tensor& x, const char* name) {
    return strided(read(x, name, Elements::kInputs, Memory::kStrided, {batch, p.H_q, p.M, p.D_v}));
  };
  const auto sums = [&](auto& x, const char* name, std::initializer_list<int64_t> sizes) {
    return read(x, name, Elements::kStatistics, Memory::kContiguous, sizes).data;
  };
  params.d_o = rows(saved.d_o, "d_o"), params.o = rows(saved.o, "o");
  if (p.normalize) {
    params.normalizer = sums(saved.normalizer, "normalizer", {batch, p.H_q, p.M});
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
  params.d_end = {sums(saved.dS_end, "dS_end", S_sizes), sums(saved.dz_end, "dz_end", z_sizes)};
  params.dq = strided(unchecked_view(dq));
  params.dk = strided(unchecked_view(dk));
  params.dv = strided(unchecked_view(dv));
  // Not one tensor: outputs of an operator do not share memory.
  for (Tensor* x : {&dlog_decay, &dS, &dz}) *x = no_elements(a.q.scalar_type(), device);
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

LinearArguments with_own_state(LinearArguments given) {
  STD_TORCH_CHECK(given.S->is_contiguous() && given.z->is_contiguous(),
                  "S and z must be contiguous");
  return given;
}

LinearStepsPass::LinearStepsPass(const LinearCall& call)
    : o(empty_like_layout(call.arguments.q, call.problem.D_v, call.device)) {
  static_cast<LinearProblem&>(params) = call.problem;
  params.o = strided(unchecked_view(o));
  params.end = call.problem.initial;
}

}  // namespace tk
