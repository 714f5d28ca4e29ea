// The element types of the kernels. They hold bits only: the compiler's own half types need headers
// that a host without a CUDA toolkit lacks. Conversions are in sm80/ptx.h.
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
