// Selects the kernels of linear attention for a problem.
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "cuda/common/tile_config.h"
#include "cuda/linear/dispatch.h"
#include "cuda/linear/kernels.h"
#include "cuda/linear/segments.cuh"
#include "cuda/platform/element.h"

namespace tk::cuda {

namespace {

template <typename Element, size_t... kIndex>
const LinearKernels& kernels_of(int64_t columns, std::index_sequence<kIndex...>) {
  const LinearKernels* found = nullptr;
  const auto consider = [&]<int kWidth>() {
    if (!found && columns <= kWidth) found = &linear_kernels<Element, kWidth>();
  };
  (consider.template operator()<kLinearWidths[kIndex]>(), ...);
  if (!found) throw std::runtime_error("rows are wider than the widest tile, 256");
  return *found;
}

const LinearKernels& kernels_for(const LinearProblem& p) {
  // Indices must fit an int.
  if (p.M > kMaxIndex || p.N > kMaxIndex) {
    throw std::runtime_error("the problem has more than 2^30 queries or keys");
  }
  constexpr auto kEach = std::make_index_sequence<std::size(kLinearWidths)>();
  const int64_t columns = p.D > p.D_v ? p.D : p.D_v;
  switch (p.dtype) {
    case DType::kFloat16:
      return kernels_of<Half>(columns, kEach);
    case DType::kBFloat16:
      return kernels_of<BFloat16>(columns, kEach);
    case DType::kFloat32:
      return kernels_of<float>(columns, kEach);
    case DType::kFloat64:
      break;
  }
  throw std::runtime_error("float64: these kernels compute in float32");
}

}  // namespace

size_t linear_workspace(const LinearForwardParams& params) {
  return kernels_for(params).forward_workspace(params);
}

size_t linear_workspace(const LinearBackwardParams& params) {
  return kernels_for(params).backward_workspace(params);
}

void linear_forward(const LinearForwardParams& params, void* workspace, void* stream) {
  kernels_for(params).forward(params, workspace, stream);
}

void linear_backward(const LinearBackwardParams& params, void* workspace, void* stream) {
  kernels_for(params).backward(params, workspace, stream);
}

void linear_steps(const LinearForwardParams& params, void* stream) {
  kernels_for(params).steps(params, stream);
}

}  // namespace tk::cuda
