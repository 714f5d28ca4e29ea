// Element types of the kernels, as plain bits. The half types of CUDA need headers that a host
// without a CUDA toolkit does not have. Conversions are in sm80_ptx.h.
#pragma once

#include <cstdint>

namespace tk::cuda {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

}  // namespace tk::cuda
