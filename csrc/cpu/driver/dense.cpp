#include "cpu/driver/dense.h"

#include <vector>

#include "common/workspace.h"
#include "cpu/driver/isa_dispatch.h"
#include "cpu/driver/live_keys.h"

namespace tk {

namespace {

// `live` owns the data of problem.live_keys.
void set_live_keys(Problem& problem, std::vector<uint8_t>& live) {
  live = find_live_keys(problem);
  problem.live_keys = live.empty() ? nullptr : live.data();
}

// A stride of 0 means that all batch entries, or all heads, share the block mask.
void write_block_mask(const Problem& p, const cpu::Kernels& kernels, cpu::Workers threads) {
  const int64_t* const stride = p.mask.block_mask_stride;
  const int64_t B = stride[0] == 0 ? 1 : p.B, H = stride[1] == 0 ? 1 : p.H_q;
  kernels.fill_block_mask(p.mask, B, H, p.M, p.N, threads);
}

size_t lse_bytes(const Problem& p) {
  const size_t bytes = p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return static_cast<size_t>(p.B * p.H_q * p.M) * bytes;
}

}  // namespace

void run_forward(ForwardParams& params) {
  std::vector<uint8_t> live;
  set_live_keys(params, live);
  const cpu::Kernels& kernels = cpu::kernels();
  const cpu::Workers threads = workers();
  if (params.mask.block_mask) write_block_mask(params, kernels, threads);
  const size_t bytes = kernels.forward_workspace(params, threads);
  const Workspace workspace(bytes + (params.lse ? 0 : lse_bytes(params)));
  if (!params.lse) params.lse = static_cast<char*>(workspace.data()) + bytes;
  kernels.forward(params, threads, workspace.data());
}

void run_backward(BackwardParams& params) {
  std::vector<uint8_t> live;
  set_live_keys(params, live);
  const cpu::Kernels& kernels = cpu::kernels();
  const cpu::Workers threads = workers();
  const Workspace workspace(kernels.backward_workspace(params, threads));
  kernels.backward(params, threads, workspace.data());
}

}  // namespace tk
