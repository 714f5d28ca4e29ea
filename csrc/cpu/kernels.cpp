// The kernels of one instruction set. setup.py compiles this file once for each, with TK_ISA naming
// it: the same algorithm over wider registers.
#ifndef TK_ISA
#error "compile with -DTK_ISA=portable, avx2 or avx512"
#endif

#include "kernels.h"

#include "backward.h"
#include "forward.h"
#include "summary.h"

#define TK_STRINGIFY(x) #x
#define TK_NAME(x) TK_STRINGIFY(x)

namespace tk::cpu::TK_ISA {

namespace {

void run_forward(const ForwardParams& p, const Workers& workers, void* workspace) {
  const Arena arena{static_cast<char*>(workspace)};
  p.dtype == DType::kFloat64 ? forward<double>(p, workers, arena)
                             : forward<float>(p, workers, arena);
}

void run_backward(const BackwardParams& p, const Workers& workers, void* workspace) {
  const Arena arena{static_cast<char*>(workspace)};
  p.dtype == DType::kFloat64 ? backward<double>(p, workers, arena)
                             : backward<float>(p, workers, arena);
}

template <typename Real>
size_t count_forward(const ForwardParams& p, const Workers& workers) {
  Arena arena;
  lay_out_forward<Real>(p, workers.count, arena);
  return arena.used;
}

template <typename Real>
size_t count_backward(const BackwardParams& p, const Workers& workers) {
  Arena arena;
  const BackwardWorkspace<Real> w = lay_out_backward<Real>(p, workers.count, arena);
  if (p.dbias.data) lay_out_bias_gradient(p, w, workers.count, arena);
  return arena.used;
}

size_t forward_workspace(const ForwardParams& p, const Workers& workers) {
  return p.dtype == DType::kFloat64 ? count_forward<double>(p, workers)
                                    : count_forward<float>(p, workers);
}

size_t backward_workspace(const BackwardParams& p, const Workers& workers) {
  return p.dtype == DType::kFloat64 ? count_backward<double>(p, workers)
                                    : count_backward<float>(p, workers);
}

}  // namespace

const Kernels kKernels = {TK_NAME(TK_ISA), &summarize,          &forward_workspace,
                          &run_forward,    &backward_workspace, &run_backward};

}  // namespace tk::cpu::TK_ISA
