// The kernels of the convolution for one instruction set. The build compiles this file once per
// instruction set, with TK_ISA as the name of the namespace.
#ifndef TK_ISA
#error "compile with -DTK_ISA=portable, avx2, avx512 or amx"
#endif

#include "cpu/conv/kernels.h"

#include "cpu/conv/passes.h"

namespace tk::cpu::TK_ISA {

namespace {

// run<axis, Real>() with those of the problem.
template <typename Run>
void dispatch(const ConvProblem& p, Run&& run) {
  const bool wide = p.dtype == DType::kFloat64;
  if (axis_of(p) == Axis::kChannels) {
    wide ? run.template operator()<Axis::kChannels, double>()
         : run.template operator()<Axis::kChannels, float>();
  } else {
    wide ? run.template operator()<Axis::kTokens, double>()
         : run.template operator()<Axis::kTokens, float>();
  }
}

size_t workspace(const ConvProblem& p, const Workers& workers) {
  Arena arena;
  dispatch(p, [&]<Axis kAxis, typename Real>() { lay_out<kAxis, Real>(p, workers.count, arena); });
  return arena.used;
}

void run_forward(const ConvForwardParams& p, const Workers& workers, void* memory) {
  dispatch(p, [&]<Axis kAxis, typename Real>() {
    forward<kAxis, Real>(p, workers, Arena{static_cast<char*>(memory)});
  });
}

void run_backward(const ConvBackwardParams& p, const Workers& workers, void* memory) {
  dispatch(p, [&]<Axis kAxis, typename Real>() {
    backward<kAxis, Real>(p, workers, Arena{static_cast<char*>(memory)});
  });
}

}  // namespace

const ConvKernels kConvKernels = {&workspace, &run_forward, &run_backward};

}  // namespace tk::cpu::TK_ISA
