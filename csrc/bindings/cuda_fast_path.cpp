// Fast path of the CUDA kernels: calls them without torch's dispatcher, which takes longer than to
// launch them. transformer_kernels/backends/native/cuda.py calls these functions if nothing may
// intercept an operator. For an unsupported call they return the reason, with nothing launched or
// raised; the call then runs through cuda_operators.cpp.
#include "bindings/cuda_tensors.h"
#include "bindings/device_guard.h"
#include "bindings/fast_path/direct_call.h"
#include "bindings/fast_path/functions.h"
#include "cuda/dispatch.h"

namespace tk {

namespace {

using namespace direct;
using cuda::LaunchArgs;
using cuda::OnDevice;

// A dense call without a block mask.
struct CudaCall : DirectCall {
  Device device;

  explicit CudaCall(dlpack::Device at)
      : DirectCall(at),
        device{
            at.type == dlpack::kCpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(),
            at.id} {}

  Reason read(PyObject* const* args, Problem& p) {
    Reason reason = DirectCall::read(args, p);
    if (!reason.empty()) return reason;
    if (layout.kind != LayoutKind::kDense) return "a cache or packed sequences";
    if (block_mask_shape(p, options) || options.selected) return "a block mask";
    if (p.D != p.D_v) return "v has another width than q";
    const bool have = has_adjacent_columns(inputs.q) && has_adjacent_columns(inputs.k) &&
                      has_adjacent_columns(inputs.v);
    return have ? Reason() : kStrided;
  }

  // Launches a pass with the workspace that it asks for.
  template <typename Params, typename Bytes, typename Launch>
  PyObject* launch(const Params& params, const Bytes& workspace_of, const Launch& launch) const {
    return run_unlocked([&]() -> Reason {
      const OnDevice on(device);
      const LaunchArgs args = cuda::launch_args(layout, options, on.stream());
      const Tensor scratch = cuda::workspace(workspace_of(params, args), device);
      launch(params, args, scratch.data_ptr());
      return {};
    });
  }

  static inline const Reason kStrided = "a tensor whose rows are not contiguous";
};

// Further arguments: o, row_stats.
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, 8)) return nullptr;
  ForwardParams params{};
  CudaCall call(device_of(args[0]));
  View o, row_stats;
  Reason reason = call.read(args, params);
  if (reason.empty()) {
    const bool read_all = call.reader.read(args[6], o) && call.reader.read(args[7], row_stats);
    reason = read_all ? set_outputs(params, call.options, o, row_stats, {}) : kUnread;
  }
  if (reason.empty() && !has_adjacent_columns(o)) reason = CudaCall::kStrided;
  if (!reason.empty()) return declined(reason);
  return call.launch(params, &cuda::forward_workspace, &cuda::forward);
}

// Further arguments: o, row_stats, do, dq, dk, dv, deterministic.
PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!count_is(count, 13)) return nullptr;
  BackwardParams params{};
  CudaCall call(device_of(args[0]));
  BackwardTensors x;
  Reason reason = call.read(args, params);
  if (reason.empty()) {
    const Reader& reader = call.reader;
    const bool read_all = reader.read(args[6], x.o) && reader.read(args[7], x.row_stats) &&
                          reader.read_input(args[8], x.d_o) && reader.read(args[9], x.dq) &&
                          reader.read(args[10], x.dk) && reader.read(args[11], x.dv);
    reason = read_all ? set_tensors(params, call.options, x) : kUnread;
  }
  for (const View* rows : {&x.o, &x.d_o, &x.dq, &x.dk, &x.dv}) {
    if (reason.empty() && !has_adjacent_columns(*rows)) reason = CudaCall::kStrided;
  }
  if (!reason.empty()) return declined(reason);
  const bool deterministic = args[12] == Py_True;
  return call.launch(params, &cuda::backward_workspace,
                     [&](const BackwardParams& p, const LaunchArgs& launch, void* workspace) {
                       cuda::backward(p, launch, workspace, deterministic);
                     });
}

PyMethodDef methods[] = {
    {"cuda_forward", as_method(&forward), METH_FASTCALL, nullptr},
    {"cuda_backward", as_method(&backward), METH_FASTCALL, nullptr},
};

}  // namespace

}  // namespace tk

PyObject* tk_cuda_functions() {
  tk::direct::find_torch();
  return Py_BuildValue("(NN)", PyCFunction_New(&tk::methods[0], nullptr),
                       PyCFunction_New(&tk::methods[1], nullptr));
}
