// Tensors of the CUDA operators.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>

#include "bindings/tensors.h"
#include "common/options.h"
#include "cuda/common/launch_args.h"

namespace tk::cuda {

// Returns x, or a contiguous copy if the kernels need one.
inline Tensor as_rows(const Tensor& x) {
  return has_adjacent_columns(unchecked_view(x)) ? x : checked_contiguous(x);
}

inline LaunchArgs launch_args(const LayoutParams& layout, const Options& options, void* stream) {
  return {layout.varlen, layout.max_seqlen_q, layout.max_seqlen_k,
          static_cast<const int64_t*>(options.seed.data), stream};
}

// May be freed while kernels still use it: torch's allocator reuses it in stream order.
inline Tensor workspace(size_t bytes, const Device& device) {
  const std::array<int64_t, 1> size{static_cast<int64_t>(bytes)};
  return empty(size, ScalarType::Byte, device);
}

}  // namespace tk::cuda
