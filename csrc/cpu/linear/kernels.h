// Kernel table of linear attention for one instruction set, like attention/kernels.h.
#pragma once

#include <cstddef>

#include "common/linear_params.h"
#include "cpu/engine/workers.h"

namespace tk::cpu {

struct LinearKernels {
  // Workspace sizes are in bytes, 64-byte aligned: a state per segment of a head, and constant
  // scratch per worker.
  size_t (*forward_workspace)(const LinearForwardParams& params, const Workers& workers);
  void (*forward)(const LinearForwardParams& params, const Workers& workers, void* workspace);
  size_t (*backward_workspace)(const LinearBackwardParams& params, const Workers& workers);
  void (*backward)(const LinearBackwardParams& params, const Workers& workers, void* workspace);
  // A few tokens, one after another; `initial` and `end` are the same memory.
  size_t (*steps_workspace)(const LinearForwardParams& params, const Workers& workers);
  void (*steps)(const LinearForwardParams& params, const Workers& workers, void* workspace);
};

namespace portable {
extern const LinearKernels kLinearKernels;
}
namespace avx2 {
extern const LinearKernels kLinearKernels;
}
namespace avx512 {
extern const LinearKernels kLinearKernels;
}
namespace amx {
extern const LinearKernels kLinearKernels;
}

}  // namespace tk::cpu
