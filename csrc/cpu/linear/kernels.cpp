// The kernels of linear attention for one instruction set. The build compiles this file once per
// instruction set, with TK_ISA as the name of the namespace.
#ifndef TK_ISA
#error "compile with -DTK_ISA=portable, avx2, avx512 or amx"
#endif

#include "cpu/linear/kernels.h"

#include "cpu/engine/engines.h"
#include "cpu/linear/backward.h"
#include "cpu/linear/forward.h"
#include "cpu/linear/steps.h"

namespace tk::cpu::TK_ISA {

namespace {

size_t forward_workspace(const LinearForwardParams& p, const Workers& workers) {
  return largest_workspace(p.dtype, false, [&](auto engine) {
    Arena arena;
    lay_out_forward<decltype(engine)>(p, workers.count, arena);
    return arena.used;
  });
}

void run_forward(const LinearForwardParams& p, const Workers& workers, void* memory) {
  with_engine(p.dtype, false, [&](auto engine) {
    return forward<decltype(engine)>(p, workers, Arena{static_cast<char*>(memory)});
  });
}

// The gradient of a decay sums terms that cancel: products of operands rounded to bfloat16 would
// not do. Engines read rows of any dtype.
DType backward_precision(const LinearBackwardParams& p) {
  return p.dlog_decay && p.dtype == DType::kBFloat16 ? DType::kFloat16 : p.dtype;
}

size_t backward_workspace(const LinearBackwardParams& p, const Workers& workers) {
  return largest_workspace(backward_precision(p), false, [&](auto engine) {
    Arena arena;
    lay_out_backward<decltype(engine)>(p, workers.count, arena);
    return arena.used;
  });
}

void run_backward(const LinearBackwardParams& p, const Workers& workers, void* memory) {
  with_engine(backward_precision(p), false, [&](auto engine) {
    return backward<decltype(engine)>(p, workers, Arena{static_cast<char*>(memory)});
  });
}

size_t steps_workspace(const LinearForwardParams& p, const Workers& workers) {
  return p.dtype == DType::kFloat64 ? count_steps_workspace<double>(p, workers)
                                    : count_steps_workspace<float>(p, workers);
}

void steps(const LinearForwardParams& p, const Workers& workers, void* memory) {
  const Arena arena{static_cast<char*>(memory)};
  p.dtype == DType::kFloat64 ? run_steps<double>(p, workers, arena)
                             : run_steps<float>(p, workers, arena);
}

}  // namespace

const LinearKernels kLinearKernels = {&forward_workspace, &run_forward,     &backward_workspace,
                                      &run_backward,      &steps_workspace, &steps};

}  // namespace tk::cpu::TK_ISA
