#include "bindings/operator_call.h"

#include <array>
#include <utility>

namespace tk {

namespace {

void check(const Reason& reason) { STD_TORCH_CHECK(reason.empty(), reason); }

// The view of x, or of a tensor that replaces x if kernels need a contiguous one.
View read(Optional& x, const char* name, Elements elements, Memory memory, const Device& device) {
  if (!x) return {};
  STD_TORCH_CHECK(elements != Elements::kIndex || x->scalar_type() == ScalarType::Int, name,
                  " must be int32");
  if (memory == Memory::kContiguous) x = checked_contiguous(*x);
  return view(*x, device);
}

Tensor empty_block_mask(const OperatorCall& call) {
  const auto shape = block_mask_shape(call.problem, call.options);
  const std::array<int64_t, 1> none{0};
  return empty(shape ? std::span<const int64_t>(*shape) : none, ScalarType::Byte, call.device);
}

// Like the option; without elements if it is not wanted.
Tensor option_gradient(const Optional& option, bool is_wanted, const char* name, const Tensor& q,
                       const Device& device) {
  if (!is_wanted) return empty(std::array<int64_t, 1>{0}, q.scalar_type(), device);
  STD_TORCH_CHECK(option, name, "_needs_grad requires ", name);
  return empty({option->sizes().data(), option->sizes().size()}, option->scalar_type(), device);
}

}  // namespace

std::string schema(std::string text, std::span<const Field> fields, const char* end) {
  for (const Field& field : fields) text += std::string(", ") + field.kind + " " + field.name;
  return text + end;
}

std::string forward_schema() {
  return schema("attention_forward(Tensor q, Tensor k, Tensor v", kFields,
                ") -> (Tensor o, Tensor row_stats, Tensor block_mask)");
}

std::string backward_schema() {
#define TK_OPTION(name) ", bool " #name "_needs_grad"
#define TK_GRADIENT(name) ", Tensor d" #name
  return schema(
      "attention_backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, "
      "Tensor row_stats, Tensor? block_mask",
      kFields,
      TK_DIFFERENTIABLE(TK_OPTION) ", bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv"
      TK_DIFFERENTIABLE(TK_GRADIENT) ")");
#undef TK_OPTION
#undef TK_GRADIENT
}

std::string describe_schema() {
#define TK_OPTION(name) ", bool " #name "_needs_grad"
  return schema("attention_describe(Tensor q, Tensor k, Tensor v", kFields,
                TK_DIFFERENTIABLE(TK_OPTION) ") -> str");
#undef TK_OPTION
}

OperatorCall::OperatorCall(Arguments&& given)
    : arguments(std::move(given)), device(device_of(arguments.q)) {
  Arguments& a = arguments;
#define TK_NUMBER(type, kind, name, layouts) options.name = a.name;
#define TK_TENSOR(name, elements, memory, shape, layouts) \
  options.name = read(a.name, #name, Elements::elements, Memory::memory, device);
  TK_FIELDS(TK_NUMBER, TK_TENSOR)
#undef TK_NUMBER
#undef TK_TENSOR
  check(set_problem(problem, layout, {view(a.q, device), view(a.k, device), view(a.v, device)},
                    options));
}

ForwardPass::ForwardPass(const OperatorCall& call, const Tensor& q)
    : o(empty_like_layout(q, call.problem.D_v, call.device)),
      row_stats(empty(std::array<int64_t, 4>{call.layout.kind == LayoutKind::kCache ? 1 : 2,
                                             call.problem.B, call.problem.H_q, call.problem.M},
                      statistics_dtype(q), call.device)),
      block_mask(empty_block_mask(call)),
      params{call.problem, {}, nullptr} {
  check(set_outputs(params, call.options, unchecked_view(o), unchecked_view(row_stats),
                    unchecked_view(block_mask)));
}

BackwardPass::BackwardPass(const OperatorCall& call, SavedTensors given, const Tensor& q,
                           const Tensor& k, const Tensor& v, const Wanted& wanted)
    : saved(std::move(given)),
      dq(empty_like_layout(q, call.problem.D, call.device)),
      dk(empty_like_layout(k, call.problem.D, call.device)),
      dv(empty_like_layout(v, call.problem.D_v, call.device)) {
  const Device& device = call.device;
  STD_TORCH_CHECK(call.layout.kind != LayoutKind::kCache && !call.layout.has_packed_pages(),
                  "caches and pages have no backward pass");
  static_cast<Problem&>(params) = call.problem;
  saved.row_stats = checked_contiguous(saved.row_stats);
  if (saved.dlse) saved.dlse = checked_contiguous(*saved.dlse);
  BackwardTensors tensors{view(saved.d_o, device),
                          view(saved.dlse, device),
                          view(saved.o, device),
                          view(saved.row_stats, device),
                          view(saved.block_mask, device),
                          unchecked_view(dq),
                          unchecked_view(dk),
                          unchecked_view(dv)};
#define TK_OPTION(name)                                                          \
  d##name = option_gradient(call.arguments.name, wanted.name, #name, q, device); \
  if (wanted.name) tensors.d##name = unchecked_view(d##name);
  TK_DIFFERENTIABLE(TK_OPTION)
#undef TK_OPTION
  check(set_tensors(params, call.options, tensors));
}

}  // namespace tk
