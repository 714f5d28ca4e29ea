#include "cpu/driver/linear.h"

#include "common/workspace.h"
#include "cpu/driver/dense.h"
#include "cpu/driver/isa_dispatch.h"

namespace tk {

namespace {

template <typename Params>
void run(size_t (*workspace_size)(const Params&, const cpu::Workers&),
         void (*kernel)(const Params&, const cpu::Workers&, void*), const Params& params) {
  const cpu::Workers threads = workers();
  const Workspace workspace(workspace_size(params, threads));
  kernel(params, threads, workspace.data());
}

}  // namespace

void run_linear_forward(const LinearForwardParams& params) {
  const cpu::LinearKernels& kernels = cpu::linear_kernels();
  run(kernels.forward_workspace, kernels.forward, params);
}

void run_linear_backward(const LinearBackwardParams& params) {
  const cpu::LinearKernels& kernels = cpu::linear_kernels();
  run(kernels.backward_workspace, kernels.backward, params);
}

void run_linear_steps(const LinearForwardParams& params) {
  const cpu::LinearKernels& kernels = cpu::linear_kernels();
  run(kernels.steps_workspace, kernels.steps, params);
}

void run_delta_forward(const DeltaForwardParams& params) {
  const cpu::DeltaKernels& kernels = cpu::delta_kernels();
  run(kernels.forward_workspace, kernels.forward, params);
}

void run_delta_backward(const DeltaBackwardParams& params) {
  const cpu::DeltaKernels& kernels = cpu::delta_kernels();
  run(kernels.backward_workspace, kernels.backward, params);
}

void run_delta_steps(const DeltaForwardParams& params) {
  const cpu::DeltaKernels& kernels = cpu::delta_kernels();
  run(kernels.steps_workspace, kernels.steps, params);
}

}  // namespace tk
