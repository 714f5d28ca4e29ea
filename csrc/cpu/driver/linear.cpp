#include "cpu/driver/linear.h"

#include "common/workspace.h"
#include "cpu/driver/dense.h"
#include "cpu/driver/isa_dispatch.h"

namespace tk {

void run_linear_forward(const LinearForwardParams& params) {
  const cpu::LinearKernels& kernels = cpu::linear_kernels();
  const cpu::Workers threads = workers();
  const Workspace workspace(kernels.forward_workspace(params, threads));
  kernels.forward(params, threads, workspace.data());
}

void run_linear_backward(const LinearBackwardParams& params) {
  const cpu::LinearKernels& kernels = cpu::linear_kernels();
  const cpu::Workers threads = workers();
  const Workspace workspace(kernels.backward_workspace(params, threads));
  kernels.backward(params, threads, workspace.data());
}

void run_linear_steps(const LinearForwardParams& params) {
  const cpu::LinearKernels& kernels = cpu::linear_kernels();
  const cpu::Workers threads = workers();
  const Workspace workspace(kernels.steps_workspace(params, threads));
  kernels.steps(params, threads, workspace.data());
}

}  // namespace tk
