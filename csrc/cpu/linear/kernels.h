// Kernel table of linear attention for one instruction set, like attention/kernels.h.
#pragma once

#include <cstddef>

#include "common/linear_params.h"
#include "common/macros.h"
#include "cpu/engine/workers.h"

namespace tk::cpu {

// The dtype whose engine multiplies. The gradient of a decay sums terms that cancel: products of
// operands rounded to bfloat16 would not do. Engines read rows of any dtype.
TK_INLINE DType products_of(const LinearForwardParams& p) { return p.dtype; }
TK_INLINE DType products_of(const LinearBackwardParams& p) {
  return p.dlog_decay && p.dtype == DType::kBFloat16 ? DType::kFloat16 : p.dtype;
}

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
// For products in bfloat16 only.
namespace avx512_bf16 {
extern const LinearKernels kLinearKernels;
}
namespace amx {
extern const LinearKernels kLinearKernels;
}

}  // namespace tk::cpu
