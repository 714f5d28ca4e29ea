#include "bindings/operator_call.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "common/workspace.h"

namespace tk {

namespace {

void check(const Reason& reason) { STD_TORCH_CHECK(reason.empty(), reason); }

Element element_of(const Tensor& x) {
  using enum ScalarType;
  constexpr ScalarType kTypes[] = {Half, BFloat16, Float, Double, Bool, Byte, Int, Long};
  const auto* const found = std::find(std::begin(kTypes), std::end(kTypes), x.scalar_type());
  return static_cast<Element>(found - kTypes);
}

Device device_of(const Tensor& x) {
  Device device{};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device.type));
  if (!device.is_cpu()) device.index = x.get_device_index();
  return device;
}

// Raises an error if the storage does not hold all elements, as after
// `x.untyped_storage().resize_(0)`, by which sharded training frees memory.
void check_memory(const Tensor& x) {
  if (x.numel() == 0) return;
  int64_t last = x.storage_offset(), bytes;
  for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &bytes));
  STD_TORCH_CHECK(bytes / static_cast<int64_t>(x.element_size()) > last,
                  "the storage of a tensor argument is smaller than the tensor: it was freed");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % x.element_size() == 0,
                  "the memory of a tensor argument is not aligned to its elements");
}

// Valid as long as x.
View unchecked_view(const Tensor& x) {
  return {x.data_ptr(), element_of(x), static_cast<int32_t>(x.dim()), x.sizes().data(),
          x.strides().data()};
}

// The same of an argument. Raises an error for another device and as check_memory does.
View view(const Tensor& x, const Device& device) {
  const Device own = device_of(x);
  STD_TORCH_CHECK(own.type == device.type && own.index == device.index,
                  "every tensor must be on the device of q");
  check_memory(x);
  return unchecked_view(x);
}

View view(const Optional& x, const Device& device) { return x ? view(*x, device) : View{}; }

// The same of a tensor that replaces x if kernels need a contiguous one.
View read(Optional& x, const char* name, Elements elements, Memory memory, const Device& device) {
  if (!x) return {};
  STD_TORCH_CHECK(elements != Elements::kIndex || x->scalar_type() == ScalarType::Int, name,
                  " must be int32");
  if (memory == Memory::kContiguous) x = checked_contiguous(*x);
  return view(*x, device);
}

ScalarType statistics_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls torch's C function directly: an allocation through the dispatcher takes three times as
// long.
Tensor empty_strided(std::span<const int64_t> sizes, const std::optional<Strides>& strides,
                     ScalarType dtype, const Device& device) {
  STD_TORCH_CHECK(strides, "cannot allocate memory for a result of 2^63 elements or more");
  AtenTensorHandle handle;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides->data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device.type,
      device.index, &handle);
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "cannot allocate memory for a result");
  const Tensor x(handle);
  if (device.is_cpu()) {
    int64_t bytes;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &bytes));
    expect_writes(x.data_ptr(), static_cast<size_t>(bytes));
    poison(x.data_ptr(), static_cast<size_t>(bytes));
  }
  return x;
}

// Uninitialised (B, H, L, width), with the memory order of x's heads and sequence.
Tensor empty_like_layout(const Tensor& x, int64_t width, const Device& device) {
  const std::array<int64_t, 4> sizes{x.size(0), x.size(1), x.size(2), width};
  return empty_strided(sizes, output_strides(unchecked_view(x), width), x.scalar_type(), device);
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

std::string schema(std::string text, const char* end) {
  for (const Field& field : kFields) text += std::string(", ") + field.kind + " " + field.name;
  return text + end;
}

}  // namespace

std::string forward_schema() {
  return schema("attention_forward(Tensor q, Tensor k, Tensor v",
                ") -> (Tensor o, Tensor lse, Tensor block_mask)");
}

std::string backward_schema() {
#define TK_OPTION(name) ", bool " #name "_needs_grad"
#define TK_GRADIENT(name) ", Tensor d" #name
  return schema(
      "attention_backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, "
      "Tensor lse, Tensor? block_mask",
      TK_DIFFERENTIABLE(TK_OPTION) ", bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv"
      TK_DIFFERENTIABLE(TK_GRADIENT) ")");
#undef TK_OPTION
#undef TK_GRADIENT
}

bool Device::is_cpu() const { return type == aoti_torch_device_type_cpu(); }

Tensor checked_contiguous(const Tensor& x) {
  check_memory(x);
  return torch::stable::contiguous(x);
}

Tensor empty(std::span<const int64_t> sizes, ScalarType dtype, const Device& device) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, device);
}

std::vector<Optional> Arguments::tensors() const {
#define TK_TENSOR(name, elements, memory, shape, layouts) , name
  return {q, k, v TK_FIELDS(TK_NO_FIELD, TK_TENSOR)};
#undef TK_TENSOR
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
      lse(empty(std::array<int64_t, 3>{call.problem.B, call.problem.H_q, call.problem.M},
                statistics_dtype(q), call.device)),
      block_mask(empty_block_mask(call)),
      params{call.problem, {}, nullptr} {
  check(set_outputs(params, call.options, unchecked_view(o), unchecked_view(lse),
                    unchecked_view(block_mask)));
}

BackwardPass::BackwardPass(const OperatorCall& call, SavedTensors given, const Tensor& q,
                           const Tensor& k, const Tensor& v, const Wanted& wanted)
    : saved(std::move(given)),
      dq(empty_like_layout(q, call.problem.D, call.device)),
      dk(empty_like_layout(k, call.problem.D, call.device)),
      dv(empty_like_layout(v, call.problem.D_v, call.device)) {
  const Device& device = call.device;
  STD_TORCH_CHECK(call.layout.kind != LayoutKind::kCache, "caches have no backward pass");
  static_cast<Problem&>(params) = call.problem;
  saved.lse = checked_contiguous(saved.lse);
  if (saved.dlse) saved.dlse = checked_contiguous(*saved.dlse);
  BackwardTensors tensors{view(saved.d_o, device),
                          view(saved.dlse, device),
                          view(saved.o, device),
                          view(saved.lse, device),
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
