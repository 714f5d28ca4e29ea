// Architecture of the code that the driver has loaded; it selects the tiles.
#pragma once

#include "cuda/sm80/forward.cuh"

namespace tk::cuda {

// Returns 10 times the compute capability that the loaded code was compiled for, e.g. 800. It is
// the architecture of the loaded function, not of the device.
template <typename Element, int kWidth, Products kProducts = Products::kPlain>
int arch_of() {
  return TK_LOADED_ARCH((forward_kernel<Element, kWidth, kProducts>));
}

}  // namespace tk::cuda
