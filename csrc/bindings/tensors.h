// Tensors of torch as views, and allocation of results, on any device. Only this directory includes
// torch headers, and only the stable ABI, so that one build serves every later torch release.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <span>

#include "common/tensor_view.h"

namespace tk {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

struct Device {
  int32_t type;
  int32_t index;  // 0 for a CPU

  bool is_cpu() const;
};

Device device_of(const Tensor& x);

// Valid as long as x.
View unchecked_view(const Tensor& x);

// The same of an argument. Raises an error for another device, and if the memory of x is freed or
// misaligned.
View view(const Tensor& x, const Device& device);
View view(const Optional& x, const Device& device);

// x, or a contiguous copy. Raises an error if the memory of x is freed or misaligned.
Tensor checked_contiguous(const Tensor& x);

// Float32, or float64 for float64 inputs.
ScalarType statistics_dtype(const Tensor& q);

// Uninitialised contiguous tensor; on a CPU filled with NaN after want_poison(true).
Tensor empty(std::span<const int64_t> sizes, ScalarType dtype, const Device& device);

// Uninitialised (B, H, L, width), with the memory order of x's heads and sequence; without the last
// dimension, and with width 1, if x has three.
Tensor empty_like_layout(const Tensor& x, int64_t width, const Device& device);

}  // namespace tk
