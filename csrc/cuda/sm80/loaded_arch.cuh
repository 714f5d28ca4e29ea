// Whose tiles the code has that is loaded.
#pragma once

#include "cuda/sm80/forward.cuh"

namespace tk::cuda {

// A function's own architecture tells it.
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

}  // namespace tk::cuda
