// The kernels of the gated delta rule for one instruction set. The build compiles this file once
// per instruction set, with TK_ISA as the name of the namespace.
#ifndef TK_ISA
#error "compile with -DTK_ISA=portable, avx2, avx512 or amx"
#endif

#include "cpu/delta/kernels.h"

#include "cpu/delta/backward.h"
#include "cpu/delta/forward.h"
#include "cpu/delta/steps.h"
#include "cpu/engine/engines.h"

namespace tk::cpu::TK_ISA {

namespace {

// The state feeds back into every later token, and gradients sum terms that cancel: products of
// operands rounded to bfloat16 would not do. Engines read rows of any dtype.
DType precision(const DeltaProblem& p) {
  return p.dtype == DType::kBFloat16 ? DType::kFloat16 : p.dtype;
}

size_t forward_workspace(const DeltaForwardParams& p, const Workers& workers) {
  return largest_workspace(precision(p), false, [&](auto engine) {
    Arena arena;
    lay_out_delta_forward<decltype(engine)>(p, workers.count, arena);
    return arena.used;
  });
}

void run_forward(const DeltaForwardParams& p, const Workers& workers, void* memory) {
  with_engine(precision(p), false, [&](auto engine) {
    return delta_forward<decltype(engine)>(p, workers, Arena{static_cast<char*>(memory)});
  });
}

size_t backward_workspace(const DeltaBackwardParams& p, const Workers& workers) {
  return largest_workspace(precision(p), false, [&](auto engine) {
    Arena arena;
    lay_out_delta_backward<decltype(engine)>(p, workers.count, arena);
    return arena.used;
  });
}

void run_backward(const DeltaBackwardParams& p, const Workers& workers, void* memory) {
  with_engine(precision(p), false, [&](auto engine) {
    return delta_backward<decltype(engine)>(p, workers, Arena{static_cast<char*>(memory)});
  });
}

size_t steps_workspace(const DeltaForwardParams& p, const Workers& workers) {
  return p.dtype == DType::kFloat64 ? count_delta_steps<double>(p, workers)
                                    : count_delta_steps<float>(p, workers);
}

void steps(const DeltaForwardParams& p, const Workers& workers, void* memory) {
  const Arena arena{static_cast<char*>(memory)};
  p.dtype == DType::kFloat64 ? run_delta_steps<double>(p, workers, arena)
                             : run_delta_steps<float>(p, workers, arena);
}

}  // namespace

const DeltaKernels kDeltaKernels = {&forward_workspace, &run_forward,     &backward_workspace,
                                    &run_backward,      &steps_workspace, &steps};

}  // namespace tk::cpu::TK_ISA
