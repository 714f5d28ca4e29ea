// Tensors of the CUDA operators.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>

#include "bindings/tensors.h"

namespace tk::cuda {

// Kernels need a unit last stride: returns x, or a contiguous copy.
inline Tensor as_rows(const Tensor& x) {
  const bool unit_stride = x.dim() != 4 || x.stride(3) == 1 || x.size(3) == 1;
  return unit_stride ? x : checked_contiguous(x);
}

// May be freed while kernels still use it: torch's allocator reuses it in stream order.
inline Tensor workspace(size_t bytes, const Device& device) {
  const std::array<int64_t, 1> size{static_cast<int64_t>(bytes)};
  return empty(size, ScalarType::Byte, device);
}

}  // namespace tk::cuda
