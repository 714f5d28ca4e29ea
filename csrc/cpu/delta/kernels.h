// Kernel table of the gated delta rule for one instruction set, like linear/kernels.h.
#pragma once

#include <cstddef>

#include "common/linear_params.h"
#include "cpu/engine/workers.h"

namespace tk::cpu {

struct DeltaKernels {
  // Workspace sizes are in bytes, 64-byte aligned: scratch per worker; of the backward pass, also
  // the states before the chunks of the longest sequence.
  size_t (*forward_workspace)(const DeltaForwardParams& params, const Workers& workers);
  void (*forward)(const DeltaForwardParams& params, const Workers& workers, void* workspace);
  size_t (*backward_workspace)(const DeltaBackwardParams& params, const Workers& workers);
  void (*backward)(const DeltaBackwardParams& params, const Workers& workers, void* workspace);
  // A few tokens, one after another; `initial` and `end` are the same memory.
  size_t (*steps_workspace)(const DeltaForwardParams& params, const Workers& workers);
  void (*steps)(const DeltaForwardParams& params, const Workers& workers, void* workspace);
};

namespace portable {
extern const DeltaKernels kDeltaKernels;
}
namespace avx2 {
extern const DeltaKernels kDeltaKernels;
}
namespace avx512 {
extern const DeltaKernels kDeltaKernels;
}
namespace amx {
extern const DeltaKernels kDeltaKernels;
}

}  // namespace tk::cpu
