#include "cpu/driver/dense.h"

#include <vector>

#include "common/mask.h"
#include "common/workspace.h"
#include "cpu/driver/isa_dispatch.h"
#include "cpu/driver/relative_gradient.h"

namespace tk {

namespace {

// A stride of 0 means that all batch entries, or all heads, share the block mask.
void write_block_mask(const Problem& p, const cpu::Kernels& kernels, cpu::Workers threads) {
  const int64_t* const stride = p.mask.block_mask_stride;
  const int64_t B = stride[0] == 0 ? 1 : p.B, H = stride[1] == 0 ? 1 : p.H_q;
  kernels.fill_block_mask(p.mask, B, H, p.M, p.N, threads);
}

// Sets p.live_keys; the returned vector owns them.
std::vector<uint8_t> find_live_keys(Problem& p, const cpu::Kernels& kernels, cpu::Workers threads) {
  if (!p.mask.block_mask) return {};
  std::vector<uint8_t> live(static_cast<size_t>(live_keys_size(p)));
  set_live_keys(p, live.data());
  kernels.fill_live_keys(p, live.data(), threads);
  return live;
}

size_t lse_bytes(const Problem& p) {
  const size_t bytes = p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return static_cast<size_t>(p.B * p.H_q * p.M) * bytes;
}

}  // namespace

void run_forward(ForwardParams& params) {
  const cpu::Kernels& kernels = cpu::kernels(params.dtype);
  const cpu::Workers threads = workers();
  if (params.mask.block_mask) write_block_mask(params, kernels, threads);
  const std::vector<uint8_t> live = find_live_keys(params, kernels, threads);
  const size_t bytes = kernels.forward_workspace(params, threads);
  const Workspace workspace(bytes + (params.lse ? 0 : lse_bytes(params)));
  if (!params.lse) params.lse = static_cast<char*>(workspace.data()) + bytes;
  kernels.forward(params, threads, workspace.data());
}

void run_backward(BackwardParams& params) {
  const cpu::Kernels& kernels = cpu::kernels(params.dtype);
  const cpu::Workers threads = workers();
  const std::vector<uint8_t> live = find_live_keys(params, kernels, threads);
  const DistanceSums sums = allocate_distance_sums({&params, 1});
  const Workspace workspace(kernels.backward_workspace(params, threads));
  kernels.backward(params, threads, workspace.data());
  sum_distances(params, {&params, 1});
}

}  // namespace tk
