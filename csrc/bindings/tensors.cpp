#include "bindings/tensors.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "common/workspace.h"

namespace tk {

namespace {

Element element_of(const Tensor& x) {
  using enum ScalarType;
  constexpr ScalarType kTypes[] = {Half, BFloat16, Float, Double, Bool, Byte, Int, Long, Char};
  const auto* const found = std::find(std::begin(kTypes), std::end(kTypes), x.scalar_type());
  return static_cast<Element>(found - kTypes);
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

}  // namespace

bool Device::is_cpu() const { return type == aoti_torch_device_type_cpu(); }

Device device_of(const Tensor& x) {
  Device device{};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device.type));
  if (!device.is_cpu()) device.index = x.get_device_index();
  return device;
}

Tensor checked_contiguous(const Tensor& x) {
  check_memory(x);
  return torch::stable::contiguous(x);
}

View unchecked_view(const Tensor& x) {
  return {x.data_ptr(), element_of(x), static_cast<int32_t>(x.dim()), x.sizes().data(),
          x.strides().data()};
}

View view(const Tensor& x, const Device& device) {
  const Device own = device_of(x);
  STD_TORCH_CHECK(own.type == device.type && own.index == device.index,
                  "every tensor must be on the device of q");
  check_memory(x);
  return unchecked_view(x);
}

View view(const Optional& x, const Device& device) { return x ? view(*x, device) : View{}; }

ScalarType statistics_dtype(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor empty(std::span<const int64_t> sizes, ScalarType dtype, const Device& device) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, device);
}

Tensor empty_like_layout(const Tensor& x, int64_t width, const Device& device) {
  const std::array<int64_t, 4> sizes{x.size(0), x.size(1), x.size(2), width};
  return empty_strided(std::span(sizes).first(static_cast<size_t>(x.dim())),
                       output_strides(unchecked_view(x), width), x.scalar_type(), device);
}

}  // namespace tk
