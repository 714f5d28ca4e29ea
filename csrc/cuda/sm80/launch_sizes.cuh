// What the launches have in common.
#pragma once

#include <climits>
#include <stdexcept>

#include "forward.cuh"

namespace tk::cuda {

// Whose tiles the code has that is loaded: a function's own architecture tells it.
template <typename Element, int kWidth>
int arch_of() {
#ifdef TK_EMULATOR
  return kArch;
#else
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, forward_kernel<Element, kWidth>), "forward_kernel");
  return attributes.ptxVersion * 10;
#endif
}

inline int64_t ceil_of(int64_t x, int64_t y) { return (x + y - 1) / y; }

inline unsigned grid(int64_t programs) {
  if (programs > INT_MAX) throw std::runtime_error("more blocks than a grid of CUDA takes");
  return static_cast<unsigned>(programs);
}

}  // namespace tk::cuda
