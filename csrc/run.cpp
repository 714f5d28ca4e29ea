#include "run.h"

#include <vector>

#include "cpu/dispatch.h"
#include "key_use.h"
#include "memory.h"

namespace tk {

namespace {

// The flags live in `used`.
void set_used_keys(Problem& problem, std::vector<uint8_t>& used) {
  used = used_keys(problem);
  problem.key_used = used.empty() ? nullptr : used.data();
}

size_t lse_bytes(const Problem& p) {
  const size_t bytes = p.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return static_cast<size_t>(p.B * p.H_q * p.M) * bytes;
}

}  // namespace

Strided strided(const View& x) {
  Strided s{x.data, {}};
  for (int64_t d = 0; d < 4; ++d) s.stride[d] = x.size[d] == 1 ? 0 : x.stride[d];
  return s;
}

bool set_tensors(Problem& p, const View& q, const View& k, const View& v) {
  p.dtype = q.dtype;
  p.q = strided(q), p.k = strided(k), p.v = strided(v);
  p.B = q.size[0], p.H_q = q.size[1], p.M = q.size[2], p.D = q.size[3];
  p.H_kv = k.size[1], p.N = k.size[2], p.D_v = v.size[3];
  p.lse_stride = p.M;
  return k.size[0] == p.B && v.size[0] == p.B && v.size[1] == p.H_kv && v.size[2] == p.N &&
         k.size[3] == p.D && p.H_kv > 0 && p.H_q % p.H_kv == 0 && k.dtype == q.dtype &&
         v.dtype == q.dtype;
}

void run_forward(ForwardParams& params) {
  std::vector<uint8_t> used;
  set_used_keys(params, used);
  const cpu::Kernels& kernels = cpu::kernels();
  const cpu::Workers threads = workers();
  const size_t bytes = kernels.forward_workspace(params, threads);
  const Workspace workspace(bytes + (params.lse ? 0 : lse_bytes(params)));
  if (!params.lse) params.lse = static_cast<char*>(workspace.data()) + bytes;
  kernels.forward(params, threads, workspace.data());
}

void run_backward(BackwardParams& params) {
  std::vector<uint8_t> used;
  set_used_keys(params, used);
  const cpu::Kernels& kernels = cpu::kernels();
  const cpu::Workers threads = workers();
  const Workspace workspace(kernels.backward_workspace(params, threads));
  kernels.backward(params, threads, workspace.data());
}

}  // namespace tk
