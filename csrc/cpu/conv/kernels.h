// Kernel table of the depthwise causal convolution for one instruction set, like
// attention/kernels.h.
#pragma once

#include <cstddef>

#include "common/conv_params.h"
#include "cpu/engine/workers.h"

namespace tk::cpu {

struct ConvKernels {
  // In bytes, of either pass: a few tiles per worker, and sums of the gradients of the weights.
  size_t (*workspace)(const ConvProblem& params, const Workers& workers);
  void (*forward)(const ConvForwardParams& params, const Workers& workers, void* workspace);
  void (*backward)(const ConvBackwardParams& params, const Workers& workers, void* workspace);
};

namespace portable {
extern const ConvKernels kConvKernels;
}
namespace avx2 {
extern const ConvKernels kConvKernels;
}
namespace avx512 {
extern const ConvKernels kConvKernels;
}

}  // namespace tk::cpu
